"""Judging answers to request-level ops: each way of being wrong breaks the law that names it, and a
wrong answer leaves the model as it was.

Leaves out what the model remembers after a right answer: test_serving_following.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvcore.models import Done, Lent, Mismatch, Outcome, Raised, Refused, Served, ops
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    Flush,
    LoadPrefix,
    Prefill,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
    Speculate,
    Trim,
)
from kvcore.models.texts import stamps

SIZE = 4


def at(*pages: int) -> tuple[int, ...]:
    """The slots of pages; page 0 is none."""
    return tuple(page * SIZE + i if page else 0 for page in pages for i in range(SIZE))


# Twelve pages a side of 4 tokens, a window of two pages, and the lowest free pages first. So
# request 1, of two pages and a token, has pages 1, 2 and 3 of both sides, and page 3 is free again
# when it has finished. Request 2 has the same front and a page more, or shares nothing with it.
TEXT = ((1, 9),)
LONGER = ((1, 13),)
RUN = (Admit(1, TEXT, 5),)
CACHED = (*RUN, Finish(1))
SHARED = (*CACHED, Admit(2, LONGER, 5))
COPIED = (*CACHED, SavePrefix(1, TEXT))
LOST = (*COPIED, Evict(100, 0))
LOADING = (*LOST, LoadPrefix(1, 1))
# A load of a third page, behind two that are cached and live.
BESIDE = (Admit(1, LONGER, 5), Finish(1), SavePrefix(1, LONGER), Evict(4, 0), LoadPrefix(1, 1))
# Request 2 holds five pages of which the first three are tombstones, and request 3 has computed
# these again, too short to be served from what is cached.
RECOVERED = (Admit(1, ((1, 21),), 5), Slide((1,)), Finish(1), Admit(2, ((1, 21),), 5, 1),
             Admit(3, ((1, 13),), 5))  # fmt: skip
# Four pages of one branch, of which only the last two must be live to be served.
BRANCH = (Admit(1, ((1, 17),), 5), Finish(1))
# The first two are tombstones, under a lock of the whole branch.
BARE = (*BRANCH, Admit(2, ((1, 17),), 5, 1), Evict(0, 8))
WAITING = (Admit(1, ((1, 17),), 5), RetractRequest(1, True))
GROUP = (ops.GroupBegin(),)
# Nothing is free on either side, and two pages of the cache can be evicted.
FULL = (*CACHED, Admit(2, ((2, 40),), 5))


@dataclass(frozen=True)
class Wrong:
    """An answer to ``op`` that breaks ``law``: the right one with ``changes``, or ``answer``. The
    pages to blame are ``full`` and ``swa``."""

    what: str
    before: tuple[Op, ...]
    op: Op
    law: str
    changes: dict[str, Any] | None = None
    answer: Outcome | None = None
    full: tuple[int, ...] | None = None
    swa: tuple[int, ...] | None = None


def but(**changes: Any) -> dict[str, Any]:
    """What differs from the right answer."""
    return changes


WRONG = [
    Wrong("an error", RUN, Slide((1,)), "raises", answer=Raised("ValueError", "no")),
    Wrong("an index error", (), RUN[0], "bounds", answer=Raised("IndexError", "no")),
    Wrong("a refused group", (), GROUP[0], "layout", answer=Refused()),
    Wrong("slots of an allocator", (), RUN[0], "layout", answer=Lent(at(1), at(1))),
    Wrong("nothing for a request", (), RUN[0], "layout", answer=Done()),
    Wrong("nothing for a free", RUN, Abort(1), "layout", answer=Done()),
    Wrong("a refused free", RUN, Finish(1), "layout", answer=Refused()),
    Wrong("a refused flush", CACHED, Flush(), "layout", answer=Refused()),
    Wrong("slots for a slide", RUN, Slide((1,)), "layout", but(slots=at(5), peers=at(5))),
    Wrong("a row for a trim", (*RUN, Speculate(1, 2)), Trim(1, 1), "layout", but(request=2)),
    # Room.
    Wrong("None where there is room", (), RUN[0], "L7", answer=Refused()),
    Wrong("None where eviction makes room", FULL, Admit(3, ((3, 8),), 5), "L7", answer=Refused()),
    Wrong("None where a page goes on", RUN, DecodeStep((1,)), "L7", answer=Refused()),
    Wrong("slots where there is no room", FULL, Admit(3, ((3, 9),), 5), "L7",
          answer=Served(request=2, slots=at(1, 2, 3)[:9], peers=at(1, 2, 3)[:9])),
    Wrong("evicted pages lent in a group", (*FULL, *GROUP), Admit(3, ((3, 4),), 5), "L7",
          answer=Served(request=2, slots=at(1), peers=at(1), evicted=(2, 1))),
    # Slots.
    Wrong("too few slots", (), RUN[0], "layout", but(slots=at(1, 2), peers=at(1, 2))),
    Wrong("fewer peers than slots", (), RUN[0], "layout", but(peers=at(1, 2))),
    Wrong("slots out of order", (), Admit(1, ((1, 4),), 5), "layout", but(slots=(5, 4, 6, 7)),
          full=(1,)),
    Wrong("a page in use", RUN, Admit(2, ((2, 4),), 5), "L1", but(slots=at(2)), full=(2,)),
    Wrong("a page of the cache", CACHED, Admit(2, ((2, 4),), 5), "L1", but(slots=at(2)),
          full=(2,)),
    Wrong("a page of a load", LOADING, Admit(2, ((2, 4),), 5), "L1", but(slots=at(1)), full=(1,)),
    Wrong("a page that waits for the group's end", (*RUN, *GROUP, Abort(1)),
          Admit(2, ((2, 4),), 5), "L6", but(slots=at(1)), full=(1,)),
    Wrong("an SWA page in use", RUN, Admit(2, ((2, 4),), 5), "L4", but(peers=at(1)), swa=(1,)),
    Wrong("no peers", (), Admit(1, ((1, 4),), 5), "L4", but(peers=at(0))),
    Wrong("another slot of the page", RUN, DecodeStep((1,)), "layout", but(slots=(14,)),
          full=(3,)),
    Wrong("a draft without a peer", RUN, Speculate(1, 1), "L4", but(peers=(0,)), full=(3,)),
    Wrong("slots of another request", (*RUN, Admit(2, ((2, 9),), 5)), DecodeStep((1, 2)),
          "layout", but(slots=(25, 13), peers=(25, 13))),
    Wrong("a whole prompt for a chunk", (), Admit(1, TEXT, 5, 4), "layout",
          but(slots=at(1, 2), peers=at(1, 2))),
    Wrong("a chunk beyond the prompt", (Admit(1, TEXT, 5, 4),), Prefill(1, 9), "layout",
          but(slots=at(2, 3), peers=at(2, 3))),
    Wrong("a row in use", RUN, Admit(2, ((2, 4),), 5), "L1", but(request=1)),
    Wrong("no row", (), RUN[0], "L1", but(request=0)),
    # Matches.
    Wrong("a match too short", CACHED, Admit(2, LONGER, 5), "tree", but(matched=4)),
    Wrong("a match of all tokens", CACHED, Admit(2, ((1, 8),), 5), "tree", but(matched=8)),
    Wrong("other slots of a match", CACHED, Admit(2, LONGER, 5), "tree",
          but(prefix_slots=at(2, 1)), full=(1, 2)),
    Wrong("slots without peers in a match", CACHED, Admit(2, LONGER, 5), "L4",
          but(prefix_peers=at(1, 0)), full=(2,), swa=(2,)),
    Wrong("peers of half a match", CACHED, Admit(2, LONGER, 5), "layout",
          but(prefix_peers=at(1))),
    Wrong("another K in a match", CACHED, Admit(2, LONGER, 5), "stamps",
          but(prefix_stamps=((9,) * 8, tuple(stamps(LONGER, 0, 8)))), full=(1,), swa=()),
    Wrong("another SWA K in a match", CACHED, Admit(2, LONGER, 5), "stamps",
          but(prefix_stamps=(tuple(stamps(LONGER, 0, 8)), (9,) * 8)), full=(1,), swa=(1,)),
    Wrong("the contents of half a match", CACHED, Admit(2, LONGER, 5), "layout",
          but(prefix_stamps=((9,) * 4, (9,) * 4))),
    Wrong("peers of a tombstone", BARE, Admit(3, ((1, 17),), 5), "L4",
          but(prefix_peers=at(1, 2, 3, 4)), full=(1,)),
    Wrong("another K in a recovered page", RECOVERED, CacheUnfinished(3), "stamps",
          but(prefix_stamps=(tuple(stamps(LONGER, 0, 12)), (9,) * 12)), full=(1,)),
    Wrong("a request's own slots after caching", (*CACHED, Admit(2, ((1, 5),), 6), *GROUP,
          DecodeStep((2,))), CacheUnfinished(2), "tree", but(matched=8)),
    Wrong("pages that were not cached", RUN, CacheUnfinished(1), "tree", but(matched=0)),
    Wrong("a copy of too much", CACHED, SavePrefix(1, LONGER), "tree", but(matched=12)),
    # Evictions.
    Wrong("nothing evicted where room lacks", FULL, Admit(3, ((3, 8),), 5), "tree",
          but(evicted=())),
    Wrong("too little evicted", FULL, Admit(3, ((3, 8),), 5), "tree", but(evicted=(2,))),
    Wrong("too little evicted for the asking", BRANCH, Evict(8, 0), "tree", but(evicted=(4,))),
    Wrong("too few peers evicted for the asking", BRANCH, Evict(0, 8), "tree",
          but(evicted=(4,), tombstoned=())),
    Wrong("evictions where nothing lacks", CACHED, Admit(2, ((2, 4),), 5), "tree",
          but(evicted=(2,)), full=(2,)),
    Wrong("tombstones where nothing lacks", BRANCH, Admit(2, ((2, 4),), 5), "tree",
          but(tombstoned=(1,)), full=(1,)),
    Wrong("tombstones where only full pages lack", BRANCH, Evict(4, 0), "tree",
          but(evicted=(4,), tombstoned=(1,)), full=(1,)),
    Wrong("evictions by a slide", (*CACHED, Admit(2, ((2, 4),), 5)), Slide((2,)), "tree",
          but(evicted=(2,)), full=(2,)),
    Wrong("tombstones by an abort", SHARED, Abort(2), "tree", but(tombstoned=(1,)), full=(1,)),
    Wrong("evictions by a finish", SHARED, Finish(2), "tree", but(evicted=(2,)), full=(2,)),
    Wrong("evictions by caching", (*CACHED, Admit(2, ((2, 4),), 5)), CacheUnfinished(2), "tree",
          but(evicted=(2,)), full=(2,)),
    Wrong("evictions by a copy", CACHED, SavePrefix(1, TEXT), "tree", but(evicted=(2,)),
          full=(2,)),
    Wrong("a page evicted that is not cached", BRANCH, Evict(4, 0), "tree", but(evicted=(4, 9)),
          full=(9,)),
    Wrong("a page evicted twice", BRANCH, Evict(8, 0), "tree", but(evicted=(4, 4)), full=(4,)),
    Wrong("a request's page evicted", RUN, Evict(4, 0), "tree", but(evicted=(1,)),
          full=(1,)),
    Wrong("a locked page evicted", SHARED, Evict(4, 0), "tree", but(evicted=(2,)), full=(2,)),
    Wrong("what an op matches evicted for it", (*CACHED, Admit(2, ((2, 4),), 5), Finish(2)),
          Admit(3, ((1, 9), (3, 31)), 5), "tree", but(evicted=(2,)), full=(2,)),
    Wrong("a page evicted before the one behind it", BRANCH, Evict(4, 0), "tree",
          but(evicted=(3,)), full=(3, 4)),
    Wrong("the window of a lock tombstoned", SHARED, Evict(0, 4), "tree",
          but(evicted=(), tombstoned=(2,)), full=(2,)),
    Wrong("the window of a match tombstoned for it", (*CACHED, Admit(2, ((2, 4),), 5), Finish(2)),
          Admit(3, ((1, 9), (3, 31)), 5), "tree", but(tombstoned=(2,)), full=(2,)),
    Wrong("a page tombstoned that is not cached", BRANCH, Evict(0, 4), "tree",
          but(evicted=(), tombstoned=(9,)), full=(9,)),
    # Host copies.
    Wrong("a load from elsewhere", LOST, LoadPrefix(1, 1), "tree", but(matched=4)),
    Wrong("too few SWA slots for tombstones", LOST, LoadPrefix(1, 1), "layout",
          but(reloaded=at(9))),
    Wrong("a load without peers", LOST, LoadPrefix(1, 1), "L4", but(peers=at(0, 0))),
    Wrong("evictions by a load that arrives", LOADING, EndLoad(1), "tree", but(evicted=(1,)),
          full=(1,)),
    Wrong("a page that was never there gone with a load", LOADING, EndLoad(1, True), "tree",
          but(evicted=(1,)), full=(1,)),
    Wrong("a live page gone with a load", BESIDE, EndLoad(1, True), "tree", but(evicted=(2,)),
          full=(2,)),
    Wrong("a live page tombstoned by a load", BESIDE, EndLoad(1, True), "tree",
          but(tombstoned=(2,)), full=(2,)),
    Wrong("peers before the window of a resumed request", WAITING, ResumeRequest(1), "L4",
          but(peers=(*at(6, 7, 3, 4), 20)), full=(1,), swa=(6,)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.what)
def test_a_wrong_answer_breaks_the_law_that_names_it_and_changes_nothing(
    serve: Callable[..., Any], wrong: Wrong
) -> None:
    server = serve()
    server.do(*wrong.before)
    assert server.model.why_not(wrong.op) is None
    before = server.snapshot()
    answer = wrong.answer
    if wrong.changes is not None:
        right = server.answer(wrong.op)
        assert isinstance(right, Served)
        answer = msgspec.structs.replace(right, **wrong.changes)
        assert answer != right

    with pytest.raises(Mismatch) as caught:
        server.model.accept(wrong.op, answer)

    blamed = [clause for clause in caught.value.clauses if clause.law == wrong.law]
    assert blamed, caught.value
    assert wrong.full is None or any(clause.full_pages == wrong.full for clause in blamed)
    assert wrong.swa is None or any(clause.swa_pages == wrong.swa for clause in blamed)
    assert server.snapshot() == before

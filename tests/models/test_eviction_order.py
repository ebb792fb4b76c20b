"""Which pages a cache gives up: those that were used longest ago, and no more than were needed.

Pages of 4 tokens, and a window of two pages. `OLD` is cached before `NEW`, two pages each.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Mismatch, Refused, Served
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    LoadPrefix,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
)

OLD, NEW = ((1, 9),), ((2, 9),)
BOTH = (Admit(1, OLD, 5), Finish(1), Admit(2, NEW, 6), Finish(2))


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


def pages(server: Any, text: Any) -> list[int]:
    """The full pages of the cached front of a text."""
    model = server.model
    return [node.page.full for node in model.tree.path(model.keys(text))]


def takes(server: Any, op: Op, *, evicted: Any = (), tombstoned: Any = ()) -> None:
    server.model.accept(op, Served(evicted=tuple(evicted), tombstoned=tuple(tombstoned)))


def rejects(server: Any, op: Op, *, evicted: Any = (), tombstoned: Any = (), because: str) -> None:
    before = server.snapshot()
    with pytest.raises(Mismatch) as caught:
        takes(server, op, evicted=evicted, tombstoned=tombstoned)
    (clause,) = caught.value.clauses
    assert clause.law == "tree"
    assert because in clause.expected
    assert server.snapshot() == before


# The order of the full side.


def test_the_leaf_that_was_used_longest_ago_goes_first(server: Any) -> None:
    server.do(*BOTH)
    (_, old), (_, new) = pages(server, OLD), pages(server, NEW)
    rejects(server, Evict(4, 0), evicted=[new], because=f"full page {old} gone before")
    takes(server, Evict(4, 0), evicted=[old])


def test_a_page_that_becomes_a_leaf_is_next_if_it_is_older(server: Any) -> None:
    server.do(*BOTH)
    (first, old), (_, new) = pages(server, OLD), pages(server, NEW)
    wrong = [old, new]
    rejects(server, Evict(8, 0), evicted=wrong, because=f"full page {first} gone before")
    takes(server, Evict(8, 0), evicted=[old, first])


def test_bare_tombstones_go_with_the_last_page_below_them(server: Any) -> None:
    # Of four pages the first two are tombstones.
    server.do(Admit(1, ((1, 17),), 5), Slide((1,)), Finish(1), Admit(2, NEW, 6), Finish(2))
    front = pages(server, ((1, 17),))
    takes(server, Evict(8, 0), evicted=reversed(front))
    assert len(pages(server, NEW)) == 2


USES: dict[str, tuple[Op, ...]] = {
    "an admission": (*BOTH, Admit(3, OLD, 7), Abort(3)),
    "a finish": (Admit(1, OLD, 5), Admit(2, NEW, 6), Finish(2), Finish(1)),
    "caching": (Admit(1, OLD, 5), Admit(2, NEW, 6), Finish(2), CacheUnfinished(1), Abort(1)),
    "a copy": (*BOTH, SavePrefix(1, OLD)),
    "a resumption": (*BOTH[:2], Admit(3, OLD, 7), RetractRequest(3, True), *BOTH[2:],
                     ResumeRequest(3), Abort(3)),
    "a load": (*BOTH[:2], SavePrefix(1, OLD), Evict(8, 0), LoadPrefix(1, 1), *BOTH[2:],
               EndLoad(1)),
    "a load of the end": (*BOTH[:2], SavePrefix(1, OLD), Evict(4, 0), LoadPrefix(1, 1), *BOTH[2:],
                          EndLoad(1)),
}  # fmt: skip


@pytest.mark.parametrize("program", USES.values(), ids=USES.keys())
def test_a_use_moves_a_whole_path_behind_all_others(server: Any, program: tuple[Op, ...]) -> None:
    server.do(*program)
    old, new = pages(server, OLD), pages(server, NEW)
    assert len(old) == len(new) == 2
    rejects(server, Evict(4, 0), evicted=old[1:], because=f"full page {new[1]} gone before")
    rejects(server, Evict(8, 0), evicted=reversed(old), because=f"full page {new[1]} gone before")
    takes(server, Evict(8, 0), evicted=reversed(new))
    takes(server, Evict(8, 0), evicted=reversed(old))


NO_USES: dict[str, tuple[Op, ...]] = {
    "steps": (Admit(1, OLD, 5), CacheUnfinished(1), *BOTH[2:], DecodeStep((1,)), Slide((1,)),
              CacheUnfinished(1), Abort(1)),
    "a retraction": (*BOTH[:2], Admit(3, OLD, 7), *BOTH[2:], RetractRequest(3, False)),
    "a failed load": (*BOTH[:2], SavePrefix(1, OLD), Evict(0, 4), *BOTH[2:], LoadPrefix(1, 1),
                      EndLoad(1, failed=True)),
}  # fmt: skip


@pytest.mark.parametrize("program", NO_USES.values(), ids=NO_USES.keys())
def test_other_ops_use_nothing(server: Any, program: tuple[Op, ...]) -> None:
    server.do(*program)
    old, new = pages(server, OLD), pages(server, NEW)
    rejects(server, Evict(4, 0), evicted=new[1:], because="gone before")
    takes(server, Evict(4, 0), evicted=reversed(old[-1:]))


def test_an_admission_that_is_refused_uses_nothing(server: Any) -> None:
    server.do(*BOTH)
    op = Admit(3, ((1, 8), (3, 48)), 7)
    server.model.accept(op, Refused())
    old, new = pages(server, OLD), pages(server, NEW)
    rejects(server, Evict(4, 0), evicted=new[1:], because="gone before")
    takes(server, Evict(4, 0), evicted=old[1:])


# The order of the SWA side.


def test_the_peer_that_was_used_longest_ago_goes_first(server: Any) -> None:
    server.do(*BOTH)
    old, new = pages(server, OLD), pages(server, NEW)
    because = "gone before the peer of"
    rejects(server, Evict(0, 4), tombstoned=new[:1], because=because)
    rejects(server, Evict(0, 4), evicted=new[1:], because=because)
    rejects(server, Evict(0, 8), tombstoned=[old[0], new[0]], because=because)
    takes(server, Evict(0, 8), tombstoned=old[:1], evicted=reversed(old))


def test_a_locked_page_outside_of_windows_is_as_good_as_others(server: Any) -> None:
    server.do(Admit(1, ((1, 17),), 5), Finish(1), Admit(3, ((1, 17),), 7), *BOTH[2:])
    front, new = pages(server, ((1, 17),)), pages(server, NEW)
    rejects(server, Evict(0, 4), tombstoned=new[:1], because="gone before the peer of")
    takes(server, Evict(0, 8), tombstoned=front[:2])


# No more than needed.


def test_pages_that_were_used_together_may_go_together(server: Any) -> None:
    server.do(*BOTH)
    takes(server, Evict(4, 0), evicted=reversed(pages(server, OLD)))


@pytest.mark.parametrize("op", [Evict(4, 0), Evict(8, 0), Evict(0, 8), Evict(4, 4), Evict(4, 8)])
def test_a_page_more_than_needed_is_one_too_many(server: Any, op: Op) -> None:
    server.do(*BOTH)
    old, new = pages(server, OLD), pages(server, NEW)
    rejects(server, op, evicted=[*reversed(old), new[1]], because="no more evicted once")
    takes(server, op, evicted=reversed(old))


def test_a_tombstone_more_than_needed_is_one_too_many(server: Any) -> None:
    server.do(*BOTH)
    old, new = pages(server, OLD), pages(server, NEW)
    wrong = Evict(0, 8)
    rejects(
        server, wrong, evicted=reversed(old), tombstoned=new[:1], because="no more evicted once"
    )


def test_peers_that_went_for_the_full_side_count_for_the_other(server: Any) -> None:
    # What is locked is the oldest of all: its peers go after the full side has what it needs.
    server.do(Admit(1, ((1, 17),), 5), Finish(1), Admit(3, ((1, 17),), 7), *BOTH[2:])
    front, (first, last) = pages(server, ((1, 17),)), pages(server, NEW)
    went = [last, first]
    op, because = Evict(8, 8), "no more evicted once"
    rejects(server, op, evicted=went, tombstoned=front[:2], because=because)
    takes(server, Evict(8, 12), evicted=went, tombstoned=front[:1])


def test_an_admission_evicts_no_more_than_it_lacks(server: Any) -> None:
    server.do(*BOTH, Admit(3, ((3, 32),), 7))
    old, new = pages(server, OLD), pages(server, NEW)
    op = Admit(4, ((4, 4),), 8)
    slots = tuple(range(old[1] * 4, old[1] * 4 + 4))
    wrong = Served(request=2, slots=slots, peers=slots, evicted=(old[1], old[0], new[1]))
    with pytest.raises(Mismatch, match="no more evicted once"):
        server.model.accept(op, wrong)
    server.do(op)
    assert new == pages(server, NEW)

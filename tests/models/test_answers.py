"""Judging answers: a right one is followed, each way of being wrong breaks the law that names it,
and a wrong answer leaves the model as it was.

Leaves out what the model remembers after a right answer: test_following.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore.models import Contract, Done, Lent, Mismatch, Outcome, Raised, Refused, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op

SIZE = 4
FREE = ops.Alloc(1, 2), ops.Alloc(2, 2), ops.Free(1)
PENDING = ops.Alloc(1, 2), ops.Alloc(2, 2), ops.GroupBegin(), ops.Free(1)


def at(page: int, *offsets: int) -> tuple[int, ...]:
    """Slots of a page, all of them unless offsets are named."""
    return tuple(page * SIZE + offset for offset in offsets or range(SIZE))


NO_PEERS = (0,) * SIZE


@dataclass(frozen=True)
class Wrong:
    """An answer to ``op`` that breaks ``law``, and the pages to blame."""

    what: str
    before: tuple[Op, ...]
    op: Op
    answer: Outcome
    law: str
    full: tuple[int, ...] = ()
    swa: tuple[int, ...] = ()
    geometry: dict[str, Any] = field(default_factory=dict)


# With the bookkeeper's lowest-first free lists, rows 1 and 2 hold full and SWA pages 1, 2 and 3, 4.
WRONG = [
    Wrong("an error", (), ops.Alloc(1, 1), Raised("ValueError", "no"), "raises"),
    Wrong("an error on a free", FREE, ops.Free(2), Raised("KeyError", "no"), "raises"),
    Wrong("an index error", (), ops.Alloc(1, 1), Raised("IndexError", "no"), "bounds"),
    Wrong("a dead process", (), ops.Decode((2,)), Raised("ProcessDied", "-11"), "bounds"),
    Wrong("no slots", (), ops.Alloc(1, 1), Done(), "layout"),
    Wrong("no slots for a host copy", FREE, ops.LoadBack(9, 1, 1), Done(), "layout"),
    Wrong("slots for a free", FREE, ops.Free(2), Lent(()), "layout"),
    Wrong("a refused free", FREE, ops.Free(2), Refused(), "layout"),
    Wrong("a refused group", (), ops.GroupBegin(), Refused(), "layout"),
    Wrong("None where there is room", (), ops.Alloc(1, 8), Refused(), "L7"),
    Wrong("None for a decode into a page", (*FREE, ops.Extend(((5, 1),))), ops.Decode((5,)),
          Refused(), "L7"),
    Wrong("slots where there is no room", (), ops.Alloc(1, 9), Lent(at(1), at(1)), "L7"),
    Wrong("too few slots", (), ops.Alloc(1, 2), Lent(at(1), at(1)), "layout"),
    Wrong("too many slots", (), ops.Extend(((1, 3),)), Lent(at(1), at(1)), "layout"),
    Wrong("fewer peers than slots", (), ops.Alloc(1, 1), Lent(at(1), at(1)[:3]), "layout"),
    Wrong("slots out of order", (), ops.Alloc(1, 1), Lent(at(1, 0, 2, 1, 3), at(1)), "layout",
          full=(1,)),
    Wrong("slots that start inside a page", (), ops.Extend(((1, 2),)),
          Lent(at(1, 1, 2), at(1, 0, 1)), "layout", full=(1,)),
    Wrong("slots of two pages as one", (), ops.Extend(((1, 2),)),
          Lent((*at(1, 0), *at(2, 1)), at(1, 0, 1)), "layout", full=(1,)),
    Wrong("a new page where the last had room", (ops.Extend(((1, 2),)),), ops.Decode((1,)),
          Lent(at(2, 0), at(1, 2)), "layout", full=(1,)),
    Wrong("a slot of the last page lent before", (ops.Extend(((1, 2),)),), ops.Decode((1,)),
          Lent(at(1, 1), at(1, 2)), "layout", full=(1,)),
    Wrong("the peer of another offset", (ops.Extend(((1, 2),)),), ops.Decode((1,)),
          Lent(at(1, 2), at(1, 3)), "L4", full=(1,), swa=(1,)),
    Wrong("no peer inside a live page", (ops.Extend(((1, 2),)),), ops.Decode((1,)),
          Lent(at(1, 2), (0,)), "L4", full=(1,), swa=(1,)),
    Wrong("a peer inside a page before the tail", (ops.Extend(((1, 2),)),), ops.SwaTail(1, 2, 0),
          Lent(at(1, 2, 3), at(1, 2, 3)), "L4", full=(1,), swa=(1,)),
    Wrong("the padding page", (), ops.Alloc(1, 1), Lent(at(0), at(1)), "bounds", full=(0,)),
    Wrong("a page beyond the pool", (), ops.Alloc(1, 1), Lent(at(9), at(1)), "bounds", full=(9,)),
    Wrong("a negative page", (), ops.Alloc(1, 1), Lent(at(-1), at(1)), "bounds", full=(-1,)),
    Wrong("a page twice", (), ops.Alloc(1, 2), Lent(at(1) * 2, at(1) + at(2)), "L2", full=(1,)),
    Wrong("a page twice in a batch", (), ops.Extend(((1, 1), (2, 1))),
          Lent(at(1, 0) * 2, at(1, 0) + at(2, 0)), "L2", full=(1,)),
    Wrong("a page that waits in the group", PENDING, ops.Alloc(5, 1), Lent(at(2), at(5)), "L6",
          full=(2,)),
    Wrong("a page in use", FREE, ops.Alloc(5, 1), Lent(at(3), at(5)), "L1", full=(3,)),
    Wrong("the SWA padding page", (), ops.Alloc(1, 1), Lent(at(1), at(0)), "L4", swa=(0,)),
    Wrong("an SWA page beyond the pool", (), ops.Alloc(1, 1), Lent(at(1), at(9)), "bounds",
          swa=(9,)),
    Wrong("a negative SWA page", (), ops.Alloc(1, 1), Lent(at(1), at(-1)), "bounds", swa=(-1,)),
    Wrong("an SWA page twice", (), ops.Alloc(1, 2), Lent(at(1) + at(2), at(1) * 2), "L2",
          swa=(1,)),
    Wrong("an SWA page that waits in the group", PENDING, ops.Alloc(5, 1), Lent(at(5), at(2)),
          "L6", swa=(2,)),
    Wrong("an SWA page in use", FREE, ops.Alloc(5, 1), Lent(at(5), at(3)), "L4", swa=(3,)),
    Wrong("peers out of step", (), ops.Alloc(1, 1), Lent(at(1), at(1, 0, 1, 3, 2)), "L4",
          full=(1,), swa=(1,)),
    Wrong("peers on two SWA pages", (), ops.Alloc(1, 1),
          Lent(at(1), at(1, 0, 1) + at(2, 2, 3)), "L4", full=(1,), swa=(1,)),
    Wrong("stale peers before the tail", (), ops.SwaTail(1, 8, 4),
          Lent(at(1) + at(2), at(7) + at(1)), "L4", full=(1,), swa=(7,)),
    Wrong("no peers in the tail", (), ops.SwaTail(1, 8, 4), Lent(at(1) + at(2), NO_PEERS * 2),
          "L4", full=(2,), swa=(0,)),
    Wrong("peers for a full-only load-back", (), ops.LoadBack(1, 1, 0), Lent(at(1), at(1)), "L4",
          full=(1,), swa=(1,)),
    Wrong("a used page in one pool", (ops.Alloc(1, 1),), ops.Alloc(2, 1), Lent(at(1)), "L1",
          full=(1,), geometry={"swa_pages": 0}),
    Wrong("a relocation into the old pages", FREE, ops.Relocate(2),
          Lent(at(3) + at(4), at(1) + at(2)), "L1", full=(3, 4)),
    Wrong("a relocation without peers", FREE, ops.Relocate(2), Lent(at(1) + at(2), NO_PEERS * 2),
          "L4", full=(1, 2), swa=(0,)),
    Wrong("a relocation of half the row", FREE, ops.Relocate(2), Lent(at(1), at(1)), "layout"),
    Wrong("a relocation with fewer peers", FREE, ops.Relocate(2), Lent(at(1) + at(2), at(1)),
          "layout"),
    Wrong("a relocation refused where there is room", FREE, ops.Relocate(2), Refused(), "L7"),
    Wrong("peers beyond the tail", (), ops.SwaTail(1, 4, 2, 2), Lent(at(1), at(1)), "L4",
          full=(1,), swa=(1,)),
    Wrong("a page of peers beyond the tail", (), ops.SwaTail(1, 8, 4, 4),
          Lent(at(1) + at(2), at(1) + at(2)), "L4", full=(2,), swa=(2,)),
    Wrong("no peers before what lies beyond the tail", (), ops.SwaTail(1, 8, 4, 4),
          Lent(at(1) + at(2), NO_PEERS * 2), "L4", full=(1,), swa=(0,)),
    Wrong("a restore into a used page", (*FREE, ops.Retract(2, 1), ops.Alloc(5, 1)),
          ops.Restore(1, 6), Lent(at(1) + at(2), at(2) + at(3)), "L1", full=(1,)),
]  # fmt: skip

DEAD = ops.Alloc(1, 2), ops.Alloc(2, 2), ops.FreeSwa(1)
WRONG_LOAD_BACKS = [
    Wrong("None where there is room", DEAD, ops.LoadBackSwa(1), Refused(), "L7"),
    Wrong("slots where there is no room", (*DEAD, ops.Alloc(3, 1)), ops.LoadBackSwa(1),
          Lent(at(1) + at(2), at(1) + at(2)), "L7", geometry={"swa_pages": 4}),
    Wrong("no slots", DEAD, ops.LoadBackSwa(1), Done(), "layout"),
    Wrong("slots of one page for two", DEAD, ops.LoadBackSwa(1), Lent(at(1), at(1)), "layout"),
    Wrong("fewer peers than slots", DEAD, ops.LoadBackSwa(1), Lent(at(1) + at(2), at(1)),
          "layout"),
    Wrong("one SWA page for two", DEAD, ops.LoadBackSwa(1), Lent(at(1) + at(2), at(1) * 2), "L2",
          swa=(1,)),
    Wrong("an SWA page in use", DEAD, ops.LoadBackSwa(1, 0, 1), Lent(at(1), at(3)), "L4",
          swa=(3,)),
    Wrong("no peers", DEAD, ops.LoadBackSwa(1, 0, 1), Lent(at(1), NO_PEERS), "L4", full=(1,),
          swa=(0,)),
    Wrong("an SWA page that waits in the group",
          (*DEAD[:2], ops.GroupBegin(), ops.FreeSwa(1)), ops.LoadBackSwa(1, 0, 1),
          Lent(at(1), at(1)), "L6", swa=(1,)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG + WRONG_LOAD_BACKS, ids=lambda wrong: (
    f"{wrong.op.kind}-{wrong.what}".replace(" ", "-")
))  # fmt: skip
def test_a_wrong_answer_breaks_its_law_and_is_not_followed(
    wrong: Wrong, keep: Callable[..., Any]
) -> None:
    books = keep(**wrong.geometry)
    books.do(*wrong.before)
    before = books.snapshot()

    with pytest.raises(Mismatch) as caught:
        books.model.accept(wrong.op, wrong.answer)

    clauses = [clause for clause in caught.value.clauses if clause.law == wrong.law]
    assert clauses, caught.value
    assert {page for clause in clauses for page in clause.full_pages} == set(wrong.full)
    assert {page for clause in clauses for page in clause.swa_pages} == set(wrong.swa)
    assert books.snapshot() == before


def test_a_mismatch_says_what_was_expected_and_seen(keep: Callable[..., Any]) -> None:
    with pytest.raises(Mismatch, match=r"L7: expected 1 full and 1 SWA pages lent.*, saw None"):
        keep().model.accept(ops.Alloc(1, 1), Refused())


def test_all_that_is_wrong_with_an_answer_is_said_at_once(keep: Callable[..., Any]) -> None:
    answer = Lent(at(0) + at(9), at(1) * 2)
    with pytest.raises(Mismatch) as caught:
        keep().model.accept(ops.Alloc(1, 2), answer)
    assert [clause.law for clause in caught.value.clauses] == ["bounds", "bounds", "L2"]


@pytest.mark.parametrize("pages", [(1, 2), (2, 1), (8, 7), (3, 6)])
def test_any_free_pages_will_do(pages: tuple[int, int], keep: Callable[..., Any]) -> None:
    books = keep()
    full = at(pages[0]) + at(pages[1])
    swa = at(pages[1]) + at(pages[0])
    books.model.accept(ops.Alloc(1, 2), Lent(full, swa))
    assert books.full_pages(1) == list(pages)
    assert books.swa_pages(1) == list(reversed(pages))


def test_a_batch_is_answered_row_after_row(keep: Callable[..., Any]) -> None:
    books = keep()
    books.do(ops.Extend(((1, 2), (2, 4))))
    slots = at(1, 2, 3) + at(5, 0) + at(6, 0, 1)
    books.model.accept(ops.Extend(((1, 3), (2, 2))), Lent(slots, slots))
    assert books.full_pages(1) == [1, 5]
    assert books.full_pages(2) == [2, 6]
    assert [page.tokens for page in books.pages(1)] == [4, 1]


def test_a_refusal_for_lack_of_room_changes_nothing(keep: Callable[..., Any]) -> None:
    books = keep(full_pages=4, swa_pages=2)
    books.do(ops.Alloc(1, 2), ops.FreeSwa(1, 0, 1))
    before = books.snapshot()
    for op in (
        ops.Alloc(2, 2),
        ops.Extend(((2, 5),)),
        ops.LoadBack(2, 3, 0),
        ops.SwaTail(2, 8, 8),
        ops.Relocate(1),
    ):
        assert isinstance(books.do(op), Refused)
        assert books.snapshot() == before


def test_an_swa_load_back_without_room_is_refused(keep: Callable[..., Any]) -> None:
    books = keep(full_pages=4, swa_pages=2)
    books.do(ops.Alloc(1, 2), ops.FreeSwa(1), ops.Alloc(2, 1))
    before = books.snapshot()
    assert isinstance(books.do(ops.LoadBackSwa(1)), Refused)
    assert books.snapshot() == before


HOSTILE = Contract(hostile=frozenset(HOSTILE_CALLS))


@pytest.mark.parametrize("call", HOSTILE_CALLS)
def test_a_hostile_call_must_raise_a_documented_error(call: str, keep: Callable[..., Any]) -> None:
    books = keep(contract=HOSTILE)
    books.do(*FREE)
    before = books.snapshot()
    op = ops.Hostile(call, 1, 2)

    for error in HOSTILE_CALLS[call].errors:
        books.model.accept(op, Raised(error, "as documented"))
    for answer in (Done(), Refused(), Lent(()), Raised("AssertionError", "not as documented")):
        with pytest.raises(Mismatch) as caught:
            books.model.accept(op, answer)
        assert [clause.law for clause in caught.value.clauses] == ["hostile"]
        assert min(HOSTILE_CALLS[call].errors) in caught.value.clauses[0].expected

    assert books.snapshot() == before

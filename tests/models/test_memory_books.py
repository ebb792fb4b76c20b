"""The memory saver in the model: pieces of memory by tag, what a pause erases, what may be done
while a tag is paused.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvcore.models import Done, Lent, Mismatch, Refused, ops
from kvcore.models.memory import MemoryBooks, Piece, pattern
from kvcore.models.ops import Op
from kvcore.models.rules import MOST_OS_PAGES
from kvcore.models.state import ERASED, NO_PEER, UNKNOWN

PAUSED = (ops.Pause("kv_cache"),)
ROW = (ops.SwaTail(1, 7, 3),)
RETRACTED = (*ROW, ops.Retract(1, 1))


@pytest.fixture
def books(keep: Callable[..., Any]) -> Any:
    return keep(saver=True)


# Rules.


@pytest.mark.parametrize(
    ("before", "op", "why"),
    [
        ((), ops.Reserve(1, "kv_cache", 1), None),
        ((), ops.Reserve(1, "weights", MOST_OS_PAGES), None),
        ((), ops.Reserve(1, "weights", MOST_OS_PAGES + 1), "1 to 64 operating-system pages"),
        ((), ops.Reserve(1, "weights", 0), "1 to 64 operating-system pages"),
        ((ops.Reserve(1, "weights", 1),), ops.Reserve(1, "kv_cache", 1), "was used before"),
        (
            (ops.Reserve(1, "weights", 1), ops.Drop(1)),
            ops.Reserve(1, "weights", 1),
            "region 1 was used before",
        ),
        (PAUSED, ops.Reserve(1, "kv_cache", 1), "kv_cache is paused"),
        (PAUSED, ops.Reserve(1, "weights", 1), None),
        ((ops.Pause("weights"),), ops.Reserve(1, "weights", 1), "weights is paused"),
        ((*PAUSED, ops.Resume("kv_cache")), ops.Reserve(1, "kv_cache", 1), None),
        ((), ops.Drop(1), "no region 1"),
        ((ops.Reserve(1, "weights", 1),), ops.Drop(1), None),
        ((ops.Reserve(1, "weights", 1), ops.Pause("weights")), ops.Drop(1), None),
        ((ops.Reserve(1, "weights", 1), ops.Drop(1)), ops.Drop(1), "no region 1"),
        ((), ops.Pause("kv_cache"), None),
        (PAUSED, ops.Pause("kv_cache"), None),
        ((), ops.Resume("weights"), None),
        (PAUSED, ops.Resume("kv_cache"), None),
        (PAUSED, ops.Alloc(1, 1), None),
        ((*ROW, *PAUSED), ops.Decode((1,)), None),
        ((*ROW, *PAUSED), ops.Free(1), None),
        (PAUSED, ops.Clear(), None),
        (PAUSED, ops.LoadBack(1, 1, 1), "memory is paused"),
        ((ops.SwaTail(1, 4, 0), *PAUSED), ops.LoadBackSwa(1), "memory is paused"),
        ((*ROW, *PAUSED), ops.Retract(1, 1), "memory is paused"),
        ((*RETRACTED, *PAUSED), ops.Restore(1, 2), "memory is paused"),
        ((*ROW, *PAUSED), ops.Relocate(1), "memory is paused"),
        ((*ROW, ops.Pause("weights")), ops.Retract(1, 1), None),
        ((*RETRACTED, *PAUSED, ops.Resume("kv_cache")), ops.Restore(1, 2), None),
    ],
    ids=str,
)
def test_an_op_is_allowed_exactly_when_its_rule_says_so(
    before: tuple[Op, ...], op: Op, why: str | None, books: Any
) -> None:
    books.do(*before)
    assert books.model.allows(op) is (why is None)
    assert why is None or why in books.model.why_not(op)


@pytest.mark.parametrize(
    "op",
    [ops.Reserve(1, "weights", 1), ops.Pause("kv_cache"), ops.Resume("kv_cache")],
    ids=lambda op: op.kind,
)
def test_without_a_saver_there_is_nothing_to_pause(op: Op, keep: Callable[..., Any]) -> None:
    assert "no memory saver" in keep().model.why_not(op)
    assert "no region 1" in keep().model.why_not(ops.Drop(1))


# The books.


def test_what_is_written_into_a_piece_is_never_zero() -> None:
    patterns = [pattern(region) for region in range(600)]
    assert all(0 < value < 256 for value in patterns)
    assert all(one != other for one, other in pairwise(patterns))


def test_pieces_are_counted_by_tag() -> None:
    books = MemoryBooks()
    books.reserve(ops.Reserve(1, "weights", 2))
    books.reserve(ops.Reserve(2, "weights", 3))
    books.reserve(ops.Reserve(3, "kv_cache", 4))
    assert (books.size("weights"), books.size("kv_cache")) == (5, 4)
    books.drop(1)
    assert (books.size("weights"), books.used) == (3, {1, 2, 3})


def test_a_pause_loses_what_lay_under_its_tag_and_nothing_else() -> None:
    books = MemoryBooks()
    books.reserve(ops.Reserve(1, "weights", 2))
    books.reserve(ops.Reserve(2, "kv_cache", 1))
    assert books.pause("weights")
    assert books.pieces[1] == Piece("weights", 2, 0)
    assert books.pieces[2] == Piece("kv_cache", 1, pattern(2))
    books.resume("weights")
    assert books.pieces[1] == Piece("weights", 2, 0)
    assert books.paused == set()


def test_a_second_pause_is_none() -> None:
    books = MemoryBooks()
    assert books.pause("kv_cache")
    assert not books.pause("kv_cache")
    assert books.pause("weights")
    assert books.paused == {"kv_cache", "weights"}


@pytest.mark.parametrize(
    ("paused", "resumed", "fresh"),
    [
        ("kv_cache", "kv_cache", True),
        ("weights", "weights", False),
        ("weights", "kv_cache", False),
        ("kv_cache", "weights", False),
    ],
)
def test_the_pools_memory_is_fresh_when_it_has_just_come_back(
    paused: ops.Memory, resumed: ops.Memory, fresh: bool, books: Any
) -> None:
    books.do(ops.Pause(paused), ops.Resume(resumed))
    assert books.model.memory.fresh is fresh
    books.do(ops.GroupBegin())
    assert not books.model.memory.fresh


def test_a_second_resume_brings_nothing_back(books: Any) -> None:
    books.do(*PAUSED, ops.Resume("kv_cache"), ops.Resume("kv_cache"))
    assert not books.model.memory.fresh


# Stamps.


def stamps(books: Any, seq: int) -> tuple[list[int], list[int]]:
    pages = books.pages(seq)
    full = [stamp for page in pages for stamp in page.full_stamps]
    return full, [stamp for page in pages for stamp in page.swa_stamps]


def test_a_pause_of_the_pool_erases_every_row(books: Any, partition: Any) -> None:
    # What comes back reads zero; of slots of other sides nothing is asked then.
    assert ERASED == 0
    assert len({UNKNOWN, ERASED, pattern(0)}) == 3
    books.do(*ROW, *PAUSED)
    assert stamps(books, 1) == ([ERASED] * 7, [NO_PEER] * 4 + [UNKNOWN] * 3)
    assert books.model.rows[1].tokens == 7
    partition(books)


def test_a_pause_of_another_tag_erases_no_row(books: Any) -> None:
    books.do(*ROW)
    before = stamps(books, 1)
    books.do(ops.Pause("weights"), ops.Resume("weights"))
    assert stamps(books, 1) == before


def test_a_resume_of_what_is_not_paused_erases_nothing(books: Any) -> None:
    books.do(*ROW, *PAUSED, ops.Resume("kv_cache"), ops.Decode((1,)))
    before = stamps(books, 1)
    assert before[0][-1] != ERASED
    books.do(ops.Resume("kv_cache"))
    assert stamps(books, 1) == before


def test_what_is_lent_while_the_pool_is_paused_holds_zeros(books: Any, partition: Any) -> None:
    books.do(*PAUSED, ops.SwaTail(1, 6, 2), ops.Resume("kv_cache"))
    assert stamps(books, 1) == ([ERASED] * 6, [NO_PEER] * 4 + [UNKNOWN] * 2)
    partition(books)


def test_tokens_are_counted_on_through_a_pause(books: Any) -> None:
    books.do(ops.Extend(((1, 2),)), *PAUSED, ops.Decode((1,)), ops.Resume("kv_cache"))
    books.do(ops.Decode((1,)))
    assert stamps(books, 1) == ([ERASED] * 3 + [4], [UNKNOWN] * 3 + [4])


def test_device_entries_of_a_paused_pool_hold_nothing_known(keep: Callable[..., Any]) -> None:
    books = keep(swa_pages=0, device_pages=4, saver=True)
    books.do(ops.Extend(((1, 2),)), ops.ExtendLogical(((1, 1),)), *PAUSED, ops.Alloc(2, 1))
    assert books.pages(1)[0].device_stamps == [UNKNOWN, UNKNOWN, NO_PEER]
    assert books.pages(2)[0].device_stamps == [UNKNOWN] * 4


def test_a_backup_outlives_a_pause_and_one_taken_after_it_holds_zeros(books: Any) -> None:
    books.do(*ROW)
    kept = stamps(books, 1)
    books.do(ops.Retract(1, 1), ops.Alloc(2, 1), *PAUSED, ops.Resume("kv_cache"))
    books.do(ops.Restore(1, 3), ops.Retract(2, 2))
    assert stamps(books, 3)[0] == kept[0]
    assert books.model.backups[2].full_stamps == [ERASED] * 4


# Answers.


@pytest.mark.parametrize(
    "op",
    [
        ops.Reserve(2, "weights", 1),
        ops.Drop(1),
        ops.Pause("kv_cache"),
        ops.Resume("kv_cache"),
    ],
    ids=lambda op: op.kind,
)
def test_calls_on_memory_answer_nothing(op: Op, books: Any) -> None:
    books.do(ops.Reserve(1, "weights", 1))
    before = books.snapshot()
    for wrong in (Refused(), Lent(())):
        with pytest.raises(Mismatch) as caught:
            books.model.accept(op, wrong)
        assert [clause.law for clause in caught.value.clauses] == ["layout"]
        assert books.snapshot() == before
    books.model.accept(op, Done())

"""One pool in which every layer slides: pages that went when the window moved on are nobody's, and
their row remembers them until it gives them up.

Leaves out what such a pool has in common with any single one.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Contract, Lent, Mismatch, ops
from kvcore.models.ops import Op
from kvcore.models.state import UNKNOWN

ROW = (ops.Alloc(1, 3),)
MOVED_ON = (*ROW, ops.FreeSwa(1, 0, 1))
IN_GROUP = (*ROW, ops.GroupBegin(), ops.FreeSwa(1, 0, 1))
ENDED = (*IN_GROUP, ops.GroupEnd())
"""The window of row 1 moved on by a page: outside a group, in one, and in one that has ended."""

WENT = "a page went when the window moved on"


@pytest.fixture
def books(keep: Callable[..., Any]) -> Any:
    return keep(swa_pages=0, pure_swa=True)


@pytest.mark.parametrize(
    ("before", "op", "why"),
    [
        (ROW, ops.FreeSwa(1), None),
        (ROW, ops.FreeSwa(1, form="segments"), None),
        (ROW, ops.FreeSwa(3), "no sequence 3"),
        (MOVED_ON, ops.FreeSwa(1, 1, 2), None),
        (MOVED_ON, ops.FreeSwa(1, 0, 2), WENT),
        (IN_GROUP, ops.FreeSwa(1), WENT),
        (MOVED_ON, ops.Free(1, 1), None),
        (MOVED_ON, ops.Free(1), WENT),
        (MOVED_ON, ops.Free(3), "no sequence 3"),
        ((*MOVED_ON, ops.GroupBegin()), ops.Free(1), WENT),
        (IN_GROUP, ops.Free(1), None),
        (ENDED, ops.Free(1), WENT),
        ((*ENDED, ops.GroupBegin()), ops.Free(1), WENT),
        (MOVED_ON, ops.FreeFull(1, 0, 1), None),
        (IN_GROUP, ops.FreeFull(1, 0, 1), None),
        (ENDED, ops.FreeFull(1, 0, 1, "segment"), None),
        (MOVED_ON, ops.FreeFull(1, 0, 1, "sparse"), "by sparse"),
        (MOVED_ON, ops.FreeFull(1), "has not moved on"),
        (ROW, ops.FreeFull(1, 1, 2), "has not moved on"),
        (MOVED_ON, ops.Extend(((1, 1),)), None),
        (MOVED_ON, ops.Decode((1,)), None),
        ((*ROW, ops.FreeSwa(1)), ops.Extend(((1, 1),)), "no live peer"),
        ((*ROW, ops.FreeSwa(1)), ops.Decode((1,)), "no live peer"),
        ((ops.Extend(((1, 2),)), ops.FreeSwa(1)), ops.Decode((1,)), "no live peer"),
        (MOVED_ON, ops.Retract(1, 1), None),
        (IN_GROUP, ops.Retract(1, 1), None),
        ((*ROW, ops.FreeSwa(1, 1, 2)), ops.Retract(1, 1), None),
        ((*ROW, ops.FreeSwa(1)), ops.Retract(1, 1), None),
        (ROW, ops.Retract(3, 1), "no sequence 3"),
        ((*MOVED_ON, ops.Retract(1, 1)), ops.Restore(1, 2), None),
        ((*MOVED_ON, ops.Retract(1, 1)), ops.Restore(1, 2, 4), "whole rows"),
        (ROW, ops.Relocate(1), None),
        (MOVED_ON, ops.Relocate(1), WENT),
        ((), ops.SwaTail(1, 4, 4), "no SWA pool"),
        ((*ROW, ops.Alloc(2, 1)), ops.Recover(1, 2, True), "no SWA pool"),
        ((), ops.LoadBack(1, 1, 1), "no SWA pool"),
        (ROW, ops.LoadBackSwa(1), "no SWA pool"),
    ],
    ids=str,
)
def test_an_op_is_allowed_exactly_when_its_rule_says_so(
    before: tuple[Op, ...], op: Op, why: str | None, books: Any
) -> None:
    books.do(*before)
    assert books.model.allows(op) is (why is None)
    assert why is None or why in books.model.why_not(op)


def test_forms_are_narrowed_as_anywhere(keep: Callable[..., Any]) -> None:
    contract = Contract(free_swa_forms=frozenset(("slots",)))
    books = keep(swa_pages=0, pure_swa=True, contract=contract)
    books.do(*ROW)
    assert "by sparse" in books.model.why_not(ops.FreeSwa(1, form="sparse"))


def test_a_page_that_goes_is_free_and_its_row_remembers_it(books: Any, partition: Any) -> None:
    books.do(*ROW)
    went, *others = books.full_pages(1)
    books.do(ops.FreeSwa(1, 0, 1))
    assert went in books.model.full.free
    assert [page.gone for page in books.pages(1)] == [True, False, False]
    assert [page.full for _, page in books.model.lent_pages()] == others
    assert books.model.rows[1].tokens == 12
    partition(books)


def test_a_page_that_goes_in_a_group_waits_for_its_end(books: Any, partition: Any) -> None:
    books.do(*ROW, ops.GroupBegin())
    went = books.full_pages(1)[0]
    books.do(ops.FreeSwa(1, 0, 1))
    assert books.model.full.pending == {went}
    assert books.model.detached == {went: went}
    assert books.pages(1)[0].gone_in == books.model.groups == 1
    partition(books)
    books.do(ops.GroupEnd())
    assert went in books.model.full.free
    assert books.model.detached == {}
    partition(books)


def test_where_free_swa_joins_no_group_a_page_goes_at_once(
    keep: Callable[..., Any], partition: Any
) -> None:
    books = keep(swa_pages=0, pure_swa=True, contract=Contract(free_swa_joins_group=False))
    books.do(*ROW, ops.GroupBegin())
    went = books.full_pages(1)[0]
    books.do(ops.FreeSwa(1, 0, 1))
    assert went in books.model.full.free
    assert "went" in books.model.why_not(ops.Free(1))
    partition(books)


def test_a_row_freed_in_the_group_in_which_its_window_moved_on_is_released_once(
    books: Any, partition: Any
) -> None:
    books.do(*ROW, ops.GroupBegin())
    went, *others = books.full_pages(1)
    books.do(ops.FreeSwa(1, 0, 1), ops.Free(1))
    assert books.model.full.pending == {went, *others}
    assert books.model.ghosts[1] == tuple(others)
    assert 1 not in books.model.rows
    partition(books)
    books.do(ops.GroupEnd())
    partition(books)


def test_giving_up_pages_that_went_frees_nothing_more(books: Any, partition: Any) -> None:
    books.do(*MOVED_ON)
    _, second, third = books.pages(1)
    free = set(books.model.full.free)
    books.do(ops.FreeFull(1, 0, 1))
    assert books.pages(1) == [second, third]
    assert books.model.full.free == free
    assert books.model.ghosts[1] == ()
    partition(books)


def test_a_page_that_went_can_be_lent_again_while_the_row_remembers_it(
    books: Any, partition: Any
) -> None:
    books.do(*MOVED_ON)
    went = books.full_pages(1)[0]
    books.do(ops.Alloc(2, 1))
    assert books.full_pages(2) == [went]
    books.do(ops.Free(1, 1), ops.FreeFull(1))
    assert books.full_pages(2) == [went]
    partition(books)


def test_the_backup_of_a_row_knows_nothing_of_pages_that_went(books: Any, partition: Any) -> None:
    books.do(*MOVED_ON)
    kept = [stamp for page in books.pages(1)[1:] for stamp in page.full_stamps]
    books.do(ops.Retract(1, 5))
    assert books.model.backups[5].full_stamps == [UNKNOWN] * 4 + kept
    assert books.model.backups[5].evicted == 4
    partition(books)

    books.do(ops.Restore(5, 2))
    stamps = [stamp for page in books.pages(2) for stamp in page.full_stamps]
    assert stamps == [UNKNOWN] * 4 + kept
    assert not any(page.gone for page in books.pages(2))
    partition(books)


def test_a_clear_forgets_what_went(books: Any, partition: Any) -> None:
    books.do(*IN_GROUP, ops.Clear())
    assert books.model.rows == {}
    assert books.model.full.free == set(range(1, 9))
    assert books.model.detached == {}
    partition(books)


def test_a_slot_that_is_not_its_own_peer_is_rejected(books: Any) -> None:
    slots = tuple(range(4, 8))
    with pytest.raises(Mismatch, match="L4: expected every slot its own peer"):
        books.model.accept(ops.Alloc(1, 1), Lent(slots, (*slots[:-1], 0)))
    books.model.accept(ops.Alloc(1, 1), Lent(slots, slots))

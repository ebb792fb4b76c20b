"""How much an op needs of each side, and when a side lacks room for it.

Leaves out whether the op is allowed: test_rules.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import ops
from kvcore.models.ops import Op
from kvcore.models.rules import Need, demand, lacks_room

ROWS = (
    ops.SwaTail(1, 8, 0),
    ops.Extend(((2, 3), (3, 6))),
    ops.Retract(3, 1),
)


@pytest.mark.parametrize(
    ("op", "need"),
    [
        (ops.Alloc(9, 3), (3, 3)),
        (ops.Extend(((9, 5), (2, 1))), (2, 2)),
        (ops.Extend(((2, 2),)), (1, 1)),
        (ops.Decode((1, 2)), (1, 1)),
        (ops.SwaTail(9, 10, 2), (3, 1)),
        (ops.SwaTail(9, 12, 2, 2), (3, 1)),
        (ops.SwaTail(9, 12, 3, 5), (3, 1)),
        (ops.SwaTail(2, 5, 4), (1, 1)),
        (ops.SwaTail(1, 1, 0), (1, 0)),
        (ops.LoadBack(9, 3, 1), (3, 1)),
        (ops.LoadBackSwa(1), (0, 2)),
        (ops.LoadBackSwa(1, 1), (0, 1)),
        (ops.LoadBackSwa(7), (0, 0)),
        (ops.Restore(1, 9), (2, 2)),
        (ops.Restore(1, 9, 2), (2, 1)),
        (ops.Restore(7, 9), (0, 0)),
        (ops.Relocate(1), (2, 2)),
        (ops.Relocate(2), (1, 1)),
        (ops.Relocate(7), (0, 0)),
        (ops.Free(2), (0, 0)),
        (ops.Clear(), (0, 0)),
    ],
    ids=str,
)
def test_demand_counts_the_pages_of_each_side(
    op: Op, need: tuple[int, int], keep: Callable[..., Any]
) -> None:
    books = keep()
    books.do(*ROWS)
    assert demand(books.model, op) == Need(*need)


def test_room_is_lacking_when_one_side_is_short(keep: Callable[..., Any]) -> None:
    small_swa = keep(full_pages=8, swa_pages=2).model
    assert not lacks_room(small_swa, ops.Alloc(1, 2))
    assert lacks_room(small_swa, ops.Alloc(1, 3))
    assert not lacks_room(small_swa, ops.SwaTail(1, 32, 8))
    assert lacks_room(small_swa, ops.SwaTail(1, 32, 12))

    small_full = keep(full_pages=2, swa_pages=8).model
    assert not lacks_room(small_full, ops.SwaTail(1, 8, 0))
    assert lacks_room(small_full, ops.SwaTail(1, 9, 0))


def test_one_pool_has_no_swa_side_to_lack(keep: Callable[..., Any]) -> None:
    model = keep(swa_pages=0).model
    assert not model.must_refuse(ops.Alloc(1, 8))
    assert model.must_refuse(ops.Alloc(1, 9))


def test_pages_that_wait_in_the_group_are_no_room(keep: Callable[..., Any]) -> None:
    books = keep(full_pages=4, swa_pages=4)
    books.do(ops.Alloc(1, 4), ops.GroupBegin(), ops.Free(1))
    assert books.model.must_refuse(ops.Alloc(2, 1))
    books.do(ops.GroupEnd())
    assert not books.model.must_refuse(ops.Alloc(2, 4))


# Device slots.


@pytest.mark.parametrize(
    ("op", "need"),
    [
        (ops.Alloc(9, 2), Need(full=2, device=2)),
        (ops.Extend(((9, 5), (1, 2))), Need(full=2, device=2)),
        (ops.Extend(((1, 3),)), Need(full=1, device=1)),
        (ops.Extend(((2, 1),)), Need(full=1, device=1)),
        (ops.ExtendLogical(((9, 5), (2, 1))), Need(full=3)),
        (ops.Decode((2,)), Need(full=1)),
        (ops.DeviceBuffer(1, 1, 1), Need()),
        (ops.DeviceBuffer(1, 1, 2), Need()),
        (ops.DeviceBuffer(1, 1, 3), Need(device=1)),
        (ops.DeviceBuffer(2, 1, 1), Need(device=1)),
        (ops.FreeDevice(1), Need()),
    ],
    ids=str,
)
def test_demand_counts_device_pages_where_a_call_takes_them(
    op: Op, need: Need, keep: Callable[..., Any]
) -> None:
    books = keep(swa_pages=0, device_pages=4)
    books.do(ops.Extend(((1, 6),)), ops.ExtendLogical(((2, 4),)))
    assert demand(books.model, op) == need


@pytest.mark.parametrize(
    ("tokens", "device"), [(((9, 3),), 0), (((9, 4),), 1), (((9, 11),), 1), (((9, 12), (1, 1)), 3)]
)
def test_a_device_page_is_due_with_the_first_entry_in_it(
    tokens: tuple[tuple[int, int], ...], device: int, keep: Callable[..., Any]
) -> None:
    books = keep(page_size=8, device_pages=8, compress=4)
    books.do(ops.Extend(((1, 3),)))
    assert demand(books.model, ops.Extend(tokens)).device == device


def test_room_is_lacking_when_the_device_is_short(keep: Callable[..., Any]) -> None:
    books = keep(swa_pages=0, device_pages=2)
    model = books.model
    assert not lacks_room(model, ops.Alloc(1, 2))
    assert lacks_room(model, ops.Alloc(1, 3))
    assert not lacks_room(model, ops.ExtendLogical(((1, 12),)))
    books.do(ops.Alloc(1, 1))
    assert not lacks_room(model, ops.DeviceBuffer(1, 1, 2))
    assert lacks_room(model, ops.DeviceBuffer(1, 1, 3))


# Rows of the request pool.


@pytest.mark.parametrize(
    ("op", "need"),
    [
        (ops.Alloc(9, 1), Need(1, 1, requests=1)),
        (ops.Extend(((9, 1), (1, 1), (8, 1))), Need(3, 3, requests=2)),
        (ops.Decode((1,)), Need(1, 1)),
        (ops.SwaTail(9, 8, 4), Need(2, 1, requests=1)),
        (ops.SwaTail(1, 8, 4), Need(2, 1)),
        (ops.LoadBack(9, 2, 1), Need(2, 1, requests=1)),
        (ops.Restore(1, 9), Need(3, 1, requests=1)),
        (ops.Relocate(1), Need(1, 1)),
        (ops.Free(1), Need()),
    ],
    ids=str,
)
def test_demand_counts_a_row_for_each_new_sequence(
    op: Op, need: Need, keep: Callable[..., Any]
) -> None:
    # A window had moved on by two pages in the row that was retracted.
    books = keep(requests=4)
    books.do(ops.Alloc(1, 1), ops.SwaTail(2, 12, 4), ops.Retract(2, 1))
    assert demand(books.model, op) == need


def test_room_is_lacking_when_request_rows_are_short(keep: Callable[..., Any]) -> None:
    books = keep(requests=2)
    books.do(ops.Alloc(1, 1))
    assert not books.model.must_refuse(ops.Alloc(2, 1))
    assert books.model.must_refuse(ops.Extend(((2, 1), (3, 1))))
    assert not books.model.must_refuse(ops.Extend(((2, 1), (1, 1))))

"""Device buffers of HiSparse allocators, and what free groups hold back of the device side."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import (
    DoubleFreeError,
    FreeGroupError,
    GeometryError,
    IndexTensorError,
    InvalidSlotError,
    PendingFreeError,
)


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


NO_ROW = tensor()


# -- device buffers --------------------------------------------------------------------------------


def test_a_buffer_is_made_of_the_pages_of_the_request(
    bench: Any, kind: Any, allocator: Any
) -> None:
    per_page = kind.device_page_size
    row = bench.new_row(2 * kind.page_size + 1)
    own = bench.device_pages_of(row)
    buffer = allocator.alloc_device_buffer(bench.entries(row), 4 * per_page)
    assert buffer.dtype == torch.int64
    assert bench.pages(buffer)[: len(own)] == own
    assert len(set(buffer.tolist())) == 4 * per_page
    assert set(bench.device_slots(row)) == {0}
    assert bench.device.available_size() == (bench.device_pages - 4) * per_page
    allocator.free_hisparse_indices(buffer)
    assert bench.device.available_size() == bench.device_pages * per_page


def test_a_smaller_buffer_returns_the_surplus(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(3 * kind.page_size)
    first = bench.device_pages_of(row)[0]
    buffer = allocator.alloc_device_buffer(bench.entries(row), kind.device_page_size)
    assert bench.pages(buffer) == [first]
    assert allocator.available_size() == (bench.device_pages - 1) * kind.page_size
    assert allocator.alloc_device_buffer(NO_ROW, 0).tolist() == []


def test_a_buffer_is_built_in_the_order_in_which_pages_are_named(
    bench: Any, kind: Any, allocator: Any
) -> None:
    per_page = kind.device_page_size
    row = bench.new_row(3 * kind.page_size)
    own = bench.device_pages_of(row)
    backwards = bench.entries(row).flip(0)
    buffer = allocator.alloc_device_buffer(backwards, 2 * per_page)
    assert bench.pages(buffer) == [own[2], own[1]]


def test_a_buffer_that_does_not_fit_changes_nothing(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(2 * kind.page_size)
    bench.new_row(3 * kind.page_size)
    before = bench.snapshot()
    assert allocator.alloc_device_buffer(bench.entries(row), 4 * kind.device_page_size) is None
    assert bench.snapshot() == before
    assert allocator.alloc_device_buffer(bench.entries(row), 3 * kind.device_page_size) is not None


def test_a_row_without_device_slots_gets_a_buffer_of_new_pages(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.extend_logical(NO_ROW, 2 * kind.page_size)
    buffer = allocator.alloc_device_buffer(bench.entries(row), 2 * kind.device_page_size)
    assert len(set(buffer.tolist())) == 2 * kind.device_page_size


def test_a_buffer_survives_its_row_and_its_growth(bench: Any, kind: Any, allocator: Any) -> None:
    per_page = kind.device_page_size
    row = bench.new_row(kind.page_size)
    buffer = allocator.alloc_device_buffer(bench.entries(row), 2 * per_page)
    more = bench.device.alloc(2 * per_page)
    allocator.free(row)
    assert allocator.available_size() == (bench.device_pages - 4) * kind.page_size
    allocator.free_hisparse_indices(torch.cat((buffer, more)).flip(0).to(torch.int32))
    assert allocator.available_size() == bench.device_pages * kind.page_size


def test_buffer_sizes_are_whole_device_pages(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(kind.page_size)
    take = allocator.alloc_device_buffer
    bench.refuses(GeometryError, take, bench.entries(row), -kind.device_page_size)
    if kind.device_page_size > 1:
        message = bench.refuses(GeometryError, take, bench.entries(row), 1)
        assert "alloc_device_buffer" in message
    bench.refuses(IndexTensorError, take, bench.entries(row).float(), 0)


def test_buffers_are_made_of_lent_pages_only(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(kind.page_size)
    take, size = allocator.alloc_device_buffer, kind.device_page_size
    end = (bench.logical_pages + 1) * size
    for location in (-1, 0, end):
        bench.refuses(InvalidSlotError, take, tensor(location), size)
    bench.refuses(DoubleFreeError, take, tensor(end - 1), size)
    allocator.free_group_begin()
    allocator.free(row)
    bench.refuses(PendingFreeError, take, bench.entries(row), size)


def test_only_buffers_on_loan_are_returned(bench: Any, kind: Any, allocator: Any) -> None:
    per_page, give = kind.device_page_size, allocator.free_hisparse_indices
    row = bench.new_row(kind.page_size)
    buffer = allocator.alloc_device_buffer(NO_ROW, 2 * per_page)
    mapped = tensor(*bench.device_slots(row))
    message = bench.refuses(InvalidSlotError, give, torch.cat((buffer, mapped)))
    assert "mapping" in message
    for slot in (-1, 0, (bench.device_pages + 1) * per_page):
        bench.refuses(InvalidSlotError, give, tensor(slot))
    bench.refuses(IndexTensorError, give, buffer.float())
    if per_page == 1:
        bench.refuses(DoubleFreeError, give, torch.cat((buffer, buffer)))
    allocator.free_group_begin()
    give(buffer[:per_page])
    bench.refuses(PendingFreeError, give, buffer)
    allocator.free_group_end()
    bench.refuses(DoubleFreeError, give, buffer)
    give(buffer[per_page:])
    give(tensor())


def test_a_partly_mapped_page_is_no_buffer_either(paged: Any) -> None:
    row = paged.new_row(paged.kind.ratio)
    mapped = tensor(*paged.device_slots(row))
    paged.refuses(InvalidSlotError, paged.allocator.free_hisparse_indices, mapped + 1)


def test_the_padding_page_never_becomes_free(bench: Any) -> None:
    bench = bench.remade(validate=False)
    kind, allocator = bench.kind, bench.allocator
    buffer = allocator.alloc_device_buffer(NO_ROW, kind.device_page_size)
    allocator.free_hisparse_indices(torch.cat((tensor(0), buffer, tensor(0))))
    row = bench.extend_logical(NO_ROW, kind.page_size)
    allocator.free_hisparse(row)
    allocator.free_segment(row, start_pos=0)
    assert sorted(bench.free_ids(bench.device)) == list(range(1, bench.device_pages + 1))
    assert 0 not in bench.free_ids(bench.slot_side)


# -- free groups -----------------------------------------------------------------------------------


def test_groups_do_not_nest_and_end_once(bench: Any, kind: Any, allocator: Any) -> None:
    bench.refuses(FreeGroupError, allocator.free_group_end)
    allocator.free_group_begin()
    bench.refuses(FreeGroupError, allocator.free_group_begin)
    allocator.free_group_end()
    bench.refuses(FreeGroupError, allocator.free_group_end)
    for side in (allocator.logical_attn_allocator, bench.device):
        side.free_group_begin()
        bench.refuses(FreeGroupError, allocator.free_group_begin)
        side.free_group_end()
    allocator.free_group_begin()
    for side in (allocator.logical_attn_allocator, bench.device):
        side.free_group_end()
    bench.refuses(FreeGroupError, allocator.free_group_begin)
    bench.refuses(FreeGroupError, allocator.free_group_end)


@pytest.mark.parametrize(
    "way", ["free", "free_segments", "free_hisparse", "free_hisparse_indices", "surplus"]
)
def test_what_a_group_frees_on_the_device_comes_back_at_its_end(
    bench: Any, kind: Any, allocator: Any, way: str
) -> None:
    device, per_page = bench.device, kind.device_page_size
    row = bench.new_row(2 * kind.page_size)
    buffer = allocator.alloc_device_buffer(NO_ROW, (bench.device_pages - 2) * per_page)
    calls: dict[str, Callable[[], object]] = {
        "free": lambda: allocator.free(row),
        "free_segments": lambda: allocator.free_segments([(row, 0)]),
        "free_hisparse": lambda: allocator.free_hisparse(row),
        "free_hisparse_indices": lambda: allocator.free_hisparse_indices(buffer[: 2 * per_page]),
        "surplus": lambda: allocator.alloc_device_buffer(bench.entries(row), 0),
    }
    allocator.free_group_begin()
    calls[way]()
    assert device.available_size() == 0
    assert allocator.alloc_device_buffer(NO_ROW, per_page) is None
    assert len(device.pending_pages) == 2
    allocator.free_group_end()
    assert device.available_size() == 2 * per_page
    assert allocator.alloc_device_buffer(NO_ROW, 2 * per_page) is not None


def test_a_deferred_free_is_decided_when_it_is_called(
    bench: Any, kind: Any, allocator: Any
) -> None:
    page = kind.page_size
    row, other = bench.new_row(page), bench.new_row(page)
    theirs = bench.device_slots(other)
    allocator.free_group_begin()
    named = row.clone()
    allocator.free_hisparse(named)
    allocator.free(named)
    named.copy_(other)
    fresh = bench.new_row(page)
    fresh_slots = bench.device_slots(fresh)
    allocator.free_group_end()
    assert bench.device_slots(other) == theirs
    assert bench.device_slots(fresh) == fresh_slots
    assert bench.device.available_size() == ((bench.device_pages - 2) * kind.device_page_size)


def test_a_deferred_buffer_keeps_no_view_of_the_callers_tensor(
    bench: Any, kind: Any, allocator: Any
) -> None:
    per_page = kind.device_page_size
    first = allocator.alloc_device_buffer(NO_ROW, per_page)
    second = allocator.alloc_device_buffer(NO_ROW, per_page)
    returned = first.clone()
    allocator.free_group_begin()
    allocator.free_hisparse_indices(first)
    first.copy_(second)
    allocator.free_group_end()
    assert bench.pages(returned)[0] in bench.free_ids(bench.device)
    allocator.free_hisparse_indices(second)


def test_what_was_lent_may_be_overwritten_by_the_caller(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.new_row(2 * kind.page_size)
    buffer = allocator.alloc_device_buffer(bench.entries(row), kind.device_page_size)
    copies = row.clone(), buffer.clone()
    row.fill_(1)
    buffer.fill_(1)
    allocator.free(copies[0])
    allocator.free_hisparse_indices(copies[1])
    assert allocator.available_size() == bench.device_pages * kind.page_size


def test_a_group_that_cannot_end_stays_open_and_loses_nothing(bench: Any) -> None:
    bench = bench.remade(validate=False)
    allocator = bench.allocator
    row = bench.new_row(2 * bench.kind.page_size)
    buffer = allocator.alloc_device_buffer(NO_ROW, 4 * bench.kind.device_page_size)
    allocator.free_group_begin()
    allocator.free(row)
    allocator.free_hisparse_indices(buffer)
    allocator.free_hisparse_indices(buffer)
    bench.refuses(DoubleFreeError, allocator.free_group_end)
    assert allocator.free_group_is_open

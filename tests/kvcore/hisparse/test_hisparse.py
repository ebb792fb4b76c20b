"""The HiSparse allocators by the laws: geometry, lending on two sides, returning, the whole pool.

Every test runs on both variants: one device slot a token, and one for every 4 tokens over a hybrid
allocator. What the second forwards is tested in test_compressed_hisparse.py, device buffers and
free groups in test_device_buffers.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    DeadPeerError,
    DoubleFreeError,
    GeometryError,
    HiSparseTokenToKVPoolAllocator,
    IndexTensorError,
    InvalidSlotError,
    PendingFreeError,
)


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


NO_ROW = tensor()


# -- construction and geometry ---------------------------------------------------------------------


def test_attributes_carry_the_names_of_the_field(bench: Any, kind: Any, allocator: Any) -> None:
    page = kind.page_size
    assert allocator.page_size == page
    assert allocator.hisparse_page_size == kind.device_page_size
    assert allocator.compress_ratio == kind.ratio
    assert allocator.size_full == bench.logical_pages * page
    smaller = bench.swa_pages if kind.compressed else bench.logical_pages
    assert allocator.size == smaller * page
    assert bench.device.size == bench.device_pages * kind.device_page_size
    assert allocator.available_size() == bench.device_pages * page
    assert allocator.dtype is torch.float16
    assert "device" in allocator.debug_print()
    assert str(bench.logical_pages * page) in allocator.debug_print()
    assert allocator.translate_kv_indices_for_transfer(tensor(5)).tolist() == [5]


def test_the_mapping_ends_with_a_sentinel_and_is_registered_itself(
    bench: Any, kind: Any, allocator: Any
) -> None:
    mapping = allocator.full_to_hisparse_device_index_mapping
    assert mapping.dtype == torch.int64
    assert mapping.shape == ((bench.logical_pages + 1) * kind.device_page_size + 1,)
    assert mapping.tolist() == [0] * (len(mapping) - 1) + [-1]
    pool = allocator.hisparse_kvcache if kind.compressed else allocator.get_kvcache()
    assert len(pool.mappings) == 1
    assert pool.mappings[0] is mapping
    allocator.alloc(kind.page_size)
    allocator.clear()
    assert pool.mappings == [mapping]
    assert allocator.full_to_hisparse_device_index_mapping is mapping


@pytest.mark.parametrize(("size", "ratio"), [(0, 2), (3, 2), (-4, 2), (8, 0), (8, -1)])
def test_a_side_without_a_page_is_refused(size: int, ratio: int) -> None:
    with pytest.raises(GeometryError):
        HiSparseTokenToKVPoolAllocator(size, 4, torch.float16, "cpu", None, False, ratio)


def test_the_logical_side_is_larger_by_the_ratio() -> None:
    allocator = HiSparseTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False, 5)
    assert allocator.size == allocator.size_full == allocator.logical_attn_allocator.size == 40
    assert allocator.hisparse_attn_allocator.size == 8
    assert allocator.get_kvcache() is None


def test_both_sides_may_be_equally_large() -> None:
    allocator = HiSparseTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False, 1)
    assert allocator.size == allocator.hisparse_attn_allocator.size == 8


def test_the_environment_decides_where_the_caller_does_not(monkeypatch: Any) -> None:
    monkeypatch.setenv("KVCORE_VALIDATE", "1")
    assert HiSparseTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False).validate
    monkeypatch.setenv("KVCORE_VALIDATE", "0")
    assert not HiSparseTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False).validate


# -- lending ---------------------------------------------------------------------------------------


def test_alloc_maps_every_entry_of_its_pages(bench: Any, kind: Any, allocator: Any) -> None:
    row = allocator.alloc(3 * kind.page_size)
    mapped = bench.device_slots(row)
    assert len(mapped) == 3 * kind.device_page_size
    per_page = kind.device_page_size
    assert mapped == [
        page * per_page + i for page in bench.pages(torch.tensor(mapped)) for i in range(per_page)
    ]
    assert allocator.available_size() == (bench.device_pages - 3) * kind.page_size
    assert allocator.alloc(0).tolist() == []


def test_an_extension_maps_exactly_its_complete_entries(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.new_row(kind.page_size + 1)
    used = [slot for slot in bench.mapping[:-1] if slot]
    assert used == sorted(bench.device_slots(row))
    row = bench.extend(row, 2 * kind.page_size + 1)
    mapped = bench.device_slots(row)
    assert len(mapped) == (2 * kind.page_size + 1) // kind.ratio
    assert all(slot >= kind.device_page_size for slot in mapped)


def test_decoded_tokens_and_logical_extensions_have_no_device_slots(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.new_row(kind.page_size + 1)
    before = bench.device_slots(row)
    free = bench.device.available_size()
    for _ in range(2 * kind.page_size):
        row = bench.decode(row)
    row = bench.extend_logical(row, len(row) + kind.page_size)
    assert bench.device_slots(row)[len(before) :] == [0] * (3 * kind.page_size // kind.ratio)
    assert bench.device_slots(row)[: len(before)] == before
    assert bench.device.available_size() == free


@pytest.mark.parametrize("starved", ["logical", "device"])
def test_an_allocation_that_fits_one_side_only_moves_neither(
    bench: Any, kind: Any, allocator: Any, starved: str
) -> None:
    page = kind.page_size
    side = bench.slot_side if starved == "logical" else bench.device
    side.alloc(side.available_size() - side.page_size)
    before = bench.snapshot()
    assert allocator.available_size() == page
    assert allocator.alloc(2 * page) is None
    assert allocator.alloc_extend(*bench.batch([NO_ROW], [2 * page])) is None
    assert bench.snapshot() == before
    assert allocator.alloc_extend(*bench.batch([NO_ROW], [page])) is not None
    assert allocator.available_size() == 0


def test_capacity_is_a_promise(bench: Any, kind: Any, allocator: Any) -> None:
    allocator.free(allocator.alloc(2 * kind.page_size))
    bench.new_row(1)
    room = allocator.available_size()
    assert allocator.alloc(room + kind.page_size) is None
    assert allocator.alloc(room) is not None


def test_a_row_can_be_continued_on_the_device_after_a_page_boundary(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.extend_logical(NO_ROW, kind.page_size)
    row = bench.extend(row, 2 * kind.page_size)
    mapped = bench.device_slots(row)
    assert mapped[: kind.device_page_size] == [0] * kind.device_page_size
    assert all(slot > 0 for slot in mapped[kind.device_page_size :])


def test_a_row_goes_on_behind_its_first_entry(paged: Any) -> None:
    row = paged.extend(paged.new_row(paged.kind.ratio), 2 * paged.kind.ratio)
    first, second = paged.device_slots(row)
    assert second == first + 1


def test_an_extension_behind_an_unmapped_entry_is_refused(paged: Any) -> None:
    bench, kind, allocator = paged, paged.kind, paged.allocator
    row = bench.extend_logical(NO_ROW, kind.ratio)
    longer = bench.batch([row], [2 * kind.ratio])
    message = bench.refuses(DeadPeerError, allocator.alloc_extend, *longer)
    assert "alloc_extend" in message
    assert f"{int(row[-1]) // kind.page_size} (1 in all)" in message
    assert allocator.alloc_logical_only(*longer) is not None


def test_a_row_whose_device_page_was_freed_goes_on_logically_only(paged: Any) -> None:
    bench, kind, allocator = paged, paged.kind, paged.allocator
    row = bench.new_row(kind.ratio)
    allocator.free_hisparse(row[:1])
    longer = bench.batch([row], [2 * kind.ratio])
    bench.refuses(DeadPeerError, allocator.alloc_extend, *longer)
    assert allocator.alloc_logical_only(*longer) is not None


def test_without_checks_such_an_extension_loses_no_page(paged: Any) -> None:
    bench = paged.remade(validate=False)
    kind, allocator = bench.kind, bench.allocator
    row = bench.extend_logical(NO_ROW, kind.ratio)
    row = bench.extend(row, kind.page_size + kind.ratio)
    assert max(bench.mapping) < (bench.device_pages + 1) * kind.device_page_size
    allocator.free(row)
    assert allocator.available_size() == bench.device_pages * kind.page_size
    assert 0 not in bench.free_ids(bench.device)


def test_batches_are_checked_before_anything_moves(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(kind.page_size)
    good = bench.batch([row], [2 * kind.page_size])
    wrong_sum = (*good[:5], good[5] + 1)
    bench.refuses(GeometryError, allocator.alloc_extend, *wrong_sum)
    bench.refuses(GeometryError, allocator.alloc_logical_only, *wrong_sum)
    bench.refuses(GeometryError, allocator.alloc, -kind.page_size)
    if kind.page_size > 1:
        bench.refuses(GeometryError, allocator.alloc, kind.page_size - 1)
    beyond = tensor((bench.logical_pages + 2) * kind.page_size - 1)
    bench.refuses(InvalidSlotError, allocator.alloc_extend, *good[:4], beyond, good[5])
    bench.refuses(IndexTensorError, allocator.alloc_extend, *good[:4], beyond.float(), good[5])


# -- last slots ------------------------------------------------------------------------------------


def test_the_last_device_slot_follows_from_the_last_slot(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.new_row(2 * kind.page_size)
    last = row[-1:].reshape(1, 1)
    assert allocator.get_last_loc_compressed(last).tolist() == [[int(row[-1]) // kind.ratio]]
    assert allocator.get_last_loc_hisparse_device(last).tolist() == [[bench.device_slots(row)[-1]]]
    nothing = torch.tensor([-1], dtype=torch.int32)
    assert allocator.get_last_loc_compressed(nothing).tolist() == [-1]
    assert allocator.get_last_loc_hisparse_device(nothing).tolist() == [-1]
    with pytest.raises(IndexTensorError):
        allocator.get_last_loc_compressed(last.float())


# -- returning -------------------------------------------------------------------------------------


def test_errors_name_the_operation_that_was_called(page4: Any) -> None:
    allocator = page4.allocator
    never_lent = torch.tensor([4])
    for name in ("free", "free_full", "free_hisparse"):
        message = page4.refuses(DoubleFreeError, getattr(allocator, name), never_lent)
        assert message.startswith(f"{name}: ")
    for name in ("free_segment", "free_full_segment"):
        message = page4.refuses(GeometryError, getattr(allocator, name), never_lent, start_pos=1)
        assert message.startswith(f"{name}: ")
    for name in ("free_segments", "free_full_segments"):
        message = page4.refuses(GeometryError, getattr(allocator, name), [(never_lent, 1)])
        assert message.startswith(f"{name}: ")
    shrinking, unlent = page4.batch([torch.arange(4, 6)], [1]), page4.batch([never_lent], [2])
    for batch, error in ((shrinking, GeometryError), (unlent, InvalidSlotError)):
        message = page4.refuses(error, allocator.alloc_logical_only, *batch)
        assert message.startswith("alloc_logical_only: ")


def test_freeing_the_device_side_keeps_the_row(bench: Any, kind: Any, allocator: Any) -> None:
    page = kind.page_size
    row = bench.new_row(3 * page)
    allocator.free_hisparse(row[page : page + 1])
    mapped, per_page = bench.device_slots(row), kind.device_page_size
    assert mapped[per_page : 2 * per_page] == [0] * per_page
    assert len(bench.pages(torch.tensor(mapped))) == 3
    assert bench.device.available_size() == (bench.device_pages - 2) * per_page
    allocator.free_hisparse(row)
    allocator.free_hisparse(row)
    assert bench.device.available_size() == bench.device_pages * per_page
    assert bench.slot_side.available_size() == (bench.logical_pages - 3) * page
    allocator.free(row)
    assert bench.slot_side.available_size() == bench.logical_pages * page


def test_the_device_side_is_freed_by_entries_too(bench: Any, kind: Any, allocator: Any) -> None:
    row = bench.new_row(2 * kind.page_size)
    allocator.free_compressed(bench.entries(row)[-1:].to(torch.int32))
    mapped = bench.device_slots(row)
    assert mapped[kind.device_page_size :] == [0] * kind.device_page_size
    assert all(slot > 0 for slot in mapped[: kind.device_page_size])


FREES = ["free", "free_full", "free_hisparse", "free_compressed"]


@pytest.mark.parametrize("name", FREES)
def test_frees_name_lent_slots_only(bench: Any, kind: Any, allocator: Any, name: str) -> None:
    free, ratio = getattr(allocator, name), kind.ratio if name == "free_compressed" else 1
    row = bench.new_row(kind.page_size)
    end = (bench.logical_pages + 1) * kind.page_size // ratio
    for location in (-1, 0, end, 10**12):
        message = bench.refuses(InvalidSlotError, free, tensor(int(row[0]) // ratio, location))
        assert ("4 * entry" in message) == (ratio == 4)
    bench.refuses(DoubleFreeError, free, tensor(int(row[0]) // ratio, end - 1))
    bench.refuses(IndexTensorError, free, row.float())
    if kind.page_size == 1 and name != "free_compressed":
        bench.refuses(DoubleFreeError, free, torch.cat((row, row)))
    free(tensor())
    allocator.free_group_begin()
    allocator.free(row)
    message = bench.refuses(PendingFreeError, free, row // ratio)
    assert name in message or name == "free_full"


def test_segments_are_checked_as_by_the_logical_allocator(
    bench: Any, kind: Any, allocator: Any
) -> None:
    page = kind.page_size
    row = bench.new_row(3 * page)
    free = allocator.free_segments
    bench.refuses(GeometryError, free, [(row[page:], page), (row[:page], 0)])
    bench.refuses(GeometryError, free, [(row, -page)])
    bench.refuses(DoubleFreeError, free, [(row, 0), (row[page:], page)])
    bench.refuses(IndexTensorError, free, [(row.float(), 0)])
    free([])
    free([(row[:page], 0)])
    if not kind.compressed:
        # Without SWA peers there is no other way to free the full side.
        free = allocator.free_full_segments
    free([(row[page:], page)])
    bench.refuses(DoubleFreeError, free, [(row, 0)])
    assert allocator.available_size() == bench.device_pages * page


@pytest.mark.parametrize("call", ["free_hisparse", "free", "free_full", "free_segments"])
def test_more_free_pages_than_exist_are_seen_without_checks_by_whoever_counts(
    bench: Any, call: str
) -> None:
    bench = bench.remade(validate=False)
    kind, allocator = bench.kind, bench.allocator
    row = bench.new_row(kind.page_size)
    copy = allocator.full_to_hisparse_device_index_mapping.clone()
    allocator.free(row)
    allocator.full_to_hisparse_device_index_mapping.copy_(copy)

    def free_and_count() -> None:
        getattr(allocator, call)([(row, 0)] if call == "free_segments" else row)
        allocator.available_size()

    with pytest.raises(DoubleFreeError):
        free_and_count()
    allocator.clear()
    assert allocator.available_size() == bench.device_pages * kind.page_size


# -- the whole pool --------------------------------------------------------------------------------


def test_clear_takes_everything_back_and_closes_the_group(
    bench: Any, kind: Any, allocator: Any
) -> None:
    row = bench.new_row(2 * kind.page_size)
    allocator.alloc_device_buffer(NO_ROW, kind.device_page_size)
    allocator.free_group_begin()
    allocator.free(row)
    allocator.clear()
    assert not allocator.free_group_is_open
    assert allocator.available_size() == bench.device_pages * kind.page_size
    assert bench.mapping == [0] * (len(bench.mapping) - 1) + [-1]
    allocator.free_group_begin()
    allocator.free_group_end()


class RecordingPool:
    """A pool that remembers which mapping it was given."""

    def __init__(self) -> None:
        self.mappings: list[torch.Tensor] = []

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        self.mappings.append(full_to_hisparse_device_index_mapping)


def test_resize_drops_everything_and_registers_another_mapping() -> None:
    pool = RecordingPool()
    allocator = HiSparseTokenToKVPoolAllocator(24, 4, torch.float16, "cpu", pool, False, 3)
    allocator.alloc(8)
    allocator.free_group_begin()
    allocator.resize(size=8)
    assert allocator.size == 24
    assert allocator.available_size() == 8
    assert not allocator.free_group_is_open
    assert len(pool.mappings) == 2
    assert pool.mappings[-1] is allocator.full_to_hisparse_device_index_mapping
    assert len(pool.mappings[-1]) == 24 + 4 + 1
    allocator.resize(SimpleNamespace(max_total_num_tokens=40))
    assert allocator.available_size() == 40
    assert allocator.size == 120


@pytest.mark.parametrize(
    "arguments",
    [{}, {"config": SimpleNamespace(max_total_num_tokens=8), "size": 8}, {"size": 0}, {"size": -4}],
)
def test_a_resize_that_cannot_be_changes_nothing(bench: Any, arguments: dict[str, Any]) -> None:
    bench.new_row(bench.kind.page_size)
    bench.refuses(GeometryError, bench.allocator.resize, **arguments)


def test_sorting_on_demand_counts_as_free(bench: Any) -> None:
    bench = bench.remade(need_sort=True)
    kind, allocator = bench.kind, bench.allocator
    row = bench.new_row(4 * kind.page_size)
    allocator.free(row)
    device = bench.device
    assert len(device.release_pages) == 4
    assert allocator.available_size() == bench.device_pages * kind.page_size
    allocator.merge_and_sort_free()
    assert len(device.release_pages) == len(bench.slot_side.release_pages) == 0
    assert device.free_pages.tolist() == list(range(1, bench.device_pages + 1))

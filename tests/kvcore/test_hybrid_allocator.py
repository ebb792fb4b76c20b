"""The hybrid allocator by the laws: pairs of pages, one-sided frees, load-back, recovery."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import (
    GeometryError,
    HiSparseTokenToKVPoolAllocator,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
)
from kvcore.errors import IndexTensorError


class RecordingPool:
    """A pool that remembers which mapping it was given."""

    def __init__(self) -> None:
        self.mappings: list[torch.Tensor] = []

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.mappings.append(full_to_swa_index_mapping)

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the allocator reads its own mapping")


def tail_call(allocator: Any, row: torch.Tensor, length: int, tail: int) -> Any:
    prefix, total = torch.tensor([row.numel()]), torch.tensor([length])
    new = length - row.numel()
    return allocator.alloc_extend_swa_tail(prefix, prefix, total, total, row[-1:], new, tail)


def peers(allocator: Any, slots: torch.Tensor) -> list[int]:
    return allocator.translate_loc_from_full_to_swa(slots).tolist()


# -- construction and geometry -----------------------------------------------------------------


def test_attributes_carry_the_names_of_the_field(page_size: int, laws: Any) -> None:
    pool = RecordingPool()
    allocator = laws.make_hybrid(page_size, kvcache=pool)
    assert allocator.size_full == laws.full_pages * page_size
    assert allocator.size_swa == laws.swa_pages * page_size
    assert allocator.size == min(allocator.size_full, allocator.size_swa)
    assert allocator.full_available_size() == allocator.size_full
    assert allocator.swa_available_size() == allocator.size_swa
    assert allocator.available_size() == allocator.size
    assert allocator.get_kvcache() is pool
    assert str(allocator.size_swa) in allocator.debug_print()
    assert allocator.new_pages_available(laws.full_pages, laws.swa_pages)
    assert not allocator.new_pages_available(laws.full_pages + 1, 0)
    assert not allocator.new_pages_available(0, laws.swa_pages + 1)


def test_a_new_allocator_has_every_page_free_and_unmapped(hybrid: Any, laws: Any) -> None:
    laws.check_hybrid(hybrid, [])


@pytest.mark.parametrize(("size", "size_swa"), [(0, 8), (8, 0), (3, 8), (8, 3), (-8, 8)])
def test_a_side_without_a_page_is_refused(size: int, size_swa: int) -> None:
    with pytest.raises(GeometryError):
        SWATokenToKVPoolAllocator(size, size_swa, 4, torch.float16, "cpu", None, False)


def test_the_pool_gets_the_mapping_itself_not_a_copy(page_size: int, laws: Any) -> None:
    pool = RecordingPool()
    allocator = laws.make_hybrid(page_size, kvcache=pool)
    assert pool.mappings == [allocator.full_to_swa_index_mapping]
    allocator.alloc(page_size)
    allocator.clear()
    assert pool.mappings[-1] is allocator.full_to_swa_index_mapping
    allocator.resize(size=4 * page_size, size_swa=2 * page_size)
    assert len(pool.mappings) == 2
    assert pool.mappings[-1] is allocator.full_to_swa_index_mapping


def test_the_sides_know_the_sub_pools_of_a_split_pool(page_size: int) -> None:
    pool = SWAKVPool(
        size=16,
        size_swa=8,
        page_size=page_size,
        dtype=torch.float16,
        head_num=1,
        head_dim=8,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(16, 8, page_size, torch.float16, "cpu", pool, False)
    assert allocator.full_attn_allocator.get_kvcache() is pool.full_kv_pool
    assert allocator.swa_attn_allocator.get_kvcache() is pool.swa_kv_pool
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    assert pool.translate_loc_from_full_to_swa(slots).tolist() == peers(allocator, slots)


def test_translation_keeps_shape_and_maps_no_slot_to_no_slot(hybrid: Any) -> None:
    slots = hybrid.alloc(4 * hybrid.page_size)
    square = slots.view(2, -1)
    assert hybrid.translate_loc_from_full_to_swa(square).shape == square.shape
    assert hybrid.translate_loc_from_full_to_swa(square).flatten().tolist() == peers(hybrid, slots)
    assert peers(hybrid, torch.tensor([-1, 0], dtype=torch.int32)) == [-1, 0]
    with pytest.raises(IndexTensorError):
        hybrid.translate_loc_from_full_to_swa(square.float())


# -- both sides together -----------------------------------------------------------------------


def test_alloc_lends_pairs_of_pages(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(3 * page)
    assert len(laws.pages_of(torch.tensor(peers(hybrid, slots)), page)) == 3
    laws.check_hybrid(hybrid, laws.pages_of(slots, page))


@pytest.mark.parametrize("starved", ["full", "swa"])
def test_an_allocation_that_fits_one_side_only_moves_neither(
    hybrid: Any, starved: str, laws: Any
) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, page)
    side = hybrid.full_attn_allocator if starved == "full" else hybrid.swa_attn_allocator
    side.alloc(side.available_size())
    before = laws.snapshot(hybrid)
    length = torch.tensor([page + 1])
    assert hybrid.alloc(page) is None
    assert hybrid.alloc_decode(length, length, row[-1:]) is None
    assert laws.extend_row(hybrid, row, 2 * page) is None
    assert tail_call(hybrid, row, 2 * page, page) is None
    assert laws.snapshot(hybrid) == before
    assert hybrid.available_size() == 0


def test_capacity_is_a_promise_on_both_sides(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    hybrid.free_swa(hybrid.alloc(2 * page))
    available = hybrid.available_size()
    assert hybrid.alloc(available + page) is None
    assert hybrid.alloc(available).numel() == available


def test_need_sort_holds_for_both_sides(page_size: int, laws: Any) -> None:
    allocator = laws.make_hybrid(page_size, need_sort=True)
    allocator.free(allocator.alloc(2 * page_size))
    assert allocator.full_attn_allocator.release_pages.numel() == 2
    assert allocator.swa_attn_allocator.release_pages.numel() == 2
    allocator.merge_and_sort_free()
    assert allocator.full_attn_allocator.free_pages.tolist() == list(range(1, laws.full_pages + 1))
    assert allocator.swa_attn_allocator.free_pages.tolist() == list(range(1, laws.swa_pages + 1))


# -- returning ---------------------------------------------------------------------------------


def test_free_returns_the_full_pages_and_their_peers(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(4 * page)
    hybrid.free(slots[: 2 * page])
    laws.check_hybrid(hybrid, laws.pages_of(slots[2 * page :], page))
    hybrid.free(slots[2 * page :])
    laws.check_hybrid(hybrid, [])
    assert hybrid.available_size() == hybrid.size


def test_free_of_one_slot_returns_its_page_and_the_whole_peer(laws: Any, validate: bool) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    slots = allocator.alloc(8)
    allocator.free(slots[2:3])
    laws.check_hybrid(allocator, laws.pages_of(slots[4:], 4))


def test_free_swa_of_one_slot_unmaps_the_whole_page(laws: Any, validate: bool) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    slots = allocator.alloc(8)
    allocator.free_swa(slots[:1])
    assert peers(allocator, slots[:4]) == [0] * 4
    laws.check_hybrid(allocator, laws.pages_of(slots, 4))


def test_free_swa_leaves_the_full_side_and_skips_unmapped_pages(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(4 * page)
    for part in (slots[:page], slots[: 2 * page], slots):
        hybrid.free_swa(part)
        laws.check_hybrid(hybrid, laws.pages_of(slots, page))
    assert hybrid.swa_available_size() == hybrid.size_swa
    assert hybrid.full_available_size() == hybrid.size_full - 4 * page


def test_a_page_without_a_peer_is_freed_on_the_full_side_alone(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(3 * page)
    hybrid.free_swa(slots[page : 2 * page])
    hybrid.free(slots)
    laws.check_hybrid(hybrid, [])


def test_free_full_takes_what_free_swa_left(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(2 * page)
    hybrid.free_swa(slots)
    hybrid.free_full(slots[:page])
    laws.check_hybrid(hybrid, laws.pages_of(slots[page:], page))
    hybrid.free_full_segment(slots[page:], start_pos=page)
    laws.check_hybrid(hybrid, [])


def test_segment_frees_never_release_the_padding_page(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, 3 * page + (page + 1) // 2)
    hybrid.free_swa_segment(row[: 2 * page], start_pos=0)
    hybrid.free_swa_segment(row[: 2 * page], start_pos=0)
    laws.check_hybrid(hybrid, laws.pages_of(row, page))
    hybrid.free_segment(row, start_pos=0)
    laws.check_hybrid(hybrid, [])


def test_segments_of_one_row_go_back_together(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, 4 * page)
    pieces = [(row[:page], 0), (row[2 * page : 3 * page], 2 * page)]
    rest = laws.pages_of(torch.cat((row[page : 2 * page], row[3 * page :])), page)
    hybrid.free_swa_segments(pieces)
    laws.check_hybrid(hybrid, laws.pages_of(row, page))
    hybrid.free_full_segments(pieces)
    laws.check_hybrid(hybrid, rest)
    hybrid.free_segments([(row[page : 2 * page], page), (row[3 * page :], 3 * page)])
    laws.check_hybrid(hybrid, [])


def test_freeing_nothing_is_nothing(hybrid: Any, laws: Any) -> None:
    before = laws.snapshot(hybrid)
    for call in (hybrid.free, hybrid.free_swa, hybrid.free_full, hybrid.clear_full_to_swa_mapping):
        call(laws.no_row)
    for call in (hybrid.free_segment, hybrid.free_swa_segment, hybrid.free_full_segment):
        call(laws.no_row, start_pos=hybrid.page_size)
    hybrid.set_full_to_swa_mapping(laws.no_row, laws.no_row)
    hybrid.recover_tombstone(laws.no_row, laws.no_row)
    assert laws.snapshot(hybrid) == before


# -- mapping writes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_load_back_maps_its_own_slots(hybrid: Any, dtype: torch.dtype, laws: Any) -> None:
    page = hybrid.page_size
    full = hybrid.full_attn_allocator.alloc(2 * page)
    swa = hybrid.swa_attn_allocator.alloc(page)
    laws.check_hybrid(hybrid, laws.pages_of(full, page), laws.pages_of(swa, page))
    hybrid.set_full_to_swa_mapping(full[page:].to(dtype), swa.to(dtype))
    assert peers(hybrid, full) == [0] * page + swa.tolist()
    laws.check_hybrid(hybrid, laws.pages_of(full, page))


def test_a_tombstone_can_be_mapped_again(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    full = hybrid.alloc(2 * page)
    hybrid.free_swa(full)
    hybrid.set_full_to_swa_mapping(full, hybrid.swa_attn_allocator.alloc(2 * page))
    laws.check_hybrid(hybrid, laws.pages_of(full, page))
    hybrid.free(full)
    laws.check_hybrid(hybrid, [])


def test_a_cleared_entry_leaves_its_peer_with_the_caller(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    full = hybrid.alloc(2 * page)
    swa = hybrid.translate_loc_from_full_to_swa(full)
    hybrid.clear_full_to_swa_mapping(full)
    laws.check_hybrid(hybrid, laws.pages_of(full, page), laws.pages_of(swa, page))
    hybrid.swa_attn_allocator.free(swa)
    hybrid.full_attn_allocator.free(full)
    laws.check_hybrid(hybrid, [])


def test_mapping_is_done_in_whole_pages(laws: Any, validate: bool) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    full = allocator.full_attn_allocator.alloc(8)
    swa = allocator.swa_attn_allocator.alloc(4)
    allocator.set_full_to_swa_mapping(full[5:6], swa[1:2])
    assert peers(allocator, full) == [0] * 4 + swa.tolist()
    allocator.clear_full_to_swa_mapping(full[6:7])
    assert peers(allocator, full) == [0] * 8


def test_a_recovery_moves_the_peers_and_frees_the_incoming_pages(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    kept, incoming = hybrid.alloc(2 * page), hybrid.alloc(2 * page)
    moved = peers(hybrid, incoming)
    hybrid.free_swa(kept)
    available = hybrid.swa_available_size()
    hybrid.recover_tombstone(kept, incoming)
    assert peers(hybrid, kept) == moved
    assert peers(hybrid, incoming) == [0] * (2 * page)
    assert hybrid.swa_available_size() == available
    laws.check_hybrid(hybrid, laws.pages_of(kept, page))


def test_the_three_writes_of_the_field_recover_as_well(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    kept, incoming = hybrid.alloc(2 * page), hybrid.alloc(2 * page)
    hybrid.free_swa(kept)
    swa = hybrid.translate_loc_from_full_to_swa(incoming)
    hybrid.clear_full_to_swa_mapping(incoming)
    hybrid.set_full_to_swa_mapping(kept, swa)
    hybrid.full_attn_allocator.free(incoming)
    laws.check_hybrid(hybrid, laws.pages_of(kept, page))


def test_mapping_calls_want_pairs(hybrid: Any, refuses: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(2 * page)
    refuses(hybrid, GeometryError, hybrid.set_full_to_swa_mapping, slots, slots[:page])
    refuses(hybrid, GeometryError, hybrid.recover_tombstone, slots, slots[:page])


# -- the whole pool ----------------------------------------------------------------------------


def test_clear_unmaps_everything_and_closes_the_group(hybrid: Any, laws: Any) -> None:
    slots = hybrid.alloc(3 * hybrid.page_size)
    hybrid.free_group_begin()
    hybrid.free(slots)
    hybrid.clear()
    laws.check_hybrid(hybrid, [])
    assert not hybrid.free_group_is_open
    assert hybrid.alloc(hybrid.size) is not None


@pytest.mark.parametrize(("full", "swa"), [(3, 2), (40, 50)])
def test_resize_goes_both_ways_and_the_mapping_follows(
    hybrid: Any, full: int, swa: int, laws: Any
) -> None:
    page = hybrid.page_size
    hybrid.free_group_begin()
    hybrid.free(hybrid.alloc(2 * page))
    hybrid.resize(size=full * page, size_swa=swa * page)
    assert (hybrid.size_full, hybrid.size_swa) == (full * page, swa * page)
    laws.check_hybrid(hybrid, [])
    slots = hybrid.alloc(hybrid.size)
    laws.check_hybrid(hybrid, laws.pages_of(slots, page))
    hybrid.resize(
        SimpleNamespace(full_max_total_num_tokens=4 * page, swa_max_total_num_tokens=2 * page)
    )
    assert hybrid.available_size() == 2 * page
    laws.check_hybrid(hybrid, [])


def test_resize_wants_both_sizes_once(hybrid: Any, refuses: Any) -> None:
    config = SimpleNamespace(full_max_total_num_tokens=8, swa_max_total_num_tokens=8)
    refuses(hybrid, GeometryError, hybrid.resize)
    refuses(hybrid, GeometryError, hybrid.resize, size=8)
    refuses(hybrid, GeometryError, hybrid.resize, config, size=8, size_swa=8)
    refuses(hybrid, GeometryError, hybrid.resize, size=8, size_swa=0)


# -- numbers -----------------------------------------------------------------------------------

NO_INTEGERS = [4.0, "4", True, torch.tensor(4), None]


@pytest.mark.parametrize("number", NO_INTEGERS, ids=str)
def test_only_integers_are_numbers_of_tokens(number: Any, refuses: Any, laws: Any) -> None:
    hybrid = laws.make_hybrid(4, validate=True)
    kind = type(number).__name__
    message = refuses(hybrid, GeometryError, hybrid.alloc, number)
    assert message == f"alloc: expected an integer need_size, got {kind}"
    empty, total = torch.tensor([0]), torch.tensor([4])
    batch = (empty, empty, total, total, empty - 1)
    message = refuses(hybrid, GeometryError, hybrid.alloc_extend, *batch, number)
    assert message == f"alloc_extend: expected an integer extend_num_tokens, got {kind}"
    tail = hybrid.alloc_extend_swa_tail
    message = refuses(hybrid, GeometryError, tail, *batch, 4, number)
    assert message == f"alloc_extend_swa_tail: expected an integer swa_tail_len, got {kind}"
    if number is not None:
        refuses(hybrid, GeometryError, tail, *batch, 4, 4, swa_tail_end=number)
    refuses(hybrid, GeometryError, hybrid.resize, size=8, size_swa=number)


@pytest.mark.parametrize("number", NO_INTEGERS, ids=str)
def test_only_integers_are_sizes(number: Any) -> None:
    rest = (torch.float16, "cpu", None, False)
    for sizes in ((number, 16, 4), (16, number, 4), (16, 16, number)):
        with pytest.raises(GeometryError, match=r"^constructor: expected an integer"):
            SWATokenToKVPoolAllocator(*sizes, *rest)
    for ratio in (1.5, number):
        with pytest.raises(GeometryError, match="expected an integer host_to_device_ratio"):
            HiSparseTokenToKVPoolAllocator(16, 4, *rest, ratio)


def test_the_integers_of_numpy_are_integers(laws: Any) -> None:
    hybrid = laws.make_hybrid(4)
    hybrid.resize(size=np.int64(16), size_swa=np.int32(8))
    assert type(hybrid.size_full) is type(hybrid.size_swa) is int
    assert hybrid.alloc(np.int64(4)) is not None
    assert hybrid.alloc(10**30 * 4) is None

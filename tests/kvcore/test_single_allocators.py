"""Token and paged allocators by the laws: both page sizes, sorted or not, trusting or checking."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import GeometryError, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator


def test_attributes_carry_the_names_of_the_field(page_size: int, laws: Any) -> None:
    pool = object()
    allocator = laws.make_single(page_size, kvcache=pool, need_sort=True)
    assert allocator.size == laws.full_pages * page_size
    assert allocator.size_full == allocator.size
    assert allocator.page_size == page_size
    assert allocator.num_pages == laws.full_pages
    assert allocator.dtype is torch.float16
    assert allocator.device == "cpu"
    assert allocator.need_sort
    assert allocator.get_kvcache() is pool
    assert str(allocator.size) in allocator.debug_print()


def test_constructor_arguments_stand_in_the_order_of_the_field() -> None:
    token = TokenToKVPoolAllocator(8, torch.float16, "cpu", None, False)
    paged = PagedTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False)
    assert (token.num_pages, token.page_size) == (8, 1)
    assert (paged.num_pages, paged.page_size) == (2, 4)


def test_a_size_that_is_no_multiple_of_the_page_leaves_the_remainder_unused(laws: Any) -> None:
    allocator = PagedTokenToKVPoolAllocator(11, 4, torch.float16, "cpu", None, False)
    assert allocator.size == 11
    assert allocator.available_size() == 8
    laws.check_single(allocator, [])


@pytest.mark.parametrize(("size", "page"), [(0, 1), (-4, 4), (3, 4), (4, 0)])
def test_a_pool_without_a_page_is_refused(size: int, page: int) -> None:
    with pytest.raises(GeometryError):
        PagedTokenToKVPoolAllocator(size, page, torch.float16, "cpu", None, False)


def test_alloc_lends_whole_pages_slot_by_slot(single: Any, laws: Any) -> None:
    page = single.page_size
    slots = single.alloc(3 * page)
    assert slots is not None
    assert slots.dtype == torch.int64
    rows = slots.view(3, page)
    assert (rows == rows[:, :1] + torch.arange(page)).all()
    assert (rows[:, 0] % page == 0).all()
    laws.check_single(single, laws.pages_of(slots, page))


def test_alloc_of_nothing_gives_an_empty_tensor(single: Any) -> None:
    slots = single.alloc(0)
    assert slots is not None
    assert slots.shape == (0,)


def test_capacity_is_a_promise(single: Any, laws: Any) -> None:
    page = single.page_size
    single.free(single.alloc(5 * page)[: 2 * page])
    available = single.available_size()
    before = laws.snapshot(single)
    assert single.alloc(available + page) is None
    assert laws.snapshot(single) == before, "a refusal changes nothing"
    slots = single.alloc(available)
    assert slots.numel() == available
    assert single.available_size() == 0


@pytest.mark.parametrize("size", [-4, -1])
def test_a_negative_size_is_refused(single: Any, size: int, refuses: Any) -> None:
    refuses(single, GeometryError, single.alloc, size)


def test_a_size_of_part_of_a_page_is_refused_not_rounded(laws: Any, refuses: Any) -> None:
    allocator = laws.make_single(4)
    message = refuses(allocator, GeometryError, allocator.alloc, 6)
    assert "page_size 4" in message


def test_free_takes_the_pages_touched_whole_and_once(laws: Any, validate: bool) -> None:
    allocator = laws.make_single(4, validate=validate)
    slots = allocator.alloc(12)
    allocator.free(slots[[1, 2, 5]])
    laws.check_single(allocator, laws.pages_of(slots[8:], 4))
    allocator.free(slots[[8, 8]])
    laws.check_single(allocator, [])


def test_free_of_nothing_is_nothing(single: Any, laws: Any) -> None:
    before = laws.snapshot(single)
    single.free(torch.empty(0, dtype=torch.int32))
    single.free_segments([])
    single.free_segment(laws.no_row, start_pos=0)
    assert laws.snapshot(single) == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_indices_of_any_integer_dtype_are_taken(single: Any, dtype: torch.dtype, laws: Any) -> None:
    single.free(single.alloc(2 * single.page_size).to(dtype))
    laws.check_single(single, [])


def test_on_one_pool_the_full_side_is_everything(single: Any, laws: Any) -> None:
    page = single.page_size
    slots = single.alloc(4 * page)
    single.free_full(slots[:page])
    single.free_full_segment(slots[page : 2 * page], start_pos=0)
    single.free_full_segments([(slots[2 * page : 3 * page], 0), (slots[3 * page :], page)])
    laws.check_single(single, [])


def test_a_segment_gives_back_its_last_page_whole(single: Any, laws: Any) -> None:
    page = single.page_size
    row = laws.extend_row(single, laws.no_row, 3 * page + (page + 1) // 2)
    single.free_segment(row[page:], start_pos=page)
    laws.check_single(single, laws.pages_of(row[:page], page))


def test_segments_of_one_row_go_back_together(single: Any, laws: Any) -> None:
    page = single.page_size
    row = laws.extend_row(single, laws.no_row, 5 * page)
    single.free_segments(
        [
            (row[:page], 0),
            (laws.no_row, page),
            (row[2 * page : 4 * page], 2 * page),
            (row[4 * page :], 4 * page),
        ]
    )
    laws.check_single(single, laws.pages_of(row[page : 2 * page], page))


def test_lent_tensors_belong_to_the_caller(single: Any, laws: Any) -> None:
    page = single.page_size
    lent = [single.alloc(page) for _ in range(laws.full_pages)]
    values = [slots.tolist() for slots in lent]
    for slots in lent[3:]:
        single.free(slots)
    assert [slots.tolist() for slots in lent] == values
    lent[0].fill_(-5)
    laws.check_single(single, [slots[0] // page for slots in values[:3]])


def test_need_sort_lends_in_ascending_order_once_pages_come_back(page_size: int, laws: Any) -> None:
    allocator = laws.make_single(page_size, need_sort=True)
    slots = allocator.alloc(allocator.size).view(-1, page_size)
    for row in slots.flip(0):
        allocator.free(row)
    assert allocator.free_pages.numel() == 0
    assert allocator.release_pages.numel() == laws.full_pages
    assert allocator.alloc(allocator.size).tolist() == sorted(slots.flatten().tolist())


def test_merge_and_sort_free_can_be_asked_for(page_size: int, laws: Any) -> None:
    allocator = laws.make_single(page_size, need_sort=True)
    allocator.free(allocator.alloc(2 * page_size))
    allocator.merge_and_sort_free()
    assert allocator.free_pages.tolist() == list(range(1, laws.full_pages + 1))
    assert allocator.release_pages.numel() == 0


def test_everything_freed_fills_the_pool_again(single: Any, laws: Any) -> None:
    page = single.page_size
    choose = random.Random(3)
    lent: list[torch.Tensor] = []
    for _ in range(200):
        slots = single.alloc(choose.randint(0, 3) * page)
        if slots is None or choose.random() < 0.4:
            choose.shuffle(lent)
            for _ in range(len(lent) // 2):
                single.free(lent.pop())
        if slots is not None:
            lent.append(slots)
        laws.check_single(single, [p for slots in lent for p in laws.pages_of(slots, page)])
    for slots in lent:
        single.free(slots)
    laws.check_single(single, [])
    assert single.available_size() == single.size


def test_clear_takes_everything_back_and_closes_the_group(single: Any, laws: Any) -> None:
    slots = single.alloc(3 * single.page_size)
    single.free_group_begin()
    single.free(slots)
    single.clear()
    laws.check_single(single, [])
    assert not single.free_group_is_open
    assert single.alloc(single.size) is not None


@pytest.mark.parametrize("new_pages", [3, 40])
def test_resize_goes_both_ways_and_drops_everything(single: Any, new_pages: int, laws: Any) -> None:
    size = new_pages * single.page_size
    single.alloc(2 * single.page_size)
    single.resize(size=size)
    assert (single.size, single.num_pages) == (size, new_pages)
    laws.check_single(single, [])
    assert single.alloc(size).numel() == size
    single.resize(SimpleNamespace(max_total_num_tokens=2 * single.page_size))
    assert single.available_size() == 2 * single.page_size


def test_resize_wants_one_size(single: Any, refuses: Any) -> None:
    config = SimpleNamespace(max_total_num_tokens=8)
    refuses(single, GeometryError, single.resize)
    refuses(single, GeometryError, single.resize, config, size=8)
    refuses(single, GeometryError, single.resize, size=0)


def test_transfer_indices_are_the_slots(single: Any) -> None:
    slots = single.alloc(single.page_size)
    assert single.translate_kv_indices_for_transfer(slots) is slots


def test_the_allocator_has_no_host_copies(single: Any) -> None:
    assert not hasattr(single, "get_cpu_copy")
    assert not hasattr(single, "load_cpu_copy")

"""What an unchecked allocator asks of a device: so many kernels, no wait, and the same whatever the
size of its pool. On torch's meta device, which has no values that a call could wait for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import (
    CompressedHiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from kvcore.benchmarks.counter import Count, count

PAGES = 64
ON = torch.device("meta")


def hybrid(page_size: int, pages: int = PAGES, **options: Any) -> SWATokenToKVPoolAllocator:
    size = pages * page_size
    return SWATokenToKVPoolAllocator(
        size, size, page_size, torch.float16, ON, None, False, validate=False, **options
    )


def counted(call: Callable[[], object]) -> Count:
    """The count of a call that waits for nothing."""
    seen = count(call)
    assert seen.complete
    assert seen.waits == {}
    return seen


def lent(allocator: Any, pages: int) -> torch.Tensor:
    slots = allocator.alloc(pages * allocator.page_size)
    assert slots is not None
    return slots


@pytest.mark.parametrize(("page_size", "alloc", "free", "free_swa"), [(1, 1, 3, 2), (256, 3, 3, 3)])
def test_single_operations(page_size: int, alloc: int, free: int, free_swa: int) -> None:
    allocator = hybrid(page_size)
    first, second = lent(allocator, 4), lent(allocator, 4)
    assert counted(lambda: lent(allocator, 4)).kernels == alloc
    assert counted(lambda: allocator.free_segment(first, start_pos=0)).kernels == free
    assert counted(lambda: allocator.free_swa_segment(second, start_pos=0)).kernels == free_swa
    third = lent(allocator, 4)
    assert counted(lambda: allocator.free_segment(third, start_pos=0)).kernels == free, "tombstones"
    if page_size == 1:
        fourth, fifth = lent(allocator, 4), lent(allocator, 4)
        assert counted(lambda: allocator.free(fourth)).kernels == free
        assert counted(lambda: allocator.free_swa(fifth)).kernels == free_swa


def test_a_decode_that_begins_no_page_is_one_kernel() -> None:
    allocator = hybrid(16)
    last = lent(allocator, 2)[::16] + 4
    lengths = torch.tensor([6, 6])
    batch = (torch.empty(2, dtype=torch.int64, device=ON), lengths, last)
    seen = counted(lambda: allocator.alloc_decode(*batch))
    assert seen.ops == ("add",)


@pytest.mark.parametrize("page_size", [1, 256])
@pytest.mark.parametrize("calls", [1, 2, 8, 64])
def test_groups(page_size: int, calls: int) -> None:
    for owned in (False, True):
        allocator = hybrid(page_size)
        rows = [lent(allocator, 1) for _ in range(calls)]

        def group(
            allocator: Any = allocator, rows: Any = rows, owned: Any = owned, start: int = 0
        ) -> None:
            allocator.free_group_begin(owned=owned)
            for row in rows:
                allocator.free_segment(row, start_pos=start)
            allocator.free_group_end()

        kernels = counted(group).kernels
        assert kernels <= (4 if owned else calls + 3)
        assert allocator.available_size() == allocator.size


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_recovery_in_a_group_waits_for_nothing(page_size: int) -> None:
    allocator = hybrid(page_size)
    kept, incoming, other = lent(allocator, 2), lent(allocator, 2), lent(allocator, 2)

    def group() -> None:
        allocator.free_group_begin()
        allocator.free_swa_segment(kept, start_pos=0)
        allocator.free(other)
        allocator.recover_tombstone(kept, incoming)
        allocator.free_full_segment(lent(allocator, 1), start_pos=0)
        allocator.free_group_end()

    counted(group)


@pytest.mark.parametrize("page_size", [1, 16])
def test_whatever_is_freed_waits_for_nothing_and_is_lent_again(page_size: int) -> None:
    allocator = hybrid(page_size)
    rows = [lent(allocator, 2) for _ in range(8)]

    def calls() -> None:
        allocator.free_swa(rows[0])
        allocator.free(rows[0])
        allocator.free_swa(rows[1][:1])
        allocator.free(rows[2][1:])
        allocator.free_full(rows[1])
        allocator.free_segments([(rows[3][:page_size], 0), (rows[3][page_size:], page_size)])
        lent(allocator, 4)
        allocator.alloc_extend(*extend(20))

    counted(calls)


def extend(tokens: int) -> tuple[Any, ...]:
    length = torch.tensor([tokens])
    one = torch.empty(1, dtype=torch.int64, device=ON)
    return one, torch.tensor([0]), one, length, one, tokens


def hisparse(page_size: int) -> Any:
    size = PAGES * page_size
    return HiSparseTokenToKVPoolAllocator(
        size, page_size, torch.float16, ON, None, False, validate=False
    )


class Compressed:
    """A pool of compressed rows: one for every 4 slots, by their number alone."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size = size, page_size

    def register_mapping(self, mapping: torch.Tensor) -> None:
        self.mapping = mapping

    def translate_loc_from_full_to_compressed(self, slots: torch.Tensor) -> torch.Tensor:
        return slots[3::4] // 4


def compressed(page_size: int) -> Any:
    device = Compressed(PAGES * page_size // 4, page_size // 4)
    return CompressedHiSparseTokenToKVPoolAllocator(hybrid(page_size), device, validate=False)


def pure(page_size: int) -> Any:
    size = PAGES * page_size
    return PureSWATokenToKVPoolAllocator(
        size, page_size, torch.float16, ON, None, False, validate=False
    )


@pytest.mark.parametrize("make", [hisparse, compressed, pure])
def test_the_other_allocators_wait_for_nothing_when_they_free(make: Any) -> None:
    allocator = make(8)
    rows = [lent(allocator, 2) for _ in range(5)]

    def calls() -> None:
        allocator.free(rows[0])
        allocator.free_segment(rows[1], start_pos=0)
        allocator.free_group_begin()
        allocator.free(rows[2])
        allocator.free_segment(rows[3], start_pos=0)
        allocator.free_group_end()
        if make is pure:
            allocator.free_group_begin()
            allocator.free_swa(rows[4])
            allocator.free(rows[4])
            allocator.free_group_end()
        else:
            allocator.free_hisparse(rows[4])
            allocator.free(rows[4])

    counted(calls)


def bytes_written(page_size: int, pages: int) -> tuple[int, int]:
    """By a free of 16 pages and by an alloc of as many, in a pool of so many."""
    allocator = hybrid(page_size, pages)
    row = lent(allocator, 16)
    free = counted(lambda: allocator.free_segment(row, start_pos=0))
    return free.bytes_written, counted(lambda: lent(allocator, 16)).bytes_written


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_written_does_not_depend_on_the_pool(page_size: int) -> None:
    assert len({bytes_written(page_size, pages) for pages in (64, 4096, 1_000_000)}) == 1

"""Host copies and moves carry rows bit for bit, whether numpy knows their type or not, by numpy as
by torch.
"""

from typing import Any

import pytest
import torch

from kvcore import DSATokenToKVPool, MHATokenToKVPool
from kvcore.pools.arguments import FEW, ends, require_within
from kvcore.pools.base import SlotPool
from kvcore.pools.host_arrays import host_row_arrays, paired_moves, picked

TYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.complex64, torch.complex128),
)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def filled(dtype: torch.dtype, seed: int = 0) -> MHATokenToKVPool:
    """A pool of two layers whose memory is random bits, not-a-numbers among them."""
    pool = MHATokenToKVPool(8, 2, dtype, 2, 3, 2, "cpu", False, v_head_dim=5)
    dice = torch.Generator().manual_seed(seed)
    for buffer in pool.slot_buffers():
        bits(buffer).random_(0, 2 if dtype == torch.bool else 256, generator=dice)
    return pool


def bits(buffer: torch.Tensor) -> torch.Tensor:
    """Its memory as bytes, a row a slot."""
    return buffer.view(len(buffer), -1).view(torch.uint8)


def bits_at(pool: SlotPool, rows: torch.Tensor) -> list[Any]:
    return [bits(buffer)[rows].tolist() for buffer in pool.slot_buffers()]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_copy_brings_every_bit_back(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    kept = bits_at(pool, slots(5, 2, 7))
    copy = pool.get_cpu_copy(slots(5, 2, 7))
    assert [rows.dtype for rows in copy.buffers] == [pool.store_dtype] * 4
    assert [bits(rows).tolist() for rows in copy.buffers] == kept
    other = filled(dtype, seed=1)
    spared = bits_at(other, slots(0, 2, 5, 7, 8, 9))
    other.load_cpu_copy(copy, slots(1, 6, 4))
    assert bits_at(other, slots(1, 6, 4)) == kept
    assert bits_at(other, slots(0, 2, 5, 7, 8, 9)) == spared


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_move_carries_every_bit_also_where_it_overlaps(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    kept = bits_at(pool, slots(1, 2, 3, 4))
    pool.move_kv_cache(slots(2, 3, 4, 5), slots(1, 2, 3, 4))
    assert bits_at(pool, slots(2, 3, 4, 5)) == kept


def test_a_copy_is_no_view_of_the_pool() -> None:
    pool = filled(torch.int64)
    copy = pool.get_cpu_copy(slots(3))
    before = [rows.clone() for rows in copy.buffers]
    for buffer in pool.slot_buffers():
        buffer.zero_()
    assert all(map(torch.equal, copy.buffers, before))


def test_rows_that_are_no_tensor_or_too_wide_are_left_to_torch() -> None:
    pool = DSATokenToKVPool(8, 4, 4, torch.int64, 2, 1, "cpu", 128, False, 6)
    assert host_row_arrays(pool.copied_rows()) is None
    assert host_row_arrays(pool.slot_buffers()) is not None
    assert host_row_arrays([torch.zeros(2, dtype=torch.complex128)]) is None


def test_only_rows_with_both_ends_are_moved_and_only_true_ones_are_picked() -> None:
    moved = paired_moves(slots(3, 0, 5, -1), slots(2, 4, 0, 6))
    assert [rows.tolist() for rows in moved] == [[3, 0, 0, 0], [2, 0, 0, 0]]
    assert picked(slots(3, 0, 5), torch.tensor([True, False, True])).tolist() == [3, 5]


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
def test_the_ends_of_few_and_of_many_numbers(count: int) -> None:
    numbers = torch.arange(count).flip(0) - 1
    assert ends(numbers) == (-1, count - 2)
    assert require_within("test", numbers, count)
    assert not require_within("test", numbers + 1, count)

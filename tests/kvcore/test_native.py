"""The compiled helpers against the same in Python, and what they leave to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcore import DoubleFreeError, SWATokenToKVPoolAllocator
from kvcore.allocator.pending import copied_pages
from kvcore.native import NATIVE

needs_native = pytest.mark.skipif(NATIVE is None, reason="no compiled helpers in this environment")


def allocator_of(size: int, size_swa: int, page_size: int = 1) -> SWATokenToKVPoolAllocator:
    dtype = torch.float16
    return SWATokenToKVPoolAllocator(size, size_swa, page_size, dtype, "cpu", None, False)


def state_of(allocator: SWATokenToKVPoolAllocator) -> tuple[Any, ...]:
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    return (
        allocator.full_to_swa_index_mapping.tolist(),
        full.free_page_list(),
        swa.free_page_list(),
        allocator._unpaired,
    )


ROWS = torch.arange(8, 24)

INDICES = {
    "a row": ROWS,
    "the rest of a page": ROWS[:6],
    "nothing": ROWS[:0],
    "every other slot": torch.arange(8, 40)[::2],
    "backwards": torch.arange(8, 24).flip(0),
    "one value": torch.tensor([9]).expand(3),
}

UNUSUAL = {
    "int32": ROWS.int(),
    "int16": ROWS.short(),
    "float": ROWS.float(),
    "bool": ROWS > 9,
    "two dimensions": ROWS.view(4, 4),
    "no dimension": ROWS[0],
    "on no device": ROWS.to("meta"),
    "a subclass": torch.nn.Parameter(ROWS, requires_grad=False),
    "a list": [1, 2],
    "an array": ROWS.numpy(),
    "nothing at all": None,
}


@needs_native
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", INDICES)
def test_pages_are_copied_as_in_python(name: str, page_size: int) -> None:
    assert NATIVE is not None
    index = INDICES[name]
    expected = copied_pages(index, page_size, 8)
    assert expected is not None
    assert NATIVE.copied(index, page_size, 8) == expected
    if page_size == 1:
        assert NATIVE.copied(index) == expected


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_others(name: str) -> None:
    index: Any = UNUSUAL[name]
    assert copied_pages(index) is None
    allocator = allocator_of(32, 32)
    allocator.alloc(32)
    before = state_of(allocator)
    assert allocator._release_at_once(index, True) == -1
    if NATIVE is not None:
        assert NATIVE.copied(index) is None
        assert allocator._release is not None
        assert allocator._release(index, True) == -1
    assert state_of(allocator) == before


@pytest.mark.parametrize("start", [-4, 1, 2, True, 4.0, None, torch.tensor(4), 2**80 + 1])
def test_a_start_that_no_segment_has_is_left_to_others(start: Any) -> None:
    assert copied_pages(ROWS, 4, start) is None
    if NATIVE is not None:
        assert NATIVE.copied(ROWS, 4, start) is None


@needs_native
def test_a_call_that_is_none_is_refused() -> None:
    assert NATIVE is not None
    with pytest.raises(TypeError, match="expected index, page_size and start_pos"):
        NATIVE.copied()
    with pytest.raises(ValueError, match="page_size of at least 1"):
        NATIVE.copied(ROWS, 0)
    with pytest.raises(ValueError, match="PyCapsule"):
        NATIVE.bind(object(), torch.Tensor)
    assert NATIVE.copied(ROWS) is not None


@pytest.mark.parametrize("slot", [33, 40, 2**40, -1, -50])
def test_a_slot_of_no_pool_writes_nothing_outside(slot: int) -> None:
    """Values are not checked here, so what it does is undefined: but it stays within the mapping,
    and whatever it raises comes before any change."""
    for page_size in (1, 4):
        allocator = allocator_of(32, 32, page_size)
        assert allocator.alloc(32) is not None
        before, index = state_of(allocator), torch.tensor([slot])
        is_page = 0 <= slot // page_size <= 32 // page_size
        if allocator._release is not None and NATIVE is not None and not is_page:
            assert allocator._release(index, True) == -1
        try:
            allocator.free_segment(index, start_pos=0)
        except IndexError:
            assert state_of(allocator) == before
        assert allocator.full_to_swa_index_mapping[-1] == -1


@pytest.mark.parametrize("page_size", [1, 4])
def test_more_pages_than_there_are_are_refused_and_nothing_changes(page_size: int) -> None:
    allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
    row = allocator.alloc(8 * page_size)
    assert row is not None
    allocator.free_segment(row, start_pos=0)
    before = state_of(allocator)
    with pytest.raises(DoubleFreeError):
        allocator.free_segment(row, start_pos=0)
    assert state_of(allocator) == before


def test_a_log_that_has_to_move_moves() -> None:
    allocator = allocator_of(8, 6)
    held = []
    for turn in range(50):
        row = allocator.alloc(turn % 5 + 1)
        assert row is not None
        held.append((row, row.tolist()))
        allocator.free(row)
        assert allocator.available_size() == 6
        assert not allocator.full_to_swa_index_mapping[:-1].any()
    assert all(row.tolist() == slots for row, slots in held)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_pool_of_another_size_goes_on(page_size: int) -> None:
    allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
    for pages in (16, 4):
        allocator.resize(size=pages * page_size, size_swa=pages * page_size)
        for _ in range(3):
            row = allocator.alloc(pages * page_size)
            assert row is not None
            allocator.free_swa_segment(row, start_pos=0)
            assert allocator.swa_available_size() == pages * page_size
            allocator.free_full_segment(row, start_pos=0)
            row = allocator.alloc(pages * page_size)
            assert row is not None
            allocator.free_segment(row, start_pos=0)
            assert allocator.available_size() == pages * page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_without_a_peer_are_told_apart(page_size: int) -> None:
    allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
    row = allocator.alloc(6 * page_size)
    assert row is not None
    middle = row[2 * page_size : 4 * page_size]
    allocator.free_swa_segment(middle, start_pos=2 * page_size)
    assert allocator._unpaired == 2
    allocator.free_swa_segment(row, start_pos=0)
    assert allocator._unpaired == 6
    assert sorted(allocator.swa_attn_allocator.free_page_list()) == list(range(1, 9))
    allocator.free_segment(row, start_pos=0)
    assert allocator._unpaired == 0
    assert sorted(allocator.full_attn_allocator.free_page_list()) == list(range(1, 9))


def test_a_group_that_a_side_has_alone_gets_the_pages() -> None:
    allocator = allocator_of(8, 8)
    row = allocator.alloc(4)
    assert row is not None
    allocator.full_attn_allocator.free_group_begin()
    allocator.free(row)
    assert allocator.full_available_size() == 4
    assert allocator.swa_available_size() == 8
    allocator.full_attn_allocator.free_group_end()
    assert allocator.available_size() == 8


def test_an_index_that_is_part_of_the_mapping_is_read_before_it_is_cleared() -> None:
    for page_size in (1, 4):
        allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
        row = allocator.alloc(8 * page_size)
        assert row is not None
        # On a fresh pool peers are the slots themselves.
        allocator.free_segment(
            allocator.full_to_swa_index_mapping[page_size : 5 * page_size], start_pos=0
        )
        assert sorted(allocator.full_attn_allocator.free_page_list()) == [1, 2, 3, 4]
        assert sorted(allocator.swa_attn_allocator.free_page_list()) == [1, 2, 3, 4]


def shapeless() -> torch.Tensor:
    emptied = torch.arange(1, 4)
    emptied.untyped_storage().resize_(0)
    return emptied


LONG = 2**63 - 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_index_of_absurd_length_or_stride_is_left_to_others(page_size: int) -> None:
    endless = torch.ones(1, dtype=torch.int64).expand(LONG)
    for index in (endless, torch.zeros(1, dtype=torch.int64).expand(2**40)):
        allocator = allocator_of(32, 32, page_size)
        assert allocator.alloc(16) is not None
        before = state_of(allocator)
        if NATIVE is not None:
            assert allocator._release is not None
            assert allocator._release(index, True) == -1
            assert allocator._release(index, False) == -1
            assert NATIVE.copied(index, page_size) is None
        if index is endless:
            with pytest.raises((ValueError, MemoryError)):
                allocator.free_segment(index, start_pos=0)
        assert state_of(allocator) == before


@needs_native
def test_a_tensor_without_memory_is_left_to_others() -> None:
    assert NATIVE is not None
    assert NATIVE.copied(shapeless()) is None
    assert NATIVE.copied(torch._efficientzerotensor((3,), dtype=torch.int64)) is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_peers_freed_by_an_index_in_the_mapping_leave_no_entry(page_size: int) -> None:
    allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
    row = allocator.alloc(8 * page_size)
    assert row is not None
    allocator.free_swa_segment(
        allocator.full_to_swa_index_mapping[page_size : 3 * page_size], start_pos=0
    )
    mapping = allocator.full_to_swa_index_mapping.tolist()
    assert mapping[: 3 * page_size] == [0] * (3 * page_size)
    assert sorted(allocator.swa_attn_allocator.free_page_list()) == [1, 2]


@pytest.mark.parametrize("kernels", ["", "numpy", "torch"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_group_whose_sides_were_closed_alone_holds_back_as_before(
    page_size: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", kernels)
    allocator = allocator_of(8 * page_size, 8 * page_size, page_size)
    row = allocator.alloc(2 * page_size)
    assert row is not None
    allocator.free_group_begin()
    allocator.full_attn_allocator.free_group_end()
    allocator.swa_attn_allocator.free_group_end()
    allocator.free_swa(row)
    assert allocator.swa_available_size() == 6 * page_size
    assert allocator.full_to_swa_index_mapping[row].all()


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("kernels", ["", "numpy", "torch"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_peers_captured_for_a_closed_side_are_free_at_once(
    page_size: int, kernels: str, validate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", kernels)
    pool = (8 * page_size, 8 * page_size, page_size, torch.float16, "cpu", None, False)
    allocator = SWATokenToKVPoolAllocator(*pool, validate=validate)
    row = allocator.alloc(2 * page_size)
    assert row is not None
    allocator.free_group_begin()
    allocator.free_segment(row, start_pos=0)
    allocator.swa_attn_allocator.free_group_end()
    assert allocator.alloc(page_size) is not None
    assert allocator.swa_available_size() == 7 * page_size
    assert allocator.swa_attn_allocator.pending_page_list() == []

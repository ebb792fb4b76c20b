"""Copies of allocators: on their own from then on, and as good as the original."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import (
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.allocator import SinglePoolAllocator

HALF = torch.float16

MAKERS: dict[str, Callable[..., Any]] = {
    "token": lambda **more: TokenToKVPoolAllocator(16, HALF, "cpu", None, **more),
    "paged": lambda **more: PagedTokenToKVPoolAllocator(64, 4, HALF, "cpu", None, **more),
    "pure": lambda **more: PureSWATokenToKVPoolAllocator(64, 4, HALF, "cpu", None, **more),
    "slots": lambda **more: SWATokenToKVPoolAllocator(16, 12, 1, HALF, "cpu", None, **more),
    "pages": lambda **more: SWATokenToKVPoolAllocator(64, 48, 4, HALF, "cpu", None, **more),
}

WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda allocator: pickle.loads(pickle.dumps(allocator)),
}


def state_of(allocator: Any) -> tuple[Any, ...]:
    if isinstance(allocator, SinglePoolAllocator):
        return allocator.free_page_list(), allocator.pending_page_list()
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    mapping = allocator.full_to_swa_index_mapping.tolist()
    return mapping, full.free_page_list(), swa.free_page_list(), full.pending_page_list()


def play(allocator: Any, rows: list[torch.Tensor], seed: int) -> list[Any]:
    """Frees and allocations, the same for the same seed; what was answered."""
    rng, answers = random.Random(seed), []
    rows = [row.clone() for row in rows]
    for _ in range(30):
        if rows and rng.random() < 0.5:
            allocator.free_segment(rows.pop(rng.randrange(len(rows))), start_pos=0)
        elif rng.random() < 0.2:
            if allocator.free_group_is_open:
                allocator.free_group_end()
            else:
                allocator.free_group_begin()
        else:
            row = allocator.alloc(allocator.page_size * rng.randint(1, 2))
            rows += [] if row is None else [row.clone()]
            answers.append(None if row is None else row.tolist())
    return [*answers, state_of(allocator)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_goes_on_as_the_original_would(
    kind: str, need_sort: bool, validate: bool, way: str
) -> None:
    allocator = MAKERS[kind](need_sort=need_sort, validate=validate)
    size = allocator.page_size
    rows = [allocator.alloc(2 * size) for _ in range(4)]
    allocator.free_group_begin()
    allocator.free_segment(rows.pop(), start_pos=0)
    before = state_of(allocator)
    other = WAYS[way](allocator)
    assert state_of(other) == before
    played = play(other, rows, 1)
    assert state_of(allocator) == before
    assert play(allocator, rows, 1) == played
    other.clear()
    assert other.available_size() == min(other.size_full, getattr(other, "size_swa", 64))


def test_a_copy_hands_its_own_mapping_to_the_copy_of_its_pool() -> None:
    class Pool:
        mapping: torch.Tensor | None = None

        def register_mapping(self, mapping: torch.Tensor) -> None:
            self.mapping = mapping

        def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
            assert self.mapping is not None
            return self.mapping[slots]

    pool = Pool()
    allocator = SWATokenToKVPoolAllocator(8, 8, 1, HALF, "cpu", pool, False)
    other = copy.deepcopy(allocator)
    row = other.alloc(4)
    assert row is not None
    assert other.get_kvcache().translate_loc_from_full_to_swa(row).tolist() == [1, 2, 3, 4]
    assert pool.translate_loc_from_full_to_swa(row).tolist() == [0, 0, 0, 0]

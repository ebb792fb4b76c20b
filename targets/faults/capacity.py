"""Faults at exhaustion: what is read, lent or counted before the room is known.

Leaves out what a free list does with the pages it gets (`kvcore.targets.faults.free_lists`).
"""

from __future__ import annotations

import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.allocator.batch import DecodeBatch, ExtendBatch


class DecodeHalfFailure(SWATokenToKVPoolAllocator):
    """A decode asks each side by itself: when only one is out of pages, it answers None and the
    pages of the other stay lent (seen in sglang 0.5.22 and 0.5.23)."""

    def _alloc_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        num_pages = batch.num_new_pages(self.page_size)
        sides = (self.full_attn_allocator, self.swa_attn_allocator)
        able = [side for side in sides if side.has_room(num_pages)]
        if isinstance(batch, DecodeBatch) and len(able) == 1:
            able[0].take_pages(num_pages)
            return None
        return super()._alloc_batch(batch)


class KernelBeforeCheck(SWATokenToKVPoolAllocator):
    """The kernel that computes the slots reads one free page for each that it needs, and only then
    are the free pages counted: when they run out it reads beyond the list (sglang#34399)."""

    def _alloc_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        num_pages = batch.num_new_pages(self.page_size)
        self.merge_and_sort_free()
        wanted = torch.arange(num_pages, device=self._index_device)
        batch.slots(self.full_attn_allocator.free_pages[wanted], self.page_size)
        return super()._alloc_batch(batch)


class CounterDrift(SWATokenToKVPoolAllocator):
    """`alloc` moves the counter of free slots first and checks the number afterwards: a refused or
    a negative one has moved the counter and not the list (vllm#52707)."""

    _drift = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Count first, then ask."""
        self._drift += need_size
        slots = super().alloc(need_size)
        if slots is not None:
            # The list has moved too, so both agree again.
            self._drift -= need_size
        return slots

    def full_available_size(self) -> int:
        """What the counter says."""
        return super().full_available_size() - self._drift

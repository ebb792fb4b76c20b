"""Faults of the free lists: pages that enter them twice, the padding page, and lent views of them.

kvcore's free list refuses more pages than there are, which in small pools would turn a page too
many into an error and hide the law that broke. `UncountedFreeList` has no such check, as the
field's lists have none; faults that give a page too many are built on it. Leaves out free groups
(`kvcore.targets.faults.groups`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from kvcore import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.allocator import SinglePoolAllocator
from kvcore.allocator.arguments import Segment
from kvcore.free_list import FreeList, Ids, PageStack, SlotLog


class Uncounted(FreeList):
    """A free list that nobody counts: pages for which there is no place are dropped."""

    def require_place_for(self, count: int) -> None:
        """Nobody counts."""

    _elsewhere: torch.Tensor | None = None

    def place(self, num_pages: int) -> torch.Tensor:
        """Somewhere else, the same until they are committed: only then is seen how many fit."""
        if self._elsewhere is None or self._elsewhere.numel() != num_pages:
            self._elsewhere = torch.empty(num_pages, dtype=torch.int64, device=self._device)
        return self._elsewhere

    def host_place(self, num_pages: int) -> Ids:
        """The same as numpy."""
        found: Ids = self.place(num_pages).numpy()
        return found

    def host_give(self, entries: Ids) -> None:
        """As many as there is place for."""
        FreeList.host_give(self, entries)

    def commit(self, num_pages: int) -> None:
        """Put back as many as there is place for."""
        room = self._capacity - (self._end - self._head) - self._num_released
        fitting = self.place(num_pages)[: min(num_pages, room)]
        self._elsewhere = None
        super().place(fitting.numel()).copy_(fitting)
        super().commit(fitting.numel())


class UncountedLog(Uncounted, SlotLog):
    """Uncounted, of single slots."""


class UncountedStack(Uncounted, PageStack):
    """Uncounted, of larger pages."""


class UncountedTokenSide(TokenToKVPoolAllocator):
    """A side of single slots on an uncounted free list."""

    by_numpy = False

    def _make_free_list(self) -> FreeList:
        return UncountedLog(
            self.num_pages, self._index_device, need_sort=self.need_sort, unit=self._unit
        )


class UncountedPagedSide(PagedTokenToKVPoolAllocator):
    """A side of larger pages on an uncounted free list."""

    by_numpy = False

    def _make_free_list(self) -> FreeList:
        return UncountedStack(
            self.num_pages, self._index_device, need_sort=self.need_sort, unit=self._unit
        )


class UncountedHybrid(SWATokenToKVPoolAllocator):
    """Right in every law; its sides are uncounted. Variants may name other classes for them."""

    by_numpy = False

    token_side: ClassVar[type[TokenToKVPoolAllocator]] = UncountedTokenSide
    paged_side: ClassVar[type[PagedTokenToKVPoolAllocator]] = UncountedPagedSide

    def _make_side(
        self, size: int, kvcache: Any, name: str, *, lists_slots: bool
    ) -> SinglePoolAllocator:
        rest = (self.dtype, self.device, kvcache, self.need_sort)
        if self.page_size == 1:
            return self.token_side(size, *rest, validate=self.validate, pool_name=name)
        return self.paged_side(
            size,
            self.page_size,
            *rest,
            validate=self.validate,
            pool_name=name,
            lists_slots=lists_slots,
        )


class SegmentFreesPadding(UncountedHybrid):
    """The segment form reads one entry a page and skips the filter of unmapped ones: page 0, which
    means "no peer", enters the SWA free list (sglang#38519)."""

    def _free_swa_segments(self, indices: list[torch.Tensor]) -> None:
        full_pages = self.full_attn_allocator.pages_of_segments(indices)
        peers = self._peer_pages(full_pages)
        self._clear_pages(full_pages)
        self.swa_attn_allocator.give_pages(peers)

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """The peers, then the full side."""
        indices = self._checked_segments(operation, segments)
        if indices:
            self._free_swa_segments(indices)
            self.full_attn_allocator.give_pages(self.full_attn_allocator.pages_of_segments(indices))


class DoubleFreeSilent(UncountedHybrid):
    """With page size 1 no check looks for slots that are free already (sglang#40305). Larger pages
    are checked, and so is a slot named twice in one call."""

    def _check_free(self, operation: str, slots: torch.Tensor) -> None:
        ledger = self.full_attn_allocator.ledger
        if self.page_size > 1 or ledger is None:
            super()._check_free(operation, slots)
        else:
            ledger.require_in_pool(operation, slots)
            ledger.require_distinct_pages(operation, slots)


class PagePerSlotSide(UncountedPagedSide):
    """A side that frees a page once for every slot of it that is named."""

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """One page a slot."""
        return slots // self.page_size


class OnePageNamedTwice(UncountedHybrid):
    """A page that one free names several times enters the free list several times, and with page
    size 1 nothing refuses it either (vllm#42571)."""

    paged_side = PagePerSlotSide

    def _check_free(self, operation: str, slots: torch.Tensor) -> None:
        self._check_lent(operation, slots)


class RewrittenLog(SlotLog):
    """A log with one storage for ever: what is free moves to its beginning, over what was lent."""

    _only: torch.Tensor | None = None

    def _new_store(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int64, device=self._device)

    def _place(self, num_pages: int) -> int:
        if self._end + num_pages > self._capacity:
            self._move()
        return self._end

    def _use(self, store: torch.Tensor, start: int, num_pages: int) -> None:
        if self._only is None:
            self._only = store
        else:
            self._only[:num_pages] = store[start : start + num_pages].clone()
        super()._use(self._only, 0, num_pages)


class ViewLendingSide(TokenToKVPoolAllocator):
    """A side of single slots that lends views of a list whose places are written again."""

    by_numpy = False

    def _make_free_list(self) -> FreeList:
        return RewrittenLog(
            self.num_pages, self._index_device, need_sort=self.need_sort, unit=self._unit
        )


class LentViewOverwritten(UncountedHybrid):
    """`alloc` answers with a view of the free list, which the next free rewrites under the caller.
    Needs page size 1, where pages are slots and nothing is computed from them."""

    token_side = ViewLendingSide
    paged_side = PagedTokenToKVPoolAllocator

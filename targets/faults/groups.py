"""Faults of free groups: what a grouped free releases, and what begin and end do to the queue.

Leaves out frees outside a group (`kvcore.targets.faults.free_lists`).
"""

from __future__ import annotations

import torch

from kvcore import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcore.allocator.arguments import as_index
from kvcore.allocator.ownership import PENDING
from kvcore.targets.faults.free_lists import UncountedHybrid


class DeferredPeerLookup(SWATokenToKVPoolAllocator):
    """The peers of queued slots are looked up when the group ends, so a recovery or a load-back in
    between makes the end release the new SWA page and lose the old one (sglang#36081,
    sglang#36135)."""

    def _capture_queued_peers(self) -> None:
        """Nothing before a mapping write."""

    def free_group_end(self) -> None:
        """Look everything up only now."""
        super()._capture_queued_peers()
        super().free_group_end()


class DeferredFreeLookup(SWATokenToKVPoolAllocator):
    """`free` in a group keeps the full indices and reads their peers at the end; `free_swa` does it
    right. A mapping write to such an index, which nothing refuses, makes the end release the other
    owner's SWA page and lose the old one (sglang#36646)."""

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Start a list of its own for `free`."""
        super().free_group_begin(owned=owned)
        self._unresolved: list[torch.Tensor] = []

    def free(self, free_index: torch.Tensor) -> None:
        """In a group, queue the full side and leave the peers for later."""
        if not self._group_open:
            super().free(free_index)
            return
        slots = self._own_copy(as_index("free", free_index, self._index_device))
        self._check_free("free", slots)
        self._unresolved.append(slots)
        full = self.full_attn_allocator
        full.queue_set(slots, full.settled)
        if full.ledger is not None:
            full.ledger.mark(slots // self.page_size, PENDING)

    def free_group_end(self) -> None:
        """Read the peers of freed slots from whatever the mapping says now."""
        self.require_group("free_group_end", is_open=True)
        for slots in self._unresolved:
            self.full_attn_allocator.queue_set(slots, self._queued_peers)
        super().free_group_end()

    def _check_mapping_write(self, operation: str, full: torch.Tensor, swa: torch.Tensor) -> None:
        unresolved = self._unresolved if self._group_open else []
        if not any(torch.isin(full, slots).all() for slots in unresolved):
            super()._check_mapping_write(operation, full, swa)


class NestedGroupDropsQueue(SWATokenToKVPoolAllocator):
    """`free_group_begin` inside a group starts over with empty queues: what was freed so far is
    never released (sglang#36739)."""

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Open a group, whatever is open already."""
        self._drop_queued_peers()
        self._group_open = False
        self.full_attn_allocator.drop_group()
        self.swa_attn_allocator.drop_group()
        super().free_group_begin(owned=owned)


class GroupEndTwice(UncountedHybrid):
    """`free_group_end` keeps its queues and does not ask for an open group, so a second one
    releases the same pages again (sglang#36739)."""

    _flushed: tuple[torch.Tensor, ...] = ()

    def free_group_end(self) -> None:
        """Release what is queued, or what the last end released if no group is open."""
        sides = (self.full_attn_allocator, self.swa_attn_allocator)
        if not self._group_open:
            for side, pages in zip(sides, self._flushed, strict=False):
                side.give_pages(pages)
            return
        self._capture_queued_peers()
        self._flushed = tuple(side.pending_pages for side in sides)
        super().free_group_end()


class DeferredView(UncountedHybrid):
    """A grouped free keeps the caller's tensor instead of a copy, so what the caller writes there
    before the end is what the end releases (the copy that sglang#28494 added)."""

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Every group is treated as one whose caller promised not to touch its tensors."""
        super().free_group_begin(owned=True)


class PureGroupFreesTwice(PureSWATokenToKVPoolAllocator):
    """Where every layer slides, a page that `free_swa` and then `free` name in one group goes back
    twice at its end (sglang 0.5.23)."""

    def _queue_once(self) -> None:
        """At page size 1, what was queued, as often as it was named."""
        if self.page_size > 1:
            super()._queue_once()

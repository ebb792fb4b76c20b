"""Faults of the full-to-SWA mapping: entries that are left, shared, misplaced or trusted too long.

Leaves out free groups (`kvcore.targets.faults.groups`).
"""

from __future__ import annotations

import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.allocator.arguments import as_index
from kvcore.targets.faults.free_lists import UncountedHybrid


class PageClearsOneSlot(UncountedHybrid):
    """`free_swa` releases whole SWA pages and unmaps only the slots that were named; the page's
    other slots still map to a page that is free (sglang#27779). Needs pages of several slots."""

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Release the pages' peers at once; clear the named entries."""
        slots = as_index("free_swa", free_index, self._index_device)
        self._check_free("free_swa", slots)
        peers = self._peer_entries(self.full_attn_allocator.pages_of(slots))
        self.full_to_swa_index_mapping[slots] = 0
        self.swa_attn_allocator.give_entries(peers)


class TailKeepsStalePeer(SWATokenToKVPoolAllocator):
    """A tail-only extension maps its tail and leaves every other new slot as it was: on a page that
    goes on, the slots before the tail keep the page's old peer (sglang#25805). Needs pages of
    several slots."""

    by_numpy = False

    def _unmap_head(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Leave the entries of the head alone."""


class TwoOwnersOnePeer(SWATokenToKVPoolAllocator):
    """A recovery writes the kept slots' entries and leaves the incoming ones: two full slots map to
    one SWA slot, and whichever is freed first frees it for both (sglang#35501)."""

    def _move_peers(self, kept_pages: torch.Tensor, incoming_pages: torch.Tensor) -> None:
        self._map_pages(kept_pages, self._peer_entries(incoming_pages))


class SentinelOverwritten(SWATokenToKVPoolAllocator):
    """Index -1 ("no slot") passes the checks of mapping writes, and as an index it is the mapping's
    last entry: the sentinel that makes -1 translate to -1 (sglang#36880)."""

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Check the slots that are named, write to all of them."""
        named = full_indices >= 0
        super().set_full_to_swa_mapping(full_indices[named], swa_indices[named])
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Check the slots that are named, clear all of them."""
        super().clear_full_to_swa_mapping(full_indices[full_indices >= 0])
        self.full_to_swa_index_mapping[full_indices] = 0


class RecoveryFreesStalePeer(UncountedHybrid):
    """A recovery releases the old peer of the kept slots by an entry that their tombstone left
    behind, although that SWA page was released then and may have another owner (sglang#27586)."""

    def _build_mapping(self) -> None:
        super()._build_mapping()
        self._former_peers = torch.zeros_like(self._page_rows[:, 0])

    def _map_pages(self, full_pages: torch.Tensor, swa_firsts: torch.Tensor) -> None:
        super()._map_pages(full_pages, swa_firsts)
        self._former_peers[full_pages] = swa_firsts

    def _move_peers(self, kept_pages: torch.Tensor, incoming_pages: torch.Tensor) -> None:
        stale = self._former_peers[kept_pages]
        super()._move_peers(kept_pages, incoming_pages)
        self.swa_attn_allocator.give_entries(stale)

"""Faults of the pool's host copies: what retraction saves and what it brings back.

Leaves out who calls them and when (`kvcore.RetractionBackup`).
"""

from __future__ import annotations

from typing import NoReturn

import torch

from kvcore import DSATokenToKVPool, SWAKVPool
from kvcore.pools import HybridRows
from kvcore.pools.base import SlotRows


class BackupMissesABuffer(SWAKVPool):
    """The host copy holds the full layers only; the sliding-window layers of a restored request
    hold whatever was in the new slots (sglang#35957, sglang#23346)."""

    def _rows_to_copy(self, peers: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(peers, dtype=torch.bool)


class BackupMissesIndexK(DSATokenToKVPool):
    """The host copy holds the latent rows only: a restored request attends to whatever the index
    keys and scales of its new slots select (sglang#35957)."""

    def copied_rows(self) -> list[SlotRows]:
        """Latent rows, no index keys, no scales."""
        return list(self.slot_buffers())


class RestoreShiftsMask(SWAKVPool):
    """The saved SWA rows go, in order, to the slots that have a peer *now*; where the old row had a
    peer on other tokens, each row lands on another token."""

    def _rows_to_restore(
        self, had_peer: torch.Tensor, has_peer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        saved = int(had_peer.sum())
        tokens = has_peer & (torch.cumsum(has_peer, 0) <= saved)
        return torch.arange(saved) < tokens.sum(), tokens


class PoolWithoutHostCopy(SWAKVPool):
    """A pool kind that was never given the host-copy calls, under an engine that retracts whatever
    the kind (sglang#33385)."""

    def get_cpu_copy(self, indices: torch.Tensor) -> NoReturn:
        """Not there."""
        raise NotImplementedError("get_cpu_copy")

    def load_cpu_copy(self, copy: HybridRows, indices: torch.Tensor) -> NoReturn:
        """Not there."""
        raise NotImplementedError("load_cpu_copy")

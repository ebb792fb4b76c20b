"""The pool under a target: one layer of each kind, whose rows hold the stamps.

Small int64 pools, so that a stamp is exact.
Leaves out pools of other kinds (MLA, DSA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcore import MHATokenToKVPool, RetractionBackup, SWAKVPool
from kvcore.models import Geometry

FULL_LAYER = 0
SWA_LAYER = 1

Pool = MHATokenToKVPool | SWAKVPool
HybridPoolClass = Callable[..., SWAKVPool]


def build_pool(
    geometry: Geometry, hybrid_class: HybridPoolClass = SWAKVPool, device: str = "cpu"
) -> Pool:
    """An int64 pool of ``geometry`` with one layer a kind, one head, width one."""
    if not geometry.hybrid:
        return MHATokenToKVPool(
            geometry.full_size, geometry.page_size, torch.int64, 1, 1, 1, device, False
        )
    return hybrid_class(
        geometry.full_size,
        geometry.swa_size,
        geometry.page_size,
        torch.int64,
        1,
        1,
        swa_attention_layer_ids=[SWA_LAYER],
        full_attention_layer_ids=[FULL_LAYER],
        device=device,
    )


class StampedPool:
    """Reads and writes stamps: K of a token's row holds the stamp, V its negative."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        layers = (FULL_LAYER, SWA_LAYER) if isinstance(pool, SWAKVPool) else (FULL_LAYER,)
        buffers = (buffer for layer in layers for buffer in pool.get_kv_buffer(layer))
        self._rows = tuple(buffer.view(-1) for buffer in buffers)
        self.device = self._rows[0].device

    def contents(self) -> tuple[torch.Tensor, ...]:
        """Every buffer's rows as a flat int64 tensor, in the order of `STAMP_KINDS`."""
        return self._rows

    def stamp(self, slots: torch.Tensor, stamps: torch.Tensor) -> None:
        """Write stamps into the rows of full ``slots`` and of their peers, as attention kernels do:
        straight into the buffers, each layer kind by its own rows."""
        values = -stamps
        keys_at, values_at = self._rows[:2]
        keys_at[slots], values_at[slots] = stamps, values
        if isinstance(self._pool, SWAKVPool):
            peers = self._pool.translate_loc_from_full_to_swa(slots)
            keys_at, values_at = self._rows[2:]
            keys_at[peers], values_at[peers] = stamps, values

    def stamp_swa(self, slots: torch.Tensor, stamps: torch.Tensor) -> None:
        """Write stamps into the rows of the peers of full ``slots`` alone, by the pool's call."""
        rows = stamps.view(-1, 1, 1)
        self._pool.set_kv_buffer(SWA_LAYER, slots, rows, -rows)

    def backup(self, slots: torch.Tensor) -> RetractionBackup[Any]:
        """Host copy of the rows of ``slots``, every kind of layer."""
        return RetractionBackup.take(self._pool, slots)

    def restore(self, backup: RetractionBackup[Any], slots: torch.Tensor) -> None:
        """Write a host copy into ``slots``."""
        backup.restore(self._pool, slots)

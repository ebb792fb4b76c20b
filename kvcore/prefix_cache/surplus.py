"""Slots of an inserted prefix that the cache does not keep.

Leaves out which those are (`kvcore.prefix_cache.radix`).
"""

from __future__ import annotations

import torch

from kvcore.prefix_cache.protocols import CacheAllocator


class Surplus:
    """Slots to free, in two calls whatever their number: those of tokens before the `cursor`, which
    have no peers any more, and those behind it."""

    def __init__(self, cursor: int) -> None:
        self._cursor = cursor
        self._bare: list[torch.Tensor] = []
        self._paired: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Slots."""
        return sum(len(piece) for piece in self._bare + self._paired)

    def add(self, row: torch.Tensor, start: int, end: int) -> None:
        """The slots of tokens `start` to `end` of a row; none if `end` is not beyond `start`."""
        boundary = min(max(self._cursor, start), end)
        if start < boundary:
            self._bare.append(row[start:boundary])
        if boundary < end:
            self._paired.append(row[max(start, boundary) : end])

    def free(self, allocator: CacheAllocator) -> None:
        """Free them."""
        if self._bare:
            allocator.free_full(torch.cat(self._bare))
        if self._paired:
            allocator.free(torch.cat(self._paired))

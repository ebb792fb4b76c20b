"""The memory saver under a target: its calls, and what the operating system says of the memory.

Residency is read from the kernel's page map of this process, not from the saver, so that a saver
that miscounts is seen. Leaves out the pool's own contents (`kvcore.targets.pool`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvcore import MemorySaver
from kvcore.models import ops
from kvcore.models.memory import pattern
from kvcore.targets.protocol import Held, MemoryView

PAGE = mmap.PAGESIZE

Ranges = tuple[tuple[int, int], ...]
"""Addresses and lengths in bytes, whole operating-system pages."""

_PRESENT = np.uint64(1) << np.uint64(63)
_SWAPPED = np.uint64(1) << np.uint64(62)
TAGS: tuple[ops.Memory, ...] = ("kv_cache", "weights")


def whole_pages(addresses: Sequence[int], lengths: Sequence[int]) -> Ranges:
    """Ranges of as many operating-system pages as the lengths need, from the pages on that the
    addresses lie in: the same number wherever the memory is."""
    pairs = zip(addresses, lengths, strict=True)
    return tuple((at // PAGE * PAGE, -(-length // PAGE) * PAGE) for at, length in pairs)


def resident_bytes(ranges: Ranges) -> int:
    """Bytes of these ranges that the kernel holds in memory or swap for this process."""
    total = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for start, length in ranges:
            pagemap.seek(start // PAGE * 8)
            entries = np.frombuffer(pagemap.read(length // PAGE * 8), dtype=np.uint64)
            total += int(np.count_nonzero(entries & (_PRESENT | _SWAPPED))) * PAGE
    return total


class SaverProbe:
    """A saver with a pool under it and pieces that programs reserve."""

    def __init__(
        self, saver: MemorySaver, addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._saver = saver
        self._pool = whole_pages(addresses, lengths)
        self._pieces: dict[int, tuple[ops.Memory, torch.Tensor]] = {}
        for memory in TAGS:
            # A tag exists from its first region on; of a faulty pool this may be the only one.
            with saver.region(memory):
                pass

    def reserve(self, region: int, memory: ops.Memory, size: int) -> None:
        """A piece of ``size`` operating-system pages, written full of its pattern."""
        with self._saver.region(memory) as inside:
            piece = inside.zeros((size * PAGE,), torch.uint8, "cpu")
        piece.fill_(pattern(region))
        self._pieces[region] = (memory, piece)

    def drop(self, region: int) -> None:
        """Let go of a piece."""
        del self._pieces[region]

    def pause(self, memory: ops.Memory) -> None:
        """`pause`."""
        self._saver.pause(memory)

    def resume(self, memory: ops.Memory) -> None:
        """`resume`."""
        self._saver.resume(memory)

    def paused(self, memory: ops.Memory) -> bool:
        """Whether the saver says that the tag is paused."""
        return self._saver.is_paused(memory)

    def close(self) -> None:
        """Drop every piece."""
        self._pieces = {}

    def view(self, addresses: Sequence[int], lengths: Sequence[int]) -> MemoryView:
        """What lies under the saver now; the pool's buffers are at ``addresses``."""
        pool = whole_pages(addresses, lengths)
        held = {memory: self._held(memory, pool) for memory in TAGS}
        return MemoryView(held, pool, self._pool)

    def _held(self, memory: ops.Memory, pool: Ranges) -> Held:
        pieces = [piece for _, (tag, piece) in sorted(self._pieces.items()) if tag == memory]
        own = whole_pages([p.data_ptr() for p in pieces], [p.nbytes for p in pieces])
        resident = resident_bytes(own + (pool if memory == "kv_cache" else ()))
        values = [] if self._saver.is_paused(memory) else [int(piece[-1]) for piece in pieces]
        return Held(resident, self._saver.resident_bytes(memory), tuple(values))

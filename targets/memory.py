"""The memory saver under a target: its calls, and what the operating system says of the memory.

Residency is read from the kernel's page map of this process, not from the saver, so that a saver
that miscounts is seen. Leaves out the pool's own contents (`kvcore.targets.pool`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvcore import MemorySaver
from kvcore.models import ops
from kvcore.models.memory import pattern
from kvcore.targets.protocol import Held, MemoryView

PAGE = mmap.PAGESIZE

Ranges = tuple[tuple[int, int], ...]
"""Addresses and lengths in bytes, whole operating-system pages."""

_HELD = np.uint64(1 << 63 | 1 << 62)
"""Present in memory, or swapped."""
TAGS: tuple[ops.Memory, ...] = ("kv_cache", "weights")


def whole_pages(addresses: Sequence[int], lengths: Sequence[int]) -> Ranges:
    """Ranges of as many operating-system pages as the lengths need, from the pages on that the
    addresses lie in: the same number wherever the memory is."""
    pairs = zip(addresses, lengths, strict=True)
    return tuple((at // PAGE * PAGE, -(-length // PAGE) * PAGE) for at, length in pairs)


@contextmanager
def page_map() -> Iterator[int]:
    """The page map of this process, open for reading: a file descriptor.

    Opened anew each time, since a forked child that kept it would read its parent's."""
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def resident_bytes(ranges: Ranges, descriptor: int) -> int:
    """Bytes of these ranges that the kernel holds in memory or swap for this process, by its
    `page_map`."""
    total = 0
    for start, length in ranges:
        read = os.pread(descriptor, length // PAGE * 8, start // PAGE * 8)
        entries = np.frombuffer(read, dtype=np.uint64)
        total += int(np.count_nonzero(entries & _HELD)) * PAGE
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
        with page_map() as descriptor:
            held = {memory: self._held(memory, pool, descriptor) for memory in TAGS}
        return MemoryView(held, pool, self._pool)

    def _held(self, memory: ops.Memory, pool: Ranges, descriptor: int) -> Held:
        pieces = [piece for _, (tag, piece) in sorted(self._pieces.items()) if tag == memory]
        own = whole_pages([p.data_ptr() for p in pieces], [p.nbytes for p in pieces])
        resident = resident_bytes(own + (pool if memory == "kv_cache" else ()), descriptor)
        values = [] if self._saver.is_paused(memory) else [int(piece[-1]) for piece in pieces]
        return Held(resident, self._saver.resident_bytes(memory), tuple(values))

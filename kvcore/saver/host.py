"""The saver of host memory, on Linux: each tensor is a private anonymous mapping of its own, which
`madvise` empties and fills while its addresses stay.

Left out: memory pinned for a device, and huge pages beyond what the system uses by itself.
"""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from threading import Lock
from weakref import WeakSet

import numpy as np
import torch

from kvcore.errors import (
    GeometryError,
    PausedPoolError,
    SaverMemoryError,
    SaverUnavailableError,
)
from kvcore.saver.tags import Tags

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and newer, which the standard library does not name."""
_PROT_NONE = 0
_PRESENT = np.uint64(1 << 63)
"""The bit of a pagemap entry that says: this page is in memory."""


class Segment(mmap.mmap):
    """Memory of one tensor: whole pages between two guard pages that cannot be touched.

    `MAP_PRIVATE` matters: of a shared mapping, Python's default, `MADV_DONTNEED` drops the page
    tables only, and the memory stays. The guards keep the kernel from merging neighbouring
    mappings, so that each segment is one line of /proc/self/maps whatever its tag, and they stop a
    write that runs off either end.

    The tensor holds the segment and nobody else does: with the last view the memory is unmapped,
    paused or not.
    """

    address: int
    """Of the first usable byte."""
    usable: int
    """Bytes between the guards."""

    @classmethod
    def of(cls, nbytes: int) -> "Segment":
        """Map at least `nbytes`, none of it resident yet.

        Raises:
            SaverMemoryError: the operating system has no such range.
        """
        usable = -(-nbytes // _PAGE) * _PAGE
        try:
            segment = cls(-1, usable + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise SaverMemoryError(
                f"zeros: cannot map {nbytes} bytes of memory: {error}"
            ) from error
        segment.usable = usable
        start = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        segment.address = start + _PAGE
        _guard(start)
        _guard(segment.address + usable)
        return segment

    def tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The first `count` elements as a flat tensor, which keeps the segment mapped."""
        return torch.frombuffer(self, dtype=dtype, count=count, offset=_PAGE)

    def drop(self) -> None:
        """Give every page back; the next read finds zeros."""
        self.madvise(mmap.MADV_DONTNEED, _PAGE, self.usable)

    def populate(self) -> None:
        """Make every page resident; pages that were not are zeros."""
        try:
            self.madvise(_POPULATE_WRITE, _PAGE, self.usable)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.touch()

    def touch(self) -> None:
        """Write a zero into every page, all of which are zeros: the same, on an older kernel."""
        np.frombuffer(self, dtype=np.uint8)[_PAGE:-_PAGE:_PAGE] = 0

    def resident_bytes(self) -> int:
        """Bytes of the pages that are in memory, as the kernel's page tables have it."""
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(
                pagemap.fileno(), self.usable // _PAGE * 8, self.address // _PAGE * 8
            )
        return int(np.count_nonzero(np.frombuffer(entries, dtype=np.uint64) & _PRESENT)) * _PAGE


def _guard(address: int) -> None:
    """Forbid every access to the page at `address`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), _PROT_NONE) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SaverMemoryError(f"zeros: cannot guard the pages around a tensor: {reason}")


class HostMemorySaver:
    """A `MemorySaver` of host memory that is real: resident memory falls on `pause`.

    Every tensor is a mapping of its own, filled when it is allocated and again on `resume`, so a
    shortage shows there and not at a later write (as far as the system refuses: one that
    overcommits may kill a process instead). Memory is unmapped with the last view of a tensor,
    also while its tag is paused, and is never handed out again. `resident_bytes` counts whole pages
    in the kernel's page tables. In a forked child, `pause` empties the child's copy alone.

    Threads may share a saver: allocating, pausing and resuming wait for each other. That the memory
    is not in use while it is paused remains the caller's business.

    Raises:
        SaverUnavailableError: not on Linux.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise SaverUnavailableError(
                f"HostMemorySaver: needs Linux (madvise), this is {sys.platform}; build the pool "
                "with enable_memory_saver=False, or pass memory_saver=NoMemorySaver()"
            )
        self._tags = Tags()
        self._segments: dict[str, WeakSet[Segment]] = {}
        self._lock = Lock()

    @contextmanager
    def region(self, tag: str) -> Iterator["HostRegion"]:
        """Allocate under `tag`, see `MemorySaver.region`."""
        with self._lock:
            self._tags.open(tag)
            self._segments.setdefault(tag, WeakSet())
        yield HostRegion(self, tag)

    def zeros(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros whose memory belongs to `tag`; callers go through `region`."""
        with self._lock:
            if self.is_paused(tag):
                raise PausedPoolError(f"zeros: tag {tag!r} was paused inside its region")
            count = prod(shape)
            if count == 0:
                return torch.zeros(tuple(shape), dtype=dtype)
            segment = self._segment(tag, count * dtype.itemsize)
        return segment.tensor(dtype, count).view(tuple(shape))

    def pause(self, tag: str) -> None:
        """Give back the memory of `tag`, see `MemorySaver.pause`.

        Where the system refuses some of it (locked memory), all the rest is given back; a later
        call tries again.
        """
        with self._lock:
            self._tags.require("pause", tag)
            # Marked first: if the system refuses, part of the contents is lost all the same, and
            # nobody may read it as if it were there.
            self._tags.mark_paused(tag)
            segments = list(self._segments[tag])
            refusals = self._drop(segments)
            if refusals:
                raise SaverMemoryError(
                    f"pause: tag {tag!r}: {len(refusals)} of {len(segments)} tensors keep their "
                    f"memory: {refusals[0]}; expected memory that is not locked, then pause again"
                ) from refusals[0]

    def resume(self, tag: str) -> None:
        """Take the memory of `tag` again, see `MemorySaver.resume`."""
        with self._lock:
            if not self._tags.is_paused("resume", tag):
                return
            segments = list(self._segments[tag])
            try:
                for segment in segments:
                    # A raw view may have been written meanwhile; what comes back is zeros all the
                    # same.
                    segment.drop()
                    self._populate(segment)
            except OSError as error:
                self._drop(segments)
                raise SaverMemoryError(
                    f"resume: tag {tag!r}: no memory for {self._usable(tag)} bytes, or locked "
                    f"memory that cannot be emptied: {error}; the tag stays paused"
                ) from error
            self._tags.mark_resumed(tag)

    def _drop(self, segments: Sequence[Segment]) -> list[OSError]:
        """Give the memory of all these back; what the system answered where it refused."""
        refusals: list[OSError] = []
        for segment in segments:
            try:
                segment.drop()
            except OSError as error:
                refusals.append(error)
        return refusals

    def resident_bytes(self, tag: str) -> int:
        """Bytes of `tag` in memory, in whole pages, as the kernel's page tables have it."""
        with self._lock:
            self._tags.require("resident_bytes", tag)
            return sum(segment.resident_bytes() for segment in list(self._segments[tag]))

    def is_paused(self, tag: str) -> bool:
        """Whether `tag` is paused."""
        return self._tags.is_paused("is_paused", tag)

    def _segment(self, tag: str, nbytes: int) -> Segment:
        """Memory for one tensor of `tag`: mapped for it, recorded under its tag, filled."""
        segment = Segment.of(nbytes)
        try:
            self._populate(segment)
        except OSError as error:
            raise SaverMemoryError(f"zeros: no memory for {nbytes} bytes: {error}") from error
        self._segments[tag].add(segment)
        return segment

    def _populate(self, segment: Segment) -> None:
        """Make `segment` resident, or raise OSError."""
        segment.populate()

    def _usable(self, tag: str) -> int:
        """Bytes of all segments of `tag`."""
        return sum(segment.usable for segment in self._segments[tag])


@dataclass(frozen=True, slots=True)
class HostRegion:
    """Allocates host memory of one tag."""

    saver: HostMemorySaver
    tag: str

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> torch.Tensor:
        """A resident tensor of zeros in a mapping of its own, see `Region.zeros`."""
        if torch.device(device).type != "cpu" or any(length < 0 for length in shape):
            raise GeometryError(
                f"zeros: shape {list(shape)} on {device}; expected no negative size, on cpu"
            )
        return self.saver.zeros(self.tag, shape, dtype)

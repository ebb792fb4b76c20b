"""The raw recording of a live allocator: calls as they happen, in a file mapped into memory.

A record is a header of 16 bytes (a number, the size of what follows in bytes, a tag) and the
numbers of one tensor as they lie in memory. It is written before the call is made, with the tag
last, so that the death of the process leaves every call up to and including the one that did it;
what the machine itself loses when it goes down is lost. On a CPU nothing here is dispatched to
torch: a tensor's bytes are copied from its address. Leaves out reading
(`kvcore.targets.recording_raw`) and which calls there are to record (`kvcore.targets.recorder`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcore.native import bound

MAGIC = b"kvcore-recording"
VERSION = 1
PRELUDE = struct.Struct("<16sII")
"""Magic, version, bytes of the JSON header that follows."""

HEAD = struct.Struct("<qIxxH")
"""Number, bytes of the body, tag. Packed in this order, so that the tag commits the record."""

NARROW, UNREADABLE, TAG = 0x8000, 0x4000, 0x0FFF
"""In a tag: the body is int32 and not int64; an argument was no tensor of integers; the rest."""

POPULATE_WRITE = 23
"""Advice of Linux (MADV_POPULATE_WRITE): make pages of a map ready to be written."""

FIRST_BYTES, MOST_BYTES = 2**20, 2**22
"""The file grows by as much as it has, between these."""

RESERVE = 2 * HEAD.size
"""Bytes kept back for the record that says how the recording ended."""

KEPT_SIZES = 4096
"""Sizes in bytes for which a reader of memory is kept."""


class RecordingError(Exception):
    """An allocator cannot be recorded, or a recording not be read; the message is one sentence."""


class Mark(IntEnum):
    """Tags of records that are no calls. PART: a further tensor of the call before it. ANSWER: the
    slots that it lent, number -1 if it refused. RAISED: the text of what it raised. END: the
    recording was ended. LOST: it ended itself, for want of room."""

    PART = 0x0F00
    ANSWER = 0x0F01
    RAISED = 0x0F02
    END = 0x0F03
    LOST = 0x0F04


Reader = Callable[[int], ctypes.Array[ctypes.c_char]]
"""The bytes at an address."""


def reader_of(size: int) -> Reader:
    """Reads so many bytes."""
    return (ctypes.c_char * size).from_address


def _address_of(buffer: mmap.mmap) -> int:
    """Where the map is, until it is resized; nothing is kept that would forbid that."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def as_vector(index: object) -> torch.Tensor | None:
    """An index as int64 on the host, one-dimensional and contiguous; None for what is none. Waits
    for the device if the index is on one."""
    if not isinstance(index, torch.Tensor):
        if not isinstance(index, Sequence) or not all(isinstance(item, int) for item in index):
            return None
        try:
            return torch.tensor(list(index), dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError):
            return None
    if index.is_floating_point() or index.is_complex():
        return None
    try:
        return index.detach().to("cpu", torch.int64).reshape(-1).contiguous()
    except (NotImplementedError, RuntimeError):
        # Of a device that holds nothing, or none at all any more: the call itself will say so.
        return None


COMPILED = bound("kvcore.targets._tape")
"""The compiled helpers for plain calls, or None; see `_tape.c`."""

if TYPE_CHECKING or COMPILED is None:

    class State:
        """Where a tape stands; see `Tape`."""

        __slots__ = ("address", "inside", "room", "tail")

        address: int
        inside: bool
        room: int
        tail: int

else:
    State = COMPILED.State


class Tape(State):
    """The raw file. ``inside``: a call is being made, so that further ones are the allocator's own.
    ``tail``: where the next record begins; ``room``: where it has to end. ``address``: where the
    file lies in memory.

    Raises:
        RecordingError: there is such a file already, or it cannot be written.
    """

    __slots__ = ("_file", "_readers", "_size", "buffer", "path")

    def __init__(self, path: Path, header: bytes) -> None:
        super().__init__()
        self.path = path
        try:
            self._file = path.open("x+b")
        except FileExistsError:
            raise RecordingError(
                f"{path}: exists already: translate or remove it, or record to another path"
            ) from None
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            self._size = FIRST_BYTES + len(header)
            os.posix_fallocate(self._file.fileno(), 0, self._size)
            self.buffer = mmap.mmap(self._file.fileno(), self._size)
        except OSError as error:
            self._file.close()
            path.unlink()
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None
        self._make_ready(0)
        self.address = _address_of(self.buffer)
        self.room = self._size - RESERVE
        self.inside = False
        self._readers: dict[int, Reader] = {}
        PRELUDE.pack_into(self.buffer, 0, MAGIC, VERSION, len(header))
        self.buffer[PRELUDE.size : PRELUDE.size + len(header)] = header
        self.tail = PRELUDE.size + len(header)

    def tensor(self, tag: int, number: int, index: Any) -> None:
        """A record with the numbers of a tensor."""
        try:
            dtype = index.dtype
            if dtype is torch.int32:
                tag |= NARROW
            elif dtype is not torch.int64:
                self._unusual(tag, number, index)
                return
            if not (index.is_cpu and index.is_contiguous()):
                self._unusual(tag & ~NARROW, number, index)
                return
        except AttributeError:
            self._unusual(tag, number, index)
            return
        size = index.nbytes
        start = self.tail
        body = start + 16
        after = body + size
        if after > self.room and not self._grow(after):
            return
        buffer = self.buffer
        if size:
            if index.data_ptr() == 0:
                # Some tensors have a shape and no memory.
                self.plain(tag | UNREADABLE, number)
                return
            reader = self._readers.get(size)
            if reader is None:
                reader = self._new_reader(size)
            # Read from the address: a copy by torch would cost more than the whole record.
            buffer[body:after] = reader(index.data_ptr())
        HEAD.pack_into(buffer, start, number, size, tag)
        self.tail = after

    def plain(self, tag: int, number: int = 0) -> None:
        """A record of a number alone."""
        start = self.tail
        after = start + 16
        if after > self.room and not self._grow(after):
            return
        HEAD.pack_into(self.buffer, start, number, 0, tag)
        self.tail = after

    def octets(self, tag: int, number: int, body: bytes) -> None:
        """A record with these bytes."""
        start = self.tail
        after = start + 16 + len(body)
        if after > self.room and not self._grow(after):
            return
        self.buffer[start + 16 : after] = body
        HEAD.pack_into(self.buffer, start, number, len(body), tag)
        self.tail = after

    def erase(self, start: int) -> None:
        """Take back what was written from ``start`` on."""
        if not self.buffer.closed and start < self.tail:
            self.buffer[start : self.tail] = bytes(self.tail - start)
            self.tail = start

    def close(self) -> None:
        """End the recording; the file keeps what was written and no more."""
        if self.buffer.closed:
            return
        self.room = self._size
        self.plain(Mark.END)
        self._close()

    def _close(self) -> None:
        self.buffer.flush()
        self.buffer.close()
        self._file.truncate(self.tail)
        self._file.close()
        self.room = -1

    def _unusual(self, tag: int, number: int, index: object) -> None:
        """A tensor whose bytes are not the numbers as they are wanted, or no tensor at all."""
        vector = as_vector(index)
        if vector is None:
            self.plain(tag | UNREADABLE, number)
        else:
            self.tensor(tag, number, vector)

    def _new_reader(self, size: int) -> Reader:
        if len(self._readers) == KEPT_SIZES:
            self._readers.clear()
        reader = self._readers[size] = reader_of(size)
        return reader

    def _grow(self, need: int) -> bool:
        """Make room up to ``need``; False if the recording is over."""
        if self.buffer.closed:
            return False
        size = self._size
        while need > size - RESERVE:
            size += min(max(size, FIRST_BYTES), MOST_BYTES)
        # Whatever interrupts this, nothing is written where the map was.
        self.room = -1
        try:
            # A page of the map without room on the disk behind it would end the process.
            os.posix_fallocate(self._file.fileno(), self._size, size - self._size)
            self.buffer.resize(size)
        except (OSError, SystemError) as error:
            self.room = self._size
            self.plain(Mark.LOST)
            self._close()
            warnings.warn(f"{self.path}: the recording ended here: {error}", stacklevel=4)
            return False
        before, self._size = self._size, size
        self.address = _address_of(self.buffer)
        self.room = size - RESERVE
        self._make_ready(before)
        return True

    def _make_ready(self, start: int) -> None:
        """Let the pages from ``start`` on be found at once, instead of one by one in the middle of
        the engine's work; older kernels do not know how."""
        start -= start % mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self.buffer.madvise(POPULATE_WRITE, start, self._size - start)

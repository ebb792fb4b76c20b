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
"""In a tag: the body is int32 and not int64; what it should hold could not be written; the rest."""

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
    slots that it lent, number -1 if it refused; a PART with their peers follows if they have any.
    RAISED: the text of what it raised. END: the recording was ended. LOST: it ended itself, for
    want of room."""

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


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether these are integers; truth values are not."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


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
    if not holds_numbers(index):
        return None
    if index.dtype is torch.int64 and index.ndim == 1 and index.is_cpu and index.is_contiguous():
        return index
    try:
        return index.detach().to("cpu", torch.int64).reshape(-1).contiguous()
    except (NotImplementedError, RuntimeError):
        # Of a device that holds nothing, or none at all any more: the call itself will say so.
        return None


COMPILED = bound("kvcore.targets._tape")
"""The compiled helpers for plain calls, or None; see `_tape.c`."""


def _address_of(buffer: mmap.mmap) -> int:
    """Where a map is, until it is resized; only the compiled helpers need to know."""
    address: int = COMPILED.address_of(buffer) if COMPILED is not None else 0
    return address


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

    __slots__ = ("_ending", "_file", "_reach", "_readers", "buffer", "path")

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
            size = FIRST_BYTES + len(header)
            os.posix_fallocate(self._file.fileno(), 0, size)
            self.buffer = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            self._file.close()
            path.unlink()
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None
        self._make_ready(0)
        self.inside = False
        self._ending: Mark | None = None
        self._readers: dict[int, Reader] = {}
        PRELUDE.pack_into(self.buffer, 0, MAGIC, VERSION, len(header))
        self.buffer[PRELUDE.size : PRELUDE.size + len(header)] = header
        self.tail = self._reach = PRELUDE.size + len(header)
        self._find_room()

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
        buffer, self._reach = self.buffer, after
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
        self._reach = after
        HEAD.pack_into(self.buffer, start, number, 0, tag)
        self.tail = after

    def octets(self, tag: int, number: int, body: bytes) -> None:
        """A record with these bytes."""
        start = self.tail
        after = start + 16 + len(body)
        if after > self.room and not self._grow(after):
            return
        self._reach = after
        self.buffer[start + 16 : after] = body
        HEAD.pack_into(self.buffer, start, number, len(body), tag)
        self.tail = after

    def erase(self, start: int) -> None:
        """Take back what was written from ``start`` on, whole records or not."""
        end = max(self.tail, self._reach)
        if not self.buffer.closed and start < end:
            self.tail = start
            self.buffer[start:end] = bytes(end - start)

    def close(self) -> None:
        """End the recording; the file keeps what was written and no more."""
        self._end(Mark.END)

    def discard(self) -> None:
        """Leave no file behind."""
        try:
            self.close()
        finally:
            self.path.unlink()

    def _end(self, how: Mark) -> None:
        """Say how the recording ended, in the bytes kept back for it, and let go of the file. May
        be interrupted, and is then to be done again."""
        # First: nothing is written where the map was.
        self.room = -1
        if self._ending is None:
            self._ending = how
        # A handler of signals may do it meanwhile.
        with contextlib.suppress(ValueError):
            if not self.buffer.closed:
                HEAD.pack_into(self.buffer, self.tail, 0, 0, self._ending)
                self.buffer.flush()
                self.buffer.close()
            if not self._file.closed:
                self._file.truncate(self.tail + HEAD.size)
                self._file.close()

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
        if self._ending is not None:
            return False
        # Whatever interrupts this, nothing is written where the map was.
        self.room = -1
        # Not as it should be but as it is: the growth before may have been interrupted.
        before = size = len(self.buffer)
        while need > size - RESERVE:
            size += min(max(size, FIRST_BYTES), MOST_BYTES)
        if size > before:
            try:
                # A page of the map without room on the disk behind it would end the process.
                os.posix_fallocate(self._file.fileno(), before, size - before)
                self.buffer.resize(size)
            except (OSError, SystemError) as error:
                if self._ending is None:
                    self._lose(error)
                return False
        self._find_room()
        self._make_ready(before)
        return self._ending is None

    def _find_room(self) -> None:
        """Let records be written up to the end of the map."""
        room = len(self.buffer) - RESERVE
        address = _address_of(self.buffer)
        self.address = address
        self.room = room
        # A handler of signals may have ended the recording. None runs between this and the line
        # above, where nothing is called.
        if self._ending is not None:
            self.room = -1

    def _lose(self, error: Exception) -> None:
        """End the recording for want of room; the engine goes on."""
        with contextlib.suppress(OSError):
            self._end(Mark.LOST)
        # Where warnings are errors, the file alone says it.
        with contextlib.suppress(UserWarning):
            warnings.warn(f"{self.path}: the recording ended here: {error}", stacklevel=5)

    def _make_ready(self, start: int) -> None:
        """Let the pages from ``start`` on be found at once, instead of one by one in the middle of
        the engine's work; older kernels do not know how."""
        start -= start % mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self.buffer.madvise(POPULATE_WRITE, start, len(self.buffer) - start)

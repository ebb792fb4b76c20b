"""Raw recordings read back: the header, and the calls one after the other.

A call has the side that it was made on, its number and tensors, and how it ended, which is unknown
of the last one if the process died, and of one that was interrupted. Leaves out what the calls mean
(`kvcore.targets.recording_calls`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from kvcore.models import Geometry
from kvcore.targets.recording_tape import (
    HEAD,
    MAGIC,
    NARROW,
    PRELUDE,
    TAG,
    UNREADABLE,
    VERSION,
    Mark,
    RecordingError,
)


class Call(IntEnum):
    """The calls that change an allocator, by the name of the field in lower case but for the last
    letters: see `METHODS` in `kvcore.targets.recorder`. The numbers are those of the raw file."""

    ALLOC = 1
    EXTEND = 2
    DECODE = 3
    SWA_TAIL = 4
    FREE = 5
    FREE_SWA = 6
    FREE_FULL = 7
    FREE_SEGMENT = 8
    FREE_SWA_SEGMENT = 9
    FREE_FULL_SEGMENT = 10
    FREE_SEGMENTS = 11
    FREE_SWA_SEGMENTS = 12
    FREE_FULL_SEGMENTS = 13
    FREE_PAGES = 14
    GROUP_BEGIN = 15
    GROUP_END = 16
    MAP = 17
    UNMAP = 18
    RECOVER = 19
    CLEAR = 20
    RESIZE = 21
    RESTORE = 22


class Side(IntEnum):
    """What a call was made on: the allocator, or one of its sides by an engine that goes there
    directly."""

    WHOLE = 0
    FULL = 1
    SWA = 2


SIDE_SHIFT = 8
"""A tag is the call, and the side so many bits further up."""

PARTS = {
    Call.EXTEND: 3,
    Call.DECODE: 2,
    Call.SWA_TAIL: 4,
    Call.MAP: 1,
    Call.RECOVER: 1,
}
"""Further tensors of a call, besides that in its own record. Segments say themselves how many."""

NAMED = frozenset((*range(Call.FREE, Call.FREE_FULL_SEGMENT + 1), Call.FREE_PAGES)) | {
    Call.MAP,
    Call.UNMAP,
    Call.RECOVER,
}
"""Calls whose own record holds their first tensor."""

LENDING = (Call.ALLOC, Call.EXTEND, Call.DECODE, Call.SWA_TAIL)
"""Calls that have an answer."""

SEGMENTS = (Call.FREE_SEGMENTS, Call.FREE_SWA_SEGMENTS, Call.FREE_FULL_SEGMENTS)
"""Calls whose number is that of their parts; the number of each part is where it starts."""


class RawHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was recorded. ``target`` and ``geometry`` are those of the trace, ``allocator`` is the
    class. ``lent_before``: slots that were lent when the recording began.
    ``full_side_joins_group``, ``free_swa_joins_group``: see `kvcore.models.Contract`.
    ``frees_full``: whether the allocator has a `free_full` of its own. ``errors_change_nothing``:
    whether a call that raised can be left out."""

    target: str
    geometry: Geometry
    allocator: str
    lent_before: int
    full_side_joins_group: bool
    free_swa_joins_group: bool
    frees_full: bool
    errors_change_nothing: bool


Ending = Literal["returned", "lent", "refused", "raised", "unknown", "interrupted", "unreadable"]
"""How a call ended. Interrupted: one that lends, without its answer although the file goes on.
Unreadable: its answer could not be written, or the peers of it."""


@dataclass(slots=True)
class RawCall:
    """One call. ``number`` counts from 1; ``scalar`` is the number that it was given; ``vectors``
    are its tensors, or None for one that was none; ``slots`` and ``peers`` what it lent."""

    number: int
    call: Call
    side: Side
    scalar: int
    vectors: list[list[int] | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ending: Ending = "unknown"
    slots: list[int] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def expected_parts(self) -> int:
        """How many records after the first one belong to the arguments."""
        return self.scalar if self.call in SEGMENTS else PARTS.get(self.call, 0)

    @property
    def readable(self) -> bool:
        """Whether every argument was a tensor of integers."""
        return all(vector is not None for vector in self.vectors)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A raw file. ``calls``: those whose arguments are all there. ``ended``: how it ends, in words,
    or None if the recording was ended on purpose."""

    header: RawHeader
    calls: tuple[RawCall, ...]
    ended: str | None


def read_raw(path: Path) -> Recorded:
    """The recording in ``path``.

    Raises:
        RecordingError: it cannot be read, or is no recording of this version.
    """
    try:
        # Reading from a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise RecordingError(f"{path}: is not a regular file, expected a raw recording")
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    header, start = _read_header(data, path)
    calls: list[RawCall] = []
    try:
        ended = _read_calls(data, start, calls)
    except (ValueError, IndexError):
        # A tag that means nothing: the file was damaged, and what follows cannot be told.
        raise RecordingError(
            f"{path}: damaged behind call {len(calls)}, expected the records of a recording"
        ) from None
    if header.geometry.hybrid:
        _require_peers(calls, is_whole=ended is None)
    return Recorded(header, tuple(calls), ended)


def _read_header(data: bytes, path: Path) -> tuple[RawHeader, int]:
    if not data:
        raise RecordingError(f"{path}: the file is empty, expected a raw recording")
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise RecordingError(f"{path}: not a raw recording of an allocator")
    if len(data) < PRELUDE.size:
        raise RecordingError(f"{path}: cut off within its first {PRELUDE.size} bytes")
    _, version, length = PRELUDE.unpack_from(data)
    if version != VERSION:
        raise RecordingError(
            f"{path}: the recording is of version {version}, this kvcore reads {VERSION}"
        )
    body = data[PRELUDE.size : PRELUDE.size + length]
    if len(body) < length:
        raise RecordingError(f"{path}: cut off within its header")
    try:
        return msgspec.json.decode(body, type=RawHeader), PRELUDE.size + length
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordingError(f"{path}: no header of a recording: {error}") from None


def _require_peers(calls: list[RawCall], *, is_whole: bool) -> None:
    """An answer without its peers is none: the process ended, or the call, while it was written."""
    for call in calls:
        lent = call.ending == "lent" and call.side is Side.WHOLE
        if lent and len(call.peers) != len(call.slots):
            goes_on = is_whole or call is not calls[-1]
            call.ending, call.slots = "interrupted" if goes_on else "unknown", []


def _read_calls(data: bytes, start: int, calls: list[RawCall]) -> str | None:
    """Fill ``calls``; how the recording ends."""
    parts, answered = 0, False
    while start + HEAD.size <= len(data):
        number, size, tag = HEAD.unpack_from(data, start)
        body = data[start + HEAD.size : start + HEAD.size + size]
        start += HEAD.size + size
        kind = tag & TAG
        if kind == 0:
            break
        if len(body) < size:
            cut = len(calls) + (kind < Mark.PART)
            return _drop_unfinished(calls, parts, f"the file was cut off in call {cut}")
        if kind == Mark.LOST:
            return _drop_unfinished(calls, parts, "there was no room for more")
        if kind == Mark.END:
            _settle(calls)
            return None
        vector = None if tag & UNREADABLE else _numbers(body, narrow=bool(tag & NARROW))
        if kind == Mark.RAISED:
            calls[-1].ending, calls[-1].error = "raised", body.decode(errors="replace")
        elif kind == Mark.ANSWER:
            calls[-1].ending = (
                "refused" if number < 0 else "lent" if vector is not None else "unreadable"
            )
            calls[-1].slots, answered = vector or [], True
        elif kind == Mark.PART and answered:
            calls[-1].peers = vector or []
            if vector is None:
                calls[-1].ending = "unreadable"
        elif kind == Mark.PART:
            calls[-1].vectors.append(vector)
            calls[-1].starts.append(number)
            parts -= 1
        else:
            _settle(calls)
            if parts > 0:
                # Its arguments could not be written, and it was not made.
                calls.pop()
            call = Call(kind & ((1 << SIDE_SHIFT) - 1))
            made = RawCall(len(calls) + 1, call, Side(kind >> SIDE_SHIFT), number)
            if call in NAMED or tag & UNREADABLE:
                made.vectors.append(vector)
            calls.append(made)
            # Of a call that could not be written there may be nothing else.
            parts, answered = 0 if tag & UNREADABLE else made.expected_parts, False
    return _drop_unfinished(calls, parts, "the process ended")


def _numbers(body: bytes, *, narrow: bool) -> list[int] | None:
    if len(body) % (4 if narrow else 8):
        return None
    numbers: list[int] = np.frombuffer(body, dtype="<i4" if narrow else "<i8").tolist()
    return numbers


def _settle(calls: list[RawCall]) -> None:
    """Another record follows, so the last call came back; one that lends says so itself, or was
    interrupted."""
    if calls and calls[-1].ending == "unknown":
        calls[-1].ending = "interrupted" if calls[-1].call in LENDING else "returned"


def _drop_unfinished(calls: list[RawCall], parts: int, ended: str) -> str:
    """A call whose arguments are not all there was not made yet."""
    if calls and parts > 0:
        calls.pop()
        return f"{ended}, while call {len(calls) + 1} was being written"
    return ended

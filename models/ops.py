"""The vocabulary of programs: one frozen struct an operation.

An op names logical things (a sequence, a backup, the group), never a physical slot, so that any
subsequence of a program is again a program: an op whose names mean nothing is simply not allowed.
Pages are counted within a sequence's row (0 is its first page). What an op may do, and when, is
`kvcore.models.rules`; what a target answers is `kvcore.models.outcomes`.
"""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar, Literal

import msgspec

Form = Literal["slots", "sparse", "segment", "segments"]
"""How a free names its pages: every lent slot, one slot a page in reverse order, as a segment
of the row with its start position, or as two such segments in one call."""

Memory = Literal["kv_cache", "weights"]
"""A tag of the memory saver: that of the pools, and somebody else's."""

Name = int
"""A sequence, a backup, a device buffer or a piece of memory; -1 is nobody."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
"""Tokens, pages, or a page's place in its row; the bounds hold where a trace is read."""


class Op(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="op"
):
    """Base of all operations; ``kind`` is the tag that traces and violations use."""

    kind: ClassVar[str] = "op"
    hostile: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """What violations call the op: its kind, and for a hostile one the call too."""
        return self.kind


class Alloc(Op, frozen=True, tag="alloc"):
    """A new sequence of ``pages`` whole pages. With ``overwrite`` the caller afterwards scribbles
    over the tensor that it was handed (law L8)."""

    seq: Name
    pages: Count
    overwrite: bool = False
    kind: ClassVar[str] = "alloc"


class Extend(Op, frozen=True, tag="extend"):
    """One batch of prefills: each part is (sequence, new tokens); an unknown name starts a row."""

    parts: tuple[tuple[Name, Count], ...]
    overwrite: bool = False
    kind: ClassVar[str] = "extend"


class Decode(Op, frozen=True, tag="decode"):
    """One token more for each sequence of the batch."""

    seqs: tuple[Name, ...]
    overwrite: bool = False
    kind: ClassVar[str] = "decode"


class SwaTail(Op, frozen=True, tag="swa_tail"):
    """Extend one row by ``tokens``, with SWA slots for ``tail`` of them only: the last ones, but
    for ``beyond`` tokens after them."""

    seq: Name
    tokens: Count
    tail: Count
    beyond: Count = 0
    kind: ClassVar[str] = "swa_tail"


class PagesOp(Op, frozen=True):
    """Base of the frees: pages ``[start, stop)`` of a row, named in one of the forms; ``stop`` None
    is the row's end. With ``overwrite`` the caller scribbles over its tensor after it (law L8)."""

    seq: Name
    start: Count = 0
    stop: Count | None = None
    form: Form = "slots"
    overwrite: bool = False
    kind: ClassVar[str] = "pages"

    def __post_init__(self) -> None:
        # Defaults are recognised by identity, so that an op that was read is written as it was.
        msgspec.structs.force_setattr(self, "form", sys.intern(self.form))


class Free(PagesOp, frozen=True, tag="free"):
    """The pages leave the row, both sides."""

    kind: ClassVar[str] = "free"


class FreeSwa(PagesOp, frozen=True, tag="free_swa"):
    """The SWA peers of the pages are released; the full slots stay in the row."""

    kind: ClassVar[str] = "free_swa"


class FreeFull(PagesOp, frozen=True, tag="free_full"):
    """The pages, whose peers are gone, leave the row: the full side alone."""

    kind: ClassVar[str] = "free_full"


class GroupBegin(Op, frozen=True, tag="group_begin"):
    """Open a free group."""

    kind: ClassVar[str] = "group_begin"


class GroupEnd(Op, frozen=True, tag="group_end"):
    """Close the free group: everything freed inside becomes available."""

    kind: ClassVar[str] = "group_end"


class Recover(Op, frozen=True, tag="recover"):
    """Give ``pages`` tombstoned pages of ``kept`` an SWA value again from ``incoming``.

    ``locked``: the kept full slots stay and take over the peers; the incoming full slots are freed
    on the full side. Otherwise the incoming slots replace the kept ones, which are freed.
    """

    kept: Name
    incoming: Name
    locked: bool
    pages: Count = 1
    kept_start: Count = 0
    incoming_start: Count = 0
    kind: ClassVar[str] = "recover"


class LoadBack(Op, frozen=True, tag="load_back"):
    """Host copy to fresh slots: a new row of ``pages``, SWA peers for the last ``swa_pages`` of
    them, taken from each side alone and joined by raw mapping writes."""

    seq: Name
    pages: Count
    swa_pages: Count
    kind: ClassVar[str] = "load_back"


class LoadBackSwa(Op, frozen=True, tag="load_back_swa"):
    """The SWA value of tombstoned pages ``[start, stop)`` comes back from host memory: fresh SWA
    slots and a raw mapping write over full slots that never left."""

    seq: Name
    start: Count = 0
    stop: Count | None = None
    kind: ClassVar[str] = "load_back_swa"


class Retract(Op, frozen=True, tag="retract"):
    """Copy the row's KV to host memory under the name ``backup``, then free the row."""

    seq: Name
    backup: Name
    kind: ClassVar[str] = "retract"


class Restore(Op, frozen=True, tag="restore"):
    """Bring ``backup`` into new slots as row ``seq``; with ``tail`` only the last ``tail`` tokens
    get SWA slots. The backup is used up."""

    backup: Name
    seq: Name
    tail: Count | None = None
    kind: ClassVar[str] = "restore"


class Relocate(Op, frozen=True, tag="relocate"):
    """The row's KV moves to new slots, all with peers, inside the pool; the old slots are freed."""

    seq: Name
    kind: ClassVar[str] = "relocate"


class ExtendLogical(Op, frozen=True, tag="extend_logical"):
    """`Extend` of logical slots alone: no device slot is taken (HiSparse)."""

    parts: tuple[tuple[Name, Count], ...]
    kind: ClassVar[str] = "extend_logical"


class FreeDevice(PagesOp, frozen=True, tag="free_device"):
    """The device slots of the pages are released; the logical slots stay in the row."""

    kind: ClassVar[str] = "free_device"


class DeviceBuffer(Op, frozen=True, tag="device_buffer"):
    """The device pages of a row become a private buffer of ``pages`` device pages: surplus is
    released, shortage is taken, and the row has no device slots any more."""

    seq: Name
    buffer: Name
    pages: Count
    kind: ClassVar[str] = "device_buffer"


class FreeBuffer(Op, frozen=True, tag="free_buffer"):
    """A device buffer is given back."""

    buffer: Name
    kind: ClassVar[str] = "free_buffer"


class Reserve(Op, frozen=True, tag="reserve"):
    """A piece of memory of ``size`` operating-system pages is allocated under ``memory``."""

    region: Name
    memory: Memory
    size: Count
    kind: ClassVar[str] = "reserve"


class Drop(Op, frozen=True, tag="drop"):
    """Nobody uses that piece of memory any more."""

    region: Name
    kind: ClassVar[str] = "drop"


class Pause(Op, frozen=True, tag="pause"):
    """The memory saver gives back everything that was allocated under ``memory``."""

    memory: Memory
    kind: ClassVar[str] = "pause"


class Resume(Op, frozen=True, tag="resume"):
    """The memory saver brings it back, at the same addresses, filled with zeros."""

    memory: Memory
    kind: ClassVar[str] = "resume"


class Clear(Op, frozen=True, tag="clear"):
    """Drop everything: all rows, the open group. Backups in host memory stay."""

    kind: ClassVar[str] = "clear"


class Hostile(Op, frozen=True, tag="hostile"):
    """A call that breaks the contract and must raise; see `kvcore.models.hostile` for the calls.
    ``seq`` and ``other`` name sequences where the call needs them."""

    call: str
    seq: Name = -1
    other: Name = -1
    kind: ClassVar[str] = "hostile"
    hostile: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """What violations call the op."""
        return f"hostile {self.call}"


AnyOp = (
    Alloc
    | Extend
    | Decode
    | SwaTail
    | Free
    | FreeSwa
    | FreeFull
    | GroupBegin
    | GroupEnd
    | Recover
    | LoadBack
    | LoadBackSwa
    | Retract
    | Restore
    | Relocate
    | ExtendLogical
    | FreeDevice
    | DeviceBuffer
    | FreeBuffer
    | Reserve
    | Drop
    | Pause
    | Resume
    | Clear
    | Hostile
)
"""Every op that a trace may hold, for decoding."""

OP_KINDS: tuple[str, ...] = (
    "alloc",
    "extend",
    "decode",
    "swa_tail",
    "free",
    "free_swa",
    "free_full",
    "group_begin",
    "group_end",
    "recover",
    "load_back",
    "load_back_swa",
    "retract",
    "restore",
    "relocate",
    "extend_logical",
    "free_device",
    "device_buffer",
    "free_buffer",
    "reserve",
    "drop",
    "pause",
    "resume",
    "clear",
    "hostile",
)

"""What a target is: three calls, a geometry and the contract of its callers.

Covers the protocol and the frozen view of a target's state. Leaves out how a particular allocator
is driven (`kvcore.targets.driver`) and how targets are named (`kvcore.targets.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from kvcore.models import Contract, Geometry, Outcome
from kvcore.models.ops import Memory, Op
from kvcore.targets.tree_view import TreeView

Side = Literal["full", "SWA", "device"]


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a token's stamp is written: a part of the rows of one pool. The n-th token lent in a
    run has stamp n, n from 1; the part holds ``sign`` times n. Tokens brought back from a backup
    keep the stamps that they had."""

    name: str
    side: Side
    sign: int


MHA_STREAMS = (
    Stream("full K", "full", 1),
    Stream("full V", "full", -1),
    Stream("SWA K", "SWA", 1),
    Stream("SWA V", "SWA", -1),
)
"""The streams of a pool of keys and values."""


class Answers(msgspec.Struct):
    """What the public queries say, as host numbers: room in slots (of the device side as such, not
    in logical slots) and in rows of the request pool, and for law L9 what the outer allocator and
    its inner ones say of the same thing; ``asked`` names those questions. Made new for each view,
    so that nobody has to guard it against changes."""

    available: int
    full_available: int
    swa_available: int
    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    device_available: int = 0
    requests_available: int = 0
    asked: tuple[str, ...] = ()

    def with_requests(self, available: int) -> Answers:
        """The same with so many rows of the request pool."""
        return Answers(
            *(self.available, self.full_available, self.swa_available, self.outer, self.inner),
            *(self.device_available, available, self.asked),
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Memory under one tag, in bytes: how much the operating system holds resident of what was
    allocated there, and how much the saver says it does. ``values``: the last byte of each piece
    that a program reserved, in the order of their names; empty while the tag is paused."""

    resident: int
    said: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What lies under the memory saver, by tag. ``pool``: address and length in bytes of each of
    the pool's buffers, whole operating-system pages; ``pool_before``: the same when the target was
    built."""

    held: dict[Memory, Held]
    pool: tuple[tuple[int, int], ...]
    pool_before: tuple[tuple[int, int], ...]


class HostView(msgspec.Struct):
    """A view in plain lists. ``full_free``, ``swa_free``, ``device_free`` are page ids in the order
    of the free containers, ``request_free`` rows of the request pool; ``mapping`` is the whole
    mapping tensor, sentinel included (empty without an SWA side), ``device_mapping`` that of the
    device slots; ``stamps`` has a list of rows for each of `View.streams`, empty if not asked for;
    ``request_rows`` the request pool's whole table, flat, empty if not asked for; ``pending`` the
    full, SWA and device pages that wait for the end of the group, empty if not asked for or if the
    target cannot tell; ``held`` is what the tensors of earlier answers hold now, by the answer's
    number; ``memory`` what lies under the memory saver, None if not asked for. Lists are copies."""

    full_free: list[int]
    swa_free: list[int]
    mapping: list[int]
    held: dict[int, list[int]]
    answers: Answers
    stamps: tuple[list[int], ...] = ()
    pending: tuple[list[int], ...] = ()
    device_free: list[int] = []
    device_mapping: list[int] = []
    request_free: list[int] = []
    request_rows: list[int] = []
    memory: MemoryView | None = None


Twins = tuple[tuple[str, ...], tuple[str, ...]]
"""What a wrapper and what it wraps said to the last op and to the queries, each in words."""

Pair = tuple[torch.Tensor, torch.Tensor]


class Layout(NamedTuple):
    """The parts of a view: free full pages, free SWA pages, mapping, ``stamps`` streams,
    ``pending`` sides, the earlier ``answers`` by number, then free device pages, device mapping,
    free rows and request table."""

    stamps: int
    pending: int
    answers: tuple[int, ...]

    @property
    def pending_at(self) -> int:
        """Where the pending pages begin."""
        return 3 + self.stamps

    @property
    def answers_at(self) -> int:
        """Where the earlier answers begin."""
        return 3 + self.stamps + self.pending


class View:
    """A frozen copy of a target's state on the target's device, taken with one copy; `host` brings
    it over with one synchronisation. Later calls to the target do not change it.

    ``twins`` is for law L9: empty where the target is one allocator, see `kvcore.targets.twin`.
    ``tree`` shows the prefix cache and its requests, where there are any; ``memory`` what lies
    under the memory saver, None if not asked for."""

    twins: Twins = ((), ())
    tree: TreeView | None = None
    listed: HostView | None = None
    """The view in plain lists, if it was taken so."""

    def __init__(
        self,
        *,
        full_free: torch.Tensor,
        swa_free: torch.Tensor,
        mapping: torch.Tensor,
        stamps: tuple[torch.Tensor, ...],
        held: dict[int, torch.Tensor],
        answers: Answers,
        pending: tuple[torch.Tensor, ...] = (),
        streams: tuple[Stream, ...] = MHA_STREAMS,
        device: Pair | None = None,
        requests: Pair | None = None,
        memory: MemoryView | None = None,
    ) -> None:
        """``device``: free device pages and the device mapping. ``requests``: free rows and, where
        asked for, the flat table of the request pool."""
        nothing = mapping[:0]
        pairs = (*(device or (nothing, nothing)), *(requests or (nothing, nothing)))
        parts = (full_free, swa_free, mapping, *stamps, *pending, *held.values(), *pairs)
        self._lengths = [part.numel() for part in parts]
        self._packed = torch.cat(parts)
        self._parts: tuple[torch.Tensor, ...] | None = None
        self._host: HostView | None = None
        self._layout = Layout(len(stamps), len(pending), tuple(held))
        self.streams = streams
        self.answers = answers
        self.memory = memory

    @property
    def holds_answers(self) -> bool:
        """Whether it shows any tensor of an earlier answer."""
        return bool(self._laid_out().answers)

    @property
    def holds_stamps(self) -> bool:
        """Whether it shows the pools' contents."""
        return self._laid_out().stamps > 0

    @property
    def holds_pending(self) -> bool:
        """Whether it shows the pages that wait for the end of the group."""
        return self._laid_out().pending > 0

    @property
    def holds_memory(self) -> bool:
        """Whether it shows what lies under the memory saver."""
        return self.memory is not None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Free full pages, free SWA pages and the mapping, int64 on the target's device."""
        full, swa, mapping = self._split()[:3]
        return full, swa, mapping

    def stamp_tensors(self) -> tuple[torch.Tensor, ...]:
        """The rows of each of `streams`, int64 on the target's device."""
        return self._split()[3 : self._laid_out().pending_at]

    def held_tensors(self) -> dict[int, torch.Tensor]:
        """What the tensors of earlier answers hold now, by the answer's number."""
        layout = self._laid_out()
        return dict(zip(layout.answers, self._split()[layout.answers_at : -4], strict=True))

    def device_tensors(self) -> Pair:
        """Free device pages and the device mapping, empty without a device side."""
        free, mapping = self._split()[-4:-2]
        return free, mapping

    def request_tensors(self) -> Pair:
        """Free rows of the request pool and its flat table, empty without one."""
        free, table = self._split()[-2:]
        return free, table

    def host(self) -> HostView:
        """The same in plain lists."""
        if self._host is None:
            flat = self._packed.tolist()
            parts: list[list[int]] = []
            at = 0
            for length in self._lengths:
                parts.append(flat[at : at + length])
                at += length
            self._host = self._unpacked(parts)
        return self._host

    def _laid_out(self) -> Layout:
        return self._layout

    def _split(self) -> tuple[torch.Tensor, ...]:
        """The parts, in the order of `Layout`."""
        if self._parts is None:
            self._parts = self._packed.split(self._lengths)
        return self._parts

    def _unpacked(self, parts: list[list[int]]) -> HostView:
        layout = self._layout
        pending_at, answers_at = layout.pending_at, layout.answers_at
        device_free, device_mapping, request_free, request_rows = parts[-4:]
        return HostView(
            full_free=parts[0],
            swa_free=parts[1],
            mapping=parts[2],
            stamps=tuple(parts[3:pending_at]),
            pending=tuple(parts[pending_at:answers_at]),
            held=dict(zip(layout.answers, parts[answers_at:-4], strict=True)),
            answers=self.answers,
            device_free=device_free,
            device_mapping=device_mapping,
            request_free=request_free,
            request_rows=request_rows,
            memory=self.memory,
        )


class ListedView(View):
    """The view of a small target on a CPU: taken in plain lists, which cost less there than one
    tensor, and packed into tensors only if somebody asks for them."""

    listed: HostView
    _parts: tuple[torch.Tensor, ...] | None = None

    def __init__(self, host: HostView, streams: tuple[Stream, ...]) -> None:
        self.listed = host
        self.streams = streams
        self.answers = host.answers
        self.memory = host.memory

    @property
    def holds_answers(self) -> bool:
        """Whether it shows any tensor of an earlier answer."""
        return bool(self.listed.held)

    @property
    def holds_stamps(self) -> bool:
        """Whether it shows the pools' contents."""
        return bool(self.listed.stamps)

    def host(self) -> HostView:
        """The lists."""
        return self.listed

    def _laid_out(self) -> Layout:
        shown = self.listed
        return Layout(len(shown.stamps), len(shown.pending), tuple(shown.held))

    def _split(self) -> tuple[torch.Tensor, ...]:
        if self._parts is None:
            shown = self.listed
            parts = (
                *(shown.full_free, shown.swa_free, shown.mapping, *shown.stamps, *shown.pending),
                *(*shown.held.values(), shown.device_free, shown.device_mapping),
                *(shown.request_free, shown.request_rows),
            )
            packed = np.array(list(chain.from_iterable(parts)), dtype=np.int64)
            self._parts = torch.from_numpy(packed).split(list(map(len, parts)))
        return self._parts


@runtime_checkable
class Target(Protocol):
    """An allocator on trial. One target serves one program: it starts empty."""

    name: str
    geometry: Geometry
    contract: Contract

    def apply(self, op: Op) -> Outcome:
        """Make the calls of ``op``; never raises for what the allocator does."""
        ...

    def view(self, *, stamps: bool) -> View:
        """The state now; with ``stamps`` the pools' contents, pending pages, the request pool's
        table and the memory saver's state too. What a query of the allocator raises may be passed
        on: it breaks a law."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class UnsupportedGeometry(ValueError):
    """No target of this kind has these pools; the message is one sentence."""


TargetFactory = Callable[[Geometry], Target]

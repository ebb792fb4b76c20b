"""What a target is: three calls, a geometry and the contract of its callers.

Covers the protocol and the frozen view of a target's state. Leaves out how a particular allocator
is driven (`kvcore.targets.driver`) and how targets are named (`kvcore.targets.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class Answers:
    """What the public queries say, as host numbers: room in slots (of the device side as such, not
    in logical slots) and in rows of the request pool, and for law L9 what the outer allocator and
    its inner ones say of the same thing; ``asked`` names those questions."""

    available: int
    full_available: int
    swa_available: int
    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    device_available: int = 0
    requests_available: int = 0
    asked: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class HostView:
    """A view in plain lists. ``full_free``, ``swa_free``, ``device_free`` are page ids in the order
    of the free containers, ``request_free`` rows of the request pool; ``mapping`` is the whole
    mapping tensor, sentinel included (empty without an SWA side), ``device_mapping`` that of the
    device slots; ``stamps`` has a list of rows for each of `View.streams`, empty if not asked for;
    ``request_rows`` the request pool's whole table, flat, empty if not asked for; ``pending`` the
    full, SWA and device pages that wait for the end of the group, empty if not asked for or if the
    target cannot tell; ``held`` is what the tensors of earlier answers hold now, by the answer's
    number; ``memory`` what lies under the memory saver, None if not asked for."""

    full_free: list[int]
    swa_free: list[int]
    mapping: list[int]
    stamps: tuple[list[int], ...]
    pending: tuple[list[int], ...]
    held: dict[int, list[int]]
    answers: Answers
    device_free: list[int]
    device_mapping: list[int]
    request_free: list[int]
    request_rows: list[int]
    memory: MemoryView | None


Twins = tuple[tuple[str, ...], tuple[str, ...]]
"""What a wrapper and what it wraps said to the last op and to the queries, each in words."""


class View:
    """A frozen copy of a target's state on the target's device, taken with one copy; `host` brings
    it over with one synchronisation. Later calls to the target do not change it.

    ``twins`` is for law L9: empty where the target is one allocator, see `kvcore.targets.twin`."""

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
        device: tuple[torch.Tensor, torch.Tensor] | None = None,
        requests: tuple[torch.Tensor, torch.Tensor] | None = None,
        memory: MemoryView | None = None,
    ) -> None:
        """``device``: free device pages and the device mapping. ``requests``: free rows and, where
        asked for, the flat table of the request pool."""
        pairs = [*(device or ()), *(requests or ())]
        parts = [full_free, swa_free, mapping, *stamps, *pending, *held.values(), *pairs]
        self._lengths = [part.numel() for part in parts]
        self._packed = torch.cat(parts)
        self._held = list(held)
        self._host: HostView | None = None
        self._stamp_count = len(stamps)
        self._pending_count = len(pending)
        self._has_device, self._has_requests = device is not None, requests is not None
        self._memory = memory
        self.streams = streams
        self.answers = answers
        self.twins: Twins = ((), ())
        self.tree: TreeView | None = None
        """The prefix cache and its requests, where there are any."""

    @property
    def holds_answers(self) -> bool:
        """Whether it shows any tensor of an earlier answer."""
        return bool(self._held)

    @property
    def holds_stamps(self) -> bool:
        """Whether it shows the pools' contents."""
        return self._stamp_count > 0

    @property
    def holds_memory(self) -> bool:
        """Whether it shows what lies under the memory saver."""
        return self._memory is not None

    @property
    def memory(self) -> MemoryView | None:
        """What lies under the memory saver, None if not asked for."""
        return self._memory

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Free full pages, free SWA pages and the mapping, int64 on the target's device."""
        full, swa, mapping = self._packed.split(self._lengths)[:3]
        return full, swa, mapping

    def stamp_tensors(self) -> tuple[torch.Tensor, ...]:
        """The rows of each of `streams`, int64 on the target's device."""
        parts: tuple[torch.Tensor, ...] = self._packed.split(self._lengths)
        return parts[3 : 3 + self._stamp_count]

    def held_tensors(self) -> dict[int, torch.Tensor]:
        """What the tensors of earlier answers hold now, by the answer's number."""
        start = 3 + self._stamp_count + self._pending_count
        parts: tuple[torch.Tensor, ...] = self._packed.split(self._lengths)
        return dict(zip(self._held, parts[start : start + len(self._held)], strict=True))

    def device_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free device pages and the device mapping, empty without a device side."""
        start = 3 + self._stamp_count + self._pending_count + len(self._held)
        return self._pair(start, self._has_device)

    def request_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free rows of the request pool and its flat table, empty without one."""
        return self._pair(len(self._lengths) - 2, self._has_requests)

    def _pair(self, start: int, there: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not there:
            return self._packed[:0], self._packed[:0]
        first, second = self._packed.split(self._lengths)[start : start + 2]
        return first, second

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

    def _unpacked(self, parts: list[list[int]]) -> HostView:
        stamped = 3 + self._stamp_count
        waiting = stamped + self._pending_count
        kept = waiting + len(self._held)
        nothing: list[list[int]] = [[], []]
        device = parts[kept : kept + 2] if self._has_device else nothing
        requests = parts[len(parts) - 2 :] if self._has_requests else nothing
        return HostView(
            full_free=parts[0],
            swa_free=parts[1],
            mapping=parts[2],
            stamps=tuple(parts[3:stamped]),
            pending=tuple(parts[stamped:waiting]),
            held=dict(zip(self._held, parts[waiting:kept], strict=True)),
            answers=self.answers,
            device_free=device[0],
            device_mapping=device[1],
            request_free=requests[0],
            request_rows=requests[1],
            memory=self._memory,
        )


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
        table and the memory saver's state too."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class UnsupportedGeometry(ValueError):
    """No target of this kind has these pools; the message is one sentence."""


TargetFactory = Callable[[Geometry], Target]

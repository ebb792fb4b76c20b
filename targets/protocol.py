"""What a target is: three calls, a geometry and the contract of its callers.

Covers the protocol and the frozen view of a target's state. Leaves out how a particular allocator
is driven (`kvcore.targets.driver`) and how targets are named (`kvcore.targets.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcore.models import Contract, Geometry, Outcome
from kvcore.models.ops import Op

STAMP_KINDS = ("full K", "full V", "SWA K", "SWA V")
"""Where a token's stamp is written. The n-th token lent in a run has stamp n, n from 1: K holds n
and V holds -n. Tokens brought back from a backup keep the stamps that they had."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the public queries say, as host numbers: room in slots, and for law L9 what the outer
    allocator and its inner ones say of the same thing."""

    available: int
    full_available: int
    swa_available: int
    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostView:
    """A view in plain lists. ``full_free`` and ``swa_free`` are page ids in the order of the free
    containers; ``mapping`` is the whole mapping tensor, sentinel included (empty without an SWA
    side); ``stamps`` has a list of rows for each of `STAMP_KINDS`, empty if not asked for;
    ``pending`` the full and the SWA pages that wait for the end of the group, empty if not asked
    for or if the target cannot tell; ``held`` is what the tensors of earlier answers hold now, by
    the answer's number."""

    full_free: list[int]
    swa_free: list[int]
    mapping: list[int]
    stamps: tuple[list[int], ...]
    pending: tuple[list[int], ...]
    held: dict[int, list[int]]
    answers: Answers


class View:
    """A frozen copy of a target's state on the target's device, taken with one copy; `host` brings
    it over with one synchronisation. Later calls to the target do not change it."""

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
    ) -> None:
        parts = [full_free, swa_free, mapping, *stamps, *pending, *held.values()]
        self._lengths = [part.numel() for part in parts]
        self._packed = torch.cat(parts)
        self._held = list(held)
        self._host: HostView | None = None
        self._stamp_count = len(stamps)
        self._pending_count = len(pending)
        self.answers = answers

    @property
    def holds_answers(self) -> bool:
        """Whether it shows any tensor of an earlier answer."""
        return bool(self._held)

    @property
    def holds_stamps(self) -> bool:
        """Whether it shows the pools' contents."""
        return self._stamp_count > 0

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Free full pages, free SWA pages and the mapping, int64 on the target's device."""
        full, swa, mapping = self._packed.split(self._lengths)[:3]
        return full, swa, mapping

    def stamp_tensors(self) -> tuple[torch.Tensor, ...]:
        """The rows of each of `STAMP_KINDS`, int64 on the target's device."""
        parts: tuple[torch.Tensor, ...] = self._packed.split(self._lengths)
        return parts[3 : 3 + self._stamp_count]

    def host(self) -> HostView:
        """The same in plain lists."""
        if self._host is None:
            flat = self._packed.tolist()
            parts: list[list[int]] = []
            at = 0
            for length in self._lengths:
                parts.append(flat[at : at + length])
                at += length
            stamps = tuple(parts[3 : 3 + self._stamp_count])
            after = 3 + self._stamp_count + self._pending_count
            pending = tuple(parts[3 + self._stamp_count : after])
            held = dict(zip(self._held, parts[after:], strict=True))
            self._host = HostView(parts[0], parts[1], parts[2], stamps, pending, held, self.answers)
        return self._host


class Target(Protocol):
    """An allocator on trial. One target serves one program: it starts empty."""

    name: str
    geometry: Geometry
    contract: Contract

    def apply(self, op: Op) -> Outcome:
        """Make the calls of ``op``; never raises for what the allocator does."""
        ...

    def view(self, *, stamps: bool) -> View:
        """The state now; with ``stamps`` the pools' contents and pending pages too."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


TargetFactory = Callable[[Geometry], Target]

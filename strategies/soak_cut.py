"""A failing program of a soak made short: its last ops, the smallest pools and the fewest requests
that still break the law, and then a shrink as of any finding.

All within a time limit, since programs and pools of a soak are large: what was reached by then is
the answer. Leaves out single ops and their arguments (`kvcore.strategies.shrink`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from kvcore.invariants import BY_ID, Cost, Tally, Verdict
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    Finish,
    Prefill,
    ResumeRequest,
    RetractRequest,
    Slide,
)
from kvcore.strategies.isolation import run_program
from kvcore.strategies.shrink import NotReproduced, Shrunk, shrink_played

Program = tuple[Op, ...]

FIRST_WINDOW = 200
"""Ops of the first window that is tried; each next one is twice as long."""

PERIOD = 16
"""Steps between checks of the periodic laws while a program is cut."""

SINGLE = (
    *(Admit, Prefill, CacheUnfinished, Finish, Abort),
    *(RetractRequest, ResumeRequest),
)
"""Ops of one request."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A failing program, shorter than it was found. ``window``: how many ops at its end were
    enough."""

    geometry: Geometry
    program: Program
    violation: Violation
    window: int


def cut(
    target: str, geometry: Geometry, program: Program, violation: Violation, seconds: float
) -> Cut | None:
    """The end of ``program`` that breaks the same law when every step is checked, on small pools,
    with few requests. None if no end did within the time, or if the whole program does not."""
    play = _Timed(target, violation.law, time.monotonic() + seconds)
    found = _window(play, geometry, program)
    if found is None:
        return None
    size = None
    while size != (size := (found.geometry, len(found.program))):
        found = _smaller_pools(play, found)
        found = _fewer_requests(play, found)
    return found


def shrink_within(target: str, found: Cut, seconds: float) -> Shrunk:
    """`shrink` with a time limit: what is smallest by then."""
    play = _Timed(target, found.violation.law, time.monotonic() + seconds)
    try:
        return shrink_played(play, found.geometry, found.program, found.violation)
    except NotReproduced:
        return Shrunk(found.geometry, found.program, found.violation, play.executions)


class _Timed:
    """Plays programs until the time is up; from then on nothing breaks any more, so that whoever
    looks for something smaller soon ends."""

    def __init__(self, target: str, law: str, limit: float) -> None:
        self._target, self._law, self._limit = target, law, limit
        self.executions = 0
        self.seconds_an_op = 0.0

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._limit - time.monotonic()

    def __call__(self, geometry: Geometry, program: Sequence[Op], *, period: int = 1) -> Verdict:
        """Run ``program`` on a fresh target."""
        if self.left <= 0:
            return Verdict((), None, Tally())
        self.executions += 1
        started = time.monotonic()
        verdict = run_program(self._target, geometry, program, period=period)
        self.seconds_an_op = (time.monotonic() - started) / max(1, len(verdict.program))
        return verdict

    def attempt(self, geometry: Geometry, program: Sequence[Op], window: int) -> Cut | None:
        """What is left of ``program`` if it breaks the law, up to the op that does."""
        period = 1 if BY_ID[self._law].cost is Cost.PERIODIC else PERIOD
        verdict = self(geometry, program, period=period)
        if verdict.violation is None or self._law not in verdict.violation.laws:
            return None
        return Cut(geometry, verdict.program, verdict.violation, window)


def _window(play: _Timed, geometry: Geometry, program: Program) -> Cut | None:
    """The shortest end of ``program`` that breaks the law, to a factor of two. Requests that were
    admitted before it are unknown there, and their ops are left out."""
    size = FIRST_WINDOW
    while True:
        window = min(size, len(program))
        if (found := play.attempt(geometry, program[-window:], window)) is not None:
            return found
        size *= 2
        if size >= 2 * len(program) or size * play.seconds_an_op > play.left:
            return None


def _smaller_pools(play: _Timed, found: Cut) -> Cut:
    """Each pool halved as often as it goes, since a step costs as much as the pools are large."""
    for side in ("full_pages", "swa_pages", "requests"):
        while half := asdict(found.geometry)[side] // 2:
            smaller = replace(found.geometry, **{side: half})
            better = play.attempt(smaller, found.program, found.window)
            if better is None:
                break
            found = better
    return found


def _fewer_requests(play: _Timed, found: Cut) -> Cut:
    """Whole requests left out, half of them at once, then ever fewer, until none can go."""
    size = max(1, len(_requests(found.program)) // 2)
    while True:
        dropped = False
        for names in _pieces(_requests(found.program), size):
            smaller = without(found.program, names)
            if len(smaller) < len(found.program):
                better = play.attempt(found.geometry, smaller, found.window)
                found, dropped = (better, True) if better else (found, dropped)
        if size == 1 and not dropped:
            return found
        size = max(1, size // 2)


def _pieces(names: Sequence[int], size: int) -> Iterator[frozenset[int]]:
    for start in range(0, len(names), size):
        yield frozenset(names[start : start + size])


def _requests(program: Program) -> list[int]:
    """Names of all requests, in order of appearance."""
    return list(dict.fromkeys(name for op in program for name in _names(op)))


def _names(op: Op) -> tuple[int, ...]:
    match op:
        case DecodeStep(reqs=reqs) | Slide(reqs=reqs):
            return reqs
        case _ if isinstance(op, SINGLE):
            return (op.req,)
        case _:
            return ()


def without(program: Program, names: frozenset[int]) -> Program:
    """``program`` as if these requests had never come."""
    return tuple(left for op in program if (left := _op_without(op, names)) is not None)


def _op_without(op: Op, names: frozenset[int]) -> Op | None:
    named = _names(op)
    if names.isdisjoint(named):
        return op
    match op:
        case DecodeStep() | Slide():
            rest = tuple(name for name in named if name not in names)
            return replace(op, reqs=rest) if rest else None
        case _:
            return None

"""One burst of a source on a target: so many programs, tallied, with what they found.

The three sources under one call, for campaigns and for the ledger of faults. Leaves out how bursts
are spread over time and workers (`kvcore.strategies.campaign`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import seed as hypothesis_seed
from hypothesis.stateful import run_state_machine_as_test

from kvcore.invariants import LawBroken, Run, Tally, drive
from kvcore.invariants.run import Listener
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.machine import RunSink, machine_for
from kvcore.strategies.profiles import search_settings
from kvcore.strategies.program import program_test
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets.protocol import TargetFactory

SourceName = Literal["walker", "machine", "program"]

PERIOD = 20
"""Steps between checks of the periodic laws in a search; a finding is replayed with 1."""

MACHINE_STEPS = 50

ATTEMPT_STRIDE = 7919
"""Between the seeds of a search that goes on after a violation of no interest."""


@dataclass(slots=True)
class Burst:
    """What a burst did. ``failures``: (programs run before it, geometry, program, violation)."""

    tally: Tally = field(default_factory=Tally)
    geometries: set[Geometry] = field(default_factory=set)
    failures: list[tuple[int, Geometry, tuple[Op, ...], Violation]] = field(default_factory=list)

    def record(self, run: Run) -> None:
        """Count a finished run."""
        if run.violation is not None:
            failure = (
                self.tally.programs,
                run.target.geometry,
                tuple(run.program),
                run.violation,
            )
            self.failures.append(failure)
        self.tally.add(run.tally)
        self.geometries.add(run.target.geometry)


def run_burst(
    source: SourceName,
    factory: TargetFactory,
    plan: WalkPlan,
    *,
    seed: int,
    programs: int,
    stop_at: Callable[[Violation], bool] | None = None,
    period: int = PERIOD,
    listeners: Sequence[Listener] = (),
) -> Burst:
    """Run ``programs`` programs of ``source``, or up to the first violation for which ``stop_at``
    says so; Hypothesis ends a search at any, and searches on with another seed."""
    burst = Burst()
    rng = random.Random(seed)
    if source == "walker":
        for _ in range(programs):
            geometry, length = plan.draw(rng)
            run = Run(factory(geometry), period=period, listeners=listeners)
            drive(run, Walker(rng, length))
            burst.record(run)
            if run.violation is not None and stop_at is not None and stop_at(run.violation):
                break
        return burst
    geometries = sorted({plan.draw(rng)[0] for _ in range(12)}, key=lambda g: g.describe())
    attempt = 0
    while burst.tally.programs < programs:
        left = programs - burst.tally.programs
        _run_hypothesis(
            source,
            factory,
            geometries,
            seed=seed + attempt * ATTEMPT_STRIDE,
            programs=left,
            period=period,
            sink=burst.record,
            listeners=listeners,
        )
        attempt += 1
        if stop_at is None or any(stop_at(failure[3]) for failure in burst.failures):
            break
    return burst


def _run_hypothesis(
    source: SourceName,
    factory: TargetFactory,
    geometries: Sequence[Geometry],
    *,
    seed: int,
    programs: int,
    period: int,
    sink: RunSink,
    listeners: Sequence[Listener],
) -> None:
    """One Hypothesis search; it ends at the first violation of any law."""
    name = f"{source}_{seed}"
    settings = search_settings(programs, MACHINE_STEPS)
    build = machine_for if source == "machine" else program_test
    built: Any = build(
        factory, geometries, name=name, period=period, sink=sink, listeners=listeners
    )
    try:
        if source == "machine":
            run_state_machine_as_test(hypothesis_seed(seed)(built), settings=settings)
        else:
            hypothesis_seed(seed)(settings(built))()
    except LawBroken:
        pass
    except ExceptionGroup as group:
        if group.split(LawBroken)[1] is not None:
            raise

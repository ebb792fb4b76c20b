"""One burst of a source on a target: so many programs, tallied, with what they found.

The three sources under one call, for campaigns and for the ledger of faults. Leaves out how bursts
are spread over time and workers (`kvcore.strategies.campaign`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import seed as hypothesis_seed
from hypothesis.stateful import run_state_machine_as_test

from kvcore.invariants import LawBroken, Run, Tally, drive
from kvcore.invariants.run import Listener
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.machine import machine_for
from kvcore.strategies.profiles import search_settings
from kvcore.strategies.program import program_test
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets.protocol import TargetFactory

SourceName = Literal["walker", "machine", "program"]
SOURCES: tuple[SourceName, ...] = ("walker", "machine", "program")

PERIOD = 12
"""Steps between checks of the periodic laws in a search; a finding is replayed with 1."""

MACHINE_STEPS = 50


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
    stop_at_first: bool = False,
    period: int = PERIOD,
    listeners: Sequence[Listener] = (),
) -> Burst:
    """Run ``programs`` programs of ``source``, or fewer if it is to ``stop_at_first`` finding."""
    burst = Burst()
    rng = random.Random(seed)
    if source == "walker":
        for _ in range(programs):
            geometry, length = plan.draw(rng)
            run = Run(factory(geometry), period=period, listeners=listeners)
            drive(run, Walker(rng, length))
            burst.record(run)
            if stop_at_first and burst.failures:
                break
        return burst
    geometries = sorted({plan.draw(rng)[0] for _ in range(12)}, key=lambda g: g.describe())
    name = f"{source}_{seed}"
    settings = search_settings(programs, MACHINE_STEPS)
    try:
        if source == "machine":
            machine = machine_for(
                factory,
                geometries,
                name=name,
                period=period,
                sink=burst.record,
                listeners=listeners,
            )
            run_state_machine_as_test(hypothesis_seed(seed)(machine), settings=settings)
        else:
            test = program_test(
                factory,
                geometries,
                name=name,
                period=period,
                sink=burst.record,
                listeners=listeners,
            )
            hypothesis_seed(seed)(settings(test))()
    except LawBroken:
        pass
    except ExceptionGroup as group:
        if group.split(LawBroken)[1] is not None:
            raise
    return burst

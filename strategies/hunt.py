"""Hunting one known fault: how many programs a source needs, and what remains after shrinking.

The measure of the harness's power. Leaves out the faults themselves (`kvcore.targets.faults`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvcore.strategies.shrink import Shrunk, shrink
from kvcore.strategies.sources import SourceName, run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.targets.faults import FAULTS
from kvcore.targets.registry import open_target


@dataclass(frozen=True, slots=True)
class Hunt:
    """``programs`` has one entry a seed: programs up to the finding, None if there was none.
    ``laws``: every law that a finding breaks; ``shrunk``: what each finding shrank to."""

    fault: str
    source: str
    programs: list[int | None]
    laws: frozenset[str]
    shrunk: list[Shrunk]

    @property
    def shrunk_length(self) -> int | None:
        """Ops of the longest shrunk program."""
        return max((len(shrunk.program) for shrunk in self.shrunk), default=None)

    @property
    def median(self) -> float | None:
        """Median programs until found; None if half of the seeds or more found nothing."""
        ordered = sorted(float("inf") if n is None else n for n in self.programs)
        middle = median(ordered) if ordered else float("inf")
        return None if middle == float("inf") else middle


def hunt(fault: str, source: SourceName, seeds: Sequence[int], limit: int) -> Hunt:
    """Look for ``fault`` with each seed, up to ``limit`` programs, and shrink what is found. Only a
    violation of one of the fault's own laws counts."""
    name = f"fault:{fault}"
    factory = open_target(name)
    plan = WalkPlan(FAULTS[fault].page_sizes, FAULTS[fault].machine)
    found: list[int | None] = []
    shrunk: list[Shrunk] = []
    laws: frozenset[str] = frozenset()
    for seed in seeds:
        burst = run_burst(
            source,
            factory,
            plan,
            seed=seed,
            programs=limit,
            stop_at=FAULTS[fault].is_shown_by,
            period=1,
        )
        shown = [failure for failure in burst.failures if FAULTS[fault].is_shown_by(failure[3])]
        if not shown:
            found.append(None)
            continue
        before, geometry, program, violation = shown[0]
        found.append(before + 1)
        laws |= violation.laws
        shrunk.append(shrink(name, geometry, program, violation))
    return Hunt(fault, source, found, laws, shrunk)

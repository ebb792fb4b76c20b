"""What a run of the benchmarks is to do: with whom to compare, how long, from which seed.

Leaves out the sections themselves (`kvcore.benchmarks.sections`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvcore.benchmarks.contest import Sampling
from kvcore.benchmarks.engines import Rival


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work each section does. ``pools`` are slots, ``programs`` those of one round of a
    source of the harness, ``rounds`` how often sources take turns."""

    pools: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000, 4_000_000)
    programs: int = 24
    rounds: int = 7
    jobs: int = 8


SMOKE = Sizes(pools=(10_000, 30_000), programs=2, rounds=1, jobs=2)
"""Enough to see that everything runs."""

SMOKE_SAMPLING = Sampling(warmups=2, samples=10)


@dataclass(frozen=True)
class BenchPlan:
    """One run."""

    rivals: tuple[Rival, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    sizes: Sizes = field(default_factory=Sizes)
    scratch: Path = Path()
    """An empty directory that the run may fill."""

    @property
    def seed(self) -> int:
        """Where random choices start."""
        return self.sampling.seed

"""What a benchmark yields: numbers under keys that goals name, and medians for context.

Ratios, counts and exponents are results. A median in microseconds and a rate belong to the machine
and the minute in which they were taken; they are shown so that a ratio can be judged, and no goal
names one. Leaves out how numbers are made and how they look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import msgspec

Unit = Literal["times", "exponent", "kernels", "waits", "bytes", "steps/s"]
"""What a number counts. ``times``: one quantity over another. ``waits``: forced synchronisations.
``steps/s``, checked steps a CPU second, is for context."""


class Metric(msgspec.Struct, frozen=True):
    """A number; ``row`` and ``column`` say where a table has it."""

    key: str
    row: str
    column: str
    value: float
    unit: Unit


class Contest(msgspec.Struct, frozen=True):
    """The same work done by several, interleaved; ``medians`` are microseconds by contestant."""

    key: str
    label: str
    medians: Mapping[str, float]

    def over_first(self, name: str) -> float:
        """How many times the median of the first contestant this one's is."""
        return self.medians[name] / next(iter(self.medians.values()))

    def metrics(self) -> Iterator[Metric]:
        """For every two contestants, the median of the later one over that of the earlier one."""
        for one, other in combinations(self.medians, 2):
            key = f"{self.key}.{as_key(one)}.{as_key(other)}"
            value = self.medians[other] / self.medians[one]
            yield Metric(key, self.label, f"{other} / {one}", value, "times")


class Grid(msgspec.Struct, frozen=True):
    """Metrics that stand in one table."""

    title: str
    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """What one section found. ``notes`` are sentences that belong beside its numbers."""

    name: str
    title: str
    contests: list[Contest] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metrics(self) -> Iterator[Metric]:
        """Every number of the section that a goal may name."""
        for contest in self.contests:
            yield from contest.metrics()
        for grid in self.grids:
            yield from grid.metrics


def as_key(name: str) -> str:
    """A name as part of a key."""
    return name.replace(" ", "-")

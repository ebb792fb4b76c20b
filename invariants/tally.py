"""What was done in one run or many: programs, steps, checks by law, op pairs.

Adds up across runs and processes; leaves out any judgement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts that can be added. ``pairs`` counts ops that followed each other directly; ``grouped``
    counts the ops that ran inside an open group, by kind."""

    programs: int = 0
    steps: int = 0
    skipped: int = 0
    refusals: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    grouped: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add the counts of ``other``."""
        self.programs += other.programs
        self.steps += other.steps
        self.skipped += other.skipped
        self.refusals += other.refusals
        self.checks += other.checks
        self.ops += other.ops
        self.grouped += other.grouped
        self.pairs += other.pairs

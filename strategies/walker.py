"""The seeded walker: random programs without Hypothesis, for volume.

Mixes pool sizes and program lengths, since faults at exhaustion hide in large pools and deep ones
in small ones, and draws new weights for each program. Leaves out the running of programs in bulk
(`kvcore.strategies.campaign`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from kvcore.models import Geometry, Model
from kvcore.models.ops import Op
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.propose import propose
from kvcore.strategies.weights import weights_for

LENGTHS = (20, 50, 50, 200)
ATTEMPTS = 24
"""How many kinds are tried before the walker gives a step up."""


class RandomChoices:
    """Integers from a seeded generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def below(self, bound: int) -> int:
        """A uniform integer in ``[0, bound)``."""
        return int(self._rng.random() * bound)


class Walker:
    """A source of ``length`` random ops."""

    def __init__(self, rng: random.Random, length: int) -> None:
        self._rng = rng
        self._left = length
        self._choices = RandomChoices(rng)
        self._tables: dict[bool, tuple[list[str], list[int]]] = {}

    def next_op(self, model: Model) -> Op | None:
        """The next op; None after ``length`` ops, or when nothing proposed is allowed."""
        if self._left == 0:
            return None
        self._left -= 1
        kinds, cumulative = self._table(model)
        for _ in range(ATTEMPTS):
            kind = self._rng.choices(kinds, cum_weights=cumulative)[0]
            if (op := propose(kind, model, self._choices)) is not None:
                return op
        return None

    def _table(self, model: Model) -> tuple[list[str], list[int]]:
        inside = model.group_open
        if inside not in self._tables:
            weights = weights_for(model.contract, inside=inside)
            drawn = [weight * self._rng.choice((1, 2, 2, 4)) for weight in weights.values()]
            self._tables[inside] = (list(weights), list(accumulate(drawn)))
        return self._tables[inside]


@dataclass(frozen=True, slots=True)
class WalkPlan:
    """What a walk may vary: page sizes and sorted reuse; the rest is up to the machine."""

    page_sizes: tuple[int, ...]
    machine: str = "hybrid"
    sorts: tuple[bool, ...] = (False, True)

    def draw(self, rng: random.Random) -> tuple[Geometry, int]:
        """A geometry and a program length."""
        machine = MACHINES[self.machine]
        page_size = rng.choice(machine.page_sizes(self.page_sizes))
        return machine.draw(rng, page_size, rng.choice(self.sorts)), rng.choice(LENGTHS)

"""The seeded walker: random programs without Hypothesis, for volume.

Mixes pool sizes and program lengths, since faults at exhaustion hide in large pools and deep ones
in small ones, and draws new weights for each program. Leaves out the running of programs in bulk
(`kvcore.strategies.campaign`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvcore.models import Geometry, Model
from kvcore.models.ops import Op
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.propose import propose
from kvcore.strategies.weights import weights_for

LENGTHS = (20, 50, 50, 200)
FACTORS = (1, 2, 2, 4)
"""What a kind's weight may be multiplied by in a program."""
ATTEMPTS = 24
"""How many kinds are tried before the walker gives a step up."""


class RandomChoices:
    """Integers from a seeded generator."""

    def __init__(self, rng: random.Random) -> None:
        draw = rng.random

        def below(bound: int) -> int:
            return int(draw() * bound)

        # Asked four times a step: a function of its own is called faster than a method.
        self.below = below
        """A uniform integer in ``[0, bound)``."""


class Walker:
    """A source of ``length`` random ops."""

    def __init__(self, rng: random.Random, length: int) -> None:
        self._left = length
        self._choices, self._random = RandomChoices(rng), rng.random
        self._kinds: dict[bool, list[str]] = {}

    def next_op(self, model: Model) -> Op | None:
        """The next op; None after ``length`` ops, or when nothing proposed is allowed."""
        if self._left == 0:
            return None
        self._left -= 1
        kinds = self._kinds.get(model.group_open) or self._draw_kinds(model)
        choices, random, most = self._choices, self._random, len(kinds)
        for _ in range(ATTEMPTS):
            # `below`, written out.
            op = propose(kinds[int(random() * most)], model, choices)
            if op is not None:
                return op
        return None

    def _draw_kinds(self, model: Model) -> list[str]:
        """The kinds to choose from evenly: each as often as its weight in this program says."""
        inside = model.group_open
        kinds: list[str] = []
        for kind, weight in weights_for(model.contract, inside=inside).items():
            kinds += [kind] * (weight * FACTORS[self._choices.below(len(FACTORS))])
        self._kinds[inside] = kinds
        return kinds


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

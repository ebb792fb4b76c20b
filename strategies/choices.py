"""Where the integers of a proposal come from: a seeded generator, or one packed integer.

Leaves out what the integers mean (`kvcore.strategies.propose`).
"""

from __future__ import annotations

from typing import Protocol


class Choices(Protocol):
    """Where the integers come from."""

    def below(self, bound: int) -> int:
        """An integer in ``[0, bound)``; ``bound`` is at least 1."""
        ...


class PackedChoices:
    """Choices packed into one integer, as mixed-radix digits; 0 when it is used up. One integer is
    one draw for Hypothesis, and a smaller one is a simpler op."""

    def __init__(self, packed: int) -> None:
        self._left = packed

    def below(self, bound: int) -> int:
        """The next digit, in base ``bound``."""
        self._left, digit = divmod(self._left, bound)
        return digit

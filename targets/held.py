"""Tensors of earlier answers that a caller keeps untouched, to see whether they change under it.

For law L8. Leaves out what they should hold, which the answers said (`kvcore.invariants.run`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from numpy.typing import NDArray

HELD_ANSWERS = 4
"""How many answers a caller keeps."""


class HeldAnswers:
    """The last answers by number, counted from 1; an answer that its caller overwrites counts too.

    On a CPU each is held with the array over its memory, which is read where lists are asked
    for."""

    def __init__(self) -> None:
        self._count = 0
        self._kept: deque[tuple[int, torch.Tensor, NDArray[Any]]] = deque(maxlen=HELD_ANSWERS)

    def keep(self, slots: torch.Tensor, array: NDArray[Any]) -> None:
        """Keep the tensor of an answer; ``array`` is `kvcore.targets.host_arrays.array_of` it."""
        self._count += 1
        self._kept.append((self._count, slots, array))

    def skip(self) -> None:
        """An answer that is not kept."""
        self._count += 1

    def tensors(self) -> dict[int, torch.Tensor]:
        """The very tensors, by number."""
        return {number: slots for number, slots, _ in self._kept}

    def lists(self) -> dict[int, list[int]]:
        """What the tensors hold now; of tensors on a CPU."""
        held: dict[int, list[int]] = {}
        # No comprehension, which is a call of its own in Python 3.11.
        for number, _, array in self._kept:
            held[number] = array.tolist()
        return held

    def clear(self) -> None:
        """Keep none of them any more."""
        self._kept.clear()

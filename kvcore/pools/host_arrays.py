"""Rows of buffers on a CPU, read and written by numpy on the memory of the tensors.

On a few rows torch spends its time on finding out what to do: a dispatch costs several times what
numpy takes for the same copy. Rows are moved bit for bit, as integers as wide as their elements, so
that types which numpy does not have are no matter.

Left out: rows that are no tensor, and other devices, which pools handle by torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type for each width in bytes."""


class HostRowArrays:
    """The memory of several buffers `[rows, ...]` on a CPU."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._arrays = [_array(buffer) for buffer in buffers]
        # None for one of integers already: a view costs as much as the copy of a few rows.
        self._dtypes = [
            None if buffer.dtype is _INTEGERS[buffer.itemsize] else buffer.dtype
            for buffer in buffers
        ]

    def gathered(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New tensors of these rows, int64 `[n]`, of every buffer."""
        at = rows.numpy()
        found: list[torch.Tensor] = []
        for array, dtype in zip(self._arrays, self._dtypes, strict=True):
            copied = torch.from_numpy(array.take(at, axis=0))
            found.append(copied if dtype is None else copied.view(dtype))
        return tuple(found)

    def write(self, rows: torch.Tensor, copied: Sequence[torch.Tensor]) -> None:
        """Write what `gathered` gives into these rows."""
        at = rows.numpy()
        for array, values in zip(self._arrays, copied, strict=True):
            array[at] = _array(values)

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy rows to others; each buffer's are gathered whole before the first is written."""
        to, of = targets.numpy(), sources.numpy()
        for array in self._arrays:
            array[to] = array.take(of, axis=0)


def host_row_arrays(buffers: Sequence[object]) -> HostRowArrays | None:
    """Access by numpy, or None where a buffer is no tensor on a CPU of a width as above."""
    found = [
        buffer
        for buffer in buffers
        if isinstance(buffer, torch.Tensor) and buffer.is_cpu and buffer.itemsize in _INTEGERS
    ]
    return HostRowArrays(found) if len(found) == len(buffers) else None


def picked(numbers: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """`numbers[which]`, the numbers `[n]` where `which` (bool `[n]`) is true."""
    if not (numbers.is_cpu and which.is_cpu):
        return numbers[which]
    return torch.from_numpy(numbers.numpy()[which.numpy()])


def paired_moves(targets: torch.Tensor, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows int64 `[n]` to move to and from, both 0 where either is not positive.

    The padding row moved onto itself stands for "nothing to move": selecting the others would cost
    a synchronisation.
    """
    if targets.is_cpu and sources.is_cpu:
        to, of = targets.numpy(), sources.numpy()
        both = np.logical_and(to > 0, of > 0)
        return torch.from_numpy(to * both), torch.from_numpy(of * both)
    moves = (targets > 0) & (sources > 0)
    return targets * moves, sources * moves


def _array(buffer: torch.Tensor) -> NDArray[Any]:
    integers = _INTEGERS[buffer.itemsize]
    if buffer.dtype is not integers:
        buffer = buffer.view(integers)
    array: NDArray[Any] = buffer.numpy()
    return array

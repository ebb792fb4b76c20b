"""numpy arrays over the memory of CPU tensors, for the harness's own reads and writes.

A few numbers read or written in torch cost microseconds, and through an array a fraction of one.
What an array shows is what the tensor holds, always. Leaves out the calls on trial, which are given
tensors, and other devices but for `array_of`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
"""int64 `[n]` on the host: slots, stamps, peers."""


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """What a tensor holds: on a CPU its own memory, from another device a copy."""
    return tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()


def overwrite(tensor: torch.Tensor, value: int) -> None:
    """Fill a caller's tensor with ``value``, as a caller does that uses it for something else."""
    if tensor.is_cpu:
        tensor.numpy().fill(value)
    else:
        tensor.fill_(value)


class SharedArray:
    """The array over the memory of a CPU tensor that is asked for again and again.

    Made anew for each other tensor, so that it follows an owner that replaces its tensor, as a
    resize does."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._array: NDArray[Any] = np.empty(0, dtype=np.int64)

    def over(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The memory of ``tensor``."""
        if tensor is not self._tensor:
            self._array = tensor.numpy()
            self._tensor = tensor
        return self._array

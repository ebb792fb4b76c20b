"""The saver that saves nothing, for callers that want to pass one in every case.

Left out: memory of any tag; tensors are those of torch's own allocators.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlainRegion:
    """Allocates with `torch.zeros`."""

    tag: str

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> torch.Tensor:
        """A tensor of zeros, as torch allocates it."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


class NoMemorySaver:
    """A `MemorySaver` that owns no memory.

    Nothing is given back, so nothing is ever paused and contents survive; every tag is known;
    `resident_bytes` is 0, because the tensors belong to torch's allocators, not to a tag.
    """

    @contextmanager
    def region(self, tag: str) -> Iterator[PlainRegion]:
        """Yield a region that allocates with `torch.zeros`."""
        yield PlainRegion(tag)

    def pause(self, tag: str) -> None:
        """Do nothing."""

    def resume(self, tag: str) -> None:
        """Do nothing."""

    def resident_bytes(self, tag: str) -> int:
        """0: no memory belongs to a tag."""
        return 0

    def is_paused(self, tag: str) -> bool:
        """False: nothing can be paused."""
        return False

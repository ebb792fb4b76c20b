"""What a memory saver is: memory that belongs to a tag, is given back as a whole and taken again at
the same addresses.

Left out: the savers themselves, one module each.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch

KV_CACHE: Final = "kv_cache"
"""The tag of every buffer of every KV pool, as the field names it."""


class Region(Protocol):
    """Hands out memory of one tag."""

    @property
    def tag(self) -> str:
        """The tag that the memory belongs to."""

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> torch.Tensor:
        """A new tensor of zeros whose memory belongs to the tag, resident at once.

        Raises:
            GeometryError: a negative size, or a device that the saver does not serve.
            PausedPoolError: the tag was paused inside the region.
            SaverMemoryError: the operating system does not have that much.
        """


class MemorySaver(Protocol):
    """Gives the memory of a tag back to the system, and takes it again.

    A tag exists from its first `region` on, for as long as the saver. Pausing what is paused and
    resuming what is not paused do nothing; only where a pause was refused in part does pausing
    again try the rest. What a paused tensor held is lost. Calls of several threads wait for each
    other.
    """

    def region(self, tag: str) -> AbstractContextManager[Region]:
        """Allocate under `tag`, through the region that the context yields.

        Raises:
            GeometryError: the tag is empty.
            PausedPoolError: the tag is paused, so new memory could not be given back with the rest.
        """

    def pause(self, tag: str) -> None:
        """Give back every byte that belongs to `tag`, and no other. Addresses stay reserved.

        Raises:
            UnknownTagError: there never was a region of that tag.
            SaverMemoryError: the operating system refuses some of it; all the rest was given back,
                the tag counts as paused, and the call may be repeated.
        """

    def resume(self, tag: str) -> None:
        """Take the memory of `tag` again: same addresses, all of it resident, all zeros.

        Raises:
            UnknownTagError: there never was a region of that tag.
            SaverMemoryError: there is not enough; the tag stays paused and holds nothing (but what
                the system did not take back).
        """

    def resident_bytes(self, tag: str) -> int:
        """Bytes of physical memory that the live tensors of `tag` hold now.

        Raises:
            UnknownTagError: there never was a region of that tag.
        """

    def is_paused(self, tag: str) -> bool:
        """Whether `tag` is paused.

        Raises:
            UnknownTagError: there never was a region of that tag.
        """

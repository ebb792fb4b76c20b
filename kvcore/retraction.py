"""What a retracted request leaves behind: its KV in host memory, to be restored into other slots.

Left out: choosing which request is retracted, and freeing or lending its slots; the order is copy,
free, and later lend, restore.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

CopyT = TypeVar("CopyT")


class HostCopying(Protocol[CopyT]):
    """A pool that copies slots to host memory and back; every pool kind does (sglang#33385)."""

    def get_cpu_copy(self, indices: torch.Tensor) -> CopyT:
        """Copy everything that the slots `indices` hold."""

    def load_cpu_copy(self, copy: CopyT, indices: torch.Tensor) -> None:
        """Write a copy into the slots `indices`, or raise before anything is written."""


@dataclass(frozen=True, slots=True)
class RetractionBackup(Generic[CopyT]):
    """The KV of one request, in the order of its row, bit for bit.

    `cpu_tensors` is whatever the pool's `get_cpu_copy` gives: keys and values of every layer of
    every kind. It is owned: the slots may be freed, lent again and overwritten meanwhile.
    """

    cpu_tensors: CopyT

    @classmethod
    def take(cls, pool: HostCopying[CopyT], indices: torch.Tensor) -> "RetractionBackup[CopyT]":
        """Copy the slots `indices` (`[n]`, row order), still lent, out of `pool`.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
        """
        return cls(cpu_tensors=pool.get_cpu_copy(indices))

    def restore(self, pool: HostCopying[CopyT], indices: torch.Tensor) -> None:
        """Write the KV into the slots `indices`, the first token into the first slot.

        In a hybrid pool an SWA row comes back where the old slot had a peer and the new one has.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            GeometryError: another number of slots than tokens, or a pool of another shape. In both
                cases nothing was written.
        """
        pool.load_cpu_copy(self.cpu_tensors, indices)

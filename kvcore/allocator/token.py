"""The allocator for page size 1: slots are pages, and freed slots wait their turn.

Left out: everything that holds for any page size (`kvcore.allocator.single`).
"""

from typing import Any

import torch

from kvcore.allocator.single import SinglePoolAllocator
from kvcore.free_list import FreeList, SlotLog


class TokenToKVPoolAllocator(SinglePoolAllocator):
    """Lends single slots of a pool of `size` tokens, oldest free slot first.

    See `BaseTokenToKVPoolAllocator` for the arguments. Two frees of one slot are two frees: without
    `validate` nobody looks for them.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        *,
        validate: bool | None = None,
        pool_name: str = "KV",
    ) -> None:
        super().__init__(
            size, 1, dtype, device, kvcache, need_sort, validate=validate, pool_name=pool_name
        )

    def _make_free_list(self) -> FreeList:
        return SlotLog(
            self.num_pages, self._index_device, need_sort=self.need_sort, unit=self._unit
        )

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """The pages themselves: the same tensor."""
        return pages

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves."""
        # The slots named in one free are distinct by contract, so nothing has to be sorted.
        return slots

"""The allocator for pages of several slots: the page freed last is lent first.

Left out: everything that holds for any page size (`kvcore.allocator.single`).
"""

import torch

from kvcore.allocator.single import SinglePoolAllocator
from kvcore.free_list import FreeList, PageStack


class PagedTokenToKVPoolAllocator(SinglePoolAllocator):
    """Lends pages of `page_size` slots; see `BaseTokenToKVPoolAllocator` for the arguments."""

    def _make_free_list(self) -> FreeList:
        return PageStack(
            self.num_pages, self._index_device, need_sort=self.need_sort, unit=self._unit
        )

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages that the slots touch, ascending, each once; waits for the device."""
        pages: torch.Tensor = torch.unique(slots // self.page_size)
        return pages

"""The mapping of a hybrid allocator on a CPU, by numpy on the memory of the tensor.

On short vectors torch spends its time on finding out what to do: a dispatch costs several times
what numpy takes for the same work. Nothing waits for a device: here the memory is the host's.

Left out: the same in torch and by kernels (`kvcore.allocator.hybrid`).
"""

import numpy as np
import torch

from kvcore.allocator.ownership import Ids


class HostRows:
    """Entries of a mapping, a row a page.

    Args:
        mapping: int64 `[num_rows * page_size + rest]` on the CPU; written in place.
        num_rows: pages, the padding page included.
        page_size: slots a page.
    """

    def __init__(self, mapping: torch.Tensor, num_rows: int, page_size: int) -> None:
        self._page_size = page_size
        self._entries: Ids = mapping.numpy()[: num_rows * page_size]
        self._rows = self._entries.reshape(num_rows, page_size)
        self._offsets = np.arange(page_size, dtype=np.int64)

    def pages_of(self, firsts: torch.Tensor) -> Ids:
        """The pages of these slots, int64 `[n]`."""
        slots: Ids = firsts.numpy()
        return slots if self._page_size == 1 else slots // self._page_size

    def pages_of_segments(self, indices: list[torch.Tensor]) -> Ids:
        """The pages of page-aligned pieces of a row: int64 `[n]`."""
        size = self._page_size
        if len(indices) == 1:
            slots: Ids = indices[0].numpy()[::size]
        else:
            slots = np.concatenate([index.numpy()[::size] for index in indices])
        return slots if size == 1 else slots // size

    def detach(self, pages: Ids) -> Ids:
        """Unmap the pages; the first entry of each before, 0 for none: int64 `[n]`."""
        if self._page_size == 1:
            entries: Ids = self._entries[pages]
            self._entries[pages] = 0
        else:
            entries = self._rows[pages, 0]
            self._rows[pages] = 0
        return entries

    def pair(self, pages: Ids, swa_firsts: Ids) -> None:
        """Map every slot of the pages to the slot of its SWA page as far in; see `_map_pages`."""
        if self._page_size == 1:
            self._entries[pages] = swa_firsts
        else:
            self._rows[pages] = swa_firsts[:, None] + self._offsets

    def slots_of(self, pages: Ids) -> torch.Tensor:
        """All slots of the pages, page by page: int64 `[n * page_size]`."""
        return torch.from_numpy((pages[:, None] * self._page_size + self._offsets).reshape(-1))

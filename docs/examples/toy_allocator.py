"""A paged allocator in about forty lines, to show how one is put on trial.

Leaves out all that engines need beyond that.
"""

from __future__ import annotations

import torch


class ToyAllocator:
    """Lends slots in whole pages. Page 0 is padding and never lent."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.free_pages = torch.arange(1, size // page_size + 1)

    def available_size(self) -> int:
        """Slots that can be lent."""
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """The slots of new pages, or None if there are too few."""
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def free(self, free_index: torch.Tensor) -> None:
        """Take back every page that one of the slots lies in."""
        pages = torch.unique(free_index // self.page_size)
        self.free_pages = torch.cat([self.free_pages, pages])

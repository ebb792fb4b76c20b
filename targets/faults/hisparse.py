"""Faults of HiSparse allocators: device pages that nobody has, groups that are none, wrong answers.

Leaves out the logical side, which is an allocator like any other (`kvcore.targets.faults.groups`).
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore import CompressedHiSparseTokenToKVPoolAllocator, HiSparseTokenToKVPoolAllocator


class DeviceBufferLost(HiSparseTokenToKVPoolAllocator):
    """A request with more device pages than its buffer takes loses the rest of them: they are
    unmapped and never returned."""

    def _return_surplus(self, device_pages: torch.Tensor) -> None:
        """Forget them."""


class DeviceBufferLosesRest(HiSparseTokenToKVPoolAllocator):
    """A partly used last page is unmapped and not claimed: its free slots are lost, and so is the
    page."""

    def _claimed_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self._device_pages(pages[(self._rows[pages] > 0).all(dim=1)])


class HisparseNotForwarded(CompressedHiSparseTokenToKVPoolAllocator):
    """The wrapper answers with the page size of its own device side where callers ask for that of
    the allocator that it wraps (sglang#24039)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.page_size = self.hisparse_page_size


class HisparseDropsFreeSwa(CompressedHiSparseTokenToKVPoolAllocator):
    """The wrapper answers `free_swa` and does not pass it on: the window's pages stay lent
    (sglang#24039)."""

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Nothing."""


class HisparseWithoutGroups(HiSparseTokenToKVPoolAllocator):
    """Free groups do nothing: what is freed inside one is lent at once (sglang 0.5.23)."""

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Nothing."""

    def free_group_end(self) -> None:
        """Nothing."""

"""Logical slots over fewer device slots: the mapping between them, and what its rows say.

A logical allocator lends many slots, whose KV may be in host memory only; a second pool lends the
few slots that have device memory. One device *entry* holds `compress_ratio` logical tokens (1, or 4
in the compressed variant), so a device page has `page_size // compress_ratio` slots and stands for
one logical page at equal offsets:

    logical page f   entries  f*D      f*D+1    ...  f*D+D-1      D = hisparse_page_size
    mapping                   s*D      s*D+1    ...  0            device page s, one entry unmapped
                              0        0        ...  0            f has no device page

The mapping is exact to the entry: only tokens that were lent with a device slot have one. A page is
returned whole, and then all its entries become 0. So a page that is lent logically alone, or a
token that a decode adds to a page, needs no write: its entries are 0 already.

Every device page is free, or named by one logical page of the mapping, or on loan in a buffer that
the mapping does not know (or waits for the end of an open group).

Left out: lending and returning (`kvcore.allocator.device_side`).
"""

from abc import abstractmethod
from copy import copy
from typing import Protocol, Self

import torch

from kvcore.allocator.arguments import as_locations
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.batch import ExtendBatch
from kvcore.allocator.ownership import on_host, refuse
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.allocator.swa import SWATokenToKVPoolAllocator
from kvcore.errors import DeadPeerError


class MappedPool(Protocol):
    """What a pool of device rows must offer to be served here."""

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        """Keep the mapping; it is written by the allocator and read by the pool.

        One that raises keeps the mapping that it had.
        """


class DeviceMappedAllocator(BaseTokenToKVPoolAllocator):
    """A logical allocator, a device pool, and the mapping from entries to device slots.

    `full_to_hisparse_device_index_mapping` is int64 `[size_full // compress_ratio +
    hisparse_page_size + 1]`: the device slot of each entry, 0 for none, and -1 in the last element,
    so that index -1 ("no previous slot") maps to -1. It is owned by this object, written in place,
    indexed directly, and handed to the pool by `register_mapping`.

    A constructor sets the attributes below, calls `_build_mapping` and registers what that made.
    """

    compress_ratio: int
    """Logical tokens that one device entry holds."""

    hisparse_page_size: int
    """Device slots a page."""

    logical_attn_allocator: SinglePoolAllocator | SWATokenToKVPoolAllocator
    """Lends the slots that callers see."""

    hisparse_attn_allocator: SinglePoolAllocator
    """Lends device slots; also to callers that enlarge a buffer."""

    @property
    @abstractmethod
    def _slot_side(self) -> SinglePoolAllocator:
        """The single pool behind the logical slots."""

    @abstractmethod
    def _entries_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The entries that logical slots complete, in the same order: int64 `[n]`."""

    def _build_mapping(self) -> None:
        self.full_to_hisparse_device_index_mapping = torch.zeros(
            self.size_full // self.compress_ratio + self.hisparse_page_size + 1,
            dtype=torch.int64,
            device=self._index_device,
        )
        self.full_to_hisparse_device_index_mapping[-1] = -1
        # One row a logical page, the padding page included; the sentinel lies behind the last row.
        num_rows = self._slot_side.num_pages + 1
        self._rows = self.full_to_hisparse_device_index_mapping[
            : num_rows * self.hisparse_page_size
        ].view(num_rows, self.hisparse_page_size)
        self._row_offsets = torch.arange(self.hisparse_page_size, device=self._index_device)

    # -- capacity ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Logical tokens, as the logical allocator counts them."""
        return self.logical_attn_allocator.size

    @property
    def size_full(self) -> int:
        """Logical tokens of the full-attention layers."""
        return self.logical_attn_allocator.size_full

    def available_size(self) -> int:
        """Tokens that one `alloc` could get: what the poorer side has."""
        return min(self.logical_attn_allocator.available_size(), self._device_tokens())

    def _device_tokens(self) -> int:
        """Logical tokens that the free device pages could hold."""
        return self.hisparse_attn_allocator.available_size() * self.compress_ratio

    def merge_and_sort_free(self) -> None:
        """Merge the pages that `need_sort` set aside, on both sides."""
        self.logical_attn_allocator.merge_and_sort_free()
        self.hisparse_attn_allocator.merge_and_sort_free()

    def debug_print(self) -> str:
        """One line of capacity for logs, both sides."""
        return (
            f"{self.logical_attn_allocator.debug_print()}, "
            f"{self.hisparse_attn_allocator.debug_print()}"
        )

    # -- last slots ----------------------------------------------------------------------------

    def get_last_loc_compressed(self, last_locs: torch.Tensor) -> torch.Tensor:
        """The last complete entry on the page of each slot, int64 of the same shape; -1 for -1.

        Where the page has no complete entry yet, the result lies below the page's own entries and
        says nothing: the row's next entry starts a device page.
        """
        locations = as_locations("get_last_loc_compressed", last_locs, self._index_device)
        return (locations - (self.compress_ratio - 1)) // self.compress_ratio

    def get_last_loc_hisparse_device(self, last_locs: torch.Tensor) -> torch.Tensor:
        """Device slot of `get_last_loc_compressed`: int64 of the same shape, 0 where unmapped."""
        return self.full_to_hisparse_device_index_mapping[self.get_last_loc_compressed(last_locs)]

    # -- device pages --------------------------------------------------------------------------

    def _device_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Device pages of those logical pages that have one, in the same order: int64 `[m]`."""
        device_pages = self._device_entries(pages)
        # How many are left is known to the device only, so this waits for it.
        return device_pages[device_pages > 0]

    def _device_entries(self, pages: torch.Tensor) -> torch.Tensor:
        """Device page of each logical page, 0 for none: int64 `[n]`."""
        return self._rows[pages].amax(dim=1) // self.hisparse_page_size

    def _returnable(self, pages: torch.Tensor) -> torch.Tensor:
        """The device pages of logical `pages`, before anything changes; 0 stands for none.

        Raises:
            DoubleFreeError: with `validate`, more pages would be free than exist.
        """
        device = self.hisparse_attn_allocator
        if device.ledger is None:
            return self._device_entries(pages)
        device_pages = self._device_pages(pages)
        device.require_place_for(device_pages.numel())
        return device_pages

    def _detach(self, pages: torch.Tensor, device_pages: torch.Tensor) -> None:
        """Unmap logical `pages` and return their device pages.

        At once also in an open group, which only holds the pages back: so a deferred free releases
        what the index owned when the call was made, whatever is mapped before the end.
        """
        self._clear_rows(pages)
        self._give_device_pages(device_pages)

    def _clear_rows(self, pages: torch.Tensor) -> None:
        self._rows.index_fill_(0, pages, 0)

    def _give_device_pages(self, device_pages: torch.Tensor) -> None:
        """Every return of device pages: now, or at the end of the open group."""
        # Page 0 stands for "no device page" and must never reach a free list.
        self.hisparse_attn_allocator.give_entries(device_pages)

    # -- value checks --------------------------------------------------------------------------

    def _check_free(self, operation: str, slots: torch.Tensor) -> None:
        if self._slot_side.ledger is not None:
            self._slot_side.ledger.require_freeable(operation, slots)

    def _check_entries_lent(self, operation: str, entries: torch.Tensor) -> None:
        if self._slot_side.ledger is None:
            return
        ratio = self.compress_ratio
        # The message names slots, so it says how they follow from what the caller named.
        named = operation if ratio == 1 else f"{operation}(slot = {ratio} * entry)"
        self._slot_side.ledger.require_lent(named, entries * ratio)

    def _check_continued(self, batch: ExtendBatch, device_batch: ExtendBatch) -> None:
        """Refuse rows that go on in a device page whose last entry has no device slot."""
        if self.hisparse_attn_allocator.ledger is None:
            return
        before, after = device_batch.prefix_lens_cpu.numpy(), device_batch.seq_lens_cpu.numpy()
        goes_on = (after > before) & (before % self.hisparse_page_size != 0)
        unmapped = on_host(device_batch.last_loc) < self.hisparse_page_size
        refuse(
            DeadPeerError,
            batch.operation,
            on_host(batch.last_loc)[goes_on & unmapped] // self._slot_side.page_size,
            "pages that go on behind an entry without a device slot",
            "pages whose last entry is mapped (alloc_logical_only extends the others)",
        )

    # -- the whole pool ------------------------------------------------------------------------

    def clear(self) -> None:
        """Take everything back, buffers too, unmap every entry, close an open group."""
        self.logical_attn_allocator.clear()
        self.hisparse_attn_allocator.clear()
        # The pool keeps the same tensor; its last element stays the sentinel.
        self.full_to_hisparse_device_index_mapping[:-1].fill_(0)
        self._group_open = False

    def _with_sides(
        self,
        logical: SinglePoolAllocator | SWATokenToKVPoolAllocator,
        device: SinglePoolAllocator,
    ) -> Self:
        """What this allocator is over other sides, its mapping not registered yet."""
        other = copy(self)
        other.logical_attn_allocator, other.hisparse_attn_allocator = logical, device
        other._build_mapping()
        return other

    def _take_mapping(self, other: Self) -> None:
        """Go on with the mapping of `other`, and without an open group; cannot fail."""
        self.full_to_hisparse_device_index_mapping = other.full_to_hisparse_device_index_mapping
        self._rows, self._row_offsets = other._rows, other._row_offsets
        self._group_open = False

"""Logical slots over fewer device slots: the mapping between them, and device buffers.

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

Left out: what callers see of the two variants (`kvcore.allocator.hisparse`).
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from kvcore.allocator.arguments import (
    Segment,
    as_index,
    as_locations,
    as_segments,
    whole_pages,
)
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.batch import ExtendBatch
from kvcore.allocator.ownership import on_host, refuse
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.errors import DeadPeerError, InvalidSlotError


class MappedPool(Protocol):
    """What a pool of device rows must offer to be served here."""

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        """Keep the mapping; it is written by the allocator and read by the pool."""


class DeviceSideAllocator(BaseTokenToKVPoolAllocator):
    """A logical allocator, a device pool, and the mapping from entries to device slots.

    `full_to_hisparse_device_index_mapping` is int64 `[size_full // compress_ratio +
    hisparse_page_size + 1]`: the device slot of each entry, 0 for none, and -1 in the last element,
    so that index -1 ("no previous slot") maps to -1. It is owned by this object, written in place,
    indexed directly, and handed to the pool by `register_mapping`.

    A constructor sets the attributes below and then calls `_build_mapping`.
    """

    compress_ratio: int
    """Logical tokens that one device entry holds."""

    hisparse_page_size: int
    """Device slots a page."""

    logical_attn_allocator: BaseTokenToKVPoolAllocator
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

    def _build_mapping(self, pool: MappedPool | None) -> None:
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
        if pool is not None:
            pool.register_mapping(self.full_to_hisparse_device_index_mapping)

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

    # -- lending -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages with device pages, every entry mapped; see the base class."""
        page_size = self._slot_side.page_size
        num_pages = whole_pages("alloc", need_size, page_size)
        if not self.hisparse_attn_allocator.has_room(num_pages):
            return None
        slots = self.logical_attn_allocator.alloc(need_size)
        if slots is None:
            return None
        device_pages = self.hisparse_attn_allocator.take_pages(num_pages)
        self._rows[slots[::page_size] // page_size] = (
            device_pages[:, None] * self.hisparse_page_size + self._row_offsets
        )
        return slots

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Lend the new tokens of each row and map the entries that they complete.

        See the base class. Both sides are asked before either moves; None if either lacks pages.

        Raises:
            DeadPeerError: with `validate`, a device page goes on and its last entry is unmapped.
        """
        batch = ExtendBatch.checked(
            "alloc_extend",
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            self._index_device,
        )
        if self._slot_side.ledger is not None:
            self._slot_side.ledger.require_batch(batch)
        device_batch = self._device_batch(batch)
        self._check_continued(batch, device_batch)
        num_device_pages = device_batch.num_new_pages(self.hisparse_page_size)
        if not self.hisparse_attn_allocator.has_room(num_device_pages):
            return None
        slots = self.alloc_logical_only(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens
        )
        if slots is None:
            return None
        device_pages = self.hisparse_attn_allocator.take_pages(num_device_pages)
        self.full_to_hisparse_device_index_mapping[self._entries_of(slots)] = device_batch.slots(
            device_pages, self.hisparse_page_size
        )
        return slots

    def alloc_logical_only(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """`alloc_extend` of the logical side alone; the new tokens have no device slots."""
        return self.logical_attn_allocator.alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Lend one token a row on the logical side alone; its KV goes to the row's buffer."""
        return self.logical_attn_allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _device_batch(self, batch: ExtendBatch) -> ExtendBatch:
        """The same extension in entries: rows of complete entries, continued on the device."""
        device_last = self.get_last_loc_hisparse_device(batch.last_loc)
        if self.compress_ratio == 1:
            return replace(batch, last_loc=device_last)
        ratio = self.compress_ratio
        before, after = batch.prefix_lens_cpu // ratio, batch.seq_lens_cpu // ratio
        return ExtendBatch(
            operation=batch.operation,
            prefix_lens=batch.prefix_lens // ratio,
            prefix_lens_cpu=before,
            seq_lens=batch.seq_lens // ratio,
            seq_lens_cpu=after,
            last_loc=device_last,
            num_tokens=int((after - before).sum()),
        )

    # -- device buffers ------------------------------------------------------------------------

    def alloc_device_buffer(
        self, allocated_indices: torch.Tensor, need_size: int
    ) -> torch.Tensor | None:
        """Turn the device pages of a request into a private buffer of `need_size` device slots.

        The device pages of all logical pages that `allocated_indices` touches are unmapped. In the
        order in which those pages first appear, the first ones become the buffer, each whole, also
        where only some of its entries were mapped; surplus pages are returned, and missing ones are
        lent. The buffer is on loan, unknown to the mapping, until `free_hisparse_indices`.

        Args:
            allocated_indices: entries of the request, integer `[n]` (slots where
                `compress_ratio` is 1).
            need_size: device slots, whole device pages; 0 returns every page.

        Returns:
            int64 `[need_size]`, page by page; None, and nothing changed, if the device side lacks
            the missing pages.

        Raises:
            GeometryError: `need_size` is negative or not a multiple of `hisparse_page_size`.
            InvalidSlotError, DoubleFreeError, PendingFreeError: with `validate`, entries of pages
                that are not lent.
        """
        operation = "alloc_device_buffer"
        need_pages = whole_pages(operation, need_size, self.hisparse_page_size)
        entries = as_index(operation, allocated_indices, self._index_device)
        self._check_entries_lent(operation, entries)
        pages = _in_order_of_appearance(entries // self.hisparse_page_size)
        claimed = self._claimed_pages(pages)
        kept, surplus = claimed[:need_pages], claimed[need_pages:]
        missing = need_pages - kept.numel()
        if not self.hisparse_attn_allocator.has_room(missing):
            return None
        self.hisparse_attn_allocator.require_place_for(surplus)
        self._clear_rows(pages)
        self._return_surplus(surplus)
        fresh = self.hisparse_attn_allocator.take_pages(missing)
        return self.hisparse_attn_allocator.slots_of(torch.cat((kept, fresh)))

    def _claimed_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Device pages of logical `pages` that a buffer takes over: all, partly used ones whole."""
        return self._device_pages(pages)

    def _return_surplus(self, device_pages: torch.Tensor) -> None:
        """What a request had on the device beyond the size of its buffer."""
        self._give_device_pages(device_pages)

    def free_hisparse_indices(self, buffer_indices: torch.Tensor) -> None:
        """Return the device pages of a buffer, or of any slots of buffers: integer `[n]`.

        Each page touched is returned whole, once; the padding page is skipped.

        Raises:
            InvalidSlotError: with `validate`, slots outside the device pool, or of a page that the
                mapping names, which is no buffer (unmap it, or use `free_hisparse`).
            DoubleFreeError, PendingFreeError: with `validate`, slots that are not lent.
        """
        operation = "free_hisparse_indices"
        slots = as_index(operation, buffer_indices, self._index_device)
        if slots.numel() == 0:
            return
        self._check_buffer(operation, slots)
        pages = self.hisparse_attn_allocator.pages_of(slots)
        self._give_device_pages(pages[pages > 0])

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return logical pages, whatever the logical allocator pairs with them, and their device
        pages."""
        slots = as_index("free", free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free", slots)
        pages = self._slot_side.pages_of(slots)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.free(slots)
        self._detach(pages, device_pages)

    def free_segments(self, segments: Iterable[Segment]) -> None:
        """`free` of page-aligned pieces of one row, ascending, no page shared."""
        pieces = list(segments)
        pages = self._pages_of_segments("free_segments", pieces)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.free_segments(pieces)
        self._detach(pages, device_pages)

    def free_hisparse(self, free_indices: torch.Tensor) -> None:
        """Return the device pages of the logical pages touched, whole; the logical side stays.

        Pages without a device page are skipped. Of the pages touched no entry stays mapped,
        whichever of their slots are named (as with SWA peers, sglang#27779).
        """
        slots = as_index("free_hisparse", free_indices, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free_hisparse", slots)
        pages = self._slot_side.pages_of(slots)
        self._detach(pages, self._returnable(pages))

    def free_compressed(self, compressed_indices: torch.Tensor) -> None:
        """`free_hisparse` by entries, integer `[n]`."""
        operation = "free_compressed"
        entries = as_index(operation, compressed_indices, self._index_device)
        if entries.numel() == 0:
            return
        self._check_entries_lent(operation, entries)
        pages = torch.unique(entries // self.hisparse_page_size)
        self._detach(pages, self._returnable(pages))

    def _pages_of_segments(self, operation: str, segments: list[Segment]) -> torch.Tensor:
        """Logical pages of the segments, checked: int64 `[n]`."""
        page_size = self._slot_side.page_size
        indices = as_segments(operation, segments, page_size, self._index_device)
        if not indices:
            return torch.empty(0, dtype=torch.int64, device=self._index_device)
        if self._slot_side.ledger is not None:
            self._slot_side.ledger.require_segments(operation, indices)
        return self._slot_side.pages_of_segments(indices)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`, on both sides."""
        self._require_group_everywhere("free_group_begin", is_open=False)
        self.logical_attn_allocator.free_group_begin()
        self.hisparse_attn_allocator.free_group_begin()
        self._group_open = True

    def free_group_end(self) -> None:
        """Make everything freed in the group available, on both sides."""
        self._require_group_everywhere("free_group_end", is_open=True)
        device_pages = self.hisparse_attn_allocator.queued_pages()
        # Both sides before either: a group that cannot end stays open, and nothing is lost.
        self.hisparse_attn_allocator.require_place_for(device_pages)
        self.logical_attn_allocator.free_group_end()
        self.hisparse_attn_allocator.close_group(device_pages)
        self._group_open = False

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        self.require_group(operation, is_open=is_open)
        self.logical_attn_allocator.require_group(operation, is_open=is_open)
        self.hisparse_attn_allocator.require_group(operation, is_open=is_open)

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
        device_pages = self._rows[pages].amax(dim=1) // self.hisparse_page_size
        # Page 0 stands for "no device page" and must never reach a free list. How many are left is
        # known to the device only, so this waits for it.
        return device_pages[device_pages > 0]

    def _returnable(self, pages: torch.Tensor) -> torch.Tensor:
        """The device pages of logical `pages`, before anything changes.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        device_pages = self._device_pages(pages)
        self.hisparse_attn_allocator.require_place_for(device_pages)
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
        self.hisparse_attn_allocator.give_pages(device_pages)

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

    def _check_buffer(self, operation: str, slots: torch.Tensor) -> None:
        if self.hisparse_attn_allocator.ledger is None:
            return
        self.hisparse_attn_allocator.ledger.require_freeable(operation, slots)
        pages = on_host(slots) // self.hisparse_page_size
        mapped = on_host(self._rows.amax(dim=1)) // self.hisparse_page_size
        refuse(
            InvalidSlotError,
            operation,
            pages[np.isin(pages, mapped)],
            "device pages that the mapping names",
            "pages of a buffer on loan",
        )

    # -- the whole pool ------------------------------------------------------------------------

    def clear(self) -> None:
        """Take everything back, buffers too, unmap every entry, close an open group."""
        self.logical_attn_allocator.clear()
        self.hisparse_attn_allocator.clear()
        # The pool keeps the same tensor; its last element stays the sentinel.
        self.full_to_hisparse_device_index_mapping[:-1].fill_(0)
        self._group_open = False


def _in_order_of_appearance(pages: torch.Tensor) -> torch.Tensor:
    """Each page once, where it is first named: int64 `[m]`."""
    distinct, position = torch.unique(pages, return_inverse=True)
    first = torch.full_like(distinct, pages.numel())
    first.scatter_reduce_(0, position, torch.arange(pages.numel(), device=pages.device), "amin")
    return distinct[torch.argsort(first)]

"""Lending and returning logical slots together with device slots, and device buffers.

A call that needs both sides takes from both or from neither, and what it returns leaves both. A
buffer is device pages of one request, which the mapping no longer names; so every device page is
free, or named by one logical page of the mapping, or on loan in a buffer (or waits for the end of
an open group).

Left out: the mapping itself (`kvcore.allocator.device_mapping`), and what callers see of the two
variants (`kvcore.allocator.hisparse`).
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvcore.allocator.arguments import Segment, as_index, as_segments, whole_pages
from kvcore.allocator.batch import ExtendBatch
from kvcore.allocator.device_mapping import DeviceMappedAllocator
from kvcore.allocator.ownership import on_host, refuse
from kvcore.allocator.pending import without_repetitions
from kvcore.allocator.single import SlotsOf, lending
from kvcore.errors import InvalidSlotError


class DeviceSideAllocator(DeviceMappedAllocator):
    """Lends from a logical allocator and a device pool; a subclass says which."""

    # -- lending -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages with device pages, every entry mapped; see the base class."""
        page_size = self._slot_side.page_size
        num_pages = whole_pages("alloc", need_size, page_size)

        def entries_of(slots: torch.Tensor) -> torch.Tensor:
            first = slots[::page_size, None] // page_size * self.hisparse_page_size
            return (first + self._row_offsets).reshape(-1)

        return self._lend_both(
            num_pages,
            self._slot_side.slots_of,
            entries_of,
            num_pages,
            self.hisparse_attn_allocator.slots_of,
        )

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
        # Every value error of the logical allocator, then the device side's; then who has room.
        self.logical_attn_allocator.check_batch(batch)
        device_batch = self._device_batch(batch)
        self._check_continued(batch, device_batch)
        page_size = self._slot_side.page_size
        return self._lend_both(
            batch.num_new_pages(page_size),
            partial(batch.slots, page_size=page_size, kernels=self._kernels),
            self._entries_of,
            device_batch.num_new_pages(self.hisparse_page_size),
            partial(device_batch.slots, page_size=self.hisparse_page_size),
        )

    def _lend_both(
        self,
        num_pages: int,
        slots_of: SlotsOf,
        entries_of: SlotsOf,
        num_device_pages: int,
        device_slots_of: SlotsOf,
    ) -> torch.Tensor | None:
        """The slots of fresh logical pages, their entries mapped to slots of fresh device pages.

        None if either side lacks pages. Whatever raises, nothing changed.
        """
        device = self.hisparse_attn_allocator
        if not device.has_room(num_device_pages):
            return None
        mapping = self.full_to_hisparse_device_index_mapping
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

        def mapped(pages: torch.Tensor) -> torch.Tensor:
            slots = slots_of(pages)
            entries = entries_of(slots)
            device_slots = device_slots_of(device.take_pages(num_device_pages))
            # Read before written: an entry outside fails here, and the rest can be written back.
            replaced.append((entries, mapping[entries]))
            mapping[entries] = device_slots
            return slots

        with lending(device):
            try:
                return self.logical_attn_allocator.lend(num_pages, mapped)
            except BaseException:
                for entries, device_slots in replaced:
                    mapping[entries] = device_slots
                raise

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
        batch = ExtendBatch.checked(
            "alloc_logical_only",
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            self._index_device,
        )
        self.logical_attn_allocator.check_batch(batch)
        return self.logical_attn_allocator.lend_batch(batch)

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
            GeometryError: `need_size` is no integer, negative or not a multiple of
                `hisparse_page_size`.
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
        self.hisparse_attn_allocator.require_place_for(surplus.numel())
        with lending(self.hisparse_attn_allocator):
            fresh = self.hisparse_attn_allocator.take_pages(missing)
            buffer = self.hisparse_attn_allocator.slots_of(torch.cat((kept, fresh)))
            self._clear_rows(pages)
        self._return_surplus(surplus)
        return buffer

    def _claimed_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Device pages of logical `pages` that a buffer takes over: all, partly used ones whole."""
        return self._device_pages(pages)

    def _return_surplus(self, device_pages: torch.Tensor) -> None:
        """What a request had on the device beyond the size of its buffer."""
        self._give_device_pages(device_pages)

    def free_hisparse_indices(self, buffer_indices: torch.Tensor) -> None:
        """Return the device pages of a buffer, or of any slots of buffers: integer `[n]`.

        Each page touched is returned whole, once. The padding page is no part of a buffer: it is
        refused with `validate` and skipped without, so that it never reaches a free list.

        Raises:
            InvalidSlotError: with `validate`, slots outside the device pool, those of the padding
                page too, or of a page that the mapping names, which is no buffer (unmap it, or use
                `free_hisparse`).
            DoubleFreeError, PendingFreeError: with `validate`, slots that are not lent.
        """
        operation = "free_hisparse_indices"
        slots = as_index(operation, buffer_indices, self._index_device)
        if slots.numel() == 0:
            return
        self._check_buffer(operation, slots)
        self._give_device_pages(self.hisparse_attn_allocator.touched_pages(slots))

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

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return logical pages, whatever the logical allocator pairs with them, and their device
        pages."""
        self._return_slots("free", free_index)

    def _return_slots(self, operation: str, free_index: torch.Tensor) -> None:
        slots = as_index(operation, free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free(operation, slots)
        pages = self._slot_side.touched_pages(slots)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.free(slots)
        self._detach(pages, device_pages)

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free` of page-aligned pieces of one row, ascending, no page shared."""
        pieces = list(segments)
        pages = self._pages_of_segments(operation, pieces)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.return_segments(operation, pieces)
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
        pages = self._slot_side.touched_pages(slots)
        self._detach(pages, self._returnable(pages))

    def free_compressed(self, compressed_indices: torch.Tensor) -> None:
        """`free_hisparse` by entries, integer `[n]`."""
        operation = "free_compressed"
        entries = as_index(operation, compressed_indices, self._index_device)
        if entries.numel() == 0:
            return
        self._check_entries_lent(operation, entries)
        pages = without_repetitions(entries // self.hisparse_page_size)
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

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back until `free_group_end`, on both sides."""
        self._require_group_everywhere("free_group_begin", is_open=False)
        self.logical_attn_allocator.free_group_begin(owned=owned)
        self.hisparse_attn_allocator.free_group_begin(owned=owned)
        self._group_open = True

    def free_group_end(self) -> None:
        """Make everything freed in the group available, on both sides."""
        self._require_group_everywhere("free_group_end", is_open=True)
        device = self.hisparse_attn_allocator
        # Both sides before either: a group that cannot end stays open, and nothing is lost.
        end = device.prepare_end()
        self.logical_attn_allocator.free_group_end()
        device.close_group(end)
        self._group_open = False

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        self.require_group(operation, is_open=is_open)
        self.logical_attn_allocator.require_group(operation, is_open=is_open)
        self.hisparse_attn_allocator.require_group(operation, is_open=is_open)


def _in_order_of_appearance(pages: torch.Tensor) -> torch.Tensor:
    """Each page once, where it is first named: int64 `[m]`."""
    distinct, position = torch.unique(pages, return_inverse=True)
    first = torch.full_like(distinct, pages.numel())
    first.scatter_reduce_(0, position, torch.arange(pages.numel(), device=pages.device), "amin")
    return distinct[torch.argsort(first)]

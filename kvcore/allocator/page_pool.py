"""One pool of pages and its free list: capacity, what is lent and given back, free groups.

Everything is counted in pages. Subclasses say how slots become pages and in which order pages come
back.

Left out: the calls that lend slots (`kvcore.allocator.single`), SWA peers (`kvcore.allocator.swa`).
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.allocator.arguments import (
    Segment,
    as_index,
    as_number,
    as_segments,
    pool_pages,
)
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.ownership import FREE, LENT, PENDING, Ids, PageLedger, on_host
from kvcore.allocator.pending import PendingFrees, distinct_pages, pages_on_host
from kvcore.free_list import FreeList, Position


class GroupEnd(NamedTuple):
    """What a group releases: pages written into their place, and entries that nobody counted."""

    num_pages: int
    uncounted: torch.Tensor | None
    gaps_are_counted: bool


class PagePool(BaseTokenToKVPoolAllocator):
    """Lends the pages 1..num_pages of one pool; page 0 is padding and never lent.

    An allocator of several pools drives this one by its `free_list`, and notes what it did by
    `note_lent` and `note_free`; or inside `lending` by `take_pages` and `give_pages`.

    `size` tokens hold `num_pages = size // page_size` pages; a remainder is left unused.
    `lists_slots`: the free list keeps the first slot of each page instead of its id.
    """

    size: int = 0
    """Tokens of the pool, the padding page not counted."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        *,
        validate: bool | None = None,
        pool_name: str = "KV",
        lists_slots: bool = False,
    ) -> None:
        super().__init__(page_size, dtype, device, kvcache, need_sort, validate)
        self._pool_name = pool_name
        self._unit = self.page_size if lists_slots else 1
        num_pages = pool_pages("constructor", size, page_size)
        self._offsets = torch.arange(page_size, device=self._index_device)
        self._build(size, num_pages)

    def _build(self, size: int, num_pages: int) -> None:
        self.size = as_number("constructor", "size", size)
        self.num_pages = num_pages
        self.lent_alone = 0
        """Pages lent so far by calls of this object itself, not by an allocator over it."""
        self.free_list = self._make_free_list()
        self.ledger = self._make_ledger() if self.validate else None
        self.pending = PendingFrees(self.page_size, self._index_device)
        """What the open group holds back."""
        self.settled = PendingFrees(self.page_size, self._index_device)
        """What of it concerns nobody else before the group's end."""
        self.drop_group()

    @abstractmethod
    def _make_free_list(self) -> FreeList:
        """A free list of `num_pages`, in the order in which this kind reuses pages."""

    @abstractmethod
    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages that a set of slots touches, each once: int64 `[n]`."""

    def touched_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """`pages_of`, but without `validate` a page named again may count as 0: int64 `[n]`.

        So its shape is known to the host, and nothing waits for the device.
        """
        if self.page_size == 1 or self.ledger is not None:
            return self.pages_of(slots)
        return distinct_pages(slots, self.page_size)

    def _make_ledger(self) -> PageLedger:
        return PageLedger(self._pool_name, self.num_pages, self.page_size)

    # -- capacity ------------------------------------------------------------------------------

    @property
    def size_full(self) -> int:
        """The same as `size`: there is one pool."""
        return self.size

    @property
    def free_pages(self) -> torch.Tensor:
        """Copy of the free list in the order of taking, int64 `[n]`; for inspection."""
        return self.free_list.free_pages

    @property
    def release_pages(self) -> torch.Tensor:
        """Copy of the freed pages that `need_sort` keeps aside, int64 `[n]`; for inspection."""
        return self.free_list.release_pages

    @property
    def pending_pages(self) -> torch.Tensor:
        """Pages queued in the open group, ascending, int64 `[n]`; for inspection."""
        return self._whole_queue().all_pages(self._unit)

    def pending_page_list(self) -> list[int]:
        """`pending_pages` as numbers."""
        return sorted(self.settled.page_set(self._unit) | self.pending.page_set(self._unit))

    def is_uncertain(self) -> bool:
        """Whether it takes counting gaps, or a group's end, to say how many pages are on loan."""
        return self._group_open or self.free_list.has_gaps

    def num_lent(self) -> int:
        """Pages on loan, of a pool that is not uncertain."""
        return self.num_pages - self.free_list.num_free()

    def take_gaps_closed(self) -> int:
        """The gaps that the free list found in counted entries since this was last asked."""
        return self.free_list.take_gaps_closed()

    def free_page_list(self) -> list[int]:
        """`free_pages` and `release_pages` as numbers; on a CPU no tensor is made."""
        return self.free_list.listed()

    def available_size(self) -> int:
        """Tokens in free pages, those set aside by `need_sort` included."""
        return self.free_list.num_free() * self.page_size

    def has_room(self, num_pages: int) -> bool:
        """Whether `take_pages(num_pages)` would succeed."""
        return self.free_list.has_room(num_pages)

    def advance(self, num_pages: int) -> None:
        """Lend what the free list's `front(num_pages)` showed."""
        if self.ledger is not None:
            self.ledger.mark(self.free_list.front(num_pages) // self._unit, LENT)
        self.free_list.advance(num_pages)

    def take_pages(self, num_pages: int) -> torch.Tensor:
        """Lend pages: int64 `[num_pages]` in storage of its own; ask `has_room` first."""
        pages = self.free_list.take(num_pages)
        if self.ledger is not None:
            self.ledger.mark(pages, LENT)
        return pages

    def position(self) -> Position:
        """Where `rewind` returns to."""
        return self.free_list.position()

    def rewind(self, position: Position) -> None:
        """Undo every `take_pages` since `position`; nothing was given since."""
        self.free_list.rewind(position)
        if self.ledger is not None:
            self.ledger.mark(self.free_list.free_pages, FREE)
            self.ledger.mark(self.free_list.release_pages, FREE)

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return the pages touched, each once."""
        self.free_as("free", free_index)

    def free_full(self, free_index: torch.Tensor) -> None:
        """The same as `free`: there is one pool."""
        self.free_as("free_full", free_index)

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """Return pieces of one row; waits for no device value."""
        self.free_segments_as(operation, segments)

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """The same as `return_segments`: there is one pool."""
        self.free_segments_as(operation, segments)

    def free_as(self, operation: str, free_index: torch.Tensor) -> torch.Tensor:
        """`free` under the name that its errors give; the checked slots, int64 `[n]`."""
        slots = as_index(operation, free_index, self._index_device)
        count = slots.numel()
        if count == 0:
            return slots
        if self.ledger is not None:
            self.ledger.require_freeable(operation, slots)
        if self._group_open:
            self.queue_slots(slots, self.pending)
        elif self.page_size == 1:
            self.give_pages(slots)
        else:
            self.give_set(slots)
        return slots

    def give_set(self, slots: torch.Tensor) -> None:
        """Return the pages that slots touch, as many as they are, now or at the group's end.

        Without `validate` nothing waits for the device.
        """
        if self._by_host:
            self.give_host_pages(pages_on_host(slots, self.page_size))
            return
        pages = self.touched_pages(slots)
        if self.ledger is not None:
            self.give_pages(pages)
        else:
            self.give_entries(pages * self._unit, counted=False)

    def free_segments_as(self, operation: str, segments: Iterable[Segment]) -> list[torch.Tensor]:
        """`return_segments`; the checked segments, none of them empty."""
        indices = as_segments(operation, segments, self.page_size, self._index_device)
        if not indices:
            return indices
        if self.ledger is not None:
            self.ledger.require_segments(operation, indices)
        if self._group_open:
            self.queue_segments(indices, self.pending)
        else:
            self.give_firsts(self.firsts_of(indices))
        return indices

    def firsts_of(self, indices: list[torch.Tensor]) -> torch.Tensor:
        """A slot of each page of page-aligned pieces of a row: int64 `[n]`, a view if it can be.

        The shape follows from the lengths, so nothing waits for the device.
        """
        if self.page_size == 1:
            return indices[0] if len(indices) == 1 else torch.cat(indices)
        if len(indices) == 1:
            return indices[0][:: self.page_size]
        return torch.cat([index[:: self.page_size] for index in indices])

    def pages_of_segments(self, indices: list[torch.Tensor]) -> torch.Tensor:
        """The pages of `firsts_of`: int64 `[n]`, fresh storage."""
        return self.firsts_of(indices) // self.page_size

    def give_firsts(self, firsts: torch.Tensor) -> None:
        """Return distinct pages by a slot of each, now or at the end of the open group."""
        if self._group_open:
            self.give_pages(firsts // self.page_size)
            return
        place = self.free_list.place(firsts.numel())
        self.write_entries(firsts, place)
        self.commit(firsts.numel())

    def write_entries(self, firsts: torch.Tensor, place: torch.Tensor) -> None:
        """Write what the free list keeps of the pages of these slots into `place`, int64 `[n]`."""
        if self.page_size == 1:
            place.copy_(firsts)
        else:
            torch.floor_divide(firsts, self.page_size, out=place)
            if self._unit > 1:
                place.mul_(self._unit)

    def commit(self, num_pages: int) -> None:
        """What was written into the free list's `place(num_pages)` is free."""
        if self.ledger is not None:
            self.ledger.mark(self.free_list.place(num_pages) // self._unit, FREE)
        self.free_list.commit(num_pages)

    def give_host_pages(self, pages: Ids) -> None:
        """`give_pages` by numpy, on a CPU; a list of first slots gets these. Copied."""
        if self._group_open:
            self.pending.add_host_pages(pages.tobytes())
        else:
            self.free_list.host_give(pages if self._unit == 1 else pages * self._unit)
        if self.ledger is not None:
            self.ledger.mark(pages, PENDING if self._group_open else FREE)

    def give_pages(self, pages: torch.Tensor) -> None:
        """Return distinct pages, now or at the end of the open group, which keeps the tensor."""
        if self._group_open:
            self.pending.add_pages(pages)
        else:
            self.free_list.give(pages)
        if self.ledger is not None:
            self.ledger.mark(pages, PENDING if self._group_open else FREE)

    def give_entries(self, entries: torch.Tensor, *, counted: bool = True) -> None:
        """Return what the free list keeps of distinct pages, 0 standing for none; kept.

        Outside a group and without `validate` nothing waits for the device: the pages are counted
        when a number is needed that they decide. See `FreeList.give_with_gaps` for `counted`.
        """
        if self.ledger is not None:
            pages = entries[entries > 0] // self._unit
            self.give_pages(pages)
        elif self._group_open:
            self.pending.add_entries(entries, counted=counted)
        elif self._by_host:
            self.free_list.host_give_with_gaps(on_host(entries), counted=counted)
        else:
            self.free_list.give_with_gaps(entries, counted=counted)

    def queue_slots(self, slots: torch.Tensor, queue: PendingFrees) -> None:
        """Return the pages of slots at the end of the open group, as part of `queue`."""
        self.queue_set(slots, queue)
        if self.ledger is not None:
            self.ledger.mark(slots // self.page_size, PENDING)

    def queue_set(self, slots: torch.Tensor, queue: PendingFrees) -> None:
        """Queue slots in any number a page."""
        if self._by_host and self.page_size == 1:
            queue.add_host_pages(slots.numpy().tobytes())
            return
        kept = slots if self._group_owned else self._own_copy(slots)
        if self.page_size == 1:
            queue.add_pages(kept)
        else:
            queue.add_set(kept)

    def queue_segments(self, indices: list[torch.Tensor], queue: PendingFrees) -> None:
        """`queue_slots` of page-aligned pieces of a row."""
        self.queue_rows(indices, queue)
        if self.ledger is not None:
            self.ledger.mark(self.pages_of_segments(indices), PENDING)

    def queue_rows(self, indices: list[torch.Tensor], queue: PendingFrees) -> None:
        """Queue page-aligned pieces of a row, in a tensor of our own unless the group is owned."""
        if self._by_host:
            size = self.page_size
            for index in indices:
                slots = index.numpy()
                queue.add_host_pages((slots if size == 1 else slots[::size] // size).tobytes())
            return
        if self.page_size > 1 and (self._group_owned or self._kernels is not None):
            # One launch of a kernel divides them all; so does one operation of torch at the end.
            for index in indices:
                queue.add_row(index if self._group_owned else self._own_copy(index))
            return
        pages = self.firsts_of(indices)
        if self.page_size > 1:
            pages = pages // self.page_size
        elif not self._group_owned:
            pages = self._own_copy(pages)
        queue.add_pages(pages)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back until `free_group_end`."""
        self.require_group("free_group_begin", is_open=False)
        self._group_open, self._group_owned = True, owned

    def free_group_end(self) -> None:
        """Make everything freed in the group available."""
        self.require_group("free_group_end", is_open=True)
        self.close_group(self.prepare_end())

    def require_place_for(self, num_pages: int) -> None:
        """Raise DoubleFreeError if more pages would be free than exist."""
        self.free_list.require_place_for(num_pages)

    def settle(self) -> None:
        """Tell what was queued so far from what will be."""
        self.settled.absorb(self.pending)
        self.pending.clear()

    def _whole_queue(self) -> PendingFrees:
        """All that the open group holds back; not to be changed."""
        if not self.settled:
            return self.pending
        whole = PendingFrees(self.page_size, self._index_device)
        whole.absorb(self.settled)
        whole.absorb(self.pending)
        return whole

    def prepare_end(self) -> GroupEnd:
        """All of a group's end that can fail; until `close_group` the group is open as it was.

        Raises:
            DoubleFreeError: more pages would be free than exist, as far as the host can see.
        """
        queue = self._whole_queue()
        num_pages = queue.num_pages
        uncounted = None if queue.is_counted else queue.uncounted_entries(self._unit)
        if uncounted is not None and self._by_host:
            self.require_place_for(num_pages + int(np.count_nonzero(on_host(uncounted))))
        if num_pages and self._by_host:
            np.multiply(
                queue.counted_on_host(), self._unit, out=self.free_list.host_place(num_pages)
            )
        elif num_pages:
            place = self.free_list.place(num_pages)
            queue.write(place)
            if self._unit > 1:
                place.mul_(self._unit)
        return GroupEnd(num_pages, uncounted, queue.gaps_are_counted)

    def close_group(self, end: GroupEnd) -> None:
        """End the group by releasing what it holds back."""
        self.drop_group()
        if end.num_pages:
            self.commit(end.num_pages)
        if end.uncounted is not None:
            self.give_entries(end.uncounted, counted=end.gaps_are_counted)

    def drop_group(self) -> None:
        """Close the group and forget what it holds back."""
        self.pending.clear()
        self.settled.clear()
        self._group_open = self._group_owned = False

    def _no_pages(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._index_device)

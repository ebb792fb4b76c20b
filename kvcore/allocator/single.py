"""One pool and its free list: the allocator behind page size 1 and behind larger pages.

Everything is counted in pages. Subclasses say how slots become pages and in which order pages come
back.

Left out: SWA peers (`kvcore.allocator.swa`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Protocol, Self, TypeAlias

import torch

from kvcore.allocator.arguments import (
    Segment,
    as_index,
    as_number,
    as_segments,
    pool_pages,
    whole_pages,
)
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.allocator.ownership import FREE, LENT, PENDING, PageLedger
from kvcore.allocator.pending import PendingFrees, distinct_pages
from kvcore.errors import GeometryError
from kvcore.free_list import FreeList, Position

SlotsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What a caller gets for fresh pages, int64 `[n]`, a view of the free list: slots."""


class PoolSize(Protocol):
    """An engine's memory configuration, as far as one pool is concerned."""

    max_total_num_tokens: int


class SinglePoolAllocator(BaseTokenToKVPoolAllocator):
    """Lends the pages 1..num_pages of one pool; page 0 is padding and never lent.

    `lend` is behind every allocation. An allocator of several pools drives this one by `front`,
    `advance`, `place` and `commit`, which are its free list's, or inside `lending` by `take_pages`
    and `give_pages`.

    `size` tokens hold `num_pages = size // page_size` pages; a remainder is left unused.
    `lists_slots`: the free list keeps the first slot of each page instead of its id.
    """

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
        self._size = as_number("constructor", "size", size)
        self.num_pages = num_pages
        self.lent_alone = 0
        """Pages lent so far by calls of this object itself, not by an allocator over it."""
        self._free_list = self._make_free_list()
        self.ledger = self._make_ledger() if self.validate else None
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
    def size(self) -> int:
        """Tokens of the pool, the padding page not counted."""
        return self._size

    @property
    def size_full(self) -> int:
        """The same: there is one pool."""
        return self._size

    @property
    def free_pages(self) -> torch.Tensor:
        """Copy of the free list in the order of taking, int64 `[n]`; for inspection."""
        return self._free_list.free_pages

    @property
    def release_pages(self) -> torch.Tensor:
        """Copy of the freed pages that `need_sort` keeps aside, int64 `[n]`; for inspection."""
        return self._free_list.release_pages

    @property
    def pending_pages(self) -> torch.Tensor:
        """Pages queued in the open group, ascending, int64 `[n]`; for inspection."""
        return self.pending.all_pages(self._unit)

    @property
    def num_free_pages(self) -> int:
        """Free pages, those set aside by `need_sort` included."""
        return self._free_list.num_pages

    def is_whole(self) -> bool:
        """Whether every page is known to be free, without counting gaps."""
        return self._free_list.is_whole()

    def take_gaps_closed(self) -> int:
        """The gaps that the free list found in counted entries since this was last asked."""
        return self._free_list.take_gaps_closed()

    def free_page_list(self) -> list[int]:
        """`free_pages` and `release_pages` as numbers; on a CPU no tensor is made."""
        return self._free_list.listed()

    def available_size(self) -> int:
        """Tokens in free pages, those set aside by `need_sort` included."""
        return self._free_list.num_pages * self.page_size

    def has_room(self, num_pages: int) -> bool:
        """Whether `take_pages(num_pages)` would succeed."""
        return self._free_list.has_room(num_pages)

    # -- lending -------------------------------------------------------------------------------

    def front(self, num_pages: int) -> torch.Tensor:
        """What the free list keeps of the pages that are lent next, a view; see there."""
        return self._free_list.front(num_pages)

    def advance(self, num_pages: int) -> None:
        """Lend what `front(num_pages)` showed."""
        if self.ledger is not None:
            self.ledger.mark(self._free_list.front(num_pages) // self._unit, LENT)
        self._free_list.advance(num_pages)

    def take_pages(self, num_pages: int) -> torch.Tensor:
        """Lend pages: int64 `[num_pages]` in storage of its own; ask `has_room` first."""
        pages = self._free_list.take(num_pages)
        if self.ledger is not None:
            self.ledger.mark(pages, LENT)
        return pages

    def position(self) -> Position:
        """Where `rewind` returns to."""
        return self._free_list.position()

    def rewind(self, position: Position) -> None:
        """Undo every `take_pages` since `position`; nothing was given since."""
        self._free_list.rewind(position)
        if self.ledger is not None:
            self.ledger.mark(self._free_list.free_pages, FREE)
            self.ledger.mark(self._free_list.release_pages, FREE)

    def lend(self, num_pages: int, slots_of: SlotsOf) -> torch.Tensor | None:
        """What `slots_of` says of fresh pages; None if there are not that many.

        If it raises, no page was lent.
        """
        free = self._free_list
        if not free.has_room(num_pages):
            return None
        position = free.position() if self.need_sort else None
        try:
            slots = slots_of(free.front(num_pages))
        except BaseException:
            if position is not None:
                free.rewind(position)
            raise
        self.lent_alone += num_pages
        self.advance(num_pages)
        return slots

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """All slots of the pages, page by page: int64 `[n * page_size]`."""
        return torch.add(self._offsets, pages.unsqueeze(1), alpha=self.page_size).view(-1)

    def _slots_of_front(self, front: torch.Tensor) -> torch.Tensor:
        """`slots_of` what the free list keeps."""
        if self._unit == 1:
            return self.slots_of(front)
        return torch.add(self._offsets, front.unsqueeze(1)).view(-1)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages; see the base class."""
        return self.lend(whole_pages("alloc", need_size, self.page_size), self._slots_of_front)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Lend the new tokens of each row; see the base class."""
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
        return self._alloc_batch(batch)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Lend one token a row; see the base class."""
        batch = DecodeBatch.checked(
            "alloc_decode", seq_lens, seq_lens_cpu, last_loc, self._index_device
        )
        return self._alloc_batch(batch)

    def _alloc_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        self.check_batch(batch)
        return self.lend_batch(batch)

    def check_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """Raise for values that `lend_batch` must not see; see `PageLedger.require_batch`."""
        if self.ledger is not None:
            self.ledger.require_batch(batch)

    def lend_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        """The new tokens of each row of a batch whose values have been checked."""
        return self.lend(batch.num_new_pages(self.page_size), partial(self._slots_of_batch, batch))

    def _slots_of_batch(
        self, batch: ExtendBatch | DecodeBatch, front: torch.Tensor
    ) -> torch.Tensor:
        pages = front if self._unit == 1 else front // self._unit
        return batch.slots(pages, self.page_size, self._kernels)

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
        if slots.numel() == 0:
            return slots
        if self.ledger is not None:
            self.ledger.require_freeable(operation, slots)
        if self._group_open:
            self.queue_slots(self.kept(slots))
        elif self.page_size == 1:
            self.give_pages(slots)
        else:
            self.give_set(slots)
        return slots

    def give_set(self, slots: torch.Tensor) -> None:
        """Return the pages that slots touch, as many as they are, now or at the group's end.

        Without `validate` nothing waits for the device.
        """
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
            self.mark_pending(indices)
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
        place = self._free_list.place(firsts.numel())
        self.write_entries(firsts, place)
        self.commit(firsts.numel(), place)

    def write_entries(self, firsts: torch.Tensor, place: torch.Tensor) -> None:
        """Write what the free list keeps of the pages of these slots into `place`, int64 `[n]`."""
        if self.page_size == 1:
            place.copy_(firsts)
        else:
            torch.floor_divide(firsts, self.page_size, out=place)
            if self._unit > 1:
                place.mul_(self._unit)

    def place(self, num_pages: int) -> torch.Tensor:
        """Where what the free list keeps of the next pages goes; see there."""
        return self._free_list.place(num_pages)

    def commit(self, num_pages: int, place: torch.Tensor) -> None:
        """What was written into `place(num_pages)` is free."""
        self._free_list.commit(num_pages)
        if self.ledger is not None:
            self.ledger.mark(place // self._unit, FREE)

    def give_pages(self, pages: torch.Tensor) -> None:
        """Return distinct pages, now or at the end of the open group, which keeps the tensor."""
        if self._group_open:
            self.pending.add_pages(pages)
            self._mark(pages, PENDING)
            return
        self._free_list.give(pages)
        self._mark(pages, FREE)

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
        else:
            self._free_list.give_with_gaps(entries, counted=counted)

    def queue_entries(self, entries: torch.Tensor) -> None:
        """Return distinct pages at the end of the open group, by what the free list keeps."""
        self.pending.add_pages(entries if self._unit == 1 else entries // self._unit)

    def queue_slots(self, slots: torch.Tensor) -> None:
        """Return the pages of `slots` at the end of the open group; the tensor is kept."""
        self.queue_set(slots, self.pending)
        self._mark(slots // self.page_size, PENDING)

    def queue_set(self, slots: torch.Tensor, *queues: PendingFrees) -> None:
        """Queue slots in any number a page; the tensor is kept."""
        for queue in queues:
            if self.page_size == 1:
                queue.add_pages(slots)
            else:
                queue.add_set(slots)

    def queue_segments(self, indices: list[torch.Tensor], *queues: PendingFrees) -> None:
        """Queue page-aligned pieces of a row, in a tensor of our own unless the group is owned."""
        if self._group_owned and self.page_size > 1:
            for queue in queues:
                for index in indices:
                    queue.add_row(index)
            return
        pages = self.firsts_of(indices)
        pages = self.kept(pages) if self.page_size == 1 else pages // self.page_size
        for queue in queues:
            queue.add_pages(pages)

    def mark_pending(self, indices: list[torch.Tensor]) -> None:
        """Note that the pages of these pieces of a row wait for the end of the group."""
        if self.ledger is not None:
            self.ledger.mark(self.pages_of_segments(indices), PENDING)

    def kept(self, index: torch.Tensor) -> torch.Tensor:
        """An index that stays as it is until the open group ends."""
        return index if self._group_owned else self._own_copy(index)

    def _mark(self, pages: torch.Tensor, state: int) -> None:
        if self.ledger is not None:
            self.ledger.mark(pages, state)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back until `free_group_end`."""
        self.require_group("free_group_begin", is_open=False)
        self._group_open, self._group_owned = True, owned

    def free_group_end(self) -> None:
        """Make everything freed in the group available."""
        self.require_group("free_group_end", is_open=True)
        self.require_place_for(self.pending.num_pages)
        self.close_group()

    def require_place_for(self, num_pages: int) -> None:
        """Raise DoubleFreeError if more pages would be free than exist."""
        self._free_list.require_place_for(num_pages)

    def close_group(self) -> None:
        """End the group by releasing what it holds back; there is place for it."""
        pending = self.pending
        # What can fail comes first: then the group is still open, and nothing is lost.
        place = self._free_list.place(pending.num_pages) if pending.num_pages else None
        if place is not None:
            pending.write(place)
            if self._unit > 1:
                place.mul_(self._unit)
        uncounted = None if pending.is_counted else pending.uncounted_entries(self._unit)
        counted = pending.gaps_are_counted
        self.drop_group()
        if place is not None:
            self.commit(place.numel(), place)
        if uncounted is not None:
            self.give_entries(uncounted, counted=counted)

    def drop_group(self) -> None:
        """Close the group and forget what it holds back."""
        self.pending = PendingFrees(self.page_size, self._index_device)
        self._group_open = self._group_owned = False

    def _no_pages(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._index_device)

    # -- the whole pool ------------------------------------------------------------------------

    def merge_and_sort_free(self) -> None:
        """Merge the pages that `need_sort` set aside, now."""
        self._free_list.merge_and_sort()

    def clear(self) -> None:
        """Take everything back and close an open group."""
        self._free_list.reset()
        if self.ledger is not None:
            self.ledger.reset()
        self.drop_group()

    def resize(self, config: PoolSize | None = None, *, size: int | None = None) -> None:
        """Take everything back and lend a pool of another size from now on.

        Args:
            config: an object whose `max_total_num_tokens` is the new size.
            size: the new size in tokens; exactly one of both is given.

        Raises:
            GeometryError: none or both given, or a size that is no integer or without a single
                page.
        """
        if config is not None and size is None:
            size = config.max_total_num_tokens
        elif config is not None or size is None:
            raise GeometryError("resize: expected either a config or size")
        self.become(self.resized(size))

    def resized(self, size: int) -> Self:
        """What this allocator is to `become`; itself, it is as it was."""
        num_pages = pool_pages("resize", size, self.page_size)
        other = copy(self)
        other._build(size, num_pages)
        return other

    def become(self, other: Self) -> None:
        """Take over what `resized` has built; cannot fail."""
        vars(self).update(vars(other))

    def debug_print(self) -> str:
        """One line of capacity for logs."""
        return f"#{self._pool_name}-available-size: {self.available_size()} of {self.size}"


@contextmanager
def lending(*pools: SinglePoolAllocator) -> Iterator[None]:
    """What the pools lend inside is free again, in the old order, if what is inside raises.

    Nothing is given back to them inside.
    """
    positions = [pool.position() for pool in pools]
    try:
        yield
    except BaseException:
        for pool, position in zip(pools, positions, strict=True):
            pool.rewind(position)
        raise

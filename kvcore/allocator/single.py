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
from kvcore.errors import GeometryError
from kvcore.free_list import FreeList, Position

SlotsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What a caller gets for fresh pages, int64 `[n]`: slots."""


class PoolSize(Protocol):
    """An engine's memory configuration, as far as one pool is concerned."""

    max_total_num_tokens: int


class SinglePoolAllocator(BaseTokenToKVPoolAllocator):
    """Lends the pages 1..num_pages of one pool; page 0 is padding and never lent.

    `lend` is behind every allocation, and `take_pages` and `give_pages` are the calls by which an
    allocator of several pools drives this one, inside `lending`.

    `size` tokens hold `num_pages = size // page_size` pages; a remainder is left unused.
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
    ) -> None:
        super().__init__(page_size, dtype, device, kvcache, need_sort, validate)
        self._pool_name = pool_name
        num_pages = pool_pages("constructor", size, page_size)
        self._offsets = torch.arange(page_size, device=self._index_device)
        self._build(size, num_pages)

    def _build(self, size: int, num_pages: int) -> None:
        self._size = as_number("constructor", "size", size)
        self.num_pages = num_pages
        self._free_list = self._make_free_list()
        self.ledger = self._make_ledger() if self.validate else None
        self._drop_queue()

    @abstractmethod
    def _make_free_list(self) -> FreeList:
        """A free list of `num_pages`, in the order in which this kind reuses pages."""

    @abstractmethod
    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages that a set of slots touches, each once: int64 `[n]`."""

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
        slots = [index // self.page_size for index in self._queued_slots]
        pages: torch.Tensor = torch.unique(
            torch.cat([self._no_pages(), *slots, *self._queued_pages])
        )
        return pages

    def available_size(self) -> int:
        """Tokens in free pages, those set aside by `need_sort` included."""
        return self._free_list.num_pages * self.page_size

    def has_room(self, num_pages: int) -> bool:
        """Whether `take_pages(num_pages)` would succeed."""
        return self._free_list.has_room(num_pages)

    # -- lending -------------------------------------------------------------------------------

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
        self._mark(self._free_list.free_pages, FREE)
        self._mark(self._free_list.release_pages, FREE)

    def lend(self, num_pages: int, slots_of: SlotsOf) -> torch.Tensor | None:
        """What `slots_of` says of fresh pages; None if there are not that many.

        If it raises, no page was lent.
        """
        if not self.has_room(num_pages):
            return None
        with lending(self):
            return slots_of(self.take_pages(num_pages))

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """All slots of the pages, page by page: int64 `[n * page_size]`."""
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages; see the base class."""
        return self.lend(whole_pages("alloc", need_size, self.page_size), self.slots_of)

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
        slots_of = partial(batch.slots, page_size=self.page_size, kernels=self._kernels)
        return self.lend(batch.num_new_pages(self.page_size), slots_of)

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
            self.queue_slots(self._own_copy(slots))
        else:
            self.give_pages(self.pages_of(slots))
        return slots

    def free_segments_as(self, operation: str, segments: Iterable[Segment]) -> torch.Tensor:
        """`return_segments`; the pages freed, int64 `[n]`."""
        indices = as_segments(operation, segments, self.page_size, self._index_device)
        if not indices:
            return self._no_pages()
        if self.ledger is not None:
            self.ledger.require_segments(operation, indices)
        pages = self.pages_of_segments(indices)
        self.give_pages(pages)
        return pages

    def pages_of_segments(self, indices: list[torch.Tensor]) -> torch.Tensor:
        """Pages of page-aligned pieces of a row, by one slot a page: int64 `[n]`, fresh storage.

        The shape follows from the lengths, so nothing waits for the device.
        """
        return torch.cat([index[:: self.page_size] for index in indices]) // self.page_size

    def give_pages(self, pages: torch.Tensor) -> None:
        """Return distinct pages, now or at the end of the open group, which keeps the tensor."""
        if self._group_open:
            self._queued_pages.append(pages)
            self._mark(pages, PENDING)
            return
        self._release(pages)

    def give_pages_with_gaps(self, pages: torch.Tensor) -> None:
        """`give_pages` where 0 stands for no page; the tensor is kept.

        Outside a group and without `validate` nothing waits for the device: the pages are counted
        when the free list is next needed.
        """
        if self._group_open or self.ledger is not None:
            self.give_pages(pages[pages > 0])
        else:
            self._free_list.give_with_gaps(pages)

    def queue_slots(self, slots: torch.Tensor) -> None:
        """Return the pages of `slots` at the end of the open group; the tensor is kept."""
        self._queued_slots.append(slots)
        self._mark(slots // self.page_size, PENDING)

    def _release(self, pages: torch.Tensor) -> None:
        self._free_list.give(pages)
        self._mark(pages, FREE)

    def _mark(self, pages: torch.Tensor, state: int) -> None:
        if self.ledger is not None:
            self.ledger.mark(pages, state)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`."""
        self.require_group("free_group_begin", is_open=False)
        self._group_open = True

    def free_group_end(self) -> None:
        """Make everything freed in the group available."""
        self.require_group("free_group_end", is_open=True)
        pages = self.queued_pages()
        self.require_place_for(pages)
        self.close_group(pages)

    def queued_pages(self) -> torch.Tensor:
        """What the open group will release: int64 `[n]`.

        One pass over everything queued as slots, so that at page sizes above 1 a page named by
        several frees goes back once.
        """
        queued = list(self._queued_pages)
        if self._queued_slots:
            queued.append(self.pages_of(torch.cat(self._queued_slots)))
        return torch.cat(queued) if queued else self._no_pages()

    def require_place_for(self, pages: torch.Tensor) -> None:
        """Raise DoubleFreeError if more pages would be free than exist."""
        self._free_list.require_place_for(pages.numel())

    def close_group(self, pages: torch.Tensor) -> None:
        """End the group by releasing `pages`, which are its queued ones."""
        self._drop_queue()
        if pages.numel():
            self._release(pages)

    def _drop_queue(self) -> None:
        self._queued_slots: list[torch.Tensor] = []
        self._queued_pages: list[torch.Tensor] = []
        self._group_open = False

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
        self._drop_queue()

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

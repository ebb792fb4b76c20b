"""One pool that lends slots: the allocator behind page size 1 and behind larger pages.

Left out: the pool itself (`kvcore.allocator.page_pool`), SWA peers (`kvcore.allocator.swa`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Protocol, Self, TypeAlias

import torch

from kvcore.allocator.arguments import pool_pages, whole_pages
from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.allocator.page_pool import PagePool
from kvcore.errors import GeometryError

SlotsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What a caller gets for fresh pages, int64 `[n]`, a view of the free list: slots."""


class PoolSize(Protocol):
    """An engine's memory configuration, as far as one pool is concerned."""

    max_total_num_tokens: int


class SinglePoolAllocator(PagePool):
    """Lends the slots of one pool; `lend` is behind every allocation."""

    # -- lending -------------------------------------------------------------------------------

    def lend(self, num_pages: int, slots_of: SlotsOf) -> torch.Tensor | None:
        """What `slots_of` says of fresh pages; None if there are not that many.

        If it raises, no page was lent.
        """
        free = self.free_list
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

    # -- the whole pool ------------------------------------------------------------------------

    def merge_and_sort_free(self) -> None:
        """Merge the pages that `need_sort` set aside, now."""
        self.free_list.merge_and_sort()

    def clear(self) -> None:
        """Take everything back and close an open group."""
        self.free_list.reset()
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

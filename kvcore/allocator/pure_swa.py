"""The allocator of models whose every layer slides: one pool behind the surface of a hybrid one.

Full slots and SWA slots are the same slots, so the mapping is the identity and nothing can be
remapped. What a hybrid pool frees in two steps, `free_swa` behind the window and `free_full` or
`free` when the request ends, is one step here: whichever call names a slot first releases it.

Left out: the pool itself (`kvcore.allocator.single`), and peers (`kvcore.allocator.swa`).
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, Protocol, Self, runtime_checkable

import torch

from kvcore.allocator.arguments import (
    Segment,
    as_index,
    as_locations,
    as_number,
    as_segments,
    pool_pages,
)
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.batch import ExtendBatch, SwaTail
from kvcore.allocator.hybrid import HybridPool
from kvcore.allocator.ownership import SLID
from kvcore.allocator.sides import make_pool
from kvcore.errors import GeometryError, MappingError


@runtime_checkable
class SlidingPool(Protocol):
    """A pool whose SWA side can be handed to the allocator of that side."""

    swa_kv_pool: Any


class SlidingPoolSize(Protocol):
    """An engine's memory configuration, as far as sliding-window layers are concerned."""

    swa_max_total_num_tokens: int


class PureSWATokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Lends the slots of one sliding-window pool, of any page size.

    `full_attn_allocator` and `swa_attn_allocator` are the same object, and
    `full_to_swa_index_mapping` is int64 `[size + page_size + 1]`: the identity, and -1 in the last
    entry. It is handed to the pool by `kvcache.register_mapping`; `resize` registers a new one.

    `free` and `free_swa` release the pages touched. Within one free group the same page may be
    named by `free_swa`, again or not, and then by `free`, as a caller does whose request ends in
    the group in which its window moved: the page goes back once, at the end. Outside a group a page
    that `free_swa` took is gone, and naming it again is a double free.

    `free_full` and its segment forms release nothing: its caller has released the SWA side, which
    was all there is.

    Args:
        size_swa: tokens of the pool.
        page_size: slots a page.
        dtype: element type of the pool; kept for callers.
        device: device of all index tensors.
        kvcache: the pool, or None.
        need_sort: keep freed pages aside and merge them in ascending order on demand.
        validate: check values; None means environment variable KVCORE_VALIDATE.

    Raises:
        GeometryError: a pool without a single page.
    """

    def __init__(
        self,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: HybridPool | None,
        need_sort: bool,
        *,
        validate: bool | None = None,
    ) -> None:
        super().__init__(page_size, dtype, device, kvcache, need_sort, validate)
        pool_pages("constructor", size_swa, page_size)
        self.swa_attn_allocator = make_pool(
            size_swa,
            page_size,
            dtype,
            device,
            kvcache.swa_kv_pool if isinstance(kvcache, SlidingPool) else None,
            need_sort,
            validate=self.validate,
            pool_name="SWA",
        )
        self.full_attn_allocator = self.swa_attn_allocator
        self._build_mapping()
        self.register_mapping()
        # Whether a page of the open group may be named by `free_swa` and again.
        self._named_again = False

    def _build_mapping(self) -> None:
        self.full_to_swa_index_mapping = torch.arange(
            self.size + self.page_size + 1, dtype=torch.int64, device=self._index_device
        )
        self.full_to_swa_index_mapping[-1] = -1

    def register_mapping(self) -> None:
        """Hand the mapping to the pool."""
        if self._kvcache is not None:
            self._kvcache.register_mapping(self.full_to_swa_index_mapping)

    # -- capacity ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Tokens of the pool, the padding page not counted."""
        return self.swa_attn_allocator.size

    @property
    def size_full(self) -> int:
        """The same: there is one pool."""
        return self.size

    @property
    def size_swa(self) -> int:
        """The same: there is one pool."""
        return self.size

    @property
    def queued_peer_slots(self) -> torch.Tensor:
        """None, int64 `[0]`: a slot is its own peer, so nothing has to be captured."""
        return torch.empty(0, dtype=torch.int64, device=self._index_device)

    def available_size(self) -> int:
        """Tokens in free pages."""
        return self.swa_attn_allocator.available_size()

    def full_available_size(self) -> int:
        """The same: there is one pool."""
        return self.available_size()

    def swa_available_size(self) -> int:
        """The same: there is one pool."""
        return self.available_size()

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether the pool has as many pages as either side wants: a page is both."""
        return self.swa_attn_allocator.has_room(max(num_full_pages, num_swa_pages))

    def debug_print(self) -> str:
        """One line of capacity for logs."""
        return self.swa_attn_allocator.debug_print()

    def merge_and_sort_free(self) -> None:
        """Merge the pages that `need_sort` set aside, now."""
        self.swa_attn_allocator.merge_and_sort_free()

    # -- lending -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages; see the base class."""
        return self.swa_attn_allocator.alloc(need_size)

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
        return self.swa_attn_allocator.alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Lend one token a row; see the base class."""
        return self.swa_attn_allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_len: int,
        *,
        swa_tail_end: int | None = None,
    ) -> torch.Tensor | None:
        """`alloc_extend` of one row whose tail is the whole extension.

        Raises:
            GeometryError: as `alloc_extend`; a batch of more or less than one row; a tail that is
                no part of the extension.
            MappingError: a tail that is less than the extension; the other slots would have no SWA
                slot, and here a slot is its own.
        """
        operation = "alloc_extend_swa_tail"
        batch = ExtendBatch.checked(
            operation,
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            self._index_device,
        )
        tail = SwaTail.checked(batch, swa_tail_len, swa_tail_end)
        if tail.end - tail.start != extend_num_tokens:
            raise MappingError(
                f"{operation}: expected a tail of all {extend_num_tokens} new tokens, got "
                f"{swa_tail_len}; every slot of this pool is its own SWA slot"
            )
        self.swa_attn_allocator.check_batch(batch)
        return self.swa_attn_allocator.lend_batch(batch)

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return the pages touched, each once, those that `free_swa` named in the group included.

        Raises:
            DoubleFreeError: with `validate`, a page that is not lent.
            PendingFreeError: with `validate`, a page that `free` named in the open group.
        """
        self.swa_attn_allocator.free_as("free", free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Return the pages touched, each once; in an open group `free` may still name them.

        Raises:
            DoubleFreeError: with `validate`, a page that is not lent.
            PendingFreeError: with `validate`, a page that `free` named in the open group.
        """
        slots = self.swa_attn_allocator.free_as("free_swa", free_index)
        self._named_again = True
        if self.swa_attn_allocator.ledger is not None:
            self._mark_slid(slots // self.page_size)

    def free_full(self, free_index: torch.Tensor) -> None:
        """Return nothing: the pages went with `free_swa`.

        A page that is lent is no error, also with `validate`: whether it is the caller's, who
        forgot `free_swa`, or was returned and lent to another row since, the page does not tell.
        The first stays lent.

        Raises:
            InvalidSlotError: with `validate`, a slot that is never lent.
        """
        slots = as_index("free_full", free_index, self._index_device)
        if self.swa_attn_allocator.ledger is not None:
            self.swa_attn_allocator.ledger.require_in_pool("free_full", slots)

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free` of page-aligned pieces of one row, ascending, no page shared."""
        self.swa_attn_allocator.free_segments_as(operation, segments)

    def free_swa_segments(self, segments: Iterable[Segment]) -> None:
        """`free_swa` of page-aligned pieces of one row, ascending, no page shared."""
        self._return_swa_segments("free_swa_segments", segments)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_swa_segments` of a single piece."""
        self._return_swa_segments("free_swa_segment", [(free_index, start_pos)])

    def _return_swa_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        pool = self.swa_attn_allocator
        indices = pool.free_segments_as(operation, segments)
        self._named_again = True
        if indices and pool.ledger is not None:
            self._mark_slid(pool.pages_of_segments(indices))

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """Return nothing: the pages went with `free_swa_segments`. See `free_full`.

        Raises:
            InvalidSlotError: with `validate`, a slot that is never lent.
            GeometryError: with `validate`, slots that do not run through their pages in order.
            DoubleFreeError: with `validate`, a page named more than once.
        """
        indices = as_segments(operation, segments, self.page_size, self._index_device)
        if indices and self.swa_attn_allocator.ledger is not None:
            self.swa_attn_allocator.ledger.require_row_pieces(operation, indices)

    def _mark_slid(self, pages: torch.Tensor) -> None:
        """In an open group, these pages may be named again."""
        if self.swa_attn_allocator.ledger is not None and self._group_open:
            self.swa_attn_allocator.ledger.mark(pages, SLID)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back until `free_group_end`."""
        self._require_group_everywhere("free_group_begin", is_open=False)
        self.swa_attn_allocator.free_group_begin(owned=owned)
        self._group_open, self._named_again = True, False

    def free_group_end(self) -> None:
        """Make everything freed in the group available, each page once."""
        self._require_group_everywhere("free_group_end", is_open=True)
        if self._named_again:
            self._queue_once()
        pool = self.swa_attn_allocator
        # Before anything moves: a group that cannot end stays open, and nothing is lost.
        pool.close_group(pool.prepare_end())
        self._group_open = False

    def _queue_once(self) -> None:
        """The group releases each page once, whichever calls named it."""
        self.swa_attn_allocator.pending = self.swa_attn_allocator.pending.merged()

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        self.require_group(operation, is_open=is_open)
        self.swa_attn_allocator.require_group(operation, is_open=is_open)

    # -- the mapping ---------------------------------------------------------------------------

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The slots themselves, int64 of the same shape in storage of its own; -1 for -1.

        Raises:
            InvalidSlotError: with `validate`, a slot below -1 or beyond the pool.
        """
        operation = "translate_loc_from_full_to_swa"
        locations = as_locations(operation, kv_indices, self._index_device)
        if self.swa_attn_allocator.ledger is not None:
            self.swa_attn_allocator.ledger.require_readable(operation, locations)
        return locations.clone()

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Not possible, whatever the slots.

        Raises:
            MappingError: always: a slot is its own SWA slot.
        """
        self._refuse_remapping("set_full_to_swa_mapping", full_indices, swa_indices)

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Not possible, whatever the slots.

        Raises:
            MappingError: always: a slot is its own SWA slot.
        """
        self._refuse_remapping("clear_full_to_swa_mapping", full_indices)

    def recover_tombstone(self, kept_full: torch.Tensor, incoming_full: torch.Tensor) -> None:
        """Not possible, whatever the slots: here a slot outside the window is gone.

        Raises:
            MappingError: always: a slot is its own SWA slot.
        """
        self._refuse_remapping("recover_tombstone", kept_full, incoming_full)

    def _refuse_remapping(self, operation: str, *indices: torch.Tensor) -> None:
        for index in indices:
            as_index(operation, index, self._index_device)
        raise MappingError(
            f"{operation}: every slot of this pool is its own SWA slot; expected no remapping"
        )

    # -- the whole pool ------------------------------------------------------------------------

    def clear(self) -> None:
        """Take everything back and close an open group."""
        self.swa_attn_allocator.clear()
        self._group_open = False

    def resize(
        self,
        config: SlidingPoolSize | None = None,
        *,
        size: int | None = None,
        size_swa: int | None = None,
    ) -> None:
        """Take everything back and lend a pool of another size, with a new mapping, from now on.

        Args:
            config: an object whose `swa_max_total_num_tokens` is the new size.
            size: the new size in tokens, under the name that callers of one pool use.
            size_swa: the same under the name that callers of a hybrid pool use; exactly one form
                is given, or `size` and `size_swa` that agree.

        Raises:
            GeometryError: no form or several given, sizes that differ, or a size that is no integer
                or without a single page.
        """
        given = [value for value in (size, size_swa) if value is not None]
        if config is not None and not given:
            given = [config.swa_max_total_num_tokens]
        elif config is not None or not given:
            raise GeometryError("resize: expected either a config or one size")
        sizes = {as_number("resize", "size", value) for value in given}
        if len(sizes) != 1:
            raise GeometryError("resize: expected either a config or one size")
        other = self.resized(sizes.pop())
        other.register_mapping()
        self.become(other)

    def resized(self, size: int) -> Self:
        """What this allocator is to `become`, not registered yet; itself, it is as it was."""
        other = copy(self)
        other.swa_attn_allocator = self.swa_attn_allocator.resized(size)
        other._group_open = False
        other._build_mapping()
        return other

    def become(self, other: Self) -> None:
        """Take over what `resized` has built; cannot fail. The pool stays the object it is."""
        pool = self.swa_attn_allocator
        pool.become(other.swa_attn_allocator)
        vars(self).update(vars(other))
        self.swa_attn_allocator = self.full_attn_allocator = pool

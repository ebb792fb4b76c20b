"""The hybrid allocator: full-attention slots and sliding-window slots, lent and returned together.

Free groups hold back *indices*, not peers: looking peers up at once would cost one lookup a free,
looking them up at the end would find what a recovery put there meanwhile (sglang#36081). So the
peers of everything queued are captured, in one lookup, at the end or before the first mapping write
that comes sooner: snapshotted, detached from the mapping, and released at the end.

Left out: how pages are paired (`kvcore.allocator.hybrid`); one pool in which every layer slides.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch

from kvcore.allocator.arguments import (
    Segment,
    as_index,
    require_equal_lengths,
    whole_pages,
)
from kvcore.allocator.batch import DecodeBatch, ExtendBatch, SwaTail
from kvcore.allocator.hybrid import HybridAllocator, HybridPoolSize
from kvcore.allocator.pending import without_repetitions
from kvcore.allocator.single import SlotsOf
from kvcore.errors import GeometryError

Pairing: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes of the mapping for slots lent by fresh full pages and the first slots of SWA pages."""


class SWATokenToKVPoolAllocator(HybridAllocator):
    """Lends full slots together with SWA peers; callers see full slots.

    The mapping `full_to_swa_index_mapping` is int64 `[size + page_size + 1]`: the SWA slot of each
    full slot, 0 for none, and -1 in the last entry, so that index -1 ("no previous slot") maps to
    -1. It is owned by this object, written in place, and handed to the pool by
    `kvcache.register_mapping`; `resize` makes and registers a new one.

    Allocations take from both sides or from neither. The sides are reachable as
    `full_attn_allocator` and `swa_attn_allocator`, for a load-back that maps its own slots.

    With `validate=True`, calls raise besides the errors of the base class: DeadPeerError where a
    page without a peer is continued, LivePeerError where a peer would be lost, MappingError where
    an SWA slot is mapped that is not lent or has a full slot already.

    Args:
        size: tokens of the full pool.
        size_swa: tokens of the SWA pool.
        page_size: slots a page, on both sides.
        dtype: element type of the pools; kept for callers.
        device: device of all index tensors.
        kvcache: the pool, or None.
        need_sort: keep freed pages aside and merge them in ascending order on demand.
        validate: check values; None means environment variable KVCORE_VALIDATE.

    Raises:
        GeometryError: a side without a single page.
    """

    # -- lending -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages with peers; see the base class."""
        num_pages = whole_pages("alloc", need_size, self.page_size)
        return self.lend(num_pages, self.full_attn_allocator.slots_of)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Lend the new tokens of each row with peers; see the base class.

        Raises:
            DeadPeerError: with `validate`, a page that goes on has no peer.
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
        return self._alloc_batch(batch)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Lend one token a row with its peer; see the base class.

        Raises:
            DeadPeerError: with `validate`, a page that goes on has no peer.
        """
        batch = DecodeBatch.checked(
            "alloc_decode", seq_lens, seq_lens_cpu, last_loc, self._index_device
        )
        return self._alloc_batch(batch)

    def _alloc_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        self.check_batch(batch)
        return self.lend_batch(batch)

    def lend_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        """The new tokens of each row of a batch whose values have been checked, with peers."""
        slots_of = partial(batch.slots, page_size=self.page_size, kernels=self._kernels)
        return self.lend(batch.num_new_pages(self.page_size), slots_of)

    def lend(self, num_pages: int, slots_of: SlotsOf) -> torch.Tensor | None:
        """What `slots_of` says of fresh full pages with peers; None if a side lacks them.

        If it raises, nothing changed.
        """
        if num_pages == 0:
            return slots_of(self._no_pages())
        return self._lend_sides(num_pages, num_pages, slots_of, self._pair_pages)

    def _pair_pages(
        self, slots: torch.Tensor, full_pages: torch.Tensor, swa_firsts: torch.Tensor
    ) -> None:
        self._map_pages(full_pages, swa_firsts)

    def _lend_sides(
        self, num_full: int, num_swa: int, slots_of: SlotsOf, pair: Pairing
    ) -> torch.Tensor | None:
        """Pages of both sides or of neither, paired by `pair`; what `slots_of` says of the full."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if not (full.has_room(num_full) and swa.has_room(num_swa)):
            return None
        positions = (full.position(), swa.position()) if self.need_sort else None
        try:
            full_pages, swa_firsts = full.front(num_full), swa.front(num_swa)
            slots = slots_of(full_pages)
            self._capture_queued_peers()
            try:
                pair(slots, full_pages, swa_firsts)
            except BaseException:
                self._clear_pages(full_pages)
                raise
        except BaseException:
            if positions is not None:
                full.rewind(positions[0])
                swa.rewind(positions[1])
            raise
        full.advance(num_full)
        swa.advance(num_swa)
        return slots

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
        """`alloc_extend` of one row, with SWA slots for a tail of `swa_tail_len` tokens only.

        Every other new full slot is unmapped, also when the tail is empty (sglang#25805). Where the
        tail ends within a page and before the row does, that page's slots behind the end stay
        unmapped, those not lent yet included: the row cannot go on in them.

        Args:
            swa_tail_len: tokens that get SWA slots.
            swa_tail_end: position in the row behind the last of them; None means the row's end.

        Returns:
            int64 `[extend_num_tokens]`, or None if either side lacks the pages.

        Raises:
            GeometryError: as `alloc_extend`; a batch of more or less than one row; a tail that is
                no part of the extension, or that does not start on a page boundary (two full
                pages would share an SWA page).
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
        tail.require_aligned(operation, self.page_size)
        if self.full_attn_allocator.ledger is not None:
            self.full_attn_allocator.ledger.require_batch(batch)
        return self._lend_sides(
            batch.num_new_pages(self.page_size),
            tail.num_pages(self.page_size),
            partial(batch.slots, page_size=self.page_size, kernels=self._kernels),
            partial(self._pair_tail, batch, tail),
        )

    def _pair_tail(
        self,
        batch: ExtendBatch,
        tail: SwaTail,
        slots: torch.Tensor,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
    ) -> None:
        """Map the new pages of the tail, unmap everything else that the call lends."""
        prefix, length = int(batch.prefix_lens_cpu[0]), int(batch.seq_lens_cpu[0])
        num_swa = swa_firsts.numel()
        # Pages before the tail's: those of the row up to there, less those it had begun.
        before = tail.start // self.page_size - -(-prefix // self.page_size) if num_swa else 0
        head, paired, rest = full_pages.split(
            (before, num_swa, full_pages.numel() - before - num_swa)
        )
        ahead, behind = slots[: tail.start - prefix], slots[tail.end - prefix :]
        unmapped_slots, unmapped_pages = torch.cat((ahead, behind)), torch.cat((head, rest))
        self._map_pages(paired, swa_firsts)
        if tail.end < length and num_swa > 0 and tail.end % self.page_size != 0:
            self._unmap_behind(paired[-1:], tail.end % self.page_size)
        # Last: a page that goes on keeps its entries if anything before this fails.
        self._unmap_head(unmapped_slots, unmapped_pages)
        self._unpaired += unmapped_pages.numel()

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return full pages and their peers; a page without a peer on the full side alone."""
        slots = as_index("free", free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free", slots)
        full = self.full_attn_allocator
        if self._group_open:
            kept = full.kept(slots)
            self._queue_peers(kept)
            full.queue_slots(kept)
        elif self.page_size == 1:
            self._free_firsts(slots)
        else:
            self._free_set(slots)

    def _free_firsts(self, firsts: torch.Tensor) -> None:
        """Return distinct full pages with their peers, by a slot of each; here no group is open."""
        full = self.full_attn_allocator
        if full.free_group_is_open:
            # Somebody went to the side directly.
            pages = firsts // self.page_size
            self._give_peers(pages)
            full.give_pages(pages)
            return
        place = full.place(firsts.numel())
        full.write_entries(firsts, place)
        self._give_peers(place)
        full.commit(place.numel(), place)

    def _free_set(self, slots: torch.Tensor) -> None:
        """Return the pages touched and their peers, as many as they are."""
        full = self.full_attn_allocator
        if full.ledger is not None:
            pages = full.pages_of(slots)
            full.require_place_for(pages.numel())
            self._give_peers(pages)
            full.give_pages(pages)
            return
        pages = full.touched_pages(slots)
        self.swa_attn_allocator.give_entries(self._detach_peers(pages), counted=False)
        full.give_entries(pages, counted=False)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Return the peers of the pages touched, whole (sglang#27779); the full side stays.

        Pages without a peer are skipped.
        """
        slots = as_index("free_swa", free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free_swa", slots)
        full = self.full_attn_allocator
        if self._group_open:
            self._queue_peers(full.kept(slots), again=True)
        elif self.page_size == 1:
            self._give_peers(slots)
        else:
            entries = self._detach_peers(full.touched_pages(slots))
            self.swa_attn_allocator.give_entries(entries)
        self._unpaired += slots.numel()

    def free_full(self, free_index: torch.Tensor) -> None:
        """Return full pages whose peers have been released.

        Raises:
            LivePeerError: with `validate`, a page that has a peer.
        """
        slots = as_index("free_full", free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free_full", slots)
        self._check_peers_released("free_full", slots)
        self._free_full_side(slots)
        self._forget_unpaired(slots.numel())

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free` of page-aligned pieces of one row, ascending, no page shared."""
        indices = self._checked_segments(operation, segments)
        if not indices:
            return
        full = self.full_attn_allocator
        if not self._group_open:
            self._free_firsts(full.firsts_of(indices))
            return
        self._mark_queued(indices)
        full.queue_segments(indices, self._queued_peers, full.pending)
        full.mark_pending(indices)

    def free_swa_segments(self, segments: Iterable[Segment]) -> None:
        """`free_swa` of page-aligned pieces of one row, ascending, no page shared.

        Waits for no device value, as all segment frees: the peers are counted when the SWA side's
        free list is next needed.
        """
        self._return_swa_segments("free_swa_segments", segments)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_swa_segments` of a single piece."""
        self._return_swa_segments("free_swa_segment", [(free_index, start_pos)])

    def _return_swa_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        indices = self._checked_segments(operation, segments)
        if indices:
            self._free_swa_segments(indices)

    def _free_swa_segments(self, indices: list[torch.Tensor]) -> None:
        full = self.full_attn_allocator
        if self._group_open:
            self._mark_queued(indices)
            self._queued_again = True
            full.queue_segments(indices, self._queued_peers)
        else:
            self._give_peers(full.pages_of_segments(indices))
        self._unpaired += sum(-(-index.numel() // self.page_size) for index in indices)

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free_full` of page-aligned pieces of one row, ascending, no page shared.

        Raises:
            LivePeerError: with `validate`, a page that has a peer.
        """
        indices = self._checked_segments(operation, segments)
        if not indices:
            return
        self._check_peers_released(operation, torch.cat(indices))
        full = self.full_attn_allocator
        if self._group_open:
            full.queue_segments(indices, full.pending)
            full.mark_pending(indices)
        else:
            full.give_firsts(full.firsts_of(indices))
        self._forget_unpaired(sum(index.numel() for index in indices))

    def _free_full_side(self, slots: torch.Tensor) -> None:
        full = self.full_attn_allocator
        if self._group_open:
            full.queue_slots(full.kept(slots))
        elif self.page_size == 1:
            full.give_firsts(slots)
        else:
            full.give_set(slots)

    # -- free groups ---------------------------------------------------------------------------

    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back until `free_group_end`, on both sides."""
        self._require_group_everywhere("free_group_begin", is_open=False)
        # The sides' groups hold back what is freed, also by callers that go to a side directly.
        self.full_attn_allocator.free_group_begin(owned=owned)
        self.swa_attn_allocator.free_group_begin(owned=owned)
        self._group_open, self._group_owned = True, owned

    def free_group_end(self) -> None:
        """Make everything freed in the group available, on both sides."""
        self._require_group_everywhere("free_group_end", is_open=True)
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if self._is_plain_group():
            self._end_plain_group()
        else:
            self._capture_queued_peers()
            # Both sides before either: a group that cannot end stays open, and nothing is lost.
            full.require_place_for(full.pending.num_pages)
            swa.require_place_for(swa.pending.num_pages)
            full.close_group()
            swa.close_group()
        self._group_open = self._group_owned = False

    def _is_plain_group(self) -> bool:
        """Whether all that waits is pages that `free` named, each once, with their peers."""
        full, queued = self.full_attn_allocator, self._queued_peers
        return (
            full.ledger is None
            and queued.num_pages > 0
            and queued.is_counted
            and not self._queued_again
            # Whatever else there was is queued on the full side alone.
            and len(full.pending) == len(queued)
            and not self.swa_attn_allocator.pending
        )

    def _end_plain_group(self) -> None:
        """The full pages in one pass, and by them the peers."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        num_pages = full.pending.num_pages
        may_miss = self._may_miss_peers()
        full_place = full.place(num_pages)
        swa_place = None if may_miss else swa.place(num_pages)
        full.pending.write(full_place)
        entries = self._detach_peers(full_place, swa_place)
        # Nothing can fail from here on; before, the group is still open.
        full.drop_group()
        swa.drop_group()
        self._drop_queued_peers()
        full.commit(num_pages, full_place)
        if may_miss:
            swa.give_entries(entries)
        else:
            swa.commit(num_pages, entries)

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        self.require_group(operation, is_open=is_open)
        self.full_attn_allocator.require_group(operation, is_open=is_open)
        self.swa_attn_allocator.require_group(operation, is_open=is_open)

    def _queue_peers(self, slots: torch.Tensor, *, again: bool = False) -> None:
        """The peers of these full slots go back at the end of the group; the tensor is kept."""
        if self._guard is not None:
            self._guard.mark_queued(slots)
        self._queued_again |= again
        self.full_attn_allocator.queue_set(slots, self._queued_peers)

    def _mark_queued(self, indices: list[torch.Tensor]) -> None:
        if self._guard is not None:
            self._guard.mark_queued(torch.cat(indices))

    def _capture_queued_peers(self) -> None:
        """Snapshot and detach the peers of everything queued; before any mapping write."""
        queued = self._queued_peers
        if not queued:
            return
        # The SWA side's group is open too, so the captured pages wait there for the end.
        swa = self.swa_attn_allocator
        if queued.num_pages:
            entries = self._detach_peers(queued.counted_pages())
            if self._queued_again:
                swa.give_entries(without_repetitions(entries))
            elif self._may_miss_peers():
                swa.give_entries(entries)
            else:
                swa.queue_entries(entries)
        if not queued.is_counted:
            swa.give_entries(self._detach_peers(queued.set_pages()), counted=False)
        self._drop_queued_peers()

    # -- the mapping ---------------------------------------------------------------------------

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Pair lent full slots with lent SWA slots, page by page: the raw write of a load-back.

        Both are integer `[n]`, at equal offsets of their pages; a page is paired whole.

        Raises:
            GeometryError: unequal lengths; with `validate`, unequal offsets.
            LivePeerError: with `validate`, a full page has a peer, which would be lost.
            MappingError: with `validate`, an SWA slot is not lent or has a full page already.
        """
        operation = "set_full_to_swa_mapping"
        full = as_index(operation, full_indices, self._index_device)
        swa = as_index(operation, swa_indices, self._index_device)
        require_equal_lengths(operation, full_indices=full, swa_indices=swa)
        if full.numel() == 0:
            return
        self._check_mapping_write(operation, full, swa)
        self._capture_queued_peers()
        self._map_pages(full // self.page_size, swa - swa % self.page_size)
        self._forget_unpaired(full.numel())

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Unpair lent full slots, integer `[n]`, whole pages; their peers stay with the caller."""
        operation = "clear_full_to_swa_mapping"
        full = as_index(operation, full_indices, self._index_device)
        if full.numel() == 0:
            return
        self._check_lent(operation, full)
        self._capture_queued_peers()
        self._clear_pages(full // self.page_size)
        self._unpaired += full.numel()

    def recover_tombstone(self, kept_full: torch.Tensor, incoming_full: torch.Tensor) -> None:
        """Give the peers of `incoming_full` to `kept_full` and free the incoming full pages.

        Both are integer `[n]`, token by token, at equal offsets of their pages. The SWA side keeps
        every page it lent. In an open group the incoming pages become available at its end.

        Raises:
            GeometryError: unequal lengths; with `validate`, unequal offsets.
            LivePeerError: with `validate`, a kept page has a peer.
            DeadPeerError: with `validate`, an incoming page has none.
        """
        operation = "recover_tombstone"
        kept = as_index(operation, kept_full, self._index_device)
        incoming = as_index(operation, incoming_full, self._index_device)
        require_equal_lengths(operation, kept_full=kept, incoming_full=incoming)
        if kept.numel() == 0:
            return
        self._check_recovery(operation, kept, incoming)
        self._capture_queued_peers()
        self._move_peers(kept // self.page_size, incoming // self.page_size)
        self._free_full_side(incoming)

    # -- the whole pool ------------------------------------------------------------------------

    def clear(self) -> None:
        """Take everything back, unmap every slot, close an open group."""
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        # The pool keeps the same tensor; its last entry stays the sentinel.
        self.full_to_swa_index_mapping[:-1].fill_(0)
        self._drop_queued_peers()
        self._group_open = self._group_owned = False
        self._unpaired = 0

    def resize(
        self,
        config: HybridPoolSize | None = None,
        *,
        size: int | None = None,
        size_swa: int | None = None,
    ) -> None:
        """Take everything back and lend pools of other sizes, with a new mapping, from now on.

        Args:
            config: an object whose `full_max_total_num_tokens` and `swa_max_total_num_tokens` are
                the new sizes.
            size: tokens of the full pool; given together with `size_swa` and without `config`.
            size_swa: tokens of the SWA pool.

        Raises:
            GeometryError: none or both forms given, a size that is no integer, or a side without a
                single page.
        """
        other = self.resized(*self.new_sizes(config, size, size_swa))
        # What can fail comes before what changes; the pool is the last that can refuse.
        other.register_mapping()
        self.become(other)

    @staticmethod
    def new_sizes(
        config: HybridPoolSize | None, size: int | None, size_swa: int | None
    ) -> tuple[int, int]:
        """The sizes that the arguments of `resize` name.

        Raises:
            GeometryError: none or both forms given.
        """
        if config is not None and size is None and size_swa is None:
            return config.full_max_total_num_tokens, config.swa_max_total_num_tokens
        if config is None and size is not None and size_swa is not None:
            return size, size_swa
        raise GeometryError("resize: expected either a config or size and size_swa")

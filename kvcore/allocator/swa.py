"""The hybrid allocator: full-attention slots and sliding-window slots, lent together and remapped.

Left out: how pages are paired (`kvcore.allocator.hybrid`) and returned (`kvcore.allocator.peers`);
one pool in which every layer slides.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from kvcore.allocator.arguments import (
    as_index,
    is_index,
    require_equal_lengths,
    whole_pages,
)
from kvcore.allocator.batch import HOST, DecodeBatch, ExtendBatch, SwaTail
from kvcore.allocator.host_rows import HostRows
from kvcore.allocator.hybrid import HybridPoolSize
from kvcore.allocator.ownership import Ids
from kvcore.allocator.peers import PeerReleasingAllocator
from kvcore.allocator.single import SlotsOf
from kvcore.errors import GeometryError
from kvcore.kernels import SlotKernels

Lending: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Pairs fresh full pages with SWA pages, given by their first slots; what a caller gets: slots."""


class SWATokenToKVPoolAllocator(PeerReleasingAllocator):
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
        if (rows := self._rows_at_once()) is not None:
            return self._lend_on_host(num_pages, rows, rows.slots_of)
        kernels = self._kernels_at_once()
        if kernels is None or num_pages == 0:
            return self.lend(num_pages, self.full_attn_allocator.slots_of)
        return self._lend_sides(num_pages, num_pages, partial(kernels.lend, **self._mapped))

    def _rows_at_once(self) -> HostRows | None:
        """The mapping on the host, if slots and mapping are written there at one go."""
        return self._host if self._kernels is None else None

    def _lend_on_host(
        self, num_pages: int, rows: HostRows, slots_of: Callable[[Ids], torch.Tensor]
    ) -> torch.Tensor | None:
        """Pages of both sides or of neither, paired; what `slots_of` says of the full ones."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if not (full.free_list.has_room(num_pages) and swa.free_list.has_room(num_pages)):
            return None
        if self._group_open and num_pages > 0:
            self._capture_queued_peers()
        pages = full.free_list.host_front(num_pages)
        # At page size 1 the pages are the slots, and a view of the log is as good as a copy.
        slots = full.free_list.front(num_pages) if self.page_size == 1 else slots_of(pages)
        rows.pair(pages, swa.free_list.host_front(num_pages))
        full.advance(num_pages)
        swa.advance(num_pages)
        return slots

    def _kernels_at_once(self) -> SlotKernels | None:
        """The kernels that compute slots and write the mapping in one launch, if that may be.

        In a group, queued peers are captured in between; single slots need no computation.
        """
        return None if self._group_open or self.page_size == 1 else self._kernels

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
        if self._goes_on_everywhere(seq_lens, seq_lens_cpu, last_loc):
            return last_loc + 1
        batch = DecodeBatch.checked(
            "alloc_decode", seq_lens, seq_lens_cpu, last_loc, self._index_device
        )
        return self._alloc_batch(batch)

    def _goes_on_everywhere(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> bool:
        """Whether a decode begins no page and nothing of it is to be checked or computed elsewhere.

        Then every slot and every peer lies behind the last one: the usual step of most batches.
        """
        if self.validate or self._kernels is not None or self.page_size == 1:
            return False
        if not (
            self._is_plain(seq_lens)
            and self._is_plain(last_loc)
            and is_index(seq_lens_cpu, HOST)
            and seq_lens.numel() == seq_lens_cpu.numel() == last_loc.numel()
        ):
            return False
        size = self.page_size
        # 1 begins a page too; so does 0, which `checked` refuses.
        return all(length > 1 and length % size != 1 for length in seq_lens_cpu.tolist())

    def _alloc_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        self.check_batch(batch)
        return self.lend_batch(batch)

    def lend_batch(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor | None:
        """The new tokens of each row of a batch whose values have been checked, with peers."""
        num_pages = batch.num_new_pages(self.page_size)
        if num_pages > 0 and (rows := self._rows_at_once()) is not None:
            return self._lend_on_host(num_pages, rows, partial(rows.slots_of_batch, batch))
        kernels = self._kernels_at_once()
        if kernels is not None and num_pages > 0 and isinstance(batch, DecodeBatch):
            make = partial(kernels.decode_paired, batch.seq_lens, batch.last_loc, **self._mapped)
            return self._lend_sides(num_pages, num_pages, make)
        slots_of = partial(batch.slots, page_size=self.page_size, kernels=self._kernels)
        return self.lend(num_pages, slots_of)

    def lend(self, num_pages: int, slots_of: SlotsOf) -> torch.Tensor | None:
        """What `slots_of` says of fresh full pages with peers; None if a side lacks them.

        If it raises, nothing changed.
        """
        if num_pages == 0:
            return slots_of(self._no_pages())

        def make(full_pages: torch.Tensor, swa_firsts: torch.Tensor) -> torch.Tensor:
            slots = slots_of(full_pages)
            if self._group_open:
                self._capture_queued_peers()
            self._map_pages(full_pages, swa_firsts)
            return slots

        return self._lend_sides(num_pages, num_pages, make)

    def _lend_sides(self, num_full: int, num_swa: int, make: Lending) -> torch.Tensor | None:
        """Pages of both sides or of neither, paired by `make`; what it answers."""
        full, swa = self.full_attn_allocator.free_list, self.swa_attn_allocator.free_list
        if not (full.has_room(num_full) and swa.has_room(num_swa)):
            return None
        positions = (full.position(), swa.position()) if self.need_sort else None
        try:
            full_pages, swa_firsts = full.front(num_full), swa.front(num_swa)
            try:
                slots = make(full_pages, swa_firsts)
            except BaseException:
                self._clear_pages(full_pages)
                raise
        except BaseException:
            # Nothing was taken yet, but what waited to be sorted may have been merged.
            if positions is not None:
                full.rewind(positions[0])
                swa.rewind(positions[1])
            raise
        self.full_attn_allocator.advance(num_full)
        self.swa_attn_allocator.advance(num_swa)
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
        if (rows := self._rows_at_once()) is not None:
            return self._lend_tail_on_host(batch, tail, rows)
        slots_of = partial(batch.slots, page_size=self.page_size, kernels=self._kernels)

        def make(full_pages: torch.Tensor, swa_firsts: torch.Tensor) -> torch.Tensor:
            slots = slots_of(full_pages)
            if self._group_open:
                self._capture_queued_peers()
            self._pair_tail(batch, tail, slots, full_pages, swa_firsts)
            return slots

        return self._lend_sides(
            batch.num_new_pages(self.page_size), tail.num_pages(self.page_size), make
        )

    def _lend_tail_on_host(
        self, batch: ExtendBatch, tail: SwaTail, rows: HostRows
    ) -> torch.Tensor | None:
        """Pages of both sides or of neither, those of the tail paired; see `_pair_tail`."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        size = self.page_size
        num_full, num_swa = batch.num_new_pages(size), tail.num_pages(size)
        if not (full.free_list.has_room(num_full) and swa.free_list.has_room(num_swa)):
            return None
        if self._group_open:
            self._capture_queued_peers()
        pages = full.free_list.host_front(num_full)
        slots = rows.slots_of_batch(batch, pages)
        (prefix,), (length,) = batch.host_prefix_lens, batch.host_seq_lens
        before = tail.start // size - -(-prefix // size) if num_swa else 0
        paired, lent = pages[before : before + num_swa], slots.numpy()
        alone = np.concatenate((pages[:before], pages[before + num_swa :]))
        try:
            rows.pair(paired, swa.free_list.host_front(num_swa))
            if tail.end < length and num_swa > 0 and tail.end % size != 0:
                rows.unmap_behind(paired[-1:], tail.end % size)
        except BaseException:
            rows.unmap(pages)
            raise
        # Last: a page that goes on keeps its entries if anything before this fails.
        for unmapped in (lent[: tail.start - prefix], lent[tail.end - prefix :]):
            rows.unmap_slots(unmapped)
        rows.unmap(alone)
        self._unpaired += num_full - num_swa
        full.advance(num_full)
        swa.advance(num_swa)
        return slots

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
        if self._group_open:
            self._capture_queued_peers()
        if self._host is not None:
            self._host.pair_slots(full, swa)
        else:
            self._map_pages(full // self.page_size, swa - swa % self.page_size)
        # One slot may be named several times, so all that is known is that there is one page.
        self._forget_unpaired(1)

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Unpair lent full slots, integer `[n]`, whole pages; their peers stay with the caller."""
        operation = "clear_full_to_swa_mapping"
        full = as_index(operation, full_indices, self._index_device)
        if full.numel() == 0:
            return
        self._check_lent(operation, full)
        if self._group_open:
            self._capture_queued_peers()
        self._clear_pages(full // self.page_size)
        self._unpaired += full.numel()
        self._peers_left_to_callers = True

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
        if self._group_open:
            self._capture_queued_peers()
        else:
            # What can fail comes before the peers have moved. Only a list of single slots may have
            # to move, and there each incoming slot is a page.
            self.full_attn_allocator.free_list.reserve(
                incoming.numel() if self.page_size == 1 else 1
            )
        if self.page_size == 1:
            self._move_peers(kept, incoming)
        else:
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
        self._renew_queues()
        self._unpaired = 0
        self._peers_left_to_callers = False

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

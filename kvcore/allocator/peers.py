"""Returning full slots and their SWA peers, at once or in a free group.

Free groups hold back *indices*, not peers: looking peers up at once would cost one lookup a free,
looking them up at the end would find what a recovery put there meanwhile (sglang#36081). So the
peers of everything queued are captured, in one lookup, at the end or before the first mapping write
that comes sooner: snapshotted, detached from the mapping, and released at the end.

Left out: how pages are paired (`kvcore.allocator.hybrid`), and what lends them or changes the
mapping (`kvcore.allocator.swa`).
"""

from collections.abc import Iterable

import torch

from kvcore.allocator.arguments import Segment, as_index
from kvcore.allocator.hybrid import HybridAllocator
from kvcore.allocator.pending import without_repetitions


class PeerReleasingAllocator(HybridAllocator):
    """The frees and free groups of a hybrid allocator."""

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return full pages and their peers; a page without a peer on the full side alone."""
        slots = as_index("free", free_index, self._index_device)
        count = slots.numel()
        if count == 0:
            return
        if self.validate:
            self._check_free("free", slots)
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(slots)
            full = self.full_attn_allocator
            full.queue_slots(slots, count, full.pending)
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
            self._give_peers(firsts, firsts.numel())
            full.give_pages(pages)
            return
        count = firsts.numel()
        full.free_list.require_place_for(count)
        self._give_peers(firsts, count, full.free_list)
        full.commit(count)

    def _free_set(self, slots: torch.Tensor) -> None:
        """Return the pages touched and their peers, as many as they are."""
        full = self.full_attn_allocator
        if full.ledger is not None:
            pages = full.pages_of(slots)
            full.require_place_for(pages.numel())
            self.swa_attn_allocator.give_entries(self._detach_peers(pages))
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
        count = slots.numel()
        if count == 0:
            return
        if self.validate:
            self._check_free("free_swa", slots)
        full = self.full_attn_allocator
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(slots)
            full.queue_set(slots, count, self._queued_peers)
        elif self.page_size == 1:
            self._give_peers(slots, count)
        else:
            entries = self._detach_peers(full.touched_pages(slots))
            self.swa_attn_allocator.give_entries(entries)
        self._unpaired += count

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
            if self._host is not None and not full.free_group_is_open:
                pages = self._host.pages_of_segments(indices)
                full.free_list.require_place_for(pages.size)
                self._give_peers_on_host(pages, self._host, full.free_list)
                full.commit(pages.size)
            else:
                self._free_firsts(full.firsts_of(indices))
            return
        if self._guard is not None:
            self._guard.mark_queued(torch.cat(indices))
        full.queue_segments(indices, full.pending)

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
        count = sum(-(-index.numel() // self.page_size) for index in indices)
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(torch.cat(indices))
            full.queue_rows(indices, self._queued_peers)
        elif self._host is not None:
            pages = self._host.pages_of_segments(indices)
            self._give_peers_on_host(pages, self._host, None)
        else:
            self._give_peers(full.firsts_of(indices), count)
        self._unpaired += count

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free_full` of page-aligned pieces of one row, ascending, no page shared.

        Raises:
            LivePeerError: with `validate`, a page that has a peer.
        """
        indices = self._checked_segments(operation, segments)
        if not indices:
            return
        if self.validate:
            self._check_peers_released(operation, torch.cat(indices))
        full = self.full_attn_allocator
        if self._group_open:
            full.queue_segments(indices, full.settled)
        else:
            full.give_firsts(full.firsts_of(indices))
        self._forget_unpaired(sum(index.numel() for index in indices))

    def _free_full_side(self, slots: torch.Tensor) -> None:
        """Return full pages that have no peer to capture."""
        full = self.full_attn_allocator
        if self._group_open:
            full.queue_slots(slots, slots.numel(), full.settled)
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
            full.require_place_for_group()
            swa.require_place_for_group()
            full.close_group()
            swa.close_group()
        self._group_open = self._group_owned = False

    def _is_plain_group(self) -> bool:
        """Whether all that waits is full pages, each once, whose peers nobody has captured yet."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        return (
            full.ledger is None
            and full.pending.num_pages > 0
            and full.pending.is_counted
            and not (self._queued_peers or full.settled or swa.pending or swa.settled)
        )

    def _end_plain_group(self) -> None:
        """The full pages in one pass, and by them the peers."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        num_pages = full.pending.num_pages
        may_miss = self._may_miss_peers()
        full_place = full.free_list.place(num_pages)
        swa_place = None if may_miss else swa.free_list.place(num_pages)
        if self._kernels is not None and (firsts := full.pending.firsts()) is not None:
            entries = self._detach_firsts(firsts, full_place, swa_place)
        else:
            full.pending.write(full_place)
            entries = self._detach_peers(full_place, swa_place)
        # Nothing can fail from here on; before, the group is still open.
        full.drop_group()
        swa.drop_group()
        full.commit(num_pages)
        if may_miss:
            swa.give_entries(entries)
        else:
            swa.commit(num_pages)

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        self.require_group(operation, is_open=is_open)
        self.full_attn_allocator.require_group(operation, is_open=is_open)
        self.swa_attn_allocator.require_group(operation, is_open=is_open)

    def _capture_queued_peers(self) -> None:
        """Snapshot and detach the peers of everything queued; before any mapping write.

        The SWA side's group is open too, so the captured pages wait there for the end.
        """
        full, swa, queued = self.full_attn_allocator, self.swa_attn_allocator, self._queued_peers
        if queued:
            # The same page may be queued by `free_swa`, and again by it or by `free`.
            queued.absorb(full.pending)
            entries = without_repetitions(self._detach_peers(queued.touched_pages()))
            swa.give_entries(entries, counted=queued.is_counted)
        elif full.pending:
            pages = full.pending.touched_pages()
            entries = self._detach_peers(pages)
            if not full.pending.is_counted:
                swa.give_entries(entries, counted=False)
            elif self._may_miss_peers():
                swa.give_entries(entries)
            else:
                swa.queue_entries(entries)
        full.settle()
        self._drop_queued_peers()

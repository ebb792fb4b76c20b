"""Returning full slots and their SWA peers, at once or in a free group.

Free groups hold back *indices*, not peers: looking peers up at once would cost one lookup a free,
looking them up at the end would find what a recovery put there meanwhile (sglang#36081). So the
peers of everything queued are captured, in one lookup, at the end or before the first mapping write
that comes sooner: snapshotted, detached from the mapping, and released at the end.

Left out: how pages are paired (`kvcore.allocator.hybrid`) and go back at once
(`kvcore.allocator.giving`), and what lends them or changes the mapping (`kvcore.allocator.swa`).
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from kvcore.allocator.arguments import Segment, as_index, is_start
from kvcore.allocator.giving import GivingAllocator
from kvcore.allocator.host_rows import HostRows
from kvcore.allocator.ownership import PENDING, Ids, distinct_ids
from kvcore.allocator.pending import PendingFrees, pages_on_host, without_repetitions


class PeerReleasingAllocator(GivingAllocator):
    """The frees and free groups of a hybrid allocator."""

    _wired = (*GivingAllocator._wired, "_queue_owned", "_queue_pages")

    def _wire(self) -> None:
        super()._wire()
        self._renew_queues()

    # -- returning -----------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Return full pages and their peers; a page without a peer on the full side alone."""
        # What nearly every call passes goes the shortest way.
        if (queue := self._queue_owned) is not None:
            if self._is_plain(free_index):
                queue(free_index)
                return
        elif self._plain_slots:
            if (queue_pages := self._queue_pages) is not None:
                if (pages := self._copied_pages(free_index)) is not None:
                    queue_pages(pages)
                    return
            elif not self._group_open and (release := self._release) is not None:
                if (missing := release(free_index, True)) == 0:
                    return
                if missing > 0:
                    self._forget_unpaired(missing)
                    return
        self._free(as_index("free", free_index, self._index_device))

    def _free(self, slots: torch.Tensor) -> None:
        """`free` of an int64 vector, where nothing is as simple as in a group of single slots."""
        count = slots.numel()
        if count == 0:
            return
        if self.validate:
            self._check_free("free", slots)
        full = self.full_attn_allocator
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(slots)
            full.queue_slots(slots, full.pending)
        elif self.page_size > 1:
            self._free_set(slots)
        elif full._group_open:
            self._free_into_group(slots)
        elif self._host is not None:
            self._give_on_host(slots.numpy(), self._host, with_full=True)
        else:
            self._give_firsts(slots, count, with_full=True)

    def _free_into_group(self, firsts: torch.Tensor) -> None:
        """Free distinct pages, by a slot of each, into a group of the full side alone."""
        pages = firsts // self.page_size
        self._give_firsts(firsts, firsts.numel(), with_full=False)
        self.full_attn_allocator.give_pages(pages)

    def _free_set(self, slots: torch.Tensor) -> None:
        """Return the pages touched and their peers, as many as they are."""
        full = self.full_attn_allocator
        if self._host is not None and not full._group_open:
            self._give_on_host(pages_on_host(slots, self.page_size), self._host, with_full=True)
            return
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
        if (
            self._plain_slots
            and not self._group_open
            and (release := self._release) is not None
            and (found := release(free_index, False)) >= 0
        ):
            self._unpaired += found
            return
        slots = as_index("free_swa", free_index, self._index_device)
        if slots.numel() > 0:
            self._free_swa(slots)

    def _free_swa(self, slots: torch.Tensor) -> None:
        """`free_swa` of an int64 vector that is not empty."""
        count = slots.numel()
        if self.validate:
            self._check_free("free_swa", slots)
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(slots)
            self.full_attn_allocator.queue_set(slots, self._queued_peers)
        elif self._host is not None:
            self._give_on_host(pages_on_host(slots, self.page_size), self._host, with_full=False)
            return
        elif self.page_size > 1:
            entries = self._detach_peers(self.full_attn_allocator.touched_pages(slots))
            self.swa_attn_allocator.give_entries(entries)
        else:
            self._give_firsts(slots, count, with_full=False)
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
        # Of a larger page, one slot may be named several times.
        self._forget_unpaired(slots.numel() if self.page_size == 1 else 1)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_segments` of a single piece."""
        if (queue_pages := self._queue_pages) is not None:
            pages = self._copied_pages(free_index, self.page_size, start_pos)
            if pages is not None:
                queue_pages(pages)
                return
        elif not self._group_open and (release := self._release) is not None:
            if (missing := release(free_index, True, start_pos)) == 0:
                return
            if missing > 0:
                self._forget_unpaired(missing)
                return
        if self.validate or not self._is_plain_segment(free_index, start_pos):
            self.return_segments("free_segment", [(free_index, start_pos)])
        elif free_index.numel() > 0:
            self._return_segments([free_index])

    def _is_plain_segment(self, index: torch.Tensor, start_pos: int) -> bool:
        """`_is_plain`, and a start that `as_segments` would take."""
        return self._is_plain(index) and is_start(start_pos, self.page_size)

    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free` of page-aligned pieces of one row, ascending, no page shared."""
        indices = self._checked_segments(operation, segments)
        if indices:
            self._return_segments(indices)

    def _return_segments(self, indices: list[torch.Tensor]) -> None:
        """`free` of checked pieces, none of them empty."""
        full = self.full_attn_allocator
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(torch.cat(indices))
            full.queue_segments(indices, full.pending)
        elif full._group_open:
            self._free_into_group(full.firsts_of(indices))
        elif self._host is not None:
            pages = self._host.pages_of_segments(indices)
            self._give_on_host(pages, self._host, with_full=True)
        else:
            firsts = full.firsts_of(indices)
            self._give_firsts(firsts, firsts.numel(), with_full=True)

    def free_swa_segments(self, segments: Iterable[Segment]) -> None:
        """`free_swa` of page-aligned pieces of one row, ascending, no page shared.

        Waits for no device value, as all segment frees: the peers are counted when the SWA side's
        free list is next needed.
        """
        indices = self._checked_segments("free_swa_segments", segments)
        if indices:
            self._free_swa_segments(indices)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_swa_segments` of a single piece."""
        release = None if self._group_open else self._release
        if release is not None and (found := release(free_index, False, start_pos)) >= 0:
            self._unpaired += found
            return
        if self.validate or not self._is_plain_segment(free_index, start_pos):
            indices = self._checked_segments("free_swa_segment", [(free_index, start_pos)])
        else:
            indices = [free_index] if free_index.numel() > 0 else []
        if indices:
            self._free_swa_segments(indices)

    def _free_swa_segments(self, indices: list[torch.Tensor]) -> None:
        full = self.full_attn_allocator
        if self._group_open:
            if self._guard is not None:
                self._guard.mark_queued(torch.cat(indices))
            full.queue_rows(indices, self._queued_peers)
            count = sum(-(-index.numel() // self.page_size) for index in indices)
        elif self._host is not None:
            pages = self._host.pages_of_segments(indices)
            self._give_on_host(pages, self._host, with_full=False)
            return
        else:
            firsts = full.firsts_of(indices)
            count = firsts.numel()
            self._give_firsts(firsts, count, with_full=False)
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
        self._forget_unpaired(sum(-(-index.numel() // self.page_size) for index in indices))

    def _free_full_side(self, slots: torch.Tensor) -> None:
        """Return full pages that have no peer to capture."""
        full = self.full_attn_allocator
        if self._by_host and self.page_size > 1 and self._group_open:
            pages = pages_on_host(slots, self.page_size)
            full.settled.add_host_pages(pages.tobytes())
            if full.ledger is not None:
                full.ledger.mark(pages, PENDING)
        elif self._group_open:
            full.queue_slots(slots, full.settled)
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
        self._renew_queues()

    def _renew_queues(self) -> None:
        """Where a plain free that nobody checks goes while a group is open."""
        self._queue_owned: Callable[[torch.Tensor], None] | None = None
        self._queue_pages: Callable[[bytes], None] | None = None
        if not self._group_open or self.validate:
            return
        pending = self.full_attn_allocator.pending
        if self._host is not None:
            # Also of an owned group: a tensor kept would have to be read by torch at the end.
            self._queue_pages = pending.add_host_pages
        elif self._group_owned and self.page_size == 1:
            self._queue_owned = pending.add_pages

    def free_group_end(self) -> None:
        """Make everything freed in the group available, on both sides."""
        self._require_group_everywhere("free_group_end", is_open=True)
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if self._is_plain_group():
            if self._host is None:
                self._end_plain_group()
            else:
                self._end_group_on_host(full.pending.counted_on_host(), self._host)
        elif not (self._queued_peers or full.pending or full.settled or swa.pending or swa.settled):
            # Engines open a group a step, and most steps free nothing.
            full.drop_group()
            swa.drop_group()
        else:
            self._capture_queued_peers()
            # Both sides before either: a group that cannot end stays open, and nothing is lost.
            ends = full.prepare_end(), swa.prepare_end()
            full.close_group(ends[0])
            swa.close_group(ends[1])
        self._group_open = self._group_owned = False
        self._renew_queues()

    def _is_plain_group(self) -> bool:
        """Whether all that waits is full pages, each once, whose peers nobody has captured yet."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        return (
            full.ledger is None
            and bool(full.pending)
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

    def _end_group_on_host(self, pages: Ids, rows: HostRows) -> None:
        """`_end_plain_group` by the host."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        full.free_list.reserve(pages.size)
        swa.free_list.reserve(int(np.count_nonzero(rows.firsts[pages])))
        # Closed first, so that what is given now is free; it cannot fail any more.
        full.drop_group()
        swa.drop_group()
        self._group_open = False
        self._give_on_host(pages, rows, with_full=True)

    def _require_group_everywhere(self, operation: str, *, is_open: bool) -> None:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if not self._group_open == full._group_open == swa._group_open == is_open:
            for each in (self, full, swa):
                each.require_group(operation, is_open=is_open)

    def _capture_queued_peers(self) -> None:
        """Snapshot and detach the peers of everything queued; before any mapping write.

        The SWA side's group is open too, so the captured pages wait there for the end.
        """
        full, swa, queued = self.full_attn_allocator, self.swa_attn_allocator, self._queued_peers
        if not (queued or full.pending):
            return
        if self._host is not None:
            self._capture_on_host(self._host)
        elif queued:
            # The same page may be queued by `free_swa`, and again by it or by `free`.
            whole = self._all_queued()
            entries = without_repetitions(self._detach_peers(whole.touched_pages()))
            swa.give_entries(entries, counted=whole.is_counted)
        else:
            pages = full.pending.touched_pages()
            entries = self._detach_peers(pages)
            if not full.pending.is_counted:
                swa.give_entries(entries, counted=False)
            elif self._may_miss_peers():
                swa.give_entries(entries)
            else:
                swa.give_pages(entries if self.page_size == 1 else entries // self.page_size)
        full.settle()
        self._drop_queued_peers()

    def _all_queued(self) -> PendingFrees:
        """What `free_swa` queued, and then what `free` did; the queues stay as they are."""
        whole = PendingFrees(self.page_size, self._index_device)
        whole.absorb(self._queued_peers)
        whole.absorb(self.full_attn_allocator.pending)
        return whole

    def _capture_on_host(self, rows: HostRows) -> None:
        """The same by the host, which sees at once what is there."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        again = bool(self._queued_peers)
        source = self._all_queued() if again else full.pending
        pages = source.touched_on_host()
        entries = rows.firsts[pages]
        found = entries[entries > 0]
        if again:
            found = distinct_ids(found)
        rows.unmap(pages)
        # Queued as a device would, so that both lend in the same order afterwards.
        counted = not again and source.is_counted and not self._may_miss_peers()
        if source.is_counted:
            self._unpaired = max(0, self._unpaired - (pages.size - found.size))
        if counted or swa.ledger is not None:
            swa.give_pages(torch.from_numpy(found // self.page_size))
        else:
            swa.give_entries(torch.from_numpy(found), counted=False)

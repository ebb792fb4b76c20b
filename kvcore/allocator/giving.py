"""How full pages and their SWA peers go back at once, where no group is open.

In three forms: compiled code for the plainest calls on a CPU (`kvcore.native`), numpy for all
others there, and torch or kernels anywhere else. All give the same pages in the same order.

Left out: which calls give back what, and free groups (`kvcore.allocator.peers`).
"""

from typing import Protocol

import numpy as np
import torch

from kvcore.allocator.arguments import is_start, plain_vector
from kvcore.allocator.host_rows import HostRows
from kvcore.allocator.hybrid import HybridAllocator
from kvcore.allocator.ownership import Ids
from kvcore.allocator.pending import copied_pages
from kvcore.free_list import PageStack, SlotLog
from kvcore.native import NATIVE


class Release(Protocol):
    """Gives a plain piece of a row back at once, if it can.

    See `GivingAllocator._release_at_once`.
    """

    def __call__(self, index: torch.Tensor, with_full: bool, start_pos: int = 0, /) -> int:
        """Pages without a peer, or those with one; -1 if nothing was done."""


class GivingAllocator(HybridAllocator):
    """Gives pages and peers back."""

    _wired = (*HybridAllocator._wired, "_release", "_copied_pages")

    def _wire(self) -> None:
        super()._wire()
        self._release = self._make_release()
        self._copied_pages = copied_pages
        if self._uses_native and NATIVE is not None:
            self._copied_pages = NATIVE.copied

    def _make_release(self) -> Release | None:
        """How a plain free gives pages back at once; None where values are checked, or not here."""
        if self._host is None or self.validate:
            return None
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        kinds = {type(full.free_list), type(swa.free_list)}
        is_plain = not self.need_sort and kinds in ({SlotLog}, {PageStack})
        if NATIVE is None or not (self._uses_native and is_plain):
            return self._release_at_once
        compiled: Release = NATIVE.Releaser(
            full,
            swa,
            self._host.mapping,
            self.page_size,
            full.num_pages + 1,
            self.page_size > 1,
            full.num_pages,
            swa.num_pages,
        ).release
        return compiled

    def _give_firsts(self, firsts: torch.Tensor, num_pages: int, *, with_full: bool) -> None:
        """Unmap so many pages, by a slot of each, and give their peers back, with `with_full`
        themselves.

        Here no group is open.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if self._host is not None:
            self._give_on_host(self._host.pages_of(firsts), self._host, with_full=with_full)
            return
        aside = swa.ledger is not None or swa.free_group_is_open or self._may_miss_peers()
        full_place = full.free_list.place(num_pages) if with_full else None
        if aside:
            swa.give_entries(self._detach_firsts(firsts, full_place, None))
        else:
            self._detach_firsts(firsts, full_place, swa.free_list.place(num_pages))
            swa.commit(num_pages)
        if with_full:
            full.commit(num_pages)

    def _release_at_once(self, index: torch.Tensor, with_full: bool, start_pos: int = 0) -> int:
        """Give back a page-aligned piece of a row now, by the host; the form in Python.

        At page size 1 any slots, each once. `with_full`: the pages themselves, and not their peers
        alone.

        Returns:
            Pages that turned out to have no peer, without `with_full` those that had one; -1 if
            anything about the call is unusual: then nothing was done.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        slots, size = plain_vector(index), self.page_size
        if slots is None or self._host is None or self._group_open or not is_start(start_pos, size):
            return -1
        pages = slots if size == 1 else slots[::size] // size
        found = self._release_on_host(pages, self._host, with_full=with_full)
        return pages.size - found if with_full else found

    def _give_on_host(self, pages: Ids, rows: HostRows, *, with_full: bool) -> None:
        """`_release_on_host`, and keep account of the pages without a peer."""
        found = self._release_on_host(pages, rows, with_full=with_full)
        if not with_full:
            self._unpaired += found
        elif found < pages.size:
            self._forget_unpaired(pages.size - found)

    def _release_on_host(self, pages: Ids, rows: HostRows, *, with_full: bool) -> int:
        """Unmap pages and give their peers back, and with `with_full` themselves, by the host.

        Int64 `[n]`, each page once. Here no group is open. Returns how many had a peer.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        entries: Ids = rows.firsts[pages]
        num_found = int(np.count_nonzero(entries))
        if num_found < entries.size:
            # Here the host can count, whatever was freed: no 0 enters a list (sglang#38519).
            entries = entries[entries > 0]
        # What can fail comes first.
        if full.ledger is None and not (full._group_open or swa._group_open):
            if with_full:
                full.free_list.host_give_both(pages, swa.free_list, entries)
            else:
                swa.free_list.host_give(entries)
        else:
            if with_full:
                full.free_list.reserve(pages.size)
            swa.free_list.reserve(num_found)
            if with_full:
                full.give_host_pages(pages)
            swa.give_host_pages(entries // self.page_size)
        rows.by_page[pages] = 0
        return num_found

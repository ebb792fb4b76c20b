"""Value checks of `validate=True`: what every page is, and what a call may name.

`PageLedger` keeps one state a page (free, lent, pending in an open group) of one pool, apart from
the free list, and refuses slots that the call may not name. `PeerGuard` adds the rules about SWA
peers. Indices come to the host once a call and are judged there, in numpy: one synchronisation
instead of one for each question. Checks raise before anything changes; without `validate` none of
this exists.

Left out: checks that need no device read (`kvcore.allocator.arguments`).
"""

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.errors import (
    DeadPeerError,
    DoubleFreeError,
    GeometryError,
    InvalidSlotError,
    KVCacheError,
    LivePeerError,
    MappingError,
    PendingFreeError,
)

FREE, LENT, PENDING, SLID = 0, 1, 2, 3
"""States of a page. SLID is PENDING in a pool whose layers all slide: the open group will release
the page because the window left it, and its row, which still names it, may yet be freed whole."""

_SHOWN_PAGES = 4

Ids: TypeAlias = npt.NDArray[np.int64]
"""Slots or pages on the host, `[n]`."""


def on_host(ids: torch.Tensor) -> Ids:
    """Ids as numpy; on a CPU the same memory."""
    host: Ids = ids.numpy() if ids.is_cpu else ids.cpu().numpy()
    return host


def distinct_ids(ids: Ids) -> Ids:
    """Ids ascending, each once: int64 `[n]`.

    As `np.unique`, whose first call in a process imports `numpy.ma`: tens of milliseconds in the
    middle of serving.
    """
    ascending = ids.copy()
    ascending.sort()
    is_new = np.empty(ascending.size, dtype=np.bool_)
    is_new[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    return ascending[is_new]


def validate_by_default() -> bool:
    """The default of `validate`: KVCORE_VALIDATE; off if unset, empty, 0, no, false or off."""
    setting = os.environ.get("KVCORE_VALIDATE", "").strip().lower()
    return setting not in {"", "0", "no", "false", "off"}


def refuse(
    error: type[KVCacheError], operation: str, offenders: Ids, problem: str, expected: str
) -> None:
    """Raise `error` naming the first few offenders; no-op if there are none."""
    if offenders.size == 0:
        return
    distinct = distinct_ids(offenders)
    shown = ", ".join(str(page) for page in distinct[:_SHOWN_PAGES].tolist())
    more = ", ..." if distinct.size > _SHOWN_PAGES else ""
    raise error(
        f"{operation}: {problem}: {shown}{more} ({distinct.size} in all); expected {expected}"
    )


def _repeated(values: Ids) -> Ids:
    """Values that occur more than once."""
    if values.size < 2:
        return values[:0]
    ascending = np.sort(values)
    return ascending[1:][ascending[1:] == ascending[:-1]]


class PageLedger:
    """State of each page of one pool.

    Args:
        pool: how messages call the pool, for instance `full` or `SWA`.
        num_pages: pages 1..num_pages can be lent.
        page_size: slots a page.
    """

    def __init__(self, pool: str, num_pages: int, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.num_pages = num_pages
        self._state = np.full(num_pages + 1, FREE, dtype=np.uint8)

    def reset(self) -> None:
        """Every page is free."""
        self._state.fill(FREE)

    def mark(self, pages: torch.Tensor | Ids, state: int) -> None:
        """Record a change of state that has happened."""
        self._state[pages if isinstance(pages, np.ndarray) else on_host(pages)] = state

    def is_lent(self, pages: Ids) -> npt.NDArray[np.bool_]:
        """Whether each page (0 included) is lent and not pending: `[n]`."""
        lent: npt.NDArray[np.bool_] = self._state[pages] == LENT
        return lent

    def require_in_pool(self, operation: str, slots: torch.Tensor) -> None:
        """Raise InvalidSlotError for slots that this pool never lends."""
        self._refuse_outside(operation, on_host(slots))

    def _refuse_outside(self, operation: str, slots: Ids) -> None:
        end = (self.num_pages + 1) * self.page_size
        outside = slots[(slots < self.page_size) | (slots >= end)]
        refuse(
            InvalidSlotError,
            operation,
            outside,
            f"slots outside the {self.pool} pool",
            f"slots {self.page_size}..{end - 1}",
        )

    def require_readable(self, operation: str, slots: torch.Tensor) -> None:
        """Raise InvalidSlotError for slots that are neither -1, nor padding, nor in the pool."""
        end = (self.num_pages + 1) * self.page_size
        named = on_host(slots)
        refuse(
            InvalidSlotError,
            operation,
            named[(named < -1) | (named >= end)],
            f"slots outside the {self.pool} pool",
            f"slots -1..{end - 1}",
        )

    def require_lent(
        self,
        operation: str,
        slots: torch.Tensor,
        *,
        otherwise: type[KVCacheError] = DoubleFreeError,
    ) -> None:
        """Raise for slots outside the pool, pending in the group, or not lent (`otherwise`)."""
        self._refuse_not_lent(operation, on_host(slots), otherwise)

    def _refuse_not_lent(
        self, operation: str, slots: Ids, otherwise: type[KVCacheError] = DoubleFreeError
    ) -> None:
        self._refuse_outside(operation, slots)
        pages = slots // self.page_size
        state = self._state[pages]
        if (state == LENT).all():
            return
        refuse(
            PendingFreeError,
            operation,
            pages[(state == PENDING) | (state == SLID)],
            f"{self.pool} pages already freed in the open group",
            "pages on loan",
        )
        refuse(
            otherwise,
            operation,
            pages[state == FREE],
            f"{self.pool} pages that are not lent",
            "pages on loan",
        )

    def require_freeable(self, operation: str, slots: torch.Tensor) -> None:
        """Raise for slots that are not lent, or named twice where a slot is a page."""
        self._refuse_not_freeable(operation, on_host(slots))
        if self.page_size == 1:
            self.require_distinct_pages(operation, slots)

    def _refuse_not_freeable(self, operation: str, slots: Ids) -> None:
        self._refuse_outside(operation, slots)
        slid = self._state[slots // self.page_size] == SLID
        self._refuse_not_lent(operation, slots[~slid])

    def require_distinct_pages(self, operation: str, pages: torch.Tensor) -> None:
        """Raise DoubleFreeError for pages named more than once."""
        refuse(
            DoubleFreeError,
            operation,
            _repeated(on_host(pages)),
            f"{self.pool} pages named more than once",
            "each page once",
        )

    def require_segments(self, operation: str, indices: list[torch.Tensor]) -> None:
        """Raise unless the segments are lent, fill their pages in order and share none."""
        for index in indices:
            self._refuse_not_freeable(operation, on_host(index))
        self.require_row_pieces(operation, indices)

    def require_row_pieces(self, operation: str, indices: list[torch.Tensor]) -> None:
        """`require_segments` of pages that need not be lent."""
        pages: list[Ids] = []
        for index in indices:
            slots = on_host(index)
            self._refuse_outside(operation, slots)
            position = np.arange(slots.size)
            first_of_page = slots[position // self.page_size * self.page_size]
            offset = position % self.page_size
            askew = (slots != first_of_page + offset) | (slots % self.page_size != offset)
            refuse(
                GeometryError,
                operation,
                slots[askew] // self.page_size,
                f"segment that does not run through {self.pool} pages slot by slot",
                "a page-aligned piece of one kv row",
            )
            pages.append(slots[:: self.page_size] // self.page_size)
        refuse(
            DoubleFreeError,
            operation,
            _repeated(np.concatenate(pages)),
            f"{self.pool} pages named more than once",
            "each page once",
        )

    def require_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """Raise unless device and host lengths agree and each row may be continued at `last_loc`.

        Raises:
            GeometryError: lengths that differ, or `last_loc` at another offset than the prefix.
            InvalidSlotError: `last_loc` outside the pool or not lent, or one page continued twice.
            PendingFreeError: `last_loc` freed in the open group.
        """
        operation = batch.operation
        prefixes, lengths = on_host(batch.prefix_lens), on_host(batch.seq_lens)
        same_prefix = np.array_equal(prefixes, batch.prefix_lens_cpu.numpy())
        if not (same_prefix and np.array_equal(lengths, batch.seq_lens_cpu.numpy())):
            raise GeometryError(f"{operation}: expected the same lengths on device and host")
        last_loc = on_host(batch.last_loc)
        begun = prefixes > 0
        aligned = (last_loc + 1) % self.page_size == prefixes % self.page_size
        refuse(
            GeometryError,
            operation,
            last_loc[~aligned | (begun != (last_loc != -1))],
            "last_loc that does not fit the prefix length",
            f"(last_loc + 1) % {self.page_size} == prefix_len % {self.page_size}, and -1 exactly "
            "for an empty row",
        )
        self._refuse_not_lent(operation, last_loc[begun], InvalidSlotError)
        refuse(
            InvalidSlotError,
            operation,
            _repeated(self.continued_slots(batch) // self.page_size),
            f"{self.pool} pages continued by several rows",
            "each page continued once",
        )

    def continued_slots(self, batch: ExtendBatch | DecodeBatch) -> Ids:
        """The last slot of each row of the batch that goes on in the page of that slot."""
        prefixes, lengths = batch.prefix_lens_cpu.numpy(), batch.seq_lens_cpu.numpy()
        goes_on = (lengths > prefixes) & (prefixes % self.page_size != 0)
        last: Ids = on_host(batch.last_loc)[goes_on]
        return last


class PeerGuard:
    """Rules about SWA peers, on top of the ledgers of both sides.

    A peer is *live* when the mapping names it and no free has been asked for: a free queued in the
    open group counts as done, whether or not its peer has left the mapping yet.

    Args:
        full: ledger of the full pool.
        swa: ledger of the SWA pool.
        mapped_peers: SWA page that the mapping holds for each given full page, 0 for none.
        mapped_slots: SWA slot that the mapping holds for each given full slot, 0 for none.
        device: where the mapping is.
    """

    def __init__(
        self,
        full: PageLedger,
        swa: PageLedger,
        mapped_peers: Callable[[torch.Tensor], torch.Tensor],
        mapped_slots: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._full = full
        self._swa = swa
        self._mapped_peers = mapped_peers
        self._mapped_slots = mapped_slots
        self._device = device
        self._page_size = full.page_size

    def mark_queued(self, full_slots: torch.Tensor) -> None:
        """The peers of these slots will be released when the open group ends."""
        peers = self._live_peers(distinct_ids(on_host(full_slots) // self._page_size))
        self._swa.mark(torch.from_numpy(peers[peers > 0]), PENDING)

    def require_no_peer(self, operation: str, full_slots: torch.Tensor) -> None:
        """Raise LivePeerError for full slots whose SWA page would be lost."""
        pages = distinct_ids(on_host(full_slots) // self._page_size)
        refuse(
            LivePeerError,
            operation,
            pages[self._live_peers(pages) > 0],
            "full pages with a live SWA peer",
            "pages without a peer",
        )

    def require_peer(self, operation: str, full_slots: torch.Tensor) -> None:
        """Raise DeadPeerError for full slots without an SWA slot."""
        self._refuse_dead(operation, on_host(full_slots))

    def _refuse_dead(self, operation: str, slots: Ids) -> None:
        # Slot by slot: of a page on which a tail ended, only the front has a peer.
        asked = torch.from_numpy(slots).to(self._device)
        peers = on_host(self._mapped_slots(asked)) // self._page_size
        refuse(
            DeadPeerError,
            operation,
            slots[~self._swa.is_lent(peers)] // self._page_size,
            "full pages without an SWA peer",
            "slots with a live peer",
        )

    def require_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """`PageLedger.require_batch`, and a live peer of the last slot wherever a page goes on."""
        self._full.require_batch(batch)
        slots = self._full.continued_slots(batch)
        if slots.size:
            self._refuse_dead(batch.operation, slots)

    def require_mappable(
        self, operation: str, full_slots: torch.Tensor, swa_slots: torch.Tensor
    ) -> None:
        """Raise unless a raw mapping write pairs unmapped full pages with unowned SWA pages.

        Raises:
            InvalidSlotError: a slot outside its pool.
            DoubleFreeError: a full slot that is not lent.
            PendingFreeError: a slot of either side freed in the open group.
            LivePeerError: a full page that has a peer.
            MappingError: an SWA page that is not lent or belongs to another full page.
            GeometryError: offsets that differ, or pages that are not paired one to one.
        """
        self._full.require_lent(operation, full_slots)
        self.require_no_peer(operation, full_slots)
        self._swa.require_lent(operation, swa_slots, otherwise=MappingError)
        swa_pages = on_host(swa_slots) // self._page_size
        owned = self._live_peers(np.arange(1, self._full.num_pages + 1))
        refuse(
            MappingError,
            operation,
            swa_pages[np.isin(swa_pages, owned)],
            "SWA pages that already have a full page",
            "pages on loan without an owner",
        )
        self._require_page_pairs(operation, full_slots, swa_slots, MappingError)

    def require_recoverable(
        self, operation: str, kept_full: torch.Tensor, incoming_full: torch.Tensor
    ) -> None:
        """Raise unless `kept_full` may take over the peers of `incoming_full`.

        Raises:
            InvalidSlotError: a slot outside the pool.
            DoubleFreeError: a slot that is not lent, or an incoming one named twice.
            PendingFreeError: a slot freed in the open group.
            LivePeerError: a kept page that has a peer.
            DeadPeerError: an incoming page without one.
            GeometryError: offsets that differ, or pages that are not paired one to one.
        """
        self._full.require_lent(operation, kept_full)
        self._full.require_freeable(operation, incoming_full)
        self.require_no_peer(operation, kept_full)
        self.require_peer(operation, incoming_full)
        self._require_page_pairs(operation, kept_full, incoming_full, GeometryError)

    def _live_peers(self, full_pages: Ids) -> Ids:
        """SWA page of each full page, 0 where there is none that stays."""
        asked = torch.from_numpy(full_pages).to(self._device)
        peers = on_host(self._mapped_peers(asked))
        live: Ids = np.where(self._swa.is_lent(peers), peers, 0)
        return live

    def _require_page_pairs(
        self,
        operation: str,
        slots_index: torch.Tensor,
        partners_index: torch.Tensor,
        error: type[KVCacheError],
    ) -> None:
        size = self._page_size
        slots, partners = on_host(slots_index), on_host(partners_index)
        refuse(
            GeometryError,
            operation,
            slots[slots % size != partners % size],
            "slots paired with another offset of a page",
            "equal offsets on both sides",
        )
        pairs = np.unique(np.stack((slots // size, partners // size)), axis=1)
        for pages in pairs:
            refuse(
                error,
                operation,
                _repeated(pages),
                "pages paired with more than one page",
                "pages paired one to one",
            )

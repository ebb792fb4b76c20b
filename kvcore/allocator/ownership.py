"""Value checks of `validate=True`: what every page is, and what a call may name.

`PageLedger` keeps one state a page (free, lent, pending in an open group) of one pool, apart from
the free list, and refuses slots that the call may not name. `PeerGuard` adds the rules about SWA
peers. Checks read the device and raise before anything changes; without `validate` none of this
exists.

Left out: checks that need no device read (`kvcore.allocator.arguments`).
"""

import os
from collections.abc import Callable

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

FREE, LENT, PENDING = 0, 1, 2

_SHOWN_PAGES = 4


def validate_by_default() -> bool:
    """The default of `validate`: KVCORE_VALIDATE; off if unset, empty, 0, no, false or off."""
    setting = os.environ.get("KVCORE_VALIDATE", "").strip().lower()
    return setting not in {"", "0", "no", "false", "off"}


def refuse(
    error: type[KVCacheError], operation: str, offenders: torch.Tensor, problem: str, expected: str
) -> None:
    """Raise `error` naming the first few offenders (ids, int64 `[n]`); no-op if there are none."""
    if offenders.numel() == 0:
        return
    distinct: torch.Tensor = torch.unique(offenders)
    shown = ", ".join(str(page) for page in distinct[:_SHOWN_PAGES].tolist())
    more = ", ..." if distinct.numel() > _SHOWN_PAGES else ""
    raise error(
        f"{operation}: {problem}: {shown}{more} ({distinct.numel()} in all); expected {expected}"
    )


def _repeated(values: torch.Tensor) -> torch.Tensor:
    """Values that occur more than once."""
    ascending, _ = torch.sort(values)
    return ascending[1:][ascending[1:] == ascending[:-1]]


class PageLedger:
    """State of each page of one pool.

    Args:
        pool: how messages call the pool, for instance `full` or `SWA`.
        num_pages: pages 1..num_pages can be lent.
        page_size: slots a page.
        device: device of the index tensors.
    """

    def __init__(self, pool: str, num_pages: int, page_size: int, device: torch.device) -> None:
        self.pool = pool
        self.page_size = page_size
        self._num_pages = num_pages
        self._state = torch.full((num_pages + 1,), FREE, dtype=torch.uint8, device=device)

    def reset(self) -> None:
        """Every page is free."""
        self._state.fill_(FREE)

    def mark(self, pages: torch.Tensor, state: int) -> None:
        """Record a change of state that has happened."""
        self._state[pages] = state

    def is_lent(self, pages: torch.Tensor) -> torch.Tensor:
        """Whether each page (0 included) is lent and not pending: bool `[n]`."""
        return self._state[pages] == LENT

    def every_page(self) -> torch.Tensor:
        """Ids of all pages but the padding page."""
        return torch.arange(1, self._num_pages + 1, device=self._state.device)

    def require_in_pool(self, operation: str, slots: torch.Tensor) -> None:
        """Raise InvalidSlotError for slots that this pool never lends."""
        end = (self._num_pages + 1) * self.page_size
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
        end = (self._num_pages + 1) * self.page_size
        refuse(
            InvalidSlotError,
            operation,
            slots[(slots < -1) | (slots >= end)],
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
        self.require_in_pool(operation, slots)
        pages = slots // self.page_size
        state = self._state[pages]
        refuse(
            PendingFreeError,
            operation,
            pages[state == PENDING],
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
        self.require_lent(operation, slots)
        if self.page_size == 1:
            self.require_distinct_pages(operation, slots)

    def require_distinct_pages(self, operation: str, pages: torch.Tensor) -> None:
        """Raise DoubleFreeError for pages named more than once."""
        refuse(
            DoubleFreeError,
            operation,
            _repeated(pages),
            f"{self.pool} pages named more than once",
            "each page once",
        )

    def require_segments(self, operation: str, indices: list[torch.Tensor]) -> None:
        """Raise unless the segments are lent, fill their pages in order and share none."""
        slots = torch.cat(indices)
        self.require_lent(operation, slots)
        for index in indices:
            position = torch.arange(index.numel(), device=index.device)
            first_of_page = index[position // self.page_size * self.page_size]
            offset = position % self.page_size
            askew = (index != first_of_page + offset) | (index % self.page_size != offset)
            refuse(
                GeometryError,
                operation,
                index[askew] // self.page_size,
                f"segment that does not run through {self.pool} pages slot by slot",
                "a page-aligned piece of one kv row",
            )
        pages = torch.cat([index[:: self.page_size] for index in indices]) // self.page_size
        self.require_distinct_pages(operation, pages)

    def require_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """Raise unless device and host lengths agree and each row may be continued at `last_loc`.

        Raises:
            GeometryError: lengths that differ, or `last_loc` at another offset than the prefix.
            InvalidSlotError: `last_loc` outside the pool or not lent, or one page continued twice.
            PendingFreeError: `last_loc` freed in the open group.
        """
        operation = batch.operation
        same_prefix = torch.equal(batch.prefix_lens.cpu(), batch.prefix_lens_cpu)
        if not (same_prefix and torch.equal(batch.seq_lens.cpu(), batch.seq_lens_cpu)):
            raise GeometryError(f"{operation}: expected the same lengths on device and host")
        begun = batch.prefix_lens > 0
        aligned = (batch.last_loc + 1) % self.page_size == batch.prefix_lens % self.page_size
        refuse(
            GeometryError,
            operation,
            batch.last_loc[~aligned | (begun != (batch.last_loc != -1))],
            "last_loc that does not fit the prefix length",
            f"(last_loc + 1) % {self.page_size} == prefix_len % {self.page_size}, and -1 exactly "
            "for an empty row",
        )
        self.require_lent(operation, batch.last_loc[begun], otherwise=InvalidSlotError)
        refuse(
            InvalidSlotError,
            operation,
            _repeated(self.continued_pages(batch)),
            f"{self.pool} pages continued by several rows",
            "each page continued once",
        )

    def continued_pages(self, batch: ExtendBatch | DecodeBatch) -> torch.Tensor:
        """Pages in which a row of the batch goes on, one entry a row."""
        grows = batch.seq_lens > batch.prefix_lens
        within_page = batch.prefix_lens % self.page_size != 0
        return batch.last_loc[grows & within_page] // self.page_size


class PeerGuard:
    """Rules about SWA peers, on top of the ledgers of both sides.

    A peer is *live* when the mapping names it and no free has been asked for: a free queued in the
    open group counts as done, whether or not its peer has left the mapping yet.

    Args:
        full: ledger of the full pool.
        swa: ledger of the SWA pool.
        mapped_peers: SWA page that the mapping holds for each given full page, 0 for none.
    """

    def __init__(
        self,
        full: PageLedger,
        swa: PageLedger,
        mapped_peers: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._full = full
        self._swa = swa
        self._mapped_peers = mapped_peers
        self._page_size = full.page_size

    def mark_queued(self, full_slots: torch.Tensor) -> None:
        """The peers of these slots will be released when the open group ends."""
        peers = self._live_peers(full_slots // self._page_size)
        self._swa.mark(peers[peers > 0], PENDING)

    def require_no_peer(self, operation: str, full_slots: torch.Tensor) -> None:
        """Raise LivePeerError for full slots whose SWA page would be lost."""
        pages = full_slots // self._page_size
        refuse(
            LivePeerError,
            operation,
            pages[self._live_peers(pages) > 0],
            "full pages with a live SWA peer",
            "pages without a peer",
        )

    def require_peer(self, operation: str, full_slots: torch.Tensor) -> None:
        """Raise DeadPeerError for full slots without an SWA page."""
        pages = full_slots // self._page_size
        refuse(
            DeadPeerError,
            operation,
            pages[self._live_peers(pages) == 0],
            "full pages without an SWA peer",
            "pages with a live peer",
        )

    def require_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """`PageLedger.require_batch`, and a live peer wherever a page goes on."""
        self._full.require_batch(batch)
        self.require_peer(batch.operation, self._full.continued_pages(batch) * self._page_size)

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
        swa_pages = swa_slots // self._page_size
        owned = self._live_peers(self._full.every_page())
        refuse(
            MappingError,
            operation,
            swa_pages[torch.isin(swa_pages, owned)],
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

    def _live_peers(self, full_pages: torch.Tensor) -> torch.Tensor:
        """SWA page of each full page, 0 where there is none that stays."""
        peers = self._mapped_peers(full_pages)
        return torch.where(self._swa.is_lent(peers), peers, 0)

    def _require_page_pairs(
        self,
        operation: str,
        slots: torch.Tensor,
        partners: torch.Tensor,
        error: type[KVCacheError],
    ) -> None:
        size = self._page_size
        refuse(
            GeometryError,
            operation,
            slots[slots % size != partners % size],
            "slots paired with another offset of a page",
            "equal offsets on both sides",
        )
        pairs = torch.unique(torch.stack((slots // size, partners // size)), dim=1)
        for pages in pairs:
            refuse(
                error,
                operation,
                _repeated(pages),
                "pages paired with more than one page",
                "pages paired one to one",
            )

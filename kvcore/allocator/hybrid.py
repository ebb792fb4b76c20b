"""Two pools and the mapping between them: capacity, peers, and the value checks about peers.

Both sides lend pages; the mapping pairs a full page with its SWA page, so it is read and written in
whole pages:

    full page f   slots  f*P      f*P+1    ...  f*P+P-1
    mapping              s*P      s*P+1    ...  s*P+P-1    SWA page s is the peer of f
                         0        0        ...  0          f has no peer

A page gets its row when it is lent together with a peer, so a later token on the same page finds
its entry in place, and a decode that begins no page writes nothing. Only a tail allocation leaves
single slots of a page unmapped, those behind the tail's end; a tail begins with a page. So a page
has a peer when its first entry is set, and that entry is what the free list of the SWA side keeps:
the first slot of each page. To free peers is to gather these entries into that list.

The host does not know which pages on loan have no peer, but it knows an upper bound of their
number. While it is 0, as in a pool without tombstones, a gather finds a peer for every page.

Left out: how pages and their peers go back at once (`kvcore.allocator.giving`), and the operations
that callers see (`kvcore.allocator.swa`).
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Protocol, Self, TypedDict, runtime_checkable

import torch

from kvcore.allocator.arguments import (
    Segment,
    as_locations,
    as_segments,
    pool_pages,
)
from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.allocator.host_rows import HostRows
from kvcore.allocator.ownership import PeerGuard, on_host
from kvcore.allocator.pending import PendingFrees
from kvcore.allocator.sides import make_pool
from kvcore.allocator.single import SinglePoolAllocator


class HybridPool(Protocol):
    """What a pool of full and SWA layers must offer to be served by a hybrid allocator."""

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Keep the mapping; it is written by the allocator and read by the pool.

        One that raises keeps the mapping that it had.
        """

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """SWA slots of full slots."""


@runtime_checkable
class SplitPool(Protocol):
    """A hybrid pool whose sides can be handed to the allocators of the sides."""

    full_kv_pool: Any
    swa_kv_pool: Any


class HybridPoolSize(Protocol):
    """An engine's memory configuration, as far as a hybrid pool is concerned."""

    full_max_total_num_tokens: int
    swa_max_total_num_tokens: int


class _Mapped(TypedDict):
    """What kernels are told of the mapping."""

    mapping: torch.Tensor
    page_size: int


class HybridAllocator(BaseTokenToKVPoolAllocator):
    """A full side, an SWA side, and the mapping that pairs their pages.

    The mapping `full_to_swa_index_mapping` is int64 `[size + page_size + 1]`: the SWA slot of each
    full slot, 0 for none, and -1 in the last entry, so that index -1 ("no previous slot") maps to
    -1. It is owned by this object, written in place, and handed to the pool by
    `kvcache.register_mapping`.
    """

    def __init__(
        self,
        size: int,
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
        pool_pages("constructor", size, page_size)
        pool_pages("constructor", size_swa, page_size)
        self._offsets = torch.arange(page_size, device=self._index_device)
        split = kvcache if isinstance(kvcache, SplitPool) else None
        self.full_attn_allocator = self._make_side(
            size, split.full_kv_pool if split is not None else None, "full", lists_slots=False
        )
        self.swa_attn_allocator = self._make_side(
            size_swa, split.swa_kv_pool if split is not None else None, "SWA", lists_slots=True
        )
        self._plain_slots = self.page_size == 1 and not self.validate
        self._build_mapping()
        self._wire()
        self.register_mapping()

    def _make_side(
        self, size: int, kvcache: Any, name: str, *, lists_slots: bool
    ) -> SinglePoolAllocator:
        return make_pool(
            size,
            self.page_size,
            self.dtype,
            self.device,
            kvcache,
            self.need_sort,
            validate=self.validate,
            pool_name=name,
            lists_slots=lists_slots,
        )

    def _build_mapping(self) -> None:
        self.full_to_swa_index_mapping = torch.zeros(
            self.size_full + self.page_size + 1, dtype=torch.int64, device=self._index_device
        )
        self.full_to_swa_index_mapping[-1] = -1
        self._view_mapping()
        self._drop_queued_peers()
        self._unpaired = 0
        self._peers_left_to_callers = False

    def _view_mapping(self) -> None:
        """The mapping by pages, and as the kernels and the host see it."""
        # One row a full page, the padding page included; the sentinel lies behind the last row.
        num_rows = self.full_attn_allocator.num_pages + 1
        self._page_rows = self.full_to_swa_index_mapping[: num_rows * self.page_size].view(
            num_rows, self.page_size
        )
        self._first_entries = self._page_rows[:, 0]
        self._mapped = _Mapped(mapping=self.full_to_swa_index_mapping, page_size=self.page_size)
        self._host = self._make_host_rows(num_rows)

    def _make_host_rows(self, num_rows: int) -> HostRows | None:
        """The mapping by numpy, where it is on a CPU and nobody asked for anything else."""
        if not self._by_host:
            return None
        return HostRows(self.full_to_swa_index_mapping, num_rows, self.page_size)

    def _drop_queued_peers(self) -> None:
        """No peer is freed by the open group alone, without its full page."""
        self._queued_peers = PendingFrees(self.page_size, self._index_device)

    _wired: ClassVar[tuple[str, ...]] = ("_guard",)
    """The attributes that `_wire` makes."""

    def _wire(self) -> None:
        """Tie together what holds on to the sides and to the mapping, whenever these are others."""
        self._guard = self._make_guard()

    def _make_guard(self) -> PeerGuard | None:
        full, swa = self.full_attn_allocator.ledger, self.swa_attn_allocator.ledger
        if full is None or swa is None:
            return None
        return PeerGuard(full, swa, self._peer_pages, self._peer_slots, self._index_device)

    def register_mapping(self) -> None:
        """Hand the mapping to the pool."""
        if self._kvcache is not None:
            self._kvcache.register_mapping(self.full_to_swa_index_mapping)

    def __getstate__(self) -> dict[str, Any]:
        views = ("_page_rows", "_first_entries", "_mapped", "_host", *self._wired)
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A copy has tensors of its own.
        self._view_mapping()
        self._wire()

    def resized(self, size: int, size_swa: int) -> Self:
        """What this allocator is to `become`, not registered yet; itself, it is as it was.

        Raises:
            GeometryError: a size that is no integer, or a side without a single page.
        """
        other = copy(self)
        other.full_attn_allocator = self.full_attn_allocator.resized(size)
        other.swa_attn_allocator = self.swa_attn_allocator.resized(size_swa)
        other._group_open = other._group_owned = False
        other._build_mapping()
        other._wire()
        return other

    def become(self, other: Self) -> None:
        """Take over what `resized` has built; cannot fail. The sides stay the objects they are."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        full.become(other.full_attn_allocator)
        swa.become(other.swa_attn_allocator)
        vars(self).update(vars(other))
        self.full_attn_allocator, self.swa_attn_allocator = full, swa
        self._wire()

    # -- capacity ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Tokens of the smaller side."""
        return min(self.full_attn_allocator.size, self.swa_attn_allocator.size)

    @property
    def size_full(self) -> int:
        """Tokens of the full pool."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Tokens of the SWA pool."""
        return self.swa_attn_allocator.size

    @property
    def queued_peer_slots(self) -> torch.Tensor:
        """The first slot of each full page whose peer the open group has yet to capture.

        int64 `[n]`, ascending; for inspection.
        """
        queued = PendingFrees(self.page_size, self._index_device)
        queued.absorb(self._queued_peers)
        if self._group_open:
            queued.absorb(self.full_attn_allocator.pending)
        return queued.all_pages(1) * self.page_size

    def queued_peer_pages(self) -> set[int]:
        """The pages of `queued_peer_slots`, as numbers."""
        queued = self._queued_peers.page_set(1)
        if self._group_open:
            queued |= self.full_attn_allocator.pending.page_set(1)
        return queued

    def available_size(self) -> int:
        """Tokens that one `alloc` could get: what the poorer side has."""
        full, swa = self.full_attn_allocator.free_list, self.swa_attn_allocator.free_list
        return min(full.num_free(), swa.num_free()) * self.page_size

    def full_available_size(self) -> int:
        """Tokens available on the full side."""
        return self.full_attn_allocator.free_list.num_free() * self.page_size

    def swa_available_size(self) -> int:
        """Tokens available on the SWA side."""
        return self.swa_attn_allocator.free_list.num_free() * self.page_size

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether both sides have that many pages."""
        full, swa = self.full_attn_allocator.free_list, self.swa_attn_allocator.free_list
        # There is always room for none.
        return (num_full_pages <= 0 or full.has_room(num_full_pages)) and (
            num_swa_pages <= 0 or swa.has_room(num_swa_pages)
        )

    def debug_print(self) -> str:
        """One line of capacity for logs, both sides."""
        return f"{self.full_attn_allocator.debug_print()}, {self.swa_attn_allocator.debug_print()}"

    def merge_and_sort_free(self) -> None:
        """Merge the pages that `need_sort` set aside, on both sides."""
        self.full_attn_allocator.merge_and_sort_free()
        self.swa_attn_allocator.merge_and_sort_free()

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """SWA slots of full slots, int64 of the same shape; 0 where unmapped, -1 for -1.

        Raises:
            InvalidSlotError: with `validate`, a slot below -1 or beyond the pool.
        """
        operation = "translate_loc_from_full_to_swa"
        locations = as_locations(operation, kv_indices, self._index_device)
        if self.full_attn_allocator.ledger is not None:
            self.full_attn_allocator.ledger.require_readable(operation, locations)
        if self._host is not None and locations.dim() > 0:
            return self._host.translated(locations)
        return self.full_to_swa_index_mapping[locations]

    # -- peers ---------------------------------------------------------------------------------

    def _no_pages(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._index_device)

    def _peer_entries(self, full_pages: torch.Tensor) -> torch.Tensor:
        """First slot of the SWA page of each full page, 0 for none: int64 `[n]`."""
        return self._first_entries.index_select(0, full_pages)

    def _peer_pages(self, full_pages: torch.Tensor) -> torch.Tensor:
        """SWA page of each full page, 0 for none: int64 `[n]`."""
        return self._peer_entries(full_pages) // self.page_size

    def _peer_slots(self, full_slots: torch.Tensor) -> torch.Tensor:
        """SWA slot of each full slot, 0 for none: int64 `[n]`."""
        return self.full_to_swa_index_mapping[full_slots]

    def _map_pages(self, full_pages: torch.Tensor, swa_firsts: torch.Tensor) -> None:
        """Pair full pages with the SWA pages of these first slots; both int64 `[n]`."""
        if self._kernels is not None:
            self._kernels.map_pages(full_pages, swa_firsts, **self._mapped)
        elif self._host is not None:
            self._host.pair(full_pages.numpy(), swa_firsts.numpy())
        elif self.page_size == 1:
            self.full_to_swa_index_mapping.put_(full_pages, swa_firsts)
        else:
            rows = torch.add(self._offsets, swa_firsts.unsqueeze(1))
            self._page_rows.index_copy_(0, full_pages, rows)

    def _clear_pages(self, full_pages: torch.Tensor) -> None:
        self._page_rows.index_fill_(0, full_pages, 0)

    def _detach_peers(
        self, full_pages: torch.Tensor, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Unmap the pages; `_peer_entries` of before, written into `place` if one is given."""
        if self._kernels is not None:
            firsts = full_pages if self.page_size == 1 else full_pages * self.page_size
            return self._detach_firsts(firsts, None, place)
        if self._host is not None:
            pages = on_host(full_pages)
            entries = torch.from_numpy(self._host.firsts[pages])
            self._host.unmap(pages)
            return entries if place is None else place.copy_(entries)
        if place is None:
            place = self._peer_entries(full_pages)
        else:
            torch.index_select(self._first_entries, 0, full_pages, out=place)
        self._clear_pages(full_pages)
        return place

    def _detach_firsts(
        self,
        firsts: torch.Tensor,
        full_place: torch.Tensor | None,
        swa_place: torch.Tensor | None,
    ) -> torch.Tensor:
        """`_detach_peers` of the pages of these slots, whose ids go to `full_place` if given."""
        if self._kernels is None:
            if full_place is not None:
                self.full_attn_allocator.write_entries(firsts, full_place)
            elif self.page_size > 1:
                full_place = firsts // self.page_size
            return self._detach_peers(firsts if full_place is None else full_place, swa_place)
        if swa_place is None:
            swa_place = torch.empty_like(firsts, memory_format=torch.contiguous_format)
        if full_place is None:
            self._kernels.release_peers(firsts, swa_firsts=swa_place, **self._mapped)
        else:
            self._kernels.release(
                firsts, full_pages=full_place, swa_firsts=swa_place, **self._mapped
            )
        return swa_place

    def _may_miss_peers(self) -> bool:
        """Whether some full page on loan may have no peer."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if self._unpaired == 0 and full.lent_alone == 0:
            return False
        # The gaps found so far were pages without a peer, each one counted below, and gone since.
        self._unpaired += full.lent_alone - swa.take_gaps_closed()
        full.lent_alone = 0
        if not self._has_loose_peers() and not (full.is_uncertain() or swa.is_uncertain()):
            # Every SWA page on loan is the peer of one full page, so the rest have none.
            self._unpaired = full.num_lent() - swa.num_lent()
        self._unpaired = max(0, self._unpaired)
        return self._unpaired > 0

    def _has_loose_peers(self) -> bool:
        """Whether SWA pages may be on loan that no full page maps to."""
        return self._peers_left_to_callers or self.swa_attn_allocator.lent_alone > 0

    def _forget_unpaired(self, num_pages: int) -> None:
        """At least so many pages, none of which had a peer, have one now or are free."""
        self._unpaired = max(0, self._unpaired - num_pages)

    def _move_peers(self, kept_pages: torch.Tensor, incoming_pages: torch.Tensor) -> None:
        # Entry by entry: a page on which a tail ended has peers at its front only.
        if self._host is not None:
            self._host.move(on_host(kept_pages), on_host(incoming_pages))
            self._forget_unpaired(1)
            return
        rows = self._page_rows[incoming_pages]
        self._clear_pages(incoming_pages)
        self._page_rows[kept_pages] = rows
        # One slot may be named several times, so all that is known is that there is one page.
        self._forget_unpaired(1)

    def _unmap_head(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Unmap what a tail allocation lends without a peer: single slots, then whole new pages.

        The slots matter on a page that goes on: its row was filled when it was lent.
        """
        self.full_to_swa_index_mapping.index_fill_(0, slots, 0)
        self._clear_pages(pages)

    def _unmap_behind(self, pages: torch.Tensor, offset: int) -> None:
        """Unmap the pages' slots from `offset` on, lent or not: the tail ended before them."""
        self._page_rows[:, offset:].index_fill_(0, pages, 0)

    # -- value checks --------------------------------------------------------------------------

    def _checked_segments(self, operation: str, segments: Iterable[Segment]) -> list[torch.Tensor]:
        indices = as_segments(operation, segments, self.page_size, self._index_device)
        if indices and self.full_attn_allocator.ledger is not None:
            self.full_attn_allocator.ledger.require_segments(operation, indices)
        return indices

    def _check_lent(self, operation: str, slots: torch.Tensor) -> None:
        if self.full_attn_allocator.ledger is not None:
            self.full_attn_allocator.ledger.require_lent(operation, slots)

    def _check_free(self, operation: str, slots: torch.Tensor) -> None:
        if self.full_attn_allocator.ledger is not None:
            self.full_attn_allocator.ledger.require_freeable(operation, slots)

    def _check_peers_released(self, operation: str, slots: torch.Tensor) -> None:
        if self._guard is not None:
            self._guard.require_no_peer(operation, slots)

    def check_batch(self, batch: ExtendBatch | DecodeBatch) -> None:
        """Raise for values that `lend_batch` must not see; see `PeerGuard.require_batch`."""
        if self._guard is not None:
            self._guard.require_batch(batch)

    def _check_mapping_write(self, operation: str, full: torch.Tensor, swa: torch.Tensor) -> None:
        if self._guard is not None:
            self._guard.require_mappable(operation, full, swa)

    def _check_recovery(self, operation: str, kept: torch.Tensor, incoming: torch.Tensor) -> None:
        if self._guard is not None:
            self._guard.require_recoverable(operation, kept, incoming)

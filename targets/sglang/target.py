"""Released SGLang allocators as targets: their calls, and their callers' contract, by release.

The contract says how the engine's own code uses each release, so that a finding is never a caller's
fault: no recovery of locked values before 0.5.15, whole rows in `free`, and from 0.5.20 on live
peers wherever a release trusts its caller for them. Callers check the capacity first, unless the
target is opened for exhaustion. Leaves out the loading (`kvcore.targets.sglang.release`).
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore import SWAKVPool
from kvcore.models import Contract, Geometry
from kvcore.models.ops import OP_KINDS, Form
from kvcore.targets.core import SAVER_OPS, SPARSE_OPS
from kvcore.targets.dialect import Slots, decode_vectors, extend_vectors
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.pool import PoolParts, StampedPool, build_pool
from kvcore.targets.protocol import Answers, UnsupportedGeometry
from kvcore.targets.sglang.release import Release
from kvcore.targets.sglang.stand_ins import BaseSWAKVPool


class ReleasePool(SWAKVPool, BaseSWAKVPool):
    """kvcore's hybrid pool, of the type that releases insist on."""


def release_contract(release: Release, geometry: Geometry, *, exhaustion: bool) -> Contract:
    """What the callers of ``release`` do at this page size."""
    since = release.version_at_least
    paged = geometry.page_size > 1
    trusting = since("0.5.20")
    out = {"hostile", "relocate", "alloc" if paged else "swa_tail"}
    if not since("0.5.19"):
        out.add("free_full")
    forms: set[Form] = {"slots"}
    if since("0.5.17"):
        forms |= {"segment", "segments"}
    swa_forms: set[Form] = {"slots", "sparse"}
    if trusting:
        swa_forms.add("segment")
    segments: set[Form] = {"segment", "segments"}
    trusted: set[Form] = segments if paged else segments | {"slots", "sparse"}
    return Contract(
        ops=frozenset(OP_KINDS) - out - SPARSE_OPS - SAVER_OPS,
        free_forms=frozenset(forms),
        free_swa_forms=frozenset(swa_forms),
        live_frees=frozenset(trusted) if trusting else frozenset(),
        # Window eviction goes forward only: no caller names a peer twice.
        live_swa_frees=frozenset(swa_forms),
        overwrite_deferred=since("0.5.18"),
        exhaustion=exhaustion,
        full_side_joins_group=since("0.5.19"),
        free_swa_joins_group=since("0.5.18"),
        locked_recovery=since("0.5.15"),
        tail_ends_early=False,
    )


class ReleaseDialect:
    """Calls on a release's hybrid allocator, as the engine of that release makes them."""

    def __init__(self, release: Release, allocator: Any, device: torch.device) -> None:
        self._allocator = allocator
        self._full: Any = allocator.full_attn_allocator
        self._swa: Any = allocator.swa_attn_allocator
        self._device = device
        self._page_size: int = allocator.page_size
        self._has_free_full = release.version_at_least("0.5.19")
        self._has_segments = release.version_at_least("0.5.20")
        self._clears_first = release.version_at_least("0.5.22")
        self._lists_all_free = release.version_at_least("0.5.20")

    def alloc(self, need: int) -> Slots | None:
        """`alloc`, at page size 1 only."""
        slots: Slots | None = self._allocator.alloc(need)
        return slots

    def extend(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`alloc_extend`; at page size 1 engines call `alloc` for the whole batch."""
        total = sum(after) - sum(before)
        if self._page_size == 1:
            return self.alloc(total)
        vectors = extend_vectors(before, after, last, self._device)
        slots: Slots | None = self._allocator.alloc_extend(*vectors, total)
        return slots

    def decode(self, after: list[int], last: list[int]) -> Slots | None:
        """`alloc_decode`; at page size 1 engines call `alloc` for the whole batch."""
        if self._page_size == 1:
            return self.alloc(len(after))
        vectors = decode_vectors(after, last, self._device)
        slots: Slots | None = self._allocator.alloc_decode(*vectors)
        return slots

    def swa_tail(
        self, before: int, after: int, last: int, tail: int, beyond: int = 0
    ) -> Slots | None:
        """`alloc_extend_swa_tail`, whose tail always ends with the row."""
        vectors = extend_vectors([before], [after], [last], self._device)
        slots: Slots | None = self._allocator.alloc_extend_swa_tail(*vectors, after - before, tail)
        return slots

    def free(self, slots: Slots, form: Form, start: int) -> None:
        """`free`, `free_segment`, `free_segments`."""
        if form == "segment":
            self._allocator.free_segment(slots, start_pos=start)
        elif form == "segments":
            self._allocator.free_segments(self._halves(slots, start))
        else:
            self._allocator.free(slots)

    def free_swa(self, slots: Slots, form: Form, start: int) -> None:
        """`free_swa`, `free_swa_segment`."""
        if form == "segment":
            self._allocator.free_swa_segment(slots, start_pos=start)
        else:
            self._allocator.free_swa(slots)

    def free_full(self, slots: Slots, form: Form, start: int) -> None:
        """`free_full` and, where the release has them, its segment forms."""
        if self._has_segments and form == "segment":
            self._allocator.free_full_segment(slots, start_pos=start)
        elif self._has_segments and form == "segments":
            self._allocator.free_full_segments(self._halves(slots, start))
        else:
            self._allocator.free_full(slots)

    def _halves(self, slots: Slots, start: int) -> list[tuple[Slots, int]]:
        cut = len(slots) // self._page_size // 2 * self._page_size
        return [(slots[:cut], start), (slots[cut:], start + cut)]

    def group_begin(self) -> None:
        """`free_group_begin`."""
        self._allocator.free_group_begin()

    def group_end(self) -> None:
        """`free_group_end`."""
        self._allocator.free_group_end()

    def recover(self, kept: Slots, incoming: Slots) -> None:
        """The writes that the release's prefix cache makes for a locked full value."""
        peers = self._allocator.translate_loc_from_full_to_swa(incoming)
        if self._clears_first:
            self._allocator.clear_full_to_swa_mapping(incoming)
            self._allocator.set_full_to_swa_mapping(kept, peers)
        else:
            self._allocator.set_full_to_swa_mapping(kept, peers)
            self._clear(incoming)
        if self._has_segments:
            self._allocator.free_full_segment(incoming, start_pos=0)
        elif self._has_free_full:
            self._allocator.free_full(incoming)
        else:
            self._full.free(incoming)

    def _clear(self, full: Slots) -> None:
        if self._has_free_full:
            self._allocator.clear_full_to_swa_mapping(full)
        else:
            self._allocator.full_to_swa_index_mapping[full] = 0

    def replace(self, old: Slots) -> None:
        """How the release's prefix cache frees the slots of a tombstone that others replaced."""
        if self._has_segments:
            self._allocator.free_full_segment(old, start_pos=0)
        elif self._has_free_full:
            self._allocator.free_full(old)
        else:
            self._allocator.free(old)

    def alloc_full(self, need: int) -> Slots | None:
        """`alloc` of the full side."""
        slots: Slots | None = self._full.alloc(need)
        return slots

    def alloc_swa(self, need: int) -> Slots | None:
        """`alloc` of the SWA side."""
        slots: Slots | None = self._swa.alloc(need)
        return slots

    def free_unpaired_swa(self, slots: Slots) -> None:
        """`free` of the SWA side."""
        self._swa.free(slots)

    def map(self, full: Slots, swa: Slots) -> None:
        """`set_full_to_swa_mapping`."""
        self._allocator.set_full_to_swa_mapping(full, swa)

    def clear(self) -> None:
        """`clear`."""
        self._allocator.clear()

    def peers(self, slots: Slots) -> Slots:
        """`translate_loc_from_full_to_swa`."""
        peers: Slots = self._allocator.translate_loc_from_full_to_swa(slots)
        return peers

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All free containers of each side."""
        return self._all_free(self._full), self._all_free(self._swa)

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self._listed(self._full), self._listed(self._swa)

    def _listed(self, side: Any) -> list[int]:
        if self._lists_all_free:
            pages: list[int] = side.get_all_free_pages().tolist()
            return pages
        return [*side.free_pages.tolist(), *side.release_pages.tolist()]

    def _all_free(self, side: Any) -> torch.Tensor:
        if self._lists_all_free:
            pages: torch.Tensor = side.get_all_free_pages()
            return pages
        return torch.cat((side.free_pages, side.release_pages))

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Not told: releases queue slots, pages or peers, in lists of their own."""
        return ()

    def pending_lists(self) -> tuple[list[int], ...]:
        """Not told either."""
        return ()

    def mapping(self) -> torch.Tensor:
        """`full_to_swa_index_mapping`."""
        mapping: torch.Tensor = self._allocator.full_to_swa_index_mapping
        return mapping

    def answers(self) -> Answers:
        """Capacity in slots, and the same of the sides."""
        full, swa = self._allocator.full_available_size(), self._allocator.swa_available_size()
        return Answers(
            available=self._allocator.available_size(),
            full_available=full,
            swa_available=swa,
            outer=(self._allocator.page_size, self._allocator.page_size, full, swa),
            inner=(
                self._full.page_size,
                self._swa.page_size,
                self._full.available_size(),
                self._swa.available_size(),
            ),
            asked=(
                *("full page_size", "SWA page_size"),
                *("full_available_size", "swa_available_size"),
            ),
        )


def release_target(
    release: Release, geometry: Geometry, *, name: str, exhaustion: bool
) -> AllocatorTarget:
    """A release's hybrid allocator of ``geometry`` over kvcore's pool, empty."""
    plain = Geometry(
        geometry.page_size, geometry.full_pages, geometry.swa_pages, geometry.need_sort
    )
    if geometry != plain or not geometry.hybrid:
        raise UnsupportedGeometry(
            "a release is driven as a hybrid allocator over keys and values, without device pages, "
            f"requests or memory saver; got {geometry.describe()}"
        )
    pool = build_pool(geometry, PoolParts(hybrid=ReleasePool))
    stamped = StampedPool(pool)
    allocator: Any = release.swa_allocator(
        geometry.full_size,
        geometry.swa_size,
        geometry.page_size,
        torch.int64,
        "cpu",
        pool,
        geometry.need_sort,
    )
    contract = release_contract(release, geometry, exhaustion=exhaustion)
    dialect = ReleaseDialect(release, allocator, stamped.device)
    return AllocatorTarget(name, geometry, contract, dialect, stamped)

"""How kvcore's own allocators are called: one pool, two, and one in which every layer slides.

Leaves out device slots (`kvcore.targets.core_sparse`) and which dialect a geometry needs
(`kvcore.targets.core`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    CompressedHiSparseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.models.ops import Form
from kvcore.targets.dialect import Slots, decode_vectors, extend_vectors
from kvcore.targets.host_arrays import SharedArray
from kvcore.targets.protocol import Answers


def all_free(side: SinglePoolAllocator) -> torch.Tensor:
    """Page ids in every free container of one pool."""
    if not side.need_sort:
        return side.free_pages
    return torch.cat([side.free_pages, side.release_pages])


def pending_of(side: SinglePoolAllocator, nothing: torch.Tensor) -> torch.Tensor:
    """Pages of one pool that wait for the end of its group; ``nothing`` where none is open."""
    return side.pending_pages if side.free_group_is_open else nothing


AllocatorT = TypeVar("AllocatorT", bound=BaseTokenToKVPoolAllocator)


class CoreDialect(Generic[AllocatorT]):
    """Calls that single-pool and hybrid allocators have in common."""

    def __init__(self, allocator: AllocatorT, device: torch.device) -> None:
        self.allocator = allocator
        self.device = device
        self.owns_tensors = False
        """Whether callers promise to leave alone what they free in a group."""
        self.nothing = torch.empty(0, dtype=torch.int64, device=device)
        """No pages, no slots."""

    def alloc(self, need: int) -> Slots | None:
        """`alloc`."""
        return self.allocator.alloc(need)

    def extend(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`alloc_extend`."""
        vectors = extend_vectors(before, after, last, self.device)
        return self.allocator.alloc_extend(*vectors, sum(after) - sum(before))

    def decode(self, after: list[int], last: list[int]) -> Slots | None:
        """`alloc_decode`."""
        return self.allocator.alloc_decode(*decode_vectors(after, last, self.device))

    def free(self, slots: Slots, form: Form, start: int) -> None:
        """`free` and its segment forms."""
        if form == "segment":
            self.allocator.free_segment(slots, start_pos=start)
        elif form == "segments":
            self.allocator.free_segments(self.halves(slots, start))
        else:
            self.allocator.free(slots)

    def free_full(self, slots: Slots, form: Form, start: int) -> None:
        """`free_full` and its segment forms."""
        if form == "segment":
            self.allocator.free_full_segment(slots, start_pos=start)
        elif form == "segments":
            self.allocator.free_full_segments(self.halves(slots, start))
        else:
            self.allocator.free_full(slots)

    def halves(self, slots: Slots, start: int) -> list[tuple[Slots, int]]:
        """A row segment cut in two at a page boundary near its middle; empty pieces included."""
        size = self.allocator.page_size
        cut = len(slots) // size // 2 * size
        return [(slots[:cut], start), (slots[cut:], start + cut)]

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Not told."""
        return ()

    def pending_lists(self) -> tuple[list[int], ...]:
        """`pending_pages` as numbers."""
        return tuple(pages.tolist() for pages in self.pending_pages())

    def group_begin(self) -> None:
        """`free_group_begin`."""
        if self.owns_tensors:
            self.allocator.free_group_begin(owned=True)
        else:
            self.allocator.free_group_begin()

    def group_end(self) -> None:
        """`free_group_end`."""
        self.allocator.free_group_end()

    def replace(self, old: Slots) -> None:
        """`free_full`."""
        self.allocator.free_full(old)

    def clear(self) -> None:
        """`clear`."""
        self.allocator.clear()


class Unpaired(CoreDialect[AllocatorT]):
    """Calls on an allocator without an SWA side. Its contract leaves out every op that needs
    one."""

    def swa_tail(
        self, before: int, after: int, last: int, tail: int, beyond: int = 0
    ) -> Slots | None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no SWA tail")

    def free_swa(self, slots: Slots, form: Form, start: int) -> None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no SWA side")

    def recover(self, kept: Slots, incoming: Slots) -> None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no tombstones")

    def alloc_full(self, need: int) -> Slots | None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no load-back")

    def alloc_swa(self, need: int) -> Slots | None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no SWA side")

    def free_unpaired_swa(self, slots: Slots) -> None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no SWA side")

    def map(self, full: Slots, swa: Slots) -> None:
        """Not a call of this allocator."""
        raise TypeError("a single pool has no mapping")

    def peers(self, slots: Slots) -> Slots:
        """None: there is no SWA side."""
        return torch.zeros_like(slots)

    def mapping(self) -> torch.Tensor:
        """Empty."""
        return self.nothing


class SingleDialect(Unpaired[SinglePoolAllocator]):
    """Calls on a single-pool allocator."""

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free list and release list."""
        free = all_free(self.allocator)
        return free, free[:0]

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self.allocator.free_page_list(), []

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Pages queued in the group."""
        return pending_of(self.allocator, self.nothing), self.nothing

    def answers(self) -> Answers:
        """Capacity in slots."""
        room = self.allocator.available_size()
        return Answers(room, room, 0)


SlidingT = TypeVar(
    "SlidingT",
    bound=SWATokenToKVPoolAllocator
    | CompressedHiSparseTokenToKVPoolAllocator
    | PureSWATokenToKVPoolAllocator,
)


class SlidingDialect(CoreDialect[SlidingT]):
    """Calls on allocators of layers with a sliding window: their peers, in whichever pool."""

    def free_swa(self, slots: Slots, form: Form, start: int) -> None:
        """`free_swa` and its segment forms."""
        if form == "segment":
            self.allocator.free_swa_segment(slots, start_pos=start)
        elif form == "segments":
            self.allocator.free_swa_segments(self.halves(slots, start))
        else:
            self.allocator.free_swa(slots)

    def peers(self, slots: Slots) -> Slots:
        """`translate_loc_from_full_to_swa`."""
        return self.allocator.translate_loc_from_full_to_swa(slots)

    def mapping(self) -> torch.Tensor:
        """`full_to_swa_index_mapping`."""
        return self.allocator.full_to_swa_index_mapping


HybridT = TypeVar(
    "HybridT", bound=SWATokenToKVPoolAllocator | CompressedHiSparseTokenToKVPoolAllocator
)


class PairedDialect(SlidingDialect[HybridT]):
    """Calls on a hybrid allocator and on what wraps one."""

    def swa_tail(
        self, before: int, after: int, last: int, tail: int, beyond: int = 0
    ) -> Slots | None:
        """`alloc_extend_swa_tail`."""
        vectors = extend_vectors([before], [after], [last], self.device)
        return self.allocator.alloc_extend_swa_tail(
            *vectors, after - before, tail, swa_tail_end=after - beyond
        )

    def recover(self, kept: Slots, incoming: Slots) -> None:
        """`recover_tombstone`."""
        self.allocator.recover_tombstone(kept, incoming)

    def alloc_full(self, need: int) -> Slots | None:
        """`alloc` of the full side."""
        return self.allocator.full_attn_allocator.alloc(need)

    def alloc_swa(self, need: int) -> Slots | None:
        """`alloc` of the SWA side."""
        return self.allocator.swa_attn_allocator.alloc(need)

    def free_unpaired_swa(self, slots: Slots) -> None:
        """`free` of the SWA side."""
        self.allocator.swa_attn_allocator.free(slots)

    def map(self, full: Slots, swa: Slots) -> None:
        """`set_full_to_swa_mapping`."""
        self.allocator.set_full_to_swa_mapping(full, swa)

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free list and release list of each side."""
        full, swa = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return all_free(full), all_free(swa)

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        whole = self.allocator
        return (
            whole.full_attn_allocator.free_list.listed(),
            whole.swa_attn_allocator.free_list.listed(),
        )

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Pages queued on both sides, and the peers that the group has yet to capture."""
        whole = self.allocator
        full = pending_of(whole.full_attn_allocator, self.nothing)
        swa = pending_of(whole.swa_attn_allocator, self.nothing)
        if not whole.free_group_is_open:
            return full, swa
        queued = self._queued_peers(whole.queued_peer_slots)
        if queued.numel() == 0:
            return full, swa
        return full, torch.unique(torch.cat([swa, queued]))

    def _queued_peers(self, slots: torch.Tensor) -> torch.Tensor:
        """The SWA pages of the pages that full ``slots`` lie in, those that have one."""
        size, mapping = self.allocator.page_size, self.allocator.full_to_swa_index_mapping
        if slots.is_cpu and mapping.is_cpu:
            # As below, in arrays: a group is open at every third step of a program.
            named = slots.numpy()
            places = (named // size * size)[:, None] + np.arange(size)
            pages = mapping.numpy()[places].max(axis=1, initial=0) // size
            return torch.from_numpy(pages[pages > 0])
        first = slots // size * size
        every = first[:, None] + torch.arange(size, device=self.device)
        peers = mapping[every].amax(dim=1) // size
        return peers[peers > 0]


HYBRID_QUERIES = (
    *("full page_size", "SWA page_size", "size", "size_full", "size_swa"),
    *("full_available_size", "swa_available_size", "room for what is free"),
    *("room for one full page more", "room for one SWA page more"),
)
"""What a hybrid allocator is asked about itself: sizes and room in slots, then yes or no."""


class HybridDialect(PairedDialect[SWATokenToKVPoolAllocator]):
    """Calls on the hybrid allocator itself."""

    def __init__(self, allocator: SWATokenToKVPoolAllocator, device: torch.device) -> None:
        super().__init__(allocator, device)
        self._mapping = SharedArray()

    def pending_lists(self) -> tuple[list[int], ...]:
        """`pending_pages` as numbers: a group is open at every third step of a program."""
        whole = self.allocator
        if not whole.full_to_swa_index_mapping.is_cpu:
            return super().pending_lists()
        full, swa = whole.full_attn_allocator, whole.swa_attn_allocator
        on_full = full.pending_page_list() if full.free_group_is_open else []
        on_swa = swa.pending_page_list() if swa.free_group_is_open else []
        if not whole.free_group_is_open:
            return on_full, on_swa
        queued = whole.queued_peer_pages()
        if not queued:
            return on_full, on_swa
        size = whole.page_size
        mapping = self._mapping.over(whole.full_to_swa_index_mapping).tolist()
        # No comprehension, which is a call of its own in Python 3.11.
        peers = set(on_swa)
        for page in queued:
            if (entry := max(mapping[page * size : (page + 1) * size])) > 0:
                peers.add(entry // size)
        return on_full, sorted(peers)

    def answers(self) -> Answers:
        """Capacity in slots; geometry and capacity of the whole against the sides'."""
        whole = self.allocator
        full, swa = whole.full_attn_allocator, whole.swa_attn_allocator
        size, full_page, swa_page = whole.page_size, full.page_size, swa.page_size
        full_size, swa_size = full.size, swa.size
        full_room, swa_room = full.available_size(), swa.available_size()
        full_said, swa_said = whole.full_available_size(), whole.swa_available_size()
        full_pages, swa_pages = full_room // full_page, swa_room // swa_page
        has_pages = whole.new_pages_available
        outer = (
            size,
            size,
            whole.size,
            whole.size_full,
            whole.size_swa,
            full_said,
            swa_said,
            1 if has_pages(full_pages, swa_pages) else 0,
            1 if has_pages(full_pages + 1, 0) else 0,
            1 if has_pages(0, swa_pages + 1) else 0,
        )
        smaller = full_size if full_size < swa_size else swa_size
        inner = (full_page, swa_page, smaller, full_size, swa_size, full_room, swa_room, 1, 0, 0)
        return Answers(
            whole.available_size(), full_said, swa_said, outer, inner, asked=HYBRID_QUERIES
        )


PURE_QUERIES = (
    *("page_size", "size", "size_full", "size_swa", "room for what is free"),
    *("room for one full page more", "room for one SWA page more"),
)
"""What an allocator of one pool in which every layer slides is asked about itself."""


class PureDialect(
    SlidingDialect[PureSWATokenToKVPoolAllocator], Unpaired[PureSWATokenToKVPoolAllocator]
):
    """Calls on the allocator of one pool in which every layer slides. Its contract leaves out every
    op that maps anything."""

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free list and release list."""
        free = all_free(self.allocator.swa_attn_allocator)
        return free, free[:0]

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self.allocator.swa_attn_allocator.free_page_list(), []

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Pages queued in the group."""
        return pending_of(self.allocator.swa_attn_allocator, self.nothing), self.nothing

    def answers(self) -> Answers:
        """Capacity in slots; geometry and capacity of the whole against the pool's."""
        whole, inner = self.allocator, self.allocator.full_attn_allocator
        size, pages = inner.size, inner.available_size() // inner.page_size
        has_pages = whole.new_pages_available
        return Answers(
            whole.available_size(),
            whole.full_available_size(),
            whole.swa_available_size(),
            (
                *(whole.page_size, whole.size, whole.size_full, whole.size_swa),
                int(has_pages(pages, pages)),
                int(has_pages(pages + 1, 0)),
                int(has_pages(0, pages + 1)),
            ),
            (inner.page_size, size, size, size, 1, 0, 0),
            asked=PURE_QUERIES,
        )

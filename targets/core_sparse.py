"""How kvcore's HiSparse allocators are called: device slots under one pool or under a hybrid one.

Leaves out what lies under them (`kvcore.targets.core_dialects`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from kvcore import CompressedHiSparseTokenToKVPoolAllocator, HiSparseTokenToKVPoolAllocator
from kvcore.targets.core_dialects import (
    PairedDialect,
    Unpaired,
    all_free,
    pending_of,
)
from kvcore.targets.dialect import Slots, extend_vectors
from kvcore.targets.protocol import Answers

SparseT = TypeVar(
    "SparseT", bound=HiSparseTokenToKVPoolAllocator | CompressedHiSparseTokenToKVPoolAllocator
)


class DeviceCalls(Generic[SparseT]):
    """Calls on the device slots of either allocator."""

    allocator: SparseT
    device: torch.device
    nothing: torch.Tensor

    def extend_logical(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`alloc_logical_only`."""
        vectors = extend_vectors(before, after, last, self.device)
        return self.allocator.alloc_logical_only(*vectors, sum(after) - sum(before))

    def free_device(self, slots: Slots) -> None:
        """`free_hisparse`."""
        self.allocator.free_hisparse(slots)

    def device_buffer(self, slots: Slots, need: int) -> Slots | None:
        """`alloc_device_buffer` of a row's entries."""
        return self.allocator.alloc_device_buffer(self.entries(slots), need)

    def entries(self, slots: Slots) -> Slots:
        """What `alloc_device_buffer` calls the slots of a row."""
        return slots

    def free_buffer(self, buffer: Slots) -> None:
        """`free_hisparse_indices`."""
        self.allocator.free_hisparse_indices(buffer)

    def free_device_pages(self) -> torch.Tensor:
        """Free list and release list of the device side."""
        return all_free(self.allocator.hisparse_attn_allocator)

    def free_device_list(self) -> list[int]:
        """The same as numbers."""
        return self.allocator.hisparse_attn_allocator.free_page_list()

    def pending_device_pages(self) -> torch.Tensor:
        """Pages queued on the device side."""
        return pending_of(self.allocator.hisparse_attn_allocator, self.nothing)

    def device_mapping(self) -> torch.Tensor:
        """`full_to_hisparse_device_index_mapping`."""
        return self.allocator.full_to_hisparse_device_index_mapping


class HiSparseDialect(
    DeviceCalls[HiSparseTokenToKVPoolAllocator], Unpaired[HiSparseTokenToKVPoolAllocator]
):
    """Calls on the HiSparse allocator over one logical pool."""

    def device_slots(self, slots: Slots) -> Slots:
        """The mapping's entries."""
        return self.allocator.full_to_hisparse_device_index_mapping[slots]

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free list and release list of the logical side."""
        free = all_free(self.allocator.logical_attn_allocator)
        return free, free[:0]

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self.allocator.logical_attn_allocator.free_page_list(), []

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Pages queued on the logical side."""
        return pending_of(self.allocator.logical_attn_allocator, self.nothing), self.nothing

    def answers(self) -> Answers:
        """Capacity in slots; geometry of the whole against the logical side's."""
        whole = self.allocator
        logical, device = whole.logical_attn_allocator, whole.hisparse_attn_allocator
        size = whole.page_size
        return Answers(
            whole.available_size(),
            logical.available_size(),
            0,
            (size, size, whole.size, whole.size_full),
            (logical.page_size, device.page_size, logical.size, logical.size_full),
            device.available_size(),
            asked=("page_size", "device page_size", "size", "size_full"),
        )


COMPRESSED_QUERIES = (
    *("page_size", "size", "size_full", "size_swa", "full_available_size", "swa_available_size"),
    *("room for what is free", "room for one SWA page more", "the same mapping"),
    "the same kvcache",
)
"""What the compressed HiSparse allocator is asked about itself."""


class CompressedDialect(
    DeviceCalls[CompressedHiSparseTokenToKVPoolAllocator],
    PairedDialect[CompressedHiSparseTokenToKVPoolAllocator],
):
    """Calls on the compressed HiSparse allocator, those on the hybrid one through it."""

    def entries(self, slots: Slots) -> Slots:
        """Compressed locations; the row may have none."""
        return self.allocator.hisparse_kvcache.translate_loc_from_full_to_compressed(slots)

    def device_slots(self, slots: Slots) -> Slots:
        """The mapping's entry of each slot that completes one."""
        each = self.allocator.compress_ratio
        entries = self.allocator.full_to_hisparse_device_index_mapping[slots // each]
        return torch.where((slots + 1) % each == 0, entries, 0)

    def answers(self) -> Answers:
        """Capacity in slots; geometry and capacity of the wrapper against the hybrid allocator's,
        full slots counted only as far as the device side has room for their entries."""
        whole, inner = self.allocator, self.allocator.logical_attn_allocator
        device = whole.hisparse_attn_allocator.available_size()
        full, swa = inner.full_available_size(), inner.swa_available_size()
        size, said = inner.page_size, whole.full_available_size()
        full_pages, swa_pages = said // size, swa // size
        outer = (
            *(whole.page_size, whole.size, whole.size_full, whole.size_swa),
            *(said, whole.swa_available_size()),
            int(whole.new_pages_available(full_pages, swa_pages)),
            int(whole.new_pages_available(0, swa_pages + 1)),
            int(whole.full_to_swa_index_mapping is inner.full_to_swa_index_mapping),
            int(whole.get_kvcache() is inner.get_kvcache()),
        )
        meant = (
            *(size, inner.size, inner.size_full, inner.size_swa),
            *(min(full, device * whole.compress_ratio), swa),
            int(inner.new_pages_available(full_pages, swa_pages)),
            int(inner.new_pages_available(0, swa_pages + 1)),
            *(1, 1),
        )
        room = whole.available_size()
        return Answers(room, full, swa, outer, meant, device, asked=COMPRESSED_QUERIES)

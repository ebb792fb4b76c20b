"""The HiSparse allocators: sparse attention that keeps few tokens on the device.

Both lend logical slots, of which only some have a device slot; `HiSparseTokenToKVPoolAllocator`
lends one device slot a token, `CompressedHiSparseTokenToKVPoolAllocator` one for every 4 tokens
over a hybrid allocator, to which it forwards everything else (sglang#24039).

Left out: the mapping and the device pages themselves (`kvcore.allocator.device_mapping`), lending,
returning and buffers (`kvcore.allocator.device_side`), and the rows that device slots index
(`kvcore.pools.hisparse`).
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch

from kvcore.allocator.arguments import Segment, as_index, as_number, require_equal_lengths
from kvcore.allocator.device_mapping import MappedPool
from kvcore.allocator.device_side import DeviceSideAllocator
from kvcore.allocator.hybrid import HybridPoolSize
from kvcore.allocator.sides import make_pool
from kvcore.allocator.single import PoolSize, SinglePoolAllocator
from kvcore.allocator.swa import SWATokenToKVPoolAllocator
from kvcore.errors import GeometryError

COMPRESS_RATIO = 4
"""Logical tokens in one entry of a compressed pool."""


class CompressedPool(MappedPool, Protocol):
    """What a pool of compressed rows must offer: its geometry, and which slots have an entry."""

    @property
    def size(self) -> int:
        """Device slots that can be lent."""

    @property
    def page_size(self) -> int:
        """Device slots a page: a quarter of the logical page."""

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The entries that full slots complete, in the same order; the other slots have none."""


@runtime_checkable
class PlacedPool(Protocol):
    """A pool that says where its rows are."""

    device: str | torch.device


class HiSparseTokenToKVPoolAllocator(DeviceSideAllocator):
    """Lends `size * host_to_device_ratio` logical slots over `size` device slots.

    `alloc` and `alloc_extend` lend logical slots together with device slots, from both sides or
    from neither; `alloc_logical_only` and `alloc_decode` lend logical slots alone, whose KV goes to
    host memory and to a private device buffer (`alloc_device_buffer`). The mapping
    `full_to_hisparse_device_index_mapping` is int64 `[size_full + page_size + 1]`: the device slot
    of each logical slot, 0 for none, and -1 in the last element, so that index -1 ("no previous
    slot") maps to -1. It is owned by this object, indexed directly, and handed to the pool by
    `kvcache.register_mapping`; `resize` makes and registers a new one.

    Free groups hold back both sides, buffers and surplus pages too.

    With `validate=True`, calls raise besides the errors of the base class: DeadPeerError where a
    device page goes on behind a token without a device slot, InvalidSlotError where a mapped
    device page is returned as if it were a buffer.

    Args:
        size: device slots; `max_total_num_tokens` of an engine.
        page_size: slots a page, on both sides.
        dtype: element type of the pool; kept for callers.
        device: device of all index tensors.
        kvcache: the pool of device rows, or None.
        need_sort: keep freed pages aside and merge them in ascending order on demand.
        host_to_device_ratio: logical slots for each device slot.
        validate: check values; None means environment variable KVCORE_VALIDATE.

    Raises:
        GeometryError: a side without a single page, or a ratio below 1.
    """

    compress_ratio = 1

    logical_attn_allocator: SinglePoolAllocator

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: MappedPool | None,
        need_sort: bool,
        host_to_device_ratio: int = 2,
        *,
        validate: bool | None = None,
    ) -> None:
        super().__init__(page_size, dtype, device, kvcache, need_sort, validate)
        size = as_number("constructor", "size", size)
        host_to_device_ratio = as_number(
            "constructor", "host_to_device_ratio", host_to_device_ratio
        )
        if host_to_device_ratio < 1:
            raise GeometryError(
                f"constructor: expected host_to_device_ratio >= 1, got {host_to_device_ratio}"
            )
        self.host_to_device_ratio = host_to_device_ratio
        self.hisparse_page_size = page_size
        self.hisparse_attn_allocator = self._make_side(size, "device")
        self.logical_attn_allocator = self._make_side(size * host_to_device_ratio, "logical")
        self._build_mapping()
        if kvcache is not None:
            kvcache.register_mapping(self.full_to_hisparse_device_index_mapping)

    def _make_side(self, size: int, name: str) -> SinglePoolAllocator:
        return make_pool(
            size,
            self.page_size,
            self.dtype,
            self.device,
            self._kvcache,
            self.need_sort,
            validate=self.validate,
            pool_name=name,
        )

    @property
    def _slot_side(self) -> SinglePoolAllocator:
        return self.logical_attn_allocator

    def _entries_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves: every token has an entry."""
        return slots

    def free_full(self, free_index: torch.Tensor) -> None:
        """The same as `free`: there are no SWA peers."""
        self._return_slots("free_full", free_index)

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """The same as `return_segments`: there are no SWA peers."""
        self.return_segments(operation, segments)

    def resize(self, config: PoolSize | None = None, *, size: int | None = None) -> None:
        """Take everything back and lend sides of other sizes, with a new mapping, from now on.

        Args:
            config: an object whose `max_total_num_tokens` is the new number of device slots.
            size: the new number of device slots; exactly one of both is given. The logical side
                follows with the ratio that the constructor was given.

        Raises:
            GeometryError: none or both given, a size that is no integer, or a side without a single
                page.
        """
        if config is not None and size is None:
            size = config.max_total_num_tokens
        elif config is not None or size is None:
            raise GeometryError("resize: expected either a config or size")
        device = self.hisparse_attn_allocator.resized(size)
        logical = self.logical_attn_allocator.resized(device.size * self.host_to_device_ratio)
        other = self._with_sides(logical, device)
        # What can fail comes before what changes; the pool is the last that can refuse.
        if self._kvcache is not None:
            self._kvcache.register_mapping(other.full_to_hisparse_device_index_mapping)
        self.logical_attn_allocator.become(logical)
        self.hisparse_attn_allocator.become(device)
        self._take_mapping(other)


class CompressedHiSparseTokenToKVPoolAllocator(DeviceSideAllocator):
    """One device slot for every 4 logical tokens, over a hybrid allocator of full and SWA slots.

    Position i of a row completes an entry when `(i + 1) % 4 == 0`; pages start at multiples of 4,
    so slot and position agree in this. Which slots have an entry, and which, is said by
    `hisparse_kvcache`. The mapping `full_to_hisparse_device_index_mapping` is int64
    `[size_full // 4 + page_size // 4 + 1]`, indexed by entry: its device slot, 0 for none, and -1
    in the last element. It is owned by this object, indexed directly, and handed to
    `hisparse_kvcache` by `register_mapping`; `resize` makes and registers a new one.

    Everything that does not concern device slots is answered as by the hybrid allocator
    (sglang#24039), also `page_size` and `get_kvcache()`; capacity queries about full slots count
    the device side in. The entries belong to the full slots: every call that frees full slots
    returns their device pages too.

    Args:
        logical_attn_allocator: the hybrid allocator; it must not be used directly from now on.
        hisparse_kvcache: the pool of compressed rows; `size` and `page_size` are those of the
            device side.
        validate: check values; None means as the hybrid allocator does. Logical slots are checked
            if both do.

    Raises:
        GeometryError: a page size that is no multiple of 4, or a pool whose pages are not a quarter
            of it, that has not a single one, or that is on another device.
        FreeGroupError: the hybrid allocator has an open group.
    """

    compress_ratio = COMPRESS_RATIO

    logical_attn_allocator: SWATokenToKVPoolAllocator

    def __init__(
        self,
        logical_attn_allocator: SWATokenToKVPoolAllocator,
        hisparse_kvcache: CompressedPool,
        *,
        validate: bool | None = None,
    ) -> None:
        inner = logical_attn_allocator
        super().__init__(
            inner.page_size,
            inner.dtype,
            inner.device,
            inner.get_kvcache(),
            inner.need_sort,
            inner.validate if validate is None else validate,
        )
        if inner.page_size != hisparse_kvcache.page_size * COMPRESS_RATIO:
            raise GeometryError(
                f"constructor: expected page sizes of {COMPRESS_RATIO} logical slots for each "
                f"device slot, got {inner.page_size} and {hisparse_kvcache.page_size}"
            )
        if isinstance(hisparse_kvcache, PlacedPool):
            place = torch.empty(0, device=hisparse_kvcache.device).device
            if place != self._index_device:
                raise GeometryError(
                    f"constructor: expected a pool on {self._index_device}, got one on {place}"
                )
        inner.require_group("constructor", is_open=False)
        self.hisparse_kvcache = hisparse_kvcache
        self.hisparse_page_size = hisparse_kvcache.page_size
        self.logical_attn_allocator = inner
        self.hisparse_attn_allocator = make_pool(
            hisparse_kvcache.size,
            self.hisparse_page_size,
            self.dtype,
            self.device,
            hisparse_kvcache,
            self.need_sort,
            validate=self.validate,
            pool_name="device",
        )
        self._build_mapping()
        hisparse_kvcache.register_mapping(self.full_to_hisparse_device_index_mapping)

    @property
    def _slot_side(self) -> SinglePoolAllocator:
        return self.logical_attn_allocator.full_attn_allocator

    def _entries_of(self, slots: torch.Tensor) -> torch.Tensor:
        # A pool call, unlike the mapping, which is indexed directly: which tokens have an entry is
        # the layout of the compressed rows, so it belongs to the pool; who owns an entry is
        # written in the mapping, and that belongs to this object.
        return self.hisparse_kvcache.translate_loc_from_full_to_compressed(slots)

    # -- the hybrid allocator's answers ----------------------------------------------------------

    @property
    def full_attn_allocator(self) -> SinglePoolAllocator:
        """The full side of the hybrid allocator."""
        return self.logical_attn_allocator.full_attn_allocator

    @property
    def swa_attn_allocator(self) -> SinglePoolAllocator:
        """The SWA side of the hybrid allocator."""
        return self.logical_attn_allocator.swa_attn_allocator

    @property
    def full_to_swa_index_mapping(self) -> torch.Tensor:
        """The mapping of the hybrid allocator."""
        return self.logical_attn_allocator.full_to_swa_index_mapping

    @property
    def queued_peer_slots(self) -> torch.Tensor:
        """Full slots whose SWA peers the open group has yet to capture; for inspection."""
        return self.logical_attn_allocator.queued_peer_slots

    def queued_peer_pages(self) -> set[int]:
        """The pages of `queued_peer_slots`, as numbers."""
        return self.logical_attn_allocator.queued_peer_pages()

    @property
    def size_swa(self) -> int:
        """Tokens of the SWA pool."""
        return self.logical_attn_allocator.size_swa

    def full_available_size(self) -> int:
        """Tokens available on the full side that can have device slots."""
        return min(self.logical_attn_allocator.full_available_size(), self._device_tokens())

    def swa_available_size(self) -> int:
        """Tokens available on the SWA side."""
        return self.logical_attn_allocator.swa_available_size()

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether the hybrid allocator has that many pages, and the device side one for each full
        page."""
        return self.logical_attn_allocator.new_pages_available(
            num_full_pages, num_swa_pages
        ) and self.hisparse_attn_allocator.has_room(num_full_pages)

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """As the hybrid allocator."""
        return self.logical_attn_allocator.translate_loc_from_full_to_swa(kv_indices)

    def translate_kv_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """As the hybrid allocator."""
        return self.logical_attn_allocator.translate_kv_indices_for_transfer(kv_indices)

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
        """As the hybrid allocator; the new tokens have no device slots."""
        return self.logical_attn_allocator.alloc_extend_swa_tail(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            swa_tail_len,
            swa_tail_end=swa_tail_end,
        )

    def free_swa(self, free_index: torch.Tensor) -> None:
        """As the hybrid allocator; device pages stay."""
        self.logical_attn_allocator.free_swa(free_index)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """As the hybrid allocator; device pages stay."""
        self.logical_attn_allocator.free_swa_segment(free_index, start_pos=start_pos)

    def free_swa_segments(self, segments: Iterable[Segment]) -> None:
        """As the hybrid allocator; device pages stay."""
        self.logical_attn_allocator.free_swa_segments(segments)

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """As the hybrid allocator."""
        self.logical_attn_allocator.set_full_to_swa_mapping(full_indices, swa_indices)

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """As the hybrid allocator."""
        self.logical_attn_allocator.clear_full_to_swa_mapping(full_indices)

    # -- what frees full slots, and so their device pages ----------------------------------------

    def free_full(self, free_index: torch.Tensor) -> None:
        """As the hybrid allocator: full pages whose peers were released, and their device pages."""
        slots = as_index("free_full", free_index, self._index_device)
        if slots.numel() == 0:
            return
        self._check_free("free_full", slots)
        pages = self._slot_side.touched_pages(slots)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.free_full(slots)
        self._detach(pages, device_pages)

    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free_full` of page-aligned pieces of one row, ascending, no page shared."""
        pieces = list(segments)
        pages = self._pages_of_segments(operation, pieces)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.return_full_segments(operation, pieces)
        self._detach(pages, device_pages)

    def recover_tombstone(self, kept_full: torch.Tensor, incoming_full: torch.Tensor) -> None:
        """As the hybrid allocator; the device pages of the incoming full pages are returned.

        The kept pages keep the device pages that they have: both hold the same tokens.
        """
        operation = "recover_tombstone"
        kept = as_index(operation, kept_full, self._index_device)
        incoming = as_index(operation, incoming_full, self._index_device)
        require_equal_lengths(operation, kept_full=kept, incoming_full=incoming)
        if kept.numel() == 0:
            return
        if self._slot_side.ledger is not None:
            # In the hybrid allocator's order, so that both raise the same error.
            self._slot_side.ledger.require_lent(operation, kept)
        self._check_free(operation, incoming)
        pages = self._slot_side.touched_pages(incoming)
        device_pages = self._returnable(pages)
        self.logical_attn_allocator.recover_tombstone(kept, incoming)
        self._detach(pages, device_pages)

    def resize(
        self,
        config: HybridPoolSize | None = None,
        *,
        size: int | None = None,
        size_swa: int | None = None,
    ) -> None:
        """As the hybrid allocator; the device side takes the size that `hisparse_kvcache` has now.

        Everything is taken back, buffers too, and a new mapping is registered.

        Raises:
            GeometryError: as the hybrid allocator, or a device side without a single page.
        """
        inner = self.logical_attn_allocator
        device = self.hisparse_attn_allocator.resized(self.hisparse_kvcache.size)
        logical = inner.resized(*inner.new_sizes(config, size, size_swa))
        other = self._with_sides(logical, device)
        # What can fail comes before what changes; the pools are the last that can refuse.
        logical.register_mapping()
        try:
            self.hisparse_kvcache.register_mapping(other.full_to_hisparse_device_index_mapping)
        except BaseException:
            inner.register_mapping()
            raise
        inner.become(logical)
        self.hisparse_attn_allocator.become(device)
        self._take_mapping(other)

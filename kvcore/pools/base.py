"""What every pool of rows shares: geometry, host copies, moves and transfer tables. A pool keeps
one or two buffers a layer, each with one row a slot, `size + page_size` rows in all (the padding
page included), zero-filled; a pool kind says which buffers those are and how they are read and
written.

Not here: which slots are free or lent (`kvcore.allocator`), and the memory saver.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvcore.allocator.arguments import as_index, require_equal_lengths
from kvcore.errors import GeometryError

BufferInfos: TypeAlias = tuple[list[int], list[int], list[int]]
"""Addresses, lengths in bytes, and bytes a page, one entry a buffer: what KV transfer registers."""


class HasLayerId(Protocol):
    """An attention layer as engines pass it: only its number matters here."""

    @property
    def layer_id(self) -> int:
        """The number of the layer in the model."""


Layer: TypeAlias = int | HasLayerId


def layer_number(layer: Layer) -> int:
    """The number of `layer`, given as such or as an object that carries it."""
    return layer if isinstance(layer, int) else layer.layer_id


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one of the eight-bit floating-point types."""
    return dtype.is_floating_point and dtype.itemsize == 1


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of one pool in host memory, in the order of the slots that were asked for.

    `buffers` holds one tensor `[count, ...]` for each buffer of the pool, in storage dtype.
    """

    count: int
    buffers: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        """How many slots were copied."""
        return self.count

    def select(self, kept: torch.Tensor) -> "HostRows":
        """The rows where `kept` (bool `[count]`, on the host) is true, in the same order."""
        return HostRows(int(kept.sum()), tuple(rows[kept] for rows in self.buffers))


class SlotPool(ABC):
    """Buffers with one row a slot, and everything that follows from that alone.

    Args:
        size: slots that can be lent; the padding page comes on top.
        page_size: slots a page.
        dtype: what callers read and write; fp8 types are stored as uint8, which every kernel and
            every indexing operation supports.
        layer_num: layers that keep KV here; may be 0, when all layers of a model are of one kind.
        device: where the buffers live.
        enable_memory_saver: must be False, the memory saver is not available yet.
        start_layer: number of the first layer, for pipeline parallelism; 0 by default.
        end_layer: number of the last layer; for information.

    Raises:
        GeometryError: a size that no buffer can have.
        NotImplementedError: `enable_memory_saver` is True.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        if size < 0 or page_size < 1 or layer_num < 0:
            raise GeometryError(
                f"{type(self).__name__}: size {size}, page_size {page_size}, layer_num {layer_num};"
                " expected size >= 0, page_size >= 1, layer_num >= 0"
            )
        if enable_memory_saver:
            # Taking the flag without effect would let an engine count on memory it never gets back.
            raise NotImplementedError(
                f"{type(self).__name__}: enable_memory_saver=True is not available yet;"
                " build the pool with False"
            )
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = torch.uint8 if is_fp8(dtype) else dtype
        self.layer_num = layer_num
        self.device = device
        self.enable_memory_saver = enable_memory_saver
        self.start_layer = 0 if start_layer is None else start_layer
        self.end_layer = self.start_layer + layer_num - 1 if end_layer is None else end_layer
        # "cuda" and "cuda:0" name one device; an actual tensor tells which.
        self._resolved_device = torch.empty(0, device=device).device

    @property
    def rows(self) -> int:
        """Rows of every buffer: all slots and the padding page."""
        return self.size + self.page_size

    @abstractmethod
    def slot_buffers(self) -> list[torch.Tensor]:
        """Every buffer whose rows are slots: what a host copy, a move, a transfer must carry."""

    @abstractmethod
    def get_key_buffer(self, layer: Layer) -> torch.Tensor:
        """The keys of `layer`, a view of dtype `dtype`."""

    @abstractmethod
    def get_value_buffer(self, layer: Layer) -> torch.Tensor:
        """The values of `layer`, a view of dtype `dtype`."""

    def get_kv_buffer(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `layer`, as `get_key_buffer` and `get_value_buffer` return them."""
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    @abstractmethod
    def set_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write one row a token into the slots `loc` of `layer`."""

    @abstractmethod
    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the key buffers and of the value buffers."""

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows `src_loc` to `tgt_loc` in every buffer; the two may overlap.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            GeometryError: the lengths differ.
        """
        targets = as_index("move_kv_cache", tgt_loc, self._resolved_device)
        sources = as_index("move_kv_cache", src_loc, self._resolved_device)
        require_equal_lengths("move_kv_cache", targets=targets, sources=sources)
        for buffer in self.slot_buffers():
            # The right side is gathered whole before the first row is written.
            buffer[targets] = buffer[sources]

    def get_cpu_copy(self, indices: torch.Tensor) -> HostRows:
        """Copy the rows `indices` of every buffer to host memory; waits for the device.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
        """
        slots = as_index("get_cpu_copy", indices, self._resolved_device)
        return HostRows(len(slots), tuple(buffer[slots].cpu() for buffer in self.slot_buffers()))

    def load_cpu_copy(self, copy: HostRows, indices: torch.Tensor) -> None:
        """Write the rows of `copy` into the slots `indices`, the first row into the first slot.

        Raises:
            IndexTensorError, GeometryError: see `check_host_copy`; nothing was written.
        """
        slots = self.check_host_copy(copy, indices)
        for buffer, rows in zip(self.slot_buffers(), copy.buffers, strict=True):
            buffer[slots] = rows.to(buffer.device)

    def check_host_copy(self, copy: HostRows, indices: torch.Tensor) -> torch.Tensor:
        """Return `indices` as int64 if `copy` can be written there, or raise.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            GeometryError: another number of rows than slots, or a copy of a pool with other
                buffers.
        """
        slots = as_index("load_cpu_copy", indices, self._resolved_device)
        self.check_copy_fits(copy)
        if len(slots) != len(copy):
            raise GeometryError(f"load_cpu_copy: {len(slots)} slots for {len(copy)} copied rows")
        return slots

    def check_copy_fits(self, copy: HostRows) -> None:
        """Raise GeometryError unless the rows of `copy` are rows of this pool's buffers."""
        if not isinstance(copy, HostRows):
            raise GeometryError(
                f"load_cpu_copy: a {type(copy).__name__}; {type(self).__name__} restores HostRows"
            )
        expected = [(len(copy), *buffer.shape[1:]) for buffer in self.slot_buffers()]
        seen = [tuple(rows.shape) for rows in copy.buffers]
        if seen != expected or any(rows.dtype != self.store_dtype for rows in copy.buffers):
            raise GeometryError(
                f"load_cpu_copy: a copy with buffers {_summary(copy.buffers)};"
                f" this pool has {_summary(self.slot_buffers())}"
            )

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Address, bytes, and bytes a page of every buffer, keys first."""
        buffers = self.slot_buffers()
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes * self.page_size for buffer in buffers],
        )

    def _local_layer(self, layer: Layer) -> int:
        """Position of `layer` among this pool's buffers."""
        number = layer_number(layer)
        local = number - self.start_layer
        # A negative position would silently be another layer's buffer.
        if not 0 <= local < self.layer_num:
            raise GeometryError(
                f"layer {number}: this pool holds {self.layer_num} layers from {self.start_layer}"
            )
        return local


def _summary(buffers: Sequence[torch.Tensor]) -> str:
    """Number, row shape and dtype of buffers, for a message."""
    if not buffers:
        return "0 x nothing"
    kinds = sorted({f"{list(buffer.shape[1:])} {buffer.dtype}" for buffer in buffers})
    return f"{len(buffers)} x {' or '.join(kinds)}"

"""What every pool of rows shares: geometry, host copies, moves and transfer tables. A pool keeps
one or two buffers a layer, each with one row a slot, `size + page_size` rows in all (the padding
page included), zero-filled; a pool kind says which buffers those are and how they are read and
written. All memory of a pool is allocated in one place, `SlotPool._zeros`: with the memory saver
on, inside the region tagged `kv_cache`.

Not here: which slots are free or lent (`kvcore.allocator`), and how memory is given back
(`kvcore.saver`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from kvcore.allocator.arguments import as_index, require_equal_lengths, resolved_device
from kvcore.errors import GeometryError, PausedPoolError
from kvcore.pools.arguments import (
    Layer,
    as_count,
    layer_number,
    require_within,
    scaled,
    shaped,
)
from kvcore.pools.host_arrays import HostRowArrays, host_row_arrays
from kvcore.saver import KV_CACHE, MemorySaver, default_saver

BufferInfos: TypeAlias = tuple[list[int], list[int], list[int]]
"""Addresses, lengths in bytes, and bytes a page, one entry a buffer: what KV transfer registers."""


class SlotRows(Protocol):
    """One row a slot, read and written by int64 slots as a tensor is; a tensor is one such."""

    def __getitem__(self, slots: torch.Tensor, /) -> torch.Tensor:
        """A new tensor `[n, ...]` of the rows of `slots`."""

    def __setitem__(self, slots: torch.Tensor, rows: torch.Tensor, /) -> None:
        """Write `rows` into the rows of `slots`."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one of the eight-bit floating-point types."""
    return dtype.is_floating_point and dtype.itemsize == 1


class _RowKind(NamedTuple):
    """A row of a buffer."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of one pool in host memory, in the order of the slots that were asked for.

    `buffers` holds one tensor `[count, ...]` for each of the pool's `copied_rows`, in the dtype
    that they are stored in.
    """

    count: int
    buffers: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        """How many slots were copied."""
        return self.count

    def select(self, kept: torch.Tensor) -> "HostRows":
        """The rows where `kept` (bool `[count]`, on the host) is true, in the same order.

        This copy itself, where that is all of them.
        """
        numbers = torch.from_numpy(np.flatnonzero(kept.numpy()))
        if len(numbers) == self.count:
            return self
        return HostRows(len(numbers), tuple(rows.index_select(0, numbers) for rows in self.buffers))


class SlotPool(ABC):
    """Buffers with one row a slot, and everything that follows from that alone.

    Args:
        size: slots that can be lent; the padding page comes on top.
        page_size: slots a page.
        dtype: what callers read and write; fp8 types are stored as uint8, which every kernel and
            every indexing operation supports.
        layer_num: layers that keep KV here; may be 0, when all layers of a model are of one kind.
        device: where the buffers live.
        enable_memory_saver: allocate every buffer under the tag `kv_cache` of a memory saver, so
            that its `pause` gives all of them back.
        start_layer: number of the first layer, for pipeline parallelism; 0 by default.
        end_layer: number of the last layer; for information.
        memory_saver: the saver, where `enable_memory_saver` is True; `default_saver(device)` for
            None.

    Slot -1 means "no slot", everywhere: what is written there goes to the padding row 0, and what
    is read from there comes from it. All that can be known without waiting for the device is
    checked before the first row is written, so that no token is written by half: type, device,
    shape and dtype of every part, and on a CPU the slots themselves. A slot beyond the pool on a
    CUDA device is that device's own assertion.

    While the tag is paused, reading and writing raises `PausedPoolError` before anything happens,
    and so does building another pool. Addresses, sizes and transfer tables stay available.

    Raises:
        GeometryError: a size that no buffer can have, or that is not a whole number.
        PausedPoolError: the saver's tag `kv_cache` is paused.
        SaverMemoryError: the saver found no memory.
        SaverUnavailableError: there is no saver for `device`.
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
        *,
        memory_saver: MemorySaver | None = None,
    ) -> None:
        kind = type(self).__name__
        size = as_count(kind, "size", size)
        page_size = as_count(kind, "page_size", page_size)
        layer_num = as_count(kind, "layer_num", layer_num)
        if size < 0 or page_size < 1 or layer_num < 0:
            raise GeometryError(
                f"{kind}: size {size}, page_size {page_size}, layer_num {layer_num};"
                " expected size >= 0, page_size >= 1, layer_num >= 0"
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
        self._resolved_device = resolved_device(device)
        self.memory_saver: MemorySaver | None = None
        """The saver that the buffers belong to; None with the memory saver off."""
        if enable_memory_saver:
            self.memory_saver = default_saver(device) if memory_saver is None else memory_saver
            # A pool without layers has a tag to pause all the same.
            with self.memory_saver.region(KV_CACHE):
                pass

    @property
    def rows(self) -> int:
        """Rows of every buffer: all slots and the padding page."""
        return self.size + self.page_size

    @abstractmethod
    def slot_buffers(self) -> list[torch.Tensor]:
        """Every buffer whose rows are slots: what a move and a transfer must carry.

        Not refused while the pool is paused, because addresses and shapes are needed then too; the
        content must not be touched.
        """

    def copied_rows(self) -> Sequence[SlotRows]:
        """What a host copy holds, in this order: everything that a slot's token is made of."""
        return self.slot_buffers()

    def require_awake(self, operation: str) -> None:
        """Raise PausedPoolError if the memory of the pool was given back."""
        if self.memory_saver is not None and self.memory_saver.is_paused(KV_CACHE):
            raise PausedPoolError(
                f"{operation}: the memory of this {type(self).__name__} is given back; "
                f"expected resume({KV_CACHE!r}) of its saver first"
            )

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
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: the lengths differ.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("move_kv_cache")
        targets = self._rows_of("move_kv_cache", tgt_loc)
        sources = self._rows_of("move_kv_cache", src_loc)
        require_equal_lengths("move_kv_cache", targets=targets, sources=sources)
        self._move(targets, sources)

    def _rows_of(self, operation: str, indices: torch.Tensor) -> torch.Tensor:
        """The rows of `indices`, int64 `[n]`; the padding row for -1, which as a row would be the
        last live one.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
        """
        slots = as_index(operation, indices, self._resolved_device)
        names_none = require_within(operation, slots, self.rows)
        return slots.clamp(min=0) if names_none else slots

    def _move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy rows, as `_rows_of` names them, to others, in every buffer."""
        if self._slot_arrays is not None:
            self._slot_arrays.move(targets, sources)
            return
        for buffer in self.slot_buffers():
            # The right side is gathered whole before the first row is written.
            buffer[targets] = buffer[sources]

    def get_cpu_copy(self, indices: torch.Tensor) -> HostRows:
        """Copy the rows `indices` of every buffer to host memory; waits for the device.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("get_cpu_copy")
        return self._copied(self._rows_of("get_cpu_copy", indices))

    def _copied(self, rows: torch.Tensor) -> HostRows:
        """Host copies of rows, as `_rows_of` names them."""
        if self._copied_arrays is not None:
            return HostRows(rows.numel(), self._copied_arrays.gathered(rows))
        return HostRows(len(rows), tuple(buffer[rows].cpu() for buffer in self.copied_rows()))

    def load_cpu_copy(self, copy: HostRows, indices: torch.Tensor) -> None:
        """Write the rows of `copy` into the slots `indices`, the first row into the first slot.

        Raises:
            IndexTensorError, InvalidSlotError, GeometryError, PausedPoolError: see
                `check_host_copy`; nothing was written.
        """
        self._load(copy, self.check_host_copy(copy, indices))

    def _load(self, copy: HostRows, rows: torch.Tensor) -> None:
        """Write a checked copy into rows, as `_rows_of` names them."""
        if self._copied_arrays is not None and all(copied.is_cpu for copied in copy.buffers):
            self._copied_arrays.write(rows, copy.buffers)
            return
        for buffer, copied in zip(self.copied_rows(), copy.buffers, strict=True):
            buffer[rows] = copied.to(rows.device)

    def check_host_copy(self, copy: HostRows, indices: torch.Tensor) -> torch.Tensor:
        """The rows of `indices`, int64 `[n]`, if `copy` can be written there, or raise.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: another number of rows than slots, or a copy of a pool with other
                buffers.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("load_cpu_copy")
        slots = as_index("load_cpu_copy", indices, self._resolved_device)
        self.check_copy_fits(copy)
        if len(slots) != len(copy):
            raise GeometryError(f"load_cpu_copy: {len(slots)} slots for {len(copy)} copied rows")
        return self._rows_of("load_cpu_copy", slots)

    def check_copy_fits(self, copy: HostRows) -> None:
        """Raise GeometryError unless the rows of `copy` are rows of this pool's buffers."""
        if not isinstance(copy, HostRows):
            raise GeometryError(
                f"load_cpu_copy: a {type(copy).__name__}; {type(self).__name__} restores HostRows"
            )
        own, count = self._row_kinds, len(copy)
        fits = len(own) == len(copy.buffers) and all(
            rows.dtype == kind.dtype and rows.shape == (count, *kind.shape)
            for rows, kind in zip(copy.buffers, own, strict=True)
        )
        if not fits:
            given = [_RowKind(rows.shape[1:], rows.dtype) for rows in copy.buffers]
            raise GeometryError(
                f"load_cpu_copy: a copy with buffers {_summary(given)};"
                f" this pool has {_summary(own)}"
            )

    @cached_property
    def _row_kinds(self) -> list[_RowKind]:
        """What a row of each of `copied_rows` is."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._resolved_device)
        every = self.copied_rows()
        rows = (each if isinstance(each, torch.Tensor) else each[nothing] for each in every)
        return [_RowKind(each.shape[1:], each.dtype) for each in rows]

    @cached_property
    def _slot_arrays(self) -> HostRowArrays | None:
        """`slot_buffers` by numpy, where that can be."""
        return host_row_arrays(self.slot_buffers())

    @cached_property
    def _copied_arrays(self) -> HostRowArrays | None:
        """`copied_rows` by numpy, where that can be."""
        return host_row_arrays(self.copied_rows())

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Address, bytes, and bytes a page of every buffer, keys first."""
        buffers = self.slot_buffers()
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes * self.page_size for buffer in buffers],
        )

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new buffer of zeros. Every buffer of every pool comes from here."""
        if self.memory_saver is None:
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        with self.memory_saver.region(KV_CACHE) as region:
            return region.zeros(shape, dtype, self.device)

    def _stored(
        self,
        what: str,
        rows: torch.Tensor,
        shape: tuple[int, ...],
        scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """`rows` as the buffers keep them: `shape` in storage dtype; `what` as in `shaped`.

        Raises:
            IndexTensorError, GeometryError: see `shaped` and `scaled`.
        """
        rows = shaped(what, rows, shape, self._resolved_device)
        if rows.dtype != self.dtype:
            # Not in place: the tensor is the caller's.
            rows = rows if scale is None else scaled(what, rows, scale)
            rows = rows.to(self.dtype)
        return rows.view(self.store_dtype)

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


def _summary(buffers: Sequence[_RowKind]) -> str:
    """Number, row shape and dtype of buffers, for a message."""
    if not buffers:
        return "0 x nothing"
    kinds = sorted({f"{list(kind.shape)} {kind.dtype}" for kind in buffers})
    return f"{len(buffers)} x {' or '.join(kinds)}"

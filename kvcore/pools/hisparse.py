"""The pools of device rows under HiSparse allocators: few latent rows, addressed through the
mapping that the allocator owns and hands over by `register_mapping`.

Left out: index keys, which stay whole on the device (`kvcore.pools.dsa`, `index_buf_size`), and
copying rows between the device and a host pool while a model runs.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from kvcore.allocator.arguments import as_index, as_locations
from kvcore.allocator.hisparse import COMPRESS_RATIO
from kvcore.errors import GeometryError, IndexTensorError, MappingError
from kvcore.pools.arguments import as_count, require_within
from kvcore.pools.base import HostRows
from kvcore.pools.host_arrays import paired_moves, picked
from kvcore.pools.mla import MLATokenToKVPool
from kvcore.saver import MemorySaver


@dataclass(frozen=True, slots=True)
class DeviceRows(HostRows):
    """Host copy of locations of which some had a device slot: `had_slot`, bool `[count]`.

    The rows of the others say nothing.
    """

    had_slot: torch.Tensor


class DeviceRowsPool(MLATokenToKVPool):
    """An MLA pool whose callers name *locations*; a mapping says which device slot each one has.

    `size` and `page_size` are those of the device side, and so are the buffers, their addresses and
    transfer tables. Calls that read, write, move or copy tokens take locations. A location without
    a device slot, and -1, has no row: it is read from and written to the padding row, and moves
    and restores leave it out, so that no row of another token is touched.
    """

    compress_ratio: int
    """Logical tokens that one location stands for."""

    full_to_hisparse_device_index_mapping: torch.Tensor | None = None
    """The device slot of each location, 0 for none; the allocator's own tensor."""

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        """Take the allocator's mapping: the same tensor, not a copy, so that both see every write.

        Its length is the allocator's business: a resized allocator registers another one.

        Raises:
            IndexTensorError: not a one-dimensional int64 tensor on the pool's device.
        """
        mapping = full_to_hisparse_device_index_mapping
        as_index("register_mapping", mapping, self._resolved_device)
        if mapping.dtype != torch.int64:
            raise IndexTensorError(f"register_mapping: dtype {mapping.dtype}; expected int64")
        self.full_to_hisparse_device_index_mapping = mapping

    @abstractmethod
    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The locations that full slots have, int64, in the same order."""

    def translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        """The device slots of locations, int64 of the same shape: 0 where there is none, -1 for -1.

        Raises:
            MappingError: no mapping was registered yet.
            IndexTensorError: not integers on the pool's device.
            InvalidSlotError: a location beyond the mapping, on a CPU.
        """
        operation = "translate_loc_to_hisparse_device"
        locations = as_locations(operation, compressed_indices, self._resolved_device)
        if self.full_to_hisparse_device_index_mapping is None:
            raise MappingError(
                f"{operation}: no mapping registered; build the allocator on this pool, or call"
                " register_mapping"
            )
        require_within(operation, locations, len(self.full_to_hisparse_device_index_mapping))
        # -1 reads the last element, the sentinel, which is -1 too.
        return self.full_to_hisparse_device_index_mapping[locations]

    def translate_loc_from_full_to_hisparse_device(
        self, full_indices: torch.Tensor
    ) -> torch.Tensor:
        """`translate_loc_to_hisparse_device` of the locations that full slots have."""
        return self.translate_loc_to_hisparse_device(
            self.translate_loc_from_full_to_compressed(full_indices)
        )

    def get_cpu_copy(self, indices: torch.Tensor) -> DeviceRows:
        """Copy the rows of the locations `indices` to host memory; waits for the device.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a location beyond the mapping, on a CPU.
            MappingError: no mapping was registered yet.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("get_cpu_copy")
        rows = self._rows_of("get_cpu_copy", indices)
        copy = self._copied(rows)
        return DeviceRows(copy.count, copy.buffers, had_slot=(rows > 0).cpu())

    def load_cpu_copy(self, copy: HostRows, indices: torch.Tensor) -> None:
        """Write `copy` to the locations `indices`, where old and new ones have device slots.

        Raises:
            IndexTensorError, InvalidSlotError, GeometryError, PausedPoolError: see
                `SlotPool.check_host_copy`; nothing was written.
            MappingError: no mapping was registered yet.
        """
        if not isinstance(copy, DeviceRows):
            raise GeometryError(
                f"load_cpu_copy: a {type(copy).__name__}; {type(self).__name__} restores DeviceRows"
            )
        rows = self.check_host_copy(copy, indices).cpu()
        both = copy.had_slot & (rows > 0)
        self._load(copy.select(both), picked(rows, both).to(self._resolved_device))

    def _move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy rows to others where both are device slots."""
        super()._move(*paired_moves(targets, sources))

    def _rows_of(self, operation: str, indices: torch.Tensor) -> torch.Tensor:
        """The row of each location; the padding row where it has none.

        Index -1 translates to -1, which as a row would be the last live one.
        """
        locations = as_index(operation, indices, self._resolved_device)
        return self.translate_loc_to_hisparse_device(locations).clamp(min=0)


class HiSparseKVPool(DeviceRowsPool):
    """Device rows under `HiSparseTokenToKVPoolAllocator`: locations are logical slots.

    Arguments and errors as in `MLATokenToKVPool`, for the device side, and besides:

    Args:
        host_to_device_ratio: logical slots for each device slot, as the allocator is given it;
            `logical_size` follows from it.

    Raises:
        GeometryError: a ratio below 1.
    """

    compress_ratio = 1

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        host_to_device_ratio: int = 2,
        memory_saver: MemorySaver | None = None,
    ) -> None:
        host_to_device_ratio = as_count(
            "HiSparseKVPool", "host_to_device_ratio", host_to_device_ratio
        )
        if host_to_device_ratio < 1:
            raise GeometryError(
                f"HiSparseKVPool: host_to_device_ratio {host_to_device_ratio}; expected at least 1"
            )
        super().__init__(
            size,
            page_size,
            dtype,
            kv_lora_rank,
            qk_rope_head_dim,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
            memory_saver=memory_saver,
        )
        self.logical_size = self.size * host_to_device_ratio
        """Logical slots: what an index-K cache beside this pool must have keys for."""

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The slots themselves, int64 of the same shape: every token has a location."""
        operation = "translate_loc_from_full_to_compressed"
        return as_locations(operation, full_indices, self._resolved_device)


class CompressedKVPool(DeviceRowsPool):
    """Device rows under `CompressedHiSparseTokenToKVPoolAllocator`: one for every 4 tokens.

    Locations are entries. A full slot s has one if `(s + 1) % 4 == 0`: then 4 tokens are complete,
    and the entry is `s // 4`. That rule is the layout of these rows, so it is written here, and the
    allocator asks for it.

    Arguments and errors as in `MLATokenToKVPool`, for the device side: `page_size` is a quarter of
    the logical one.
    """

    compress_ratio = COMPRESS_RATIO

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The entries that the slots `full_indices` (`[n]`) complete, int64 `[at most n]`.

        How many those are is known to the device only, so this waits for it.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
        """
        operation = "translate_loc_from_full_to_compressed"
        slots = as_index(operation, full_indices, self._resolved_device)
        return slots[(slots + 1) % self.compress_ratio == 0] // self.compress_ratio

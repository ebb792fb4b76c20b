"""Makes the contract-breaking calls of `kvcore.models.hostile` on kvcore's own allocators.

Each call is prepared first (names resolved to slots, tensors built) and then handed back as one
callable, so that only the allocator's own error counts as its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    CompressedHiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    RetractionBackup,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.models import Geometry
from kvcore.targets.dialect import as_tensor
from kvcore.targets.memory import SaverProbe
from kvcore.targets.pool import FULL_LAYER, SWA_LAYER, Pool

Call = Callable[[], object]

Hybrid = SWATokenToKVPoolAllocator | CompressedHiSparseTokenToKVPoolAllocator
OnePool = SinglePoolAllocator | PureSWATokenToKVPoolAllocator | HiSparseTokenToKVPoolAllocator


class HostileCaller(Protocol):
    """Whoever can make hostile calls on an allocator."""

    def prepare(
        self,
        call: str,
        *,
        rows: Mapping[int, list[int]],
        ghost: list[int],
        backup: tuple[int, Any] | None,
        seq: int,
        other: int,
    ) -> Call:
        """The call named ``call``, ready to be made. ``rows``: slots of live sequences; ``ghost``:
        the slots that ``seq`` gave up last; ``backup``: (tokens, host copy) named ``seq``."""
        ...


@dataclass(slots=True)
class CoreHostility:
    """Hostile calls on a kvcore allocator, its pool, and the memory saver if there is one."""

    allocator: BaseTokenToKVPoolAllocator
    pool: Pool
    geometry: Geometry
    device: torch.device
    memory: SaverProbe | None = None

    def prepare(
        self,
        call: str,
        *,
        rows: Mapping[int, list[int]],
        ghost: list[int],
        backup: tuple[int, Any] | None,
        seq: int,
        other: int,
    ) -> Call:
        """See `HostileCaller.prepare`."""
        row, second = rows.get(seq, []), rows.get(other, [])
        match call:
            case "free_again" | "free_pending":
                return self._free(ghost)
            case "free_slot_twice":
                return self._free([row[0], row[0]])
            case "free_padding":
                return self._free([0])
            case "free_negative":
                return self._free([-1])
            case "free_beyond":
                return self._free([self.geometry.full_size + self.geometry.page_size])
            case "free_float":
                return lambda: self.allocator.free(torch.tensor(row, dtype=torch.float32))
            case "free_two_dims":
                return lambda: self.allocator.free(self._slots(row).view(1, -1))
            case "free_other_device":
                return lambda: self.allocator.free(self._slots(row).to("meta"))
            case "segment_misaligned":
                return lambda: self.allocator.free_segment(self._slots(row), start_pos=1)
            case "begin_nested":
                return self.allocator.free_group_begin
            case "end_unopened":
                return self.allocator.free_group_end
            case "restore_short":
                return self._restore_short(backup)
            case _:
                paused = self._paused(call, backup)
                return paused or self._lending(call) or self._mapping(call, row, second, ghost)

    def _paused(self, call: str, backup: tuple[int, Any] | None) -> Call | None:
        """Calls on memory that is paused."""
        pool = self.pool
        layer = SWA_LAYER if self.geometry.pure_swa else FULL_LAYER
        match call:
            case "read_paused":
                return lambda: pool.get_kv_buffer(layer)
            case "write_paused":
                row = torch.zeros((1, 1, 1), dtype=torch.int64, device=self.device)
                return lambda: pool.set_kv_buffer(layer, self._slots([1]), row, row)
            case "copy_paused":
                return lambda: pool.get_cpu_copy(self._slots([1]))
            case "move_paused":
                return lambda: pool.move_kv_cache(self._slots([1]), self._slots([1]))
            case "reserve_paused":
                if self.memory is None:
                    raise KeyError("reserve_paused needs a memory saver")
                memory = self.memory
                return lambda: memory.reserve(-1, "kv_cache", 1)
            case _:
                return None

    def _lending(self, call: str) -> Call | None:
        size = self.geometry.page_size
        match call:
            case "alloc_unaligned":
                return lambda: self.allocator.alloc(size + 1)
            case "alloc_negative":
                return lambda: self.allocator.alloc(-size)
            case "extend_short_batch":
                return lambda: self._extend([0, 0], [1, 1], [-1], 2)
            case "extend_wrong_total":
                return lambda: self._extend([0], [2], [-1], 1)
            case _:
                return None

    def _mapping(self, call: str, row: list[int], second: list[int], ghost: list[int]) -> Call:
        size = self.geometry.page_size
        resize = self._resize
        if call == "resize_negative":
            return resize
        hybrid = self._hybrid()
        match call:
            case "free_swa_padding":
                return lambda: hybrid.free_swa(self._slots([0]))
            case "free_swa_negative":
                return lambda: hybrid.free_swa(self._slots([-1]))
            case "free_full_live":
                return lambda: hybrid.free_full(self._slots(row[:size]))
            case "map_over_live":
                peers = hybrid.translate_loc_from_full_to_swa(self._slots(second[:1]))
                return lambda: hybrid.set_full_to_swa_mapping(self._slots(row[:1]), peers)
            case "map_negative":
                peers = hybrid.translate_loc_from_full_to_swa(self._slots(row[:1]))
                return lambda: hybrid.set_full_to_swa_mapping(self._slots([-1]), peers)
            case "clear_negative":
                return lambda: hybrid.clear_full_to_swa_mapping(self._slots([-1]))
            case "map_pending":
                peers = hybrid.translate_loc_from_full_to_swa(self._slots(second[:1]))
                return lambda: hybrid.set_full_to_swa_mapping(self._slots(ghost[:1]), peers)
            case "recover_live" | "recover_dead":
                count = min(size, len(row), len(second))
                kept, incoming = self._slots(row[:count]), self._slots(second[:count])
                return lambda: hybrid.recover_tombstone(kept, incoming)
            case "decode_dead_page":
                return lambda: self._decode(len(row) + 1, row[-1])
            case "tail_misaligned":
                return lambda: self._tail(size + 1, 2)
            case _:
                raise KeyError(call)

    def _hybrid(self) -> Hybrid:
        if not isinstance(self.allocator, Hybrid):
            raise TypeError("only a hybrid allocator has a mapping")
        return self.allocator

    def _slots(self, slots: list[int]) -> torch.Tensor:
        return as_tensor(slots, self.device)

    def _free(self, slots: list[int]) -> Call:
        return lambda: self.allocator.free(self._slots(slots))

    def _restore_short(self, backup: tuple[int, RetractionBackup[Any]] | None) -> Call:
        if backup is None:
            raise KeyError("restore_short needs a backup")
        tokens, copy = backup
        return lambda: copy.restore(self.pool, self._slots([1] * (tokens - 1)))

    def _resize(self) -> None:
        if isinstance(self.allocator, Hybrid):
            self.allocator.resize(size=-1, size_swa=self.geometry.swa_size)
        elif isinstance(self.allocator, OnePool):
            self.allocator.resize(size=-1)

    def _extend(self, before: list[int], after: list[int], last: list[int], total: int) -> None:
        prefix, seq = torch.tensor(before), torch.tensor(after)
        self.allocator.alloc_extend(
            prefix.to(self.device), prefix, seq.to(self.device), seq, self._slots(last), total
        )

    def _decode(self, after: int, last: int) -> None:
        seq = torch.tensor([after])
        self.allocator.alloc_decode(seq.to(self.device), seq, self._slots([last]))

    def _tail(self, tokens: int, tail: int) -> None:
        zero, seq = torch.tensor([0]), torch.tensor([tokens])
        self._hybrid().alloc_extend_swa_tail(
            zero.to(self.device), zero, seq.to(self.device), seq, self._slots([-1]), tokens, tail
        )

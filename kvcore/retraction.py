"""A running request loses its slots and later gets others: its KV waits in host memory meanwhile,
copied and loaded in chunks, for every kind of pool and of allocator.

Left out: choosing which request is retracted; prefixes that a cache shares, since a request that is
retracted owns its whole row; and HiSparse allocators, whose callers hold most of the KV already.
"""

from collections.abc import Sized
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from kvcore.allocator import (
    BaseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator.arguments import as_index
from kvcore.allocator.device_side import DeviceSideAllocator
from kvcore.errors import DoubleFreeError, GeometryError, IndexTensorError, InvalidSlotError
from kvcore.pools.arguments import as_count
from kvcore.requests import ReqToTokenPool, RowHolder

CopyT = TypeVar("CopyT", bound=Sized)


class HostCopying(Protocol[CopyT]):
    """A pool that copies slots to host memory and back; every pool kind does (sglang#33385)."""

    def get_cpu_copy(self, indices: torch.Tensor) -> CopyT:
        """Copy everything that the slots `indices` hold; its length is their number."""

    def load_cpu_copy(self, copy: CopyT, indices: torch.Tensor) -> None:
        """Write a copy into the slots `indices`, or raise before anything is written."""


@dataclass(frozen=True, slots=True)
class RowChunks(Generic[CopyT]):
    """The host copies of consecutive pieces of one row."""

    chunks: tuple[CopyT, ...]

    def __len__(self) -> int:
        """Tokens of all pieces."""
        return sum(len(chunk) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RetractionBackup(Generic[CopyT]):
    """The KV of one request, in the order of its row, bit for bit.

    `cpu_tensors` is what the pool's `get_cpu_copy` gives for the row, or `RowChunks` of what it
    gives for the row's pieces: everything that every layer of every kind holds. It is owned: the
    slots may be freed, lent again and overwritten meanwhile.

    `swa_evicted_seqlen` says how far the window had moved when the copy was taken: of that many
    tokens at the front there is no SWA part.
    """

    cpu_tensors: CopyT | RowChunks[CopyT]
    swa_evicted_seqlen: int = 0

    def __len__(self) -> int:
        """How many tokens were copied."""
        return len(self.cpu_tensors)

    @property
    def chunks(self) -> tuple[CopyT, ...]:
        """The copies of the row's pieces, in order; a row copied whole is one piece."""
        if isinstance(self.cpu_tensors, RowChunks):
            return self.cpu_tensors.chunks
        return (self.cpu_tensors,)

    @classmethod
    def take(
        cls,
        pool: HostCopying[CopyT],
        indices: torch.Tensor,
        *,
        chunk_tokens: int | None = None,
        swa_evicted_seqlen: int = 0,
    ) -> "RetractionBackup[CopyT]":
        """Copy the slots `indices` (`[n]`, row order), still lent, out of `pool`.

        Args:
            pool: where the slots are.
            indices: the row, or its part that holds slots.
            chunk_tokens: how many tokens are copied at once, whole pages; None copies all at once.
            swa_evicted_seqlen: see the class.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            GeometryError: chunks of less than one token.
        """
        slots = as_index("RetractionBackup.take", indices, _device_of(indices))
        if chunk_tokens is not None:
            chunk_tokens = as_count("RetractionBackup.take", "chunk_tokens", chunk_tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise GeometryError(
                f"RetractionBackup.take: expected chunk_tokens >= 1, got {chunk_tokens}"
            )
        # A row without tokens is copied too, so that a pool without the call shows at once.
        if chunk_tokens is None or slots.numel() <= chunk_tokens:
            pieces: tuple[torch.Tensor, ...] = (slots,)
        else:
            pieces = slots.split(chunk_tokens)
        copies = tuple(pool.get_cpu_copy(piece) for piece in pieces)
        return cls(copies[0] if chunk_tokens is None else RowChunks(copies), swa_evicted_seqlen)

    def restore(self, pool: HostCopying[CopyT], indices: torch.Tensor) -> None:
        """Write the KV into the slots `indices`, the first token into the first slot.

        In a hybrid pool an SWA row comes back where the old slot had a peer and the new one has.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            GeometryError: another number of slots than tokens, or a pool of another shape. In both
                cases nothing was written.
        """
        slots = as_index("RetractionBackup.restore", indices, _device_of(indices))
        if len(slots) != len(self):
            raise GeometryError(
                f"RetractionBackup.restore: {len(slots)} slots for {len(self)} copied tokens"
            )
        chunks = self.chunks
        if len(chunks) == 1:
            pool.load_cpu_copy(chunks[0], slots)
            return
        start = 0
        for chunk in chunks:
            pool.load_cpu_copy(chunk, slots[start : start + len(chunk)])
            start += len(chunk)


def _device_of(indices: torch.Tensor) -> torch.device:
    """The device that a tensor is on; which one it must be on, the pool knows."""
    if not isinstance(indices, torch.Tensor):
        raise IndexTensorError(f"expected an index tensor, got {type(indices).__name__}")
    return indices.device


class Request(RowHolder, Protocol):
    """What `Retraction` reads and writes of a request."""

    kv_len: int
    """Tokens in its row."""

    swa_evicted_seqlen: int
    """Tokens at the front whose SWA part is gone: whole pages, 0 where nothing slides. It stays as
    it is while the request is retracted."""

    retraction: RetractionBackup[Any] | None
    """The backup of a retracted request, None of a running one."""


class Retraction:
    """Moves requests out of the pool under memory pressure, and back in.

    What `restore` takes and brings back, by kind of allocator:

    - one pool: slots for every token;
    - full and SWA sides: full slots for every token, SWA slots for the tokens in the window, that
      is from `swa_evicted_seqlen` on. Their SWA rows come back where the old slot had a peer;
    - one pool in which every layer slides: slots for the tokens in the window only. Those before
      gave theirs back when they left it, so there is nothing to copy, to free or to bring back; in
      the restored row they name the padding slot.

    Args:
        allocator: lends the slots; its pool holds the KV.
        req_to_token_pool: the rows, on the same device.
        chunk_tokens: tokens copied at once, rounded down to whole pages, but at least one page:
            what the copy needs on the device beside the pool.

    Raises:
        GeometryError: chunks of less than a token, an allocator without a pool or one whose slots
            need no row in it (HiSparse), or a table on another device.
    """

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        req_to_token_pool: ReqToTokenPool,
        *,
        chunk_tokens: int = 8192,
    ) -> None:
        chunk_tokens = as_count("Retraction", "chunk_tokens", chunk_tokens)
        if chunk_tokens < 1:
            raise GeometryError(f"Retraction: expected chunk_tokens >= 1, got {chunk_tokens}")
        pool = allocator.get_kvcache()
        if pool is None or isinstance(allocator, DeviceSideAllocator):
            raise GeometryError(
                f"Retraction: a {type(allocator).__name__} on a {type(pool).__name__}; expected an "
                "allocator built on a pool that holds the KV of every slot"
            )
        devices = [
            torch.empty(0, device=each.device).device for each in (allocator, req_to_token_pool)
        ]
        if devices[0] != devices[1]:
            raise GeometryError(
                f"Retraction: allocator on {devices[0]}, rows on {devices[1]}; expected one device"
            )
        self._on_cpu = devices[0].type == "cpu"
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.chunk_tokens = max(chunk_tokens // allocator.page_size, 1) * allocator.page_size

    def retract(self, request: Request) -> None:
        """Copy the KV of `request` to the host, then take its slots and its row from it.

        In an open free group its slots become available at the end.

        Raises:
            DoubleFreeError: the request holds no row, so it is not running.
            InvalidSlotError: it has a backup already, or its row is not lent.
            GeometryError: a length or a window that no row can have.
            Exception: what the pool raises when it cannot be read, for instance PausedPoolError.
                In all cases the request still runs, and nothing was freed.
        """
        slots = self._held_slots(request)
        backup = self._copy(slots, request.swa_evicted_seqlen)
        self._return_slots(slots)
        self.req_to_token_pool.free(request)
        request.retraction = backup

    def restore(self, request: Request) -> bool:
        """Give `request` a row and slots again, and its KV in them.

        Returns:
            False if there is no row, or too few slots on one of the sides; nothing changed then.

        Raises:
            InvalidSlotError: the request is not retracted.
            GeometryError: its length or its window is not that of its backup.
            Exception: what the pool raises when it cannot be written. In all cases slots and row
                were given back (in an open free group: to be available at its end), and the
                request is still retracted: the call may be repeated.
        """
        backup = self._backup_of(request)
        with ExitStack() as undo:
            rows = self.req_to_token_pool.alloc([request])
            if rows is None:
                return False
            undo.callback(self.req_to_token_pool.free, request)
            slots = self._lend_slots(request)
            if slots is None:
                return False
            undo.callback(self._return_slots, slots)
            self._load(backup, slots)
            self._write_row(rows[0], self._first_held(request), slots)
            undo.pop_all()
        request.retraction = None
        return True

    # -- what is checked -----------------------------------------------------------------------

    def _held_slots(self, request: Request) -> torch.Tensor:
        """The slots of a running request: int64 `[kv_len - first held]`."""
        if request.req_pool_idx is None:
            raise DoubleFreeError("retract: a request without a row; expected a running one")
        if request.retraction is not None:
            raise InvalidSlotError(
                f"retract: the request in row {request.req_pool_idx} has a backup; expected none, "
                "it would be lost"
            )
        self._require_window("retract", request)
        row = self.req_to_token_pool.row(request.req_pool_idx, request.kv_len)
        return row[self._first_held(request) :]

    def _backup_of(self, request: Request) -> RetractionBackup[Any]:
        backup = request.retraction
        if backup is None or request.req_pool_idx is not None:
            raise InvalidSlotError(
                f"restore: a request in row {request.req_pool_idx} with "
                f"{'no' if backup is None else 'a'} backup; expected a retracted one, without a "
                "row and with a backup"
            )
        self._require_window("restore", request)
        held = request.kv_len - self._first_held(request)
        if held != len(backup) or request.swa_evicted_seqlen != backup.swa_evicted_seqlen:
            raise GeometryError(
                f"restore: {held} tokens, SWA part from token {request.swa_evicted_seqlen}; the "
                f"backup holds {len(backup)}, from {backup.swa_evicted_seqlen}"
            )
        return backup

    def _require_window(self, operation: str, request: Request) -> None:
        length = as_count(operation, "kv_len", request.kv_len)
        evicted = as_count(operation, "swa_evicted_seqlen", request.swa_evicted_seqlen)
        longest = self.req_to_token_pool.max_context_len
        if not 0 <= evicted <= length <= longest or evicted % self.allocator.page_size != 0:
            raise GeometryError(
                f"{operation}: kv_len {length}, swa_evicted_seqlen {evicted}; expected whole pages "
                f"of {self.allocator.page_size} within a row of at most {longest} tokens"
            )
        if evicted > 0 and not self._has_window():
            raise GeometryError(
                f"{operation}: swa_evicted_seqlen {evicted}; expected 0 with an allocator in which "
                "nothing slides"
            )

    # -- what differs between allocators -------------------------------------------------------

    def _has_window(self) -> bool:
        return isinstance(self.allocator, SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator)

    def _first_held(self, request: Request) -> int:
        """How many tokens at the front hold no slot any more."""
        every_layer_slides = isinstance(self.allocator, PureSWATokenToKVPoolAllocator)
        return request.swa_evicted_seqlen if every_layer_slides else 0

    def _lend_slots(self, request: Request) -> torch.Tensor | None:
        """Slots for the tokens from the first held one on: int64, or None."""
        first = self._first_held(request)
        in_window = request.kv_len - request.swa_evicted_seqlen
        # A row begins on a page boundary, and what is left out of it is whole pages.
        num_tokens = request.kv_len - first
        none_cpu, all_cpu, no_slot = torch.tensor([[0], [num_tokens], [-1]]).unbind()
        none, every = none_cpu, all_cpu
        if not self._on_cpu:
            device = self.req_to_token_pool.device
            none, every, no_slot = (each.to(device) for each in (none, every, no_slot))
        batch = (none, none_cpu, every, all_cpu, no_slot, num_tokens)
        if in_window < num_tokens and isinstance(self.allocator, SWATokenToKVPoolAllocator):
            return self.allocator.alloc_extend_swa_tail(*batch, in_window)
        return self.allocator.alloc_extend(*batch)

    # -- the steps -----------------------------------------------------------------------------

    def _copy(self, slots: torch.Tensor, swa_evicted_seqlen: int) -> RetractionBackup[Any]:
        return RetractionBackup.take(
            self.allocator.get_kvcache(),
            slots,
            chunk_tokens=self.chunk_tokens,
            swa_evicted_seqlen=swa_evicted_seqlen,
        )

    def _load(self, backup: RetractionBackup[Any], slots: torch.Tensor) -> None:
        backup.restore(self.allocator.get_kvcache(), slots)

    def _return_slots(self, slots: torch.Tensor) -> None:
        """Free the slots, and the peers that are left of them."""
        self.allocator.free(slots)

    def _write_row(self, row: int, first_held: int, slots: torch.Tensor) -> None:
        """Write the slots into the row; tokens before the first held one name the padding slot."""
        whole = torch.nn.functional.pad(slots, (first_held, 0)) if first_held else slots
        self.req_to_token_pool.write((row, slice(0, len(whole))), whole)

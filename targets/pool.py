"""The pool under a target: one layer of each kind, whose rows hold the stamps.

Small int64 pools, so that a stamp is exact; index-K keeps bytes, of which a token's stamp takes the
first four of its key and the four of its scale. Leaves out fp8 storage: a stamp would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore import (
    CompressedKVPool,
    DSATokenToKVPool,
    HiSparseKVPool,
    HostMemorySaver,
    MemorySaver,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NoMemorySaver,
    RetractionBackup,
    SWAKVPool,
)
from kvcore.models import Geometry
from kvcore.pools import SlotPool
from kvcore.targets.host_arrays import Numbers, SharedArray
from kvcore.targets.protocol import Side, Stream

FULL_LAYER = 0
SWA_LAYER = 1
INDEX_HEAD_DIM = 128
"""The narrowest index-K that has a scale."""

LATENT: dict[str, Any] = {"kv_lora_rank": 1, "qk_rope_head_dim": 1}
"""The narrowest latent row that has both parts."""

Pool = SlotPool | SWAKVPool


@dataclass(frozen=True, slots=True)
class PoolParts:
    """The classes that a pool is built from; a faulty variant replaces one or two."""

    hybrid: Callable[..., SWAKVPool] = SWAKVPool
    mha: Callable[..., SlotPool] = MHATokenToKVPool
    mla: Callable[..., SlotPool] = MLATokenToKVPool
    dsa: Callable[..., SlotPool] = DSATokenToKVPool
    saver: Callable[[], MemorySaver] = HostMemorySaver

    def layers(self, geometry: Geometry) -> tuple[Callable[..., SlotPool], dict[str, Any]]:
        """The class of a pool of this kind of attention, and its dimensions: as narrow as can
        be."""
        match geometry.attention:
            case "mha":
                return self.mha, {"head_num": 1, "head_dim": 1}
            case "mla":
                return self.mla, LATENT
            case "dsa":
                return self.dsa, {**LATENT, "index_head_dim": INDEX_HEAD_DIM, "kv_cache_dim": 2}


def build_pool(
    geometry: Geometry,
    parts: PoolParts | None = None,
    device: str = "cpu",
    *,
    saver: MemorySaver | None = None,
) -> Pool:
    """An int64 pool of ``geometry`` with one layer a kind; with ``saver`` under that saver."""
    parts = parts or PoolParts()
    kind, sizes = parts.layers(geometry)
    shared: dict[str, Any] = {
        "page_size": geometry.page_size,
        "dtype": torch.int64,
        "device": device,
        "enable_memory_saver": saver is not None,
        "memory_saver": saver if saver is not None else NoMemorySaver(),
    }
    if geometry.sparse and geometry.compress == 1:
        ratio = geometry.full_pages // geometry.device_pages
        return HiSparseKVPool(
            geometry.device_size, layer_num=1, host_to_device_ratio=ratio, **LATENT, **shared
        )
    if not geometry.slides:
        return kind(geometry.full_size, layer_num=1, **sizes, **shared)
    swa_size = geometry.full_size if geometry.pure_swa else geometry.swa_size
    return parts.hybrid(
        geometry.full_size,
        swa_size,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[SWA_LAYER],
        full_attention_layer_ids=[] if geometry.pure_swa else [FULL_LAYER],
        full_kv_pool_class=kind,
        swa_kv_pool_class=kind,
        full_kv_pool_kwargs=sizes,
        swa_kv_pool_kwargs=sizes,
        **shared,
    )


def build_device_pool(
    geometry: Geometry, device: str = "cpu", *, saver: MemorySaver | None = None
) -> CompressedKVPool:
    """The pool of compressed entries under a hybrid one."""
    return CompressedKVPool(
        geometry.device_size,
        geometry.device_page_size,
        torch.int64,
        layer_num=1,
        device=device,
        enable_memory_saver=saver is not None,
        memory_saver=saver,
        **LATENT,
    )


class StampedPool:
    """Reads and writes stamps: in every stream a token's row holds the stamp or its negative.

    Slots and stamps are given on the host. On a CPU they are written through arrays over the
    buffers, each made once: buffers stay where they are, which law saver judges."""

    def __init__(self, pool: Pool, device_pool: CompressedKVPool | None = None) -> None:
        self._pool = pool
        parts = list(_streams(pool))
        if device_pool is not None:
            parts += _latent_streams(device_pool, "device")
            self._device_pool: CompressedKVPool | HiSparseKVPool | None = device_pool
        else:
            self._device_pool = pool if isinstance(pool, HiSparseKVPool) else None
        self.streams = tuple(stream for stream, _ in parts)
        self._rows = tuple(rows for _, rows in parts)
        self.device = self._rows[0].device
        on_cpu = self.device.type == "cpu"
        self._arrays = tuple(rows.numpy() for rows in self._rows) if on_cpu else ()
        self._arrays_of: dict[Side, list[tuple[NDArray[Any], int]]] = {
            side: [
                (rows, stream.sign)
                for stream, rows in zip(self.streams, self._arrays, strict=on_cpu)
                if stream.side == side
            ]
            for side in ("full", "SWA")
        }
        self._mapping = SharedArray()
        self._sides: tuple[Side, ...] = (
            ("full", "SWA") if isinstance(pool, SWAKVPool) else ("full",)
        )

    @property
    def kvcache(self) -> Pool:
        """The pool itself, as allocators and host copies take it."""
        return self._pool

    def contents(self) -> tuple[torch.Tensor, ...]:
        """Every stream's rows as a flat int64 tensor, in the order of `streams`."""
        return tuple(
            rows if rows.dtype == torch.int64 and rows.is_contiguous() else _flat(rows)
            for rows in self._rows
        )

    def content_lists(self) -> tuple[list[int], ...]:
        """`contents` as numbers, of a pool on a CPU."""
        # No generator, which is a call of its own for each array.
        lists: list[list[int]] = []
        for rows in self._arrays:
            lists.append(rows.tolist() if rows.ndim == 1 else rows.reshape(-1).tolist())
        return tuple(lists)

    def ranges(self) -> tuple[list[int], list[int]]:
        """Addresses and lengths in bytes of every buffer of the pool."""
        pool = self._pool
        parts = [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]
        if self._device_pool is not None and self._device_pool is not pool:
            parts.append(self._device_pool)
        addresses: list[int] = []
        lengths: list[int] = []
        for part in parts:
            infos = [part.get_contiguous_buf_infos()]
            if isinstance(part, DSATokenToKVPool):
                infos.append(part.get_state_buf_infos())
            for found, sizes, _ in infos:
                addresses += found
                lengths += sizes
        return addresses, lengths

    def stamp(self, slots: Numbers, stamps: Numbers) -> None:
        """Write stamps into the rows of full ``slots`` and of their peers, as attention kernels do:
        straight into the buffers, each layer kind by its own rows."""
        self._write(self._sides, slots, stamps)
        if self._device_pool is not None:
            self._stamp_device(self._device_pool, self._on_device(slots), self._on_device(stamps))

    def stamp_swa(self, slots: Numbers, stamps: Numbers) -> None:
        """Write stamps into the rows of the peers of full ``slots`` alone."""
        self._write(("SWA",), slots, stamps)

    def stamps_at(self, slots: Numbers, peers: Numbers) -> tuple[list[int], list[int]]:
        """What a hybrid pool's first full stream holds at full ``slots``, and its first SWA stream
        at their ``peers``, 0 where there is none."""
        sides = [stream.side for stream in self.streams]
        first = (sides.index("full"), sides.index("SWA"))
        if self._arrays:
            full, swa = (self._arrays[at] for at in first)
            return full[slots].tolist(), np.where(peers > 0, swa[peers], 0).tolist()
        rows, others = (self._rows[at] for at in first)
        named = self._on_device(peers)
        held = torch.where(named > 0, others[named], 0)
        return rows[self._on_device(slots)].tolist(), held.tolist()

    def _on_device(self, numbers: Numbers) -> torch.Tensor:
        tensor = torch.from_numpy(numbers)
        return tensor if self._arrays else tensor.to(self.device)

    def _write(self, sides: tuple[Side, ...], slots: Numbers, stamps: Numbers) -> None:
        if self._arrays:
            try:
                self._write_arrays(sides, slots, stamps)
            except IndexError:
                # A slot beyond a buffer: below, torch or the pool says so in its own words.
                pass
            else:
                return
        self._write_tensors(sides, self._on_device(slots), self._on_device(stamps))

    def _write_arrays(self, sides: tuple[Side, ...], slots: Numbers, stamps: Numbers) -> None:
        peers = slots
        if "SWA" in sides:
            # First: a slot beyond the mapping is refused before anything is written.
            assert isinstance(self._pool, SWAKVPool)
            peers = self._peers(self._pool.full_to_swa_index_mapping, slots)
        signed = {1: stamps, -1: -stamps}
        for side in sides:
            places = slots if side == "full" else peers
            for rows, sign in self._arrays_of[side]:
                written = signed[sign]
                if rows.ndim == 1:
                    rows[places] = written
                else:
                    rows[places // rows.shape[1], places % rows.shape[1]] = written

    def _peers(self, mapping: torch.Tensor | None, slots: Numbers) -> Numbers:
        """What `translate_loc_from_full_to_swa` of the pool answers.

        Raises:
            IndexError: the pool would raise.
        """
        # An index below -1 is refused by pools; to an array it is a place counted from the end.
        if mapping is None or min(slots.tolist(), default=0) < -1:
            raise IndexError("no peers")
        return self._mapping.over(mapping)[slots]

    def _write_tensors(
        self, sides: tuple[Side, ...], slots: torch.Tensor, stamps: torch.Tensor
    ) -> None:
        places: dict[Side, torch.Tensor] = {"full": slots}
        if "SWA" in sides:
            assert isinstance(self._pool, SWAKVPool)
            places["SWA"] = self._pool.translate_loc_from_full_to_swa(slots)
        values = {1: stamps, -1: -stamps}
        for stream, rows in zip(self.streams, self._rows, strict=True):
            if stream.side in sides:
                _put(rows, places[stream.side], values[stream.sign])

    def _stamp_device(
        self, pool: CompressedKVPool | HiSparseKVPool, slots: torch.Tensor, stamps: torch.Tensor
    ) -> None:
        """The device rows of the tokens that have one."""
        each = pool.compress_ratio
        entries = pool.translate_loc_from_full_to_compressed(slots)
        places = pool.translate_loc_to_hisparse_device(entries)
        own = stamps[(slots + 1) % each == 0]
        for stream, rows in zip(self.streams, self._rows, strict=True):
            if stream.side == "device":
                rows[places] = stream.sign * own

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """`move_kv_cache`."""
        self._pool.move_kv_cache(targets, sources)

    def backup(self, slots: torch.Tensor) -> RetractionBackup[Any]:
        """Host copy of the rows of ``slots``, every kind of layer."""
        return RetractionBackup.take(self._pool, slots)

    def restore(self, backup: RetractionBackup[Any], slots: torch.Tensor) -> None:
        """Write a host copy into ``slots``."""
        backup.restore(self._pool, slots)


Streams = list[tuple[Stream, torch.Tensor]]
"""Streams, each with its rows: a view of the buffer, `[slots]`, or `[pages, slots a page]` where
pages are rows of it."""


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1).to(torch.int64)


def _put(rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    if rows.dim() == 1:
        rows[slots] = values.to(rows.dtype)
    else:
        size = rows.shape[1]
        rows[slots // size, slots % size] = values.to(rows.dtype)


def _streams(pool: Pool) -> Streams:
    if not isinstance(pool, SWAKVPool):
        return _layer_streams(pool, "device" if isinstance(pool, HiSparseKVPool) else "full")
    if pool.full_kv_pool.layer_num == 0:
        # Every layer slides: the slots that are lent are those of the only pool there is.
        return _layer_streams(pool.swa_kv_pool, "full")
    return [*_layer_streams(pool.full_kv_pool, "full"), *_layer_streams(pool.swa_kv_pool, "SWA")]


def _layer_streams(pool: SlotPool, side: Side) -> Streams:
    """The streams of a pool of one layer."""
    if not isinstance(pool, MLATokenToKVPool):
        keys, values = pool.slot_buffers()
        return list(zip(_mha_streams(side), (keys.view(-1), values.view(-1)), strict=True))
    streams = _latent_streams(pool, side)
    return streams + (_index_streams(pool, side) if isinstance(pool, DSATokenToKVPool) else [])


@cache
def _mha_streams(side: Side) -> tuple[Stream, Stream]:
    return Stream(f"{side} K", side, 1), Stream(f"{side} V", side, -1)


def _latent_streams(pool: MLATokenToKVPool, side: Side) -> Streams:
    rows = pool.kv_buffer[0].view(-1, 2)
    return [
        (Stream(f"{side} latent", side, 1), rows[:, 0]),
        (Stream(f"{side} rope", side, -1), rows[:, 1]),
    ]


def _index_streams(pool: DSATokenToKVPool, side: Side) -> Streams:
    """A page is a row of words: first the keys of its tokens, then their scales."""
    words = pool.index_k_with_scale_buffer[0].view(torch.int32)
    size, key = pool.page_size, INDEX_HEAD_DIM // 4
    keys, scales = words[:, : size * key : key], words[:, size * key :]
    return [
        (Stream(f"{side} index-K", side, 1), keys),
        (Stream(f"{side} index-K scale", side, -1), scales),
    ]

"""The pool of models that mix full attention with sliding windows: one sub-pool for the layers of
each kind. Callers name full slots only; for a sliding-window layer they are translated through the
mapping, which the allocator owns and hands over by `register_mapping`.

Left out: building one from a description of the layers (`kvcore.pools.spec`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvcore.allocator.arguments import (
    as_index,
    as_locations,
    require_equal_lengths,
    resolved_device,
)
from kvcore.errors import GeometryError, IndexTensorError, MappingError
from kvcore.pools.arguments import Layer, layer_number, require_within
from kvcore.pools.base import BufferInfos, HostRows, SlotPool
from kvcore.pools.dsa import DSATokenToKVPool
from kvcore.pools.host_arrays import paired_moves, picked
from kvcore.pools.mha import MHATokenToKVPool
from kvcore.pools.mla import MLATokenToKVPool
from kvcore.pools.sub_pools import PoolClass, layer_table, require_heads, require_unchanged
from kvcore.saver import MemorySaver

PoolT = TypeVar("PoolT", bound=SlotPool)


@dataclass(frozen=True, slots=True)
class HybridRows:
    """Host copy of a hybrid pool: full rows of every slot, SWA rows of those that had a peer.

    `had_peer` is bool `[len(full)]` on the host; its true entries are the rows of `swa`, in order.
    """

    full: HostRows
    swa: HostRows
    had_peer: torch.Tensor

    def __len__(self) -> int:
        """How many full slots were copied."""
        return len(self.full)


class SWAKVPool:
    """Two pools behind one: full-attention layers and sliding-window layers, each of any kind.

    A full slot without a peer has no row in the SWA pool. It is never given one that another slot
    owns: its writes go to the padding row, and moves and restores leave it out.

    `head_num`, `head_dim` and the further keyword arguments describe a sub-pool, of MHA kind, that
    has no arguments of its own. `full_kv_pool_kwargs` and `swa_kv_pool_kwargs` describe one
    completely but for size, dtype, layers, page size and device, which are the hybrid pool's; they
    may name page size and device, as the field's callers do, but not change them. The memory saver
    too is one matter for all: on anywhere is on everywhere, because half a pool in the region would
    be given back by half (sglang#22807).

    Args:
        size: full slots that can be lent.
        size_swa: SWA slots that can be lent.
        page_size: slots a page, the same on both sides.
        dtype: what callers read and write, see `SlotPool`.
        head_num: heads of the full layers, and of the SWA layers unless `swa_head_num` is given.
        head_dim: the same for the width of a key.
        swa_attention_layer_ids: model numbers of the sliding-window layers, in order.
        full_attention_layer_ids: model numbers of the full-attention layers, in order.
        device: where both sub-pools live.
        token_to_kv_pool_class: the class of the sub-pools that are given none of their own.
        enable_memory_saver: see `SlotPool`.
        full_kv_pool_class: the class of the full layers' pool.
        swa_kv_pool_class: the class of the SWA layers' pool.
        full_kv_pool_kwargs: arguments of the full layers' pool.
        swa_kv_pool_kwargs: arguments of the SWA layers' pool.
        swa_head_num: heads of the SWA layers where they differ.
        swa_head_dim: width of a key of the SWA layers where it differs.
        swa_v_head_dim: width of a value of the SWA layers where it differs.
        memory_saver: see `SlotPool`.
        sub_pool_arguments: further arguments of the sub-pools that have none of their own, for
            instance `v_head_dim`.

    Raises:
        GeometryError: a layer named twice, arguments that contradict each other or reach no
            sub-pool, or what the sub-pools reject.
        PausedPoolError, SaverMemoryError, SaverUnavailableError: see `SlotPool`.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        swa_attention_layer_ids: Sequence[int],
        full_attention_layer_ids: Sequence[int],
        device: str | torch.device,
        token_to_kv_pool_class: PoolClass = MHATokenToKVPool,
        enable_memory_saver: bool = False,
        *,
        full_kv_pool_class: PoolClass | None = None,
        swa_kv_pool_class: PoolClass | None = None,
        full_kv_pool_kwargs: Mapping[str, Any] | None = None,
        swa_kv_pool_kwargs: Mapping[str, Any] | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        memory_saver: MemorySaver | None = None,
        **sub_pool_arguments: Any,
    ) -> None:
        self.size = size
        self.size_swa = size_swa
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.start_layer = 0
        self.layer_num = len(full_attention_layer_ids) + len(swa_attention_layer_ids)
        self.layers_mapping = layer_table(full_attention_layer_ids, swa_attention_layer_ids)
        """Model layer to (position in its sub-pool, whether it slides)."""

        explicit = [own for own in (full_kv_pool_kwargs, swa_kv_pool_kwargs) if own is not None]
        self.enable_memory_saver = any(
            (enable_memory_saver, *(own.get("enable_memory_saver", False) for own in explicit))
        )
        self.memory_saver = memory_saver
        """The saver of both sub-pools as it was given; each sub-pool names the one it uses."""
        sliding = {
            "head_num": swa_head_num,
            "head_dim": swa_head_dim,
            "v_head_dim": swa_v_head_dim,
        }
        sliding = {name: value for name, value in sliding.items() if value is not None}
        unused = dict(sliding) if swa_kv_pool_kwargs is not None else {}
        unused |= sub_pool_arguments if len(explicit) == 2 else {}
        if unused:
            raise GeometryError(
                f"SWAKVPool: arguments {sorted(unused)} reach no sub-pool; expected them in"
                " full_kv_pool_kwargs or swa_kv_pool_kwargs"
            )
        heads = {"head_num": head_num, "head_dim": head_dim, **sub_pool_arguments}
        self.full_kv_pool = self._sub_pool(
            full_kv_pool_class or token_to_kv_pool_class,
            full_kv_pool_kwargs,
            heads,
            {"size": size, "layer_num": len(full_attention_layer_ids)},
        )
        self.swa_kv_pool = self._sub_pool(
            swa_kv_pool_class or token_to_kv_pool_class,
            swa_kv_pool_kwargs,
            {**heads, **sliding},
            {"size": size_swa, "layer_num": len(swa_attention_layer_ids)},
        )
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self._resolved_device = resolved_device(device)

    def require_awake(self, operation: str) -> None:
        """Raise PausedPoolError if the memory of a sub-pool was given back."""
        self.full_kv_pool.require_awake(operation)
        self.swa_kv_pool.require_awake(operation)

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Take the allocator's mapping: the same tensor, not a copy, so that both see every write.

        Its length is the allocator's business: a resized allocator registers another one.

        Raises:
            IndexTensorError: not a one-dimensional int64 tensor on the pool's device.
        """
        mapping = full_to_swa_index_mapping
        as_index("register_mapping", mapping, self._resolved_device)
        if mapping.dtype != torch.int64:
            raise IndexTensorError(f"register_mapping: dtype {mapping.dtype}; expected int64")
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The peers of full slots, int64 of the same shape: 0 where there is none, -1 for -1.

        Raises:
            MappingError: no mapping was registered yet.
            IndexTensorError: not integers on the pool's device.
            InvalidSlotError: a slot beyond the mapping, on a CPU.
        """
        if self.full_to_swa_index_mapping is None:
            raise MappingError(
                "translate_loc_from_full_to_swa: no mapping registered; build the allocator on this"
                " pool, or call register_mapping"
            )
        operation = "translate_loc_from_full_to_swa"
        slots = as_locations(operation, kv_indices, self._resolved_device)
        num_entries = self.full_to_swa_index_mapping.numel()
        names_none = require_within(operation, slots, num_entries)
        if not names_none and slots.dim() == 1:
            return self.full_to_swa_index_mapping.index_select(0, slots)
        # -1 reads the last entry, the sentinel, which is -1 too.
        return self.full_to_swa_index_mapping[slots]

    def get_key_buffer(self, layer: Layer) -> torch.Tensor:
        """The keys of `layer`, rows of its own sub-pool: full slots or SWA slots."""
        pool, local, _ = self._place(layer)
        return pool.get_key_buffer(local)

    def get_value_buffer(self, layer: Layer) -> torch.Tensor:
        """The values of `layer`, rows of its own sub-pool: full slots or SWA slots."""
        pool, local, _ = self._place(layer)
        return pool.get_value_buffer(local)

    def get_kv_buffer(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `layer`, as `get_key_buffer` and `get_value_buffer` return them."""
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    def set_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write one row a token into the **full** slots `loc` of `layer`, of either kind.

        Arguments and errors as in the `set_kv_buffer` of the layer's sub-pool.
        """
        pool, local, slides = self._place(layer)
        rows = self._rows_to_write("set_kv_buffer", loc, slides)
        pool.set_kv_buffer(local, rows, cache_k, cache_v, k_scale, v_scale)

    def set_mla_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor | None,
    ) -> None:
        """Write the two parts of a row a token into the **full** slots `loc` of an MLA layer.

        Arguments and errors as in `MLATokenToKVPool.set_mla_kv_buffer`; a layer of another kind is
        a GeometryError.
        """
        pool, local, slides = self._place_of("set_mla_kv_buffer", layer, MLATokenToKVPool)
        rows = self._rows_to_write("set_mla_kv_buffer", loc, slides)
        pool.set_mla_kv_buffer(local, rows, cache_k_nope, cache_k_rope)

    def get_mla_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of the rows of the **full** slots `loc` of an MLA layer, copied.

        A slot without a peer reads the padding row of a layer that slides. Arguments and errors as
        in `MLATokenToKVPool.get_mla_kv_buffer`; a layer of another kind is a GeometryError.
        """
        pool, local, slides = self._place_of("get_mla_kv_buffer", layer, MLATokenToKVPool)
        rows = self._rows_to_write("get_mla_kv_buffer", loc, slides)
        return pool.get_mla_kv_buffer(local, rows, dst_dtype)

    def set_index_k_scale_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        index_k: torch.Tensor,
        index_k_scale: torch.Tensor,
    ) -> None:
        """Write an index key and its scale a token into the **full** slots `loc` of a DSA layer.

        Arguments and errors as in `DSATokenToKVPool.set_index_k_scale_buffer`; a layer of another
        kind is a GeometryError.
        """
        pool, local, slides = self._place_of("set_index_k_scale_buffer", layer, DSATokenToKVPool)
        rows = self._rows_to_write("set_index_k_scale_buffer", loc, slides)
        pool.set_index_k_scale_buffer(local, rows, index_k, index_k_scale)

    def get_index_k_with_scale_buffer(self, layer: Layer) -> torch.Tensor:
        """The index-K page rows of a DSA layer: pages of its own sub-pool, full or SWA pages.

        Errors as in the DSA pool; a layer of another kind is a GeometryError.
        """
        operation = "get_index_k_with_scale_buffer"
        pool, local, _ = self._place_of(operation, layer, DSATokenToKVPool)
        return pool.get_index_k_with_scale_buffer(local)

    def get_index_k_continuous(
        self, layer: Layer, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """Index keys of the first tokens of pages of the layer's own sub-pool.

        Arguments and errors as in the DSA pool; a layer of another kind is a GeometryError.
        """
        pool, local, _ = self._place_of("get_index_k_continuous", layer, DSATokenToKVPool)
        return pool.get_index_k_continuous(local, seq_len, page_indices)

    def get_index_k_scale_continuous(
        self, layer: Layer, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """The scales of the same tokens, as bytes; arguments and errors as for the keys."""
        pool, local, _ = self._place_of("get_index_k_scale_continuous", layer, DSATokenToKVPool)
        return pool.get_index_k_scale_continuous(local, seq_len, page_indices)

    def get_index_k_scale_buffer(
        self,
        layer: Layer,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index keys and scales of a batch, by pages of the layer's own sub-pool.

        Arguments and errors as in the DSA pool; a layer of another kind is a GeometryError.
        """
        operation = "get_index_k_scale_buffer"
        pool, local, _ = self._place_of(operation, layer, DSATokenToKVPool)
        return pool.get_index_k_scale_buffer(
            local, seq_len_tensor, page_indices, seq_len_sum, max_seq_len
        )

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the full slots `src_loc` to `tgt_loc`, and their SWA rows where both have a peer.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU; nothing was moved.
            GeometryError: the lengths differ.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("move_kv_cache")
        targets = as_index("move_kv_cache", tgt_loc, self._resolved_device)
        sources = as_index("move_kv_cache", src_loc, self._resolved_device)
        require_equal_lengths("move_kv_cache", targets=targets, sources=sources)
        swa_targets = self.translate_loc_from_full_to_swa(targets)
        swa_sources = self.translate_loc_from_full_to_swa(sources)
        swa_targets, swa_sources = paired_moves(swa_targets, swa_sources)
        for peers in (swa_targets, swa_sources):
            require_within("move_kv_cache", peers, self.swa_kv_pool.rows)
        self.full_kv_pool.move_kv_cache(targets, sources)
        self.swa_kv_pool.move_kv_cache(swa_targets, swa_sources)

    def get_cpu_copy(self, indices: torch.Tensor) -> HybridRows:
        """Copy full rows of every slot, and SWA rows of those with a peer; waits for the device.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            MappingError: no mapping was registered yet.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("get_cpu_copy")
        slots = as_index("get_cpu_copy", indices, self._resolved_device)
        peers = self.translate_loc_from_full_to_swa(slots)
        had_peer = self._rows_to_copy(peers)
        return HybridRows(
            full=self.full_kv_pool.get_cpu_copy(slots),
            swa=self.swa_kv_pool.get_cpu_copy(picked(peers, had_peer)),
            had_peer=had_peer.cpu(),
        )

    def load_cpu_copy(self, copy: HybridRows, indices: torch.Tensor) -> None:
        """Write `copy` into the slots `indices`: full rows all, SWA rows where it can be.

        An SWA row is written where the old slot had a peer and the new one has; the others are
        skipped, and no row is written for another token.

        Raises:
            IndexTensorError, InvalidSlotError, GeometryError: see `SlotPool.check_host_copy`;
                nothing was written.
            MappingError: no mapping was registered yet.
            PausedPoolError: the pool is paused.
        """
        self.require_awake("load_cpu_copy")
        if not isinstance(copy, HybridRows):
            raise GeometryError(
                f"load_cpu_copy: a {type(copy).__name__}; SWAKVPool restores HybridRows"
            )
        self.full_kv_pool.check_host_copy(copy.full, indices)
        slots = as_index("load_cpu_copy", indices, self._resolved_device)
        self.swa_kv_pool.check_copy_fits(copy.swa)
        peers = self.translate_loc_from_full_to_swa(slots).cpu()
        kept_rows, tokens = self._rows_to_restore(copy.had_peer, peers > 0)
        swa_rows, swa_slots = copy.swa.select(kept_rows), picked(peers, tokens).to(slots.device)
        self.swa_kv_pool.check_host_copy(swa_rows, swa_slots)
        self.full_kv_pool.load_cpu_copy(copy.full, slots)
        self.swa_kv_pool.load_cpu_copy(swa_rows, swa_slots)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of all key buffers and of all value buffers, of both sub-pools."""
        full_keys, full_values = self.full_kv_pool.get_kv_size_bytes()
        swa_keys, swa_values = self.swa_kv_pool.get_kv_size_bytes()
        return full_keys + swa_keys, full_values + swa_values

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Address, bytes, and bytes a page of the full layers' buffers, indexed by full pages."""
        return self.full_kv_pool.get_contiguous_buf_infos()

    def get_state_buf_infos(self) -> BufferInfos:
        """The same of the SWA layers' buffers, indexed by SWA pages: a transfer of its own."""
        return self.swa_kv_pool.get_contiguous_buf_infos()

    def _place(self, layer: Layer) -> tuple[SlotPool, int, bool]:
        """The sub-pool of `layer`, its position there, and whether it slides."""
        number = layer_number(layer)
        if number not in self.layers_mapping:
            raise GeometryError(
                f"layer {number}: this pool holds layers {sorted(self.layers_mapping)}"
            )
        local, slides = self.layers_mapping[number]
        pool = self.swa_kv_pool if slides else self.full_kv_pool
        return pool, pool.start_layer + local, slides

    def _place_of(self, operation: str, layer: Layer, kind: type[PoolT]) -> tuple[PoolT, int, bool]:
        """As `_place`, of a layer that must be of `kind`."""
        pool, local, slides = self._place(layer)
        if not isinstance(pool, kind):
            raise GeometryError(
                f"{operation}: layer {layer_number(layer)} is kept in a {type(pool).__name__};"
                f" expected a {kind.__name__}"
            )
        return pool, local, slides

    def _sub_pool(
        self,
        pool_class: PoolClass,
        explicit: Mapping[str, Any] | None,
        heads: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> SlotPool:
        """One sub-pool, from arguments of its own or from `heads`, and from what is shared."""
        shared: dict[str, Any] = {
            **sizes,
            "page_size": self.page_size,
            "dtype": self.dtype,
            "device": self.device,
        }
        saver = self._saver_arguments(explicit)
        if explicit is not None:
            require_unchanged(explicit, {**shared, "memory_saver": self.memory_saver})
            return pool_class(**{**explicit, **shared, **saver})
        require_heads(pool_class)
        return pool_class(**{**heads, **shared, **saver})

    def _saver_arguments(self, explicit: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a sub-pool is told about the memory saver, whatever its own arguments say."""
        if self.memory_saver is None:
            return {"enable_memory_saver": self.enable_memory_saver}
        return {
            "enable_memory_saver": self.enable_memory_saver,
            "memory_saver": self.memory_saver,
        }

    def _rows_to_write(self, operation: str, loc: torch.Tensor, slides: bool) -> torch.Tensor:
        """The rows of a layer's sub-pool for writes to the full slots `loc`."""
        slots = as_index(operation, loc, self._resolved_device)
        return self._swa_rows_to_write(slots) if slides else slots

    def _swa_rows_to_write(self, slots: torch.Tensor) -> torch.Tensor:
        """SWA rows for writes to full `slots`; the padding row where there is no peer.

        Index -1 translates to -1, which as a row would be the last live one.
        """
        return self.translate_loc_from_full_to_swa(slots).clamp(min=0)

    def _rows_to_copy(self, peers: torch.Tensor) -> torch.Tensor:
        """Which tokens have an SWA row worth copying: those whose slot has a peer."""
        return peers > 0

    def _rows_to_restore(
        self, had_peer: torch.Tensor, has_peer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows of the SWA copy go back, and to which tokens; both bool, in the same order.

        The copy holds a row for each token that *had* a peer, so its rows are picked by the old
        mask, narrowed to the tokens that have one now.
        """
        both = had_peer & has_peer
        return picked(both, had_peer), both

"""One description of a model's KV memory, and the pool that follows from it. Every field of the
description reaches every sub-pool here and nowhere else, so that no wrapper can forget one.

Left out: choosing the sizes, and pools with a part in host memory (`kvcore.pools.hisparse`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvcore.errors import GeometryError
from kvcore.pools.arguments import layer_ids
from kvcore.pools.base import SlotPool
from kvcore.pools.dsa import DSATokenToKVPool
from kvcore.pools.mha import MHATokenToKVPool
from kvcore.pools.mla import MLATokenToKVPool
from kvcore.pools.swa import SWAKVPool
from kvcore.saver import MemorySaver


@dataclass(frozen=True, slots=True)
class MHALayers:
    """Layers of multi-head attention; `v_head_dim` is `head_dim` for None."""

    head_num: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def pool_class(self) -> Callable[..., SlotPool]:
        """The pool that keeps such layers."""
        return MHATokenToKVPool

    def arguments(self) -> dict[str, Any]:
        """What that pool must be told beside what all kinds share."""
        return {
            "head_num": self.head_num,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
        }


@dataclass(frozen=True, slots=True)
class MLALayers:
    """Layers of multi-head latent attention."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def pool_class(self) -> Callable[..., SlotPool]:
        """The pool that keeps such layers."""
        return MLATokenToKVPool

    def arguments(self) -> dict[str, Any]:
        """What that pool must be told beside what all kinds share."""
        return {"kv_lora_rank": self.kv_lora_rank, "qk_rope_head_dim": self.qk_rope_head_dim}


@dataclass(frozen=True, slots=True)
class DSALayers:
    """Layers of sparse latent attention; for the optional fields see `DSATokenToKVPool`.

    `kv_cache_dim` is `kv_lora_rank + qk_rope_head_dim` for None: rows that are not packed.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int
    kv_cache_dim: int | None = None
    index_buf_size: int | None = None
    skip_topk_layers: Sequence[bool] | None = None

    @property
    def pool_class(self) -> Callable[..., SlotPool]:
        """The pool that keeps such layers."""
        return DSATokenToKVPool

    def arguments(self) -> dict[str, Any]:
        """What that pool must be told beside what all kinds share."""
        plain = self.kv_lora_rank + self.qk_rope_head_dim
        return {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "index_head_dim": self.index_head_dim,
            "kv_cache_dim": plain if self.kv_cache_dim is None else self.kv_cache_dim,
            "index_buf_size": self.index_buf_size,
            "skip_topk_layers": self.skip_topk_layers,
        }


Layers: TypeAlias = MHALayers | MLALayers | DSALayers


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """The KV memory of a model: full-attention layers of one kind, sliding-window layers of one.

    Without `swa_layers` it is a pool of one kind, whose layer numbers are consecutive; with them a
    hybrid pool, also where `full_layer_ids` is empty.

    Attributes:
        full_layers: kind and dimensions of the full-attention layers; of all layers, if none slide.
        full_layer_ids: their numbers in the model, ascending, of any integer type; kept as ints.
        swa_layers: kind and dimensions of the sliding-window layers.
        swa_layer_ids: their numbers in the model, ascending.
        size: slots of the full-attention layers that can be lent.
        size_swa: slots of the sliding-window layers that can be lent.
        page_size: slots a page.
        dtype: what callers read and write.
        device: where all buffers live.
        enable_memory_saver: allocate every buffer under the tag `kv_cache` of a memory saver.
        memory_saver: that saver; `default_saver(device)` for None.

    Raises:
        GeometryError: fields that contradict each other, or layers that are not ascending.
    """

    full_layers: Layers
    full_layer_ids: Sequence[int]
    size: int
    page_size: int
    dtype: torch.dtype
    device: str | torch.device
    swa_layers: Layers | None = None
    swa_layer_ids: Sequence[int] = ()
    size_swa: int | None = None
    enable_memory_saver: bool = False
    memory_saver: MemorySaver | None = None

    def __post_init__(self) -> None:
        full_ids = layer_ids("KVPoolSpec", self.full_layer_ids)
        swa_ids = layer_ids("KVPoolSpec", self.swa_layer_ids)
        # The dataclass is frozen for its callers.
        object.__setattr__(self, "full_layer_ids", full_ids)
        object.__setattr__(self, "swa_layer_ids", swa_ids)
        parts = (self.swa_layers is not None, bool(swa_ids), self.size_swa is not None)
        if any(parts) and not all(parts):
            raise GeometryError(
                f"KVPoolSpec: swa_layers {self.swa_layers}, swa_layer_ids"
                f" {list(swa_ids)}, size_swa {self.size_swa}; expected all three or none"
            )
        if not full_ids and not swa_ids:
            raise GeometryError("KVPoolSpec: no layer; expected full_layer_ids or swa_layer_ids")
        numbers = [*full_ids, *swa_ids]
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise GeometryError(
                f"KVPoolSpec: layers {sorted(numbers)}; expected each once, from 0 on"
            )
        first = min(numbers)
        if self.swa_layers is None and numbers != list(range(first, first + len(numbers))):
            raise GeometryError(
                f"KVPoolSpec: layers {numbers} of one kind; expected consecutive numbers"
            )
        for ids in (full_ids, swa_ids):
            if list(ids) != sorted(ids):
                raise GeometryError(
                    f"KVPoolSpec: layers {list(ids)} of one side; expected ascending numbers"
                )


def build_kv_pool(spec: KVPoolSpec) -> SlotPool | SWAKVPool:
    """The pool that `spec` describes, zero-filled.

    Raises:
        GeometryError: dimensions that the kind of pool rejects.
        PausedPoolError, SaverMemoryError, SaverUnavailableError: see `SlotPool`.
    """
    shared: dict[str, Any] = {
        "size": spec.size,
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "device": spec.device,
        "enable_memory_saver": spec.enable_memory_saver,
        "memory_saver": spec.memory_saver,
    }
    if spec.swa_layers is None or spec.size_swa is None:
        return spec.full_layers.pool_class(
            **shared,
            **spec.full_layers.arguments(),
            layer_num=len(spec.full_layer_ids),
            start_layer=spec.full_layer_ids[0],
            end_layer=spec.full_layer_ids[-1],
        )
    return SWAKVPool(
        **shared,
        size_swa=spec.size_swa,
        # Heads are each kind's own arguments.
        head_num=0,
        head_dim=0,
        full_attention_layer_ids=spec.full_layer_ids,
        swa_attention_layer_ids=spec.swa_layer_ids,
        full_kv_pool_class=spec.full_layers.pool_class,
        full_kv_pool_kwargs=spec.full_layers.arguments(),
        swa_kv_pool_class=spec.swa_layers.pool_class,
        swa_kv_pool_kwargs=spec.swa_layers.arguments(),
    )

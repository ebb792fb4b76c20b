"""What the two sub-pools of a hybrid pool may be told, and which layer is kept in which of them.

Left out: building them, and every call that reaches them (`kvcore.pools.swa`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from kvcore.errors import GeometryError
from kvcore.pools.arguments import layer_ids
from kvcore.pools.base import SlotPool
from kvcore.pools.mla import MLATokenToKVPool

PoolClass: TypeAlias = Callable[..., SlotPool]


def require_heads(pool_class: PoolClass) -> None:
    """Raise GeometryError if a pool of this class cannot be described by heads."""
    if isinstance(pool_class, type) and issubclass(pool_class, MLATokenToKVPool):
        raise GeometryError(
            f"SWAKVPool: a {pool_class.__name__} has no heads; expected its arguments in"
            " full_kv_pool_kwargs or swa_kv_pool_kwargs"
        )


def require_unchanged(explicit: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Raise GeometryError if a sub-pool's own arguments name what is shared, and change it."""
    for name in explicit.keys() & shared.keys():
        own, common = explicit[name], shared[name]
        if name == "device":
            own, common = torch.device(own), torch.device(common)
        if own != common:
            raise GeometryError(
                f"SWAKVPool: a sub-pool's own arguments say {name} {own}; expected {common}, which"
                " is the hybrid pool's"
            )


def layer_table(
    full_attention_layer_ids: Sequence[int], swa_attention_layer_ids: Sequence[int]
) -> dict[int, tuple[int, bool]]:
    """Model layer to (position in its sub-pool, whether it slides)."""
    full = layer_ids("SWAKVPool", full_attention_layer_ids)
    swa = layer_ids("SWAKVPool", swa_attention_layer_ids)
    numbers = [*full, *swa]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise GeometryError(f"SWAKVPool: layers {twice} named twice; each layer has one sub-pool")
    table = {number: (local, False) for local, number in enumerate(full)}
    table |= {number: (local, True) for local, number in enumerate(swa)}
    return table

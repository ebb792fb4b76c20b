"""What the calls of a prefix cache take and answer, and what it counts.

Leaves out the calls (`kvcore.prefix_cache.radix`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.errors import IndexTensorError
from kvcore.prefix_cache.keys import RadixKey
from kvcore.prefix_cache.node import TreeNode


@dataclass(frozen=True, slots=True)
class MatchPrefixParams:
    """``key``: the tokens to look up; those behind the last whole page do not count. ``touch``:
    whether this is a use of the match, which counts and moves it back in the order of eviction; a
    caller that does not know yet says no, and calls `UnifiedRadixCache.record_match` later."""

    key: RadixKey
    touch: bool = True


@dataclass(frozen=True, slots=True)
class MatchResult:
    """``device_indices``: the full slots of the match, int64 `[prefix_len]`, a copy.
    ``last_device_node``: the node that ends with it; the root for an empty match."""

    device_indices: torch.Tensor
    last_device_node: TreeNode
    prefix_len: int


@dataclass(frozen=True, slots=True)
class InsertParams:
    """``key``: the tokens; those behind the last whole page are left out. ``value``: their full
    slots, integers `[len(key)]` or more. ``prev_prefix_len``: tokens at the front whose slots are
    the tree's own. ``swa_evicted_seqlen``: tokens at the front whose slots have no peer any more.
    Both are whole pages."""

    key: RadixKey
    value: torch.Tensor
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0


@dataclass(frozen=True, slots=True)
class InsertResult:
    """``prefix_len``: tokens that were in the tree before. ``last_device_node``: the node that ends
    with what is cached of the key now."""

    prefix_len: int
    last_device_node: TreeNode


@dataclass(frozen=True, slots=True)
class EvictParams:
    """Tokens to evict on each side, at least; all that is not locked where that is less."""

    num_tokens: int = 0
    swa_num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EvictResult:
    """Tokens whose slots were freed on each side."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0


@dataclass(frozen=True, slots=True)
class IncLockRefResult:
    """Tokens that can no longer be evicted, on the full and on the SWA side."""

    delta: int = 0
    swa_delta: int = 0


@dataclass(frozen=True, slots=True)
class DecLockRefResult:
    """Tokens that can be evicted again, on the full and on the SWA side."""

    delta: int = 0
    swa_delta: int = 0


@dataclass(slots=True)
class CacheCounters:
    """What happened since the cache was built; only ever grows. Tokens, or pages where it says so.

    Attributes:
        queried_tokens, matched_tokens: of matches that were used, in whole pages.
        inserted_tokens: cached in new nodes.
        duplicate_tokens: handed to `insert` and freed, since the tree had them.
        evicted_tokens, evicted_swa_tokens: freed by eviction, on each side.
        tombstoned_tokens, tombstoned_pages: evicted on the SWA side alone.
        recovered_locked_pages: tombstones that kept their full slots and took over new peers.
        recovered_unlocked_pages: tombstones whose full slots were replaced.
        reloaded_pages: tombstones whose SWA value came back from the host.
    """

    queried_tokens: int = 0
    matched_tokens: int = 0
    inserted_tokens: int = 0
    duplicate_tokens: int = 0
    evicted_tokens: int = 0
    evicted_swa_tokens: int = 0
    tombstoned_tokens: int = 0
    tombstoned_pages: int = 0
    recovered_locked_pages: int = 0
    recovered_unlocked_pages: int = 0
    reloaded_pages: int = 0


def require_a(kind: type, operation: str, value: object) -> None:
    """Raise IndexTensorError unless `value` is of that kind."""
    if not isinstance(value, kind):
        raise IndexTensorError(f"{operation}: expected {kind.__name__}, got {type(value).__name__}")

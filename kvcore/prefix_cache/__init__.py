"""The prefix cache: what requests have computed, kept for those that begin alike."""

from kvcore.prefix_cache.keys import RadixKey
from kvcore.prefix_cache.node import TreeNode
from kvcore.prefix_cache.parameters import (
    CacheCounters,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from kvcore.prefix_cache.protocols import CacheAllocator, CachedRequest
from kvcore.prefix_cache.radix import UnifiedRadixCache

__all__ = [
    "CacheAllocator",
    "CacheCounters",
    "CachedRequest",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InsertParams",
    "InsertResult",
    "MatchPrefixParams",
    "MatchResult",
    "RadixKey",
    "TreeNode",
    "UnifiedRadixCache",
]

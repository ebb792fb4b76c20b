"""KV-cache allocators and pools for hybrid attention models: which slot belongs to whom.

Reusable alone; needs torch and numpy. Names are imported when they are first asked for, so that
command lines and test plugins do not pay for torch before they need it. The harness that verifies
the core (`kvcore.models`, `kvcore.targets`, `kvcore.invariants`, `kvcore.strategies`,
`kvcore.reports`) is not imported here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcore import _layout

if TYPE_CHECKING:
    from kvcore.allocator import (
        BaseTokenToKVPoolAllocator,
        CompressedHiSparseTokenToKVPoolAllocator,
        HiSparseTokenToKVPoolAllocator,
        PagedTokenToKVPoolAllocator,
        PureSWATokenToKVPoolAllocator,
        SWATokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )
    from kvcore.errors import (
        CacheStateError,
        DeadPeerError,
        DoubleFreeError,
        FreeGroupError,
        GeometryError,
        IndexTensorError,
        InvalidSlotError,
        KVCacheError,
        LivePeerError,
        LockError,
        MappingError,
        PausedPoolError,
        PendingFreeError,
        RequestStateError,
        SaverMemoryError,
        SaverUnavailableError,
        UnknownTagError,
    )
    from kvcore.pools import (
        CompressedKVPool,
        DSALayers,
        DSATokenToKVPool,
        HiSparseKVPool,
        KVPoolSpec,
        MHALayers,
        MHATokenToKVPool,
        MLALayers,
        MLATokenToKVPool,
        SWAKVPool,
        build_kv_pool,
    )
    from kvcore.prefix_cache import (
        CacheAllocator,
        CacheCounters,
        CachedRequest,
        DecLockRefResult,
        EvictParams,
        EvictResult,
        IncLockRefResult,
        InsertParams,
        InsertResult,
        MatchPrefixParams,
        MatchResult,
        RadixKey,
        TreeNode,
        UnifiedRadixCache,
    )
    from kvcore.requests import ReqToTokenPool
    from kvcore.retraction import Request, Retraction, RetractionBackup
    from kvcore.saver import (
        CudaMemorySaver,
        HostMemorySaver,
        MemorySaver,
        NoMemorySaver,
        Region,
    )
    from kvcore.serving import HostPrefix, PrefixLoad, ServingRequest

_layout.guard()

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "CacheAllocator",
    "CacheCounters",
    "CacheStateError",
    "CachedRequest",
    "CompressedHiSparseTokenToKVPoolAllocator",
    "CompressedKVPool",
    "CudaMemorySaver",
    "DSALayers",
    "DSATokenToKVPool",
    "DeadPeerError",
    "DecLockRefResult",
    "DoubleFreeError",
    "EvictParams",
    "EvictResult",
    "FreeGroupError",
    "GeometryError",
    "HiSparseKVPool",
    "HiSparseTokenToKVPoolAllocator",
    "HostMemorySaver",
    "HostPrefix",
    "IncLockRefResult",
    "IndexTensorError",
    "InsertParams",
    "InsertResult",
    "InvalidSlotError",
    "KVCacheError",
    "KVPoolSpec",
    "LivePeerError",
    "LockError",
    "MHALayers",
    "MHATokenToKVPool",
    "MLALayers",
    "MLATokenToKVPool",
    "MappingError",
    "MatchPrefixParams",
    "MatchResult",
    "MemorySaver",
    "NoMemorySaver",
    "PagedTokenToKVPoolAllocator",
    "PausedPoolError",
    "PendingFreeError",
    "PrefixLoad",
    "PureSWATokenToKVPoolAllocator",
    "RadixKey",
    "Region",
    "ReqToTokenPool",
    "Request",
    "RequestStateError",
    "Retraction",
    "RetractionBackup",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "SaverMemoryError",
    "SaverUnavailableError",
    "ServingRequest",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "UnifiedRadixCache",
    "UnknownTagError",
    "build_kv_pool",
]


_PREFIX_CACHE = frozenset(
    (
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
    )
)


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name in _PREFIX_CACHE:
        return "kvcore.prefix_cache"
    if name.endswith("Allocator"):
        return "kvcore.allocator"
    if name.endswith("Error"):
        return "kvcore.errors"
    if name.endswith("Saver") or name == "Region":
        return "kvcore.saver"
    if name in ("Request", "Retraction", "RetractionBackup"):
        return "kvcore.retraction"
    if name in ("HostPrefix", "PrefixLoad", "ServingRequest"):
        return "kvcore.serving"
    return "kvcore.requests" if name == "ReqToTokenPool" else "kvcore.pools"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    return getattr(import_module(_home(name)), name)


def __dir__() -> list[str]:
    return sorted(__all__)

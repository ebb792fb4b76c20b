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
        DeadPeerError,
        DoubleFreeError,
        FreeGroupError,
        GeometryError,
        IndexTensorError,
        InvalidSlotError,
        KVCacheError,
        LivePeerError,
        MappingError,
        PausedPoolError,
        PendingFreeError,
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
    from kvcore.requests import ReqToTokenPool
    from kvcore.retraction import Request, Retraction, RetractionBackup
    from kvcore.saver import (
        CudaMemorySaver,
        HostMemorySaver,
        MemorySaver,
        NoMemorySaver,
        Region,
    )

_layout.guard()

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "CompressedHiSparseTokenToKVPoolAllocator",
    "CompressedKVPool",
    "CudaMemorySaver",
    "DSALayers",
    "DSATokenToKVPool",
    "DeadPeerError",
    "DoubleFreeError",
    "FreeGroupError",
    "GeometryError",
    "HiSparseKVPool",
    "HiSparseTokenToKVPoolAllocator",
    "HostMemorySaver",
    "IndexTensorError",
    "InvalidSlotError",
    "KVCacheError",
    "KVPoolSpec",
    "LivePeerError",
    "MHALayers",
    "MHATokenToKVPool",
    "MLALayers",
    "MLATokenToKVPool",
    "MappingError",
    "MemorySaver",
    "NoMemorySaver",
    "PagedTokenToKVPoolAllocator",
    "PausedPoolError",
    "PendingFreeError",
    "PureSWATokenToKVPoolAllocator",
    "Region",
    "ReqToTokenPool",
    "Request",
    "Retraction",
    "RetractionBackup",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "SaverMemoryError",
    "SaverUnavailableError",
    "TokenToKVPoolAllocator",
    "UnknownTagError",
    "build_kv_pool",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name.endswith("Allocator"):
        return "kvcore.allocator"
    if name.endswith("Error"):
        return "kvcore.errors"
    if name.endswith("Saver") or name == "Region":
        return "kvcore.saver"
    if name in ("Request", "Retraction", "RetractionBackup"):
        return "kvcore.retraction"
    return "kvcore.requests" if name == "ReqToTokenPool" else "kvcore.pools"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    return getattr(import_module(_home(name)), name)


def __dir__() -> list[str]:
    return sorted(__all__)

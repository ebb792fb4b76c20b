"""KV-cache allocators and pools for hybrid attention models: which slot belongs to whom.

Reusable alone; needs torch and numpy. The harness that verifies it (`kvcore.models`,
`kvcore.targets`, `kvcore.invariants`, `kvcore.strategies`, `kvcore.reports`) is not imported here.
"""

from kvcore import _layout
from kvcore.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
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
)
from kvcore.pools import MHATokenToKVPool, SWAKVPool
from kvcore.retraction import RetractionBackup

_layout.guard()

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "DeadPeerError",
    "DoubleFreeError",
    "FreeGroupError",
    "GeometryError",
    "IndexTensorError",
    "InvalidSlotError",
    "KVCacheError",
    "LivePeerError",
    "MHATokenToKVPool",
    "MappingError",
    "PagedTokenToKVPoolAllocator",
    "PausedPoolError",
    "PendingFreeError",
    "RetractionBackup",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]

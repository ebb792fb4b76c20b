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


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name.endswith("Allocator"):
        return "kvcore.allocator"
    if name.endswith("Error"):
        return "kvcore.errors"
    return "kvcore.retraction" if name == "RetractionBackup" else "kvcore.pools"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    return getattr(import_module(_home(name)), name)


def __dir__() -> list[str]:
    return sorted(__all__)

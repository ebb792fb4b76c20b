"""KV pools: the buffers that slots index.

Left out: which slots are free or lent; that is the business of `kvcore.allocator`.
"""

from kvcore.pools.base import HostRows, SlotPool
from kvcore.pools.dsa import DSATokenToKVPool
from kvcore.pools.hisparse import CompressedKVPool, DeviceRows, HiSparseKVPool
from kvcore.pools.mha import MHATokenToKVPool
from kvcore.pools.mla import MLATokenToKVPool
from kvcore.pools.spec import DSALayers, KVPoolSpec, MHALayers, MLALayers, build_kv_pool
from kvcore.pools.swa import HybridRows, SWAKVPool

__all__ = [
    "CompressedKVPool",
    "DSALayers",
    "DSATokenToKVPool",
    "DeviceRows",
    "HiSparseKVPool",
    "HostRows",
    "HybridRows",
    "KVPoolSpec",
    "MHALayers",
    "MHATokenToKVPool",
    "MLALayers",
    "MLATokenToKVPool",
    "SWAKVPool",
    "SlotPool",
    "build_kv_pool",
]

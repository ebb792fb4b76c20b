"""KV pools: the buffers that slots index.

Left out: which slots are free or lent; that is the business of `kvcore.allocator`.
"""

from kvcore.pools.base import HostRows, SlotPool
from kvcore.pools.mha import MHATokenToKVPool
from kvcore.pools.swa import HybridRows, SWAKVPool

__all__ = ["HostRows", "HybridRows", "MHATokenToKVPool", "SWAKVPool", "SlotPool"]

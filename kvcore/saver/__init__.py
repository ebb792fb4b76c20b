"""Memory savers: the memory of a tag is given back as a whole and comes back at the same addresses.

Left out: who pauses what and when; an engine pauses the tag `KV_CACHE` while it serves nothing.
"""

from kvcore.saver.cuda import CudaMemorySaver
from kvcore.saver.default import default_saver
from kvcore.saver.host import HostMemorySaver
from kvcore.saver.none import NoMemorySaver
from kvcore.saver.protocol import KV_CACHE, MemorySaver, Region

__all__ = [
    "KV_CACHE",
    "CudaMemorySaver",
    "HostMemorySaver",
    "MemorySaver",
    "NoMemorySaver",
    "Region",
    "default_saver",
]

"""Allocators: who owns which slot of a KV pool."""

from kvcore.allocator.base import BaseTokenToKVPoolAllocator
from kvcore.allocator.hisparse import (
    CompressedHiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
)
from kvcore.allocator.paged import PagedTokenToKVPoolAllocator
from kvcore.allocator.pure_swa import PureSWATokenToKVPoolAllocator
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.allocator.swa import SWATokenToKVPoolAllocator
from kvcore.allocator.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "CompressedHiSparseTokenToKVPoolAllocator",
    "HiSparseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "PureSWATokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "SinglePoolAllocator",
    "TokenToKVPoolAllocator",
]

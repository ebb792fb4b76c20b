"""The pools that an allocator of several pools drives, by their page size.

Left out: what they are driven for (`kvcore.allocator.hybrid`, `kvcore.allocator.hisparse`).
"""

from typing import Any

import torch

from kvcore.allocator.paged import PagedTokenToKVPoolAllocator
from kvcore.allocator.single import SinglePoolAllocator
from kvcore.allocator.token import TokenToKVPoolAllocator


def make_pool(
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: str | torch.device,
    kvcache: Any,
    need_sort: bool,
    *,
    validate: bool,
    pool_name: str,
    lists_slots: bool = False,
) -> SinglePoolAllocator:
    """An allocator of one pool, for page size 1 or for larger pages.

    `lists_slots`: its free list keeps the first slot of each page, at page size 1 the same.
    """
    if page_size == 1:
        return TokenToKVPoolAllocator(
            size, dtype, device, kvcache, need_sort, validate=validate, pool_name=pool_name
        )
    return PagedTokenToKVPoolAllocator(
        size,
        page_size,
        dtype,
        device,
        kvcache,
        need_sort,
        validate=validate,
        pool_name=pool_name,
        lists_slots=lists_slots,
    )

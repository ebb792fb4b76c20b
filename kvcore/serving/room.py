"""Room for what a request is about to take: free pages, and under pressure evicted ones.

Left out: which nodes are evicted (`kvcore.prefix_cache`).
"""

from kvcore.allocator.arguments import as_number
from kvcore.errors import GeometryError
from kvcore.prefix_cache import EvictParams, UnifiedRadixCache


def make_room(cache: UnifiedRadixCache, full_tokens: int, swa_tokens: int) -> bool:
    """See to it that so many tokens, in whole pages, are free on each side.

    If what is free does not suffice, what is missing is evicted from the cache, in whole nodes and
    none more than needed; never if
    even all that is unlocked would not do, and never in an open free group, since evicted pages
    would be free after its end only.

    Args:
        full_tokens: tokens of the full side, a multiple of the page size.
        swa_tokens: the same of the SWA side.

    Returns:
        Whether there is room now; if not, nothing changed.

    Raises:
        GeometryError: a negative number, one that is not whole, or not whole pages.
    """
    allocator = cache.token_to_kv_pool_allocator
    full_tokens = as_number("make_room", "full_tokens", full_tokens)
    swa_tokens = as_number("make_room", "swa_tokens", swa_tokens)
    if any(need < 0 or need % cache.page_size != 0 for need in (full_tokens, swa_tokens)):
        raise GeometryError(
            f"make_room: {full_tokens} full and {swa_tokens} SWA tokens; expected non-negative "
            f"multiples of page_size {cache.page_size}"
        )
    missing_full = max(full_tokens - allocator.full_available_size(), 0)
    missing_swa = max(swa_tokens - allocator.swa_available_size(), 0)
    if missing_full == 0 and missing_swa == 0:
        return True
    if cache.group_open:
        return False
    if missing_full > cache.full_evictable_size() or missing_swa > cache.swa_evictable_size():
        return False
    cache.evict(EvictParams(num_tokens=missing_full, swa_num_tokens=missing_swa))
    return True


def ceil_page(num_tokens: int, page_size: int) -> int:
    """The pages that hold the first `num_tokens` tokens of a row, in tokens."""
    return -(-num_tokens // page_size) * page_size

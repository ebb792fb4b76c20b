"""Slots that a request is about to own: how they are taken, and how they go back if what follows
fails.

Left out: the row that they are written to, and the lock on what the cache has.
"""

from contextlib import ExitStack

import torch

from kvcore.prefix_cache import (
    CacheAllocator,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    UnifiedRadixCache,
)
from kvcore.serving.room import ceil_page, make_room


def lock_match(cache: UnifiedRadixCache, key: RadixKey, undo: ExitStack) -> MatchResult:
    """What the cache can serve of `key`, locked; `undo` takes the lock back. It is no use of the
    match until `UnifiedRadixCache.record_match` says so: a call that is refused changes nothing in
    the order of eviction."""
    match = cache.match_prefix(MatchPrefixParams(key, touch=False))
    cache.inc_lock_ref(match.last_device_node)
    undo.callback(cache.dec_lock_ref, match.last_device_node)
    return match


def lend_tokens(
    cache: UnifiedRadixCache, start: int, stop: int, last_loc: torch.Tensor, undo: ExitStack
) -> torch.Tensor | None:
    """Slots with peers for tokens `[start, stop)` of one row, room made for them.

    Args:
        last_loc: slot of token `start - 1`, int64 `[1]`; -1 for none.
        undo: takes them back.

    Returns:
        int64 `[stop - start]`, or None, and nothing changed.
    """
    first_new = ceil_page(start, cache.page_size)
    need = ceil_page(stop, cache.page_size) - first_new
    if not make_room(cache, need, need):
        return None
    device = cache.token_to_kv_pool_allocator.device
    starts, stops = torch.tensor([start]), torch.tensor([stop])
    slots = cache.token_to_kv_pool_allocator.alloc_extend(
        starts.to(device), starts, stops.to(device), stops, last_loc, stop - start
    )
    if slots is not None:
        # The page that goes on stays lent: only the pages that begin here are new.
        undo.callback(return_slots, cache, slots[first_new - start :])
    return slots


def lend_sides(
    cache: UnifiedRadixCache,
    start: int,
    stop: int,
    swa_from: int,
    undo: ExitStack,
    *,
    reopened: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Whole pages for tokens `[start, stop)` of one row, the sides taken apart: SWA slots from
    token `swa_from` on only, and first for the full slots `reopened`, which are lent already.

    Args:
        start: first token, page aligned.
        swa_from: the same.
        reopened: int64 `[n]`, whole pages without peers.
        undo: takes all of them back.

    Returns:
        Full slots, int64, the last page whole; or None, and nothing changed.
    """
    allocator = cache.token_to_kv_pool_allocator
    num_full = ceil_page(stop, cache.page_size) - start
    if reopened is None:
        reopened = no_slots(cache)
    # Tokens before the window get no SWA slot.
    num_bare = min(max(swa_from - start, 0), num_full)
    num_swa = len(reopened) + num_full - num_bare
    if not make_room(cache, num_full, num_swa):
        return None
    with ExitStack() as undo_unpaired:
        full = allocator.full_attn_allocator.alloc(num_full) if num_full else no_slots(cache)
        if full is None:
            return None
        undo_unpaired.callback(_return_full, allocator, full)
        if num_swa:
            swa = allocator.swa_attn_allocator.alloc(num_swa)
            if swa is None:
                return None
            undo_unpaired.callback(allocator.swa_attn_allocator.free, swa)
            paired = torch.cat((reopened, full[num_bare:]))
            allocator.set_full_to_swa_mapping(paired, swa)
        undo_unpaired.pop_all()
    undo.callback(return_sides, cache, full, num_bare, reopened)
    return full


def return_slots(cache: UnifiedRadixCache, slots: torch.Tensor) -> None:
    """Free slots that have peers, with their whole pages; none is none."""
    if len(slots) > 0:
        cache.token_to_kv_pool_allocator.free(slots)


def return_sides(
    cache: UnifiedRadixCache, full: torch.Tensor, num_bare: int, reopened: torch.Tensor
) -> None:
    """Free what `lend_sides` took: of `full` the first `num_bare` slots have no peer."""
    allocator = cache.token_to_kv_pool_allocator
    with cache.frees():
        if len(reopened) > 0:
            allocator.free_swa(reopened)
        _return_full(allocator, full[:num_bare])
        return_slots(cache, full[num_bare:])


def no_slots(cache: UnifiedRadixCache) -> torch.Tensor:
    """An empty vector of slots, int64."""
    return torch.empty(0, dtype=torch.int64, device=cache.token_to_kv_pool_allocator.device)


def last_slot(cache: UnifiedRadixCache, slots: torch.Tensor) -> torch.Tensor:
    """The last of `slots`, int64 `[1]`; -1 for an empty row."""
    return slots[-1:] if len(slots) else no_slots(cache).new_tensor([-1])


def _return_full(allocator: CacheAllocator, slots: torch.Tensor) -> None:
    if len(slots) > 0:
        allocator.free_full(slots)

"""What a batch of running requests does step by step: one token more each, and windows that slide.

Left out: several tokens at once, which may turn out wrong (`kvcore.serving.speculation`).
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from kvcore.prefix_cache import UnifiedRadixCache
from kvcore.serving.readiness import require_batch, require_context, require_known
from kvcore.serving.request import ServingRequest
from kvcore.serving.room import make_room
from kvcore.serving.slots import no_slots, return_slots


def decode(cache: UnifiedRadixCache, requests: Sequence[ServingRequest]) -> torch.Tensor | None:
    """One slot more for each request, in one allocation: that of its next known token.

    Returns:
        The slots, int64 `[batch]`, whose KV the caller computes now; None if there is no room even
        after eviction, and then nothing changed.

    Raises:
        RequestStateError: a request that does not run, has drafts, or is named twice.
        GeometryError: a request whose next token is not known, or does not fit its row.
            In both cases nothing changed. Whatever else is raised on the way: the same, but for
            what was evicted.
    """
    row_numbers = require_batch("decode", requests)
    for request in requests:
        require_known("decode", request, request.kv_len + 1)
        require_context("decode", cache, request.kv_len + 1)
    if not requests:
        return no_slots(cache)
    begins_page = torch.tensor([request.kv_len % cache.page_size == 0 for request in requests])
    need = int(begins_page.sum()) * cache.page_size
    if not make_room(cache, need, need):
        return None
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    lengths = torch.tensor([request.kv_len for request in requests])
    rows = torch.tensor(row_numbers).to(allocator.device)
    positions = lengths.to(allocator.device)
    last_loc = table.req_to_token[rows, positions - 1].to(torch.int64)
    with ExitStack() as undo:
        slots = allocator.alloc_decode(positions + 1, lengths + 1, last_loc)
        if slots is None:
            return None
        # Pages that go on stay lent.
        undo.callback(return_slots, cache, slots[begins_page.to(allocator.device)])
        table.write((rows, positions), slots)
        undo.pop_all()
    for request in requests:
        request.kv_len += 1
        request.kv_allocated_len += 1
    return slots


def slide_windows(cache: UnifiedRadixCache, requests: Sequence[ServingRequest]) -> int:
    """Free the SWA slots that the requests' windows have left behind, in one call.

    One whole window stays before the last whole page (`UnifiedRadixCache.window_frontier`), so that
    what the request has computed can be served from the cache. The SWA slots of the prefix that it
    shares are the cache's to evict.

    Returns:
        Tokens whose SWA slots were freed.

    Raises:
        RequestStateError: a request that does not run, has drafts, or is named twice; nothing
            changed.
    """
    rows = require_batch("slide_windows", requests)
    behind, frontiers = [no_slots(cache)], []
    for request, row in zip(requests, rows, strict=True):
        frontier = max(request.swa_evicted_seqlen, cache.window_frontier(request.kv_len))
        first = max(request.swa_evicted_seqlen, request.prefix_len)
        if first < frontier:
            behind.append(cache.req_to_token_pool.row(row, frontier)[first:])
        frontiers.append(frontier)
    slots = torch.cat(behind)
    if len(slots) > 0:
        cache.token_to_kv_pool_allocator.free_swa(slots)
    for request, frontier in zip(requests, frontiers, strict=True):
        request.swa_evicted_seqlen = frontier
    return len(slots)

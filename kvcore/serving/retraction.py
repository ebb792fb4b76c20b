"""Under memory pressure a running request gives everything up, and runs again later: from a copy of
its KV in host memory, or by computing it again.

Left out: which request is retracted, and when there is room for it again; and the copy itself
(`kvcore.retraction`).
"""

from contextlib import ExitStack
from typing import Any

import torch

from kvcore.prefix_cache import RadixKey, UnifiedRadixCache
from kvcore.retraction import RetractionBackup, RowChunks
from kvcore.serving.admission import run_from, start_computing
from kvcore.serving.readiness import require_running, require_waiting
from kvcore.serving.request import ServingRequest
from kvcore.serving.slots import lend_sides, lock_match


def retract(cache: UnifiedRadixCache, request: ServingRequest, *, backup: bool) -> None:
    """Take slots, lock and row from a running request, which keeps its tokens; drafts are dropped.

    A backup is of the whole row: the prefix that the cache shares may be evicted meanwhile.

    Args:
        backup: copy the KV to the host first, in chunks of a page, into `request.retraction`.

    Raises:
        RequestStateError: the request does not run.
        Exception: what the pool raises when it cannot be read, for instance PausedPoolError.
            In both cases the request runs on, and nothing changed.
    """
    row = require_running("retract", request)
    copied = _copy(cache, request, row) if backup else None
    cache.cache_finished_req(request, is_insert=False)
    request.retraction = copied
    request.swa_evicted_seqlen = 0 if copied is None else copied.swa_evicted_seqlen


def resume(cache: UnifiedRadixCache, request: ServingRequest) -> torch.Tensor | None:
    """Run a retracted request again: match and lock what the cache has of it, take slots for the
    rest.

    With a backup the rest is loaded: full slots for all of it, SWA slots for its last window.
    Without, the caller computes it again, the last token in any case, as after `admit`.

    Returns:
        The slots of tokens `[prefix_len, kv_len)`, int64; None if there is no row, or no room even
        after eviction, and then nothing changed.

    Raises:
        RequestStateError: the request runs, or was never retracted.
        Exception: what the pool raises when it cannot be written. In both cases nothing changed but
            for what was evicted: the call may be repeated.
    """
    require_waiting("resume", request, retracted=True)
    if request.retraction is None:
        return start_computing(cache, request, request.kv_len, request.kv_len)
    slots = _load(cache, request, request.retraction)
    if slots is not None:
        request.retraction = None
    return slots


def _copy(cache: UnifiedRadixCache, request: ServingRequest, row: int) -> RetractionBackup[Any]:
    """The KV of a row; of what its window leaves behind, no SWA part is needed any more."""
    return RetractionBackup.take(
        cache.token_to_kv_pool_allocator.get_kvcache(),
        cache.req_to_token_pool.row(row, request.kv_len),
        chunk_tokens=cache.page_size,
        swa_evicted_seqlen=max(request.swa_evicted_seqlen, cache.window_frontier(request.kv_len)),
    )


def _load(
    cache: UnifiedRadixCache, request: ServingRequest, backup: RetractionBackup[Any]
) -> torch.Tensor | None:
    length, window_from = request.kv_len, backup.swa_evicted_seqlen
    with ExitStack() as undo:
        key = RadixKey(request.token_ids[:length], request.extra_key)
        match = lock_match(cache, key, undo)
        rows = cache.req_to_token_pool.alloc([request])
        if rows is None:
            return None
        undo.callback(cache.req_to_token_pool.free, request)
        start = match.prefix_len
        pages = lend_sides(cache, start, length, window_from, undo)
        if pages is None:
            return None
        slots = pages[: length - start]
        missing = RowChunks(backup.chunks[start // cache.page_size :])
        rest = RetractionBackup(missing, window_from)
        rest.restore(cache.token_to_kv_pool_allocator.get_kvcache(), slots)
        whole_row = torch.cat((match.device_indices, slots))
        cache.req_to_token_pool.write((rows[0], slice(0, length)), whole_row)
        cache.record_match(key, match)
        undo.pop_all()
    run_from(request, match, kv_len=length, swa_evicted_seqlen=window_from)
    return slots

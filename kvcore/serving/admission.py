"""A request gets a row and slots for the tokens that the cache does not have: `admit`, and chunk by
chunk `prefill`.

Left out: handing a computed chunk to the cache, which is `cache_unfinished_req` of the cache.
"""

from contextlib import ExitStack

import torch

from kvcore.errors import GeometryError
from kvcore.prefix_cache import MatchResult, RadixKey, UnifiedRadixCache
from kvcore.serving.readiness import (
    as_step,
    require_context,
    require_settled,
    require_waiting,
)
from kvcore.serving.request import ServingRequest
from kvcore.serving.slots import last_slot, lend_tokens, lock_match


def admit(
    cache: UnifiedRadixCache, request: ServingRequest, *, num_tokens: int | None = None
) -> torch.Tensor | None:
    """Start a new request: match all but its last token in the cache, lock the match, take a row,
    and slots for the next `num_tokens` tokens, at most to the end of what is known.

    At least one token is always left to compute: its output is the next one.

    Args:
        num_tokens: tokens of the first chunk; None for all.

    Returns:
        The slots of tokens `[prefix_len, kv_len)`, int64, whose KV the caller computes now; None if
        there is no row, or no room even after eviction, and then nothing changed.

    Raises:
        RequestStateError: the request runs, or was retracted.
        GeometryError: no token, more than a row can hold, or a chunk of less than one token.
            In both cases nothing changed. Whatever else is raised on the way: the same, but for
            what was evicted.
    """
    require_waiting("admit", request, retracted=False)
    length = request.num_tokens
    if length < 1:
        raise GeometryError("admit: a request without tokens; expected at least one")
    require_context("admit", cache, length)
    chunk = length if num_tokens is None else as_step("admit", num_tokens)
    return start_computing(cache, request, length, chunk)


def prefill(
    cache: UnifiedRadixCache, request: ServingRequest, num_tokens: int
) -> torch.Tensor | None:
    """Slots for the next `num_tokens` known tokens of a running request, at most to the last.

    Returns:
        Their slots, int64, whose KV the caller computes now; or None, as `admit`.

    Raises:
        RequestStateError: the request does not run, or has drafts.
        GeometryError: less than one token, none left to compute, or more than a row can hold.
    """
    row = require_settled("prefill", request)
    start = request.kv_len
    stop = min(start + as_step("prefill", num_tokens), request.num_tokens)
    if stop == start:
        raise GeometryError(
            f"prefill: all {start} known tokens of the request in row {row} are computed; expected "
            "some that are not"
        )
    require_context("prefill", cache, stop)
    slots = extend_row(cache, request, row, stop)
    if slots is not None:
        request.kv_len = request.kv_allocated_len = stop
    return slots


def start_computing(
    cache: UnifiedRadixCache, request: ServingRequest, length: int, most: int
) -> torch.Tensor | None:
    """Run a request that holds nothing: match its first `length` tokens but the last, and take
    slots for the next ones of them, `most` at most. All or nothing."""
    with ExitStack() as undo:
        key = RadixKey(request.token_ids[: length - 1], request.extra_key)
        match = lock_match(cache, key, undo)
        rows = cache.req_to_token_pool.alloc([request])
        if rows is None:
            return None
        undo.callback(cache.req_to_token_pool.free, request)
        prefix = match.device_indices
        stop = min(match.prefix_len + most, length)
        slots = lend_tokens(cache, match.prefix_len, stop, last_slot(cache, prefix), undo)
        if slots is None:
            return None
        cache.req_to_token_pool.write((rows[0], slice(0, stop)), torch.cat((prefix, slots)))
        cache.record_match(key, match)
        undo.pop_all()
    run_from(request, match, kv_len=stop, swa_evicted_seqlen=0)
    return slots


def run_from(
    request: ServingRequest, match: MatchResult, *, kv_len: int, swa_evicted_seqlen: int
) -> None:
    """The lengths of a request that runs from now on, with a match that it has locked."""
    request.last_node = match.last_device_node
    request.prefix_len = match.prefix_len
    request.swa_evicted_seqlen = swa_evicted_seqlen
    request.kv_len = request.kv_allocated_len = kv_len


def extend_row(
    cache: UnifiedRadixCache, request: ServingRequest, row: int, stop: int
) -> torch.Tensor | None:
    """Slots for the tokens of a row from `kv_len` to `stop`, written there; all or nothing."""
    start = request.kv_len
    with ExitStack() as undo:
        last_loc = last_slot(cache, cache.req_to_token_pool.row(row, start))
        slots = lend_tokens(cache, start, stop, last_loc, undo)
        if slots is None:
            return None
        cache.req_to_token_pool.write((row, slice(start, stop)), slots)
        undo.pop_all()
    return slots

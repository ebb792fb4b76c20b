"""Drafts: slots for tokens that may turn out wrong, and what becomes of them.

Between `speculate` and `trim` a request has more slots than tokens; only `trim`, `finish`, `abort`
and `retract` take one in that state. Left out: where drafts come from, and who verifies them.
"""

import torch

from kvcore.allocator.arguments import as_number
from kvcore.errors import GeometryError, RequestStateError
from kvcore.prefix_cache import UnifiedRadixCache
from kvcore.serving.admission import extend_row
from kvcore.serving.readiness import (
    as_step,
    require_context,
    require_known,
    require_running,
    require_settled,
)
from kvcore.serving.request import ServingRequest
from kvcore.serving.room import ceil_page
from kvcore.serving.slots import return_slots


def speculate(
    cache: UnifiedRadixCache, request: ServingRequest, num_tokens: int
) -> torch.Tensor | None:
    """Slots for `num_tokens` drafts behind the computed tokens of a running request.

    Returns:
        The slots, int64 `[num_tokens]`, whose KV the caller computes now; None if there is no room
        even after eviction, and then nothing changed.

    Raises:
        RequestStateError: the request does not run, or has drafts already.
        GeometryError: less than one draft, or more than fit its row.
    """
    row = require_settled("speculate", request)
    stop = request.kv_len + as_step("speculate", num_tokens)
    require_context("speculate", cache, stop)
    slots = extend_row(cache, request, row, stop)
    if slots is not None:
        request.kv_allocated_len = stop
    return slots


def trim(cache: UnifiedRadixCache, request: ServingRequest, num_accepted: int) -> None:
    """The first `num_accepted` drafts are tokens now; the pages that only others fill are freed.

    Raises:
        RequestStateError: the request does not run, or has no drafts.
        GeometryError: more than there are, a negative number, or tokens that are not known yet.
            In all cases nothing changed.
    """
    row = require_running("trim", request)
    num_drafts = request.kv_allocated_len - request.kv_len
    if num_drafts == 0:
        raise RequestStateError(
            f"trim: the request in row {row} has no drafts; expected speculate before"
        )
    num_accepted = as_number("trim", "num_accepted", num_accepted)
    if not 0 <= num_accepted <= num_drafts:
        raise GeometryError(
            f"trim: expected num_accepted within 0..{num_drafts}, got {num_accepted}"
        )
    kv_len = request.kv_len + num_accepted
    require_known("trim", request, kv_len)
    held = cache.req_to_token_pool.row(row, request.kv_allocated_len)
    return_slots(cache, held[ceil_page(kv_len, cache.page_size) :])
    request.kv_len = request.kv_allocated_len = kv_len

"""A request ends: what it has computed goes to the cache, or nothing does.

Left out: a request that is to run again (`kvcore.serving.retraction`).
"""

from kvcore.prefix_cache import UnifiedRadixCache
from kvcore.serving.readiness import require_running
from kvcore.serving.request import ServingRequest


def finish(cache: UnifiedRadixCache, request: ServingRequest) -> None:
    """End a running request: its whole computed pages are cached, everything else is freed.

    Drafts are dropped. Afterwards the request holds nothing, as before it was admitted.

    Raises:
        RequestStateError: the request does not run; nothing changed.
    """
    require_running("finish", request)
    cache.cache_finished_req(request)
    request.kv_len = request.swa_evicted_seqlen = 0


def abort(cache: UnifiedRadixCache, request: ServingRequest) -> None:
    """End a running request, and cache nothing of it; otherwise as `finish`.

    Raises:
        RequestStateError: the request does not run; nothing changed.
    """
    require_running("abort", request)
    cache.cache_finished_req(request, is_insert=False)
    request.kv_len = request.swa_evicted_seqlen = 0

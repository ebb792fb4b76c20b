"""Whether a request is ready for a call: it runs or it does not, and its drafts are settled.

Every check raises before anything changes. Left out: whether there is room.
"""

from collections.abc import Sequence

from kvcore.allocator.arguments import as_number
from kvcore.errors import GeometryError, RequestStateError
from kvcore.prefix_cache import UnifiedRadixCache
from kvcore.serving.request import ServingRequest


def require_waiting(operation: str, request: ServingRequest, *, retracted: bool) -> None:
    """Raise RequestStateError unless the request holds nothing, and has been retracted or not."""
    seen = None
    if request.req_pool_idx is not None or request.last_node is not None:
        seen = f"runs in row {request.req_pool_idx}"
    elif retracted and request.kv_len == 0:
        seen = "was never admitted"
    elif not retracted and request.kv_len > 0:
        seen = f"was retracted with {request.kv_len} tokens"
    if seen is not None:
        expected = "a retracted one" if retracted else "a new one"
        raise RequestStateError(f"{operation}: a request that {seen}; expected {expected}")


def require_running(operation: str, request: ServingRequest) -> int:
    """The row of the request; raises RequestStateError if it has none."""
    if request.req_pool_idx is None:
        raise RequestStateError(f"{operation}: a request without a row; expected a running one")
    return request.req_pool_idx


def require_settled(operation: str, request: ServingRequest) -> int:
    """The row of a running request without drafts; raises RequestStateError for others."""
    row = require_running(operation, request)
    num_drafts = request.kv_allocated_len - request.kv_len
    if num_drafts != 0:
        raise RequestStateError(
            f"{operation}: the request in row {row} has {num_drafts} drafts; expected trim, "
            "finish, abort or retract first"
        )
    return row


def require_batch(operation: str, requests: Sequence[ServingRequest]) -> list[int]:
    """The rows of running requests without drafts, each named once; raises RequestStateError for
    others."""
    rows = [require_settled(operation, request) for request in requests]
    if len({id(request) for request in requests}) < len(requests):
        raise RequestStateError(f"{operation}: a request named twice; expected each once")
    return rows


def require_known(operation: str, request: ServingRequest, stop: int) -> None:
    """Raise GeometryError unless the first `stop` tokens of the request are known."""
    if stop > request.num_tokens:
        raise GeometryError(
            f"{operation}: token {stop} of a request of {request.num_tokens}; expected "
            "extend_tokens before the step that computes them"
        )


def require_context(operation: str, cache: UnifiedRadixCache, stop: int) -> None:
    """Raise GeometryError unless a row can hold `stop` tokens."""
    longest = cache.req_to_token_pool.max_context_len
    if stop > longest:
        raise GeometryError(
            f"{operation}: {stop} tokens; expected at most {longest} (max_context_len)"
        )


def as_step(operation: str, num_tokens: int) -> int:
    """The size of a step as an int; raises GeometryError unless it is one token or more."""
    num_tokens = as_number(operation, "num_tokens", num_tokens)
    if num_tokens < 1:
        raise GeometryError(f"{operation}: expected num_tokens >= 1, got {num_tokens}")
    return num_tokens

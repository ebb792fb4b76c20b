"""Requests hand what they have computed to the cache: chunk by chunk while they run, and at their
end, or nothing of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvcore import MatchPrefixParams, RadixKey, TreeNode
from kvcore.errors import GeometryError, InvalidSlotError, LockError

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 148))


@dataclass
class Running:
    """A request over a bench, as an engine would keep it."""

    token_ids: list[int]
    req_pool_idx: int | None = None
    kv_len: int = 0
    kv_allocated_len: int = 0
    prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    last_node: TreeNode | None = None
    extra_key: str | None = None
    freed: list[int] = field(default_factory=list)


def start(cached: Any, tokens: list[int], **known: Any) -> Running:
    """A request that runs over what the cache can serve of it, nothing computed behind it."""
    request = Running(tokens, **known)
    key = RadixKey(tokens, request.extra_key)
    match = cached.cache.match_prefix(MatchPrefixParams(key))
    cached.cache.inc_lock_ref(match.last_device_node)
    (row,) = cached.rows.alloc([request])
    request.last_node, request.prefix_len = match.last_device_node, match.prefix_len
    request.kv_len = request.kv_allocated_len = match.prefix_len
    cached.rows.write((row, slice(0, match.prefix_len)), match.device_indices)
    return request


def compute(cached: Any, request: Running, length: int, *, drafts: int = 0) -> None:
    """The request has `length` tokens computed, and slots for some more."""
    held = request.kv_allocated_len
    row = cached.rows.row(request.req_pool_idx, held)
    whole = cached.laws.extend_row(cached.allocator, row, length + drafts)
    cached.rows.write((request.req_pool_idx, slice(0, len(whole))), whole)
    request.kv_len, request.kv_allocated_len = length, length + drafts


def slide(cached: Any, request: Running) -> None:
    """Free the SWA slots that the window has left behind."""
    frontier = cached.cache.window_frontier(request.kv_len)
    first = max(request.swa_evicted_seqlen, request.prefix_len)
    if first < frontier:
        cached.allocator.free_swa(cached.rows.row(request.req_pool_idx, frontier)[first:])
    request.swa_evicted_seqlen = max(request.swa_evicted_seqlen, frontier)


def private(cached: Any, request: Running) -> torch.Tensor:
    """The slots that the request owns, one a page."""
    row = cached.rows.row(request.req_pool_idx, request.kv_allocated_len)
    return torch.as_tensor(row[request.prefix_len :])


@pytest.mark.parametrize(("page_size", "window"), [(1, 3), (2, 1), (2, 8), (4, 2), (4, 6)])
def test_a_finished_request_leaves_its_whole_pages(
    bench: Make, page_size: int, window: int
) -> None:
    cached = bench(page_size, window)
    request = start(cached, A)
    compute(cached, request, 19, drafts=3)
    cached.cache.cache_finished_req(request)
    whole = 19 // page_size * page_size
    assert cached.match(A).prefix_len == whole
    assert cached.cache.total_size() == (whole, whole)
    assert (request.req_pool_idx, request.last_node, request.prefix_len) == (None, None, 0)
    assert cached.rows.available_size() == 4
    cached.check()


@pytest.mark.parametrize(("page_size", "window"), [(1, 3), (2, 1), (2, 8), (4, 2), (4, 6)])
def test_an_aborted_request_leaves_nothing(bench: Make, page_size: int, window: int) -> None:
    cached = bench(page_size, window)
    cached.put(A[:8])
    request = start(cached, A)
    compute(cached, request, 27, drafts=2)
    slide(cached, request)
    cached.cache.cache_finished_req(request, is_insert=False)
    assert cached.cache.total_size() == (8, 8) == (cached.cache.full_evictable_size(), 8)
    assert cached.rows.available_size() == 4
    cached.check()


@pytest.mark.parametrize(
    ("page_size", "window"), [(1, 1), (1, 3), (2, 1), (2, 3), (2, 8), (4, 2), (4, 6), (8, 3)]
)
@pytest.mark.parametrize("length", [16, 17, 19, 23])
def test_what_a_slid_request_has_cached_can_be_served(
    bench: Make, page_size: int, window: int, length: int
) -> None:
    # sglang#30845 and sglang#29860: the eviction cursor reaches the tree, and leaves one window.
    cached = bench(page_size, window)
    request = start(cached, A)
    for computed in range(page_size, length + 1):
        compute(cached, request, computed)
        slide(cached, request)
    cursor = request.swa_evicted_seqlen
    cached.cache.cache_finished_req(request)
    whole = length // page_size * page_size
    assert cached.match(A).prefix_len == whole
    assert cached.cache.total_size() == (whole, whole - cursor)
    cached.check()


@pytest.mark.parametrize(("page_size", "window"), [(1, 3), (2, 1), (2, 8), (4, 2), (4, 6), (8, 3)])
def test_chunks_are_cached_while_the_request_runs(bench: Make, page_size: int, window: int) -> None:
    cached = bench(page_size, window)
    request = start(cached, A)
    for length in (3, 9, 10, 22, 31):
        compute(cached, request, length)
        slide(cached, request)
        cached.cache.cache_unfinished_req(request)
        whole = length // page_size * page_size
        assert request.prefix_len == whole
        assert cached.rows.row(request.req_pool_idx, whole).tolist() == (
            cached.slots(A[:whole]).tolist()
        )
        assert cached.cache.full_protected_size() == whole
        cached.check(private(cached, request))
    cached.cache.cache_finished_req(request)
    assert cached.cache.full_protected_size() == 0 == cached.cache.swa_protected_size()
    cached.check()


def test_two_requests_with_the_same_tokens_share_them_in_the_end(bench: Make) -> None:
    cached = bench(2, 4)
    first, second = start(cached, A), start(cached, A)
    for request in (first, second):
        compute(cached, request, 9)
        cached.cache.cache_unfinished_req(request)
    rows = [cached.rows.row(each.req_pool_idx, 8).tolist() for each in (first, second)]
    assert rows[0] == rows[1]
    assert first.last_node is second.last_node
    cached.check(private(cached, first), private(cached, second))
    cached.cache.cache_finished_req(first)
    cached.cache.cache_finished_req(second, is_insert=False)
    cached.check()


def test_a_running_request_recovers_a_tombstone_and_uses_the_slots_kept(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(A[:12], evicted=10)
    cached.lock(A[:12])
    kept = cached.slots(A[:10]).tolist()
    request = start(cached, A[:9])
    assert request.prefix_len == 0
    compute(cached, request, 9)
    cached.cache.cache_unfinished_req(request)
    assert cached.rows.row(request.req_pool_idx, 8).tolist() == kept[:8]
    assert cached.states(A[:12]) == [(0, 8, "live"), (8, 10, "tombstone"), (10, 12, "live")]
    cached.check(private(cached, request))


def test_nothing_happens_without_a_new_whole_page(bench: Make) -> None:
    cached = bench(4, 4)
    request = start(cached, A)
    compute(cached, request, 3)
    before = cached.shape()
    cached.cache.cache_unfinished_req(request)
    assert cached.shape() == before
    assert (request.prefix_len, request.last_node) == (0, cached.cache.root_node)


def test_nothing_happens_while_a_load_is_under_way_in_the_window(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:12], evicted=8)
    node = cached.lock(A[:8])
    slots = cached.slots(A[:8])[4:]
    peers = cached.allocator.swa_attn_allocator.alloc(4)
    cached.allocator.set_full_to_swa_mapping(slots, peers)
    load = cached.cache.begin_swa_load(node, 4)
    request = start(cached, A[:9])
    compute(cached, request, 9)
    cached.cache.cache_unfinished_req(request)
    assert request.prefix_len == 0
    cached.cache.end_swa_load(load, arrived=True)
    cached.cache.cache_unfinished_req(request)
    assert request.prefix_len == 8
    cached.check(private(cached, request))


def test_requests_of_another_extra_key_share_nothing(bench: Make) -> None:
    cached = bench(2, 4)
    for extra in ("a", "b"):
        request = start(cached, A[:8], extra_key=extra)
        assert request.prefix_len == 0
        compute(cached, request, 8)
        cached.cache.cache_finished_req(request)
    assert cached.cache.total_size() == (16, 16)
    cached.check()


def test_a_finish_frees_in_the_group_that_is_open(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    request = start(cached, [*A[:8], 1, 2, 3])
    compute(cached, request, 11)
    free = cached.allocator.full_available_size()
    cached.cache.free_group_begin()
    cached.cache.cache_finished_req(request, is_insert=False)
    assert cached.allocator.full_available_size() == free
    cached.cache.free_group_end()
    assert cached.allocator.full_available_size() == free + 4
    cached.check()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kv_len": 17}, GeometryError),
        ({"kv_len": -1}, GeometryError),
        ({"kv_len": 2.0}, GeometryError),
        ({"prefix_len": 3}, GeometryError),
        ({"prefix_len": 14}, GeometryError),
        ({"prefix_len": 4}, LockError),
        ({"kv_allocated_len": 10}, GeometryError),
        ({"swa_evicted_seqlen": 5}, GeometryError),
        ({"swa_evicted_seqlen": 14}, GeometryError),
        ({"swa_evicted_seqlen": -2}, GeometryError),
        ({"token_ids": A[:12]}, GeometryError),
        ({"req_pool_idx": None}, InvalidSlotError),
        ({"req_pool_idx": 3}, InvalidSlotError),
        ({"last_node": None}, LockError),
    ],
)
@pytest.mark.parametrize("call", ["cache_unfinished_req", "cache_finished_req"])
def test_a_request_that_contradicts_itself_is_refused(
    bench: Make, unchanged: Unchanged, call: str, change: dict[str, Any], error: type[Exception]
) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    request = start(cached, A)
    compute(cached, request, 13)
    for name, value in change.items():
        setattr(request, name, value)
    unchanged(cached, error, getattr(cached.cache, call), request)
    assert cached.rows.available_size() == 3


def test_a_request_whose_lock_was_released_is_refused(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    request = start(cached, A)
    compute(cached, request, 13)
    cached.cache.dec_lock_ref(request.last_node)
    unchanged(cached, LockError, cached.cache.cache_finished_req, request)

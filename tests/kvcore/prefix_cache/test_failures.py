"""What fails in the middle of a cache action can be done again: no slot has two owners, and none is
lost."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import ServingRequest, serving
from kvcore.errors import FreeGroupError, LockError

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 132))


class Refused(Exception):
    """What an inner call was made to raise."""


def refuse(*_: object) -> None:
    raise Refused


def start(cached: Any, tokens: list[int]) -> ServingRequest:
    request = ServingRequest(tokens)
    assert serving.admit(cached.cache, request) is not None
    return request


def private(cached: Any, request: ServingRequest) -> Any:
    row = cached.rows.row(request.req_pool_idx, request.kv_allocated_len)
    return row[request.prefix_len :]


@pytest.mark.parametrize(("owner", "name"), [("rows", "write"), ("allocator", "free")])
def test_a_chunk_that_could_not_be_cached_can_be_cached_again(
    bench: Make, unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    cached = bench(2, 4)
    request = start(cached, A[:9])
    cached.put(A[:4])
    with monkeypatch.context() as patch:
        patch.setattr(getattr(cached, owner), name, refuse)
        unchanged(cached, Refused, cached.cache.cache_unfinished_req, request)
    cached.cache.cache_unfinished_req(request)
    assert request.prefix_len == 8
    cached.check(private(cached, request))


@pytest.mark.parametrize("length", [10, 11])
def test_an_end_that_failed_can_be_repeated(
    bench: Make, unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    cached = bench(2, 2)
    request = start(cached, A[:length])
    cached.put(A[:8], evicted=6)
    with monkeypatch.context() as patch:
        patch.setattr(cached.allocator, "free", refuse)
        unchanged(cached, Refused, cached.cache.cache_finished_req, request)
    cached.cache.cache_finished_req(request)
    assert (request.req_pool_idx, request.kv_len) == (None, length)
    assert cached.match(A[:length]).prefix_len == 10
    cached.check()


def test_an_insert_that_fails_behind_the_rest_can_be_repeated(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = bench(2, 2)
    request = start(cached, A[:11])
    with monkeypatch.context() as patch:
        patch.setattr(cached.cache, "insert", refuse)
        with pytest.raises(Refused):
            cached.cache.cache_finished_req(request)
    cached.check(private(cached, request))
    cached.cache.cache_finished_req(request)
    assert cached.match(A[:11]).prefix_len == 10
    cached.check()


def test_a_request_has_ended_though_its_group_could_not(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = bench(2, 2)
    request = start(cached, A[:11])
    with monkeypatch.context() as patch:
        patch.setattr(cached.allocator, "free_group_end", refuse)
        with pytest.raises(Refused):
            cached.cache.cache_finished_req(request)
    assert cached.cache.group_open
    cached.cache.free_group_end()
    assert (request.req_pool_idx, request.last_node, request.kv_len) == (None, None, 11)
    cached.check()


def test_a_lock_that_no_group_can_be_opened_for_stays(
    bench: Make, unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = bench(2, 2)
    cached.put(A[:8])
    node = cached.lock(A[:8])
    with monkeypatch.context() as patch:
        patch.setattr(cached.allocator, "free_group_begin", refuse)
        unchanged(cached, Refused, cached.cache.dec_lock_ref, node)
    cached.cache.dec_lock_ref(node)


def test_a_group_of_the_allocator_is_a_group_of_the_cache(bench: Make) -> None:
    # The idiom of the field: the scheduler opens it around the requests of a batch that end.
    cached = bench(2, 4)
    first, second, third = (start(cached, [*A[:6], name]) for name in range(3))
    free = cached.allocator.full_available_size()
    cached.allocator.free_group_begin()
    assert cached.cache.group_open
    serving.finish(cached.cache, first)
    cached.cache.cache_unfinished_req(second)
    serving.abort(cached.cache, third)
    cached.evict(2, 2)
    assert cached.allocator.full_available_size() == free
    assert serving.admit(cached.cache, ServingRequest(range(60))) is None
    cached.allocator.free_group_end()
    assert not cached.cache.group_open
    cached.check(private(cached, second))


def test_a_group_is_over_when_the_allocator_was_cleared(bench: Make) -> None:
    cached = bench(2, 4)
    cached.cache.free_group_begin()
    cached.allocator.clear()
    assert not cached.cache.group_open
    with pytest.raises(FreeGroupError):
        cached.cache.free_group_end()


def test_flush_refuses_while_a_request_without_a_prefix_runs(
    bench: Make, unchanged: Unchanged
) -> None:
    cached = bench(2, 4)
    request = start(cached, A[:7])
    cached.put(A[20:24])
    assert "hold the root" in unchanged(cached, LockError, cached.cache.flush)
    serving.abort(cached.cache, request)
    cached.cache.flush()
    cached.check()
    unchanged(cached, LockError, cached.cache.dec_lock_ref, cached.cache.root_node)

"""Where a match ends: at a whole page, with one live window before it or nothing but live pages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import InsertParams, MatchPrefixParams, RadixKey, ReqToTokenPool, UnifiedRadixCache
from kvcore.errors import GeometryError, IndexTensorError

Make = Callable[..., Any]
A = list(range(100, 132))
B = A[:12] + list(range(900, 920))


def test_an_empty_cache_matches_nothing(bench: Make) -> None:
    cached = bench(4, 8)
    result = cached.match(A)
    assert (result.prefix_len, result.last_device_node) == (0, cached.cache.root_node)
    assert result.device_indices.tolist() == []
    assert result.last_device_node, "a node is something, though it holds no tokens"


def test_a_prefix_that_was_inserted_is_matched_with_its_slots(bench: Make) -> None:
    cached = bench(4, 8)
    cached.put(A[:16])
    result = cached.match(A)
    assert result.prefix_len == 16 == result.last_device_node.end
    assert result.device_indices.tolist() == cached.slots(A[:16]).tolist()


@pytest.mark.parametrize(("known", "served"), [(3, 0), (4, 4), (7, 4), (11, 8), (15, 12)])
def test_a_match_ends_at_a_whole_page(bench: Make, known: int, served: int) -> None:
    cached = bench(4, 8)
    cached.put(A[:16])
    assert cached.match(A[:known]).prefix_len == served


def test_a_key_that_differs_within_a_page_does_not_share_that_page(bench: Make) -> None:
    # sglang#36457: a split inside the page would give it two owners.
    cached = bench(4, 8)
    cached.put(A[:16])
    result = cached.match([*A[:10], 0, 0, 0, 0])
    assert (result.prefix_len, result.last_device_node.end) == (8, 8)
    cached.check()


def test_a_split_node_keeps_its_end_and_its_slots(bench: Make) -> None:
    cached = bench(4, 8)
    lower = cached.put(A[:16]).last_device_node
    slots = lower.value.tolist()
    upper = cached.match(B).last_device_node
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 12, 12, 16)
    assert upper.value.tolist() + lower.value.tolist() == slots
    assert lower.parent is upper
    cached.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_run_of_live_tokens_begins_anew_behind_a_tombstone(bench: Make, page_size: int) -> None:
    # sglang#29352: [0, 2P) live, [2P, 4P) tombstone, then one page less than a window is live.
    p = page_size
    cached = bench(p, 3 * p)
    cached.put(A[: 4 * p])
    cached.match(A[: 2 * p])
    cached.evict(0, 0)
    cached.match(A[: 2 * p])
    node = cached.node(A[: 4 * p])
    cached.put(A[: 6 * p])
    # The middle was used longest ago, once both ends have been used again.
    for each in cached.cache.path(cached.node(A[: 6 * p])):
        each.last_access = 0 if each is node else 100
    assert cached.evict(0, 1) == (0, 2 * p)
    assert [state for _, _, state in cached.states(A[: 6 * p])] == ["live", "tombstone", "live"]
    assert cached.match(A[: 6 * p]).prefix_len == 2 * p
    cached.put(A[: 7 * p])
    assert cached.match(A[: 7 * p]).prefix_len == 7 * p
    cached.check()


@pytest.mark.parametrize(
    ("page_size", "window", "tail"),
    [(1, 1, 1), (1, 3, 3), (2, 1, 2), (2, 3, 4), (4, 2, 4), (4, 4, 4), (4, 5, 8)],
)
def test_behind_tombstones_a_window_must_be_live_in_whole_pages(
    bench: Make, page_size: int, window: int, tail: int
) -> None:
    cached = bench(page_size, window)
    cached.put(A[:24], evicted=8)
    assert cached.match(A[:8]).prefix_len == 0
    assert cached.match(A[: 8 + tail - page_size]).prefix_len == 0
    assert cached.match(A[: 8 + tail]).prefix_len == 8 + tail


def test_a_match_that_falls_short_splits_nothing(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:8], evicted=2)
    cached.match(A[:4])
    assert [(node.start, node.end) for node in cached.cache.walk()] == [(0, 2), (2, 8)]


def test_equal_tokens_under_another_extra_key_share_nothing(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    other = MatchPrefixParams(RadixKey(A[:8], "adapter"))
    assert cached.cache.match_prefix(other).prefix_len == 0


def test_the_slots_of_a_match_are_a_copy(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    cached.match(A[:8]).device_indices.fill_(1)
    cached.check()


def test_queries_and_matches_are_counted_in_whole_pages(bench: Make) -> None:
    cached = bench(4, 4)
    cached.put(A[:8])
    cached.match(A[:15])
    assert (cached.cache.counters.queried_tokens, cached.cache.counters.matched_tokens) == (12, 8)


def test_a_match_that_is_not_used_yet_changes_nothing(bench: Make) -> None:
    cached = bench(2, 2)
    for tokens in (A[:4], A[8:12]):
        cached.put(tokens)
    key = RadixKey(A[:4])
    match = cached.cache.match_prefix(MatchPrefixParams(key, touch=False))
    assert match.prefix_len == 4
    assert cached.cache.counters.queried_tokens == 0
    assert cached.evict(1, 0) == (4, 4)
    assert cached.cache.find_path(key)[0] == 0

    cached.put(A[:4])
    kept = RadixKey(A[8:12])
    match = cached.cache.match_prefix(MatchPrefixParams(kept, touch=False))
    cached.cache.record_match(kept, match)
    counters = cached.cache.counters
    assert (counters.queried_tokens, counters.matched_tokens) == (4, 4)
    assert cached.evict(1, 0) == (4, 4)
    assert cached.cache.find_path(kept)[0] == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.match_prefix(RadixKey([1])),
        lambda cache: cache.match_prefix(MatchPrefixParams([1])),
        lambda cache: cache.insert(RadixKey([1])),
        lambda cache: cache.insert(InsertParams([1], torch.tensor([1]))),
        lambda cache: cache.evict(4),
        lambda cache: cache.find_path([1]),
    ],
)
def test_what_is_no_key_and_no_parameters_is_refused(
    bench: Make, call: Callable[[UnifiedRadixCache], object]
) -> None:
    with pytest.raises(IndexTensorError, match=r"expected (RadixKey|[A-Z][A-Za-z]+Params), got"):
        call(bench(2, 2).cache)


def test_token_ids_beyond_int64_are_refused() -> None:
    with pytest.raises(GeometryError, match="expected at most 9223372036854775807"):
        RadixKey([2**63])
    assert RadixKey(np.array([7], dtype=np.uint64)) == RadixKey([7])


def test_extra_keys_of_two_types_are_two(bench: Make) -> None:
    cached = bench(1, 1)
    cached.cache.insert(InsertParams(RadixKey([5], 1), cached.compute(1)))
    for extra_key, held in ((1, 1), (True, 0), ("1", 0), (None, 0)):
        assert cached.cache.find_path(RadixKey([5], extra_key))[0] == held
    assert RadixKey([5], 1) != RadixKey([5], True)
    with pytest.raises(GeometryError, match="expected None or a name"):
        RadixKey([5], ["a"])


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"]])
def test_token_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    with pytest.raises(GeometryError, match="expected a vector of integers"):
        RadixKey(ids)


def test_keys_are_equal_with_equal_tokens_and_extra_key() -> None:
    assert RadixKey([1, 2]) == RadixKey((1, 2))
    assert RadixKey([1, 2]) != RadixKey([1, 2], "x")
    assert hash(RadixKey([1, 2])) == hash(RadixKey([1, 2]))
    assert RadixKey([1, 2, 3])[1:] == RadixKey([2, 3])
    assert RadixKey([1, 2]) != [1, 2]
    assert repr(RadixKey(range(6), "x")) == "RadixKey([0, 1, 2, 3, … 6 in all], 'x')"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_size": 4}, "page_size 4, sliding_window_size 8; expected the allocator's 2"),
        ({"page_size": 2.0}, "whole number"),
        ({"sliding_window_size": 0}, "sliding_window_size 0; expected the allocator's 2, and at"),
        ({"sliding_window_size": None}, "whole number"),
        ({"req_to_token_pool": ReqToTokenPool(1, 8, "meta", False)}, "expected one device"),
    ],
)
def test_a_cache_that_fits_no_allocator_is_not_built(
    bench: Make, arguments: dict[str, Any], message: str
) -> None:
    cached = bench(2, 8)
    fitting = {
        "req_to_token_pool": cached.rows,
        "token_to_kv_pool_allocator": cached.allocator,
        "page_size": 2,
        "sliding_window_size": 8,
    }
    with pytest.raises(GeometryError, match=message):
        UnifiedRadixCache(**fitting | arguments)

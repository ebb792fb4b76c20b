"""What an insert keeps of the slots it is given: new tokens, and the peers of recovered tombstones;
all else is freed, in one group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import InsertParams, RadixKey
from kvcore.errors import GeometryError, IndexTensorError

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 132))
PAGES_AND_WINDOWS = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (4, 8)]


def test_new_tokens_are_cached_and_belong_to_the_cache(bench: Make) -> None:
    cached = bench(4, 8)
    result = cached.put(A[:12])
    assert (result.prefix_len, result.last_device_node.end) == (0, 12)
    assert cached.cache.total_size() == (12, 12)
    cached.check()


def test_tokens_behind_the_last_whole_page_are_left_to_the_caller(bench: Make) -> None:
    cached = bench(4, 8)
    slots = cached.compute(8)
    cached.cache.insert(InsertParams(RadixKey(A[:6]), slots[:6]))
    cached.check(slots[4:])


def test_the_caller_may_overwrite_what_it_has_inserted(bench: Make) -> None:
    cached = bench(2, 4)
    tokens, slots = torch.tensor(A[:8]).numpy(), cached.compute(8)
    kept = slots.tolist()
    cached.cache.insert(InsertParams(RadixKey(tokens), slots))
    tokens[:], slots[:] = 0, 0
    assert cached.match(A[:8]).device_indices.tolist() == kept


def test_any_integer_dtype_is_taken_for_slots(bench: Make) -> None:
    cached = bench(2, 4)
    cached.cache.insert(InsertParams(RadixKey(A[:4]), cached.compute(4).to(torch.int32)))
    assert cached.match(A[:4]).device_indices.dtype == torch.int64
    cached.check()


def test_what_the_tree_has_is_freed_once_more(bench: Make) -> None:
    cached = bench(4, 8)
    cached.put(A[:12])
    own = cached.slots(A[:12]).tolist()
    result = cached.put([*A[:8], *range(8)])
    assert (result.prefix_len, result.last_device_node.end) == (8, 16)
    assert cached.slots(A[:12]).tolist() == own
    assert cached.cache.counters.duplicate_tokens == 8
    cached.check()


@pytest.mark.parametrize(("page_size", "window"), PAGES_AND_WINDOWS)
def test_slots_without_peers_are_freed_where_the_tree_has_the_tokens(
    bench: Make, page_size: int, window: int
) -> None:
    cached = bench(page_size, window)
    cached.put(A[:16])
    cached.put(A[:16], evicted=8)
    assert [state for _, _, state in cached.states(A[:16])] == ["live"]
    cached.check()


def test_the_part_before_the_cursor_becomes_a_tombstone(bench: Make) -> None:
    cached = bench(4, 4)
    cached.put(A[:16], evicted=8)
    assert cached.states(A[:16]) == [(0, 8, "tombstone"), (8, 16, "live")]
    cached.check()


@pytest.mark.parametrize("evicted", [12, 16])
def test_a_tombstone_with_nothing_live_behind_it_is_not_cached(bench: Make, evicted: int) -> None:
    # sglang#29860
    cached = bench(4, 2)
    slots = cached.compute(12, evicted=12)
    result = cached.cache.insert(InsertParams(RadixKey(A[:12]), slots, 0, evicted))
    assert result.last_device_node is cached.cache.root_node
    assert cached.cache.total_size() == (0, 0)
    cached.check()


@pytest.mark.parametrize(("page_size", "window"), PAGES_AND_WINDOWS)
def test_an_unlocked_tombstone_takes_over_slots_and_peers(
    bench: Make, page_size: int, window: int
) -> None:
    cached = bench(page_size, window)
    cached.put(A[:16], evicted=8)
    slots = cached.compute(16)
    cached.cache.insert(InsertParams(RadixKey(A[:16]), slots))
    assert cached.slots(A[:8]).tolist() == slots[:8].tolist()
    assert {state for _, _, state in cached.states(A[:16])} == {"live"}
    assert cached.cache.counters.recovered_unlocked_pages == 8 // page_size
    cached.check()


@pytest.mark.parametrize(("page_size", "window"), PAGES_AND_WINDOWS)
def test_a_locked_tombstone_keeps_its_slots_and_takes_over_the_peers(
    bench: Make, page_size: int, window: int
) -> None:
    # sglang#29351: requests have these slots in their rows.
    cached = bench(page_size, window)
    cached.put(A[:16], evicted=8)
    node = cached.lock(A[:16])
    kept, slots = cached.slots(A[:8]).tolist(), cached.compute(16)
    peers = cached.allocator.translate_loc_from_full_to_swa(slots[:8]).tolist()
    cached.cache.insert(InsertParams(RadixKey(A[:16]), slots))
    assert cached.slots(A[:8]).tolist() == kept
    now = cached.allocator.translate_loc_from_full_to_swa(cached.slots(A[:8]))
    assert now.tolist() == peers
    assert cached.cache.counters.recovered_locked_pages == 8 // page_size
    cached.check()
    cached.cache.dec_lock_ref(node)
    cached.check()


@pytest.mark.parametrize("locked", [False, True], ids=["unlocked", "locked"])
def test_a_tombstone_is_recovered_from_the_cursor_on(bench: Make, locked: bool) -> None:
    cached = bench(2, 2)
    cached.put(A[:16], evicted=12)
    if locked:
        cached.lock(A[:16])
    cached.put(A[:16], evicted=6)
    assert cached.states(A[:16]) == [(0, 6, "tombstone"), (6, 16, "live")]
    cached.check()


def test_a_tombstone_is_recovered_up_to_the_end_of_the_key(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(A[:16], evicted=12)
    cached.put(A[:8])
    assert cached.states(A[:16])[:2] == [(0, 8, "live"), (8, 12, "tombstone")]
    cached.check()


def test_the_callers_prefix_is_left_as_it_is(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(A[:8], evicted=4)
    cached.lock(A[:8])
    result = cached.put(A[:16], prefix=8, evicted=10)
    assert (result.prefix_len, result.last_device_node.end) == (8, 16)
    assert [state for _, _, state in cached.states(A[:16])] == [
        "tombstone",
        "live",
        "tombstone",
        "live",
    ]
    cached.check()


def test_another_request_may_have_cached_the_tokens_behind_the_prefix(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:4])
    cached.lock(A[:4])
    cached.put(A[:12])
    own = cached.slots(A[:12]).tolist()
    assert cached.put(A[:16], prefix=4).prefix_len == 12
    assert cached.slots(A[:12]).tolist() == own
    cached.check()


def test_an_empty_key_is_the_root(bench: Make) -> None:
    cached = bench(4, 4)
    result = cached.put([])
    assert (result.prefix_len, result.last_device_node) == (0, cached.cache.root_node)


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
def test_recovery_right_after_eviction_loses_no_page(bench: Make, in_group: bool) -> None:
    # sglang#36081: the peers that were queued are not the ones that are there at the end.
    cached = bench(2, 2, full=12, swa=12)
    cached.put(A[:8])
    cached.lock(A[:8])
    slots = cached.compute(8)
    if in_group:
        cached.cache.free_group_begin()
    cached.evict(0, 6)
    cached.cache.insert(InsertParams(RadixKey(A[:8]), slots))
    if in_group:
        assert cached.allocator.full_available_size() == 24 - 16
        cached.cache.free_group_end()
    assert cached.cache.total_size() == (8, 8)
    cached.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prev_prefix_len": -4}, "whole pages of 4"),
        ({"prev_prefix_len": 2}, "whole pages of 4"),
        ({"prev_prefix_len": 12}, "at most the 8 tokens that the tree holds"),
        ({"prev_prefix_len": 1.0}, "whole number"),
        ({"swa_evicted_seqlen": -4}, "whole pages of 4"),
        ({"swa_evicted_seqlen": 3}, "whole pages of 4"),
        ({"swa_evicted_seqlen": None}, "whole number"),
    ],
)
def test_lengths_that_no_row_has_are_refused(
    bench: Make, unchanged: Unchanged, change: dict[str, Any], message: str
) -> None:
    cached = bench(4, 8)
    cached.put(A[:8])
    params = InsertParams(RadixKey(A[:16]), cached.compute(16), **change)
    assert message in unchanged(cached, GeometryError, cached.cache.insert, params)


def test_too_few_slots_are_refused(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(4, 8)
    params = InsertParams(RadixKey(A[:16]), cached.compute(12))
    message = unchanged(cached, GeometryError, cached.cache.insert, params)
    assert message == "insert: 12 slots for 16 tokens; expected as many"


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(16),
        torch.zeros((4, 4), dtype=torch.int64),
        torch.zeros(16, dtype=torch.int64, device="meta"),
        list(range(16)),
    ],
    ids=["dtype", "shape", "device", "type"],
)
def test_a_value_that_is_no_vector_of_slots_is_refused(
    bench: Make, unchanged: Unchanged, value: Any
) -> None:
    cached = bench(4, 8)
    params = InsertParams(RadixKey(A[:16]), value)
    assert unchanged(cached, IndexTensorError, cached.cache.insert, params).startswith("insert: ")

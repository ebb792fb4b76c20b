"""Tombstones whose SWA value comes back from the host: not served, not evicted and not recovered
meanwhile, whatever else happens to the tree."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import InsertParams, RadixKey, TreeNode
from kvcore.errors import GeometryError, LockError

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 132))


def begin(cached: Any, end: int, start: int) -> tuple[TreeNode, list[TreeNode]]:
    """A load into the tombstones of tokens `start` to `end` is under way."""
    node = cached.lock(A[:end])
    bare = [each for each in cached.cache._nodes_from(node, start) if each.state == "tombstone"]
    for each in bare:
        peers = cached.allocator.swa_attn_allocator.alloc(len(each))
        cached.allocator.set_full_to_swa_mapping(each.value, peers)
    return node, cached.cache.begin_swa_load(node, start)


def test_the_path_is_found_whatever_can_be_served_of_it(bench: Make) -> None:
    cached = bench(2, 8)
    cached.put(A[:16], evicted=12)
    assert cached.match(A[:12]).prefix_len == 0
    found, node = cached.cache.find_path(RadixKey([*A[:11], 0, 0]))
    assert (found, node.end, node.state) == (10, 10, "tombstone")
    assert cached.cache.find_path(RadixKey([0, 0])) == (0, cached.cache.root_node)
    cached.check()


@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "failed"])
def test_loading_tombstones_become_live_or_tombstones_again(bench: Make, arrived: bool) -> None:
    cached = bench(2, 8)
    cached.put(A[:16], evicted=12)
    node, load = begin(cached, 12, 4)
    assert [(each.start, each.end) for each in load] == [(4, 12)]
    assert cached.states(A[:16]) == [(0, 4, "tombstone"), (4, 12, "loading"), (12, 16, "live")]
    assert cached.match(A[:16]).prefix_len == 0
    assert cached.cache.total_size() == (16, 4)
    cached.check()
    cached.cache.end_swa_load(load, arrived=arrived)
    assert load == []
    state = "live" if arrived else "tombstone"
    assert [seen for _, _, seen in cached.states(A[:12])][-1] == state
    assert cached.match(A[:16]).prefix_len == (16 if arrived else 0)
    assert cached.cache.counters.reloaded_pages == (4 if arrived else 0)
    cached.cache.dec_lock_ref(node)
    cached.check()


@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "failed"])
def test_a_split_meanwhile_keeps_the_parts_together(bench: Make, arrived: bool) -> None:
    cached = bench(2, 8)
    cached.put(A[:16], evicted=12)
    node, load = begin(cached, 12, 4)
    slots = [slot for each in load for slot in each.value.tolist()]
    cached.put([*A[:8], *range(8)])
    cached.put([*A[:6], *range(8)])
    assert [(each.start, each.end) for each in load] == [(4, 6), (6, 8), (8, 12)]
    assert [slot for each in load for slot in each.value.tolist()] == slots
    cached.check()
    cached.cache.end_swa_load(load, arrived=arrived)
    assert "loading" not in {each.state for each in cached.cache.walk()}
    cached.cache.dec_lock_ref(node)
    cached.check()


def test_loading_nodes_are_neither_evicted_nor_recovered(bench: Make) -> None:
    cached = bench(2, 8)
    cached.put(A[:16], evicted=12)
    node, load = begin(cached, 12, 4)
    slots = cached.compute(16)
    cached.cache.insert(InsertParams(RadixKey(A[:16]), slots))
    assert cached.states(A[:16]) == [(0, 4, "live"), (4, 12, "loading"), (12, 16, "live")]
    cached.evict(100, 100)
    assert cached.states(A[:12]) == [(0, 4, "tombstone"), (4, 12, "loading")]
    with pytest.raises(LockError):
        cached.cache.flush()
    cached.check()
    cached.cache.end_swa_load(load, arrived=False)
    cached.cache.dec_lock_ref(node)
    assert cached.cache.total_size() == (0, 0)
    cached.check()


def test_two_loads_on_one_path_end_apart(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:16], evicted=12)
    upper, first = begin(cached, 8, 4)
    lower, second = begin(cached, 12, 8)
    cached.cache.end_swa_load(second, arrived=True)
    assert cached.states(A[:12])[1:] == [(4, 8, "loading"), (8, 12, "live")]
    cached.cache.end_swa_load(first, arrived=False)
    assert cached.states(A[:12])[1:] == [(8, 12, "live")]
    cached.cache.dec_lock_ref(upper)
    cached.cache.dec_lock_ref(lower)
    cached.check()


def test_without_tombstones_there_is_nothing_to_load(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:8])
    assert cached.cache.begin_swa_load(cached.lock(A[:8]), 4) == []
    assert cached.cache.begin_swa_load(cached.cache.root_node, 0) == []


@pytest.mark.parametrize("start", [-2, 3, 10, None])
def test_a_load_begins_at_a_page_of_the_prefix(
    bench: Make, unchanged: Unchanged, start: Any
) -> None:
    cached = bench(2, 4)
    cached.put(A[:16], evicted=8)
    node = cached.lock(A[:8])
    unchanged(cached, GeometryError, cached.cache.begin_swa_load, node, start)


def test_a_load_needs_a_lock(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(2, 4)
    cached.put(A[:16], evicted=8)
    node = cached.node(A[:8])
    unchanged(cached, LockError, cached.cache.begin_swa_load, node, 4)


def test_only_the_list_that_began_a_load_ends_it(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(2, 4)
    cached.put(A[:16], evicted=8)
    _, load = begin(cached, 8, 4)
    end = cached.cache.end_swa_load
    message = unchanged(cached, LockError, end, list(load), arrived=True)
    assert "expected the list of begin_swa_load" in message

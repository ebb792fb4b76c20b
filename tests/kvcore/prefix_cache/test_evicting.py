"""What goes when memory runs short: the least recently used of what nothing holds, leaves for the
full side, anything live for the SWA side, and never a node more than is asked for."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import EvictParams
from kvcore.errors import GeometryError, LockError

Make = Callable[..., Any]
Unchanged = Callable[..., str]


def text(name: int, length: int) -> list[int]:
    return list(range(1000 * name, 1000 * name + length))


def test_the_leaf_used_longest_ago_goes_first(bench: Make) -> None:
    cached = bench(2, 4)
    for name in (1, 2, 3):
        cached.put(text(name, 4))
    cached.match(text(1, 4))
    assert cached.evict(1, 0) == (4, 4)
    left = [node.key.token_ids[0] for node in cached.cache.walk()]
    assert left == [1000, 3000]
    assert cached.evict(1, 0) == (4, 4)
    assert [node.key.token_ids[0] for node in cached.cache.walk()] == [1000]
    cached.check()


def test_a_parent_is_a_leaf_once_its_children_are_gone(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 8))
    cached.put([*text(1, 4), *text(2, 4)])
    assert cached.evict(12, 0) == (12, 12)
    assert cached.cache.total_size() == (0, 0)
    cached.check()


def test_no_more_nodes_go_than_are_needed(bench: Make) -> None:
    cached = bench(1, 1)
    for name in range(1, 9):
        cached.put(text(name, 3))
    assert cached.evict(4, 0) == (6, 6)
    assert cached.evict(0, 4) == (6, 6)
    cached.check()


def test_what_goes_for_the_full_side_counts_for_the_swa_side(bench: Make) -> None:
    cached = bench(1, 1)
    for name in range(1, 5):
        cached.put(text(name, 3))
    assert cached.evict(3, 3) == (3, 3)
    assert cached.evict(3, 4) == (6, 6)


def test_an_inner_node_becomes_a_tombstone(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 8))
    cached.match(text(1, 4))
    cached.put([*text(1, 8), *text(2, 4)])
    # All nodes of the path were used at the same time: the one nearest to the root goes first.
    assert cached.evict(0, 1) == (0, 4)
    assert cached.states(text(1, 8)) == [(0, 4, "tombstone"), (4, 8, "live")]
    counters = cached.cache.counters
    assert (counters.tombstoned_tokens, counters.tombstoned_pages) == (4, 2)
    assert (counters.evicted_tokens, counters.evicted_swa_tokens) == (0, 4)
    cached.check()


def test_a_leaf_goes_whole_for_the_swa_side(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 4))
    assert cached.evict(0, 1) == (4, 4)
    assert cached.cache.total_size() == (0, 0)
    cached.check()


@pytest.mark.parametrize("goal", [(4, 0), (0, 4)], ids=["full side", "SWA side"])
def test_tombstones_go_with_the_last_leaf_behind_them(bench: Make, goal: tuple[int, int]) -> None:
    # sglang#29860
    cached = bench(2, 2)
    cached.put(text(1, 12), evicted=8)
    assert cached.evict(*goal) == (12, 4)
    assert cached.cache.total_size() == (0, 0)
    cached.check()


def test_a_tombstone_with_another_child_stays(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 8), evicted=4)
    cached.put([*text(1, 4), *text(2, 4)], evicted=4)
    assert cached.evict(1, 0) == (4, 4)
    assert cached.states([*text(1, 4), *text(2, 4)]) == [(0, 4, "tombstone"), (4, 8, "live")]
    cached.check()


def test_what_is_locked_stays(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(text(1, 12))
    node = cached.lock(text(1, 12))
    assert cached.evict(100, 100) == (0, 8)
    assert cached.states(text(1, 12)) == [(0, 8, "tombstone"), (8, 12, "live")]
    cached.cache.dec_lock_ref(node)
    assert cached.evict(100, 0) == (12, 4)
    cached.check()


def test_everything_unlocked_can_be_had(bench: Make) -> None:
    cached = bench(2, 4, full=20, swa=20)
    cached.put(text(1, 12))
    cached.put([*text(1, 6), *text(2, 6)])
    cached.lock(text(1, 6))
    cache = cached.cache
    full, swa = cache.full_evictable_size(), cache.swa_evictable_size()
    assert (full, swa) == (12, 14)
    assert cached.evict(full, swa) == (full, swa)
    assert cached.allocator.full_available_size() == 40 - 6
    assert cached.allocator.swa_available_size() == 40 - 4
    cached.check()


def test_in_an_open_group_what_is_evicted_waits_for_its_end(bench: Make) -> None:
    cached = bench(2, 2, full=8, swa=8)
    cached.put(text(1, 8))
    cached.cache.free_group_begin()
    assert cached.cache.group_open
    assert cached.evict(8, 8) == (8, 8)
    assert cached.allocator.full_available_size() == 8
    cached.cache.free_group_end()
    assert not cached.cache.group_open
    assert cached.allocator.full_available_size() == 16
    cached.check()


def test_a_node_that_is_gone_can_be_neither_locked_nor_unlocked(
    bench: Make, unchanged: Unchanged
) -> None:
    cached = bench(2, 2)
    node = cached.put(text(1, 8)).last_device_node
    cached.evict(8, 0)
    for call in (cached.cache.inc_lock_ref, cached.cache.dec_lock_ref):
        assert "is not in the tree" in unchanged(cached, LockError, call, node)


@pytest.mark.parametrize("goal", [(-1, 0), (0, -1), (1.5, 0), (0, None)])
def test_goals_that_are_no_number_of_tokens_are_refused(
    bench: Make, unchanged: Unchanged, goal: tuple[Any, Any]
) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 8))
    message = unchanged(cached, GeometryError, cached.cache.evict, EvictParams(*goal))
    assert message.startswith("evict: ")


def test_flush_frees_everything(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 12), evicted=8)
    cached.put(text(2, 8))
    cached.cache.flush()
    assert cached.cache.total_size() == (0, 0)
    assert cached.match(text(2, 8)).prefix_len == 0
    cached.check()


def test_flush_refuses_while_anything_is_locked(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(2, 2)
    cached.put(text(1, 8))
    node = cached.lock(text(1, 4))
    assert "expected none" in unchanged(cached, LockError, cached.cache.flush)
    cached.cache.dec_lock_ref(node)
    cached.cache.flush()
    cached.check()


def test_reset_forgets_and_frees_nothing(bench: Make) -> None:
    cached = bench(2, 2)
    node = cached.put(text(1, 8)).last_device_node
    cached.cache.free_group_begin()
    cached.allocator.clear()
    cached.cache.reset()
    assert not cached.cache.group_open
    assert cached.cache.total_size() == (0, 0)
    with pytest.raises(LockError):
        cached.cache.inc_lock_ref(node)
    cached.put(text(1, 8))
    cached.check()


@pytest.mark.parametrize("chains", [20, 80])
def test_each_evicted_node_costs_a_few_heap_operations(bench: Make, chains: int) -> None:
    cached = bench(1, 1, full=4 * chains, swa=4 * chains)
    for name in range(1, chains + 1):
        cached.put(text(name, 2))
        cached.put(text(name, 3))
    heaps = (cached.cache._unlocked_leaves, cached.cache._unlocked_live)
    for _ in range(5):  # Touches cost nothing, however many.
        for name in range(1, chains + 1):
            cached.match(text(name, 3))
    before = sum(heap.operations for heap in heaps)
    assert cached.evict(3 * chains, 0) == (3 * chains, 3 * chains)
    moved = sum(heap.operations for heap in heaps) - before
    assert moved <= 4 * (2 * chains)


def test_the_heaps_stay_as_small_as_the_tree(bench: Make) -> None:
    cached = bench(1, 1, full=40, swa=40)
    for name in range(1, 120):
        if cached.allocator.full_available_size() < 3:
            cached.evict(3, 3)
        cached.put(text(name, 3))
    nodes = len(list(cached.cache.walk()))
    for heap in (cached.cache._unlocked_leaves, cached.cache._unlocked_live):
        assert len(heap) <= 2 * nodes + 8

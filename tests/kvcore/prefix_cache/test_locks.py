"""What a lock holds: all full slots of a prefix, and the SWA slots of its last window, live or not;
and that what was locked once is unlocked once."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import DecLockRefResult, IncLockRefResult
from kvcore.errors import CacheStateError, FreeGroupError, LockError

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 132))


def held(cached: Any, tokens: list[int]) -> list[tuple[int, int]]:
    """Lock counts of each page of a path."""
    counts = []
    for node in cached.cache.path(cached.node(tokens)):
        pages = len(node) // cached.page_size
        counts += [(node.full_lock_ref, node.swa_lock_ref)] * pages
    return counts


@pytest.mark.parametrize(
    ("page_size", "window", "in_window"), [(1, 3, 3), (2, 3, 2), (2, 1, 1), (4, 2, 1), (4, 5, 2)]
)
def test_a_lock_holds_the_path_and_the_pages_of_one_window(
    bench: Make, page_size: int, window: int, in_window: int
) -> None:
    cached = bench(page_size, window)
    cached.put(A[:16])
    node = cached.lock(A[:12])
    pages, locked = 16 // page_size, 12 // page_size
    assert held(cached, A[:16]) == [
        (int(page < locked), int(locked - in_window <= page < locked)) for page in range(pages)
    ]
    assert cached.cache.full_protected_size() == 12
    assert cached.cache.swa_protected_size() == in_window * page_size
    cached.cache.dec_lock_ref(node)
    assert held(cached, A[:16]) == [(0, 0)] * pages
    cached.check()


def test_a_lock_says_what_can_no_longer_be_evicted(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:16])
    node = cached.node(A[:12])
    assert cached.cache.inc_lock_ref(node) == IncLockRefResult(12, 4)
    assert cached.cache.inc_lock_ref(node) == IncLockRefResult(0, 0)
    assert cached.cache.dec_lock_ref(node) == DecLockRefResult(0, 0)
    assert cached.cache.dec_lock_ref(node) == DecLockRefResult(12, 4)


def test_locking_the_root_does_nothing(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:4])
    root = cached.cache.root_node
    assert cached.cache.inc_lock_ref(root) == IncLockRefResult()
    assert cached.cache.dec_lock_ref(root) == DecLockRefResult()
    cached.check()


def test_tombstones_in_the_window_are_locked_too(bench: Make) -> None:
    # bytedance/sglang#748: they may be live when the lock is released.
    cached = bench(2, 8)
    cached.put(A[:8], evicted=6)
    node = cached.lock(A[:8])
    assert held(cached, A[:8]) == [(1, 1)] * 4
    assert cached.cache.swa_protected_size() == 2
    cached.put(A[:8])
    assert cached.cache.swa_protected_size() == 8
    cached.cache.dec_lock_ref(node)
    assert cached.cache.swa_evictable_size() == 8
    cached.check()


def test_parts_of_a_split_node_are_held_alike(bench: Make) -> None:
    cached = bench(2, 16)
    cached.put(A[:16])
    first, second = cached.lock(A[:16]), cached.lock(A[:16])
    cached.match(A[:6])
    cached.put([*A[:10], 1, 2])
    assert held(cached, A[:16]) == [(2, 2)] * 8
    cached.cache.dec_lock_ref(first)
    cached.cache.dec_lock_ref(second)
    assert held(cached, A[:16]) == [(0, 0)] * 8
    cached.check()


def test_nested_locks_are_released_in_any_order(bench: Make) -> None:
    cached = bench(2, 4)
    cached.put(A[:16])
    nodes = [cached.lock(A[:end]) for end in (4, 16, 10, 10)]
    for node in (nodes[2], nodes[1], nodes[0], nodes[3]):
        cached.cache.dec_lock_ref(node)
        cached.check()
    assert cached.cache.full_evictable_size() == 16 == cached.cache.swa_evictable_size()


def test_a_lock_that_nobody_holds_is_not_released(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(2, 4)
    cached.put(A[:16])
    lower, upper = cached.lock(A[:16]), cached.node(A[:14])
    # The path of another lock goes through it, which makes its counts positive.
    assert upper.full_lock_ref == upper.swa_lock_ref == 1
    message = unchanged(cached, LockError, cached.cache.dec_lock_ref, upper)
    assert "no lock ends with TreeNode(12..14" in message
    cached.cache.dec_lock_ref(lower)
    unchanged(cached, LockError, cached.cache.dec_lock_ref, lower)


def test_a_bare_tombstone_goes_with_its_last_lock(bench: Make) -> None:
    # sglang#29860
    cached = bench(2, 2)
    cached.put(A[:12], evicted=8)
    node = cached.lock(A[:6])
    assert cached.evict(100, 100) == (6, 4)
    assert cached.states(A[:6]) == [(0, 6, "tombstone")]
    cached.cache.dec_lock_ref(node)
    assert cached.cache.total_size() == (0, 0)
    cached.check()


def test_a_bare_tombstone_that_another_lock_holds_stays(bench: Make) -> None:
    cached = bench(2, 2)
    cached.put(A[:12], evicted=8)
    inner, outer = cached.lock(A[:6]), cached.lock(A[:4])
    cached.evict(100, 100)
    cached.cache.dec_lock_ref(inner)
    assert cached.states(A[:4]) == [(0, 4, "tombstone")]
    assert cached.cache.total_size() == (4, 0)
    cached.cache.dec_lock_ref(outer)
    cached.check()


def test_a_group_is_opened_and_closed_once(bench: Make, unchanged: Unchanged) -> None:
    # sglang#36739
    cached = bench(2, 2)
    unchanged(cached, FreeGroupError, cached.cache.free_group_end)
    cached.cache.free_group_begin()
    unchanged(cached, FreeGroupError, cached.cache.free_group_begin)
    cached.cache.free_group_end()
    unchanged(cached, FreeGroupError, cached.cache.free_group_end)


def test_a_call_that_fails_closes_its_group(bench: Make) -> None:
    cached = bench(2, 2)
    with pytest.raises(ZeroDivisionError), cached.cache.frees():
        _ = 1 / int(not cached.cache.group_open)
    assert not cached.cache.group_open
    assert not cached.allocator.free_group_is_open


def test_a_cache_that_adds_up_is_sane_and_can_be_printed(
    bench: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = bench(2, 4)
    cached.put(A[:8], evicted=2)
    cached.lock(A[:8])
    cached.cache.sanity_check()
    cached.cache.pretty_print()
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("TreeNode(0..2, tombstone, locks 1 full 0 SWA) RadixKey([100, 101])")
    assert second.startswith("  TreeNode(2..4, live, locks 1 full 0 SWA)")
    assert third.startswith("    TreeNode(4..8, live, locks 1 full 1 SWA)")
    assert last.startswith("8 tokens, 6 with SWA value")


def _forget_a_lock(node: Any) -> None:
    node.full_lock_ref -= 1


def _lose_a_slot(node: Any) -> None:
    node.value = node.value[1:]


def _move(node: Any) -> None:
    node.start += 1


def _rename(node: Any) -> None:
    node.key = node.key[2:]


def _break_a_page(node: Any) -> None:
    node.key, node.value = node.key[:7], node.value[:7]


def _unlock_twice(node: Any) -> None:
    node.swa_lock_ref -= 2


def _load_nothing(node: Any) -> None:
    node.state = "loading"


def _bury(node: Any) -> None:
    node.state = "tombstone"
    node.full_lock_ref = node.lock_ends = 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_forget_a_lock, "is not locked by the 1 locks"),
        (_lose_a_slot, "holds 7 slots"),
        (_move, "does not begin where its parent ends"),
        (_rename, "not the child that its parent knows"),
        (_break_a_page, "is not made of whole pages of 2"),
        (_unlock_twice, "unlocked more often than locked"),
        (_load_nothing, "loading without a load"),
        (_bury, "tombstone without children"),
    ],
)
def test_sanity_check_names_the_node_that_contradicts(
    bench: Make, damage: Callable[[Any], None], message: str
) -> None:
    cached = bench(2, 8)
    node = cached.put(A[:8]).last_device_node
    cached.lock(A[:8])
    damage(node)
    with pytest.raises(CacheStateError, match=message):
        cached.cache.sanity_check()


def test_sanity_check_recounts_the_sizes(bench: Make) -> None:
    cached = bench(2, 8)
    cached.put(A[:8]).last_device_node.swa_lock_ref = 1
    with pytest.raises(CacheStateError, match="the nodes add up to"):
        cached.cache.sanity_check()

"""The cached pages: what can be served, what a lock holds, and sizes that equal a recount."""

import random

import pytest

from kvcore.models.prefix_tree import PageState, PrefixTree, TreePage
from kvcore.models.state import Page
from kvcore.models.texts import PageKey

SIZE = 2
STATES: dict[str, PageState] = {"L": "live", "T": "tombstone", "c": "loading"}


def key(number: int) -> PageKey:
    """The key of a page, one a number."""
    return ((number, 0, SIZE),)


def grown(states: str, window_pages: int = 2) -> tuple[PrefixTree, list[TreePage]]:
    """A tree of one branch, a letter a page."""
    tree = PrefixTree(window_pages)
    path = [tree.root]
    for number, letter in enumerate(states, 1):
        path.append(tree.add(path[-1], key(number), Page(number, number), STATES[letter]))
    return tree, path[1:]


def recounted(tree: PrefixTree) -> tuple[int, int, int]:
    """The sizes, by looking at every page."""
    nodes = list(tree.pages.values())
    live = [node for node in nodes if node.state == "live"]
    full = sum(node.full_locks == 0 for node in nodes)
    return full, sum(node.swa_locks == 0 for node in live), len(live)


def sizes(tree: PrefixTree) -> tuple[int, int, int]:
    return tree.full_evictable, tree.swa_evictable, tree.live


def test_a_path_ends_where_the_tree_has_no_such_page() -> None:
    tree, path = grown("LLL")
    assert tree.path([key(1), key(2), key(9)]) == path[:2]
    assert tree.path([key(2)]) == []
    assert tree.path([]) == []


@pytest.mark.parametrize(
    ("states", "window_pages", "served"),
    [
        ("LLL", 2, 3),
        ("L", 4, 1),
        ("TL", 2, 0),
        ("TLL", 2, 3),
        ("LTL", 2, 1),
        ("LLTL", 2, 2),
        ("LLTLL", 2, 5),
        ("LLTLLT", 2, 5),
        ("LLcL", 2, 2),
        ("TTT", 1, 0),
        ("TTL", 1, 3),
        ("", 1, 0),
    ],
)
def test_a_match_ends_after_a_live_window_or_a_live_front(
    states: str, window_pages: int, served: int
) -> None:
    tree, path = grown(states, window_pages)
    assert tree.servable(path) == served


def test_a_lock_holds_the_path_and_the_last_window() -> None:
    tree, path = grown("LTLLL")
    tree.lock(path[:4])
    assert [node.full_locks for node in path] == [1, 1, 1, 1, 0]
    assert [node.swa_locks for node in path] == [0, 0, 1, 1, 0]
    assert sizes(tree) == recounted(tree) == (1, 2, 4)


def test_a_window_counts_tombstones_too() -> None:
    tree, path = grown("LTL")
    tree.lock(path)
    assert [node.swa_locks for node in path] == [0, 1, 1]
    tree.turn(path[1], "live")
    assert sizes(tree) == recounted(tree) == (0, 1, 3)
    tree.unlock(path)
    assert [(node.full_locks, node.swa_locks) for node in path] == [(0, 0)] * 3
    assert sizes(tree) == recounted(tree) == (3, 3, 3)


@pytest.mark.parametrize("held", range(6))
def test_a_lock_that_is_extended_is_a_new_lock_of_the_whole(held: int) -> None:
    tree, path = grown("LLTLLL")
    other, same = grown("LLTLLL")
    tree.lock(path[:held])
    tree.extend_lock(path, held)
    other.lock(same)
    assert [(n.full_locks, n.swa_locks) for n in path] == [
        (n.full_locks, n.swa_locks) for n in same
    ]
    assert sizes(tree) == sizes(other) == recounted(tree)


def test_a_page_that_is_replaced_keeps_its_place() -> None:
    tree, path = grown("LT")
    tree.replace(path[1], Page(9, 9))
    assert tree.path([key(1), key(2)]) == path
    assert tree.pages[9] is path[1]
    assert 2 not in tree.pages


def test_tombstones_and_recoveries_are_counted_page_by_page() -> None:
    tree, path = grown("LLTT")
    assert tree.tombstones_made == 2
    tree.turn(path[1], "tombstone")
    assert tree.tombstones_made == 3
    tree.lock(path[:2])
    tree.turn(path[1], "live")
    tree.turn(path[3], "live")
    assert (tree.recovered_locked, tree.recovered_unlocked) == (1, 1)


def test_what_comes_from_the_host_is_no_recovery_and_no_tombstone() -> None:
    tree, path = grown("LTT")
    for node in path[1:]:
        tree.turn(node, "loading")
    tree.turn(path[1], "live")
    tree.turn(path[2], "tombstone")
    assert tree.tombstones_made == 2
    assert (tree.recovered_locked, tree.recovered_unlocked) == (0, 0)


def test_the_longest_texts_are_those_of_the_leaves() -> None:
    tree, path = grown("LL")
    tree.add(path[0], ((1, 2, 1), (7, 0, 1)), Page(5, 5), "live")
    assert sorted(tree.texts()) == [((1, 2), (2, 2)), ((1, 3), (7, 1))]
    assert PrefixTree(1).texts() == []


def test_sizes_and_the_order_of_use_equal_a_recount_whatever_happens() -> None:
    rng = random.Random(5)
    tree = PrefixTree(2)
    locked: list[list[TreePage]] = []
    for number in range(1, 400):
        nodes = [tree.root, *tree.pages.values()]
        node = rng.choice(nodes)
        match rng.randrange(7):
            case 0 | 1:
                state = rng.choice(("live", "tombstone", "loading"))
                tree.add(node, key(number), Page(number, number), state)
            case 2:
                path = path_to(node)
                tree.lock(path)
                locked.append(path)
            case 3 if locked:
                tree.unlock(locked.pop(rng.randrange(len(locked))))
            case 4 if node is not tree.root:
                tree.turn(node, rng.choice(("live", "tombstone", "loading")))
            case 5:
                tree.use(path_to(node))
            case _:
                if node is not tree.root and not node.children and not node.full_locks:
                    tree.remove(node)
        assert sizes(tree) == recounted(tree)
        left_out = set(rng.sample(nodes, len(nodes) // 3))
        assert oldest(tree, left_out) == looked_up(tree, left_out)


def oldest(tree: PrefixTree, left_out: set[TreePage]) -> tuple[int | None, int | None]:
    """When the leaf and the live page were used that may go first."""
    leaf, live = tree.oldest_leaf(left_out.__contains__), tree.oldest_live(left_out.__contains__)
    return leaf and leaf.used, live and live.used


def looked_up(tree: PrefixTree, left_out: set[TreePage]) -> tuple[int | None, int | None]:
    """The same, by looking at every page."""
    live = [node for node in tree.pages.values() if node.state == "live"]
    live = [node for node in live if node not in left_out]
    leaves = [node.used for node in live if not node.full_locks and not node.children]
    unlocked = [node.used for node in live if not node.swa_locks]
    return min(leaves, default=None), min(unlocked, default=None)


def path_to(node: TreePage) -> list[TreePage]:
    """The pages from the root to a node."""
    return [*path_to(node.parent), node] if node.parent is not None else []

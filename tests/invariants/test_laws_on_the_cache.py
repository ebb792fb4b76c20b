"""The laws of the prefix cache, in both forms: each clause broken on what the cache shows.

Leaves out what answers say of a prefix: the model judges those.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcore.models import Geometry, Served, Violation, ops
from kvcore.models.request_ops import (
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    LoadPrefix,
    SavePrefix,
    Slide,
)
from kvcore.targets.tree_view import NodeView, TreeView

Make = Callable[..., Any]
Change = Callable[[TreeView], TreeView]

SMALL = Geometry(4, 24, 20, requests=3, window=6)
LARGE = Geometry(16, 200, 150, requests=3, window=24)
"""More slots than are checked in plain form; pages and windows are in the same proportion."""

NEXT = ops.GroupBegin()
"""An op that changes nothing of what a cache shows."""


@pytest.fixture(params=[SMALL, LARGE], ids=["plain", "quick"])
def scene(request: pytest.FixtureRequest, make_scene: Make) -> Any:
    """Request 1 runs and shares its first two pages with what request 2, which ended, left behind:
    pages 0 to 4, of which the front ones are tombstones."""
    scene = make_scene(request.param)
    size = scene.size
    scene.do(
        Admit(2, ((7, 5 * size),), output=12),
        DecodeStep((2,)),
        Slide((2,)),
        Finish(2),
        Admit(1, ((7, 2 * size), (8, 2 * size + 1)), output=11),
        CacheUnfinished(1),
        DecodeStep((1,)),
    )
    return scene


def breaks(scene: Any, change: Change) -> Violation:
    """The violation that a cache shown like this meets."""

    def spoil(shown: Any) -> None:
        shown.tree = change(shown.tree)

    violation: Violation = scene.breaks(spoil, NEXT)
    return violation


def on(place: int, **fields: Any) -> Change:
    """Other fields of the node at this place."""

    def change(tree: TreeView) -> TreeView:
        nodes = list(tree.nodes)
        nodes[place] = replace(nodes[place], **fields)
        return replace(tree, nodes=tuple(nodes))

    return change


def place_of(tree: TreeView, wanted: Callable[[NodeView], bool]) -> int:
    """The first node like this."""
    return next(place for place, node in enumerate(tree.nodes) if wanted(node))


def is_leaf(tree: TreeView, place: int) -> bool:
    return all(node.parent != place for node in tree.nodes)


def tree_of(scene: Any) -> TreeView:
    tree: TreeView = scene.target.view(stamps=False).tree
    return tree


def expected(violation: Violation, law: str) -> str:
    """What the clauses of a law expected, in one text."""
    return "\n".join(clause.expected for clause in violation.clauses if clause.law == law)


def test_the_scene_has_what_the_laws_speak_of(scene: Any) -> None:
    tree = tree_of(scene)
    assert {node.state for node in tree.nodes} == {"live", "tombstone"}
    assert any(node.full_locks and not node.swa_locks for node in tree.nodes)
    assert any(node.swa_locks for node in tree.nodes)
    assert sum(node.parent == 0 for node in tree.nodes) == 2
    tally = scene.run.tally
    assert scene.run.finish() is None
    assert tally.checks["tree"] == tally.checks["locks"] > len(scene.run.program)
    # What was served is no answer that callers hold on to.
    assert tally.checks["L8"] == 0


# The law on what the cache holds.


def test_tree_a_node_before_the_one_above_it_is_reported(scene: Any) -> None:
    violation = breaks(scene, on(0, parent=1))
    assert violation.law == "tree"
    assert "a node after the one above it" in expected(violation, "tree")


def test_tree_a_node_that_begins_elsewhere_is_reported(scene: Any) -> None:
    violation = breaks(scene, on(1, start=tree_of(scene).nodes[1].start + scene.size))
    assert violation.law == "tree"
    assert "it to begin where the one above ends" in expected(violation, "tree")


def test_tree_a_node_of_part_of_a_page_is_reported(scene: Any) -> None:
    tokens = tree_of(scene).nodes[1].tokens[:-1]
    violation = breaks(scene, on(1, tokens=tokens))
    assert violation.law == "tree"
    assert f"whole pages of {scene.size} tokens" in expected(violation, "tree")


def test_tree_a_node_without_tokens_is_reported(scene: Any) -> None:
    def add(tree: TreeView) -> TreeView:
        empty = replace(tree.nodes[0], tokens=tree.nodes[0].tokens[:0], pages=[])
        return replace(tree, nodes=(*tree.nodes, replace(empty, parent=-1, start=0)))

    assert breaks(scene, add).law == "tree"


def test_tree_slots_that_are_no_whole_pages_are_reported(scene: Any) -> None:
    violation = breaks(scene, on(1, aligned=False))
    assert violation.signature == ("tree", NEXT.kind)
    assert "the slots of whole pages as its value" in expected(violation, "tree")
    assert violation.clauses[0].full_pages == tuple(sorted(tree_of(scene).nodes[1].pages))


def test_tree_tokens_that_were_never_cached_are_reported(scene: Any) -> None:
    tree = tree_of(scene)
    place = max(place for place in range(len(tree.nodes)) if is_leaf(tree, place))
    tokens = tree.nodes[place].tokens.copy()
    tokens[-1] += 5
    violation = breaks(scene, on(place, tokens=tokens))
    assert violation.law == "tree"
    # The page with these tokens is strange, and the one with the right tokens is missing.
    assert "of a prefix that was cached" in expected(violation, "tree")
    assert f"cached in full page {tree.nodes[place].pages[-1]}" in expected(violation, "tree")


def test_tree_a_prefix_in_the_page_of_another_is_reported(scene: Any) -> None:
    tree = tree_of(scene)
    [*front, last] = tree.nodes[0].pages
    other = tree.nodes[1].pages[0]
    violation = breaks(scene, on(0, pages=[*front, other]))
    assert violation.law == "tree"
    assert violation.clauses[0].full_pages == tuple(sorted((last, other)))


@pytest.mark.parametrize(("was", "now"), [("tombstone", "live"), ("live", "tombstone")])
def test_tree_a_node_in_another_state_is_reported(was: str, now: str, scene: Any) -> None:
    tree = tree_of(scene)
    place = place_of(tree, lambda node: node.state == was)
    violation = breaks(scene, on(place, state=now))
    assert violation.law == "tree"
    assert was in expected(violation, "tree")


def test_tree_a_prefix_that_is_not_there_any_more_is_reported(scene: Any) -> None:
    tree = tree_of(scene)
    *front, last = tree.nodes
    assert is_leaf(tree, len(front))
    violation = breaks(scene, lambda tree: replace(tree, nodes=tree.nodes[:-1]))
    assert violation.law == "tree"
    lost = [c.full_pages for c in violation.clauses if c.seen == "not in the cache"]
    assert sorted(lost) == sorted((page,) for page in last.pages)


def test_tree_a_prefix_that_is_there_twice_is_reported(scene: Any) -> None:
    violation = breaks(scene, lambda tree: replace(tree, nodes=(*tree.nodes, tree.nodes[-1])))
    assert violation.law == "tree"
    assert "of a prefix once" in expected(violation, "tree")


def test_tree_a_bare_tombstone_at_the_end_of_a_branch_is_reported(scene: Any) -> None:
    tree = tree_of(scene)
    leaves = [place for place in range(len(tree.nodes)) if is_leaf(tree, place)]
    [free] = [place for place in leaves if not tree.nodes[place].full_locks]
    violation = breaks(scene, on(free, state="tombstone"))
    assert "no tombstone at the end of a branch" in expected(violation, "tree")


@pytest.mark.parametrize("field", ["kv_len", "allocated", "prefix", "evicted", "lock"])
def test_tree_a_request_that_says_what_is_not_so_is_reported(field: str, scene: Any) -> None:
    def change(tree: TreeView) -> TreeView:
        said = tree.requests[1]
        wrong = replace(said, **{field: getattr(said, field) + scene.size})
        return replace(tree, requests={1: wrong})

    violation = breaks(scene, change)
    assert violation.law == "tree"
    assert "request 1: " in expected(violation, "tree")


@pytest.mark.parametrize("where", ["inside a page", "ahead of what is allocated"])
def test_tree_an_eviction_cursor_in_the_wrong_place_is_reported(where: str, scene: Any) -> None:
    def change(tree: TreeView) -> TreeView:
        said = tree.requests[1]
        evicted = 1 if where == "inside a page" else said.allocated // scene.size * scene.size * 2
        return replace(tree, requests={1: replace(said, evicted=evicted)})

    violation = breaks(scene, change)
    assert "SWA evicted up to a page of its" in expected(violation, "tree")


def test_tree_a_request_that_is_not_running_is_reported(scene: Any) -> None:
    violation = breaks(scene, lambda tree: replace(tree, requests={2: tree.requests[1]}))
    assert violation.law == "tree"
    assert "requests [1] running" in expected(violation, "tree")


# The law on who holds it.


@pytest.mark.parametrize("side", ["full", "swa"])
@pytest.mark.parametrize("change", [-1, 1])
def test_locks_a_count_that_is_not_its_holders_is_reported(
    side: str, change: int, scene: Any
) -> None:
    field = f"{side}_locks"
    tree = tree_of(scene)
    place = place_of(tree, lambda node: node.swa_locks > 0)
    count = getattr(tree.nodes[place], field)
    violation = breaks(scene, on(place, **{field: count + change}))
    assert violation.law == "locks"
    clause = violation.clauses[0]
    assert clause.full_pages == tuple(sorted(tree.nodes[place].pages))
    assert clause.seen == str(count + change)


def test_locks_a_holder_of_a_part_of_a_node_is_reported(scene: Any) -> None:
    """As if the node were not split where the request's window begins."""
    tree = tree_of(scene)
    place = place_of(tree, lambda node: node.swa_locks > 0)
    lower, upper = tree.nodes[place], tree.nodes[tree.nodes[place].parent]
    assert upper.state == lower.state or upper.swa_locks == 0

    def join(shown: TreeView) -> TreeView:
        above = tree.nodes[place].parent
        nodes = list(shown.nodes)
        nodes[above] = replace(upper, swa_locks=lower.swa_locks)
        return replace(shown, nodes=tuple(nodes))

    violation = breaks(scene, join)
    assert violation.law == "locks"


@pytest.mark.parametrize(
    "field", ["full_evictable", "swa_evictable", "full_protected", "swa_protected"]
)
def test_locks_a_size_that_is_not_the_nodes_is_reported(field: str, scene: Any) -> None:
    size = getattr(tree_of(scene), field)
    violation = breaks(scene, lambda tree: replace(tree, **{field: size + scene.size}))
    assert violation.signature == ("locks", NEXT.kind)
    side, what = field.split("_")
    name = f"{'SWA' if side == 'swa' else side} {what}"
    assert expected(violation, "locks") == f"{size} {name} tokens, counted over all nodes"


@pytest.mark.parametrize("side", [0, 1])
def test_locks_a_total_that_is_not_the_nodes_is_reported(side: int, scene: Any) -> None:
    total = list(tree_of(scene).total)
    total[side] -= scene.size
    violation = breaks(scene, lambda tree: replace(tree, total=tuple(total)))
    assert violation.signature == ("locks", NEXT.kind)


def test_locks_of_a_load_in_flight_are_counted(scene: Any) -> None:
    text = ((7, 5 * scene.size),)
    scene.do(SavePrefix(1, text), Evict(9 * scene.size, 0))
    scene.do(LoadPrefix(1, 1))
    tree = tree_of(scene)
    held = place_of(tree, lambda node: node.full_locks == 2)
    violation = breaks(scene, on(held, full_locks=1))
    assert violation.law == "locks"
    scene.target.spoil = None
    scene.do(EndLoad(1))


# Law L5 on a cache.


def refused(scene: Any, change: Change) -> Violation:
    """The violation of a refusal after which the cache shows this."""
    calls = len(scene.target.calls)

    def spoil(shown: Any) -> None:
        if len(scene.target.calls) > calls:
            shown.tree = change(shown.tree)

    tokens = scene.model.geometry.full_size
    violation: Violation = scene.breaks(spoil, Admit(9, ((9, tokens),), output=9))
    return violation


def test_l5_a_refusal_that_leaves_a_lock_behind_is_reported(scene: Any) -> None:
    count = tree_of(scene).nodes[0].full_locks
    violation = refused(scene, on(0, full_locks=count + 1))
    assert violation.law == "L5"
    assert violation.clauses[0].full_pages == tuple(sorted(tree_of(scene).nodes[0].pages))


def test_l5_a_refusal_that_evicts_is_reported(scene: Any) -> None:
    violation = refused(scene, lambda tree: replace(tree, nodes=tree.nodes[:-1]))
    assert violation.law == "L5"


def test_l5_a_refusal_that_moves_a_request_on_is_reported(scene: Any) -> None:
    def change(tree: TreeView) -> TreeView:
        said = tree.requests[1]
        return replace(tree, requests={1: replace(said, kv_len=said.kv_len + 1)})

    violation = refused(scene, change)
    assert violation.law == "L5"
    assert "request 1 as before the call" in expected(violation, "L5")


def test_l5_a_refusal_that_counts_otherwise_is_reported(scene: Any) -> None:
    violation = refused(scene, lambda tree: replace(tree, full_evictable=0, full_protected=0))
    assert violation.law == "L5"
    assert "the cache's sizes as before the call" in expected(violation, "L5")


def test_l5_a_refusal_may_split_a_node(scene: Any) -> None:
    def split(shown: Any) -> None:
        tree = shown.tree
        last = len(tree.nodes) - 1
        node, size = tree.nodes[last], scene.size
        assert is_leaf(tree, last)
        assert len(node.pages) > 1
        upper = replace(node, tokens=node.tokens[:size], pages=node.pages[:1])
        lower = replace(
            node,
            parent=last,
            start=node.start + size,
            tokens=node.tokens[size:],
            pages=node.pages[1:],
        )
        shown.tree = replace(tree, nodes=(*tree.nodes[:-1], upper, lower))

    scene.target.spoil = split
    scene.do(Admit(9, ((9, scene.model.geometry.full_size),), output=9))


def test_what_the_cache_gave_is_a_part_of_the_answer(scene: Any) -> None:
    served = scene.do(Admit(3, ((7, 5 * scene.size),), output=13))
    assert isinstance(served, Served)
    assert served.matched == len(served.prefix_slots)

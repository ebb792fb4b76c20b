"""The laws of the prefix cache: what it holds, and who holds that. Laws `tree` and `locks`.

In plain form clause by clause; `tree` also in a quick form that makes sure page by page that all is
right and leaves the wording of what is not to the plain one. Leaves out what an answer says of a
prefix, which the model judges, and whose the pages are (law L1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvcore.invariants.check import Check
from kvcore.invariants.clauses import pages_clause
from kvcore.models import Clause
from kvcore.models.prefix_tree import TreePage
from kvcore.models.serving import ServingModel
from kvcore.models.texts import STREAM_BITS, PageKey, Run
from kvcore.targets.tree_view import NodeView, RequestView, TreeView

FEW_RUNS = 64
"""So many runs of tokens are compared in lists."""

Case = tuple[ServingModel, TreeView]
"""What the model knows of a cache, and what the cache shows."""


def case_of(check: Check) -> Case | None:
    """What there is to compare, None without a prefix cache."""
    model, seen = check.model, check.after.tree
    return (model, seen) if isinstance(model, ServingModel) and seen is not None else None


# What the cache holds.


def tree(check: Check) -> list[Clause]:
    """tree: the cache is page by page what the model says, in nodes that fit together, and the
    requests say of themselves what is so."""
    case = case_of(check)
    if case is None:
        return []
    model, seen = case
    size = model.geometry.page_size
    return [
        *_misshapen(seen, size),
        *_strange_pages(model, seen),
        *_bare_leaves(seen),
        *_odd_requests(model, seen),
    ]


def _misshapen(seen: TreeView, size: int) -> Iterator[Clause]:
    """Nodes that do not fit to the one above, or are not whole pages."""
    for place, node in enumerate(seen.nodes):
        if not -1 <= node.parent < place:
            yield _clause(node, "a node after the one above it", f"above it node {node.parent}")
            continue
        start = 0 if node.parent < 0 else seen.nodes[node.parent].end
        if node.start != start:
            yield _clause(node, f"it to begin where the one above ends, at {start}", "not there")
        if node.start % size or len(node.tokens) % size or not len(node.tokens):
            yield _clause(node, f"whole pages of {size} tokens", f"{len(node.tokens)} tokens")
        if not node.aligned or len(node.pages) * size != len(node.tokens):
            seen_pages = f"others, the first ones of pages {node.pages[:8]}"
            yield _clause(node, "the slots of whole pages as its value, in order", seen_pages)


def _strange_pages(model: ServingModel, seen: TreeView) -> Iterator[Clause]:
    """Pages that are not cached with these tokens, are there twice, in another state, or not at
    all."""
    size = model.geometry.page_size
    at: list[TreePage | None] = []
    found: set[int] = set()
    for node in seen.nodes:
        inside = 0 <= node.parent < len(at)
        here = at[node.parent] if inside else model.tree.root if node.parent < 0 else None
        for number, page in enumerate(node.pages):
            tokens = node.tokens[number * size : (number + 1) * size].tolist()
            start = node.start + number * size
            where = f"tokens [{start}, {start + size})"
            here = None if here is None else here.children.get(_key(tokens))
            if here is None:
                expected = f"{where} of a prefix that was cached"
                yield pages_clause("tree", expected, f"{_words(tokens)}", "full", [page])
                break
            yield from _strange_page(here, node, page, where, twice=id(here) in found)
            found.add(id(here))
        at.append(here)
    for known in model.tree.pages.values():
        if id(known) not in found:
            end = known.depth * size
            expected = f"tokens [{end - size}, {end}) cached in full page {known.page.full}"
            yield pages_clause("tree", expected, "not in the cache", "full", [known.page.full])


def _strange_page(
    known: TreePage, node: NodeView, page: int, where: str, *, twice: bool
) -> Iterator[Clause]:
    if twice:
        yield pages_clause("tree", f"{where} of a prefix once", f"page {page} too", "full", [page])
    elif page != known.page.full:
        expected = f"{where} in full page {known.page.full}"
        yield pages_clause("tree", expected, f"in page {page}", "full", [known.page.full, page])
    elif node.state != known.state:
        expected = f"full page {page}, {where}, {known.state}"
        yield pages_clause("tree", expected, node.state, "full", [page])


def _bare_leaves(seen: TreeView) -> Iterator[Clause]:
    """Tombstones that nothing holds and nothing lies behind."""
    inner = {node.parent for node in seen.nodes}
    for place, node in enumerate(seen.nodes):
        if place not in inner and node.state == "tombstone" and node.full_locks == 0:
            yield _clause(node, "no tombstone at the end of a branch that no lock holds", "one")


def _odd_requests(model: ServingModel, seen: TreeView) -> Iterator[Clause]:
    """Requests that say of themselves what is not so."""
    size = model.geometry.page_size
    if seen.requests.keys() != model.live.keys():
        yield Clause("tree", f"requests {sorted(model.live)} running", f"{sorted(seen.requests)}")
    for name, said in seen.requests.items():
        if said.evicted % size or said.evicted > said.allocated:
            expected = f"request {name}: SWA evicted up to a page of its {said.allocated} tokens"
            yield Clause("tree", expected, f"up to {said.evicted}")
        if name in model.live and said != (wanted := _said(model, name)):
            yield Clause("tree", f"request {name}: {_request(wanted)}", _request(said))


def _said(model: ServingModel, name: int) -> RequestView:
    it = model.live[name]
    return RequestView(it.kv_len, it.allocated, it.prefix, it.cursor, it.lock)


def _request(said: RequestView) -> str:
    return (
        f"{said.kv_len} tokens computed, {said.allocated} with slots, {said.prefix} in the cache, "
        f"SWA evicted up to {said.evicted}, lock up to {said.lock}"
    )


def _clause(node: NodeView, expected: str, seen: str, law: str = "tree") -> Clause:
    return pages_clause(
        law, f"node [{node.start}, {node.end}): {expected}", seen, "full", node.pages
    )


def _key(tokens: list[int]) -> PageKey:
    """The key of a page with these tokens: its runs of consecutive ids."""
    firsts = [i for i, token in enumerate(tokens) if i == 0 or token != tokens[i - 1] + 1]
    ends = [*firsts[1:], len(tokens)]
    return tuple((*_token(tokens[i]), end - i) for i, end in zip(firsts, ends, strict=True))


def _token(token: int) -> tuple[int, int]:
    """Stream and place of a token."""
    return token >> STREAM_BITS, token & (2**STREAM_BITS - 1)


def _words(tokens: list[int]) -> str:
    """Tokens by their streams: "stream 1: 0-3, stream 4: 8"."""
    parts = [
        f"stream {stream}: {first}-{first + count - 1}"
        if count > 1
        else f"stream {stream}: {first}"
        for stream, first, count in _key(tokens)
    ]
    return ", ".join(parts)


def tree_quickly(check: Check) -> list[Clause]:
    """tree, where it holds: every page that is shown is the one that the model knows by this
    number, below the same page, with the same tokens; and there are as many."""
    case = case_of(check)
    return [] if case is None or _tree_holds(*case) else tree(check)


def _tree_holds(model: ServingModel, seen: TreeView) -> bool:
    size, pages = model.geometry.page_size, model.tree.pages
    ends: list[TreePage] = []
    shown: list[int] = []
    runs: list[Run] = []
    for node in seen.nodes:
        if not (-1 <= node.parent < len(ends) and node.aligned and node.pages):
            return False
        here = ends[node.parent] if node.parent >= 0 else model.tree.root
        if node.start != here.depth * size or len(node.tokens) != len(node.pages) * size:
            return False
        for page in node.pages:
            known = pages.get(page)
            if known is None or known.parent is not here or known.state != node.state:
                return False
            runs += known.key
            here = known
        if node.state == "tombstone" and not (here.children or node.full_locks):
            return False
        ends.append(here)
        shown += node.pages
    said = {name: _said(model, name) for name in model.live}
    sound = all(it.evicted % size == 0 and it.evicted <= it.allocated for it in said.values())
    each_once = len(shown) == len(set(shown)) == len(pages)
    return each_once and _tokens_are(runs, seen) and sound and said == seen.requests


def _tokens_are(runs: list[Run], seen: TreeView) -> bool:
    """Whether the nodes' tokens, one node after the other, are these runs."""
    if len(runs) <= FEW_RUNS:
        # A handful of numbers is compared before numpy has begun.
        few: list[int] = []
        for stream, first, count in runs:
            start = (stream << STREAM_BITS) + first
            few += range(start, start + count)
        return few == [token for node in seen.nodes for token in node.tokens.tolist()]
    tokens = np.concatenate([node.tokens for node in seen.nodes])
    streams, firsts, counts = np.array(runs, dtype=np.int64).T
    before = np.cumsum(counts) - counts
    wanted = np.repeat((streams << STREAM_BITS) + firsts - before, counts)
    return np.array_equal(tokens, wanted + np.arange(len(wanted)))


# Who holds it.


def locks(check: Check) -> list[Clause]:
    """locks: each node's two counts are those of the requests and loads that hold it, and the sizes
    are what the nodes add up to."""
    case = case_of(check)
    if case is None:
        return []
    model, seen = case
    full, swa = _holders(model)
    clauses: list[Clause] = []
    for node in seen.nodes:
        for side, count, wanted in (
            ("full", node.full_locks, full),
            ("SWA", node.swa_locks, swa),
        ):
            due = {wanted[page] for page in node.pages}
            if due and due != {count}:
                expected = f"{side} lock count {', '.join(map(str, sorted(due)))} of its pages"
                clauses.append(_clause(node, expected, str(count), "locks"))
    return [*clauses, *_wrong_sizes(seen)]


def locks_quickly(check: Check) -> list[Clause]:
    """locks, where they are those that the model keeps along with its pages, and so are the sizes;
    else, as at every full check, they are counted anew."""
    case = case_of(check)
    return [] if case is None or _locks_hold(*case) else locks(check)


def _locks_hold(model: ServingModel, seen: TreeView) -> bool:
    pages, size = model.tree.pages, model.geometry.page_size
    for node in seen.nodes:
        for page in node.pages:
            known = pages.get(page)
            if (
                known is None
                or known.full_locks != node.full_locks
                or known.swa_locks != node.swa_locks
            ):
                return False
    free, swa_free, live = model.tree.full_evictable, model.tree.swa_evictable, model.tree.live
    return (
        seen.total == (len(pages) * size, live * size)
        and seen.full_evictable == free * size
        and seen.swa_evictable == swa_free * size
        and seen.full_protected == (len(pages) - free) * size
        and seen.swa_protected == (live - swa_free) * size
    )


def _holders(model: ServingModel) -> tuple[Counter[int], Counter[int]]:
    """By full page: how many requests and loads hold it, and how many hold its SWA value too,
    because it lies in their last window."""
    full: Counter[int] = Counter()
    swa: Counter[int] = Counter()
    for path in _held_paths(model):
        held = [node.page.full for node in path]
        full.update(held)
        swa.update(held[_window_start(model, len(path)) :])
    return full, swa


def _held_paths(model: ServingModel) -> list[list[TreePage]]:
    """The cached pages that each request and each load holds, from the root on."""
    paths = [running.path for running in model.live.values()]
    return paths + [load.path for load in model.loads.values()]


def _window_start(model: ServingModel, pages: int) -> int:
    """The first page of the last window of a prefix of so many pages."""
    size = model.geometry.page_size
    return max(0, (pages * size - model.geometry.window) // size)


def _wrong_sizes(seen: TreeView) -> Iterator[Clause]:
    sizes = {
        "full evictable": (seen.full_evictable, _tokens(seen, live=False, locked=False)),
        "SWA evictable": (seen.swa_evictable, _tokens(seen, live=True, locked=False)),
        "full protected": (seen.full_protected, _tokens(seen, live=False, locked=True)),
        "SWA protected": (seen.swa_protected, _tokens(seen, live=True, locked=True)),
        "full": (seen.total[0], sum(len(node.tokens) for node in seen.nodes)),
        "SWA": (seen.total[1], sum(len(n.tokens) for n in seen.nodes if n.state == "live")),
    }
    for name, (said, counted) in sizes.items():
        if said != counted:
            yield Clause("locks", f"{counted} {name} tokens, counted over all nodes", str(said))


def _tokens(seen: TreeView, *, live: bool, locked: bool) -> int:
    """Tokens of the nodes that are locked or not, on the SWA side those of live nodes."""
    if live:
        nodes = [node for node in seen.nodes if node.state == "live"]
        return sum(len(node.tokens) for node in nodes if (node.swa_locks > 0) == locked)
    return sum(len(node.tokens) for node in seen.nodes if (node.full_locks > 0) == locked)

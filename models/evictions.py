"""Judges what a prefix cache gave up during an op: pages that it might give up, and enough of them.

Which of the evictable pages go is the cache's choice. Changes nothing: the request-level model
commits what comes out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvcore.models.outcomes import Served
from kvcore.models.prefix_tree import TreePage
from kvcore.models.request_state import Load
from kvcore.models.serving_books import Evictions, ServingBooks
from kvcore.models.violation import Clause, some


class EvictionJudge:
    """Finds the pages that an answer reports among the cached ones and collects every broken
    clause."""

    def __init__(self, model: ServingBooks, served: Served) -> None:
        self.clauses: list[Clause] = []
        self._tree = model.tree
        self._gone = self._found(served.evicted, "evicted")
        self._stripped = self._found(served.tombstoned, "tombstoned")
        self._going = {id(node) for node in self._gone}

    def blame(self, expected: str, seen: str, *pages: int) -> None:
        """Note a broken clause."""
        self.clauses.append(Clause("tree", expected, seen, pages))

    def nothing(self) -> Evictions:
        """Judge an op at which nothing is given up."""
        return self.forced(0, 0, ())

    def forced(self, full: int, swa: int, path: Collection[TreePage]) -> Evictions:
        """Judge an eviction of at least ``full`` and ``swa`` pages by an op that locks ``path``
        before."""
        if not (self._gone or self._stripped or full or swa):
            return Evictions()
        held = {id(node) for node in path}
        window = {id(node) for node in self._tree.window(list(path))}
        self._each_below(lambda node: node.full_locks == 0 and id(node) not in held)
        for node in self._stripped:
            if not node.swa_evictable or id(node) in window:
                self._keep(node, "tombstoned")
        stripped = {id(node) for node in self._stripped}
        peers = [node for node in self._gone if node.state == "live" and id(node) not in stripped]
        peers += self._stripped
        if len(self._gone) < full or len(peers) < swa:
            seen = f"{len(self._gone)} full and {len(peers)} SWA pages freed"
            self.blame(f"{full} full and {swa} SWA pages freed by eviction", seen)
        if self._gone and not (full or swa):
            gone = [node.page.full for node in self._gone]
            self.blame("nothing evicted: nothing lacked", f"full pages {some(gone)}", *gone)
        if self._stripped and not swa:
            bare = [node.page.full for node in self._stripped]
            self.blame("no page tombstoned: no SWA page lacked", f"full pages {some(bare)}", *bare)
        return self._evictions(peers)

    def cancelled(self, load: Load) -> Evictions:
        """Judge the end of a load that failed: at the end of its path, pages without a peer that
        nobody else needs may go, and those that were loading turn into tombstones."""
        loading = {id(node) for node in load.loading}
        path = {id(node) for node in load.path}
        self._each_below(
            lambda node: (
                id(node) in path
                and node.full_locks == 1
                and (node.state == "tombstone" or id(node) in loading)
            )
        )
        for node in self._stripped:
            if id(node) not in loading:
                self._keep(node, "tombstoned")
        self._stripped = []
        return self._evictions([])

    def _found(self, pages: tuple[int, ...], what: str) -> list[TreePage]:
        found: dict[int, TreePage] = {}
        for page in pages:
            node = self._tree.pages.get(page)
            if node is None or page in found:
                expected = f"pages {what} once, and only such as are cached"
                self.blame(expected, f"full page {page}", page)
            else:
                found[page] = node
        return list(found.values())

    def _each_below(self, may_go: Callable[[TreePage], bool]) -> None:
        """Pages go that may, and only after all pages below them."""
        for node in self._gone:
            if not may_go(node):
                self._keep(node, "evicted")
            for below in node.children.values():
                if id(below) not in self._going:
                    full, kept = node.page.full, below.page.full
                    expected = f"full page {full} kept as long as page {kept} is cached below it"
                    self.blame(expected, "evicted", full, kept)

    def _keep(self, node: TreePage, seen: str) -> None:
        full = node.page.full
        expected = (
            f"full page {full} kept as it is: {node.state}, {node.full_locks} full and "
            f"{node.swa_locks} SWA locks"
        )
        self.blame(expected, seen, full)

    def _evictions(self, peers: list[TreePage]) -> Evictions:
        full = [node.page.full for node in self._gone]
        return Evictions(self._gone, self._stripped, full, [node.page.swa for node in peers])

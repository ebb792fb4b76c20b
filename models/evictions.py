"""Judges what a prefix cache gave up during an op: pages that it might give up, enough of them and
none too many, and those that were used longest ago.

What a cache gives up at once, a node of its tree, is its own affair; pages of a node were always
used together. So of pages that were used last at the same time any may go, in any number. Changes
nothing: the request-level model commits what comes out of here.
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
        self._leaving = self._going | {id(node) for node in self._stripped}

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
        if not self.clauses:
            if full:
                self._judge_leaves(held)
            self._judge_live(window, leaves_too=full == 0)
            self._judge_number(full, swa, peers)
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

    # Least recently used first. On the full side leaves go, oldest first; a page above others was
    # never used before them, so one that becomes a leaf by that is not older than what has gone.
    # Then, on the SWA side, live pages go, oldest first, with both sides if they are leaves; those
    # leaves are not older either than any that went for the full side.

    def _judge_leaves(self, held: set[int]) -> None:
        """No leaf that nobody holds is older than a page that was evicted. What went as a bare
        tombstone went with the last page below it, whenever it was used."""
        live = [node for node in self._gone if node.state == "live"]
        if not live:
            return
        newest = max(live, key=_used)
        above = dict.fromkeys(node.parent for node in self._gone if node.parent)
        staying = [node for node in above if self._bared(node)]
        oldest = self._tree.oldest_leaf(lambda node: id(node) in held or id(node) in self._leaving)
        if oldest is not None:
            staying.append(oldest)
        for node in staying:
            if id(node) not in held and node.used < newest.used:
                self._blame_order("", node, newest)

    def _bared(self, node: TreePage) -> bool:
        """Whether a live page stays as a leaf that was none before."""
        stays = id(node) not in self._leaving and node is not self._tree.root
        if not stays or node.state != "live" or node.full_locks:
            return False
        return all(id(below) in self._going for below in node.children.values())

    def _judge_live(self, window: set[int], *, leaves_too: bool) -> None:
        """No page that keeps its peer and that no window holds is older than one that lost its
        own; ``leaves_too``: what was evicted went for its peer."""
        lost = list(self._stripped)
        if leaves_too:
            lost += [node for node in self._gone if node.state == "live"]
        if not lost:
            return
        newest = max(lost, key=_used)
        oldest = self._tree.oldest_live(
            lambda node: id(node) in window or id(node) in self._leaving
        )
        if oldest is not None and oldest.used < newest.used:
            self._blame_order("the peer of ", oldest, newest)

    def _blame_order(self, what: str, stays: TreePage, went: TreePage) -> None:
        kept, gone = stays.page.full, went.page.full
        expected = f"{what}full page {kept} gone before {what}full page {gone}, used later"
        self.blame(expected, "it stayed", gone, kept)

    def _judge_number(self, full: int, swa: int, peers: list[TreePage]) -> None:
        """What went last was still needed. Pages go for the full side until there are enough;
        ``reached`` is when the last of them were used. So what was used later, or is tombstoned,
        went for the SWA side, and all of that but what went last was too little."""
        reached = self._reached(full)
        stripped = {id(node) for node in self._stripped}
        late = [node for node in peers if id(node) in stripped or node.used > reached]
        if not late:
            return
        last = {max(node.used for node in late)}
        if reached > max(last):
            # Whether pages of that age went for the full side or last of all cannot be seen.
            last.add(reached)
        fewest = len(peers) - max(
            sum(node.used == used and (id(node) in stripped or used >= reached) for node in peers)
            for used in last
        )
        if fewest >= swa:
            pages = [node.page.full for node in late]
            expected = f"no more evicted once {full} full and {swa} SWA pages were freed"
            seen = f"full pages {some(pages)} beside what freed {fewest} SWA pages"
            self.blame(expected, seen, *pages)

    def _reached(self, full: int) -> int:
        """The use of the last pages that had to go until ``full`` were free; -1 if none had."""
        if full == 0:
            return -1
        # Tombstones go with the last page that went below them.
        times: list[int] = []
        below: dict[int, int] = {}
        for node in sorted(self._gone, key=lambda node: -node.depth):
            used = node.used if node.state == "live" else below.get(id(node), node.used)
            above = id(node.parent)
            below[above] = max(below.get(above, used), used)
            times.append(used)
        return sorted(times)[full - 1]

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


def _used(node: TreePage) -> int:
    return node.used

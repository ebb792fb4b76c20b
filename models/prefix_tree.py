"""A prefix cache as a trie of pages: what it holds of each page, who locks it, what can be evicted.

Coarser trees split and join nodes; page by page there is nothing to split, and lock counts and
states are the same. The sizes and the order of use are kept along, since a large cache is too slow
to look through at every op. Leaves out the pools: pages are given up and filled in
`kvcore.models.serving_books`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvcore.models.recency import UseOrder
from kvcore.models.state import Page
from kvcore.models.texts import PageKey, Text, joined

PageState = Literal["live", "tombstone", "loading"]
"""Of a page's SWA value: there, evicted, or on its way back from the host."""


@dataclass(slots=True, eq=False, repr=False)
class TreePage:
    """One cached page. ``depth``: pages from the root up to and with it. ``full_locks``: requests
    and loads that have it on their path; ``swa_locks``: those that have it in their last window.
    ``used``: when it was used last, as a count of uses."""

    key: PageKey
    page: Page
    parent: TreePage | None
    depth: int
    state: PageState
    full_locks: int = 0
    swa_locks: int = 0
    used: int = 0
    children: dict[PageKey, TreePage] = field(default_factory=dict)

    @property
    def swa_evictable(self) -> bool:
        """Whether there is a peer to evict."""
        return self.state == "live" and self.swa_locks == 0

    @property
    def idle_leaf(self) -> bool:
        """Whether nobody holds it and nothing is cached below it; one without a peer goes at once,
        whenever it was used."""
        return self.state == "live" and self.full_locks == 0 and not self.children


class PrefixTree:
    """The cached pages below ``root``, by key and, in ``pages``, by the number of their full page.

    ``full_evictable``, ``swa_evictable``, ``live``: pages that no lock holds, live pages that no
    window holds, and live pages in all. ``window_pages``: whole pages that hold one window.

    What happened so far, in pages: ``tombstones_made`` lost their peer or came without one;
    ``recovered_locked``, ``recovered_unlocked`` got one again from a request, by whether anybody
    held the full page.
    """

    def __init__(self, window_pages: int) -> None:
        self.window_pages = window_pages
        self.root = TreePage((), Page(0, 0), None, 0, "live")
        self.pages: dict[int, TreePage] = {}
        self.full_evictable = 0
        self.swa_evictable = 0
        self.live = 0
        self.tombstones_made = 0
        self.recovered_locked = 0
        self.recovered_unlocked = 0
        self._uses = 0
        self._leaves_by_use = UseOrder(lambda node: self._has(node) and node.idle_leaf)
        self._live_by_use = UseOrder(lambda node: self._has(node) and node.swa_evictable)

    def _has(self, node: TreePage) -> bool:
        return self.pages.get(node.page.full) is node

    def path(self, keys: Sequence[PageKey]) -> list[TreePage]:
        """The cached pages that begin with these keys, as far as there are any."""
        found: list[TreePage] = []
        node = self.root
        for key in keys:
            below = node.children.get(key)
            if below is None:
                break
            found.append(below)
            node = below
        return found

    def servable(self, path: Sequence[TreePage]) -> int:
        """Pages at the front of ``path`` that can be served: before their end lies a window of live
        pages, or nothing but live pages."""
        best = run = 0
        for depth, node in enumerate(path, 1):
            run = run + 1 if node.state == "live" else 0
            if run >= self.window_pages or run == depth:
                best = depth
        return best

    def window(self, path: Sequence[TreePage]) -> Sequence[TreePage]:
        """The last window of a path, in whole pages: what a lock at its end holds on both sides."""
        return path[max(0, len(path) - self.window_pages) :]

    def texts(self) -> list[Text]:
        """The longest texts that are cached, a leaf each."""
        return [joined(keys) for keys in self._leaves(self.root, [])]

    def _leaves(self, root: TreePage, above: list[PageKey]) -> Iterator[list[PageKey]]:
        todo = [(node, above) for node in root.children.values()]
        while todo:
            node, front = todo.pop()
            keys = [*front, node.key]
            todo += [(child, keys) for child in node.children.values()]
            if not node.children:
                yield keys

    # Uses.

    def use(self, path: Sequence[TreePage]) -> None:
        """A path was used now; so no page was used later than the one above it."""
        self._uses += 1
        for node in path:
            node.used = self._uses

    def oldest_leaf(self, but: Callable[[TreePage], bool]) -> TreePage | None:
        """The live leaf that was used longest ago, of those that no lock holds; ``but`` those left
        out."""
        return self._leaves_by_use.oldest(but)

    def oldest_live(self, but: Callable[[TreePage], bool]) -> TreePage | None:
        """The live page that was used longest ago, of those that no window holds; ``but`` those
        left out."""
        return self._live_by_use.oldest(but)

    def _queue(self, node: TreePage) -> None:
        """A page that may go from now on on one side, or on both."""
        if node.idle_leaf:
            self._leaves_by_use.add(node)
        if node.swa_evictable:
            self._live_by_use.add(node)

    # Locks.

    def lock(self, path: Sequence[TreePage]) -> None:
        """A request or a load holds the path, and its last window on both sides."""
        for node in path:
            self._lock_full(node)
        for node in self.window(path):
            self._lock_swa(node)

    def unlock(self, path: Sequence[TreePage]) -> None:
        """The reverse of `lock`."""
        for node in path:
            node.full_locks -= 1
            self.full_evictable += node.full_locks == 0
        for node in self.window(path):
            self._unlock_swa(node)

    def extend_lock(self, path: Sequence[TreePage], held: int) -> None:
        """A lock of the first ``held`` pages becomes one of the whole path."""
        for node in path[held:]:
            self._lock_full(node)
        for node in self.window(path):
            self._lock_swa(node)
        for node in self.window(path[:held]):
            self._unlock_swa(node)

    def _lock_full(self, node: TreePage) -> None:
        self.full_evictable -= node.full_locks == 0
        node.full_locks += 1

    def _lock_swa(self, node: TreePage) -> None:
        self.swa_evictable -= node.swa_evictable
        node.swa_locks += 1

    def _unlock_swa(self, node: TreePage) -> None:
        node.swa_locks -= 1
        self.swa_evictable += node.swa_evictable
        self._queue(node)

    # Pages that come, go and change.

    def add(self, parent: TreePage, key: PageKey, page: Page, state: PageState) -> TreePage:
        """A new page below ``parent``, which nobody locks yet."""
        node = TreePage(key, page, parent, parent.depth + 1, state)
        parent.children[key] = node
        self.pages[page.full] = node
        self.full_evictable += 1
        self.live += state == "live"
        self.swa_evictable += state == "live"
        self.tombstones_made += state == "tombstone"
        self._queue(node)
        return node

    def remove(self, node: TreePage) -> None:
        """An unlocked leaf is no longer cached."""
        assert node.parent is not None
        del node.parent.children[node.key]
        del self.pages[node.page.full]
        self.full_evictable -= node.full_locks == 0
        self.swa_evictable -= node.swa_evictable
        self.live -= node.state == "live"
        self._queue(node.parent)

    def replace(self, node: TreePage, page: Page) -> None:
        """Another page with the same tokens takes the place of the node's."""
        del self.pages[node.page.full]
        node.page = page
        self.pages[page.full] = node

    def turn(self, node: TreePage, state: PageState) -> None:
        """The node's SWA value is there, evicted or on its way from now on."""
        self.tombstones_made += node.state == "live" and state == "tombstone"
        if node.state == "tombstone" and state == "live":
            self.recovered_locked += node.full_locks > 0
            self.recovered_unlocked += node.full_locks == 0
        self.swa_evictable -= node.swa_evictable
        self.live += (state == "live") - (node.state == "live")
        node.state = state
        self.swa_evictable += node.swa_evictable
        self._queue(node)

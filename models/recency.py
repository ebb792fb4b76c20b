"""Which page of a prefix cache was used longest ago, of those that may go: a heap whose entries are
put right when they come to the front.

A page is used with a whole path, far more often than anything is evicted, so uses do not move
entries. Leaves out what a use is (`kvcore.models.prefix_tree`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.models.prefix_tree import TreePage


class UseOrder:
    """The pages that ``may_go``. One that comes to may go has to be added; one that may not any
    more is dropped when it comes to the front."""

    def __init__(self, may_go: Callable[[TreePage], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, TreePage]] = []
        self._entered: set[TreePage] = set()
        self._entries = 0

    def add(self, page: TreePage) -> None:
        """A page that may go."""
        if page not in self._entered:
            self._entered.add(page)
            heapq.heappush(self._heap, self._entry(page))

    def oldest(self, but: Callable[[TreePage], bool]) -> TreePage | None:
        """The page that was used longest ago, ``but`` those left out; None if there is none."""
        left_out = []
        found: TreePage | None = None
        while self._heap and found is None:
            used, _, page = self._heap[0]
            if not self._may_go(page):
                heapq.heappop(self._heap)
                self._entered.discard(page)
            elif used != page.used:
                heapq.heapreplace(self._heap, self._entry(page))
            elif but(page):
                left_out.append(heapq.heappop(self._heap))
            else:
                found = page
        for entry in left_out:
            heapq.heappush(self._heap, entry)
        return found

    def _entry(self, page: TreePage) -> tuple[int, int, TreePage]:
        # Numbered, so that pages are never compared.
        self._entries += 1
        return page.used, self._entries, page

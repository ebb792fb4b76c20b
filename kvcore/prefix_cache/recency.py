"""Which node was used longest ago: a heap that is corrected where it is read.

    entry   (last access, start, number)      as they were when it was pushed
    node     last access, start               as they are now, never smaller

A touched node is not moved: its entry is a lower bound, and only an entry that comes to the front
is compared with its node, and put back with the right key if it is too old. A node has at most one
entry. So a touch costs nothing, and every heap operation is paid by a node that was added or
touched: O(log n) for each node that is evicted.

Leaves out what becomes of the node (`kvcore.prefix_cache.radix`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvcore.prefix_cache.node import TreeNode

Entry = tuple[int, int, int, TreeNode]


class RecencyHeap:
    """The nodes that `may_go`, least recently used first; of two that were used last at the same
    time, the one nearer to the root.

    Args:
        may_go: whether a node is a candidate. A node that becomes one has to be added; one that
            stops to be one is dropped when it comes to the front.

    Attributes:
        operations: pushes and pops so far, for inspection.
    """

    def __init__(self, may_go: Callable[[TreeNode], bool]) -> None:
        self._may_go = may_go
        self.operations = 0
        self.clear()

    def __len__(self) -> int:
        """Entries, outdated ones too."""
        return len(self._heap)

    def clear(self) -> None:
        """Forget all nodes."""
        self._heap: list[Entry] = []
        self._entered: set[TreeNode] = set()
        self._number = 0

    def add(self, node: TreeNode) -> None:
        """A node that may go; of one that is here already the entry is kept."""
        if node in self._entered:
            return
        self._entered.add(node)
        heapq.heappush(self._heap, self._entry(node))
        self.operations += 1

    def remove(self, node: TreeNode) -> None:
        """A node that left the tree. Its entry stays until such entries are half of the heap."""
        self._entered.discard(node)
        if len(self._heap) > 2 * len(self._entered) + 8:
            self._heap = [entry for entry in self._heap if entry[3] in self._entered]
            heapq.heapify(self._heap)

    def oldest(self) -> TreeNode | None:
        """The next candidate, which stays here; None if there is none."""
        while self._heap:
            last_access, start, _, node = self._heap[0]
            if node not in self._entered or not self._may_go(node):
                heapq.heappop(self._heap)
                self._entered.discard(node)
            elif (last_access, start) != (node.last_access, node.start):
                heapq.heapreplace(self._heap, self._entry(node))
            else:
                return node
            self.operations += 1
        return None

    def _entry(self, node: TreeNode) -> Entry:
        # Numbered, so that nodes are never compared.
        self._number += 1
        return node.last_access, node.start, self._number, node

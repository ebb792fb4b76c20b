"""What keeps a prefix in the tree: locks on its full slots and on the SWA slots of its last window.

Leaves out who takes them (`kvcore.prefix_cache.radix`, `kvcore.serving`).
"""

from __future__ import annotations

from kvcore.errors import LockError
from kvcore.prefix_cache.eviction import EvictableTree
from kvcore.prefix_cache.node import TreeNode
from kvcore.prefix_cache.parameters import DecLockRefResult, IncLockRefResult
from kvcore.prefix_cache.protocols import CacheAllocator


class LockableTree(EvictableTree):
    """A tree in which a prefix can be held.

    Args:
        allocator, page_size: see `EvictableTree`.
        sliding_window_size: tokens that layers with a window see.
    """

    def __init__(self, allocator: CacheAllocator, page_size: int, sliding_window_size: int) -> None:
        super().__init__(allocator, page_size)
        self.sliding_window_size = sliding_window_size

    # -- whole pages and windows ---------------------------------------------------------------

    def _floor(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def _window_start(self, end: int) -> int:
        """Where the pages begin that hold the window before token `end`, a page boundary."""
        return max(0, self._floor(end - self.sliding_window_size))

    def window_frontier(self, kv_len: int) -> int:
        """How far a request of `kv_len` tokens may free its SWA slots: one whole window stays live
        before its last whole page, so that what it caches can be served."""
        return self._window_start(self._floor(kv_len))

    # -- locks ---------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Hold the prefix that ends with `node`: the full slots of all of it, and the SWA slots of
        the pages that hold its last window, live or not. The root, which holds no tokens, only
        counts who holds it.

        The node across the beginning of the window is split there. Splits keep that boundary, so
        `dec_lock_ref` needs nothing but the node.

        Raises:
            LockError: `node` is not in the tree.
        """
        if not self.path(node):
            node.lock_ends += 1
            return IncLockRefResult()
        before = self._sizes.full_evictable, self._sizes.swa_evictable
        self._lock_swa(node, node.end)
        for each in self.path(node):
            self._change(each, full=1)
        node.lock_ends += 1
        return IncLockRefResult(
            before[0] - self._sizes.full_evictable, before[1] - self._sizes.swa_evictable
        )

    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        """Undo one `inc_lock_ref` of the same node. A tombstone without children that nothing holds
        any more is removed, and then what is left so above it.

        Raises:
            LockError: no lock ends with `node`, or it is not in the tree.
        """
        path = self.path(node)
        self._require_locked("dec_lock_ref", node)
        if not path:
            node.lock_ends -= 1
            return DecLockRefResult()
        with self.frees():
            before = self._sizes.full_evictable, self._sizes.swa_evictable
            self._unlock_swa(node, node.end)
            # A lock has been taken, so no split is left to do: the path is as it was.
            for each in path:
                self._change(each, full=-1)
            node.lock_ends -= 1
            result = DecLockRefResult(
                self._sizes.full_evictable - before[0], self._sizes.swa_evictable - before[1]
            )
            self._prune(node)
        return result

    def _lock_swa(self, node: TreeNode, end: int) -> None:
        """Count a lock on the SWA side of the window before `end`, where `node` ends; tombstones
        count too, since they may be live when it is released (bytedance/sglang#748)."""
        for each in self._window_nodes(node, end):
            self._change(each, swa=1)

    def _unlock_swa(self, node: TreeNode, end: int) -> None:
        """Take back what `_lock_swa` counted."""
        for each in self._window_nodes(node, end):
            self._change(each, swa=-1)

    def _window_nodes(self, node: TreeNode, end: int) -> list[TreeNode]:
        """The nodes of the window before `end`, where `node` ends; split off at its beginning."""
        return self._nodes_from(node, self._window_start(end))

    def _nodes_from(self, node: TreeNode, start: int) -> list[TreeNode]:
        """The nodes of the path to `node` that hold the tokens from `start` on, split off there."""
        nodes = [each for each in self.path(node) if each.end > start]
        if nodes and nodes[0].start < start:
            self._split(nodes[0], start)
        return nodes

    def _require_locked(self, operation: str, node: TreeNode) -> None:
        if node.lock_ends < 1:
            raise LockError(f"{operation}: no lock ends with {node!r}; expected one to release")

"""Faults of the prefix cache: where a match ends, how far a window has moved, what a lock holds,
and who owns a page.

Leaves out recoveries inside the allocator (`kvcore.targets.faults.mappings`).
"""

from __future__ import annotations

import torch

from kvcore import InsertParams, InsertResult, RadixKey, TreeNode, UnifiedRadixCache
from kvcore.prefix_cache import CachedRequest


class TombstoneLeaf(UnifiedRadixCache):
    """The window is counted back from the last token and not from the last whole page, so in pages
    larger than the window that page may have lost its SWA slots; and it is cached all the same, as
    a leaf of tombstones that nobody can be served (sglang#29860)."""

    def window_frontier(self, kv_len: int) -> int:
        """Forget that what is cached ends with a whole page."""
        return self._window_start(kv_len)

    def _keep_new(self, start: int, cursor: int, end: int) -> int:
        return end


class CursorInOtherUnit(UnifiedRadixCache):
    """The eviction cursor is worked out for a key that is one entry longer than the one cached, as
    where tokens are counted and the key holds pairs of them: on page boundaries less than a window
    stays live (sglang#34823, sglang#34870)."""

    def window_frontier(self, kv_len: int) -> int:
        """The frontier of the longer key."""
        return super().window_frontier(kv_len + 1)


class ForgottenCursor(UnifiedRadixCache):
    """What a request caches does not say how far its SWA slots are gone, so freed ones are cached
    as live (sglang#30845, sglang#36909)."""

    def _insert_cursor(self, request: CachedRequest) -> int:
        return 0


class MatchAcrossTombstone(UnifiedRadixCache):
    """The live tokens before a tombstone count towards the window behind it (sglang#29352)."""

    def _run_after(self, run: int, node: TreeNode, length: int) -> int:
        return run + length if node.state == "live" else run


class RecoverUnderLock(UnifiedRadixCache):
    """A recovery replaces the full slots of a tombstone that requests have in their rows, and frees
    the old ones (sglang#29351)."""

    def _recover(self, node: TreeNode, incoming: torch.Tensor) -> None:
        self.token_to_kv_pool_allocator.free_full(node.value)
        node.value = incoming.clone()
        self._change(node, state="live")


class SplitSharesPage(UnifiedRadixCache):
    """An insert that differs within a page splits the node there, token by token: the page belongs
    to both parts, and the new branch's page to the branch and to what is freed (sglang#36457)."""

    _inserting = False

    def insert(self, params: InsertParams) -> InsertResult:
        """Compare single tokens meanwhile."""
        self._inserting = True
        try:
            return super().insert(params)
        finally:
            self._inserting = False

    def _common_length(self, key: RadixKey, at: int, node: TreeNode) -> int:
        if not self._inserting:
            return super()._common_length(key, at, node)
        return key.common_length(at, node.key, page_size=1)


class LockNotPaired(UnifiedRadixCache):
    """A lock skips the tombstones of its window, and its release does not: where they have become
    live meanwhile, it takes back what others have locked (bytedance/sglang#748)."""

    def _lock_swa(self, node: TreeNode, end: int) -> None:
        for each in self._window_nodes(node, end):
            if each.state != "tombstone":
                self._change(each, swa=1)

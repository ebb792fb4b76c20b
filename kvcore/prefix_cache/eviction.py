"""What the tree gives up when memory runs short, in which order, and the free groups that hold
back what was freed.

Leaves out what keeps a node from being given up (`kvcore.prefix_cache.locks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.errors import GeometryError
from kvcore.pools.arguments import as_count
from kvcore.prefix_cache.node import TreeNode
from kvcore.prefix_cache.parameters import (
    CacheCounters,
    EvictParams,
    EvictResult,
    require_a,
)
from kvcore.prefix_cache.protocols import CacheAllocator
from kvcore.prefix_cache.tree import RadixTree


class EvictableTree(RadixTree):
    """A tree whose slots belong to an allocator and go back to it.

    Args:
        allocator: where the slots come from.
        page_size: tokens a page, as the allocator's.
    """

    def __init__(self, allocator: CacheAllocator, page_size: int) -> None:
        super().__init__(page_size, allocator.device)
        self.token_to_kv_pool_allocator = allocator
        self.counters = CacheCounters()
        self._frees_alone = False

    # -- free groups ---------------------------------------------------------------------------

    @property
    def group_open(self) -> bool:
        """Whether frees are being held back, so that what is evicted cannot be lent yet: by a group
        of the cache, or by one that was opened on the allocator itself."""
        return self.token_to_kv_pool_allocator.free_group_is_open

    def free_group_begin(self) -> None:
        """Hold back what the cache frees until `free_group_end`.

        Raises:
            FreeGroupError: a group is open.
        """
        self.token_to_kv_pool_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Make what was freed since available.

        Raises:
            FreeGroupError: no group is open.
        """
        self.token_to_kv_pool_allocator.free_group_end()

    @contextmanager
    def frees(self) -> Iterator[None]:
        """One free group around a cache action; part of the open one if there is one."""
        if self.group_open:
            yield
            return
        self.free_group_begin()
        self._frees_alone = True
        try:
            yield
        finally:
            self._frees_alone = False
            self.free_group_end()

    # -- evicting ------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free the least recently used of what no lock holds, node by node, until so many tokens
        are free on each side or nothing is left.

        First leaves, on both sides, for the full side; then, for what the SWA side still lacks,
        any nodes: those that others build on become tombstones, leaves go whole. A tombstone that
        has lost its last child goes too.

        Raises:
            GeometryError: a negative number of tokens.
            IndexTensorError: no `EvictParams`.
        """
        require_a(EvictParams, "evict", params)
        full = as_count("evict", "num_tokens", params.num_tokens)
        swa = as_count("evict", "swa_num_tokens", params.swa_num_tokens)
        if full < 0 or swa < 0:
            raise GeometryError(
                f"evict: num_tokens {full}, swa_num_tokens {swa}; expected 0 or more"
            )
        before = self.counters.evicted_tokens, self.counters.evicted_swa_tokens
        full_goal, swa_goal = full + before[0], swa + before[1]
        with self.frees():
            while self.counters.evicted_tokens < full_goal:
                leaf = self._unlocked_leaves.oldest()
                if leaf is None:
                    break
                self._drop_with_ancestors(leaf)
            while self.counters.evicted_swa_tokens < swa_goal:
                node = self._unlocked_live.oldest()
                if node is None:
                    break
                if self._is_unlocked_leaf(node):
                    self._drop_with_ancestors(node)
                else:
                    self._drop_swa(node)
        return EvictResult(
            self.counters.evicted_tokens - before[0], self.counters.evicted_swa_tokens - before[1]
        )

    def _drop_with_ancestors(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        self._drop_node(leaf)
        if parent is not None:
            self._prune(parent)

    def _drop_node(self, node: TreeNode) -> None:
        """Evict a leaf on both sides."""
        if node.state == "tombstone":
            self.token_to_kv_pool_allocator.free_full(node.value)
        else:
            self.token_to_kv_pool_allocator.free(node.value)
            self.counters.evicted_swa_tokens += len(node)
        self.counters.evicted_tokens += len(node)
        self._detach(node)

    def _drop_swa(self, node: TreeNode) -> None:
        """Evict a node on the SWA side: it becomes a tombstone."""
        self.token_to_kv_pool_allocator.free_swa(node.value)
        self.counters.evicted_swa_tokens += len(node)
        self.counters.tombstoned_tokens += len(node)
        self.counters.tombstoned_pages += len(node) // self.page_size
        self._change(node, state="tombstone")

    def _prune(self, node: TreeNode) -> None:
        """Remove a tombstone that has no children and no lock, then what it leaves so above."""
        at: TreeNode | None = node
        while at is not None and at.state == "tombstone" and self._is_unlocked_leaf(at):
            parent = at.parent
            self._drop_node(at)
            at = parent

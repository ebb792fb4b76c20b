"""The prefix tree: nodes of whole pages, how they are found and split, and what they add up to.

    root ── [0..8) live ─┬─ [8..16) tombstone ── [16..24) live
                         └─ [8..12) live

Leaves out everything about an allocator: who frees what (`kvcore.prefix_cache.radix`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcore.errors import CacheStateError, LockError
from kvcore.prefix_cache.keys import RadixKey
from kvcore.prefix_cache.node import NodeState, TreeNode
from kvcore.prefix_cache.recency import RecencyHeap
from kvcore.prefix_cache.sizes import TreeSizes, recount

Step = tuple[TreeNode, int]
"""A node on the path of a key, and how many of its tokens the key shares: all, but for the last."""


class RadixTree:
    """Prefixes in whole pages, each once. A key branches at its first page that differs, so nodes
    that share a part of a page are siblings.

    Args:
        page_size: tokens a page.
        device: where values live.
    """

    def __init__(self, page_size: int, device: str | torch.device) -> None:
        self.page_size = page_size
        self._no_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._unlocked_leaves = RecencyHeap(self._is_unlocked_leaf)
        self._unlocked_live = RecencyHeap(self._is_unlocked_live)
        self._tick = 0
        self._plant()

    def _plant(self) -> None:
        """A root and nothing else."""
        self.root_node = TreeNode(RadixKey([]), self._no_slots, None, 0, "live", 0)
        self._sizes = TreeSizes()
        self._unlocked_leaves.clear()
        self._unlocked_live.clear()

    # -- sizes ---------------------------------------------------------------------------------

    def full_evictable_size(self) -> int:
        """Tokens whose full slots no lock holds."""
        return self._sizes.full_evictable

    def full_protected_size(self) -> int:
        """Tokens whose full slots are locked."""
        return self._sizes.full_protected

    def swa_evictable_size(self) -> int:
        """Tokens of live nodes whose SWA slots no lock holds."""
        return self._sizes.swa_evictable

    def swa_protected_size(self) -> int:
        """Tokens of live nodes whose SWA slots are locked."""
        return self._sizes.swa_protected

    def total_size(self) -> tuple[int, int]:
        """Tokens in the tree, and those of live nodes."""
        sizes = self._sizes
        full = sizes.full_evictable + sizes.full_protected
        return full, sizes.swa_evictable + sizes.swa_protected

    # -- looking -------------------------------------------------------------------------------

    def walk(self) -> Iterator[TreeNode]:
        """All nodes below the root, parents before children."""
        waiting = list(reversed(self.root_node.children.values()))
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children.values())

    def path(self, node: TreeNode) -> list[TreeNode]:
        """The nodes from below the root to `node`.

        Raises:
            LockError: it is not in the tree (any more).
        """
        nodes: list[TreeNode] = []
        at: TreeNode | None = node
        while at is not None and at is not self.root_node:
            nodes.append(at)
            at = at.parent
        if at is None:
            raise LockError(f"{node!r} is not in the tree; expected a node that was not evicted")
        nodes.reverse()
        return nodes

    def _steps(self, key: RadixKey, behind: TreeNode | None = None) -> list[Step]:
        """How far the tree holds a key, whatever can be served of it. Up to the end of `behind`,
        where there is one, the key is taken for the tree's."""
        node = self.root_node if behind is None else behind
        steps = [(each, len(each)) for each in self.path(node)]
        at = node.end
        while len(key) - at >= self.page_size:
            child = node.children.get(key.first_page(at, self.page_size))
            if child is None:
                break
            length = self._common_length(key, at, child)
            steps.append((child, length))
            node, at = child, at + length
            if length < len(child):
                break
        return steps

    def _common_length(self, key: RadixKey, at: int, node: TreeNode) -> int:
        """How many tokens of a node the key shares from ``at`` on, in whole pages
        (sglang#36457)."""
        return key.common_length(at, node.key, self.page_size)

    # -- changing ------------------------------------------------------------------------------

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Cut a node at token ``at`` of the prefix; returns the new upper part, `node` stays the
        lower one. Both are held by all locks that held the whole."""
        parent = node.parent
        assert parent is not None
        cut = at - node.start
        # Copies: a view would keep the memory of both parts for as long as one is there
        # (sglang#17191).
        front, rest = node.value[:cut].clone(), node.value[cut:].clone()
        upper = TreeNode(
            node.key[:cut].owned(), front, parent, node.start, node.state, node.last_access
        )
        upper.full_lock_ref, upper.swa_lock_ref = node.full_lock_ref, node.swa_lock_ref
        parent.children[node.key.first_page(0, self.page_size)] = upper
        node.key, node.value, node.start, node.parent = node.key[cut:].owned(), rest, at, upper
        upper.children[node.key.first_page(0, self.page_size)] = node
        if node.load is not None:
            upper.load = node.load
            node.load.insert(node.load.index(node), upper)
        self._requeue(upper)
        return upper

    def _attach(
        self, parent: TreeNode, key: RadixKey, value: torch.Tensor, state: NodeState
    ) -> TreeNode:
        """A new leaf below `parent`; key and value are copied."""
        node = TreeNode(key.owned(), value.clone(), parent, parent.end, state, self._tick)
        parent.children[node.key.first_page(0, self.page_size)] = node
        self._tally(node, 1)
        self._requeue(node)
        return node

    def _detach(self, node: TreeNode) -> None:
        """Take a leaf out."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key.first_page(0, self.page_size)]
        node.parent = None
        self._tally(node, -1)
        self._unlocked_leaves.remove(node)
        self._unlocked_live.remove(node)
        self._requeue(parent)

    def _change(
        self, node: TreeNode, *, full: int = 0, swa: int = 0, state: NodeState | None = None
    ) -> None:
        """Add to the lock counts of a node, or set its state; the sizes follow."""
        self._tally(node, -1)
        node.full_lock_ref += full
        node.swa_lock_ref += swa
        node.state = state or node.state
        self._tally(node, 1)
        self._requeue(node)

    def touch(self, node: TreeNode) -> None:
        """The prefix that ends with `node` was used now: of all, it is evicted last.

        Raises:
            LockError: `node` is not in the tree.
        """
        path = self.path(node)
        self._tick += 1
        for each in path:
            each.last_access = self._tick

    def _tally(self, node: TreeNode, sign: int) -> None:
        if node is not self.root_node:
            self._sizes.add(node, sign)

    def _requeue(self, node: TreeNode) -> None:
        """A node that may be evicted from now on is queued for it."""
        if self._is_unlocked_leaf(node):
            self._unlocked_leaves.add(node)
        if self._is_unlocked_live(node):
            self._unlocked_live.add(node)

    def _is_unlocked_leaf(self, node: TreeNode) -> bool:
        idle = node.full_lock_ref <= 0 and node.state != "loading"
        return idle and not node.children and node is not self.root_node

    def _is_unlocked_live(self, node: TreeNode) -> bool:
        return node.swa_lock_ref <= 0 and node.state == "live" and node is not self.root_node

    # -- inspection ----------------------------------------------------------------------------

    def sanity_check(self) -> None:
        """Recount everything that is kept.

        Raises:
            CacheStateError: a node that contradicts its parent, its page or its state, a bare
                tombstone leaf that nothing holds, or a size that the nodes do not add up to.
        """
        for node in self.walk():
            fault = self._fault_of(node)
            if fault is not None:
                raise CacheStateError(f"sanity_check: {node!r} {fault}")
        counted = recount(self.walk())
        if counted != self._sizes:
            raise CacheStateError(
                f"sanity_check: the nodes add up to {counted}, the cache says {self._sizes}"
            )

    def _fault_of(self, node: TreeNode) -> str | None:
        """What is wrong with a node, if anything."""
        parent = node.parent
        if (
            parent is None
            or parent.children.get(node.key.first_page(0, self.page_size)) is not node
        ):
            return "is not the child that its parent knows by its first page"
        if node.start != parent.end or len(node.value) != len(node.key):
            return f"does not begin where its parent ends, or holds {len(node.value)} slots"
        if len(node) < 1 or len(node) % self.page_size or node.start % self.page_size:
            return f"is not made of whole pages of {self.page_size}"
        if min(node.full_lock_ref, node.swa_lock_ref, node.lock_ends) < 0:
            return "was unlocked more often than locked"
        below = node.lock_ends + sum(child.full_lock_ref for child in node.children.values())
        if node.full_lock_ref != below:
            return f"is not locked by the {below} locks that end in it or below it"
        if (node.load is not None and node in node.load) != (node.state == "loading"):
            return "is loading without a load, or the other way round"
        if node.state == "tombstone" and not node.children and node.full_lock_ref == 0:
            return "is a tombstone without children that nothing holds"
        return None

    def pretty_print(self) -> None:
        """Print the tree, a line a node."""
        for node in self.walk():
            depth = len(self.path(node)) - 1
            print(f"{'  ' * depth}{node!r} {node.key!r} last access {node.last_access}")
        full, swa = self.total_size()
        print(f"{full} tokens, {swa} with SWA value, {self._sizes}")

"""The size counters of a prefix tree, and their recount.

Leaves out when they change (`kvcore.prefix_cache.tree`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.prefix_cache.node import TreeNode


@dataclass(slots=True)
class TreeSizes:
    """Tokens: full slots that no lock holds and those that are locked; the same of the SWA slots of
    live nodes."""

    full_evictable: int = 0
    full_protected: int = 0
    swa_evictable: int = 0
    swa_protected: int = 0

    def add(self, node: TreeNode, sign: int) -> None:
        """Count a node in, or with ``sign`` -1 out, as it is now."""
        tokens = sign * len(node)
        if node.full_lock_ref > 0:
            self.full_protected += tokens
        else:
            self.full_evictable += tokens
        if node.state != "live":
            return
        if node.swa_lock_ref > 0:
            self.swa_protected += tokens
        else:
            self.swa_evictable += tokens


def recount(nodes: Iterable[TreeNode]) -> TreeSizes:
    """The sizes that these nodes add up to."""
    sizes = TreeSizes()
    for node in nodes:
        sizes.add(node, 1)
    return sizes

"""A node of the prefix tree: consecutive pages of tokens, their slots, and who holds them.

Leaves out how nodes are split, counted and evicted (`kvcore.prefix_cache.tree`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch

from kvcore.prefix_cache.keys import RadixKey

NodeState = Literal["live", "tombstone", "loading"]
"""Of the SWA value of a node: there, evicted, or on its way back from the host: mapped already,
and not to be served yet."""


class TreeNode:
    """Tokens ``start`` to ``end`` of every prefix that goes through this node.

    A node that is split keeps its end: it becomes the lower part, and a new node above it takes the
    tokens in front. So whoever holds a node holds a *prefix*, for as long as the node is locked.

    Attributes:
        key: the node's own tokens, whole pages.
        value: their full slots, int64 `[end - start]`.
        parent: the node above; None of the root, and of a node that is no longer in the tree.
        children: by extra key and first page, see `RadixKey.first_page`.
        start: tokens before it.
        state: of the SWA value.
        full_lock_ref, swa_lock_ref: locks that hold its full, its SWA value.
        lock_ends: locks that end here, see `UnifiedRadixCache.inc_lock_ref`.
        last_access: tick of the last match or insert that went through it.
        load: the nodes of the load that brings its SWA value back, while ``state`` is "loading":
            one list for all of them, see `UnifiedRadixCache.begin_swa_load`.
    """

    __slots__ = (
        "children",
        "full_lock_ref",
        "key",
        "last_access",
        "load",
        "lock_ends",
        "parent",
        "start",
        "state",
        "swa_lock_ref",
        "value",
    )

    def __init__(
        self,
        key: RadixKey,
        value: torch.Tensor,
        parent: TreeNode | None,
        start: int,
        state: NodeState,
        last_access: int,
    ) -> None:
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[Hashable, TreeNode] = {}
        self.start = start
        self.state: NodeState = state
        self.full_lock_ref = 0
        self.swa_lock_ref = 0
        self.lock_ends = 0
        self.last_access = last_access
        self.load: list[TreeNode] | None = None

    def __len__(self) -> int:
        """Its own tokens."""
        return len(self.key)

    def __bool__(self) -> bool:
        """A node, the empty root too, is not nothing."""
        return True

    def __repr__(self) -> str:
        return (
            f"TreeNode({self.start}..{self.end}, {self.state}, locks {self.full_lock_ref} full "
            f"{self.swa_lock_ref} SWA)"
        )

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.key)

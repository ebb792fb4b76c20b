"""What a view shows of a prefix cache and of the requests over it: plain data, tree order, made
new for each view.

Leaves out how it is read from a cache (`kvcore.targets.serving`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

NodeState = Literal["live", "tombstone", "loading"]
"""Of a node's SWA value: there, evicted, or on its way back from the host (mapped already, not to
be served yet)."""


@dataclass(slots=True)
class NodeView:
    """One node below the root. ``parent``: its place in `TreeView.nodes`, -1 for the root.
    ``start``: tokens before it. ``tokens``: ids of its own tokens, int64 `[n]`. ``pages``: the full
    page of each of its pages. ``aligned``: whether its value is the slots of these pages, whole and
    in order."""

    parent: int
    start: int
    tokens: NDArray[np.int64]
    pages: list[int]
    aligned: bool
    state: NodeState
    full_locks: int
    swa_locks: int

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class RequestView:
    """What a running request says of itself, in tokens. ``prefix``: its front part that the cache
    owns; ``evicted``: `swa_evicted_seqlen`; ``lock``: how far its lock reaches, 0 for none."""

    kv_len: int
    allocated: int
    prefix: int
    evicted: int
    lock: int


@dataclass(slots=True)
class TreeView:
    """The cache and its requests. ``nodes``: parents before children. The sizes are what the cache
    says of itself, in tokens; ``total`` is (full, SWA)."""

    nodes: tuple[NodeView, ...]
    requests: dict[int, RequestView]
    full_evictable: int
    swa_evictable: int
    full_protected: int
    swa_protected: int
    total: tuple[int, int]

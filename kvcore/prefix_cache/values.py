"""Value checks of `validate=True`: whether the slots that an insert is given can be what it says.

They read the slots and the mapping, which waits for the device. Leaves out lengths and types, which
are checked always (`kvcore.prefix_cache.radix`), and slots that are not lent, which the allocator's
own checks find where it has them.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcore.allocator.ownership import Ids, on_host, refuse
from kvcore.errors import (
    DeadPeerError,
    DoubleFreeError,
    GeometryError,
    InvalidSlotError,
    LivePeerError,
)
from kvcore.prefix_cache.protocols import CacheAllocator


def require_new_pages(slots: torch.Tensor, held: torch.Tensor, page_size: int) -> None:
    """Raise unless `slots`, int64 `[n]` of whole pages of tokens, are whole pages of the pool, each
    once, that the tree does not hold.

    Args:
        held: the tree's own slots for the front of the same key, int64 `[m]`, whole pages.

    Raises:
        InvalidSlotError: padding, or a negative slot.
        GeometryError: slots that do not run through their pages in order.
        DoubleFreeError: a page named twice, or one that the tree holds.
    """
    rows = on_host(slots).reshape(-1, page_size)
    first = rows[:, :1]
    padding = rows[rows < page_size]
    refuse(InvalidSlotError, "insert", padding, "slots never lent", f"{page_size} or more")
    askew = ((rows != first + np.arange(page_size)) | (first % page_size != 0)).any(axis=1)
    pages = rows[:, 0] // page_size
    refuse(
        GeometryError,
        "insert",
        pages[askew],
        "pages that the slots do not run through in order",
        "whole pages",
    )
    _, counts = distinct = np.unique(pages, return_counts=True)
    repeated = distinct[0][counts > 1]
    refuse(DoubleFreeError, "insert", repeated, "pages named more than once", "each page once")
    owned: Ids = on_host(held)[::page_size] // page_size
    refuse(
        DoubleFreeError,
        "insert",
        pages[np.isin(pages, owned)],
        "pages that the tree holds of this key",
        "a prev_prefix_len behind them",
    )


def require_peers(
    slots: torch.Tensor, num_bare: int, allocator: CacheAllocator, *, settled: bool
) -> None:
    """Raise unless exactly the first `num_bare` of `slots`, int64 `[n]`, have no peers.

    Args:
        settled: whether the mapping says so of freed peers. In a group that others have opened,
            peers that were freed may be mapped until its end; then they are not looked at.

    Raises:
        LivePeerError: a slot before has one.
        DeadPeerError: a slot behind has none.
    """
    peers = on_host(allocator.translate_loc_from_full_to_swa(slots))
    named = on_host(slots)
    bare = named[:num_bare][peers[:num_bare] != 0]
    expected = "swa_evicted_seqlen where the peers begin"
    if settled:
        refuse(LivePeerError, "insert", bare, "evicted slots with a live peer", expected)
    paired = named[num_bare:][peers[num_bare:] == 0]
    refuse(DeadPeerError, "insert", paired, "slots without a peer", expected)

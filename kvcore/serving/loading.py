"""Prefixes in host memory: copied there while the cache has them, and brought back when it has lost
them, or their SWA slots.

A load is in flight between `begin_load`, which takes the slots, and `finish_load`, which fills
them: the transfer is somebody else's and takes its time, and requests come and go meanwhile. Left
out: which prefixes are worth a copy, and how long it is kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.errors import GeometryError, RequestStateError
from kvcore.prefix_cache import (
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    TreeNode,
    UnifiedRadixCache,
)
from kvcore.retraction import RetractionBackup, RowChunks
from kvcore.serving.slots import lend_sides, no_slots, return_sides


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """The KV of a prefix in host memory.

    Attributes:
        key: its tokens, whole pages.
        copy: their KV, in chunks of a page.
        swa_from: tokens before its last window, whole pages: from there on the copy has SWA rows.
    """

    key: RadixKey
    copy: RetractionBackup[Any]
    swa_from: int

    def __len__(self) -> int:
        """Tokens."""
        return len(self.key)

    def write(self, pool: Any, start: int, slots: torch.Tensor) -> None:
        """Write the KV of the tokens from `start` on into `slots` of whole pages, int64 `[n]`."""
        page_size = len(self) // len(self.copy.chunks)
        first, stop = start // page_size, (start + len(slots)) // page_size
        piece = RowChunks(self.copy.chunks[first:stop])
        RetractionBackup(piece, self.swa_from).restore(pool, slots)


@dataclass(eq=False, slots=True)
class PrefixLoad:
    """A host prefix on its way back into the cache.

    Attributes:
        host_prefix: what is loaded.
        node: the node that the load has locked: the end of what the tree had of the prefix, root or
            not; None once the load has ended.
        found: tokens up to there.
        slots: slots taken for the tokens from there on, int64; before `swa_from` without peers.
        reopened: the tree's own slots, int64 `[n]` in row order, of the tombstones that got new
            peers.
        loading: their nodes, see `UnifiedRadixCache.begin_swa_load`.
    """

    host_prefix: HostPrefix
    node: TreeNode | None
    found: int
    slots: torch.Tensor
    reopened: torch.Tensor
    loading: list[TreeNode]

    @property
    def num_bare(self) -> int:
        """How many of `slots`, at their front, have no peer."""
        return min(max(self.host_prefix.swa_from - self.found, 0), len(self.slots))


def save_prefix(cache: UnifiedRadixCache, key: RadixKey) -> HostPrefix | None:
    """Copy the KV of what the cache can serve of `key` to the host; None if that is nothing.

    Raises:
        Exception: what the pool raises when it cannot be read.
    """
    match = cache.match_prefix(MatchPrefixParams(key, touch=False))
    if match.prefix_len == 0:
        return None
    swa_from = cache.window_frontier(match.prefix_len)
    copy = RetractionBackup.take(
        cache.token_to_kv_pool_allocator.get_kvcache(),
        match.device_indices,
        chunk_tokens=cache.page_size,
        swa_evicted_seqlen=swa_from,
    )
    cache.record_match(key, match)
    return HostPrefix(key[: match.prefix_len].owned(), copy, swa_from)


def begin_load(cache: UnifiedRadixCache, host_prefix: HostPrefix) -> PrefixLoad | None:
    """Take what it needs to bring a host prefix back: lock what the tree has of it, full slots for
    the rest, and SWA slots for its last window, where the tree has tombstones or nothing.

    Until the load has ended, the tombstones are neither served nor evicted, and requests that
    compute the same tokens do not recover them.

    Returns:
        The load; None if there is nothing to load, if another load is on its way to the same
        tombstones, or if there is no room even after eviction. Nothing changed then.

    Raises:
        GeometryError: a copy from a cache with pages of another size, or with a smaller window, of
            which too few tokens could be served. Whatever is raised, nothing changed but for what
            was evicted.
    """
    key, swa_from = host_prefix.key, host_prefix.swa_from
    if len(host_prefix.copy.chunks) * cache.page_size != len(key):
        raise GeometryError(
            f"begin_load: {len(key)} tokens in {len(host_prefix.copy.chunks)} chunks; expected a "
            f"chunk for each page of {cache.page_size}"
        )
    latest = cache.window_frontier(len(key))
    if swa_from > latest:
        raise GeometryError(
            f"begin_load: a copy with SWA rows from token {swa_from} on; expected them from "
            f"{latest} on, where the last window of {len(key)} tokens begins"
        )
    found, node = cache.find_path(key)
    window = [each for each in cache.path(node) if each.end > swa_from]
    if any(each.state == "loading" for each in window):
        return None
    reopened = torch.cat(
        [
            no_slots(cache),
            *(
                each.value[max(swa_from - each.start, 0) :]
                for each in window
                if each.state == "tombstone"
            ),
        ]
    )
    if found == len(key) and len(reopened) == 0:
        return None
    with ExitStack() as undo:
        cache.inc_lock_ref(node)
        undo.callback(cache.dec_lock_ref, node)
        slots = lend_sides(cache, found, len(key), swa_from, undo, reopened=reopened)
        if slots is None:
            return None
        loading = cache.begin_swa_load(node, swa_from) if len(reopened) else []
        undo.pop_all()
    return PrefixLoad(host_prefix, node, found, slots, reopened, loading)


def finish_load(cache: UnifiedRadixCache, load: PrefixLoad) -> None:
    """The copy has arrived: write it into everything that was taken, and cache it.

    What others have cached of it meanwhile stays; the load's slots for it are freed, or recover
    tombstones with it, as in every insert.

    Raises:
        RequestStateError: the load has ended.
        Exception: what the pool raises when it cannot be written: then the load is still in flight,
            to be finished again or cancelled.
    """
    node = _require_in_flight("finish_load", load)
    pool, copy = cache.token_to_kv_pool_allocator.get_kvcache(), load.host_prefix
    # The full rows of tombstones are written again, with what they hold: a copy is of both sides.
    for each in load.loading:
        copy.write(pool, each.start, each.value)
    copy.write(pool, load.found, load.slots)
    held = [each.value for each in cache.path(node)]
    with cache.frees():
        loaded = node
        if len(load.slots) > 0:
            value = torch.cat((*held, load.slots))
            params = InsertParams(copy.key, value, load.found, copy.swa_from)
            loaded = cache.insert(params).last_device_node
        if load.loading:
            cache.end_swa_load(load.loading, arrived=True)
        # All of it was brought back to be used: it is not the first to go again.
        cache.touch(loaded)
        cache.dec_lock_ref(node)
    load.node = None


def cancel_load(cache: UnifiedRadixCache, load: PrefixLoad) -> None:
    """The copy will not arrive: free all that was taken; tombstones are tombstones again.

    Raises:
        RequestStateError: the load has ended.
    """
    node = _require_in_flight("cancel_load", load)
    with cache.frees():
        if load.loading:
            cache.end_swa_load(load.loading, arrived=False)
        return_sides(cache, load.slots, load.num_bare, no_slots(cache))
        cache.dec_lock_ref(node)
    load.node = None


def _require_in_flight(operation: str, load: PrefixLoad) -> TreeNode:
    if load.node is None:
        raise RequestStateError(f"{operation}: a load that has ended; expected one in flight")
    return load.node

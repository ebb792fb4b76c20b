"""Reading a prefix cache for a view: every node's pages, of a large cache with one copy of all
values.

Leaves out what the view shows (`kvcore.targets.tree_view`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore import UnifiedRadixCache
from kvcore.serving import ServingRequest
from kvcore.targets.tree_view import NodeView, RequestView, TreeView

FEW_TOKENS = 512
"""Trees of so many tokens are read slot by slot: then that costs less than arrays."""


def read_tree(cache: UnifiedRadixCache, requests: Mapping[int, ServingRequest]) -> TreeView:
    """The cache as it is, and the running requests by name."""
    return TreeView(
        nodes=_nodes(cache),
        requests={name: _request(request) for name, request in requests.items()},
        full_evictable=cache.full_evictable_size(),
        swa_evictable=cache.swa_evictable_size(),
        full_protected=cache.full_protected_size(),
        swa_protected=cache.swa_protected_size(),
        total=cache.total_size(),
    )


def _request(request: ServingRequest) -> RequestView:
    return RequestView(
        kv_len=request.kv_len,
        allocated=request.kv_allocated_len,
        prefix=request.prefix_len,
        evicted=request.swa_evicted_seqlen,
        lock=request.last_node.end if request.last_node is not None else 0,
    )


def _nodes(cache: UnifiedRadixCache) -> tuple[NodeView, ...]:
    found = list(cache.walk())
    if not found:
        return ()
    places = {id(node): place for place, node in enumerate(found)}
    places[id(cache.root_node)] = -1
    values = [node.value for node in found]
    lengths = [value.numel() for value in values]
    few = values[0].is_cpu and sum(lengths) <= FEW_TOKENS
    size = cache.page_size
    pages, aligned = _few_pages(values, size) if few else _pages(values, lengths, size)
    return tuple(
        NodeView(
            places[id(node.parent)],
            node.start,
            node.key.token_ids,
            pages[place],
            aligned[place] and len(node.key.token_ids) == lengths[place],
            node.state,
            node.full_lock_ref,
            node.swa_lock_ref,
        )
        for place, node in enumerate(found)
    )


def _few_pages(values: list[torch.Tensor], size: int) -> tuple[list[list[int]], list[bool]]:
    """`_pages` of a small tree, slot by slot."""
    pages: list[list[int]] = []
    aligned: list[bool] = []
    for value in values:
        slots: list[int] = value.numpy().tolist()
        firsts = slots[::size]
        whole = [slot for first in firsts for slot in range(first, first + size)]
        pages.append([first // size for first in firsts])
        aligned.append(slots == whole and all(first % size == 0 for first in firsts))
    return pages, aligned


def _pages(
    values: list[torch.Tensor], numbers: list[int], size: int
) -> tuple[list[list[int]], list[bool]]:
    """Of each node the page of the first slot of each of its pages, and whether its slots are
    these pages, whole and in order."""
    lengths = np.array(numbers, dtype=np.int64)
    counts = -(-lengths // size)
    rows = _rows(torch.cat(values).cpu().numpy(), lengths, counts, size)
    first = rows[:, 0]
    strays = (first % size != 0) | (rows != first[:, None] + np.arange(size)).any(axis=1)
    before = np.concatenate(([0], np.cumsum(strays)))
    ends = np.cumsum(counts)
    whole = before[ends] == before[ends - counts]
    pages = (first // size).tolist()
    each = [pages[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return each, whole.tolist()


def _rows(
    slots: NDArray[np.int64], lengths: NDArray[np.int64], counts: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """The slots of all nodes, a row a page; the rest of a page that is not whole is -1."""
    if not (lengths % size).any():
        return slots.reshape(-1, size)
    rows = np.full((counts.sum(), size), -1, dtype=np.int64)
    ends = np.cumsum(counts) * size - counts * size + lengths
    inside = np.arange(rows.size) < np.repeat(ends, counts * size)
    rows.reshape(-1)[inside] = slots
    return rows

"""Whole requests over a prefix cache and any hybrid allocator, driven by request-level ops.

Makes the calls of each op with the core's own functions, writes the KV of computed tokens into the
pool as a model's forward does, and reports what was answered, what the cache gave up meanwhile, and
what the pool holds for a prefix that it served. Leaves out every judgement, and the allocator's own
calls (`kvcore.targets.serving_allocator`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from kvcore import (
    CacheAllocator,
    EvictParams,
    RadixKey,
    ReqToTokenPool,
    TreeNode,
    UnifiedRadixCache,
    serving,
)
from kvcore.models import Contract, Done, Geometry, Outcome, Refused, ops, request_ops, texts
from kvcore.models.ops import Op
from kvcore.models.outcomes import Served
from kvcore.models.request_ops import REQUEST_OP_KINDS
from kvcore.targets.attempt import CallRaised, attempt
from kvcore.targets.core_dialects import HybridDialect
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.host_arrays import array_of
from kvcore.targets.live_request import LiveRequest, token_ids
from kvcore.targets.protocol import View
from kvcore.targets.requests import RequestRows
from kvcore.targets.serving_allocator import DialectAllocator
from kvcore.targets.tree_reading import read_tree

GROUP_OPS = frozenset(("group_begin", "group_end"))
"""Ops that allocators and caches both have."""


def serving_contract(inner: Contract) -> Contract:
    """Request-level ops over an allocator with the contract ``inner``."""
    return msgspec.structs.replace(
        inner,
        ops=frozenset(REQUEST_OP_KINDS) | (GROUP_OPS & inner.ops),
        hostile=frozenset(),
    )


class ObservedCache(UnifiedRadixCache):
    """Notes the full pages that the cache gives up. Stands before a cache class on trial, faulty or
    not, among the bases of one class."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.forget_notes()
        super().__init__(*arguments, **keywords)

    def forget_notes(self) -> None:
        """Begin to note anew."""
        self.evicted: list[int] = []
        """Full pages that went on both sides."""
        self.tombstoned: list[int] = []
        """Full pages that stayed and whose peers went."""

    def _drop_node(self, node: TreeNode) -> None:
        self.evicted += self._full_pages(node)
        super()._drop_node(node)

    def _drop_swa(self, node: TreeNode) -> None:
        self.tombstoned += self._full_pages(node)
        super()._drop_swa(node)

    def _full_pages(self, node: TreeNode) -> list[int]:
        pages: list[int] = (node.value[:: self.page_size] // self.page_size).tolist()
        return pages


class ServingTarget:
    """Requests over a prefix cache of ``geometry`` and the allocator of ``inner``.

    Args:
        inner: drives an allocator of the same pools, new; only its parts are used.
        geometry: one with a window.
        cache: the prefix cache on trial.
        validate: whether its value checks are on.
        requests: the request pool on trial.

    Raises:
        UnsupportedGeometry: the allocator lacks a call that a prefix cache makes.
    """

    def __init__(
        self,
        inner: AllocatorTarget,
        geometry: Geometry,
        *,
        name: str,
        cache: type[UnifiedRadixCache] = UnifiedRadixCache,
        validate: bool = False,
        requests: Callable[..., ReqToTokenPool] = ReqToTokenPool,
    ) -> None:
        self.name = name
        self.geometry = geometry
        self.contract = serving_contract(inner.contract)
        self._pool = inner.pool
        self._allocator = cache_allocator(inner)
        device = inner.pool.device
        self._table = requests(geometry.requests, geometry.context_len, device, False)
        observed: type[ObservedCache] = type(cache.__name__, (ObservedCache, cache), {})
        self._cache = observed(
            self._table,
            self._allocator,
            geometry.page_size,
            geometry.window,
            validate=validate,
        )
        self._shown = AllocatorTarget(
            name,
            geometry,
            self.contract,
            inner.dialect,
            inner.pool,
            requests=RequestRows(self._table, None),
        )
        self._running: dict[int, LiveRequest] = {}
        self._waiting: dict[int, LiveRequest] = {}
        self._copies: dict[int, serving.HostPrefix] = {}
        self._loads: dict[int, serving.PrefixLoad] = {}

    @property
    def cache(self) -> UnifiedRadixCache:
        """The cache on trial, to be read."""
        return self._cache

    def apply(self, op: Op) -> Outcome:
        """Make the calls of ``op``."""
        self._cache.forget_notes()
        try:
            outcome = self._apply(op)
        except CallRaised as caught:
            return caught.outcome
        if isinstance(outcome, Served):
            evicted, tombstoned = self._cache.evicted, self._cache.tombstoned
            return msgspec.structs.replace(
                outcome, evicted=tuple(evicted), tombstoned=tuple(tombstoned)
            )
        return outcome

    def view(self, *, stamps: bool) -> View:
        """The allocator's state and the request pool's, and the tree with the running requests."""
        view = self._shown.view(stamps=stamps)
        requests = {name: live.request for name, live in self._running.items()}
        view.tree = read_tree(self._cache, requests)
        return view

    def close(self) -> None:
        """Drop requests, host copies and loads."""
        self._running, self._waiting, self._copies, self._loads = {}, {}, {}, {}
        self._shown.close()

    def _apply(self, op: Op) -> Outcome:
        match op:
            case request_ops.Admit():
                return self._admit(op)
            case request_ops.Prefill():
                live = self._running[op.req]
                slots = attempt(serving.prefill, self._cache, live.request, op.tokens)
                return self._computed(slots, live)
            case request_ops.DecodeStep():
                return self._decode(op)
            case request_ops.Speculate():
                live = self._running[op.req]
                slots = attempt(serving.speculate, self._cache, live.request, op.tokens)
                return Refused() if slots is None else self._lent(slots)
            case request_ops.ResumeRequest():
                return self._resume(op)
            case request_ops.CacheUnfinished():
                live = self._running[op.req]
                attempt(self._cache.cache_unfinished_req, live.request)
                return self._prefix(Served(), live)
            case request_ops.SavePrefix() | request_ops.LoadPrefix() | request_ops.EndLoad():
                return self._apply_host(op)
            case ops.GroupBegin():
                attempt(self._cache.free_group_begin)
                return Done()
            case ops.GroupEnd():
                attempt(self._cache.free_group_end)
                return Done()
            case _:
                self._give_back(op)
                return Served()

    # Ops that lend.

    def _admit(self, op: request_ops.Admit) -> Outcome:
        live = LiveRequest(op.text, op.output)
        slots = attempt(serving.admit, self._cache, live.request, num_tokens=op.tokens)
        if slots is None:
            return Refused()
        self._running[op.req] = live
        return self._prefix(self._computed(slots, live), live, row=True)

    def _decode(self, op: request_ops.DecodeStep) -> Outcome:
        batch = [self._running[name] for name in op.reqs]
        for live in batch:
            live.know(live.request.kv_len + 1)
        slots = attempt(serving.decode, self._cache, [live.request for live in batch])
        if slots is None:
            return Refused()
        stamps = [live.generated_stamp(live.request.kv_len - 1) for live in batch]
        attempt(self._pool.stamp, array_of(slots), np.array(stamps, dtype=np.int64))
        return self._lent(slots)

    def _resume(self, op: request_ops.ResumeRequest) -> Outcome:
        live = self._waiting[op.req]
        recomputed = live.request.retraction is None
        slots = attempt(serving.resume, self._cache, live.request)
        if slots is None:
            return Refused()
        self._running[op.req] = self._waiting.pop(op.req)
        lent = self._computed(slots, live) if recomputed else self._lent(slots)
        return self._prefix(lent, live, row=True)

    def _computed(self, slots: torch.Tensor | None, live: LiveRequest) -> Outcome:
        """The answer of a call that lent ``slots`` to the last tokens of a request, whose KV is
        written now."""
        if slots is None:
            return Refused()
        end = live.request.kv_len
        self._write(slots, live, end - len(slots), end)
        return self._lent(slots)

    def _write(self, slots: torch.Tensor, live: LiveRequest, start: int, stop: int) -> None:
        attempt(self._pool.stamp, array_of(slots), live.stamps(start, stop))

    def _lent(self, slots: torch.Tensor) -> Served:
        return Served(slots=_numbers(slots), peers=_numbers(self._peers(slots)))

    def _peers(self, slots: torch.Tensor) -> torch.Tensor:
        return attempt(self._allocator.translate_loc_from_full_to_swa, slots)

    def _prefix(self, lent: Outcome, live: LiveRequest, *, row: bool = False) -> Outcome:
        """The answer ``lent`` with what the cache holds of the request's row, and with ``row`` the
        row that it took."""
        if not isinstance(lent, Served):
            return lent
        request = live.request
        number, matched = request.req_pool_idx or 0, request.prefix_len
        slots = attempt(self._table.row, number, matched)
        peers = self._peers(slots)
        named, theirs = array_of(slots), array_of(peers)
        full, swa = attempt(self._pool.stamps_at, named, theirs)
        return msgspec.structs.replace(
            lent,
            request=number if row else 0,
            matched=matched,
            prefix_slots=tuple(named.tolist()),
            prefix_peers=tuple(theirs.tolist()),
            prefix_stamps=(tuple(full), tuple(swa)),
        )

    # Ops on host copies.

    def _apply_host(
        self, op: request_ops.SavePrefix | request_ops.LoadPrefix | request_ops.EndLoad
    ) -> Outcome:
        match op:
            case request_ops.SavePrefix():
                key = RadixKey(token_ids(op.text, 0, texts.length(op.text)))
                copy = attempt(serving.save_prefix, self._cache, key)
                if copy is None:
                    return Refused()
                self._copies[op.copy] = copy
                return Served(matched=len(copy))
            case request_ops.LoadPrefix():
                load = attempt(serving.begin_load, self._cache, self._copies[op.copy])
                if load is None:
                    return Refused()
                self._loads[op.load] = load
                lent = self._lent(load.slots)
                reloaded = _numbers(self._peers(load.reopened))
                return msgspec.structs.replace(lent, reloaded=reloaded, matched=load.found)
            case request_ops.EndLoad():
                end = serving.cancel_load if op.failed else serving.finish_load
                attempt(end, self._cache, self._loads[op.load])
                del self._loads[op.load]
                return Served()

    # Ops that give back.

    def _give_back(self, op: Op) -> None:
        match op:
            case request_ops.Slide():
                requests = [self._running[name].request for name in op.reqs]
                attempt(serving.slide_windows, self._cache, requests)
            case request_ops.Trim():
                self._trim(op)
            case request_ops.Finish():
                attempt(serving.finish, self._cache, self._running[op.req].request)
                del self._running[op.req]
            case request_ops.Abort():
                attempt(serving.abort, self._cache, self._running[op.req].request)
                del self._running[op.req]
            case request_ops.RetractRequest():
                request = self._running[op.req].request
                attempt(serving.retract, self._cache, request, backup=op.backup)
                self._waiting[op.req] = self._running.pop(op.req)
            case request_ops.Evict():
                params = EvictParams(num_tokens=op.full_tokens, swa_num_tokens=op.swa_tokens)
                attempt(self._cache.evict, params)
            case request_ops.Flush():
                attempt(self._cache.flush)
            case _:
                raise RuntimeError(f"{self.name} serves requests; its contract must not name {op}")

    def _trim(self, op: request_ops.Trim) -> None:
        """What was accepted is computed: a draft's KV counts from then on."""
        live = self._running[op.req]
        request = live.request
        before = request.kv_len
        live.know(before + op.accepted)
        attempt(serving.trim, self._cache, request, op.accepted)
        row = attempt(self._table.row, request.req_pool_idx or 0, request.kv_len)
        self._write(row[before:], live, before, request.kv_len)


def _numbers(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())


def cache_allocator(inner: AllocatorTarget) -> CacheAllocator:
    """The allocator of ``inner`` as a prefix cache takes it: kvcore's own itself.

    Raises:
        UnsupportedGeometry: it lacks a call that a prefix cache makes.
    """
    if isinstance(inner.dialect, HybridDialect):
        return inner.dialect.allocator
    return DialectAllocator(
        inner.dialect,
        inner.contract,
        page_size=inner.geometry.page_size,
        device=inner.pool.device,
        kvcache=inner.pool.kvcache,
    )

"""The prefix cache of a hybrid model: one tree whose nodes hold full slots, and SWA slots or not.

    prefix  ── 0 ─────── 8 ────── 16 ────── 24 ── tokens
    full       slots     slots    slots           of every node
    SWA        -         -        peers           live: has peers; tombstone: they were evicted

Layers with a sliding window need the last `sliding_window_size` tokens before a match and nothing
in front of them, so the cache gives up SWA slots long before it gives up full slots. That is what
the rules are about: where a match may end, what a lock holds, what is evicted first, and what
becomes of a tombstone when a request has computed its tokens once more.

Left out: the tree (`kvcore.prefix_cache.tree`), what requests do between two calls
(`kvcore.serving`), host memory.
"""

from __future__ import annotations

import torch

from kvcore.allocator.arguments import as_index
from kvcore.allocator.ownership import validate_by_default
from kvcore.errors import GeometryError, InvalidSlotError, LockError, RequestStateError
from kvcore.pools.arguments import as_count
from kvcore.prefix_cache.keys import RadixKey
from kvcore.prefix_cache.locks import LockableTree
from kvcore.prefix_cache.node import TreeNode
from kvcore.prefix_cache.parameters import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    require_a,
)
from kvcore.prefix_cache.protocols import CacheAllocator, CachedRequest
from kvcore.prefix_cache.surplus import Surplus
from kvcore.prefix_cache.tree import Step
from kvcore.prefix_cache.values import require_new_pages, require_peers
from kvcore.requests import ReqToTokenPool


class UnifiedRadixCache(LockableTree):
    """Prefixes that requests have computed, for requests to come.

    Every call frees in one free group, so that an engine pays for one synchronisation; it joins a
    group that was opened with `free_group_begin`. Keys are cached in whole pages. A call that
    raises has changed nothing but where nodes are split; only slots that the allocator itself
    refuses (`validate=True`), which their caller did not own, show in the middle of a call.

    Args:
        req_to_token_pool: the rows of running requests.
        token_to_kv_pool_allocator: lends the slots.
        page_size: tokens a page, as the allocator's.
        sliding_window_size: tokens that layers with a window see.
        validate: check the slots that `insert` is given, which waits for the device; None means
            environment variable KVCORE_VALIDATE, as for the allocators.

    Attributes:
        root_node: the empty prefix.
        counters: what happened so far.

    Raises:
        GeometryError: a window of less than a token, another page size than the allocator's, or a
            request table on another device.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: CacheAllocator,
        page_size: int,
        sliding_window_size: int,
        *,
        validate: bool | None = None,
    ) -> None:
        page_size = as_count("UnifiedRadixCache", "page_size", page_size)
        window = as_count("UnifiedRadixCache", "sliding_window_size", sliding_window_size)
        if window < 1 or page_size != token_to_kv_pool_allocator.page_size:
            raise GeometryError(
                f"UnifiedRadixCache: page_size {page_size}, sliding_window_size {window}; expected "
                f"the allocator's {token_to_kv_pool_allocator.page_size}, and at least 1"
            )
        super().__init__(token_to_kv_pool_allocator, page_size, window)
        rows_on = torch.empty(0, device=req_to_token_pool.device).device
        if rows_on != self._no_slots.device:
            raise GeometryError(
                f"UnifiedRadixCache: allocator on {self._no_slots.device}, rows on {rows_on}; "
                "expected one device"
            )
        self.req_to_token_pool = req_to_token_pool
        self.validate = validate_by_default() if validate is None else validate

    # -- matching ------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix that can be served: its last window is live, or all of it back to the
        root. What is matched counts as used now; a node that the match ends in is split there.

        The match is not locked: without `inc_lock_ref` the next eviction may free its slots.

        Raises:
            IndexTensorError: no `MatchPrefixParams`, or another key than a `RadixKey`.
        """
        require_a(MatchPrefixParams, "match_prefix", params)
        steps = self._find("match_prefix", params.key)
        run, depth, served, best = self.sliding_window_size, 0, 0, 0
        for number, (node, length) in enumerate(steps, start=1):
            run, depth = self._run_after(run, node, length), depth + length
            if run >= self.sliding_window_size:
                served, best = depth, number
        nodes = [node for node, _ in steps[:best]]
        if nodes and nodes[-1].end > served:
            nodes[-1] = self._split(nodes[-1], served)
        values = [self._no_slots, *(node.value for node in nodes)]
        last = nodes[-1] if nodes else self.root_node
        match = MatchResult(torch.cat(values), last, served)
        if params.touch:
            self.record_match(params.key, match)
        return match

    def record_match(self, key: RadixKey, match: MatchResult) -> None:
        """What was matched with `touch=False` was used now; the caller holds a lock of it, or has
        let nothing be evicted meanwhile.

        Raises:
            LockError: the match is not in the tree any more.
        """
        self.touch(match.last_device_node)
        self.counters.queried_tokens += self._floor(len(key))
        self.counters.matched_tokens += match.prefix_len

    def _find(self, operation: str, key: RadixKey) -> list[Step]:
        """How far the tree holds a key, and that it is one."""
        require_a(RadixKey, operation, key)
        return self._steps(key)

    def _run_after(self, run: int, node: TreeNode, length: int) -> int:
        """How many consecutive live tokens end `length` tokens into `node`, given how many ended
        where it starts (sglang#29352). What reaches back to the root counts as a whole window."""
        return run + length if node.state == "live" else 0

    # -- inserting -----------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Hand a computed prefix to the cache: from `prev_prefix_len` on its slots are the cache's
        from now on, or freed.

        What the tree does not hold becomes new nodes, without SWA value before
        `swa_evicted_seqlen`; if that is all of it, it is not cached (sglang#29860). What the tree
        holds already is freed, but where a tombstone can be recovered: there the peers stay, and
        the full slots too if no lock holds the old ones (else the old ones stay, sglang#29351).

        Raises:
            IndexTensorError: no `InsertParams`, another key than a `RadixKey`, or a value that is
                no vector of integers on the allocator's device.
            GeometryError: fewer slots than tokens in whole pages, lengths that are negative, that
                are no whole pages, or a previous prefix that the tree does not hold; with
                `validate`, slots that do not run through whole pages.
            InvalidSlotError: with `validate`, slots of the padding page, or negative ones.
            DoubleFreeError: with `validate`, a page named twice, or one that the tree holds of the
                key already.
            LivePeerError: with `validate`, a slot before `swa_evicted_seqlen` that has a peer,
                where the free group is not the caller's.
            DeadPeerError: with `validate`, a slot from there on that has none.
        """
        key, value, prefix, cursor = self._checked(params)
        steps = self._steps(key)
        held = sum(length for _, length in steps)
        self._require_insertable(steps, value, prefix, cursor)
        surplus = Surplus(cursor)
        with self.frees():
            nodes = [node for node, _ in steps]
            if nodes and nodes[-1].end > held:
                nodes[-1] = self._split(nodes[-1], held)
            bare = [self._absorb(node, value, prefix, cursor, surplus) for node in nodes]
            cached = self._keep_new(held, cursor, len(key))
            surplus.add(value, cached, len(key))
            # First what an allocator could refuse, then what only this cache knows of.
            surplus.free(self.token_to_kv_pool_allocator)
            for node in bare:
                if node is not None:
                    self._recover(node, value[node.start : node.end])
            last = nodes[-1] if nodes else self.root_node
            self.touch(last)
            last = self._grow(last, key[:cached], value, cursor)
            self.counters.inserted_tokens += cached - held
            self.counters.duplicate_tokens += len(surplus)
        return InsertResult(held, last)

    def _require_insertable(
        self, steps: list[Step], value: torch.Tensor, prefix: int, cursor: int
    ) -> None:
        """Raise unless the tree holds the previous prefix, and with `validate` unless the slots
        behind it are what an insert may be given."""
        held = sum(length for _, length in steps)
        if prefix > held:
            raise GeometryError(
                f"insert: prev_prefix_len {prefix}; expected at most the {held} tokens that the "
                "tree holds of the key"
            )
        if self.validate:
            own = torch.cat([self._no_slots, *(node.value[:length] for node, length in steps)])
            require_new_pages(value[prefix:], own, self.page_size)
            require_peers(
                value[prefix:],
                max(cursor - prefix, 0),
                self.token_to_kv_pool_allocator,
                settled=self._frees_alone or not self.group_open,
            )

    def _checked(self, params: InsertParams) -> tuple[RadixKey, torch.Tensor, int, int]:
        """Key and value in whole pages, the previous prefix and the cursor."""
        require_a(InsertParams, "insert", params)
        require_a(RadixKey, "insert", params.key)
        value = as_index("insert", params.value, self._no_slots.device)
        whole = self._floor(len(params.key))
        lengths = {
            "prev_prefix_len": params.prev_prefix_len,
            "swa_evicted_seqlen": params.swa_evicted_seqlen,
        }
        prefix, cursor = (as_count("insert", name, number) for name, number in lengths.items())
        if len(value) < whole:
            raise GeometryError(f"insert: {len(value)} slots for {whole} tokens; expected as many")
        if prefix < 0 or cursor < 0 or prefix % self.page_size or cursor % self.page_size:
            raise GeometryError(
                f"insert: prev_prefix_len {prefix}, swa_evicted_seqlen {cursor}; expected whole "
                f"pages of {self.page_size}"
            )
        return params.key[:whole], value[:whole], prefix, cursor

    def _absorb(
        self, node: TreeNode, value: torch.Tensor, prefix: int, cursor: int, surplus: Surplus
    ) -> TreeNode | None:
        """What becomes of the slots of a node that is in the tree, behind the previous prefix: they
        are surplus, but for a tombstone that they recover, which is returned."""
        start = max(node.start, prefix)
        fresh = max(start, cursor)
        if node.state != "tombstone" or fresh >= node.end:
            surplus.add(value, start, node.end)
            return None
        if fresh > node.start:
            self._split(node, fresh)
        surplus.add(value, start, fresh)
        return node

    def _recover(self, node: TreeNode, incoming: torch.Tensor) -> None:
        """Make a tombstone live with freshly computed slots: under a lock it keeps its own full
        slots, which requests have in their rows, and takes over the peers."""
        pages = len(node) // self.page_size
        if node.full_lock_ref > 0:
            self.token_to_kv_pool_allocator.recover_tombstone(node.value, incoming)
            self.counters.recovered_locked_pages += pages
        else:
            self.token_to_kv_pool_allocator.free_full(node.value)
            node.value = incoming.clone()
            self.counters.recovered_unlocked_pages += pages
        self._change(node, state="live")

    def _keep_new(self, start: int, cursor: int, end: int) -> int:
        """Up to where new tokens `start` to `end` are cached: not at all without SWA value."""
        return end if cursor < end else start

    def _grow(self, last: TreeNode, key: RadixKey, value: torch.Tensor, cursor: int) -> TreeNode:
        """New nodes below `last` up to the end of the key; the last one."""
        boundary = min(max(cursor, last.end), len(key))
        if last.end < boundary:
            old = slice(last.end, boundary)
            last = self._attach(last, key[old], value[old], "tombstone")
        if last.end < len(key):
            fresh = slice(last.end, len(key))
            last = self._attach(last, key[fresh], value[fresh], "live")
        return last

    # -- requests ------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: CachedRequest) -> None:
        """Cache the whole pages that a running request has computed; it goes on over the tree's
        slots, and its lock moves to their end.

        Nothing happens if its prefix reaches that far already, and while a load is under way to
        tombstones in its last window: what the tree has there could not be read yet.

        Raises:
            GeometryError: lengths that no request can have.
            InvalidSlotError: it holds no row.
            LockError: its prefix ends with no lock of the tree.
            RequestStateError: it has drafts, of which nobody knows yet whether they stay.
        """
        row_number = self._require_running("cache_unfinished_req", req)
        if req.kv_allocated_len != req.kv_len:
            raise RequestStateError(
                f"cache_unfinished_req: kv_allocated_len {req.kv_allocated_len}, kv_len "
                f"{req.kv_len}; expected a request without drafts, trim first"
            )
        prefix, whole = req.prefix_len, self._floor(req.kv_len)
        cursor = self._insert_cursor(req)
        key = RadixKey(req.token_ids[:whole], req.extra_key)
        if whole == prefix or cursor >= whole or self._loads_in_window(key, req.last_node):
            return
        row = self.req_to_token_pool.row(row_number, whole)
        places = (row_number, slice(prefix, whole))
        # What the row holds, once more: a table that cannot be written says so while the slots are
        # the request's. Behind the insert it would be left with slots that it does not own.
        self.req_to_token_pool.write(places, row[prefix:])
        with self.frees():
            node = self.insert(InsertParams(key, row, prefix, cursor)).last_device_node
            # The old prefix ends with a node, so whole nodes lie behind it.
            values = [each.value for each in self.path(node) if each.end > prefix]
            self.req_to_token_pool.write(places, torch.cat(values))
            self.inc_lock_ref(node)
            released, req.last_node, req.prefix_len = req.last_node, node, whole
            if released is not None:
                self.dec_lock_ref(released)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Cache the whole pages of a request that ended, or with `is_insert=False` none of them;
        free all else that it owns, release its lock and its row.

        Afterwards it has no node, no prefix and no slots; `kv_len` and `swa_evicted_seqlen` stay.

        Raises:
            As `cache_unfinished_req`.
        """
        row_number = self._require_running("cache_finished_req", req)
        row = self.req_to_token_pool.row(row_number, req.kv_allocated_len)
        computed, evicted = req.kv_len, req.swa_evicted_seqlen
        owned = self._floor(computed) if is_insert else req.prefix_len
        rest = Surplus(evicted)
        rest.add(row, owned, len(row))
        cached = InsertParams(
            RadixKey(req.token_ids[:owned], req.extra_key),
            row[:owned],
            req.prefix_len,
            self._insert_cursor(req),
        )
        if is_insert:
            key, value, prefix, cursor = self._checked(cached)
            self._require_insertable(self._steps(key), value, prefix, cursor)
        with self.frees():
            rest.free(self.token_to_kv_pool_allocator)
            # Should an allocator refuse what follows, the request still owns the rest, and only
            # that, so the call may be repeated.
            req.kv_len = req.kv_allocated_len = owned
            req.swa_evicted_seqlen = min(evicted, owned)
            if is_insert:
                self.insert(cached)
            if req.last_node is not None:
                self.dec_lock_ref(req.last_node)
            self.req_to_token_pool.free(req)
            req.last_node, req.prefix_len, req.kv_allocated_len = None, 0, 0
            req.kv_len, req.swa_evicted_seqlen = computed, evicted

    def _insert_cursor(self, request: CachedRequest) -> int:
        """How far the SWA slots of what a request hands over are gone (sglang#30845)."""
        return request.swa_evicted_seqlen

    def _require_running(self, operation: str, req: CachedRequest) -> int:
        """The row of a request, after everything that can be wrong with one: nothing changes."""
        if req.req_pool_idx is None:
            raise InvalidSlotError(f"{operation}: a request without a row; expected a running one")
        names = ("prefix_len", "kv_len", "kv_allocated_len", "swa_evicted_seqlen")
        prefix, computed, allocated, cursor = (
            as_count(operation, name, number)
            for name, number in zip(
                names,
                (req.prefix_len, req.kv_len, req.kv_allocated_len, req.swa_evicted_seqlen),
                strict=True,
            )
        )
        ordered = 0 <= prefix <= computed <= allocated and 0 <= cursor <= allocated
        if not ordered or prefix % self.page_size or cursor % self.page_size:
            raise GeometryError(
                f"{operation}: prefix_len {prefix}, kv_len {computed}, kv_allocated_len "
                f"{allocated}, swa_evicted_seqlen {cursor}; expected them in this order, and prefix"
                f" and evicted part in whole pages of {self.page_size}"
            )
        if len(req.token_ids) < computed:
            raise GeometryError(
                f"{operation}: {len(req.token_ids)} token ids for kv_len {computed}; expected as "
                "many"
            )
        locked = self.root_node if req.last_node is None else req.last_node
        self.path(locked)
        if locked.end != prefix:
            raise LockError(f"{operation}: prefix_len {prefix}; expected the end of {locked!r}")
        if req.last_node is not None:
            self._require_locked(operation, locked)
        return req.req_pool_idx

    def _loads_in_window(self, key: RadixKey, prefix: TreeNode | None) -> bool:
        """Whether a load is under way to what the tree holds of the last window of `key`, which
        begins with the tokens of `prefix`."""
        start = self._window_start(len(key))
        steps = self._steps(key, prefix)
        return any(n.state == "loading" and n.start + length > start for n, length in steps)

    # -- loads ---------------------------------------------------------------------------------

    def find_path(self, key: RadixKey) -> tuple[int, TreeNode]:
        """How many tokens of `key` the tree holds, whatever can be served of them, and the node
        that ends there (the root for none), which is split off if need be."""
        steps = self._find("find_path", key)
        if not steps:
            return 0, self.root_node
        node, length = steps[-1]
        end = node.start + length
        return end, node if end == node.end else self._split(node, end)

    def begin_swa_load(self, node: TreeNode, start: int) -> list[TreeNode]:
        """Mark the tombstones that hold tokens from `start` (a page boundary) to the end of `node`
        as loading, from the root down; the node across `start` is split there.

        Their slots get peers by `set_full_to_swa_mapping`, and the caller holds a lock of `node`
        until after `end_swa_load`. Loading nodes are not served, not evicted and not recovered.
        The list stays the *cache's*: keep the object itself, since where a node is split meanwhile,
        its upper part is put in before it. The values of the nodes together are the same slots in
        the same order at all times. It is empty if there is no tombstone.

        Raises:
            GeometryError: a start that is no page boundary of the prefix that ends with `node`.
            LockError: `node` is not in the tree, or not locked.
        """
        start = as_count("begin_swa_load", "start", start)
        self.path(node)
        if not 0 <= start <= node.end or start % self.page_size:
            raise GeometryError(
                f"begin_swa_load: start {start}; expected a page boundary of 0..{node.end}"
            )
        if node is not self.root_node:
            self._require_locked("begin_swa_load", node)
        bare = [each for each in self._nodes_from(node, start) if each.state == "tombstone"]
        load = list(bare)
        for each in bare:
            each.load = load
            self._change(each, state="loading")
        return load

    def end_swa_load(self, nodes: list[TreeNode], *, arrived: bool) -> None:
        """End what `begin_swa_load` began: the nodes are live, or with `arrived=False` tombstones
        again, whose SWA slots this call frees (the caller does not). The list is empty then.

        A tombstone that only the lock of the load kept goes when that lock is released.

        Raises:
            LockError: a node that is not loading with this list.
        """
        strange = [each for each in nodes if each.load is not nodes]
        if strange:
            raise LockError(f"end_swa_load: {strange[0]!r}; expected the list of begin_swa_load")
        with self.frees():
            for each in nodes:
                if arrived:
                    self.counters.reloaded_pages += len(each) // self.page_size
                else:
                    self.token_to_kv_pool_allocator.free_swa(each.value)
                each.load = None
                self._change(each, state="live" if arrived else "tombstone")
        nodes.clear()

    # -- all of it -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Free everything that the cache holds.

        Raises:
            LockError: a node is locked or loading, or the root is: by a request that matched
                nothing, or by a load.
        """
        if self.root_node.lock_ends:
            raise LockError(
                f"flush: {self.root_node.lock_ends} requests or loads hold the root; expected none"
            )
        held = [node for node in self.walk() if node.full_lock_ref or node.state == "loading"]
        if held:
            raise LockError(
                f"flush: {len(held)} nodes are in use, {held[0]!r} first; expected none"
            )
        live = [node.value for node in self.walk() if node.state == "live"]
        bare = [node.value for node in self.walk() if node.state == "tombstone"]
        with self.frees():
            if live:
                self.token_to_kv_pool_allocator.free(torch.cat(live))
            if bare:
                self.token_to_kv_pool_allocator.free_full(torch.cat(bare))
        self._plant()

    def reset(self) -> None:
        """Forget everything and free nothing: the allocator was cleared, or is about to be."""
        self._plant()

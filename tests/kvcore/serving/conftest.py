"""Shared by the serving tests: a small world of pools, cache and requests that computes KV as a
model does, and its laws, written again plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcore import (
    EvictParams,
    HostPrefix,
    MatchPrefixParams,
    PrefixLoad,
    RadixKey,
    ReqToTokenPool,
    ServingRequest,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TreeNode,
    UnifiedRadixCache,
    serving,
)

torch.set_num_threads(1)

FULL_PAGES, SWA_PAGES, ROWS, CONTEXT = 16, 12, 4, 80
FULL_LAYER, SWA_LAYER = 0, 1

Page = tuple[str | None, tuple[int, ...]]
"""A page of the tree: extra key, and all tokens up to its end."""


class World:
    """Pools of int64 stamps, a cache over them, and the requests and loads that hold slots."""

    def __init__(self, page_size: int, window: int, **options: Any) -> None:
        self.page_size, self.window = page_size, window
        full, swa = options.pop("full_pages", FULL_PAGES), options.pop("swa_pages", SWA_PAGES)
        self.pool = SWAKVPool(
            full * page_size,
            swa * page_size,
            page_size,
            torch.int64,
            head_num=1,
            head_dim=1,
            swa_attention_layer_ids=[SWA_LAYER],
            full_attention_layer_ids=[FULL_LAYER],
            device="cpu",
        )
        self.allocator = SWATokenToKVPoolAllocator(
            full * page_size,
            swa * page_size,
            page_size,
            torch.int64,
            "cpu",
            self.pool,
            False,
            validate=True,
        )
        self.table = ReqToTokenPool(options.pop("rows", ROWS), CONTEXT, "cpu", False)
        self.cache = UnifiedRadixCache(self.table, self.allocator, page_size, window, validate=True)
        self.running: list[ServingRequest] = []
        self.loads: list[PrefixLoad] = []
        assert not options

    # -- requests ------------------------------------------------------------------------------

    def pages(self, number: float) -> int:
        """So many pages, in tokens."""
        return int(number * self.page_size)

    def text(self, *pieces: tuple[int, int]) -> list[int]:
        """Tokens by pieces `(stream, length)`: equal streams begin with equal tokens."""
        return [1000 * stream + i for stream, length in pieces for i in range(length)]

    def request(self, tokens: list[int], extra_key: str | None = None) -> ServingRequest:
        return ServingRequest(tokens, extra_key=extra_key)

    def admit(self, request: ServingRequest, num_tokens: int | None = None) -> torch.Tensor | None:
        slots = serving.admit(self.cache, request, num_tokens=num_tokens)
        if slots is not None:
            self.running.append(request)
        return self.computed(request, slots)

    def start(self, tokens: list[int], extra_key: str | None = None) -> ServingRequest:
        """A request that was admitted, its tokens computed."""
        request = self.request(tokens, extra_key)
        assert self.admit(request) is not None
        return request

    def prefill(self, request: ServingRequest, num_tokens: int) -> torch.Tensor | None:
        return self.computed(request, serving.prefill(self.cache, request, num_tokens))

    def decode(self, *requests: ServingRequest) -> torch.Tensor | None:
        """A step; each request samples a token first where it knows none."""
        for request in requests:
            if request.num_tokens == request.kv_len:
                request.extend_tokens([900_000 + request.kv_len])
        slots = serving.decode(self.cache, requests)
        for number, request in enumerate(requests):
            self.computed(request, None if slots is None else slots[number : number + 1])
        return slots

    def resume(self, request: ServingRequest) -> torch.Tensor | None:
        restored = request.retraction is not None
        slots = serving.resume(self.cache, request)
        if slots is not None:
            self.running.append(request)
        return slots if restored else self.computed(request, slots)

    def finish(self, request: ServingRequest) -> None:
        serving.finish(self.cache, request)
        self.running.remove(request)

    def abort(self, request: ServingRequest) -> None:
        serving.abort(self.cache, request)
        self.running.remove(request)

    def retract(self, request: ServingRequest, *, backup: bool) -> None:
        serving.retract(self.cache, request, backup=backup)
        self.running.remove(request)

    def serve(self, tokens: list[int], extra_key: str | None = None) -> None:
        """A request from arrival to its end."""
        self.finish(self.start(tokens, extra_key))

    def slide(self, *requests: ServingRequest) -> int:
        return serving.slide_windows(self.cache, requests)

    def speculate(self, request: ServingRequest, num_tokens: int) -> torch.Tensor | None:
        """Drafts, with what they computed in their slots."""
        slots = serving.speculate(self.cache, request, num_tokens)
        if slots is not None:
            self.write(slots, [-1 - number for number in range(num_tokens)])
        return slots

    def trim(self, request: ServingRequest, num_accepted: int) -> None:
        """So many drafts were right."""
        start = request.kv_len + num_accepted - request.num_tokens
        request.extend_tokens([800_000 + number for number in range(start)])
        known = request.token_ids[: request.kv_len + num_accepted]
        stamps = self.stamps(known, request.extra_key)
        accepted = self.row(request)[request.kv_len : request.kv_len + num_accepted]
        self.write(accepted, stamps[request.kv_len :])
        serving.trim(self.cache, request, num_accepted)

    # -- loads and evictions -------------------------------------------------------------------

    def save(self, tokens: list[int]) -> HostPrefix:
        copy = serving.save_prefix(self.cache, RadixKey(tokens))
        assert copy is not None
        return copy

    def begin_load(self, copy: HostPrefix) -> PrefixLoad | None:
        load = serving.begin_load(self.cache, copy)
        if load is not None:
            self.loads.append(load)
        return load

    def end_load(self, load: PrefixLoad, *, failed: bool = False) -> None:
        end = serving.cancel_load if failed else serving.finish_load
        end(self.cache, load)
        self.loads.remove(load)

    def evict(self, full_tokens: int = 0, swa_tokens: int = 0) -> None:
        self.cache.evict(EvictParams(full_tokens, swa_tokens))

    def tombstones(self, base: list[int], tail: list[int]) -> None:
        """The cache has base and tail, and of the base no SWA slots any more."""
        self.serve(base)
        self.serve(base + tail)
        self.evict(swa_tokens=len(base))
        letters = len(base) // self.page_size, len(tail) // self.page_size
        assert self.states(base + tail) == "T" * letters[0] + "L" * letters[1]

    def scramble(self) -> None:
        """Others lend everything that is free, write to it, and give it back."""
        others = []
        while (page := self.allocator.alloc(self.page_size)) is not None:
            self.write(page, [-7] * self.page_size)
            others.append(page)
        for page in others:
            self.allocator.free(page)

    def match(self, tokens: list[int]) -> int:
        """Tokens that the cache could serve."""
        return self.cache.match_prefix(self.params(tokens)).prefix_len

    def params(self, tokens: list[int]) -> MatchPrefixParams:
        return MatchPrefixParams(RadixKey(tokens))

    def states(self, tokens: list[int]) -> str:
        """The tree's pages of these tokens, a letter each."""
        letters = {"live": "L", "tombstone": "T", "loading": "<"}
        _, node = self.cache.find_path(RadixKey(tokens))
        nodes = self.cache.path(node)
        return "".join(letters[node.state] * (len(node) // self.page_size) for node in nodes)

    # -- the model's part ----------------------------------------------------------------------

    def stamps(self, tokens: Any, extra_key: str | None = None) -> list[int]:
        """What the KV of each token is: a number of it and of all before it."""
        seen, stamp = [], len(extra_key or "")
        for token in tokens:
            stamp = (stamp * 1_000_003 + int(token) + 1) % 2**45
            seen.append(stamp)
        return seen

    def computed(self, request: ServingRequest, slots: torch.Tensor | None) -> torch.Tensor | None:
        """Write the KV of a request's last tokens into the slots that it got for them."""
        if slots is not None:
            known = request.token_ids[: request.kv_len]
            stamps = self.stamps(known, request.extra_key)[len(known) - len(slots) :]
            self.write(slots, stamps)
        return slots

    def write(self, slots: torch.Tensor, stamps: list[int]) -> None:
        for layer in (FULL_LAYER, SWA_LAYER):
            keys = torch.tensor(stamps, dtype=torch.int64).view(-1, 1, 1)
            self.pool.set_kv_buffer(layer, slots, keys, -keys)

    def contents(self, layer: int) -> list[int]:
        """What every slot of a layer's side holds."""
        keys, values = (buffer.flatten() for buffer in self.pool.get_kv_buffer(layer))
        assert torch.equal(keys, -values)
        return keys.tolist()

    # -- the laws ------------------------------------------------------------------------------

    def check(self) -> None:
        """Every page has one owner, every lock one holder, and every token that could be read is
        the one that was computed."""
        self.cache.sanity_check()
        self.check_owners()
        self.check_locks()
        peers = self.allocator.full_to_swa_index_mapping.tolist()
        full, swa = self.contents(FULL_LAYER), self.contents(SWA_LAYER)
        for request in self.running:
            length, first = request.kv_len, max(0, request.kv_len - self.window)
            self.check_lengths(request)
            stamps = self.stamps(request.token_ids[:length].tolist(), request.extra_key)
            row = self.row(request)[:length].tolist()
            assert [full[slot] for slot in row] == stamps
            assert all(peers[slot] > 0 for slot in row[first:])
            assert [swa[peers[slot]] for slot in row[first:]] == stamps[first:]
        for node, tokens, extra_key in self.prefixes():
            stamps, slots = self.stamps(tokens, extra_key)[node.start :], node.value.tolist()
            assert [full[slot] for slot in slots] == stamps
            if node.state == "live":
                assert [swa[peers[slot]] for slot in slots] == stamps
            elif node.state == "loading":
                assert all(peers[slot] > 0 for slot in slots)
            elif not self.cache.group_open:
                assert not any(peers[slot] for slot in slots)

    def check_lengths(self, request: ServingRequest) -> None:
        length, cursor = request.kv_len, request.swa_evicted_seqlen
        assert request.prefix_len <= length <= request.kv_allocated_len
        assert request.prefix_len % self.page_size == cursor % self.page_size == 0
        assert cursor <= max(0, length // self.page_size * self.page_size - self.window)

    def check_owners(self) -> None:
        """Laws L1 to L3 with requests, tree and loads as owners."""
        allocator = self.allocator
        owned = [page for node in self.cache.walk() for page in self.pages_of(node.value)]
        for request in self.running:
            owned += self.pages_of(self.row(request)[request.prefix_len :])
        for load in self.loads:
            owned += self.pages_of(load.slots)
        # What a group holds back keeps its peers up to the group's end.
        queued = {slot // self.page_size for slot in allocator.queued_peer_slots.tolist()}
        mapping = allocator.full_to_swa_index_mapping.tolist()
        peers = [mapping[page * self.page_size] // self.page_size for page in {*owned, *queued}]
        for side, lent in (
            (allocator.full_attn_allocator, owned),
            (allocator.swa_attn_allocator, [peer for peer in peers if peer > 0]),
        ):
            free = side.free_pages.tolist() + side.release_pages.tolist()
            pending = side.pending_pages.tolist()
            assert Counter(free + pending + lent) == Counter(range(1, side.num_pages + 1))

    def check_locks(self) -> None:
        """A recount over who holds locks: by page, the full path and the last window."""
        full: Counter[Page] = Counter()
        swa: Counter[Page] = Counter()
        held = [request.last_node for request in self.running] + [load.node for load in self.loads]
        for node in held:
            assert node is not None
            if node is self.cache.root_node:
                continue
            extra_key, tokens = self.tokens_to(node)
            start = max(0, (node.end - self.window) // self.page_size * self.page_size)
            for end in range(self.page_size, node.end + 1, self.page_size):
                full[extra_key, tuple(tokens[:end])] += 1
                swa[extra_key, tuple(tokens[:end])] += end > start
        for page, (_, _, full_locks, swa_locks) in self.tree().items():
            assert (full_locks, swa_locks) == (full[page], swa[page])

    def tokens_to(self, node: TreeNode) -> tuple[str | None, list[int]]:
        path = self.cache.path(node)
        tokens = [token for each in path for token in each.key.token_ids.tolist()]
        return node.key.extra_key, tokens

    def prefixes(self) -> Iterator[tuple[TreeNode, list[int], str | None]]:
        for node in self.cache.walk():
            extra_key, tokens = self.tokens_to(node)
            yield node, tokens, extra_key

    def tree(self) -> dict[Page, tuple[int, str, int, int]]:
        """The tree page by page, however it is split: full page, state, locks."""
        found: dict[Page, tuple[int, str, int, int]] = {}
        for node, tokens, extra_key in self.prefixes():
            for at, page in enumerate(self.pages_of(node.value), start=1):
                key = extra_key, tuple(tokens[: node.start + at * self.page_size])
                found[key] = page, node.state, node.full_lock_ref, node.swa_lock_ref
        return found

    def used(self) -> list[Any]:
        """When each prefix was last used, by its end, and how often the cache was of use."""
        counters = self.cache.counters
        ends = {(extra, tuple(tokens)): node for node, tokens, extra in self.prefixes()}
        # A split adds an end, with the tick of the whole: only ends of leaves are compared.
        ticks = [node.last_access for node in ends.values() if not node.children]
        return [sorted(ticks), counters.queried_tokens, counters.matched_tokens]

    def pages_of(self, slots: torch.Tensor) -> list[int]:
        """The pages of slots in row order; whole ones but for the last."""
        return [slot // self.page_size for slot in slots[:: self.page_size].tolist()]

    def row(self, request: ServingRequest) -> torch.Tensor:
        assert request.req_pool_idx is not None
        return self.table.row(request.req_pool_idx, request.kv_allocated_len)

    # -- comparing and ending ------------------------------------------------------------------

    def state(self, *requests: ServingRequest) -> dict[str, Any]:
        """Everything but the order of free pages and how the tree is split."""
        allocator, cache = self.allocator, self.cache
        return {
            "full": sorted(allocator.full_attn_allocator.free_pages.tolist()),
            "swa": sorted(allocator.swa_attn_allocator.free_pages.tolist()),
            "pending": allocator.full_attn_allocator.pending_pages.tolist(),
            "queued": allocator.queued_peer_slots.tolist(),
            "mapping": allocator.full_to_swa_index_mapping.tolist(),
            "rows": sorted(self.table.free_slots),
            "group": cache.group_open,
            "tree": self.tree(),
            "used": self.used(),
            "sizes": (
                cache.full_evictable_size(),
                cache.swa_evictable_size(),
                cache.full_protected_size(),
                cache.swa_protected_size(),
            ),
            "written": [self.row(request).tolist() for request in self.running],
            "requests": [self.attributes(request) for request in (*self.running, *requests)],
            "loads": [(load.node, load.slots.tolist(), len(load.loading)) for load in self.loads],
        }

    def attributes(self, request: ServingRequest) -> dict[str, Any]:
        shown = {name: value for name, value in vars(request).items() if name != "_tokens"}
        return shown | {"tokens": request.token_ids.tolist()}

    def drain(self) -> None:
        """End everything, flush, and find the pools as new."""
        for load in list(self.loads):
            self.end_load(load, failed=True)
        for request in list(self.running):
            self.abort(request)
        self.check()
        self.cache.flush()
        assert list(self.cache.walk()) == []
        assert self.cache.total_size() == (0, 0)
        assert self.table.available_size() == self.table.size
        assert self.allocator.full_available_size() == self.allocator.size_full
        assert self.allocator.swa_available_size() == self.allocator.size_swa
        assert (self.allocator.full_to_swa_index_mapping[:-1] == 0).all()


@pytest.fixture(params=[(1, 3), (4, 2), (4, 6)], ids=["page1", "page4-small-window", "page4"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose test leaves it lawful, and which drains."""
    made = World(*request.param)
    yield made
    made.check()
    made.drain()

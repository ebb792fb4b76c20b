"""Shared by the tests of the prefix cache: a cache over an allocator that checks every slot, and
the state of both to compare."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import (
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
    TreeNode,
    UnifiedRadixCache,
)

Tokens = Sequence[int]


class Bench:
    """A cache, and what a test does with it."""

    def __init__(self, laws: SimpleNamespace, page_size: int, window: int, **pages: int) -> None:
        self.laws = laws
        self.page_size = page_size
        self.allocator = SWATokenToKVPoolAllocator(
            pages.get("full", 64 // page_size) * page_size,
            pages.get("swa", 64 // page_size) * page_size,
            page_size,
            torch.float16,
            "cpu",
            None,
            False,
            validate=True,
        )
        self.rows = ReqToTokenPool(4, 64, "cpu", False)
        self.cache = UnifiedRadixCache(self.rows, self.allocator, page_size, window, validate=True)

    def compute(self, length: int, evicted: int = 0) -> torch.Tensor:
        """Slots for a row of so many tokens, whole pages, of which the front has no peers."""
        slots = self.allocator.alloc(length)
        assert slots is not None
        self.allocator.free_swa(slots[:evicted])
        return slots

    def put(self, tokens: Tokens, *, prefix: int = 0, evicted: int = 0) -> InsertResult:
        """A request computed these tokens behind its locked prefix and hands them over."""
        value = torch.cat((self.slots(tokens[:prefix]), self.compute(len(tokens) - prefix)))
        if prefix < evicted:
            self.allocator.free_swa(value[prefix:evicted])
        return self.cache.insert(InsertParams(RadixKey(tokens), value, prefix, evicted))

    def match(self, tokens: Tokens) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))

    def evict(self, full: int, swa: int) -> tuple[int, int]:
        result = self.cache.evict(EvictParams(full, swa))
        return result.num_tokens_evicted, result.swa_num_tokens_evicted

    def lock(self, tokens: Tokens) -> TreeNode:
        """Lock the prefix, all of which must be in the tree."""
        node = self.node(tokens)
        self.cache.inc_lock_ref(node)
        return node

    def node(self, tokens: Tokens) -> TreeNode:
        found, node = self.cache.find_path(RadixKey(tokens))
        assert found == len(tokens)
        return node

    def slots(self, tokens: Tokens) -> torch.Tensor:
        """The tree's slots for these tokens."""
        path = self.cache.path(self.node(tokens))
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *(node.value for node in path)])

    def states(self, tokens: Tokens) -> list[tuple[int, int, str]]:
        """Where each state begins and ends on a path; splits do not show."""
        runs: list[tuple[int, int, str]] = []
        for node in self.cache.path(self.node(tokens)):
            start = runs.pop()[0] if runs and runs[-1][2] == node.state else node.start
            runs.append((start, node.end, node.state))
        return runs

    def shape(self) -> list[tuple[object, ...]]:
        """The tree, page by page, so that splits do not show; sizes; and the allocator."""
        pages = []
        for node in self.cache.walk():
            ends = {node.end: node.lock_ends}
            for at in range(0, len(node), self.page_size):
                end = node.start + at + self.page_size
                piece = slice(at, at + self.page_size)
                path = self.cache.path(node)
                key = np.concatenate([each.key.token_ids for each in path]).tolist()
                held = (node.full_lock_ref, node.swa_lock_ref, ends.get(end, 0))
                pages.append((key[:end], node.value[piece].tolist(), node.state, *held))
        sizes = (
            self.cache.full_evictable_size(),
            self.cache.full_protected_size(),
            self.cache.swa_evictable_size(),
            self.cache.swa_protected_size(),
        )
        return [*sorted(pages), sizes, self.laws.snapshot(self.allocator)]

    def check(self, *private: torch.Tensor) -> None:
        """The cache adds up, and every page is free, the tree's, or `private`."""
        self.cache.sanity_check()
        values = [*(node.value for node in self.cache.walk()), *private]
        firsts = [value[:: self.page_size] // self.page_size for value in values]
        self.laws.check_hybrid(self.allocator, [page for each in firsts for page in each.tolist()])
        for node in self.cache.walk():
            peers = self.allocator.translate_loc_from_full_to_swa(node.value)
            assert bool((peers > 0).all()) == (node.state != "tombstone")
            assert bool((peers == 0).all()) == (node.state == "tombstone")


Make = Callable[..., Bench]


@pytest.fixture
def bench(laws: SimpleNamespace) -> Make:
    """Makes a cache: page size, window, and pages of the sides by keyword."""

    def make(page_size: int, window: int, **pages: int) -> Bench:
        return Bench(laws, page_size, window, **pages)

    return make


@pytest.fixture
def unchanged() -> Callable[..., str]:
    """Require that a call raises exactly that type and changes nothing; gives the message."""

    def run(
        bench: Bench, error: type[Exception], call: Callable[..., object], *args: Any, **named: Any
    ) -> str:
        before, queued = bench.shape(), bench.cache.group_open
        with pytest.raises(error) as caught:
            call(*args, **named)
        assert caught.type is error
        assert bench.shape() == before
        assert bench.cache.group_open == queued
        return str(caught.value)

    return run

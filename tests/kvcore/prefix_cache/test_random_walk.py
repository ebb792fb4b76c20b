"""Random calls against a cache written again, plainly: a dictionary of pages by the tokens up to
their end, with every rule as a loop over pages."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvcore import InsertParams, RadixKey

Make = Callable[..., Any]
Prefix = tuple[int, ...]


@dataclass
class PlainPage:
    """One cached page: its full page, its state, and the ends of the locks that go through it."""

    page: int
    state: str
    locks: list[int] = field(default_factory=list)


class PlainCache:
    """What the cache has to hold, by the tokens from the front to the end of each page."""

    def __init__(self, page_size: int, window: int) -> None:
        self.size, self.window = page_size, window
        self.pages: dict[Prefix, PlainPage] = {}

    def path(self, tokens: list[int]) -> list[PlainPage]:
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            page = self.pages.get(tuple(tokens[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def served(self, tokens: list[int]) -> int:
        best = 0
        path = self.path(tokens)
        for count in range(1, len(path) + 1):
            run = 0
            for page in reversed(path[:count]):
                if page.state != "live":
                    break
                run += self.size
            if run >= min(self.window, count * self.size):
                best = count * self.size
        return best

    def insert(self, tokens: list[int], fresh: list[int], prefix: int, cursor: int) -> None:
        held = len(self.path(tokens)) * self.size
        for number, page in enumerate(fresh):
            start = number * self.size
            old = self.pages.get(tuple(tokens[: start + self.size]))
            if old is not None:
                if start >= max(prefix, cursor) and old.state == "tombstone":
                    old.state = "live"
                    old.page = old.page if old.locks else page
            elif start >= held and cursor < len(tokens):
                state = "live" if start >= cursor else "tombstone"
                self.pages[tuple(tokens[: start + self.size])] = PlainPage(page, state)

    def lock(self, tokens: list[int]) -> None:
        for page in self.path(tokens):
            page.locks.append(len(tokens))

    def unlock(self, tokens: list[int]) -> None:
        for page in self.path(tokens):
            page.locks.remove(len(tokens))
        for end in range(len(tokens), 0, -self.size):
            page = self.pages[tuple(tokens[:end])]
            if page.locks or page.state != "tombstone" or self.has_child(tuple(tokens[:end])):
                break
            del self.pages[tuple(tokens[:end])]

    def has_child(self, prefix: Prefix) -> bool:
        longer = len(prefix) + self.size
        return any(len(each) == longer and each[: len(prefix)] == prefix for each in self.pages)

    def swa_locks(self, prefix: Prefix) -> int:
        """Locks whose last window, in whole pages, holds the page that ends here."""
        start = len(prefix) - self.size
        return sum(
            start >= max(0, (end - self.window) // self.size * self.size)
            for end in self.pages[prefix].locks
        )

    def shape(self) -> dict[Prefix, tuple[int, str, int, int]]:
        return {
            prefix: (page.page, page.state, len(page.locks), self.swa_locks(prefix))
            for prefix, page in self.pages.items()
        }

    def sizes(self) -> list[int]:
        """Tokens: full evictable and protected, SWA evictable and protected."""
        counts = [0, 0, 0, 0]
        for prefix, page in self.pages.items():
            counts[bool(page.locks)] += self.size
            if page.state == "live":
                counts[2 + (self.swa_locks(prefix) > 0)] += self.size
        return counts


class Walk:
    """One random run."""

    def __init__(self, cached: Any, window: int, seed: int) -> None:
        self.cached, self.size = cached, cached.page_size
        self.plain = PlainCache(self.size, window)
        self.random = random.Random(seed)
        self.held: list[tuple[Any, list[int]]] = []
        self.loads: list[tuple[Any, list[int], list[Any], list[Prefix]]] = []

    def tokens(self, *, whole: bool) -> list[int]:
        """One of few texts that share prefixes: a token says where the text has branched."""
        length = self.random.randint(1, 8) * self.size
        branch = self.random.choice([0, 0, 1, 2]) * (self.random.randint(0, 7) * self.size + 1)
        text = [at if at < branch or not branch else 100 * branch + at for at in range(length)]
        return text if whole else text[: self.random.randint(1, length)]

    def step(self) -> None:
        actions = {
            self.insert: 5,
            self.match: 2,
            self.lock: 3,
            self.unlock: 3,
            self.evict: 3,
            self.begin_load: 3,
            self.end_load: 2,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()

    def insert(self) -> None:
        tokens, prefix = self.tokens(whole=True), 0
        if self.held and self.random.random() < 0.5:
            _, start = self.random.choice(self.held)
            prefix, tokens = len(start), start + self.tokens(whole=True)
        need = len(tokens) - prefix
        room = self.cached.allocator
        if min(room.full_available_size(), room.swa_available_size()) < need:
            return
        cursor = self.random.randint(0, len(tokens) // self.size) * self.size
        own = self.cached.compute(need, max(cursor - prefix, 0))
        value = torch.cat((self.cached.slots(tokens[:prefix]), own))
        known = len(self.plain.path(tokens)) * self.size
        result = self.cached.cache.insert(InsertParams(RadixKey(tokens), value, prefix, cursor))
        assert result.prefix_len == known
        self.plain.insert(tokens, (value[:: self.size] // self.size).tolist(), prefix, cursor)
        assert result.last_device_node.end == len(self.plain.path(tokens)) * self.size

    def match(self) -> None:
        tokens = self.tokens(whole=False)
        result = self.cached.match(tokens)
        assert result.prefix_len == self.plain.served(tokens) == result.last_device_node.end
        pages = [page.page for page in self.plain.path(tokens)[: result.prefix_len // self.size]]
        slots = [page * self.size + offset for page in pages for offset in range(self.size)]
        assert result.device_indices.tolist() == slots

    def lock(self) -> None:
        tokens = self.tokens(whole=True)
        tokens = tokens[: len(self.plain.path(tokens)) * self.size]
        if tokens:
            self.held.append((self.cached.lock(tokens), tokens))
            self.plain.lock(tokens)

    def unlock(self) -> None:
        if self.held:
            node, tokens = self.held.pop(self.random.randrange(len(self.held)))
            self.cached.cache.dec_lock_ref(node)
            self.plain.unlock(tokens)

    def evict(self) -> None:
        goal = self.random.randint(0, 12), self.random.randint(0, 12)
        before = self.plain.shape()
        left, swa_left, *_ = self.cached.evict(*goal), self.cached.cache.swa_evictable_size()
        after = self.seen()
        gone = before.keys() - after.keys()
        for prefix in gone:
            assert before[prefix][2] == 0, "a locked page went"
            del self.plain.pages[prefix]
        bared = [p for p in after if before[p][1] == "live" and after[p][1] == "tombstone"]
        for prefix in bared:
            assert before[prefix][3] == 0, "a locked peer went"
            self.plain.pages[prefix].state = "tombstone"
        freed = len(gone), len(bared) + sum(before[prefix][1] == "live" for prefix in gone)
        assert left == (freed[0] * self.size, freed[1] * self.size)
        assert left[0] >= goal[0] or self.cached.cache.full_evictable_size() == 0
        assert left[1] >= goal[1] or swa_left == 0

    def begin_load(self) -> None:
        tokens = self.tokens(whole=True)
        tokens = tokens[: len(self.plain.path(tokens)) * self.size]
        start = self.random.randint(0, len(tokens) // self.size) * self.size
        start = max(start, (len(tokens) - self.plain.window) // self.size * self.size)
        ends = range(start + self.size, len(tokens) + 1, self.size)
        bare = [
            tuple(tokens[:end])
            for end in ends
            if self.plain.pages[tuple(tokens[:end])].state == "tombstone"
        ]
        peers = self.cached.allocator.swa_attn_allocator.alloc(len(bare) * self.size)
        if peers is None or not bare:
            return
        pages = [self.plain.pages[prefix].page for prefix in bare]
        slots = [page * self.size + offset for page in pages for offset in range(self.size)]
        node = self.cached.lock(tokens)
        self.plain.lock(tokens)
        self.cached.allocator.set_full_to_swa_mapping(torch.tensor(slots), peers)
        load = self.cached.cache.begin_swa_load(node, start)
        assert [slot for each in load for slot in each.value.tolist()] == slots
        for prefix in bare:
            self.plain.pages[prefix].state = "loading"
        self.loads.append((node, tokens, load, bare))

    def end_load(self) -> None:
        if not self.loads:
            return
        node, tokens, load, bare = self.loads.pop(self.random.randrange(len(self.loads)))
        arrived = self.random.random() < 0.5
        self.cached.cache.end_swa_load(load, arrived=arrived)
        for prefix in bare:
            self.plain.pages[prefix].state = "live" if arrived else "tombstone"
        self.cached.cache.dec_lock_ref(node)
        self.plain.unlock(tokens)

    def seen(self) -> dict[Prefix, tuple[int, str, int, int]]:
        """The tree, page by page."""
        pages = {}
        above: dict[Any, Prefix] = {self.cached.cache.root_node: ()}
        for node in self.cached.cache.walk():
            tokens = above[node.parent] + tuple(node.key.token_ids.tolist())
            above[node] = tokens
            for end in range(node.start + self.size, node.end + 1, self.size):
                page = int(node.value[end - node.start - 1]) // self.size
                held = node.full_lock_ref, node.swa_lock_ref
                pages[tokens[:end]] = (page, node.state, *held)
        return pages

    def compare(self) -> None:
        assert self.seen() == self.plain.shape()
        cache = self.cached.cache
        sizes = self.plain.sizes()
        assert sizes == [
            cache.full_evictable_size(),
            cache.full_protected_size(),
            cache.swa_evictable_size(),
            cache.swa_protected_size(),
        ]
        assert cache.total_size() == (sizes[0] + sizes[1], sizes[2] + sizes[3])
        self.cached.check()


@pytest.mark.parametrize(
    ("page_size", "window"), [(1, 1), (1, 3), (2, 1), (2, 3), (2, 8), (4, 2), (4, 7)]
)
def test_the_cache_is_what_the_rules_say_page_by_page(
    bench: Make, page_size: int, window: int
) -> None:
    for seed in range(2):
        walk = Walk(bench(page_size, window, full=20, swa=16), window, seed)
        for _ in range(60):
            walk.step()
            walk.compare()
        while walk.loads:
            walk.end_load()
        while walk.held:
            walk.unlock()
        walk.compare()
        walk.cached.cache.flush()
        walk.cached.check()

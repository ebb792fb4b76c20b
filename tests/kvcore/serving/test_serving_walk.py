"""Requests of a few shared prefixes, in any order that an engine may choose: the laws hold after
every call, and everything comes back at the end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvcore import HostPrefix, ServingRequest

STEPS = 90


class Walk:
    """What may be done next, and choices among it."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world, self.random = world, Random(seed)
        self.waiting: list[ServingRequest] = []
        self.copies: list[HostPrefix] = []
        self.done: list[str] = []

    def step(self) -> None:
        kinds = [name for name in dir(self) if name.startswith("do_")]
        kind = self.random.choice(kinds)
        if getattr(self, kind)() is not None:
            self.done.append(kind)

    def tokens(self) -> list[int]:
        """A short path down a small tree of streams, mostly in whole pages."""
        unit, pick = self.world.page_size, self.random.randint
        pieces = [(1, pick(1, 3) * unit)]
        for _ in range(pick(0, 2)):
            pieces.append((pick(2, 3), pick(1, 2) * unit))
        return [*self.world.text(*pieces), *range(self.random.choice([0, 0, 1, 2]))]

    def settled(self) -> list[ServingRequest]:
        return [each for each in self.world.running if each.kv_len == each.kv_allocated_len]

    def one(self, requests: list[Any]) -> Any:
        return self.random.choice(requests) if requests else None

    def do_admit(self) -> Any:
        request = self.world.request(self.tokens(), self.random.choice([None, None, "other"]))
        chunk = self.random.choice([None, None, self.random.randint(1, 8)])
        return self.world.admit(request, chunk)

    def do_prefill(self) -> Any:
        unfinished = [each for each in self.settled() if each.kv_len < each.num_tokens]
        request = self.one(unfinished)
        return request and self.world.prefill(request, self.random.randint(1, 8))

    def do_decode(self) -> Any:
        batch = [each for each in self.settled() if each.kv_len < 60]
        return self.world.decode(*batch)

    def do_decode_more(self) -> Any:
        return self.do_decode()

    def do_slide(self) -> Any:
        return self.world.slide(*self.settled())

    def do_cache_unfinished(self) -> Any:
        request = self.one(self.settled())
        return request and (self.world.cache.cache_unfinished_req(request), 1)

    def do_speculate(self) -> Any:
        request = self.one(self.settled())
        if request is None or self.random.random() < 0.3:
            return None
        return self.world.speculate(request, self.random.randint(1, 6))

    def do_trim(self) -> Any:
        drafting = [each for each in self.world.running if each not in self.settled()]
        request = self.one(drafting)
        if request is None:
            return None
        drafts = request.kv_allocated_len - request.kv_len
        return self.world.trim(request, self.random.randint(0, drafts)), 1

    def do_finish(self) -> Any:
        request = self.one(self.world.running)
        return request and (self.world.finish(request), 1)

    def do_abort(self) -> Any:
        request = self.one(self.world.running)
        if request is None or self.random.random() < 0.7:
            return None
        return self.world.abort(request), 1

    def do_retract(self) -> Any:
        request = self.one(self.world.running)
        if request is None or self.random.random() < 0.4:
            return None
        self.world.retract(request, backup=self.random.random() < 0.6)
        self.waiting.append(request)
        return 1

    def do_resume(self) -> Any:
        request = self.one(self.waiting)
        slots = None if request is None else self.world.resume(request)
        if slots is not None:
            self.waiting.remove(request)
        return slots

    def do_save(self) -> Any:
        tokens = self.tokens()
        if self.world.match(tokens) > 0:
            self.copies.append(self.world.save(tokens))
        return self.copies

    def do_begin_load(self) -> Any:
        self.random.shuffle(self.copies)
        loads = (self.world.begin_load(copy) for copy in self.copies)
        return next((load for load in loads if load is not None), None)

    def do_end_load(self) -> Any:
        load = self.one(self.world.loads)
        return load and (self.world.end_load(load, failed=self.random.random() < 0.4), 1)

    def do_evict(self) -> Any:
        unit = self.world.page_size
        self.world.evict(unit * self.random.randint(0, 2), unit * self.random.randint(0, 4))
        return 1

    def do_evict_swa(self) -> Any:
        self.world.evict(swa_tokens=self.world.page_size * self.random.randint(1, 4))
        return 1

    def do_group(self) -> Any:
        if self.world.cache.group_open:
            self.world.cache.free_group_end()
        elif self.random.random() < 0.4:
            self.world.cache.free_group_begin()
        return 1


@pytest.mark.parametrize("seed", range(2))
def test_the_laws_hold_whatever_requests_do(world: Any, seed: int) -> None:
    walk = Walk(world, seed)
    for _ in range(STEPS):
        walk.step()
        world.check()
    if world.cache.group_open:
        world.cache.free_group_end()
    assert len(set(walk.done)) > 10, "this walk did next to nothing"

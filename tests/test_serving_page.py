"""The page about the life of a request says what happens: its code is run, and the calls that it
names under each step are the calls that are made there."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import (
    EvictParams,
    HostPrefix,
    RadixKey,
    ReqToTokenPool,
    ServingRequest,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    UnifiedRadixCache,
    serving,
)
from kvcore.models.request_ops import REQUEST_OP_KINDS

torch.set_num_threads(1)

PAGE = (Path(__file__).parent.parent / "docs/serving.md").read_text()
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
SECTIONS = dict(re.findall(r"^### ([^:\n]+): [^\n]*\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))

ROOM = {"full_available_size", "swa_available_size", "full_evictable_size", "swa_evictable_size"}
PLUMBING = {"free_group_begin", "free_group_end", "frees", "path", "get_kvcache"}
POOL = {"get_cpu_copy", "load_cpu_copy"}
ACTIONS = {"cache_unfinished_req", "cache_finished_req"}
"""Cache methods of which the page tells what they call in turn."""


class Engine:
    """Pools for one scenario, and every call that is made to them by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = SWAKVPool(64, 48, 4, torch.float16, 1, 1, [1], [0], "cpu")
        self.allocator = SWATokenToKVPoolAllocator(
            64, 48, 4, torch.float16, "cpu", self.pool, False, validate=True
        )
        self.rows = ReqToTokenPool(8, 64, "cpu", False)
        self.cache = UnifiedRadixCache(self.rows, self.allocator, 4, 6)
        self.called: set[str] = set()
        self.inside: list[str] = []
        self._monkeypatch = monkeypatch

    def listen(self, *, evictions: bool = False) -> None:
        """Note calls from now on; what an eviction calls only with `evictions`."""
        for name, owner in self.parts().items():
            for call in [each for each in dir(owner) if not each.startswith("_")]:
                if callable(getattr(type(owner), call, None)):
                    self._listen_to(name, owner, call, evictions)

    def parts(self) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "rows": self.rows,
            "allocator": self.allocator,
            "allocator.full_attn_allocator": self.allocator.full_attn_allocator,
            "allocator.swa_attn_allocator": self.allocator.swa_attn_allocator,
            "pool": self.pool,
        }

    def _listen_to(self, part: str, owner: Any, call: str, evictions: bool) -> None:
        real = getattr(owner, call)

        def heard(*args: Any, **kwargs: Any) -> Any:
            told = not self.inside or (part != "cache" and self.inside[-1] in HEARD)
            told = told or self.inside[-1] in ACTIONS
            if told and (evictions or "evict" not in self.inside):
                self.called.add(f"{part}.{call}")
            self.inside.append(call if part == "cache" else "other")
            try:
                return real(*args, **kwargs)
            finally:
                self.inside.pop()

        self._monkeypatch.setattr(owner, call, heard)

    def start(self, *tokens: int) -> ServingRequest:
        request = ServingRequest(tokens)
        assert serving.admit(self.cache, request) is not None
        return request

    def serve(self, *tokens: int) -> None:
        serving.finish(self.cache, self.start(*tokens))


HEARD = {"insert", "evict", "flush", "end_swa_load", "dec_lock_ref", *ACTIONS}
"""Cache methods whose calls of the allocator are told."""

BASE, TAIL = range(12), range(100, 112)


def tombstones(engine: Engine) -> None:
    """The cache has base and tail, and of the base no SWA slots."""
    engine.serve(*BASE)
    engine.serve(*BASE, *TAIL)
    engine.cache.evict(EvictParams(0, 12))


def arrival(engine: Engine) -> None:
    for stream in (0, 1, 2):
        engine.serve(*range(stream * 100, stream * 100 + 16))
    engine.listen()
    engine.start(*range(200, 220))


def chunks(engine: Engine) -> None:
    tombstones(engine)
    twin, slid = engine.start(*TAIL), engine.start(*range(200, 212))
    request = ServingRequest([*BASE, 7, 8])
    serving.admit(engine.cache, request, num_tokens=5)
    engine.serve(*TAIL)
    engine.serve(*range(200, 212))
    serving.slide_windows(engine.cache, [slid])
    engine.listen()
    serving.prefill(engine.cache, request, 9)
    for each in (twin, slid, request):
        engine.cache.cache_unfinished_req(each)


def locked_chunks(engine: Engine) -> None:
    engine.serve(*BASE)
    engine.cache.cache_unfinished_req(engine.start(*BASE, *TAIL))
    engine.cache.evict(EvictParams(0, 12))
    request = engine.start(*BASE)
    engine.listen()
    engine.cache.cache_unfinished_req(request)


def steps(engine: Engine) -> None:
    request = engine.start(*BASE)
    request.extend_tokens([1])
    engine.listen()
    serving.decode(engine.cache, [request])
    serving.slide_windows(engine.cache, [request])


def drafts(engine: Engine) -> None:
    request = engine.start(*BASE)
    engine.listen()
    serving.speculate(engine.cache, request, 5)
    serving.trim(engine.cache, request, 0)


def pressure(engine: Engine) -> None:
    request = engine.start(*BASE)
    engine.listen()
    for backup in (True, False):
        serving.retract(engine.cache, request, backup=backup)
        serving.resume(engine.cache, request)


def end(engine: Engine) -> None:
    engine.serve(*BASE)
    first, second = engine.start(*BASE, 1), engine.start(*TAIL)
    serving.slide_windows(engine.cache, [second])
    engine.listen()
    serving.finish(engine.cache, first)
    serving.abort(engine.cache, second)


def last_page(engine: Engine) -> None:
    engine.serve(*BASE)
    engine.serve(*BASE, *TAIL)
    engine.listen(evictions=True)
    engine.cache.evict(EvictParams(0, 12))
    engine.cache.flush()


def arrived(engine: Engine) -> None:
    copy = half_lost(engine)
    engine.listen()
    load = serving.begin_load(engine.cache, copy)
    assert load is not None
    serving.finish_load(engine.cache, load)
    assert serving.save_prefix(engine.cache, copy.key) is not None


def half_lost(engine: Engine) -> HostPrefix:
    """A copy of base and a page more; the cache has tombstones of the base only."""
    engine.serve(*BASE, *TAIL[:4])
    copy = serving.save_prefix(engine.cache, RadixKey([*BASE, *TAIL[:4]]))
    assert copy is not None
    engine.cache.flush()
    engine.serve(*BASE)
    engine.serve(*BASE, *range(200, 212))
    engine.cache.evict(EvictParams(0, 12))
    return copy


def failed(engine: Engine) -> None:
    engine.serve(*BASE, *TAIL)
    long = serving.save_prefix(engine.cache, RadixKey([*BASE, *TAIL]))
    assert long is not None
    engine.cache.flush()
    short = half_lost(engine)
    engine.listen()
    for copy in (short, long):
        load = serving.begin_load(engine.cache, copy)
        assert load is not None
        serving.cancel_load(engine.cache, load)


SCENARIOS: dict[str, list[Callable[[Engine], None]]] = {
    "Arrival": [arrival],
    "Chunks": [chunks, locked_chunks],
    "Every step": [steps],
    "Drafts": [drafts],
    "Under pressure": [pressure],
    "The end": [end],
    "The last page": [last_page],
    "Back from the host": [arrived, failed],
}


def named(section: str) -> set[str]:
    """The calls that a section names, but for those that undo."""
    text = re.sub(r"^If a step fails.*?(?=\n\n|\Z)", "", section, flags=re.DOTALL | re.MULTILINE)
    calls = set(re.findall(r"`((?:cache|rows|allocator)\.[\w.]+)", text))
    return calls | {f"pool.{each}" for each in POOL if f"`{each}`" in text}


def ignoring(calls: set[str], names: set[str]) -> set[str]:
    return {call for call in calls if call.split(".")[-1] not in names}


def test_the_example_prints_what_the_page_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(BLOCKS["python"], {})
    assert printed.getvalue() == BLOCKS["text"]


@pytest.mark.parametrize("title", SCENARIOS)
def test_the_calls_of_a_step_are_those_that_it_names(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()
    for scenario in SCENARIOS[title]:
        engine = Engine(monkeypatch)
        scenario(engine)
        called |= engine.called
    told_elsewhere = PLUMBING if title == "Arrival" else PLUMBING | ROOM
    assert ignoring(called, told_elsewhere) == ignoring(named(SECTIONS[title]), told_elsewhere)


def test_every_step_has_its_scenario() -> None:
    assert list(SECTIONS) == list(SCENARIOS)


def test_every_function_is_on_the_page() -> None:
    functions = {name for name in serving.__all__ if name[0].islower()}
    assert set(re.findall(r"`serving\.(\w+)", PAGE)) == functions


def test_every_name_on_the_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    for part, call in re.findall(r"`(cache|rows|allocator|request)\.([\w.]+)", PAGE):
        owner: Any = {**engine.parts(), "request": ServingRequest([1])}[part]
        for each in call.split("."):
            owner = getattr(owner, each)


def test_the_table_has_every_op() -> None:
    assert re.findall(r"^\| `(\w+)` \| `(?:serving|cache)\.", PAGE, re.MULTILINE) == [
        *REQUEST_OP_KINDS,
        "group_begin",
        "group_end",
    ]

"""Shared by the model tests: a bookkeeper that answers every op as a right allocator may.

The bookkeeper hands out the lowest free pages and reads what is free from the model that it feeds,
so that a test says which ops were made before, and changes the one answer that it is about.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.models import (
    Contract,
    Done,
    Geometry,
    Lent,
    Model,
    Outcome,
    Raised,
    Refused,
    Served,
    ServingModel,
    ops,
    request_ops,
)
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.models.prefix_tree import TreePage
from kvcore.models.serving_rules import Demand, demand, lacks


@dataclass(frozen=True)
class Gain:
    """What a row gains: ``tokens``, of which ``tail`` have a peer, the last ones but for
    ``beyond``; with ``anew`` all of them are in new pages."""

    seq: int
    tokens: int
    tail: int
    beyond: int = 0
    on_device: bool = False
    anew: bool = False


class Bookkeeper:
    """A model, and a right answer for each op."""

    def __init__(self, geometry: Geometry, contract: Contract | None = None) -> None:
        self.model = Model(geometry, contract)

    def do(self, *program: Op) -> Any:
        """Make ops that must be allowed, and give the model right answers; returns the last."""
        outcome: Outcome | None = None
        for op in program:
            assert self.model.why_not(op) is None, f"{op}: {self.model.why_not(op)}"
            outcome = self.answer(op)
            self.model.accept(op, outcome)
        return outcome

    def answer(self, op: Op) -> Outcome:
        """What a right allocator with sorted free lists answers."""
        if isinstance(op, ops.Hostile):
            return Raised(min(HOSTILE_CALLS[op.call].errors), "as documented")
        if isinstance(op, ops.LoadBackSwa):
            return self._load_back_swa(op)
        if isinstance(op, ops.DeviceBuffer):
            return self._device_buffer(op)
        gains = self._gains(op)
        return self._lend(gains) if gains else Done()

    def snapshot(self) -> dict[str, Any]:
        """Everything that the model remembers of what happened, for comparing."""
        left_out = ("contract", "_allowed")
        kept = {name: part for name, part in vars(self.model).items() if name not in left_out}
        return deepcopy(kept)

    def pages(self, seq: int) -> list[Any]:
        """The pages of a row, none if there is no such row."""
        return self.model.rows[seq].pages if seq in self.model.rows else []

    def full_pages(self, seq: int) -> list[int]:
        return [page.full for page in self.pages(seq)]

    def swa_pages(self, seq: int) -> list[int]:
        return [page.swa for page in self.pages(seq)]

    def device_pages(self, seq: int) -> list[int]:
        return [page.device for page in self.pages(seq)]

    def _gains(self, op: Op) -> list[Gain]:
        size = self.model.geometry.page_size
        match op:
            case ops.Alloc():
                return [Gain(op.seq, op.pages * size, op.pages * size, on_device=True)]
            case ops.LoadBack():
                return [Gain(op.seq, op.pages * size, op.swa_pages * size)]
            case ops.Extend():
                return [Gain(seq, tokens, tokens, on_device=True) for seq, tokens in op.parts]
            case ops.ExtendLogical():
                return [Gain(seq, tokens, tokens) for seq, tokens in op.parts]
            case ops.Decode():
                return [Gain(seq, 1, 1) for seq in op.seqs]
            case ops.SwaTail():
                return [Gain(op.seq, op.tokens, op.tail, op.beyond)]
            case ops.Restore():
                backup, geometry = self.model.backups[op.backup], self.model.geometry
                tail = backup.tokens if op.tail is None else op.tail
                if geometry.requests:
                    tail = backup.tokens - backup.evicted
                alone = geometry.requests and geometry.pure_swa
                return [Gain(op.seq, tail if alone else backup.tokens, tail)]
            case ops.Relocate():
                tokens = self.model.rows[op.seq].tokens
                return [Gain(op.seq, tokens, tokens, anew=True)]
        return []

    def _lend(self, gains: list[Gain]) -> Outcome:
        """Lowest free pages and request rows first; nothing at all if a side lacks room."""
        model, geometry = self.model, self.model.geometry
        free = {
            side: sorted(getattr(model, side).free)
            for side in ("full", "swa", "device", "requests")
        }
        got: dict[str, list[int]] = {"slots": [], "peers": [], "device": [], "requests": []}
        try:
            for gain in gains:
                if geometry.requests and gain.seq not in model.rows:
                    got["requests"].append(free["requests"].pop(0))
                self._grow(gain, free, got)
        except IndexError:
            return Refused()
        return Lent(
            tuple(got["slots"]),
            tuple(got["peers"]) if geometry.hybrid else (),
            tuple(got["device"]) if geometry.sparse else (),
            tuple(got["requests"]),
        )

    def _grow(self, gain: Gain, free: dict[str, list[int]], got: dict[str, list[int]]) -> None:
        geometry = self.model.geometry
        size, each, entries = geometry.page_size, geometry.compress, geometry.device_page_size
        pages = [] if gain.anew else self.pages(gain.seq)
        full, swa, device = (
            (pages[-1].full, pages[-1].swa, pages[-1].device) if pages else (0, 0, 0)
        )
        before = sum(page.tokens for page in pages)
        for index in range(gain.tokens):
            offset = (before + index) % size
            last = gain.tokens - gain.beyond
            mapped = geometry.hybrid and last - gain.tail <= index < last
            if offset == 0:
                full, swa, device = free["full"].pop(0), 0, 0
                swa = free["swa"].pop(0) if mapped else 0
            has_entry = geometry.sparse and gain.on_device and (offset + 1) % each == 0
            if has_entry and device == 0:
                device = free["device"].pop(0)
            got["slots"].append(full * size + offset)
            got["peers"].append(swa * size + offset if mapped else 0)
            got["device"].append(device * entries + offset // each if has_entry else 0)

    def _device_buffer(self, op: ops.DeviceBuffer) -> Outcome:
        """The row's own device pages first, then the lowest free ones."""
        size = self.model.geometry.device_page_size
        own = [device for device in self.device_pages(op.seq) if device]
        free = sorted(self.model.device.free)
        if op.pages > len(own) + len(free):
            return Refused()
        got = (own + free)[: op.pages]
        return Lent(tuple(page * size + entry for page in got for entry in range(size)))

    def _load_back_swa(self, op: ops.LoadBackSwa) -> Outcome:
        size = self.model.geometry.page_size
        pages = self.model.rows[op.seq].span(op.start, op.stop)
        free = sorted(self.model.swa.free)
        if len(free) < len(pages):
            return Refused()
        pairs = list(zip(pages, free, strict=False))
        return Lent(
            tuple(page.full * size + offset for page, _ in pairs for offset in range(size)),
            tuple(swa * size + offset for _, swa in pairs for offset in range(size)),
        )


class Evictor:
    """Evicts pages that a cache may evict, any of those that were used longest ago, until enough is
    free. ``path``: what the op locks before."""

    def __init__(self, model: ServingModel, rng: random.Random, path: Sequence[TreePage]) -> None:
        self.gone: list[TreePage] = []
        self.stripped: list[TreePage] = []
        self._model, self._rng = model, rng
        self._held, self._window = list(path), list(model.tree.window(path))

    def run(self, full: int, swa: int) -> None:
        """Evict so many pages of each side."""
        while len(self.gone) < full:
            self._drop(self._next(self._may_go))
        while len(self.peers()) < swa:
            node = self._next(self._may_lose_its_peer)
            if self._may_go(node):
                self._drop(node)
            else:
                self.stripped.append(node)

    def _next(self, able: Callable[[TreePage], bool]) -> TreePage:
        nodes = [node for node in self._nodes() if able(node)]
        oldest = min(node.used for node in nodes)
        return self._rng.choice([node for node in nodes if node.used == oldest])

    def peers(self) -> list[int]:
        """SWA pages that are free by it."""
        gone = [node for node in self.gone if node.state == "live" and node not in self.stripped]
        return [node.page.swa for node in gone + self.stripped]

    def prune(self, node: TreePage | None, locks: int = 0) -> None:
        """Bare tombstones without anything below them go, from the node up."""
        while node is not None and self._is_bare(node) and self._may_go(node, locks):
            self.gone.append(node)
            node = node.parent

    def _drop(self, node: TreePage) -> None:
        self.gone.append(node)
        self.prune(node.parent)

    def _nodes(self) -> list[TreePage]:
        return sorted(self._model.tree.pages.values(), key=lambda node: node.page.full)

    def _is_bare(self, node: TreePage) -> bool:
        bare = node.state == "tombstone" or node in self.stripped
        return bare and node is not self._model.tree.root

    def _may_go(self, node: TreePage, locks: int = 0) -> bool:
        free = node.full_locks == locks and node not in self._held and node not in self.gone
        return free and all(below in self.gone for below in node.children.values())

    def _may_lose_its_peer(self, node: TreePage) -> bool:
        free = node.swa_evictable and node not in self._window
        return free and node not in self.gone and node not in self.stripped


class Server:
    """A request-level model, and a right answer for each op: which free page is lent and which
    evictable one is evicted is drawn from ``seed``, without one the lowest free ones are lent."""

    def __init__(
        self, geometry: Geometry, contract: Contract | None = None, *, seed: int | None = None
    ) -> None:
        self.model = ServingModel(geometry, contract)
        self._rng = random.Random(seed or 0)
        self._lowest = seed is None

    def do(self, *program: Op) -> Any:
        """Make ops that must be allowed, and give the model right answers; returns the last."""
        outcome: Outcome | None = None
        for op in program:
            assert self.model.why_not(op) is None, f"{op}: {self.model.why_not(op)}"
            outcome = self.answer(op)
            self.model.accept(op, outcome)
        return outcome

    def snapshot(self) -> dict[str, Any]:
        """Everything that the model remembers, for comparing: objects by their contents."""
        model = self.model
        tree = sorted(
            (node.page.full, node.key, node.state, node.full_locks, node.swa_locks, node.page.swa)
            for node in model.tree.pages.values()
        )
        sizes = model.tree.full_evictable, model.tree.swa_evictable, model.tree.live
        sides = deepcopy((model.full, model.swa, model.requests, model.rows, model.detached))
        live = {
            name: (it.kv_len, it.allocated, it.prefix, it.cursor) for name, it in model.live.items()
        }
        names = [*model.waiting], [*model.copies], [*model.loads], model.group_open
        return {"tree": (tree, sizes), "sides": sides, "live": live, "names": names}

    def answer(self, op: Op) -> Outcome:
        """What a right server answers."""
        if isinstance(op, ops.GroupBegin | ops.GroupEnd):
            return Done()
        need, model = demand(self.model, op), self.model
        if lacks(model, need):
            return Refused()
        evictor = Evictor(model, self._rng, need.path)
        if isinstance(op, request_ops.Evict):
            pages = model.geometry.pages_for
            full = min(pages(op.full_tokens), model.tree.full_evictable)
            evictor.run(full, min(pages(op.swa_tokens), model.tree.swa_evictable))
        elif isinstance(op, request_ops.EndLoad) and op.failed:
            load = model.loads[op.load]
            evictor.stripped = list(load.loading)
            evictor.prune(load.path[-1] if load.path else None, locks=1)
        else:
            evictor.run(need.full - len(model.full.free), need.swa - len(model.swa.free))
        answer = self._answer(op, need, evictor)
        answer["evicted"] = [node.page.full for node in evictor.gone]
        answer["tombstoned"] = [node.page.full for node in evictor.stripped]
        return Served(**{name: _frozen(part) for name, part in answer.items()})

    def _answer(self, op: Op, need: Demand, evictor: Evictor) -> dict[str, Any]:
        """The parts of an answer but for what was evicted."""
        model, size = self.model, self.model.geometry.page_size
        free = {
            "full": self._drawn(model.full.free, [node.page.full for node in evictor.gone]),
            "swa": self._drawn(model.swa.free, evictor.peers()),
        }
        match op:
            case request_ops.Admit() | request_ops.ResumeRequest():
                start = len(need.path) * size
                pages = [
                    (node.page.full, 0 if node in evictor.stripped else node.page.swa)
                    for node in need.path
                ]
                stamps = [node.page.full_stamps for node in need.path]
                row = {"request": self._drawn(model.requests.free, [])[0]}
                lent = self._lend([], start, need.stop, max(start, need.cursor), free)
                return {**row, **lent, **self._prefix(pages, stamps)}
            case request_ops.Prefill():
                running = model.live[op.req]
                tokens = min(op.tokens, running.prompt_len - running.kv_len)
                return self._extend((op.req,), tokens, free)
            case request_ops.Speculate():
                return self._extend((op.req,), op.tokens, free)
            case request_ops.DecodeStep():
                return self._extend(op.reqs, 1, free)
            case request_ops.LoadPrefix():
                load = model.missing(op)
                back = [free["swa"].pop(0) for _ in load.loading]
                start = len(load.path) * size
                lent = self._lend([], start, load.copy.tokens, load.copy.swa_from, free)
                return {**lent, "reloaded": self._slots(back), "matched": start}
            case request_ops.CacheUnfinished():
                cached = [node.page for node in model.live[op.req].path]
                handovers = model.computed(op.req)
                if not model.waits_for_load(handovers):
                    cached += [one.cached for one in handovers]
                pages = [(page.full, page.swa) for page in cached]
                return self._prefix(pages, [page.full_stamps for page in cached])
            case request_ops.SavePrefix():
                return {"matched": len(model.match(model.keys(op.text))) * size}
            case _:
                return {}

    def _extend(
        self, names: tuple[int, ...], tokens: int, free: dict[str, list[int]]
    ) -> dict[str, Any]:
        slots: list[int] = []
        peers: list[int] = []
        for name in names:
            start = self.model.live[name].kv_len
            lent = self._lend(self.model.rows[name].pages, start, start + tokens, 0, free)
            slots += lent["slots"]
            peers += lent["peers"]
        return {"slots": slots, "peers": peers}

    def _lend(
        self, pages: list[Any], start: int, stop: int, mapped_from: int, free: dict[str, list[int]]
    ) -> dict[str, Any]:
        size = self.model.geometry.page_size
        full, swa = (pages[-1].full, pages[-1].swa) if start % size else (0, 0)
        slots: list[int] = []
        peers: list[int] = []
        for at in range(start, stop):
            if at % size == 0:
                full = free["full"].pop(0)
                swa = free["swa"].pop(0) if at >= mapped_from else 0
            slots.append(full * size + at % size)
            peers.append(swa * size + at % size if swa else 0)
        return {"slots": slots, "peers": peers}

    def _prefix(self, pages: list[tuple[int, int]], stamps: list[list[int]]) -> dict[str, Any]:
        size = self.model.geometry.page_size
        seen = [stamp for page in stamps for stamp in page]
        peers = self._slots([swa for _, swa in pages])
        return {
            "matched": len(pages) * size,
            "prefix_slots": self._slots([full for full, _ in pages]),
            "prefix_peers": peers,
            "prefix_stamps": (seen, [stamp if peers[i] else 0 for i, stamp in enumerate(seen)]),
        }

    def _slots(self, pages: list[int]) -> list[int]:
        """The slots of whole pages; page 0 is no page."""
        size = self.model.geometry.page_size
        return [page * size + at if page else 0 for page in pages for at in range(size)]

    def _drawn(self, free: set[int], more: list[int]) -> list[int]:
        pages = sorted({*free, *more})
        return pages if self._lowest else self._rng.sample(pages, len(pages))


def _frozen(part: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(_frozen, part)) if isinstance(part, list | tuple) else part


Keep = Callable[..., Bookkeeper]


@pytest.fixture
def keep() -> Keep:
    """Makes a bookkeeper; a geometry or its keywords, and ``contract`` for the callers' side."""

    def make(
        page_size: int | Geometry = 4,
        full_pages: int = 8,
        swa_pages: int = 8,
        *,
        contract: Contract | None = None,
        **more: Any,
    ) -> Bookkeeper:
        if isinstance(page_size, Geometry):
            return Bookkeeper(page_size, contract)
        return Bookkeeper(Geometry(page_size, full_pages, swa_pages, **more), contract)

    return make


@pytest.fixture
def partition() -> Callable[[Bookkeeper], None]:
    """Laws L1 and L3 on the model itself: every page and every request row in exactly one place."""

    def check(books: Bookkeeper) -> None:
        model = books.model
        pages = [page for _, page in model.lent_pages()]
        buffers = [page for lent in model.buffers.values() for page in lent]
        requests = [row.request for row in model.rows.values() if row.request]
        lent = {
            "full": [page.full for page in pages],
            "swa": [page.swa for page in pages if page.swa],
            "device": [page.device for page in pages if page.device] + buffers,
            "requests": requests,
        }
        for name, held in lent.items():
            side = getattr(model, name)
            everywhere = [*side.free, *side.pending, *held]
            assert sorted(everywhere) == list(range(1, side.total + 1)), name
            assert model.group_open or not side.pending, name

    return check


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Serve:
    """Makes a server: a geometry or its keywords, ``contract`` for the callers' side, ``seed`` for
    other choices than the lowest free pages. By default a window is a page and a half."""

    def make(
        geometry: Geometry | None = None,
        *,
        contract: Contract | None = None,
        seed: int | None = None,
        **more: Any,
    ) -> Server:
        sizes = {"page_size": 4, "full_pages": 12, "swa_pages": 12, "requests": 4, "window": 6}
        return Server(geometry or Geometry(**{**sizes, **more}), contract, seed=seed)

    return make

"""Shared by the model tests: a bookkeeper that answers every op as a right allocator may.

The bookkeeper hands out the lowest free pages and reads what is free from the model that it feeds,
so that a test says which ops were made before, and changes the one answer that it is about.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.models import Contract, Done, Geometry, Lent, Model, Outcome, Raised, Refused, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op


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
        """Everything that the model remembers, for comparing."""
        kept = {name: part for name, part in vars(self.model).items() if name != "contract"}
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

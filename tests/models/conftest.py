"""Shared by the model tests: a bookkeeper that answers every op as a right allocator may.

The bookkeeper hands out the lowest free pages and reads what is free from the model that it feeds,
so that a test says which ops were made before, and changes the one answer that it is about.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Contract, Done, Geometry, Lent, Model, Outcome, Raised, Refused, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op


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
        parts = self._parts(op)
        return self._lend(parts) if parts else Done()

    def snapshot(self) -> str:
        """Everything that the model remembers, for comparing."""
        model = self.model
        return repr(
            (
                model.rows,
                model.backups,
                model.full,
                model.swa,
                sorted(model.used),
                model.last_name,
                sorted(model.used_backups),
                model.ghosts,
                model.group_open,
                model.detached,
                model.stamps,
            )
        )

    def pages(self, seq: int) -> list[Any]:
        """The pages of a row, none if there is no such row."""
        return self.model.rows[seq].pages if seq in self.model.rows else []

    def full_pages(self, seq: int) -> list[int]:
        return [page.full for page in self.pages(seq)]

    def swa_pages(self, seq: int) -> list[int]:
        return [page.swa for page in self.pages(seq)]

    def _parts(self, op: Op) -> list[tuple[int, int, int]]:
        size = self.model.geometry.page_size
        match op:
            case ops.Alloc():
                return [(op.seq, op.pages * size, op.pages * size)]
            case ops.LoadBack():
                return [(op.seq, op.pages * size, op.swa_pages * size)]
            case ops.Extend():
                return [(seq, tokens, tokens) for seq, tokens in op.parts]
            case ops.Decode():
                return [(seq, 1, 1) for seq in op.seqs]
            case ops.SwaTail():
                return [(op.seq, op.tokens, op.tail)]
            case ops.Restore():
                tokens = len(self.model.backups[op.backup].full_stamps)
                return [(op.seq, tokens, tokens if op.tail is None else op.tail)]
        return []

    def _lend(self, parts: list[tuple[int, int, int]]) -> Outcome:
        size, hybrid = self.model.geometry.page_size, self.model.geometry.hybrid
        full_free, swa_free = sorted(self.model.full.free), sorted(self.model.swa.free)
        slots: list[int] = []
        peers: list[int] = []
        for seq, count, tail in parts:
            row = self.model.rows.get(seq)
            full, swa = (row.pages[-1].full, row.pages[-1].swa) if row else (0, 0)
            before = row.tokens if row else 0
            for index in range(count):
                offset = (before + index) % size
                mapped = hybrid and index >= count - tail
                if offset == 0:
                    if not full_free or (mapped and not swa_free):
                        return Refused()
                    full = full_free.pop(0)
                    swa = swa_free.pop(0) if mapped else 0
                slots.append(full * size + offset)
                peers.append(swa * size + offset if mapped else 0)
        return Lent(tuple(slots), tuple(peers) if hybrid else ())

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
    """Makes a bookkeeper; keywords of a geometry, and ``contract`` for the callers' side."""

    def make(
        page_size: int = 4,
        full_pages: int = 8,
        swa_pages: int = 8,
        *,
        contract: Contract | None = None,
    ) -> Bookkeeper:
        return Bookkeeper(Geometry(page_size, full_pages, swa_pages), contract)

    return make

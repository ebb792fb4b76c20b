"""Single operations: ours and those of released engines, one call at a time.

Each case says what is made before the call and what is undone after it, both outside the clock.
Where a call of ours puts work off, a case of its own times it together with the question that makes
it due. Leaves out free groups (`kvcore.benchmarks.groups`) and other pool sizes
(`kvcore.benchmarks.growth`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvcore.benchmarks.contest import Call, Contestant, hold_contest
from kvcore.benchmarks.engines import Engine, Slots, engines_by_numpy, our_engine
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Section

POOLS = {1: 4_096, 256: 65_536}
"""Slots of each pool, by page size."""

SLOTS = {1: 16, 256: 256}
"""Slots of one call, by page size."""

DECODED_ROWS = 8

PAGE_KERNELS = (
    "The releases' page kernels do not run on a CPU: their alloc_extend and alloc_decode launch "
    "stand-ins of a few microseconds. What is compared there is everything around these kernels."
)

BOTH_SIDES = (
    "The releases' alloc is for page size 1. At page size 256 theirs is alloc of both sides and "
    "the write of the mapping, as for a load-back; no page kernel is in it."
)

Maker = Callable[[Engine], Contestant]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation at one page size."""

    page_size: int
    name: str
    label: str
    contestant: Maker


def nothing(answer: object) -> None:
    """There is nothing to undo."""


def alloc(engine: Engine) -> Contestant:
    """A new row."""
    ask = engine.alloc(SLOTS[engine.page_size])
    return Contestant(engine.name, lambda: ask, engine.free)


def alloc_pages(engine: Engine) -> Contestant:
    """A page that belongs to no row yet."""
    ask = partial(engine.alloc_pages, SLOTS[engine.page_size])
    return Contestant(engine.name, lambda: ask, engine.free)


def free(engine: Engine) -> Contestant:
    """A whole row, peers and all."""
    ask = engine.alloc(SLOTS[engine.page_size])
    return Contestant(engine.name, lambda: partial(engine.free, ask()), nothing)


def free_swa(engine: Engine) -> Contestant:
    """The peers of a row."""
    return _free_swa(engine, engine.free_swa)


def free_swa_settled(engine: Engine) -> Contestant:
    """The same, and the capacity is asked for: by then every peer must have been counted."""

    def settled(slots: Slots) -> None:
        engine.free_swa(slots)
        engine.allocator.available_size()

    return _free_swa(engine, settled)


def _free_swa(engine: Engine, timed: Callable[[Slots], None]) -> Contestant:
    ask = engine.alloc(SLOTS[engine.page_size])
    row: list[Slots] = []

    def prepare() -> Call:
        row.append(ask())
        return partial(timed, row[0])

    def restore(answer: object) -> None:
        engine.free_full(row.pop())

    return Contestant(engine.name, prepare, restore)


def cycle(engine: Engine) -> Contestant:
    """A row is lent and given back, and the capacity is asked for: nothing is put off."""
    ask = engine.alloc(SLOTS[engine.page_size])

    def call() -> Any:
        engine.free(ask())
        return engine.allocator.available_size()

    return Contestant(engine.name, lambda: call, nothing)


def _rows(engine: Engine) -> list[Slots]:
    ask = engine.alloc(engine.page_size)
    return [ask() for _ in range(DECODED_ROWS)]


def decode(engine: Engine) -> Contestant:
    """A token for each of a few rows, all within their last page."""
    length = engine.page_size // 2
    last = torch.stack([row[length - 1] for row in _rows(engine)])
    ask = engine.decode(length, last)
    return Contestant(engine.name, lambda: ask, nothing)


def decode_new_page(engine: Engine) -> Contestant:
    """A token for each of a few rows, all of which open a page."""
    last = torch.stack([row[-1] for row in _rows(engine)])
    ask = engine.decode(engine.page_size, last)
    return Contestant(engine.name, lambda: ask, engine.free_set)


CASES = (
    Case(1, "alloc_16", "alloc of 16 slots", alloc),
    Case(1, "free_16", "free of 16 slots", free),
    Case(1, "free_swa_16", "free_swa of 16 slots", free_swa),
    Case(1, "free_swa_settled_16", "free_swa of 16 slots, then available_size", free_swa_settled),
    Case(1, "cycle_16", "alloc, free of 16 slots, available_size", cycle),
    Case(256, "alloc_1", "alloc of a page", alloc_pages),
    Case(256, "extend_1", "alloc_extend by a page", alloc),
    Case(256, "free_1", "free_segment of a page", free),
    Case(256, "free_swa_1", "free_swa_segment of a page", free_swa),
    Case(256, "free_swa_settled_1", "free_swa_segment, then available_size", free_swa_settled),
    Case(256, "cycle_1", "alloc_extend, free_segment, available_size", cycle),
    Case(256, "decode", f"alloc_decode of {DECODED_ROWS} rows, no new page", decode),
    Case(256, "decode_new", f"alloc_decode of {DECODED_ROWS} rows, all new pages", decode_new_page),
)


def run(plan: BenchPlan) -> Section:
    """Time every case."""
    section = Section("operations", "Single operations")
    for case in CASES:
        size = POOLS[case.page_size]
        engines = [our_engine(case.page_size, size), *engines_by_numpy(case.page_size, size)]
        engines += [rival.engine(case.page_size, size) for rival in plan.rivals]
        section.contests.append(
            hold_contest(
                f"operations.page{case.page_size}.{case.name}",
                f"page size {case.page_size}: {case.label}",
                [case.contestant(engine) for engine in engines],
                plan.sampling,
            )
        )
    if plan.rivals:
        section.notes.extend((PAGE_KERNELS, BOTH_SIDES))
    section.notes.extend(
        f"{rival.name} has no segment frees: its free and free_swa are timed instead."
        for rival in plan.rivals
        if not rival.frees_segments
    )
    return section

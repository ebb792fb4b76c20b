"""What the capture barrier costs where there is nothing to capture.

Before every mapping write an open group looks up the peers of what was freed in it, so that a
recovery cannot put others in their place (sglang#36081). In the steady state a group lends first
and frees then, as a step of an engine does, and the barrier before the allocation finds nothing to
do. The same code without it captures at the end of a group only, and so is wrong where a group has
a recovery. Leaves out what a capture costs: that is the recovery in `kvcore.benchmarks.groups`.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from kvcore import SWATokenToKVPoolAllocator
from kvcore.benchmarks.contest import Call, Contestant, hold_contest
from kvcore.benchmarks.engines import Engine, our_engine
from kvcore.benchmarks.operations import POOLS, SLOTS, nothing
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Contest, Section

ROWS = 8
"""Rows freed in a group. One is lent at its beginning, and the others after it."""

PAIRS, TIMES = 10, 3
"""Contests, and how many times as many samples as elsewhere they share: the difference is small."""

WITHOUT, WITH = "without barrier", "with barrier"

CAPTURE = SWATokenToKVPoolAllocator._capture_queued_peers


class SwitchedAllocator(SWATokenToKVPoolAllocator):
    """Has a barrier that can be switched off. Both contestants are of this one class: Python makes
    code faster for the class that it meets, so another class would be slower for that alone."""

    barrier: bool

    def free_group_end(self) -> None:
        """Make everything freed in the group available."""
        barrier, self.barrier = self.barrier, True
        try:
            super().free_group_end()
        finally:
            self.barrier = barrier

    def _capture_queued_peers(self) -> None:
        if self.barrier:
            CAPTURE(self)


def switched(page_size: int, size: int, *, barrier: bool) -> Engine:
    """An allocator with the barrier, or without."""

    def switch(allocator: Any) -> None:
        allocator.barrier = barrier

    name = WITH if barrier else WITHOUT
    return our_engine(page_size, size, kind=SwitchedAllocator, name=name, ready=switch)


def steady(engine: Engine) -> Contestant:
    """A group lends a row and frees a few, and as many as are missing are lent after it."""
    ask = engine.alloc(SLOTS[engine.page_size])
    rows = [ask() for _ in range(ROWS)]

    def call() -> None:
        engine.begin()
        fresh = ask()
        for row in rows:
            engine.free(row)
        engine.end()
        rows[0] = fresh
        for place in range(1, ROWS):
            rows[place] = ask()

    def prepare() -> Call:
        return call

    return Contestant(engine.name, prepare, nothing)


def hold_contests(key: str, label: str, page_size: int, plan: BenchPlan) -> Contest:
    """The median ratio of several contests between allocators that are built in turn first and
    second: where in memory an allocator lies makes more of a difference than the barrier."""
    sampling = replace(plan.sampling, samples=max(1, TIMES * plan.sampling.samples // PAIRS))
    base, ratios = [], []
    for number in range(PAIRS):
        order = (False, True) if number % 2 else (True, False)
        engines = [switched(page_size, POOLS[page_size], barrier=barrier) for barrier in order]
        taken = hold_contest(key, label, [steady(one) for one in engines], sampling).medians
        base.append(taken[WITHOUT])
        ratios.append(taken[WITH] / taken[WITHOUT])
    without = median(base)
    return Contest(key, label, {WITHOUT: without, WITH: without * median(ratios)})


def run(plan: BenchPlan) -> Section:
    """Time the steady state with the barrier and without."""
    section = Section("capture", "The capture barrier in the steady state")
    for page_size, what in ((1, "16 slots"), (256, "a page")):
        label = (
            f"page size {page_size}: an alloc and {ROWS} frees of {what} in a group, then allocs"
        )
        key = f"capture.page{page_size}"
        section.contests.append(hold_contests(key, label, page_size, plan))
    return section

"""What noise looks like, and what nothing can be faster than: measured before everything else.

The control is an A/A test: one allocator against another of the same class, under two names. Its
ratio would be 1 on a machine without noise. The floor is one operation of torch on nothing.
"""

from __future__ import annotations

from functools import partial

import torch

from kvcore.benchmarks import groups, operations
from kvcore.benchmarks.contest import Contestant, hold_contest
from kvcore.benchmarks.engines import OURS, our_engine
from kvcore.benchmarks.groups import Shape
from kvcore.benchmarks.operations import POOLS, nothing
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Section

AGAIN = "kvcore again"

QUIET = 0.05
"""A control further from 1 than this says that the ratios of this run are worth little."""

GROUP = Shape(1, 64, 16)


def floor() -> Contestant:
    """An operation of torch on nothing: what a dispatch costs."""
    empty = torch.empty(0, dtype=torch.int64)
    return Contestant("floor", lambda: partial(empty.zero_), nothing)


def run(plan: BenchPlan) -> Section:
    """Time the control and the floor."""
    engines = [our_engine(1, POOLS[1], name=name) for name in (OURS, AGAIN)]
    free = [operations.free(engine) for engine in engines]
    group = [groups.contestant(engine, GROUP) for engine in engines]
    contests = [
        hold_contest("control.free_16", "free of 16 slots", free, plan.sampling),
        hold_contest("control.64x16", "a group of 64 x 16 slots", group, plan.sampling),
        hold_contest("control.floor", "an empty dispatch", [floor()], plan.sampling),
    ]
    return Section("control", "Control: the same allocator under two names", contests)

"""Interleaved timing: the same work done by several contestants in turn, call by call.

Whatever slows the machine down for a moment meets all contestants alike, and the order of each
round is shuffled, so that none always runs in the caches that another left behind. State is made
before each call and mended after it, outside the clock. The clock is the thread's CPU time, which
stands still while another process has the CPU; what reading it costs is measured and taken off.
Leaves out what is compared.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from statistics import fmean, median
from time import thread_time_ns
from typing import Any

from kvcore.benchmarks.results import Contest

Call = Callable[[], Any]
"""What is timed."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """``prepare`` makes the state that a call needs and returns the call; ``restore`` gets what the
    call answered, and leaves everything as it was before ``prepare``."""

    name: str
    prepare: Callable[[], Call]
    restore: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How often each contestant is called: first to warm up, then under the clock."""

    warmups: int = 50
    samples: int = 500
    seed: int = 0


@contextmanager
def no_collector() -> Iterator[None]:
    """Keeps the garbage collector from running in the middle of a sample."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


CLOCK_READINGS = 1001


def clock_cost() -> int:
    """Nanoseconds between two readings of the clock with nothing between them."""
    gaps = []
    for _ in range(CLOCK_READINGS):
        start = thread_time_ns()
        gaps.append(thread_time_ns() - start)
    return int(median(gaps))


def orders(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """The order of the contestants in each round, shuffled; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(rounds):
        order = list(names)
        rng.shuffle(order)
        yield order


def time_rounds(contestants: Sequence[Contestant], sampling: Sampling) -> Mapping[str, list[int]]:
    """Nanoseconds of every sample of every contestant, at least 1. Raises ValueError if two share a
    name."""
    by_name = {one.name: one for one in contestants}
    if len(by_name) < len(contestants):
        raise ValueError(f"two contestants share a name: {[one.name for one in contestants]}")
    times: dict[str, list[int]] = {name: [] for name in by_name}
    rounds = sampling.warmups + sampling.samples
    with no_collector():
        cost = clock_cost()
        for number, order in enumerate(orders(list(by_name), rounds, sampling.seed)):
            for name in order:
                one = by_name[name]
                call = one.prepare()
                start = thread_time_ns()
                answer = call()
                stop = thread_time_ns()
                one.restore(answer)
                if number >= sampling.warmups:
                    times[name].append(max(1, stop - start - cost))
    return times


def hold_contest(
    key: str, label: str, contestants: Sequence[Contestant], sampling: Sampling
) -> Contest:
    """Time the contestants in turn; the first one is whom the others are compared with."""
    times = time_rounds(contestants, sampling)
    return Contest(key, label, {name: median(taken) / 1000 for name, taken in times.items()})


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power of the size with which the cost grows: the slope of the least-squares line through
    the logarithms. 0: not at all; 1: in proportion. Raises ValueError for fewer than two sizes."""
    if len(set(sizes)) < 2:
        raise ValueError(f"a line needs two sizes, got {sorted(set(sizes))}")
    xs, ys = [log(size) for size in sizes], [log(cost) for cost in costs]
    x, y = fmean(xs), fmean(ys)
    covariance = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return covariance / sum((a - x) ** 2 for a in xs)

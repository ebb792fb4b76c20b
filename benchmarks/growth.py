"""Whether an operation costs more on a larger pool: in time, and in bytes written.

Time is measured with one pool alive at a time, since a neighbour that copies megabytes evicts what
the measured one has in its caches. The pools are visited several times, in shuffled order, and the
least disturbed visit of each counts, so that a slow moment does not look like a slow size. Bytes
are counted, not timed, and so are exact. Leaves out the time of released engines: their bytes say
it all, and the largest pools would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from kvcore.benchmarks import operations
from kvcore.benchmarks.contest import exponent, orders, time_rounds
from kvcore.benchmarks.control import floor
from kvcore.benchmarks.counter import DEVICE, count
from kvcore.benchmarks.engines import OURS, Engine, Slots, our_engine
from kvcore.benchmarks.operations import CASES, SLOTS, Case
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Grid, Metric, Section, as_key

Maker = Callable[[int, int], Engine]
"""Makes an engine of a page size and so many slots."""

VISITS = 9
"""How often each pool is visited; the samples are shared out among the visits."""

TURN_POOL = 10_000
TURNS = 2
"""The pool whose slots all go through a cycle of alloc and free, and how often."""


def cases() -> list[Case]:
    """The single operations; what is put together of several is left out."""
    together = (operations.cycle, operations.free_swa_settled)
    return [case for case in CASES if case.contestant not in together]


def medians(page_sizes: Sequence[int], plan: BenchPlan) -> dict[str, list[float]]:
    """Of each operation, and of the floor, the microseconds at each pool size: the median of a
    visit, and of these the least, since whatever disturbs one makes it longer."""
    times: dict[tuple[str, int], list[float]] = {}
    sampling = replace(plan.sampling, samples=max(1, plan.sampling.samples // VISITS))
    pools = {str(size): size for size in plan.sizes.pools}
    for order in orders(list(pools), VISITS, plan.seed):
        for name in order:
            for page_size in page_sizes:
                engine = our_engine(page_size, pools[name])
                for case in cases():
                    if case.page_size == page_size:
                        one = time_rounds([case.contestant(engine)], sampling)[engine.name]
                        times.setdefault((_name(case), pools[name]), []).append(median(one))
            one = time_rounds([floor()], sampling)["floor"]
            times.setdefault(("floor", pools[name]), []).append(median(one))
    answer: dict[str, list[float]] = {}
    for size in plan.sizes.pools:
        for name in dict.fromkeys(name for name, _ in times):
            answer.setdefault(name, []).append(min(times[name, size]) / 1000)
    return answer


def _name(case: Case) -> str:
    return f"page{case.page_size}.{case.name}"


def time_grid(plan: BenchPlan) -> Grid:
    """The exponent of each operation's time in the size of the pool."""
    labels = {_name(case): f"page size {case.page_size}: {case.label}" for case in cases()}
    sizes = plan.sizes.pools
    measured = medians((1, 256), plan)
    return Grid(
        f"Time against the size of the pool, {sizes[0]:,} to {sizes[-1]:,} slots",
        tuple(
            Metric(
                f"growth.{'floor' if name == 'floor' else 'time'}.{name}",
                labels.get(name, "an empty dispatch, for comparison"),
                "exponent",
                exponent(sizes, taken),
                "exponent",
            )
            for name, taken in measured.items()
        ),
    )


def bytes_of_a_free(engine: Engine) -> int:
    """Bytes that a free of one row writes; the engine lives on the device of counts."""
    row: list[Slots] = []
    count(lambda: row.append(engine.alloc(SLOTS[engine.page_size])()))
    return count(lambda: engine.free(row[0])).bytes_written


def bytes_grid(plan: BenchPlan) -> Grid:
    """Bytes that a free writes in the smallest and the largest pool."""
    return Grid(
        "Bytes that a free writes, counted",
        tuple(
            metric
            for page_size, label in ((1, "16 slots"), (256, "a page of 256"))
            for name, make in _makers(plan)
            for metric in _bytes_of(page_size, label, name, make, plan.sizes.pools)
        ),
    )


def _makers(plan: BenchPlan) -> Iterator[tuple[str, Maker]]:
    yield OURS, partial(our_engine, device=DEVICE)
    for rival in plan.rivals:
        yield rival.name, partial(rival.engine, device=DEVICE)


def _bytes_of(
    page_size: int,
    label: str,
    name: str,
    make: Maker,
    sizes: Sequence[int],
) -> Iterator[Metric]:
    written = [bytes_of_a_free(make(page_size, size)) for size in sizes]
    row = f"{label}: {name}"
    key = f"growth.bytes.page{page_size}.{as_key(name)}"
    yield Metric(f"{key}.least", row, f"{sizes[0]:,}", written[0], "bytes")
    yield Metric(f"{key}.most", row, f"{sizes[-1]:,}", written[-1], "bytes")
    yield Metric(f"{key}.spread", row, "most / least", max(written) / min(written), "times")
    yield Metric(f"{key}.exponent", row, "exponent", exponent(sizes, written), "exponent")


def turns(engine: Engine, size: int) -> tuple[float, float]:
    """Bytes and waits of a cycle of alloc and free, over whole turns of the engine's ``size``."""
    ask = engine.alloc(SLOTS[engine.page_size])
    cycles = TURNS * size // SLOTS[engine.page_size]
    counted = [count(lambda: engine.free(ask())) for _ in range(cycles)]
    written = sum(one.bytes_written for one in counted)
    return written / cycles, sum(one.synchronisations for one in counted) / cycles


def turns_grid() -> Grid:
    """What is put off: over whole turns of a pool everything was done that has to be done now and
    then."""
    metrics: list[Metric] = []
    for page_size, label in ((1, "16 slots"), (256, "a page of 256")):
        written, waits = turns(our_engine(page_size, TURN_POOL, device=DEVICE), TURN_POOL)
        key, row = f"growth.turn.page{page_size}", f"{label}: alloc and free"
        metrics.append(Metric(f"{key}.bytes", row, "bytes a cycle", written, "bytes"))
        metrics.append(Metric(f"{key}.waits", row, "waits a cycle", waits, "waits"))
    return Grid(f"Over {TURNS} turns of a pool of {TURN_POOL:,} slots", tuple(metrics))


def run(plan: BenchPlan) -> Section:
    """Fit the times, count the bytes."""
    section = Section("growth", "Growth with the pool")
    section.grids.append(time_grid(plan))
    # Under inference mode the dispatcher shows ops before they are taken apart.
    with torch.inference_mode(False), torch.no_grad():
        section.grids.extend((bytes_grid(plan), turns_grid()))
    return section

"""How the harness spends its time: each source against the least that it could take.

The walker against the bare target, which is given the same ops without model, laws and proposals,
and so the same walk without views and laws, than which no check could be cheaper; the rules of the
stateful machine against an empty one with as many, which is Hypothesis alone; the walker against
the machine; two workers against one. In one process, in turn, in CPU time; each round has another
seed. Leaves out how soon a source finds a fault (`kvcore faults`).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcore.benchmarks.contest import orders
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Grid, Metric, Section, as_key
from kvcore.invariants import Run, drive
from kvcore.models import Geometry, model_of
from kvcore.models.ops import Op
from kvcore.strategies.machine import CHOICES, machine_for, widest_contract
from kvcore.strategies.machine_rules import rules_for
from kvcore.strategies.profiles import search_settings
from kvcore.strategies.program import program_test
from kvcore.strategies.sources import MACHINE_STEPS, PERIOD, Burst, SourceName
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.strategies.workers import Job, WorkerPool, available_cpus
from kvcore.targets.protocol import TargetFactory
from kvcore.targets.registry import open_target

TARGET = "kvcore#unchecked"
"""What the sources drive: the build whose own checks cost nothing."""

GEOMETRIES = {1: Geometry(1, 16, 12), 4: Geometry(4, 16, 12)}
"""By page size."""

PROGRAM_OPS = 50


class Measured(NamedTuple):
    """CPU seconds, and checked steps done in them; and how much of both went into giving everything
    back at the end of programs, where that was measured."""

    seconds: float
    steps: int
    closing_seconds: float = 0.0
    closing_steps: int = 0


def walk_and_replay(
    geometry: Geometry, programs: int, seed: int, *, checked: bool = True
) -> tuple[float, float]:
    """CPU seconds of walks, and of their ops on the bare target; programs alternate. Without
    ``checked`` no view is taken and no law is asked: ops are proposed, applied and followed."""
    make, rng = open_target(TARGET), random.Random(seed)
    take = checked_walk if checked else unchecked_walk
    walked = bare = 0.0
    for _ in range(programs):
        start = time.process_time()
        program = take(make, geometry, Walker(rng, PROGRAM_OPS))
        walked += time.process_time() - start
        start = time.process_time()
        target = make(geometry)
        for op in program:
            target.apply(op)
        bare += time.process_time() - start
    return walked, bare


def checked_walk(make: TargetFactory, geometry: Geometry, walker: Walker) -> Sequence[Op]:
    """The ops of a walk, each of which was checked."""
    run = Run(make(geometry), period=PERIOD)
    while (op := walker.next_op(run.model)) is not None:
        run.step(op)
    return run.program


def unchecked_walk(make: TargetFactory, geometry: Geometry, walker: Walker) -> Sequence[Op]:
    """The same ops without a check."""
    target, program = make(geometry), list[Op]()
    model = model_of(geometry, target.contract)
    while (op := walker.next_op(model)) is not None:
        model.accept(op, target.apply(op))
        program.append(op)
    return program


def walk(geometry: Geometry, programs: int, seed: int) -> Measured:
    """Whole programs of the walker, to their end."""
    make, rng, burst = open_target(TARGET), random.Random(seed), Burst()
    start = time.process_time()
    for _ in range(programs):
        run = Run(make(geometry), period=PERIOD)
        drive(run, Walker(rng, PROGRAM_OPS))
        burst.record(run)
    return Measured(time.process_time() - start, burst.tally.steps)


def run_machine(geometry: Geometry, programs: int, seed: int) -> Measured:
    """Programs of the stateful machine, and how much of it closes them."""
    burst, fired, closing = Burst(), 0, 0.0
    name = f"machine_{geometry.page_size}_{seed}"
    machine: Any = machine_for(
        open_target(TARGET), [geometry], name=name, period=PERIOD, sink=burst.record
    )
    finish = machine.teardown

    def teardown(case: Any) -> None:
        nonlocal fired, closing
        start = time.process_time()
        fired += len(case.run.program)
        finish(case)
        closing += time.process_time() - start

    machine.teardown = teardown
    seconds, steps = _search(machine, programs, seed), burst.tally.steps
    return Measured(seconds, steps, closing, steps - fired)


def run_programs(geometry: Geometry, programs: int, seed: int) -> Measured:
    """Hypothesis's lists of ops."""
    burst = Burst()
    name = f"program_{geometry.page_size}_{seed}"
    test: Any = program_test(
        open_target(TARGET), [geometry], name=name, period=PERIOD, sink=burst.record
    )
    start = time.process_time()
    hypothesis_seed(seed)(search_settings(programs, MACHINE_STEPS)(test))()
    return Measured(time.process_time() - start, burst.tally.steps)


def run_empty(geometry: Geometry, programs: int, seed: int) -> Measured:
    """A machine with the rules of the real one, each of which draws what it would and does
    nothing, and is always possible."""
    steps = 0

    def perform(machine: RuleBasedStateMachine, choices: int) -> None:
        nonlocal steps
        steps += 1

    def begin(machine: RuleBasedStateMachine, geometry: Geometry) -> None:
        return None

    def always(machine: RuleBasedStateMachine) -> bool:
        return True

    contract = widest_contract(open_target(TARGET), [geometry])
    body: dict[str, Any] = {"begin": initialize(geometry=st.just(geometry))(begin)}
    for inside in (True, False):
        for number, kind in enumerate(rules_for(contract, inside=inside)):
            empty: Any = _renamed(perform, kind)
            body[f"{kind}_{inside}_{number}"] = precondition(always)(rule(choices=CHOICES)(empty))
    machine = type(f"empty_{geometry.page_size}_{seed}", (RuleBasedStateMachine,), body)
    return Measured(_search(machine, programs, seed), steps)


def _renamed(
    perform: Callable[[RuleBasedStateMachine, int], None], name: str
) -> Callable[[RuleBasedStateMachine, int], None]:
    """A function of its own, since a rule marks the one that it is made of."""

    def again(machine: RuleBasedStateMachine, choices: int) -> None:
        perform(machine, choices)

    again.__name__ = name
    return again


def _search(machine: Any, programs: int, seed: int) -> float:
    settings = search_settings(programs, MACHINE_STEPS)
    start = time.process_time()
    run_state_machine_as_test(hypothesis_seed(seed)(machine), settings=settings)
    return time.process_time() - start


@contextmanager
def collector_of_workers() -> Iterator[None]:
    """The garbage collector as the workers of a campaign have it: what was loaded before is left
    out, what the sources make is looked through."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


WALKS_A_PROGRAM = 4
"""Walks for each program of Hypothesis, which takes longer."""

SOURCES: dict[str, Callable[[Geometry, int, int], Measured]] = {
    "walker": walk,
    "machine": run_machine,
    "program": run_programs,
    "empty machine": run_empty,
}


def sources_metrics(page_size: int, plan: BenchPlan) -> Iterator[Metric]:
    """All sources at one page size."""
    geometry, sizes = GEOMETRIES[page_size], plan.sizes
    measured: dict[str, list[Measured]] = {name: [] for name in SOURCES}
    over_bare: dict[bool, list[float]] = {True: [], False: []}
    # The first program of each source pays for what is made once a process.
    for measure in SOURCES.values():
        measure(geometry, 1, plan.seed)
    with collector_of_workers():
        for number, order in enumerate(orders(list(SOURCES), sizes.rounds, plan.seed)):
            seed = plan.seed + number
            walks = sizes.programs * WALKS_A_PROGRAM
            for checked, ratios in over_bare.items():
                walked, bare = walk_and_replay(geometry, walks, seed, checked=checked)
                ratios.append(walked / bare)
            for name in order:
                programs = walks if name == "walker" else sizes.programs
                measured[name].append(SOURCES[name](geometry, programs, seed))
    # What Hypothesis draws, and so what a step of it costs, differs from seed to seed: sums.
    cost = {
        name: sum(one.seconds for one in rounds) / sum(one.steps for one in rounds)
        for name, rounds in measured.items()
    }
    # An empty machine closes nothing, and its steps are rules alone.
    machines = measured["machine"]
    seconds = sum(one.seconds - one.closing_seconds for one in machines)
    rules = seconds / sum(one.steps - one.closing_steps for one in machines)
    row, key = f"page size {page_size}", f"harness.page{page_size}"
    for checked, name, label in (
        (True, "walker_over_bare", "walker / bare target"),
        (False, "unchecked_over_bare", "unchecked walk / bare target"),
    ):
        yield Metric(f"{key}.{name}", row, label, median(over_bare[checked]), "times")
    over_empty = rules / cost["empty machine"]
    yield Metric(f"{key}.machine_over_empty", row, "machine / empty one", over_empty, "times")
    faster = cost["machine"] / cost["walker"]
    yield Metric(f"{key}.walker_faster_than_machine", row, "machine / walker", faster, "times")
    for name in SOURCES:
        yield Metric(
            f"{key}.{as_key(name)}_steps", row, f"{name} steps/s", 1 / cost[name], "steps/s"
        )


def workers_metrics(plan: BenchPlan) -> Iterator[Metric]:
    """Two workers against one, by the clock on the wall; nothing where there is one CPU."""
    if available_cpus() < 2:
        return
    # Jobs that take about as long, whatever the source.
    programs_of: dict[SourceName, int] = {
        "walker": 2 * plan.sizes.programs,
        "machine": max(1, plan.sizes.programs // 3),
    }
    for source, programs in programs_of.items():
        jobs = [
            Job(TARGET, source, WalkPlan((1, 4)), plan.seed + number, programs)
            for number in range(plan.sizes.jobs)
        ]
        gains = []
        for _ in range(max(1, plan.sizes.rounds // 3)):
            one, two = (timed_jobs(jobs, workers) for workers in (1, 2))
            gains.append(one / two)
        key, value = f"harness.two_workers.{source}", median(gains)
        yield Metric(key, source, "one worker / two", value, "times")


def timed_jobs(jobs: Iterable[Job], workers: int) -> float:
    """Seconds that so many workers take, who have each done a job before."""
    with WorkerPool(workers) as pool:
        first = [Job(TARGET, "walker", WalkPlan((1,)), 0, 1)] * workers
        for _ in pool.run(iter(first), POLL_SECONDS):
            pass
        start = time.perf_counter()
        for _ in pool.run(iter(jobs), POLL_SECONDS):
            pass
        return time.perf_counter() - start


POLL_SECONDS = 5.0


def run(plan: BenchPlan) -> Section:
    """Time the sources, and the workers."""
    section = Section("harness", "The harness")
    sources = [metric for page in GEOMETRIES for metric in sources_metrics(page, plan)]
    section.grids.append(Grid(f"Time a checked step, on {TARGET}", tuple(sources)))
    workers = tuple(workers_metrics(plan))
    if workers:
        section.grids.append(Grid("Workers, by the clock on the wall", workers))
    else:
        section.notes.append("One CPU: two workers were not measured.")
    return section

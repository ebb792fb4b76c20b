"""A campaign: all sources over all machines of a target, for a given time, on several workers.

Time is spent in short bursts, in turn over machines, sources and ways of calling the target.
Findings are kept one a signature, the shortest program of each, under the narrowest contract that
shows it; shrinking comes after. Leaves out what people see (`kvcore.reports`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from kvcore.invariants import Tally
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.profiles import PROFILES
from kvcore.strategies.sources import Burst, SourceName
from kvcore.strategies.walker import WalkPlan
from kvcore.strategies.workers import Crashed, Died, Job, WorkerPool
from kvcore.targets.registry import machines, may_crash, variants, ways

DEFAULT_PAGE_SIZES = (1, 2, 4, 16)
FOREIGN_PAGE_SIZES = (1, 4)

BURST_PROGRAMS: dict[SourceName, int] = {"walker": 12, "machine": 4, "program": 4}
TURNS: tuple[SourceName, ...] = (
    *("walker", "machine", "walker", "program"),
    *("walker", "walker", "walker", "walker", "walker", "walker", "walker", "walker"),
)
"""Sources in turn: the walker makes the volume, Hypothesis has about a tenth of the time."""

POLL_SECONDS = 0.25


class HarnessFailed(Exception):
    """The harness itself raised in a worker; carries the traceback."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign is to do. ``page_sizes`` empty means the default ones; ``time_budget`` is in
    seconds."""

    target: str
    page_sizes: tuple[int, ...]
    seed: int
    time_budget: float
    workers: int
    profile: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A failing program, not shrunk yet. ``target`` is the variant on which it failed."""

    target: str
    source: str
    geometry: Geometry
    program: tuple[Op, ...]
    violation: Violation
    seed: int | None


@dataclass(slots=True)
class Row:
    """What all sources did on one machine; with a foreign target, in one way of calling it."""

    machine: str
    sources: set[str] = field(default_factory=set)
    geometries: set[Geometry] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    findings: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign is."""

    elapsed: float
    budget: float
    tally: Tally
    findings: int


@dataclass(slots=True)
class Report:
    """How a campaign ended. ``findings``: one a signature, see `run_campaign`."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    elapsed: float = 0.0

    @property
    def tally(self) -> Tally:
        """The sum over all rows."""
        total = Tally()
        for row in self.rows:
            total.add(row.tally)
        return total


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination that a campaign visits in turn."""

    target: str
    machine: str
    source: SourceName

    @property
    def label(self) -> str:
        """The row: the machine, and of a foreign target the way of calling it, which is another
        contract. Checked and unchecked builds of our own share a row."""
        _, _, mode = self.target.partition("#")
        return f"{self.machine}, {mode}" if mode and may_crash(self.target) else self.machine


def default_budget(target: str, profile: str) -> float:
    """Seconds that a campaign takes where nothing else is asked for."""
    chosen = PROFILES[profile]
    return chosen.foreign_budget if may_crash(target) else chosen.time_budget


def run_campaign(plan: Plan, on_progress: Callable[[Progress], None]) -> Report:
    """Run a campaign; raises `HarnessFailed` if the harness itself breaks.

    A signature found on several variants is reported for the first of them, whose callers do least.
    """
    start = time.monotonic()
    rows: dict[str, Row] = {}
    findings: dict[tuple[str, str], Finding] = {}
    total = Tally()
    with WorkerPool(plan.workers) as pool:
        jobs = _jobs(plan, start + plan.time_budget)
        for ended in pool.run(jobs, POLL_SECONDS):
            if ended is not None:
                job, result = ended
                if isinstance(result, Crashed):
                    raise HarnessFailed(result.text)
                burst = result if isinstance(result, Burst) else last_words(result)
                row = _row(rows, job)
                row.sources.add(job.source)
                row.geometries |= burst.geometries
                row.tally.add(burst.tally)
                row.findings += len(burst.failures)
                total.add(burst.tally)
                _keep_shortest(findings, plan, job, burst)
            elapsed = time.monotonic() - start
            on_progress(Progress(elapsed, plan.time_budget, total, len(findings)))
    return Report(list(rows.values()), list(findings.values()), time.monotonic() - start)


def _cells(target: str) -> list[Cell]:
    """A round: each source in turn over all machines, as often as their share says; the ways of
    calling the target alternate."""
    names = [name for name in machines(target) for _ in range(MACHINES[name].share)]
    if len(machines(target)) == 1:
        (only,) = machines(target)
        return [Cell(way, only, source) for source in TURNS for way in ways(target, only)]
    cells: list[Cell] = []
    for turn, source in enumerate(TURNS):
        for place, name in enumerate(names):
            called = ways(target, name)
            cells.append(Cell(called[(turn // 2 + place) % len(called)], name, source))
    return cells


def _jobs(plan: Plan, deadline: float) -> Iterator[Job]:
    """Bursts without end, until the time is up."""
    cells = _cells(plan.target)
    wanted = plan.page_sizes or (
        FOREIGN_PAGE_SIZES if may_crash(plan.target) else DEFAULT_PAGE_SIZES
    )
    for number in count():
        if time.monotonic() >= deadline:
            return
        cell = cells[number % len(cells)]
        yield Job(
            target=cell.target,
            source=cell.source,
            plan=WalkPlan(wanted, cell.machine),
            # A seed of its own for each burst, the same in every campaign with this plan's seed.
            seed=plan.seed * 1_000_003 + number,
            programs=BURST_PROGRAMS[cell.source],
        )


def _row(rows: dict[str, Row], job: Job) -> Row:
    label = Cell(job.target, job.plan.machine, job.source).label
    return rows.setdefault(label, Row(label))


def last_words(died: Died) -> Burst:
    """A burst that ended with the worker's death: the finding is all that is left of it."""
    burst = Burst()
    if died.geometry is not None:
        burst.tally = Tally(programs=1, steps=len(died.program))
        burst.geometries.add(died.geometry)
        burst.failures.append((0, died.geometry, died.program, died.violation))
    return burst


def _keep_shortest(
    findings: dict[tuple[str, str], Finding], plan: Plan, job: Job, burst: Burst
) -> None:
    order = variants(plan.target).index
    for _, geometry, program, violation in burst.failures:
        known = findings.get(violation.signature)
        if known is None or (order(job.target), len(program)) < (
            order(known.target),
            len(known.program),
        ):
            findings[violation.signature] = Finding(
                job.target, job.source, geometry, program, violation, job.seed
            )

"""One call that puts an allocator on trial: `check_target`, for tests of one's own.

A fixed number of programs from every source on every machine that is asked for, the same for the
same seed; then each finding is shrunk. Foreign code that is known by name runs in a child, as in a
campaign. Leaves out campaigns, which look for as long as they are told to
(`kvcore.strategies.campaign`), and pages for people (`kvcore.reports`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import msgspec

from kvcore.invariants import BY_ID, DRAIN, LAWS, Tally, Verdict
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.models.trace import Trace, encode_trace, new_header
from kvcore.strategies.campaign import HarnessFailed, last_words
from kvcore.strategies.isolation import run_program
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.replay import replay
from kvcore.strategies.shrink import NotReproduced, Play, Shrunk, shrink_played
from kvcore.strategies.sources import Burst, SourceName, run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.strategies.workers import Crashed, Job, WorkerPool
from kvcore.targets.protocol import Target, TargetFactory
from kvcore.targets.registry import machines as machines_of
from kvcore.targets.registry import may_crash, open_target, ways
from kvcore.targets.twin import twin_factory

PAGE_SIZES = (1, 4)
PROGRAMS = 120
SOURCES: tuple[SourceName, ...] = ("walker", "machine")

BURST_PROGRAMS: dict[SourceName, int] = {"walker": 10, "machine": 5, "program": 5}
"""Programs of a source before the next one has its turn."""

MOST_FINDINGS = 3
"""Findings that are shrunk and told; one cause often breaks many laws."""

POLL_SECONDS = 1.0


class ConformanceError(AssertionError):
    """A target broke a law; the message says which, where, and how to see it again."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One broken law, with the smallest program found that breaks it.

    ``machine`` and ``source`` say where it was found, ``found`` how many ops its program had then;
    ``code`` is Python that runs the program again and asserts that no law breaks.
    """

    target: str
    machine: str
    source: SourceName
    geometry: Geometry
    program: tuple[Op, ...]
    violation: Violation
    found: int
    code: str

    @property
    def trace(self) -> Trace:
        """The program as a trace; `kvcore replay` plays it again where the target has a name."""
        header = new_header(self.target, self.geometry, found_by=self.source)
        return Trace(header, self.program, self.violation)

    def save(self, path: Path) -> None:
        """Write the trace to ``path``."""
        path.write_bytes(encode_trace(self.trace))

    def __str__(self) -> str:
        law, broken = BY_ID[self.violation.law], self.violation
        lines = [f"{law.id}, {law.title}, broke at op {broken.op_index}, {broken.op_kind}"]
        if broken.op_kind == DRAIN:
            lines.append("  the drain: all is given back, all lent once, all given back again")
        for clause in broken.clauses:
            if clause.law == law.id:
                lines += [f"  expected  {clause.expected}", f"  seen      {clause.seen}"]
        if others := [other.id for other in LAWS if other.id in broken.laws - {law.id}]:
            lines.append(f"  and broke {', '.join(others)}")
        shrunk = f", shrunk from {self.found} ops" if self.found > len(self.program) else ""
        lines.append(f"  found by the {self.source} on machine '{self.machine}'{shrunk}")
        lines += ["  to see it again:", ""]
        return "\n".join([*lines, *(f"    {line}".rstrip() for line in self.code.splitlines())])


@dataclass(frozen=True, slots=True)
class Conformance:
    """How a check ended; true where no law broke.

    ``programs`` and ``steps`` were run, ``checks`` made, by law. ``findings``: one for each law and
    kind of op, at most `MOST_FINDINGS`; ``more`` counts those beyond.
    """

    target: str
    seed: int
    programs: int
    steps: int
    checks: Mapping[str, int]
    findings: tuple[Breach, ...]
    more: int = 0

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        ran = f"{self.programs:,} programs, {self.steps:,} steps, seed {self.seed}"
        if not self.findings:
            return f"{self.target} conforms: {sum(self.checks.values()):,} checks in {ran}"
        total = len(self.findings) + self.more
        head = f"{self.target} does not conform: {total} finding{'s' * (total > 1)} in {ran}"
        more = [f"{self.more} more, not shrunk"] if self.more else []
        return "\n\n".join([head, *map(str, self.findings), *more])

    def raise_for_findings(self) -> None:
        """Raise `ConformanceError` if a law broke."""
        __tracebackhide__ = True  # pytest then shows the test's own line
        if self.findings:
            raise ConformanceError(str(self))


@dataclass(frozen=True, slots=True)
class Trial:
    """What is on trial: a factory, the name that opens it if it has one, how code spells it, and
    the imports that the spelling needs."""

    factory: TargetFactory
    name: str | None
    spelling: str
    imports: tuple[str, ...]

    @property
    def isolated(self) -> bool:
        """Whether programs run in a child."""
        return self.name is not None and may_crash(self.name)

    @property
    def play(self) -> Play:
        """How one program is run."""
        if self.name is not None:
            return partial(run_program, self.name)
        return self._play_here

    def _play_here(self, geometry: Geometry, program: Sequence[Op], *, period: int = 1) -> Verdict:
        try:
            self.factory(geometry).close()
        except Exception:
            # A shrink tries smaller pools than were asked for; not everybody builds them.
            return Verdict((), None, Tally())
        return replay(self.factory, geometry, program, period=period)

    def code(self, geometry: Geometry, program: Sequence[Op]) -> str:
        """See `Breach.code`."""
        call = "replay" if self.name is None else "run_program"
        home = "replay" if self.name is None else "isolation"
        modules = sorted({_module(op) for op in program} or {"ops"})
        lines = [
            f"from kvcore.models import Geometry, {', '.join(modules)}",
            f"from kvcore.strategies.{home} import {call}",
            *self.imports,
            "",
            "program = [",
            *(f"    {_module(op)}.{_spelled(op)}," for op in program),
            "]",
            f"geometry = {_spelled(geometry)}",
            f"assert {call}({self.spelling}, geometry, program).violation is None",
        ]
        return "\n".join(lines)


def check_target(
    factory: TargetFactory | str,
    *,
    machines: Sequence[str] | None = None,
    page_sizes: tuple[int, ...] = PAGE_SIZES,
    programs: int = PROGRAMS,
    seed: int = 0,
    inner: TargetFactory | str | None = None,
    sources: Sequence[SourceName] = SOURCES,
) -> Conformance:
    """Put a target on trial under every law; the same arguments give the same result.

    Args:
        factory: a function of a `Geometry` that returns a new, empty target (see
            `kvcore.targets.field.field_target`), or the name of a target as `kvcore verify
            --target` takes it. Named foreign code runs in a child process, so that its death is a
            finding; a function runs in this process.
        machines: kinds of pools to try, see `kvcore.strategies.machines.MACHINES`; by default all
            that a named target has, and "hybrid" for a function. "requests" is for targets of
            whole requests (`kvcore.targets.serving`); an allocator is tried on its own calls.
        page_sizes: slots a page; a machine takes those that fit it.
        programs: how many programs to run on each machine, dealt to the sources in turn;
            Hypothesis may add one to each of its turns, and ends a turn at a violation.
        seed: where the programs come from.
        inner: what ``factory``'s allocator wraps, of the same geometries. Every other burst of
            programs then runs both in lockstep, and law L9 asks for the same answers to every op
            and query.
        sources: "walker", "machine" (Hypothesis, rule by rule) or "program" (Hypothesis, whole
            programs).

    Returns:
        What was run and found; true if nothing was.

    Raises:
        ValueError: an unknown machine or source, no programs, or a contract under which no op is
            possible.
        UnknownTarget: a name that opens nothing.
        HarnessFailed: the harness itself broke in a child.
    """
    chosen = _checked_machines(factory, machines)
    _check_counts(page_sizes, programs, sources)
    trials = [_named_trial(factory) if isinstance(factory, str) else _trial(factory)]
    if inner is not None:
        trials.append(_twin_trial(trials[0], inner))
    labels = [_label(trial, chosen, page_sizes) for trial in trials]
    tally, found = Tally(), _Found()
    jobs = list(_jobs(trials, chosen, page_sizes, programs, seed, sources))
    for trial, job, burst in _run(jobs):
        tally.add(burst.tally)
        found.keep_shortest(trial, job, burst)
    if not tally.steps:
        raise ValueError(f"{labels[0]} took no step: its contract leaves no op possible")
    findings, more = found.shrunk(dict(zip(trials, labels, strict=True)))
    checks = {law.id: tally.checks[law.id] for law in LAWS}
    return Conformance(labels[0], seed, tally.programs, tally.steps, checks, findings, more)


def _checked_machines(
    factory: TargetFactory | str, machines: Sequence[str] | None
) -> tuple[str, ...]:
    """The machines to try; a name of our own says which it has."""
    if isinstance(machines, str):
        machines = (machines,)
    if machines is None:
        if not isinstance(factory, str):
            return ("hybrid",)
        # Where a machine is for another variant of the target, that is a name of its own.
        return tuple(name for name in machines_of(factory) if factory in ways(factory, name))
    if not machines:
        raise ValueError(f"machines is empty, expected some of: {', '.join(MACHINES)}")
    for name in machines:
        if name not in MACHINES:
            raise ValueError(f"unknown machine {name!r}; known: {', '.join(MACHINES)}")
    return tuple(machines)


def _check_counts(page_sizes: Sequence[int], programs: int, sources: Sequence[SourceName]) -> None:
    if not page_sizes or min(page_sizes) < 1:
        raise ValueError(f"page_sizes is {page_sizes}, expected sizes of at least 1")
    if programs < 1:
        raise ValueError(f"programs is {programs}, expected at least 1")
    known = get_args(SourceName)
    if not sources or not set(sources) <= set(known):
        raise ValueError(f"sources is {tuple(sources)}, expected some of: {', '.join(known)}")


def _named_trial(name: str) -> Trial:
    return Trial(open_target(name), name, f'"{name}"', ())


def _trial(factory: TargetFactory, place: str = "factory") -> Trial:
    """A function by its own name, where it has one that code can use."""
    spelled = isinstance(factory, FunctionType | type) and factory.__qualname__.isidentifier()
    return Trial(factory, None, factory.__name__ if spelled else place, ())


def _twin_trial(outer: Trial, inner: TargetFactory | str) -> Trial:
    """Both in lockstep, in this process."""
    other = _named_trial(inner) if isinstance(inner, str) else _trial(inner, "inner")
    parts = [
        trial.spelling if trial.name is None else f"open_target({trial.spelling})"
        for trial in (outer, other)
    ]
    imports = ["from kvcore.targets.twin import twin_factory"]
    if outer.name is not None or other.name is not None:
        imports.insert(0, "from kvcore.targets.registry import open_target")
    both = twin_factory(outer.factory, other.factory)
    return Trial(both, None, f"twin_factory({', '.join(parts)})", tuple(imports))


def _label(trial: Trial, machines: Sequence[str], page_sizes: tuple[int, ...]) -> str:
    """What the target is called. Opens one on every machine: a factory that does not fit one says
    so before any time is spent."""
    name = ""
    for machine in machines:
        geometry, _ = WalkPlan(page_sizes, machine).draw(random.Random(0))
        target = trial.factory(geometry)
        if not isinstance(target, Target):
            raise TypeError(
                f"{trial.spelling} made a {type(target).__name__} of a Geometry, expected a Target;"
                " kvcore.targets.field.field_target makes one of an allocator"
            )
        name = target.name
        target.close()
    return trial.name if trial.name is not None else name


Task = tuple[Trial, Job]


def _jobs(
    trials: Sequence[Trial],
    machines: Sequence[str],
    page_sizes: tuple[int, ...],
    programs: int,
    seed: int,
    sources: Sequence[SourceName],
) -> Iterator[Task]:
    """The bursts of every machine, sources and trials in turn."""
    number = 0
    for machine in machines:
        left = programs
        for source, trial in cycle(product(sources, trials)):
            count = min(left, BURST_PROGRAMS[source])
            plan = WalkPlan(page_sizes, machine)
            yield trial, Job(trial.name or "", source, plan, seed * 1_000_003 + number, count)
            number, left = number + 1, left - count
            if not left:
                break


def _run(tasks: Sequence[Task]) -> Iterator[tuple[Trial, Job, Burst]]:
    """Run the bursts; those of foreign code by name in a worker of their own."""
    apart = [task for task in tasks if task[0].isolated]
    if apart:
        trial = apart[0][0]
        with WorkerPool(1) as pool:
            for ended in pool.run(iter([job for _, job in apart]), POLL_SECONDS):
                if ended is None:
                    continue
                job, result = ended
                if isinstance(result, Crashed):
                    raise HarnessFailed(result.text)
                yield trial, job, result if isinstance(result, Burst) else last_words(result)
    for trial, job in tasks:
        if not trial.isolated:
            factory, plan = trial.factory, job.plan
            burst = run_burst(job.source, factory, plan, seed=job.seed, programs=job.programs)
            yield trial, job, burst


@dataclass(frozen=True, slots=True)
class _Finding:
    trial: Trial
    job: Job
    geometry: Geometry
    program: tuple[Op, ...]
    violation: Violation


class _Found:
    """Findings, the shortest of each law and kind of op."""

    def __init__(self) -> None:
        self._shortest: dict[tuple[str, str], _Finding] = {}

    def keep_shortest(self, trial: Trial, job: Job, burst: Burst) -> None:
        """Take in what a burst found."""
        for _, geometry, program, violation in burst.failures:
            known = self._shortest.get(violation.signature)
            if known is None or len(program) < len(known.program):
                finding = _Finding(trial, job, geometry, program, violation)
                self._shortest[violation.signature] = finding

    def shrunk(self, labels: Mapping[Trial, str]) -> tuple[tuple[Breach, ...], int]:
        """The findings, shortest first and shrunk, and how many were left out. Two laws broken by
        one cause may shrink to one program."""
        ordered = sorted(self._shortest.values(), key=lambda one: len(one.program))
        breaches: dict[tuple[str, str], Breach] = {}
        for finding in ordered[:MOST_FINDINGS]:
            breach = _shrunk(finding, labels[finding.trial])
            breaches.setdefault(breach.violation.signature, breach)
        return tuple(breaches.values()), len(ordered[MOST_FINDINGS:])


def _shrunk(finding: _Finding, label: str) -> Breach:
    """A finding made small; one that does not come back is told as it was found."""
    geometry, program, violation = finding.geometry, finding.program, finding.violation
    try:
        small = shrink_played(finding.trial.play, geometry, program, violation)
    except NotReproduced:
        small = Shrunk(geometry, program, violation, 0)
    return Breach(
        target=label,
        machine=finding.job.plan.machine,
        source=finding.job.source,
        geometry=small.geometry,
        program=small.program,
        violation=small.violation,
        found=len(program),
        code=finding.trial.code(small.geometry, small.program),
    )


def _module(op: Op) -> str:
    """The module of the vocabulary that an op is from."""
    return type(op).__module__.rpartition(".")[2]


def _spelled(data: msgspec.Struct) -> str:
    """The call that makes ``data``, defaults left out."""
    said: list[str] = []
    for part in msgspec.structs.fields(data):
        value: Any = getattr(data, part.name)
        if value != part.default:
            said.append(f"{part.name}={_quoted(value)}")
    return f"{type(data).__name__}({', '.join(said)})"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

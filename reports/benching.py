"""`kvcore bench`: options into a plan, the run, its report, and the verdict on the goals.

Exit status with ``--check``: 1 where a goal is missed. A goal that was not measured, because its
section or its release was left out, is told as such and decides nothing; but if not one goal was
measured, there is nothing to check and that is bad input. Leaves out what is measured
(`kvcore.benchmarks`) and how things look (`kvcore.reports.bench_page`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvcore.benchmarks.bench import SECTIONS, bench, encode
from kvcore.benchmarks.contest import Sampling
from kvcore.benchmarks.engines import Rival
from kvcore.benchmarks.goals import Goal, GoalsError, default_goals, judge, read_goals
from kvcore.benchmarks.plan import SMOKE, SMOKE_SAMPLING, BenchPlan, Sizes
from kvcore.reports import edge
from kvcore.reports.bench_page import render_bench, render_goals
from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import messages, output
from kvcore.reports.trace_files import check_file, write_whole
from kvcore.targets.sglang.release import ReleaseError

FAMILY = "sglang:"
"""How ``--against`` begins."""


@dataclass(frozen=True)
class Errand:
    """A run, and which goals to check, if any."""

    plan: BenchPlan
    sections: tuple[str, ...]
    goals: tuple[Goal, ...]


def make_errand(
    against: Sequence[str],
    sections: Sequence[str],
    goals: Path | None,
    seed: int,
    *,
    check: bool,
    quick: bool,
) -> Errand:
    """A run that can start; raises `BadInput`."""
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        known = ", ".join(SECTIONS)
        raise BadInput(f"--section is {unknown[0]!r}, expected one of {known}")
    if goals is not None and not check:
        raise BadInput("--goals is read with --check only")
    edge.at_least(0, seed, "--seed")
    sampling = SMOKE_SAMPLING if quick else Sampling()
    plan = BenchPlan(
        rivals=parse_rivals(against),
        sampling=Sampling(sampling.warmups, sampling.samples, seed),
        sizes=SMOKE if quick else Sizes(),
    )
    chosen = tuple(name for name in SECTIONS if not sections or name in sections)
    return Errand(plan, chosen, _goals(goals) if check else ())


def parse_rivals(against: Sequence[str]) -> tuple[Rival, ...]:
    """The releases to compare with, loaded; raises `BadInput`."""
    rivals: dict[str, Rival] = {}
    for text in against:
        directory = text.removeprefix(FAMILY)
        if directory == text or not directory:
            raise BadInput(f"--against is {text!r}, expected sglang:DIR")
        rival = Rival(Path(directory).expanduser())
        try:
            version = rival.version
        except ReleaseError as error:
            raise BadInput(f"--against: {error}") from None
        if version in rivals:
            raise BadInput(f"--against has release {version} twice, expected it once")
        rivals[version] = rival
    return tuple(rivals.values())


@contextmanager
def showing(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows which section is being measured: on a terminal live, elsewhere a line each."""
    if not console.is_terminal:
        yield lambda name: console.print(f"measuring: {name}", markup=False)
        return
    with console.status("starting") as status:
        yield lambda name: status.update(f"measuring: {name}")


def _goals(path: Path | None) -> tuple[Goal, ...]:
    try:
        return tuple(default_goals() if path is None else read_goals(path))
    except GoalsError as error:
        raise BadInput(f"--goals: {error}") from None


def run(errand: Errand, json: Path | None) -> Status:
    """Run the sections, report them, and judge the goals."""
    if json is not None:
        check_file(json)
    with showing(messages()) as show:
        benched = bench(errand.plan, errand.sections, show)
    verdicts = judge(errand.goals, benched.metrics())
    render_bench(output(), benched)
    if json is not None:
        write_whole(encode(benched, verdicts), json)
    if not errand.goals:
        return Status.CLEAN
    render_goals(output(), verdicts, errand.sections)
    standings = {verdict.standing for verdict in verdicts}
    if standings == {"not measured"}:
        raise BadInput("--check: none of the goals was measured by these sections")
    return Status.VIOLATION if "missed" in standings else Status.CLEAN

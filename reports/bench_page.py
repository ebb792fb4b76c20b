"""The report of the benchmarks: the control first, a table a section, the verdict on each goal.

Reads well at 80 columns and without colour. Leaves out the JSON form (`kvcore.benchmarks.bench`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.benchmarks.bench import Benched
from kvcore.benchmarks.control import QUIET
from kvcore.benchmarks.goals import Goal, Verdict
from kvcore.benchmarks.results import Contest, Grid, Metric, Section, Unit
from kvcore.reports.layout import heading, new_table
from kvcore.reports.wording import count

MICROSECONDS = "Microseconds (medians), for context; in brackets the multiple of the first column."

FORMATS: dict[Unit, str] = {
    "times": "{:.2f}x",
    "exponent": "{:+.3f}",
    "kernels": "{:,.0f}",
    "waits": "{:,.4g} waits",
    "bytes": "{:,.0f} B",
    "steps/s": "{:,.0f}",
}

COLOURS = {"met": "green", "missed": "bold red", "not measured": "yellow"}


def render_bench(console: Console, benched: Benched) -> None:
    """Print what a run yielded."""
    facts = ", ".join(f"{name} {value}" for name, value in benched.environment.items())
    sampling = f"{benched.samples} samples after {benched.warmups} to warm up, seed {benched.seed}"
    console.print(Text(f"{facts}\n{sampling}", style="dim"))
    control, *sections = benched.sections
    console.print(heading(control.title))
    console.print(_control(control))
    for section in sections:
        console.print(heading(section.title))
        if section.contests:
            for contests in _alike(section.contests):
                console.print(contests_table(contests))
            console.print(Text(MICROSECONDS, style="dim"))
        for grid in section.grids:
            console.print(Text(grid.title, style="italic"))
            console.print(grid_table(grid))
        for note in section.notes:
            console.print(Text(note, style="dim"))


def _control(section: Section) -> Text:
    """The ratios of the control, the floor, and whether the machine was quiet."""
    paired = [contest for contest in section.contests if len(contest.medians) > 1]
    ratios = {metric.row: metric.value for contest in paired for metric in contest.metrics()}
    text = Text("; ".join(f"{what}: {ratio:.3f}x" for what, ratio in ratios.items()))
    for contest in section.contests:
        if contest not in paired:
            (floor,) = contest.medians.values()
            text.append(f"\nThe floor, {contest.label}: {floor:.2f} us (for context)")
    if any(abs(ratio - 1) > QUIET for ratio in ratios.values()):
        text.append(
            f"\nThis machine is noisy: the control is more than {QUIET:.0%} off, and so may be "
            "every time below.",
            style="bold yellow",
        )
    return text


def _alike(contests: Sequence[Contest]) -> list[list[Contest]]:
    """The contests in tables: those between the same contestants share one."""
    tables: dict[tuple[str, ...], list[Contest]] = {}
    for contest in contests:
        tables.setdefault(tuple(contest.medians), []).append(contest)
    return list(tables.values())


def contests_table(contests: Sequence[Contest]) -> Table:
    """One row a contest, all between the same contestants."""
    first, *others = contests[0].medians
    table = new_table()
    table.add_column("what", overflow="fold")
    for name in (first, *others):
        table.add_column(name, justify="right", overflow="fold")
    for contest in contests:
        cells = [f"{contest.medians[first]:,.1f}"]
        for name in others:
            cells.append(f"{contest.medians[name]:,.1f} ({contest.over_first(name):.2f}x)")
        table.add_row(contest.label, *cells)
    return table


def grid_table(grid: Grid) -> Table:
    """The metrics of a grid by row and column."""
    columns = list(dict.fromkeys(metric.column for metric in grid.metrics))
    cells: dict[str, dict[str, list[Metric]]] = {}
    for metric in grid.metrics:
        cells.setdefault(metric.row, {}).setdefault(metric.column, []).append(metric)
    table = new_table()
    table.add_column("what", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row, by_column in cells.items():
        table.add_row(row, *(_cell(by_column.get(column, [])) for column in columns))
    return table


def _cell(metrics: Sequence[Metric]) -> str:
    """Numbers that share a place; waits are not worth a word where there are none."""
    shown = [metric for metric in metrics if metric.value or len(metrics) == 1]
    return ", ".join(number(metric) for metric in shown or metrics[:1]) or "-"


def number(metric: Metric) -> str:
    """A number in words."""
    if metric.unit == "waits" and metric.value == 1:
        return "1 wait"
    return FORMATS[metric.unit].format(metric.value)


def render_goals(console: Console, verdicts: Sequence[Verdict], ran: Container[str]) -> None:
    """Print the verdict on each goal, and on all; ``ran`` are the sections that were run."""
    table = new_table()
    table.add_column("goal", overflow="fold")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("standing", no_wrap=True)
    for verdict in verdicts:
        measured = "-" if verdict.worst is None else f"{verdict.worst:.3g}"
        standing = Text(verdict.standing, style=COLOURS[verdict.standing])
        table.add_row(verdict.goal.says, verdict.goal.bound, measured, standing)
    console.print(heading("Goals"))
    console.print(table)
    for line in _told(verdicts, ran):
        console.print(line)


def _told(verdicts: Sequence[Verdict], ran: Container[str]) -> list[Text]:
    missed = [verdict for verdict in verdicts if verdict.standing == "missed"]
    unmeasured = [verdict for verdict in verdicts if verdict.standing == "not measured"]
    met = len(verdicts) - len(missed) - len(unmeasured)
    lines = [
        Text(f"Missed: {verdict.goal.id}, by {verdict.key} = {verdict.worst:.4g}.", style="red")
        for verdict in missed
        if verdict.worst is not None
    ]
    if unmeasured:
        text = f"Not measured, which is no pass: {count(len(unmeasured), 'goal')}."
        needs = dict.fromkeys(_need(verdict.goal, ran) for verdict in unmeasured)
        lines.append(Text(f"{text} Needed: {', '.join(needs)}.", style="yellow"))
    measured = f"{count(met, 'goal')} met, {len(missed)} missed."
    lines.append(Text(measured, style="bold red" if missed else "bold green"))
    return lines


def _need(goal: Goal, ran: Container[str]) -> str:
    """What it takes to measure a goal: its section, whose name its keys begin with, or more."""
    section = goal.metrics[0].partition(".")[0]
    if section not in ran:
        return f"section {section}"
    return goal.needs or f"numbers called {goal.metrics[0]}"

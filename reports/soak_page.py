"""The report of a soak on a terminal, and its progress while it runs.

Reads well at 80 columns and without colour. Progress goes to stderr: a live bar on a terminal,
plain lines elsewhere. Leaves out the JSON form (`kvcore.strategies.soak_report`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from kvcore.reports.layout import heading, new_table
from kvcore.reports.progress import SECONDS_A_LINE
from kvcore.reports.wording import count, pools
from kvcore.strategies.soak import News, Soaked
from kvcore.strategies.soak_report import Occupancy, SoakReport

ARRIVALS = {"asap": "All requests there from the start", "timestamps": "Arrivals by timestamp"}

MOST_REASONS = 5
"""Requests that were not served are told one by one up to here."""


def render_soak(console: Console, soaked: Soaked) -> None:
    """Print what a soak did, and the verdict."""
    report = soaked.report
    console.print(heading(f"{report.workload} on {report.target}"))
    arrivals = f"{ARRIVALS[report.arrivals]}, seed {report.seed}"
    console.print(Text(f"{pools(report.geometry)}\n{arrivals}", style="dim"))
    console.print()
    console.print(facts_table(soaked))
    console.print(pools_table(report))
    if report.not_served:
        console.print(Text(passed(report), style="yellow"))
    console.print()
    console.print(verdict(report))


def facts_table(soaked: Soaked) -> Table:
    """What happened, a line each."""
    report = soaked.report
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, fact in _facts(report, soaked.seconds):
        table.add_row(name, Text(fact))
    table.add_row()
    return table


def _facts(report: SoakReport, seconds: float) -> Iterator[tuple[str, str]]:
    rate = report.served / seconds if seconds > 0 else 0.0
    served = f"{report.served:,} of {report.requests:,} served in {seconds:.0f} s"
    yield "requests", f"{served} ({rate:.1f}/s)"
    yield "tokens", f"{report.prompt_tokens:,} in prompts, {report.output_tokens:,} generated"
    matched = f"{report.matched_tokens:,} prompt tokens were cached"
    yield "hit rate", f"{report.hit_rate:.1%}: {matched}"
    both, alone = report.evicted_pages, report.tombstoned_pages
    size = report.geometry.page_size
    yield (
        "evictions",
        f"{count(both, 'page')} of both pools ({both * size:,} tokens), "
        f"{count(alone, 'SWA page')} alone ({alone * size:,} tokens)",
    )
    recovered = f"{report.recovered:,} recovered ({report.recovered_locked:,} of them locked)"
    yield "tombstones", f"{report.tombstones_made:,} made, {recovered}"
    requests = f"{count(report.retracted_requests, 'request')} ({report.retracted_share:.1%})"
    times = f"{count(report.retractions, 'time')}, {report.retractions_with_backup:,} to the host"
    yield "retractions", f"{requests}, {times}; {report.resumes:,} resumed"
    checks = f"{sum(report.checks.values()):,} checks, every {report.check_every:,} ops"
    yield "laws", f"{count(report.ops, 'op')}, {checks}"


def pools_table(report: SoakReport) -> Table:
    """Pages in use of both pools: at most, at the end, and what was given back then."""
    table = new_table()
    table.add_column("pool", no_wrap=True)
    for name in ("pages", "at most in use", "at the end", "given back"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, pool in (("full", report.full), ("SWA", report.swa)):
        back = "-" if report.ending == "broken" else _given_back(pool)
        used = (f"{pages:,} ({pages / pool.pages:.0%})" for pages in (pool.peak, pool.at_the_end))
        table.add_row(name, f"{pool.pages:,}", *used, back)
    return table


def _given_back(pool: Occupancy) -> str:
    return f"all but {pool.drained:,}" if pool.drained else "all"


def passed(report: SoakReport) -> str:
    """Requests that the pools cannot serve."""
    first = [f"{number} ({why})" for number, why in report.not_served[:MOST_REASONS]]
    more = len(report.not_served) - len(first)
    others = f", and {more:,} more" if more else ""
    told = count(len(report.not_served), "request")
    return f"Not served: {told}, by number from 0: {', '.join(first)}{others}."


def verdict(report: SoakReport) -> Text:
    """Whether the laws were kept."""
    done = f"{count(report.ops, 'op')} and {count(sum(report.checks.values()), 'check')}"
    if report.violation is not None:
        law, kind = report.violation.signature
        return Text(f"{report.target} broke {law}, seen at {kind}, in {done}.", style="bold red")
    if report.ending == "interrupted":
        text = f"Interrupted, and everything given back: no law broke in {done}."
        return Text(text, style="bold yellow")
    return Text(f"{report.target} is clean: no law broke in {done}.", style="bold green")


Show = Callable[[News], None]


def describe(news: News) -> str:
    """How far it is, in one phrase."""
    report = news.report
    ended = report.served + len(report.not_served)
    rate = ended / news.elapsed if news.elapsed > 0 else 0.0
    left = ""
    if 0 < news.done < 1:
        left = f", {_minutes(news.elapsed * (1 - news.done) / news.done)} left"
    used = f"{news.full_share:.0%} full, {news.swa_share:.0%} SWA"
    what = f"{ended:,} of {report.requests:,} requests ({rate:.1f}/s{left})"
    return f"{what}, {news.running} running, pools {used}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@contextmanager
def showing(console: Console) -> Iterator[Show]:
    """A place for progress that suits ``console``."""
    if not console.is_terminal:
        yield _PlainLines(console)
        return
    line = Column(no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.description}", markup=False, table_column=line)
    with Bar(BarColumn(20), text, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(news: News) -> None:
            bar.update(task, description=describe(news), completed=news.done, total=1.0)

        yield show


class _PlainLines:
    """A line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = SECONDS_A_LINE

    def __call__(self, news: News) -> None:
        if news.elapsed < self._next:
            return
        self._next = news.elapsed - news.elapsed % SECONDS_A_LINE + SECONDS_A_LINE
        line = f"{news.elapsed:.0f} s: {describe(news)}"
        self._console.print(line, markup=False, soft_wrap=True)

"""Progress of a campaign while it runs: a live bar on a terminal, plain lines elsewhere.

Goes to stderr, so that the report alone is piped. Leaves out the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from kvcore.reports.wording import count
from kvcore.strategies.campaign import Progress

SECONDS_A_LINE = 10.0


Show = Callable[[Progress], None]
"""Takes news of a campaign."""


def describe(progress: Progress) -> str:
    """What was done so far, in one phrase."""
    found = count(progress.findings, "finding") if progress.findings else "no findings"
    rate = progress.tally.steps / progress.elapsed if progress.elapsed > 0 else 0.0
    programs, steps = count(progress.tally.programs, "program"), count(progress.tally.steps, "step")
    return f"{programs}, {steps} ({rate:,.0f}/s), {found}"


@contextmanager
def showing(console: Console) -> Iterator[Show]:
    """A place for progress that suits ``console``."""
    if not console.is_terminal:
        yield PlainLines(console)
        return
    line = Column(no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.fields[clock]}  {task.description}", markup=False, table_column=line)
    with Bar(BarColumn(20), text, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, clock="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                description=describe(progress),
                clock=f"{progress.elapsed:.0f} of {progress.budget:.0f} s",
                completed=min(progress.elapsed, progress.budget),
                total=progress.budget,
            )

        yield show


class PlainLines:
    """A line every few seconds, and one for each new finding."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = SECONDS_A_LINE
        self._findings = 0

    def __call__(self, progress: Progress) -> None:
        """Print a line if it is time for one."""
        if progress.elapsed < self._next and progress.findings == self._findings:
            return
        self._findings = progress.findings
        self._next = progress.elapsed - progress.elapsed % SECONDS_A_LINE + SECONDS_A_LINE
        clock = f"{progress.elapsed:.0f} s of {progress.budget:.0f} s"
        self._console.print(f"{clock}: {describe(progress)}", markup=False, soft_wrap=True)

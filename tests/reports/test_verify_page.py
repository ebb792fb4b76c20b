"""The report of a campaign adds up and says in the end what it means."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

import pytest
from rich.console import Console

from kvcore.invariants import LAWS, Tally
from kvcore.models import Geometry
from kvcore.models.trace import Trace
from kvcore.reports.progress import PlainLines, describe, showing
from kvcore.reports.verify_page import coverage, geometries, render_report, verdict
from kvcore.strategies.campaign import Finding, Progress, Report, Row

Snapshot = Callable[[str, str], None]

SMALLER = Geometry(4, 16, 12)
EQUAL = Geometry(1, 16, 16, need_sort=True)
LARGER = Geometry(4, 8, 10)


def tally(programs: int, steps: int) -> Tally:
    kinds = ["alloc", "free", "recover"]
    return Tally(
        programs=programs,
        steps=steps,
        checks=Counter({law.id: steps for law in LAWS}),
        ops=Counter(dict.fromkeys(kinds, steps // 3)),
        pairs=Counter({("alloc", "free"): 5, ("free", "alloc"): 4, ("free", "free"): 1}),
    )


def rows(findings: int = 0) -> list[Row]:
    return [
        Row("hybrid", "walker", {SMALLER, EQUAL}, tally(1200, 90_000), findings),
        Row("hybrid, unchecked", "machine", {SMALLER, LARGER}, tally(60, 3_000), 0),
    ]


def finding(leak: Trace) -> Finding:
    assert leak.violation is not None
    header = leak.header
    return Finding(header.target, "walker", header.geometry, leak.ops, leak.violation, 7)


def test_a_clean_campaign(console: Console, paper: io.StringIO, snapshot: Snapshot) -> None:
    render_report(console, Report(rows(), [], 31.4), "kvcore")
    snapshot("verify_clean", paper.getvalue())


def test_a_campaign_with_findings(
    console: Console, paper: io.StringIO, leak: Trace, snapshot: Snapshot
) -> None:
    render_report(console, Report(rows(3), [finding(leak)], 31.4), leak.header.target)
    snapshot("verify_findings", paper.getvalue())


def test_the_sums_are_those_of_the_rows(console: Console, paper: io.StringIO) -> None:
    render_report(console, Report(rows(), [], 1.0), "kvcore")
    last = next(line for line in paper.getvalue().splitlines() if line.startswith("all"))
    checks = 93_000 * len(LAWS)
    # Three geometries, since the two machines share one.
    assert last.split() == ["all", "3", "1,260", "93,000", f"{checks:,}", "0"]


def test_no_line_is_wider_than_the_console(console: Console, paper: io.StringIO) -> None:
    big = Row("single pool, exhaustion", "program", {SMALLER}, tally(10**6, 10**8), 0)
    render_report(console, Report([big, *rows()], [], 3600.0), "sglang:some/where#exhaustion")
    assert max(len(line) for line in paper.getvalue().splitlines()) <= 80


def test_pairs_are_counted_of_the_kinds_that_were_used() -> None:
    assert coverage(tally(1, 3)) == "Op pairs seen in a row: 3 of 9 (33%), of 3 kinds of ops."
    assert coverage(Tally()) == "Op pairs seen in a row: 0 of 0, of 0 kinds of ops."


def test_geometries_are_told_by_what_varies() -> None:
    words = geometries({SMALLER, EQUAL, LARGER, Geometry(2, 8)})
    assert "page sizes 1, 2, 4;" in words
    assert "sorted reuse in 1, unsorted in 3" in words
    assert "smaller than the full pool in 1, equal in 1, larger in 1, none in 1" in words
    assert "page size 4;" in geometries({SMALLER})


def test_the_verdict_names_each_finding(leak: Trace) -> None:
    assert "clean" in verdict(Report(rows(), [], 1.0), "kvcore").plain
    words = verdict(Report(rows(1), [finding(leak)], 1.0), "kvcore").plain
    assert "1 different finding in 93,000 steps" in words
    assert "L3 at group_end" in words


def progress(elapsed: float, findings: int = 0) -> Progress:
    return Progress(elapsed, 60.0, tally(10, 900), findings)


def test_progress_says_what_was_done_so_far() -> None:
    assert describe(progress(3.0)) == "10 programs, 900 steps (300/s), no findings"
    assert describe(progress(3.0, 1)) == "10 programs, 900 steps (300/s), 1 finding"
    assert describe(progress(0.0)).startswith("10 programs, 900 steps (0/s)")


def test_in_a_pipe_progress_is_a_line_now_and_then(console: Console, paper: io.StringIO) -> None:
    with showing(console) as show:
        assert isinstance(show, PlainLines)
        for elapsed in (1, 9.9, 10.1, 12, 19, 41, 42, 51):
            show(progress(elapsed))
    clocks = [line.split(":")[0] for line in paper.getvalue().splitlines()]
    assert clocks == ["10 s of 60 s", "41 s of 60 s", "51 s of 60 s"]


def test_in_a_pipe_a_new_finding_is_told_at_once(console: Console, paper: io.StringIO) -> None:
    with showing(console) as show:
        show(progress(1.0, 1))
        show(progress(2.0, 1))
        show(progress(3.0, 2))
    assert [line.split(", ")[-1] for line in paper.getvalue().splitlines()] == [
        "1 finding",
        "2 findings",
    ]


def test_on_a_terminal_progress_is_live(paper: io.StringIO) -> None:
    console = Console(file=paper, width=100, force_terminal=True, color_system=None)
    with showing(console) as show:
        show(progress(30.0))
    assert "30 of 60 s" in paper.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_terminal_progress_is_one_line(width: int, paper: io.StringIO) -> None:
    console = Console(file=paper, width=width, force_terminal=True, color_system=None)
    with showing(console) as show:
        show(progress(30.0, 12))
    # The one line break is that of the end, when the line is taken away.
    assert paper.getvalue().count("\n") == 1

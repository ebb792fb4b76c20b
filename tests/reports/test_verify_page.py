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
COMPRESSED = Geometry(4, 16, 12, device_pages=8, compress=4)
SAVED = Geometry(2, 8, attention="dsa", saver=True)


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
    every = {"walker", "machine", "program"}
    return [
        Row("hybrid", every, {SMALLER, EQUAL, LARGER}, tally(1200, 90_000), findings),
        Row("compressed HiSparse", every, {COMPRESSED}, tally(60, 3_000), 0),
        Row("memory saver", {"walker", "program"}, {SAVED, SMALLER}, tally(9, 300), 0),
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
    checks = 93_300 * len(LAWS)
    # Five geometries, since two machines share one.
    assert last.split() == ["all", "5", "1,269", "93,300", f"{checks:,}", "0"]


def test_no_line_is_wider_than_the_console(console: Console, paper: io.StringIO) -> None:
    every = {"walker", "machine", "program"}
    big = Row("compressed HiSparse, exhaustion", every, {SMALLER}, tally(10**6, 10**8), 0)
    render_report(console, Report([big, *rows()], [], 3600.0), "sglang:some/where#exhaustion")
    assert max(len(line) for line in paper.getvalue().splitlines()) <= 80


def test_rows_stand_in_the_order_of_the_machines(console: Console, paper: io.StringIO) -> None:
    names = ["composed", "hybrid, exhaustion", "somebody's own", "hybrid", "single pool"]
    every = [Row(name, tally=tally(1, 3)) for name in names]
    render_report(console, Report(every, [], 1.0), "kvcore")
    shown = [line.split("  ")[0] for line in paper.getvalue().splitlines()[3:8]]
    assert shown == ["hybrid", "hybrid, exhaustion", "single pool", "composed", "somebody's own"]


def test_a_row_shows_which_sources_ran(console: Console, paper: io.StringIO) -> None:
    render_report(console, Report(rows(), [], 1.0), "kvcore")
    lines = [line.rstrip() for line in paper.getvalue().splitlines()]
    [row] = [line for line in lines if line.startswith("memory saver")]
    assert "w - p" in row
    assert "Sources: w walker, m machine, p program." in lines


def test_pairs_are_counted_of_the_kinds_that_a_machine_has() -> None:
    one = Row("hybrid", tally=tally(1, 3))
    assert coverage([one]) == "Op pairs seen in a row: 3 of 9 (33%), of 3 kinds of ops."
    assert coverage([]) == "Op pairs seen in a row: 0 of 0, of 0 kinds of ops."


def test_pairs_that_no_machine_can_have_are_not_missed() -> None:
    one = Row("memory saver", tally=Tally(ops=Counter({"pause": 1, "alloc": 1})))
    pairs = Counter({("alloc", "device_buffer"): 2})
    other = Row("HiSparse", tally=Tally(ops=Counter({"device_buffer": 2, "alloc": 2}), pairs=pairs))
    # Two squares of two kinds each, which have a pair of allocs in common.
    assert coverage([one, other]) == "Op pairs seen in a row: 1 of 7 (14%), of 3 kinds of ops."


def test_geometries_are_told_by_what_varies() -> None:
    words = geometries({SMALLER, EQUAL, LARGER, Geometry(2, 8)})
    assert "page sizes 1, 2, 4;" in words
    assert "sorted reuse in 1, unsorted in 3" in words
    assert words.endswith("smaller than the full pool in 1, equal in 1, larger in 1, none in 1.")
    assert "page size 4;" in geometries({SMALLER})


def test_families_of_geometries_are_told_where_there_are_any() -> None:
    words = geometries(
        {
            COMPRESSED,
            SAVED,
            Geometry(1, 8, pure_swa=True),
            Geometry(1, 8, device_pages=4),
            Geometry(2, 8, device_pages=8),
            Geometry(1, 8, 8, attention="mla", requests=2),
        }
    )
    assert words.endswith(
        "; every layer sliding in 1; device pages under the full ones in 2; "
        "compressed device pages in 1; MLA in 1; DSA in 1; a request pool in 1; "
        "a memory saver in 1."
    )


@pytest.mark.parametrize(
    ("target", "told"),
    [("kvcore", True), ("kvcore#unchecked", False), ("fault:deferred-view", False)],
)
def test_both_builds_of_our_own_are_told(
    target: str, told: bool, console: Console, paper: io.StringIO
) -> None:
    render_report(console, Report(rows(), [], 1.0), target)
    assert ("validate=False" in paper.getvalue()) == told


def test_the_verdict_names_each_finding(leak: Trace) -> None:
    assert "clean" in verdict(Report(rows(), [], 1.0), "kvcore").plain
    words = verdict(Report(rows(1), [finding(leak)], 1.0), "kvcore").plain
    assert "1 different finding in 93,300 steps" in words
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

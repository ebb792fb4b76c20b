"""The report of the benchmarks on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from kvcore.benchmarks.bench import Benched
from kvcore.benchmarks.goals import Goal, judge
from kvcore.benchmarks.results import Contest, Grid, Metric, Section
from kvcore.reports.bench_page import render_bench, render_goals

Snapshot = Callable[[str, str], None]


def benched(again: float = 10.1) -> Benched:
    control = Section(
        "control",
        "Control: the same allocator under two names",
        [
            Contest("control.free", "a free", {"kvcore": 10.0, "kvcore again": again}),
            Contest("control.floor", "an empty dispatch", {"floor": 0.9}),
        ],
    )
    groups = Section(
        "groups",
        "Free groups",
        [
            Contest("g.1", "1 x 16", {"kvcore": 40.0, "kvcore owned": 30.0, "sglang 9": 80.0}),
            Contest("g.2", "8 x 16", {"kvcore": 60.0, "kvcore owned": 45.0, "sglang 9": 330.0}),
            Contest("g.3", "alone", {"kvcore": 1234.5}),
        ],
        notes=["A sentence beside the numbers."],
    )
    counts = Section(
        "counts",
        "Counts",
        grids=[
            Grid(
                "Hot paths",
                (
                    Metric("k.a.o", "alloc", "kvcore", 1, "kernels"),
                    Metric("w.a.o", "alloc", "kvcore", 0, "waits"),
                    Metric("k.a.t", "alloc", "sglang 9", 7, "kernels"),
                    Metric("w.a.t", "alloc", "sglang 9", 2, "waits"),
                    Metric("w.f.t", "free", "sglang 9", 5, "waits"),
                    Metric("e.f", "free", "exponent", 0.012, "exponent"),
                    Metric("b.f", "free", "bytes", 1234567, "bytes"),
                ),
            )
        ],
    )
    return Benched(
        {"python": "3.11", "cpus": 2}, ("sglang 9",), 0, 50, 500, (control, groups, counts)
    )


GOALS = (
    Goal("met", "kernels of an alloc", ("k.a.o",), equal=1),
    Goal("missed", "waits", ("w.*",), at_most=1),
    Goal("other", "something that needs a release", ("x.y",), at_least=2, needs="a release"),
    Goal("left", "of a section that was left out", ("z.y",), at_least=2, needs="two CPUs"),
    Goal("within", "an exponent", ("e.f",), at_least=-0.05, at_most=0.05),
)


def test_the_report(console: Console, paper: io.StringIO, snapshot: Snapshot) -> None:
    run = benched()

    render_bench(console, run)
    render_goals(console, judge(GOALS, run.metrics()), ("k", "x"))

    snapshot("bench", paper.getvalue())


def test_the_control_comes_before_everything_else(console: Console, paper: io.StringIO) -> None:
    render_bench(console, benched())

    text = paper.getvalue()
    assert text.index("a free: 1.010x") < text.index("Free groups")
    assert "noisy" not in text


def test_a_control_that_is_off_is_told(console: Console, paper: io.StringIO) -> None:
    render_bench(console, benched(again=12.0))

    assert "This machine is noisy" in paper.getvalue()

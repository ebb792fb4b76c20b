"""`kvcore soak`: options, bad input, the page, the JSON, and what becomes of a violation."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvcore.models import Geometry
from kvcore.reports import soaking
from kvcore.reports.edge import BadInput
from kvcore.reports.soak_page import describe, render_soak, showing
from kvcore.reports.soaking import DEFAULT_GEOMETRY, interruptible, parse_geometry
from kvcore.reports.trace_files import read_trace
from kvcore.strategies.scheduler import CHUNK_TOKENS, Policy, least_swa_pages
from kvcore.strategies.soak import News, Soaked, SoakPlan
from kvcore.strategies.soak_report import Occupancy, SoakReport

Command = Callable[..., tuple[int, str, str]]
Snapshot = Callable[[str, str], None]

SMALL = "page_size=2,full_pages=64,swa_pages=48,requests=4,window=4,context=64"

GOOD = {"timestamp": 0, "input_length": 6, "output_length": 3, "hash_ids": [1]}


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten requests that begin alike, a long one first and short ones after it."""
    monkeypatch.chdir(tmp_path)
    lengths = [18, 7, 9, 7, 8, 20, 7, 9, 7, 8]
    lines = [json.dumps({**GOOD, "input_length": length}) for length in lengths]
    path = Path("w.jsonl")
    path.write_text("\n".join(lines) + "\n")
    return path


def report(**changes: object) -> SoakReport:
    """A report with every kind of number in it."""
    facts: dict[str, object] = {
        "format": "kvcore-soak",
        "version": 1,
        "target": "kvcore",
        "workload": "conversation.jsonl",
        "geometry": DEFAULT_GEOMETRY,
        "arrivals": "asap",
        "seed": 0,
        "check_every": 50,
        "requests": 3000,
        "served": 2998,
        "not_served": ((7, "131,073 tokens, more than the context"), (9, "no room")),
        "prompt_tokens": 40_000_000,
        "matched_tokens": 1_600_000,
        "output_tokens": 1_048_832,
        "evicted_pages": 300_000,
        "tombstoned_pages": 80_000,
        "tombstones_made": 200_000,
        "recovered_locked": 1_200,
        "recovered_unlocked": 34,
        "retractions": 180,
        "retractions_with_backup": 90,
        "retracted_requests": 170,
        "resumes": 180,
        "full": Occupancy(8192, 8192, 8100, 0),
        "swa": Occupancy(3072, 3072, 3000, 0),
        "ops": 50_000,
        "checks": {"L1": 1_000, "L3": 1_000},
        "ending": "clean",
        "violation": None,
    }
    return msgspec.convert({**facts, **changes}, SoakReport)


# Options.


def test_what_is_left_out_has_a_default(
    command: Command, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SoakPlan] = []

    def soak(plan: SoakPlan, *others: object) -> Soaked:
        asked.append(plan)
        return Soaked(report(), (), 1.0)

    monkeypatch.setattr(soaking, "soak", soak)
    assert command("soak", workload)[0] == 0
    [plan] = asked
    assert (plan.target, plan.workload, plan.every) == ("kvcore", "w.jsonl", 50)
    assert plan.geometry == DEFAULT_GEOMETRY
    assert plan.policy == Policy("asap", 0, CHUNK_TOKENS)
    assert len(plan.arrivals) == 10
    options = f"--requests 4 --geometry {SMALL} --target kvcore#unchecked --check-every 3 --seed 5"
    more = "--arrivals timestamps --chunk 16"
    assert command("soak", workload, *options.split(), *more.split())[0] == 0
    plan = asked[1]
    assert (plan.target, plan.every, len(plan.arrivals)) == ("kvcore#unchecked", 3, 4)
    assert plan.geometry == Geometry(2, 64, 48, requests=4, window=4, context=64)
    assert plan.policy == Policy("timestamps", 5, 16)


def test_a_geometry_changes_what_it_names() -> None:
    assert parse_geometry(None) == DEFAULT_GEOMETRY
    changed = parse_geometry("window=512, requests=8")
    assert (changed.window, changed.requests) == (512, 8)
    assert changed.full_pages == DEFAULT_GEOMETRY.full_pages
    assert DEFAULT_GEOMETRY.swa_pages >= least_swa_pages(DEFAULT_GEOMETRY)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("window", "expected NAME=N"),
        ("", "expected NAME=N"),
        ("pages=4", "'pages=4', expected NAME=N with one of page_size"),
        ("saver=1", "expected NAME=N"),
        ("window=x", "window=x, expected a number"),
        ("window=4,window=8", "window twice"),
        ("window=0", "a window of at least 1"),
        ("requests=0", "needs swa_pages and requests"),
        ("full_pages=-1", "full_pages is -1, expected at least 1"),
        ("full_pages=99999999", "expected at most"),
        ("swa_pages=2", "swa_pages is 2, expected at least 67"),
    ],
)
def test_a_geometry_that_cannot_be_is_told(text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse_geometry(text)


# Bad input.

BAD_WORKLOADS = {
    "malformed": ("{", "w.jsonl:11: "),
    "negative": (json.dumps({**GOOD, "input_length": -6}), "w.jsonl:11: "),
    "unknown": (json.dumps({**GOOD, "model": "m"}), "w.jsonl:11: "),
}


@pytest.mark.parametrize(("line", "where"), BAD_WORKLOADS.values(), ids=BAD_WORKLOADS)
def test_a_bad_line_is_one_sentence_and_status_2(
    line: str, where: str, command: Command, workload: Path
) -> None:
    with workload.open("a") as file:
        file.write(line + "\n")
    status, out, err = command("soak", workload)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvcore: {where}")
    assert err.count("\n") == 1


def test_an_unknown_column_is_one_sentence_and_status_2(command: Command, workload: Path) -> None:
    Path("w.csv").write_text("input_length,output_length,model\n4,3,m\n")
    status, out, err = command("soak", "w.csv")
    assert (status, out) == (2, "")
    assert err.startswith("kvcore: w.csv:1: unknown column 'model', expected ")
    assert err.count("\n") == 1


# Soaks.


def test_no_requests_are_an_empty_report(command: Command, workload: Path) -> None:
    options = ("--requests", 0, "--geometry", SMALL, "--json", "report.json")
    status, out, _ = command("soak", workload, *options)
    assert status == 0
    assert "0 of 0 served" in out
    told = json.loads(Path("report.json").read_text())
    assert (told["requests"], told["served"], told["ending"]) == (0, 0, "clean")
    assert told["prompt_tokens"] == told["full"]["peak"] == 0


def test_pools_that_no_request_fits_are_bad_input(command: Command, workload: Path) -> None:
    status, out, err = command("soak", workload, "--geometry", "context=1")
    assert status == 2
    assert "0 of 10 served" in out
    assert "none of the 10 requests fits these pools" in err


def test_a_soak_is_reported_the_same_twice(command: Command, workload: Path) -> None:
    for name in ("one.json", "two.json"):
        options = ("--geometry", SMALL, "--chunk", 16, "--seed", 1, "--json", name)
        status, out, _ = command("soak", workload, *options)
        assert status == 0
        assert "10 of 10 served" in out
        assert "kvcore is clean: no law broke in" in out
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()
    assert not Path("kvcore-traces").exists()


def test_a_violation_is_cut_shrunk_saved_and_shown(command: Command, workload: Path) -> None:
    target = "fault:deferred-peer-lookup"
    options = ("--geometry", SMALL, "--chunk", 32, "--check-every", 1, "--json", "report.json")
    status, out, _ = command("soak", workload, "--target", target, *options, "--traces", "traces")
    assert status == 1
    assert f"{target} broke L3, seen at group_end" in out
    assert json.loads(Path("report.json").read_text())["violation"]["law"] == "L3"
    [path] = Path("traces").iterdir()
    trace = read_trace(path)
    assert len(trace.ops) <= 12
    assert (trace.header.found_by, trace.header.seed) == ("soak", 0)
    assert trace.violation is not None
    assert trace.violation.signature == ("L3", "group_end")
    assert f"Replay  kvcore replay {path}" in out.splitlines()
    assert command("replay", path)[0] == 1


def test_a_violation_that_cannot_be_cut_is_saved_whole(
    command: Command, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soaking, "CUT_SECONDS", 0.0)
    target = "fault:deferred-peer-lookup"
    options = ("--geometry", SMALL, "--chunk", 32, "--check-every", 1)
    status, out, _ = command("soak", workload, "--target", target, *options)
    assert status == 1
    assert "broke it again within 0 s" in " ".join(out.split())
    [path] = Path("kvcore-traces").iterdir()
    violation = read_trace(path).violation
    assert violation is not None
    assert violation.op_index == len(read_trace(path).ops) - 1
    assert command("replay", path)[0] == 1


def test_ctrl_c_ends_a_soak_with_its_report(
    command: Command, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def soak(plan: SoakPlan, show: Callable[[News], None], stop: Callable[[], bool]) -> Soaked:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return Soaked(report(ending="interrupted", served=17), (), 1.0)

    monkeypatch.setattr(soaking, "soak", soak)
    status, out, _ = command("soak", workload, "--json", "report.json")
    assert status == 130
    assert "17 of 3,000 served" in out
    assert "Interrupted, and everything given back" in out
    assert json.loads(Path("report.json").read_text())["ending"] == "interrupted"


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """As usual, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_the_second_ctrl_c_interrupts_at_once() -> None:
    def press_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # Two at the same time may be one for the interpreter.
        while not interrupted():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    with interruptible() as interrupted, pytest.raises(KeyboardInterrupt):
        press_twice()
    assert interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_violation_is_cut_leaves_its_trace(
    command: Command, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(soaking, "cut", cut)
    options = ("--geometry", SMALL, "--chunk", 32, "--target", "fault:deferred-peer-lookup")
    assert command("soak", workload, *options)[0] == 130
    [path] = Path("kvcore-traces").iterdir()
    assert read_trace(path).violation is not None


# Pages.


def test_the_report_of_a_soak(console: Console, paper: io.StringIO, snapshot: Snapshot) -> None:
    render_soak(console, Soaked(report(), (), 400.0))
    snapshot("soak", paper.getvalue())
    assert max(len(line) for line in paper.getvalue().splitlines()) <= 80


def news(elapsed: float, served: int, done: float = 0.5) -> News:
    return News(elapsed, done, 70, 2, 0.991, 0.75, report(served=served, not_served=()))


def test_news_say_how_fast_and_how_long() -> None:
    told = describe(news(100.0, 750, done=0.25))
    assert told == "750 of 3,000 requests (7.5/s, 5 min left), 70 running, pools 99% full, 75% SWA"
    assert "(0.0/s)" in describe(news(0.0, 0, done=0.0))
    assert "(8.0/s, 75 s left)" in describe(news(300.0, 2400, done=0.8))


def test_progress_into_a_pipe_is_a_line_now_and_then(console: Console, paper: io.StringIO) -> None:
    with showing(console) as show:
        for second in range(0, 31):
            show(news(second, 10 * second))
    lines = paper.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["10 s", "20 s", "30 s"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    paper = io.StringIO()
    with showing(Console(file=paper, force_terminal=True, width=120)) as show:
        show(news(100.0, 750))
    assert "750 of 3,000 requests" in paper.getvalue()

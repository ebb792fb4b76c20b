"""`kvcore bench`: what it refuses, how it ends, what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvcore.benchmarks.bench import SECTIONS, Benched
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Contest, Grid, Metric, Section
from kvcore.reports import benching

Command = Callable[..., tuple[int, str, str]]
Asked = list[tuple[BenchPlan, Sequence[str]]]

GOAL = '[[goal]]\nid = "a"\nsays = "a free"\nmetrics = ["counts.free"]\n'


def benched(free: float = 3.0) -> Benched:
    control = Section(
        "control",
        "Control",
        [Contest("control.free", "free", {"kvcore": 10.0, "kvcore again": 10.1})],
    )
    metric = Metric("counts.free", "free", "kvcore", free, "kernels")
    counted = Section("counts", "Counts", grids=[Grid("Hot paths", (metric,))], notes=["A note."])
    return Benched({"python": "3"}, (), 0, 2, 10, (control, counted))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """Every run that was asked for; none takes any time."""
    runs: Asked = []

    def bench(plan: BenchPlan, names: Sequence[str], on_section: Callable[[str], None]) -> Benched:
        runs.append((plan, names))
        on_section("counts")
        return benched()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benching, "bench", bench)
    return runs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--section", "nonsense"), "expected one of operations, groups"),
        (("--against", "nonsense"), "expected sglang:DIR"),
        (("--against", "sglang:"), "expected sglang:DIR"),
        (("--against", "sglang:missing"), "no such directory"),
        (("--seed", "-1"), "at least 0"),
        (("--goals", "goals.toml"), "with --check only"),
        (("--check", "--goals", "missing.toml"), "missing.toml: cannot be read"),
        (("--check", "--goals", "words.toml"), "is no TOML"),
        (("--json", "missing/out.json"), "no directory"),
        (("--json", "."), "it is a directory"),
        (("surplus",), "surplus"),
    ],
)
def test_bad_input_is_told_in_a_sentence_before_anything_runs(
    command: Command, asked: Asked, options: Sequence[str], said: str
) -> None:
    Path("words.toml").write_text("words")

    status, out, err = command("bench", *options)

    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert asked == []


def test_everything_runs_unless_sections_are_named(command: Command, asked: Asked) -> None:
    command("bench")
    command("bench", "--section", "counts", "--section", "growth", "--quick", "--seed", 7)

    (_, every), (plan, some) = asked
    assert tuple(every) == tuple(SECTIONS)
    assert tuple(some) == ("growth", "counts")
    assert plan.seed == 7
    assert plan.sampling.samples < asked[0][0].sampling.samples
    assert plan.rivals == ()


@pytest.mark.parametrize(("bound", "status"), [("at_most = 3", 0), ("at_most = 2", 1)])
def test_a_missed_goal_is_status_1(command: Command, asked: Asked, bound: str, status: int) -> None:
    Path("goals.toml").write_text(GOAL + bound)

    ended, out, _ = command("bench", "--check", "--goals", "goals.toml")

    assert ended == status
    assert ("Missed: a, by counts.free = 3." in out) == bool(status)


def test_without_check_nothing_is_judged(command: Command, asked: Asked) -> None:
    status, out, _ = command("bench")

    assert status == 0
    assert "Goals" not in out


def test_a_goal_that_is_not_measured_is_no_pass_and_no_miss(command: Command, asked: Asked) -> None:
    other = GOAL.replace('"a"', '"b"').replace('free"]', 'x"]') + 'needs = "two CPUs"\n'
    Path("goals.toml").write_text(GOAL + "equal = 3\n" + other + "equal = 3\n")

    status, out, _ = command("bench", "--check", "--goals", "goals.toml")

    assert status == 0
    assert "Not measured, which is no pass: 1 goal. Needed: two CPUs." in out
    assert "1 goal met, 0 missed." in out


def test_where_no_goal_at_all_is_measured_there_is_nothing_to_check(
    command: Command, asked: Asked
) -> None:
    Path("goals.toml").write_text(GOAL.replace("counts.free", "other") + "equal = 3\n")

    status, _, err = command("bench", "--check", "--goals", "goals.toml")

    assert status == 2
    assert "none of the goals was measured" in err


def test_the_report_is_written_as_json(command: Command, asked: Asked) -> None:
    Path("goals.toml").write_text(GOAL + "at_most = 2\n")

    command("bench", "--check", "--goals", "goals.toml", "--json", "out.json")

    told = json.loads(Path("out.json").read_text())
    assert told["sections"]["counts"]["metrics"] == {"counts.free": 3.0}
    assert told["sections"]["control"]["contests"][0]["medians"]["kvcore"] == 10.0
    assert told["goals"][0]["standing"] == "missed"
    assert told["seed"] == 0


def test_a_quick_run_of_a_section_meets_its_goals(command: Command, tmp_path: Path) -> None:
    """No double: the control and the counts, measured."""
    report = tmp_path / "out.json"

    status, out, err = command(
        "bench", "--quick", "--check", "--section", "counts", "--json", report
    )

    assert status == 0, out
    assert "Control: the same allocator under two names" in out.split("Hot paths")[0]
    assert err.splitlines() == ["measuring: control", "measuring: counts"]
    told = json.loads(report.read_text())
    assert told["environment"]["threads"] == 1
    assert set(told["sections"]) == {"control", "counts"}
    standings = [goal["standing"] for goal in told["goals"]]
    assert standings.count("met") == 10
    assert standings.count("missed") == 0

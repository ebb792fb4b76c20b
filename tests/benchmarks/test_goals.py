"""Goals: the file, and the verdicts. A check must be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.benchmarks.goals import (
    Goal,
    GoalsError,
    Standing,
    default_goals,
    judge,
    parse_goals,
    read_goals,
)
from kvcore.benchmarks.results import Metric

GOAL = '[[goal]]\nid = "a"\nsays = "words"\nmetrics = ["x.*"]\n'


def metrics(**values: float) -> list[Metric]:
    return [Metric(key.replace("_", "."), "", "", value, "times") for key, value in values.items()]


def goal(*patterns: str, **bounds: float) -> Goal:
    return Goal("a", "words", patterns, **bounds)


@pytest.mark.parametrize(
    ("bounds", "value", "standing"),
    [
        ({"at_most": 2.0}, 2.0, "met"),
        ({"at_most": 2.0}, 2.1, "missed"),
        ({"at_least": 2.0}, 2.0, "met"),
        ({"at_least": 2.0}, 1.9, "missed"),
        ({"equal": 0.0}, 0.0, "met"),
        ({"equal": 0.0}, 1.0, "missed"),
        ({"at_least": -1.0, "at_most": 1.0}, 0.0, "met"),
        ({"at_least": -1.0, "at_most": 1.0}, -1.1, "missed"),
        ({"at_most": 2.0}, float("nan"), "missed"),
    ],
)
def test_a_number_keeps_its_bounds_or_misses_them(
    bounds: dict[str, float], value: float, standing: Standing
) -> None:
    (verdict,) = judge([goal("x", **bounds)], metrics(x=value))

    assert verdict.standing == standing
    assert verdict.key == "x"


def test_of_many_numbers_the_worst_decides() -> None:
    found = metrics(x_a=1.0, x_b=5.0, x_c=3.0, y=9.0)

    (verdict,) = judge([goal("x.*", at_most=4)], found)

    assert (verdict.standing, verdict.key, verdict.worst) == ("missed", "x.b", 5.0)


def test_a_goal_whose_numbers_are_not_all_there_is_not_measured() -> None:
    found = metrics(x=1.0)

    (verdict,) = judge([goal("x", "z", at_most=4)], found)

    assert (verdict.standing, verdict.worst) == ("not measured", None)


def test_another_release_is_shown_and_not_judged() -> None:
    goals = [one for one in default_goals() if one.id == "slot-free"]
    found = [Metric("operations.page1.free_16.kvcore.sglang-0.5.18", "", "", 1.0, "times")]

    assert judge(goals, found)[0].standing == "not measured"


def test_the_goals_of_this_version_can_be_met_and_missed() -> None:
    for one in default_goals():
        least, most = one.range
        inside = max(least, min(most, 0.0))
        outside = most + 1 if most < float("inf") else least - 1
        keys = [pattern.replace("*", "any") for pattern in one.metrics]
        met = [Metric(key, "", "", inside, "times") for key in keys]
        missed = [Metric(key, "", "", outside, "times") for key in keys]
        assert [judge([one], found)[0].standing for found in (met, missed)] == ["met", "missed"]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(GOAL + "at_most = 3\n")

    assert list(read_goals(path)) == [goal("x.*", at_most=3.0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("= 3", "is no TOML"),
        ("", "at least one"),
        (GOAL + "at_least = nan\n", "a bound that is no number"),
        ("goal = []", "at least one"),
        (GOAL, "needs either equal"),
        (GOAL + "equal = 1\nat_most = 2\n", "needs either equal"),
        (GOAL + "at_least = 3\nat_most = 2\n", "at_least above at_most"),
        (GOAL + "at_most = 'much'\n", "holds no goals"),
        (GOAL + "at_mots = 3\n", "at_mots"),
        (GOAL.replace('"x.*"', "") + "equal = 1\n", "names no metrics"),
        ((GOAL + "equal = 1\n") * 2, "two goals a"),
    ],
)
def test_a_file_that_is_wrong_is_told_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(GoalsError, match=said) as raised:
        parse_goals(text)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")

    for path in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(GoalsError, match=str(path)):
            read_goals(path)

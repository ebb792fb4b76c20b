"""Goals: bounds on numbers, read from a file, and the verdict on each.

A goal names numbers by their keys, so no goal needs code of its own. One whose numbers were not
taken is not measured, which is neither met nor missed. Leaves out the numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Literal

import msgspec

from kvcore.benchmarks.results import Metric

Standing = Literal["met", "missed", "not measured"]


class GoalsError(Exception):
    """A file of goals cannot be used; the message is one sentence."""


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on every number whose key matches one of ``metrics``, patterns in which * stands for
    anything. ``needs``: what it takes to measure it."""

    id: str
    says: str
    metrics: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None
    equal: float | None = None
    needs: str = ""

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError(f"goal {self.id} names no metrics")
        bounded = self.at_least is not None or self.at_most is not None
        if bounded == (self.equal is not None):
            raise ValueError(f"goal {self.id} needs either equal, or at_least or at_most")
        least, most = self.range
        if isnan(least) or isnan(most):
            raise ValueError(f"goal {self.id} has a bound that is no number")
        if least > most:
            raise ValueError(f"goal {self.id} has at_least above at_most")

    @property
    def range(self) -> tuple[float, float]:
        """The numbers that meet it."""
        if self.equal is not None:
            return self.equal, self.equal
        least = float("-inf") if self.at_least is None else self.at_least
        most = float("inf") if self.at_most is None else self.at_most
        return least, most

    @property
    def bound(self) -> str:
        """The bounds in words."""
        if self.equal is not None:
            return f"{self.equal:g}"
        if self.at_least is None:
            return f"at most {self.at_most:g}"
        if self.at_most is None:
            return f"at least {self.at_least:g}"
        return f"{self.at_least:g} to {self.at_most:g}"


class Verdict(msgspec.Struct, frozen=True):
    """How a goal stands. ``worst`` is the number closest to missing it, or furthest beyond, and
    ``key`` says which that is; both are empty if it is not measured."""

    goal: Goal
    standing: Standing
    worst: float | None = None
    key: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    goal: list[Goal] = []


def default_goals() -> Sequence[Goal]:
    """The goals of this version."""
    return parse_goals(files("kvcore.benchmarks").joinpath("goals.toml").read_text("utf-8"))


def read_goals(path: Path) -> Sequence[Goal]:
    """The goals in a file; raises `GoalsError`."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise GoalsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise GoalsError(f"{path}: is not UTF-8 text") from None
    try:
        return parse_goals(text)
    except GoalsError as error:
        raise GoalsError(f"{path}: {error}") from None


def parse_goals(text: str) -> Sequence[Goal]:
    """The goals in a text in TOML; raises `GoalsError`."""
    try:
        goals = msgspec.convert(tomllib.loads(text), _File).goal
    except tomllib.TOMLDecodeError as error:
        raise GoalsError(f"is no TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise GoalsError(f"holds no goals: {error}") from None
    if not goals:
        raise GoalsError("holds no goals: expected at least one [[goal]]")
    ids = [goal.id for goal in goals]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        raise GoalsError(f"has two goals {twice[0]}")
    return goals


def judge(goals: Iterable[Goal], metrics: Iterable[Metric]) -> list[Verdict]:
    """The verdict on each goal."""
    values = {metric.key: metric.value for metric in metrics}
    return [_judge(goal, values) for goal in goals]


def _judge(goal: Goal, values: Mapping[str, float]) -> Verdict:
    least, most = goal.range
    named: dict[str, float] = {}
    for pattern in goal.metrics:
        found = {key: value for key, value in values.items() if fnmatchcase(key, pattern)}
        if not found:
            return Verdict(goal, "not measured")
        named |= found

    def beyond(key: str) -> float:
        return max(least - named[key], named[key] - most)

    # A number that is none, such as 0/0, keeps no bound.
    broken = [key for key, value in named.items() if not least <= value <= most]
    worst = max(broken or named, key=beyond)
    return Verdict(goal, "missed" if broken else "met", named[worst], worst)

"""Interleaved timing and the statistics made of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from kvcore.benchmarks.contest import (
    Contestant,
    Sampling,
    exponent,
    hold_contest,
    no_collector,
    orders,
    time_rounds,
)
from kvcore.benchmarks.results import Contest

SIZES = (10, 100, 1000, 10_000)


def contestant(name: str, done: list[str]) -> Contestant:
    """Writes down what is asked of it."""

    def prepare() -> Callable[[], str]:
        done.append(f"{name} prepares")
        return lambda: done.append(f"{name} runs") or name

    return Contestant(name, prepare, lambda answer: done.append(f"{answer} restores"))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_the_power_that_the_costs_follow(power: float) -> None:
    assert exponent(SIZES, [3.0 * size**power for size in SIZES]) == pytest.approx(power)


def test_the_exponent_is_that_of_the_line_with_the_least_squares() -> None:
    # By hand: ln costs are 0, 1, 0 at ln sizes 0, 1, 2: a level line.
    e = 2.718281828459045
    assert exponent((1, e, e**2), (1, e, 1)) == pytest.approx(0.0)


def test_one_size_makes_no_line() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        exponent((5, 5), (1, 2))


def test_the_orders_are_shuffled_and_the_same_for_the_same_seed() -> None:
    names = ["a", "b", "c"]
    first = list(orders(names, 50, seed=3))

    assert first == list(orders(names, 50, seed=3))
    assert first != list(orders(names, 50, seed=4))
    assert all(sorted(order) == names for order in first)
    assert len({tuple(order) for order in first}) == 6


def test_every_round_prepares_runs_and_restores_each_contestant() -> None:
    done: list[str] = []
    sampling = Sampling(warmups=3, samples=7)

    times = time_rounds([contestant("a", done), contestant("b", done)], sampling)

    assert {name: len(taken) for name, taken in times.items()} == {"a": 7, "b": 7}
    for at in range(0, len(done), 3):
        name = done[at][0]
        assert done[at : at + 3] == [f"{name} prepares", f"{name} runs", f"{name} restores"]
    assert set(Counter(done).values()) == {10}
    assert min(taken for each in times.values() for taken in each) >= 1


def test_contestants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        time_rounds([contestant("a", []), contestant("a", [])], Sampling(0, 1))


def test_a_contest_keeps_the_order_of_its_contestants() -> None:
    contest = hold_contest(
        "key", "label", [contestant("b", []), contestant("a", [])], Sampling(0, 3)
    )

    assert list(contest.medians) == ["b", "a"]


def test_the_numbers_of_a_contest_are_the_later_over_the_earlier() -> None:
    contest = Contest("free", "a free", {"kvcore": 2.0, "kvcore owned": 1.0, "sglang 9": 8.0})

    assert {metric.key: metric.value for metric in contest.metrics()} == {
        "free.kvcore.kvcore-owned": 0.5,
        "free.kvcore.sglang-9": 4.0,
        "free.kvcore-owned.sglang-9": 8.0,
    }
    assert contest.over_first("sglang 9") == 4.0


def test_garbage_is_collected_outside_the_samples() -> None:
    with no_collector():
        assert not gc.isenabled()
    assert gc.isenabled()

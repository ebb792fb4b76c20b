"""Soaks: their reports, what stops them, and what becomes of a failing program."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.models import Geometry, Outcome
from kvcore.models.ops import GroupBegin, Op
from kvcore.models.request_ops import Admit, CacheUnfinished, DecodeStep, Finish, Slide
from kvcore.strategies import soak as soak_module
from kvcore.strategies.campaign import HarnessFailed
from kvcore.strategies.isolation import run_program
from kvcore.strategies.scheduler import Policy
from kvcore.strategies.soak import News, Soaked, SoakPlan, soak
from kvcore.strategies.soak_cut import Cut, cut, shrink_within, without
from kvcore.strategies.soak_report import encode_report, short_name
from kvcore.strategies.workload import Arrival, read_workload
from kvcore.targets.protocol import Target, UnsupportedGeometry, View
from kvcore.targets.registry import open_target

POOLS = Geometry(page_size=2, full_pages=24, swa_pages=14, requests=4, window=4, context=64)

ROOMY = Geometry(page_size=2, full_pages=32, swa_pages=32, requests=4, window=4, context=64)

ALIKE = tuple(Arrival(n, None, ((0, 8), (n + 1, 1 + n % 4)), 3 + n % 9) for n in range(10))
"""Requests that begin alike."""

LEAKING = (
    *(Arrival(n, None, ((n + 1, 9),), 4) for n in range(4)),
    Arrival(4, None, ((0, 6), (90, 12)), 3),
    Arrival(5, None, ((0, 6), (91, 1)), 3),
)
"""After others, a long request and a short one that begins as it does, computed in one batch: the
window of the long one leaves pages behind that the short one still has."""

FAULTY = "fault:deferred-peer-lookup"


def quiet(news: News) -> None:
    """Takes no notice."""


def plan(
    target: str = "kvcore",
    arrivals: tuple[Arrival, ...] = ALIKE,
    *,
    geometry: Geometry = POOLS,
    seed: int = 0,
    every: int = 5,
) -> SoakPlan:
    policy = Policy(seed=seed, chunk_tokens=32)
    return SoakPlan(target, "w.jsonl", geometry, arrivals, policy, every)


def soaked(planned: SoakPlan) -> Soaked:
    """A soak to its end."""
    return soak(planned, quiet, lambda: False)


# Reports.


def test_a_clean_soak_reports_what_the_workload_holds() -> None:
    report = soaked(plan()).report
    assert (report.ending, report.violation) == ("clean", None)
    assert (report.requests, report.served, report.not_served) == (10, 10, ())
    assert report.prompt_tokens == sum(arrival.prompt_tokens for arrival in ALIKE)
    assert report.output_tokens == sum(arrival.output_tokens for arrival in ALIKE)
    assert report.resumes == report.retractions >= report.retracted_requests > 0
    assert 0 < report.matched_tokens < report.prompt_tokens
    for pool in (report.full, report.swa):
        assert 0 < pool.at_the_end <= pool.peak <= pool.pages
        assert pool.drained == 0
    # Once every few ops, each op given back after the last request, and the drain.
    assert report.checks["L3"] >= report.ops // 5
    assert report.checks["stamps"] > 0


def test_every_op_that_was_made_is_in_the_program() -> None:
    ended = soaked(plan())
    assert ended.report.ops == len(ended.program)
    verdict = run_program("kvcore", POOLS, ended.program)
    assert verdict.violation is None
    assert verdict.tally.skipped == 0


def test_pages_that_the_cache_lost_and_got_again_are_counted() -> None:
    # The long one's last window begins at token 14. Of the 7 tokens of the short one those from 2
    # on are in its last window; 3 whole pages are common.
    report = soaked(plan(arrivals=LEAKING[4:], geometry=ROOMY)).report
    assert report.tombstones_made == 14 // 2
    assert (report.recovered_locked, report.recovered_unlocked) == (2, 0)


def test_the_same_seed_gives_the_same_report_to_the_byte() -> None:
    first, second = (encode_report(soaked(plan(seed=3)).report) for _ in range(2))
    assert first == second


def test_the_report_is_json_without_times_and_paths() -> None:
    text = encode_report(soaked(plan()).report).decode()
    told = json.loads(text)
    assert told["workload"] == "w.jsonl"
    assert told["geometry"]["window"] == POOLS.window
    assert "seconds" not in text
    assert short_name("sglang:/some/where/sglang-0.5.18/") == "sglang:sglang-0.5.18"
    assert short_name("kvcore#unchecked") == "kvcore#unchecked"


def test_the_target_changes_nothing_in_a_clean_report() -> None:
    reports = [json.loads(encode_report(soaked(plan(name)).report)) for name in ("kvcore", FAULTY)]
    for report in reports:
        del report["target"]
    assert reports[0] == reports[1]


def test_a_soak_of_nothing_is_clean() -> None:
    ended = soaked(plan(arrivals=()))
    report = ended.report
    assert (report.ending, report.served, report.prompt_tokens, report.hit_rate) == (
        "clean",
        0,
        0,
        0,
    )
    assert report.full.drained == report.full.peak == 0


def test_a_soak_that_is_stopped_gives_everything_back() -> None:
    asked = iter([False] * 20 + [True] * 9)
    report = soak(plan(), quiet, lambda: next(asked)).report
    assert report.ending == "interrupted"
    assert report.served < 10
    assert report.ops >= 20
    assert (report.full.drained, report.swa.drained) == (0, 0)
    assert report.checks["L10"] == 1


def test_news_come_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "NEWS_SECONDS", 0.0)
    news: list[News] = []
    soak(plan(), news.append, lambda: False)
    served = [one.report.served for one in news]
    assert served[0] == 0
    assert served[-1] == 10
    assert served == sorted(served)
    assert max(one.full_share for one in news) <= 1
    assert any(one.running > 1 for one in news)


def test_a_target_that_serves_nobody_says_so() -> None:
    with pytest.raises(UnsupportedGeometry):
        soaked(plan("kvcore#wrapped"))


# Violations.


@pytest.fixture(scope="module")
def leak() -> Soaked:
    """A soak in which the leak shows."""
    return soaked(plan(FAULTY, LEAKING, geometry=ROOMY, every=1))


@pytest.fixture(scope="module")
def found(leak: Soaked) -> Cut:
    """The same, cut."""
    assert leak.report.violation is not None
    answer = cut(FAULTY, ROOMY, leak.program, leak.report.violation, seconds=60)
    assert answer is not None
    return answer


def test_the_leak_is_found_and_cut(leak: Soaked, found: Cut) -> None:
    violation = leak.report.violation
    assert leak.report.ending == "broken"
    assert violation is not None
    assert found.violation.signature == violation.signature == ("L3", "group_end")
    assert len(found.program) < len(leak.program)
    # The two requests that share a front, and nobody else.
    assert sum(isinstance(op, Admit) for op in found.program) == 2
    assert found.geometry.full_pages < ROOMY.full_pages


def test_checks_far_apart_find_it_too(found: Cut) -> None:
    ended = soaked(plan(FAULTY, LEAKING, geometry=ROOMY, every=25))
    violation = ended.report.violation
    assert violation is not None
    late = cut(FAULTY, ROOMY, ended.program, violation, seconds=60)
    assert late is not None
    assert late.violation.op_index <= violation.op_index
    assert violation.law in late.violation.laws


def test_without_time_nothing_is_cut_or_shrunk(leak: Soaked, found: Cut) -> None:
    assert leak.report.violation is not None
    assert cut(FAULTY, ROOMY, leak.program, leak.report.violation, seconds=0) is None
    shrunk = shrink_within(FAULTY, found, seconds=0)
    assert (shrunk.program, shrunk.geometry) == (found.program, found.geometry)


def test_a_program_that_breaks_nothing_is_not_cut(leak: Soaked) -> None:
    assert leak.report.violation is not None
    assert cut("kvcore", ROOMY, leak.program, leak.report.violation, seconds=60) is None


def test_requests_go_from_a_program_without_a_trace() -> None:
    text = ((0, 3),)
    program: tuple[Op, ...] = (
        Admit(1, text, 1),
        Admit(2, text, 2),
        GroupBegin(),
        Slide((1,)),
        CacheUnfinished(2),
        DecodeStep((1, 2)),
        Finish(1),
    )
    assert without(program, frozenset((1,))) == (
        Admit(2, text, 2),
        GroupBegin(),
        CacheUnfinished(2),
        DecodeStep((2,)),
    )


# Code that is not ours runs in a child.


class Stubborn:
    """kvcore, but ``trouble`` comes before the first decode step."""

    def __init__(self, geometry: Geometry, trouble: Callable[[], None]) -> None:
        self._inner: Target = open_target("kvcore")(geometry)
        self._trouble = trouble
        self.name, self.geometry = "sglang:stubborn", geometry
        self.contract = self._inner.contract

    def apply(self, op: Op) -> Outcome:
        if isinstance(op, DecodeStep):
            self._trouble()
        return self._inner.apply(op)

    def view(self, *, stamps: bool) -> View:
        return self._inner.view(stamps=stamps)

    def close(self) -> None:
        self._inner.close()


Foreign = Callable[[Callable[[], None]], SoakPlan]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """The plan of a soak of foreign code with that trouble."""

    def planned(trouble: Callable[[], None]) -> SoakPlan:
        monkeypatch.setattr(
            soak_module, "open_target", lambda name: lambda pools: Stubborn(pools, trouble)
        )
        return plan("sglang:stubborn")

    return planned


def test_a_child_tells_the_same(foreign: Foreign) -> None:
    ours, here = soaked(plan()), os.getpid()
    ended = soaked(foreign(lambda: None if os.getpid() != here else os.abort()))
    assert ended.program == ours.program
    assert ended.report.checks == ours.report.checks
    assert ended.report.ending == "clean"


def test_a_child_that_dies_has_broken_the_bounds(foreign: Foreign) -> None:
    ended = soaked(foreign(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    violation = ended.report.violation
    assert ended.report.ending == "broken"
    assert violation is not None
    assert violation.signature == ("bounds", "decode_step")
    assert isinstance(ended.program[violation.op_index], DecodeStep)
    assert len(ended.program) == ended.report.ops == violation.op_index + 1


def test_a_child_is_stopped(foreign: Foreign) -> None:
    ended = soak(foreign(lambda: None), quiet, lambda: True)
    assert ended.report.ending == "interrupted"
    assert ended.report.full.drained == 0


def test_a_harness_that_fails_in_a_child_fails_here(foreign: Foreign) -> None:
    def trouble() -> None:
        raise ZeroDivisionError("of all things")

    with pytest.raises(HarnessFailed, match="of all things"):
        soaked(foreign(trouble))


def test_pools_that_a_release_has_not_are_told_from_a_child(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Callable[[Geometry], Target]:
        def build(geometry: Geometry) -> Target:
            raise UnsupportedGeometry("no such pools")

        return build

    planned = foreign(lambda: None)
    monkeypatch.setattr(soak_module, "open_target", refuse)
    with pytest.raises(UnsupportedGeometry, match="no such pools"):
        soaked(planned)


def test_a_workload_that_was_read_is_served(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("input_length,output_length\n7,3\n9,2\n", encoding="utf-8")
    report = soaked(plan(arrivals=tuple(read_workload(path)))).report
    assert (report.ending, report.served, report.output_tokens) == ("clean", 2, 5)

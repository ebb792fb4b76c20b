"""Campaigns: every variant, machine and source gets its turn; findings are kept one a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from kvcore.strategies import campaign
from kvcore.strategies.campaign import Plan, Progress, run_campaign
from kvcore.strategies.hunt import hunt
from kvcore.strategies.isolation import run_program
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.replay import replay
from kvcore.strategies.sources import Burst, SourceName
from kvcore.strategies.workers import Crashed, Died, Job, WorkerPool
from kvcore.targets.core import core_target
from kvcore.targets.registry import open_target, ways


class TwoTurns(WorkerPool):
    """Workers that go home after two sources had their turn on every machine: how many bursts fit
    into a time is up to the computer."""

    def run(
        self, jobs: Iterator[Job], poll: float
    ) -> Iterator[tuple[Job, Burst | Died | Crashed] | None]:
        a_turn = sum(machine.share for machine in MACHINES.values())
        return super().run(islice(jobs, 2 * a_turn), poll)


def test_a_campaign_on_the_core_is_clean_and_covers_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short: dict[SourceName, int] = {"walker": 1, "machine": 1, "program": 1}
    monkeypatch.setattr(campaign, "BURST_PROGRAMS", short)
    monkeypatch.setattr(campaign, "WorkerPool", TwoTurns)
    seen: list[Progress] = []
    plan = Plan("kvcore", (1, 4), seed=0, time_budget=600.0, workers=2, profile="dev")
    report = run_campaign(plan, seen.append)
    assert report.findings == []
    assert sorted(row.machine for row in report.rows) == sorted(MACHINES)
    for row in report.rows:
        assert row.sources == {"walker", "machine"}
        assert row.geometries
        assert row.tally.programs >= 1
        assert row.findings == 0
    assert report.tally.steps > 500
    laws = {"L1", "L2", "L3", "L4", "L7", "L10", "stamps", "rows", "saver", "hostile"}
    assert set(report.tally.checks) >= laws
    assert seen[-1].tally.steps == report.tally.steps


class Recording:
    """A pool of workers that does nothing, and knows what it was asked to do."""

    def __init__(self, round_length: int) -> None:
        self.jobs: list[Job] = []
        self.round_length = round_length

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, jobs: Iterator[Job], poll: float) -> Iterator[tuple[Job, Burst]]:
        for job in islice(jobs, self.round_length):
            self.jobs.append(job)
            yield job, Burst()


def test_every_machine_has_its_share_of_a_round_in_every_way_of_calling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Counter(campaign.TURNS)
    pool = Recording(sum(machine.share for machine in MACHINES.values()) * turns.total())
    monkeypatch.setattr(campaign, "WorkerPool", lambda workers: pool)
    plan = Plan("kvcore", (1, 4), seed=0, time_budget=60.0, workers=1, profile="dev")
    run_campaign(plan, lambda progress: None)
    for name, machine in MACHINES.items():
        jobs = [job for job in pool.jobs if job.plan.machine == name]
        sources = Counter(job.source for job in jobs)
        assert sources == {source: machine.share * count for source, count in turns.items()}
        assert {job.target for job in jobs} == set(ways("kvcore", name))
        assert {job.plan.page_sizes for job in jobs} == {(1, 4)}
    assert len({job.seed for job in pool.jobs}) == len(pool.jobs)


def test_a_finding_replays_on_its_target_and_passes_on_the_core() -> None:
    plan = Plan("fault:two-owners-one-peer", (), seed=1, time_budget=2.0, workers=1, profile="dev")
    report = run_campaign(plan, lambda progress: None)
    assert report.findings
    assert len({f.violation.signature for f in report.findings}) == len(report.findings)
    for finding in report.findings:
        again = run_program(finding.target, finding.geometry, finding.program).violation
        assert again is not None
        assert finding.violation.law in again.laws
        assert replay(core_target, finding.geometry, finding.program).violation is None


def test_findings_of_all_sources_replay_to_the_same_violation() -> None:
    for source in ("walker", "machine", "program"):
        found = hunt("two-owners-one-peer", source, [0], 100)
        assert found.median is not None
        (shrunk,) = found.shrunk
        factory = open_target("fault:two-owners-one-peer")
        again = replay(factory, shrunk.geometry, shrunk.program).violation
        assert again == shrunk.violation
        assert replay(core_target, shrunk.geometry, shrunk.program).violation is None
        assert found.shrunk_length == len(shrunk.program)


def test_a_hunt_that_finds_nothing_says_so() -> None:
    found = hunt("deferred-free-lookup", "walker", [0, 1], 0)
    assert found.programs == [None, None]
    assert found.median is None
    assert found.shrunk_length is None

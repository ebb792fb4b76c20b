"""Campaigns: every variant, pool kind and source gets its turn; findings are kept one a kind."""

from __future__ import annotations

from kvcore.strategies.campaign import Plan, Progress, run_campaign
from kvcore.strategies.hunt import hunt
from kvcore.strategies.isolation import run_program
from kvcore.strategies.replay import replay
from kvcore.targets.core import core_target
from kvcore.targets.registry import open_target


def test_a_campaign_on_the_core_is_clean_and_covers_both_kinds_of_pool() -> None:
    seen: list[Progress] = []
    plan = Plan("kvcore", (1, 4), seed=0, time_budget=6.0, workers=2, profile="dev")
    report = run_campaign(plan, seen.append)
    assert report.findings == []
    machines = {row.machine for row in report.rows}
    assert {"hybrid", "hybrid, unchecked", "single pool"} <= machines
    assert report.tally.steps > 500
    assert set(report.tally.checks) >= {"L1", "L2", "L3", "L4", "L7", "L10", "stamps", "hostile"}
    assert seen[-1].tally.steps == report.tally.steps


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

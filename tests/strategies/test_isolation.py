"""Foreign code: a process that dies is a finding, and the harness lives on."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from kvcore.models import Contract, Geometry, Outcome, ops
from kvcore.models.ops import Op
from kvcore.strategies import campaign, isolation, workers
from kvcore.strategies.campaign import HarnessFailed, Plan, run_campaign
from kvcore.strategies.isolation import replay_isolated, run_program
from kvcore.strategies.walker import WalkPlan
from kvcore.strategies.workers import Died, Job, WorkerPool
from kvcore.targets.core import core_target
from kvcore.targets.protocol import Target, View


@dataclass
class DyingTarget:
    """The right core, but a decode kills the process."""

    inner: Target
    how: int

    @property
    def name(self) -> str:
        return "sglang:dying"

    @property
    def geometry(self) -> Geometry:
        return self.inner.geometry

    @property
    def contract(self) -> Contract:
        return self.inner.contract

    def apply(self, op: Op) -> Outcome:
        if isinstance(op, ops.Decode):
            os.kill(os.getpid(), self.how)
        return self.inner.apply(op)

    def view(self, *, stamps: bool) -> View:
        return self.inner.view(stamps=stamps)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> str:
    """A target name whose decodes end in a segmentation fault."""

    def open_dying(name: str) -> object:
        return lambda geometry: DyingTarget(core_target(geometry), signal.SIGSEGV)

    monkeypatch.setattr(isolation, "open_target", open_dying)
    monkeypatch.setattr(workers, "open_target", open_dying)
    return "sglang:dying"


PROGRAM = (ops.Alloc(1, 2), ops.Decode((1,)), ops.Free(1))


def test_a_death_is_a_violation_of_bounds_at_its_op(dying: str, geometry: Geometry) -> None:
    verdict = run_program(dying, geometry, PROGRAM)
    assert verdict.violation is not None
    assert verdict.violation.signature == ("bounds", "decode")
    assert verdict.violation.op_index == 1
    assert "SIGSEGV" in verdict.violation.clauses[0].seen
    assert verdict.program == PROGRAM[:2]


def test_a_program_without_the_deadly_op_passes(dying: str, geometry: Geometry) -> None:
    verdict = replay_isolated(dying, geometry, (PROGRAM[0], PROGRAM[2]))
    assert verdict.violation is None
    assert verdict.program == (PROGRAM[0], PROGRAM[2])


def test_isolated_and_direct_replays_agree(geometry: Geometry) -> None:
    isolated = replay_isolated("kvcore", geometry, PROGRAM)
    direct = run_program("kvcore", geometry, PROGRAM)
    assert isolated.program == direct.program
    assert isolated.violation is direct.violation is None


def test_a_dead_worker_leaves_its_program_and_is_replaced(dying: str) -> None:
    job = Job(dying, "walker", WalkPlan((1,)), seed=0, programs=20)
    with WorkerPool(1) as pool:
        results = [ended[1] for ended in pool.run(iter([job, job]), poll=0.2) if ended is not None]
    assert len(results) == 2
    for result in results:
        assert isinstance(result, Died)
        assert result.violation.law == "bounds"
        assert isinstance(result.program[-1], ops.Decode)
        assert result.geometry is not None


def test_a_campaign_survives_and_reports_deaths(dying: str) -> None:
    plan = Plan(dying, (1,), seed=0, time_budget=2.0, workers=1, profile="dev")
    report = run_campaign(plan, lambda progress: None)
    assert [finding.violation.signature for finding in report.findings] == [("bounds", "decode")]
    assert report.tally.steps > 0


def test_a_harness_that_raises_is_told_apart_from_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> object:
        raise ZeroDivisionError("the harness broke")

    monkeypatch.setattr(workers, "open_target", broken)
    plan = Plan("kvcore", (1,), seed=0, time_budget=2.0, workers=1, profile="dev")
    with pytest.raises(HarnessFailed, match="the harness broke"):
        run_campaign(plan, lambda progress: None)


def test_exit_statuses_are_told_too() -> None:
    violation = isolation.death((ops.Clear(),), 3 << 8)
    assert violation.clauses[0].seen == "the process died: exit status 3"


def test_campaigns_use_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert campaign.default_budget("sglang:x", "ci") < campaign.default_budget("kvcore", "ci")

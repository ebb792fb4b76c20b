"""The stateful machine and the program property: clean on the core, and they find what is wrong.

The two test cases at the end are what a user of Hypothesis would write, and run under the suite's
profile.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore.invariants import LawBroken, Run
from kvcore.models import Geometry, ServingModel
from kvcore.strategies.choices import PackedChoices
from kvcore.strategies.machine import AllocatorMachine, machine_for
from kvcore.strategies.machine_rules import REQUEST_RULES, pick_kind, propose_or_other
from kvcore.strategies.profiles import PROFILES, hypothesis_settings, search_settings
from kvcore.strategies.program import program_test
from kvcore.strategies.sources import run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.strategies.weights import kinds_for
from kvcore.targets.core import core_target
from kvcore.targets.registry import open_target

GEOMETRIES = [
    Geometry(page_size=1, full_pages=8, swa_pages=6),
    Geometry(page_size=4, full_pages=8, swa_pages=8, need_sort=True),
    Geometry(page_size=2, full_pages=6, swa_pages=8),
]
SERVING = [Geometry(page_size=2, full_pages=12, swa_pages=9, requests=3, window=3)]
SUITE = hypothesis_settings(PROFILES[os.environ.get("KVCORE_PROFILE", "ci")])


@pytest.mark.parametrize("source", ["machine", "program"])
def test_a_known_fault_is_found(source: str) -> None:
    burst = run_burst(
        source,
        open_target("fault:deferred-peer-lookup"),
        WalkPlan((1, 4)),
        seed=0,
        programs=200,
        stop_at=lambda violation: True,
    )
    assert burst.failures
    assert {"L3", "L6"} & burst.failures[0][3].laws


@pytest.mark.parametrize("source", ["machine", "program"])
def test_one_seed_gives_the_same_programs(source: str) -> None:
    def tally() -> object:
        return run_burst(
            source,
            core_target,
            WalkPlan((2,)),
            seed=11,
            programs=8,
        ).tally

    assert tally() == tally()


def test_a_failing_machine_raises_the_error_of_its_law() -> None:
    machine = machine_for(
        open_target("fault:two-owners-one-peer"), GEOMETRIES[:1], name="FailingMachine"
    )
    with pytest.raises(LawBroken) as caught:
        run_state_machine_as_test(machine, settings=search_settings(200, 50))
    assert caught.value.violation.law == "L3"
    assert caught.value.header.target == "fault:two-owners-one-peer"
    assert caught.value.program


def test_a_failing_property_raises_the_error_of_its_law() -> None:
    test = program_test(
        open_target("fault:two-owners-one-peer"), GEOMETRIES[:1], name="failing_property"
    )
    with pytest.raises(LawBroken) as caught:
        search_settings(300, 50)(test)()
    assert caught.value.violation.law == "L3"


def test_a_machine_of_whole_requests_makes_something_of_almost_every_step() -> None:
    runs: list[Run] = []
    machine = machine_for(open_target("kvcore"), SERVING, name="Serving", sink=runs.append)
    run_state_machine_as_test(machine, settings=search_settings(20, 30))
    longest = sorted((len(run.program) for run in runs), reverse=True)[: len(runs) // 2]
    assert sum(longest) / len(longest) > 15
    kinds = {op.kind for run in runs for op in run.program}
    assert {"admit", "cache_unfinished", "finish", "slide", "evict", "retract_request"} <= kinds


def test_a_rule_with_nothing_to_ask_for_asks_for_another_kind() -> None:
    model = Run(core_target(GEOMETRIES[0])).model
    without_rows = {kind for kind in kinds_for(model.contract, inside=False) if "free" in kind}
    assert {"free", "free_swa", "free_full"} <= without_rows
    for kind in without_rows:
        asked = [propose_or_other(kind, model, PackedChoices(number)) for number in range(200)]
        assert all(op is not None and model.allows(op) for op in asked)
        assert {"alloc", "extend", "group_begin"} <= {op.kind for op in asked if op is not None}


def test_a_request_rule_with_nothing_to_ask_for_asks_for_another_kind() -> None:
    model = Run(open_target("kvcore")(SERVING[0])).model
    assert isinstance(model, ServingModel)
    assert pick_kind(("finish", "group_begin"), model, PackedChoices(0)) == "group_begin"
    others = {pick_kind(("finish",), model, PackedChoices(number)) for number in range(100)}
    assert others == {"admit_new", "group_begin"}


@pytest.mark.parametrize("inside", [False, True])
def test_every_request_level_kind_has_a_rule(inside: bool) -> None:
    asked = {kind for kinds in REQUEST_RULES for kind in kinds}
    assert set(kinds_for(open_target("kvcore")(SERVING[0]).contract, inside=inside)) <= asked


def test_two_laws_are_two_exception_classes() -> None:
    assert len({law.__name__ for law in LawBroken.__subclasses__()}) > 10


def test_every_finished_run_is_told() -> None:
    runs: list[Run] = []
    machine = machine_for(core_target, GEOMETRIES, name="ToldMachine", sink=runs.append)
    run_state_machine_as_test(machine, settings=search_settings(10, 20))
    assert len(runs) >= 10
    assert all(run.violation is None and not run.model.rows for run in runs)


def test_a_machine_that_was_not_started_says_so() -> None:
    machine: AllocatorMachine = machine_for(core_target, GEOMETRIES, name="Unstarted")()
    with pytest.raises(RuntimeError, match="not started"):
        _ = machine.run
    machine.teardown()


def test_the_ci_profile_is_derandomised_and_keeps_no_database() -> None:
    ci = hypothesis_settings(PROFILES["ci"])
    assert ci.derandomize
    assert ci.database is None
    assert not hypothesis_settings(PROFILES["nightly"]).derandomize


class TestHybridAllocator(machine_for(core_target, GEOMETRIES, name="HybridAllocator").TestCase):
    settings = SUITE


class TestSinglePoolAllocator(
    machine_for(
        core_target,
        [Geometry(page_size=1, full_pages=8), Geometry(page_size=4, full_pages=8, need_sort=True)],
        name="SinglePoolAllocator",
    ).TestCase
):
    settings = SUITE


def test_every_program_keeps_every_law() -> None:
    check = program_test(core_target, GEOMETRIES, name="every_program_keeps_every_law")
    settings(SUITE)(check)()

"""Every machine: its geometries are what it is for, every source drives it, the core keeps every
law on it, and together the programs apply every kind of op that its callers have.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvcore.invariants import Run, drive
from kvcore.models import Geometry
from kvcore.strategies.machines import COMPRESS, MACHINES
from kvcore.strategies.sources import SourceName, run_burst
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets import registry
from kvcore.targets.faults import FAULTS
from kvcore.targets.protocol import TargetFactory
from kvcore.targets.registry import WRAPPER, open_target, ways

PAGE_SIZES = (1, 4, 16)
PROGRAMS = 20
STEPS = 40


def drawn(name: str, count: int = 200) -> list[Geometry]:
    rng = random.Random(name)
    plan = WalkPlan(PAGE_SIZES, name)
    return [plan.draw(rng)[0] for _ in range(count)]


def target_of(name: str) -> TargetFactory:
    """The core in the first way of calling it that the machine is for."""
    return open_target(ways("kvcore", name)[0])


def compared(geometry: Geometry) -> int:
    """-1, 0 or 1: the SWA pool is smaller than the full one, as large, or larger."""
    return (geometry.swa_pages > geometry.full_pages) - (geometry.swa_pages < geometry.full_pages)


# Geometries.


def test_the_registry_names_the_same_machines() -> None:
    assert tuple(MACHINES) == registry.MACHINES
    assert all(machine.name == name for name, machine in MACHINES.items())
    assert registry.machines("kvcore") == tuple(MACHINES)


def test_a_wrapper_beside_its_inner_allocator_is_a_way_of_its_own() -> None:
    others = tuple(name for name in MACHINES if name != WRAPPER)
    assert registry.machines("kvcore#unchecked") == others
    assert registry.machines("kvcore#wrapped") == (WRAPPER,)
    assert ways("kvcore", WRAPPER) == ["kvcore#wrapped"]
    ours = ["kvcore", "kvcore#unchecked", "kvcore#torch"]
    owned = ["kvcore#owned", "kvcore#owned-unchecked", "kvcore#owned-torch"]
    assert all(ways("kvcore", name) == [*ours, *owned] for name in others if name != "requests")
    assert ways("kvcore", "requests") == ours


def test_every_known_fault_has_a_machine_that_shows_it() -> None:
    for name, fault in FAULTS.items():
        assert registry.machines(f"fault:{name}") == (fault.machine,)
        assert fault.machine in MACHINES


def test_a_release_is_driven_as_a_hybrid_allocator() -> None:
    assert registry.machines("sglang:somewhere") == ("hybrid",)


PURPOSE: dict[str, Callable[[Geometry], bool]] = {
    "hybrid": lambda g: g.hybrid and not g.sparse,
    "single pool": lambda g: not (g.slides or g.sparse),
    "pure SWA": lambda g: g.pure_swa,
    "HiSparse": lambda g: g.sparse and not g.hybrid and g.full_pages % g.device_pages == 0,
    "compressed HiSparse": lambda g: g.sparse and g.hybrid and g.compress == COMPRESS,
    "MLA and DSA pools": lambda g: g.attention in ("mla", "dsa"),
    "request pool": lambda g: g.requests > 1,
    "memory saver": lambda g: g.saver,
    "composed": lambda g: g.saver and g.requests > 1 and g.hybrid,
    "requests": lambda g: g.serves and g.requests > 1 and not g.saver,
    WRAPPER: lambda g: g.hybrid and not (g.sparse or g.serves),
}
WITH_REQUESTS = ("request pool", "composed", "requests")
WITH_SAVER = ("memory saver", "composed")


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_draws_the_pools_that_it_is_for(name: str) -> None:
    geometries = drawn(name)
    assert all(PURPOSE[name](geometry) for geometry in geometries)
    assert {geometry.need_sort for geometry in geometries} == {False, True}
    assert {geometry.page_size for geometry in geometries} == set(
        MACHINES[name].page_sizes(PAGE_SIZES)
    )
    assert len({geometry.full_pages for geometry in geometries}) > 1
    # What one machine is for is left to it, so that each finding belongs to one.
    assert any(geometry.requests for geometry in geometries) is (name in WITH_REQUESTS)
    assert any(geometry.saver for geometry in geometries) is (name in WITH_SAVER)


@pytest.mark.parametrize("name", ["hybrid", "compressed HiSparse"])
def test_swa_pools_are_smaller_than_equal_to_and_larger_than_full_ones(name: str) -> None:
    assert {compared(geometry) for geometry in drawn(name)} == {-1, 0, 1}


@pytest.mark.parametrize("name", ["MLA and DSA pools", "request pool", "memory saver"])
def test_pools_are_tried_with_a_sliding_side_and_without(name: str) -> None:
    geometries = drawn(name)
    assert {geometry.hybrid for geometry in geometries} == {False, True}
    assert any(geometry.pure_swa for geometry in geometries) is (name == "request pool")


@pytest.mark.parametrize("name", ["memory saver", "composed"])
def test_memory_is_paused_under_every_kind_of_layer(name: str) -> None:
    assert {geometry.attention for geometry in drawn(name)} == {"mha", "mla", "dsa"}


def test_device_slots_are_as_many_as_logical_ones_or_fewer() -> None:
    ratios = {geometry.full_pages // geometry.device_pages for geometry in drawn("HiSparse")}
    assert 1 in ratios
    assert len(ratios) > 2


def test_windows_are_shorter_than_a_page_whole_pages_and_neither() -> None:
    geometries = [geometry for geometry in drawn("requests") if geometry.page_size == 4]
    windows = {geometry.window for geometry in geometries}
    assert any(window < 4 for window in windows)
    assert {4, 8, 12} <= windows
    assert any(window > 4 and window % 4 for window in windows)
    assert {compared(geometry) for geometry in geometries} == {-1, 0}
    assert {geometry.context == 0 for geometry in geometries} == {False, True}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_takes_the_page_sizes_that_fit_it(name: str) -> None:
    unit = COMPRESS if name in ("compressed HiSparse", WRAPPER) else 1
    machine = MACHINES[name]
    assert machine.page_sizes((1, 2, 4, 16)) == tuple(n for n in (1, 2, 4, 16) if n % unit == 0)
    assert machine.page_sizes((3,)) == ((3,) if unit == 1 else (unit,))


# Programs.


@pytest.mark.parametrize(
    ("name", "target"), [(name, way) for name in MACHINES for way in ways("kvcore", name)]
)
def test_programs_keep_every_law_and_apply_every_kind_of_op(name: str, target: str) -> None:
    rng = random.Random(f"{name} {target}")
    plan = WalkPlan(PAGE_SIZES, name)
    applied: Counter[str] = Counter()
    named: set[str] = set()
    # Of the memory saver's pools few have device slots, and those have ops of their own.
    for _ in range(PROGRAMS * (3 if name == "memory saver" else 1)):
        geometry, _ = plan.draw(rng)
        run = Run(open_target(target)(geometry), period=8)
        verdict = drive(run, Walker(rng, STEPS))
        assert verdict.violation is None, (geometry, verdict)
        applied += verdict.tally.ops
        named |= run.model.contract.ops
        assert set(verdict.tally.ops) <= run.model.contract.ops
    assert set(applied) == named


@pytest.mark.parametrize("source", ["machine", "program"])
@pytest.mark.parametrize("name", MACHINES)
def test_hypothesis_drives_every_machine(name: str, source: SourceName) -> None:
    burst = run_burst(source, target_of(name), WalkPlan((1, 4), name), seed=3, programs=3)
    assert burst.failures == []
    assert burst.tally.programs >= 3
    assert burst.tally.steps > 30
    assert all(PURPOSE[name](geometry) for geometry in burst.geometries)


@pytest.mark.parametrize("name", MACHINES)
def test_one_seed_gives_one_walk_on_every_machine(name: str) -> None:
    def walk() -> object:
        plan = WalkPlan((4,), name)
        return run_burst("walker", target_of(name), plan, seed=5, programs=2).tally

    assert walk() == walk()


# What a law asks of a machine is asked in its programs.


@pytest.mark.parametrize(
    ("name", "law"),
    [("request pool", "rows"), ("memory saver", "saver"), ("composed", "rows")],
)
def test_the_laws_of_a_machine_are_asked_in_its_programs(name: str, law: str) -> None:
    burst = run_burst("walker", target_of(name), WalkPlan((4,), name), seed=0, programs=2)
    assert burst.tally.checks[law] > 0
    other = run_burst("walker", target_of("hybrid"), WalkPlan((4,)), seed=0, programs=1)
    assert other.tally.checks[law] == 0

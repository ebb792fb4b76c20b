"""The walker: deterministic by seed, varied in size, and often where faults live."""

from __future__ import annotations

import random

from kvcore.invariants import Tally, drive
from kvcore.invariants.run import Run
from kvcore.models import Geometry
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets.core import core_target
from kvcore.targets.serving_targets import serving_core_target


def walk(seed: int, geometry: Geometry, length: int = 50) -> Run:
    run = Run(core_target(geometry), period=8)
    drive(run, Walker(random.Random(seed), length))
    return run


def test_one_seed_gives_one_program(geometry: Geometry) -> None:
    assert walk(5, geometry).program == walk(5, geometry).program


def test_other_seeds_give_other_programs(geometry: Geometry) -> None:
    assert walk(5, geometry).program != walk(6, geometry).program


def test_the_right_core_is_clean(geometry: Geometry) -> None:
    for seed in range(10):
        assert walk(seed, geometry).violation is None


def test_plans_mix_pools_smaller_equal_and_larger_than_the_full_one() -> None:
    rng = random.Random(0)
    plan = WalkPlan((1, 4))
    drawn = [plan.draw(rng) for _ in range(200)]
    sizes = {(g.swa_pages > g.full_pages) - (g.swa_pages < g.full_pages) for g, _ in drawn}
    assert sizes == {-1, 0, 1}
    assert {g.need_sort for g, _ in drawn} == {False, True}
    assert {g.page_size for g, _ in drawn} == {1, 4}
    assert len({length for _, length in drawn}) > 1


def test_recoveries_inside_groups_are_common(geometry: Geometry) -> None:
    total = Tally()
    for seed in range(20):
        total.add(walk(seed, geometry).tally)
    # Uniform weights produced none in 600 programs (see the faults page of the documentation).
    assert total.grouped["recover"] >= total.programs / 2


def test_tombstones_are_recovered_and_requests_resumed_in_many_programs() -> None:
    rng, plan, total = random.Random(0), WalkPlan((1, 4), "requests"), Tally()
    locked = unlocked = 0
    for _ in range(20):
        geometry, length = plan.draw(rng)
        target = serving_core_target(geometry)
        total.add(drive(Run(target, period=10**6), Walker(rng, min(length, 80))).tally)
        locked += target.cache.counters.recovered_locked_pages
        unlocked += target.cache.counters.recovered_unlocked_pages
    assert locked >= 5
    assert unlocked >= 5
    assert total.ops["retract_request"] >= 20
    assert total.ops["resume_request"] >= 10
    assert total.grouped["cache_unfinished"] + total.grouped["finish"] >= 40

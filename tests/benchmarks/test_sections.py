"""What each section measures, on few samples. Released engines only where KVCORE_SGLANG_DIRS names
their directories. Leaves out the counts of hot paths: tests/reports/test_benching.py runs them all.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcore.benchmarks import (
    capture,
    control,
    counts,
    groups,
    growth,
    harness,
    operations,
    recorder,
)
from kvcore.benchmarks.contest import Contestant, Sampling
from kvcore.benchmarks.counter import DEVICE, count
from kvcore.benchmarks.engines import Engine, Rival, our_engine
from kvcore.benchmarks.groups import Shape
from kvcore.benchmarks.plan import SMOKE, BenchPlan, Sizes
from kvcore.models import Geometry
from kvcore.strategies.walker import Walker
from kvcore.targets.registry import open_target

WORD = 8

FEW = Sampling(warmups=0, samples=2)
PLAN = BenchPlan(sampling=FEW, sizes=replace(SMOKE, pools=(4_096, 16_384)))

REAL_DIRECTORIES = [
    Path(name) for name in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if name
]


def room(engine: Engine) -> tuple[int, int]:
    return engine.allocator.full_available_size(), engine.allocator.swa_available_size()


def play(contestant: Contestant, rounds: int = 3) -> None:
    for _ in range(rounds):
        contestant.restore(contestant.prepare()())


# Every sample finds the pools as the one before it.


@pytest.mark.parametrize("case", operations.CASES, ids=lambda case: case.name)
def test_operations_leave_the_pools_as_they_were(case: operations.Case) -> None:
    engine = our_engine(case.page_size, operations.POOLS[case.page_size])
    contestant = case.contestant(engine)
    before = room(engine)

    play(contestant)

    assert room(engine) == before


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("recovery", [False, True])
@pytest.mark.parametrize("page_size", [1, 256])
def test_groups_leave_the_pools_as_they_were(page_size: int, recovery: bool, owned: bool) -> None:
    engine = our_engine(page_size, operations.POOLS[page_size], owned=owned)
    before = room(engine)

    play(groups.contestant(engine, Shape(page_size, 4, 2, recovery=recovery)))

    assert room(engine) == before


# Sections.


def test_a_path_whose_state_cannot_be_made_without_waiting_counts_as_waiting() -> None:
    def path(engine: Engine) -> partial[torch.Tensor]:
        row = engine.alloc(16)()
        assert int(row[0]) > 0
        return partial(torch.clone, row)

    counted = counts.count_path(our_engine(1, 64, device=DEVICE), path)

    assert counted.waits
    assert not counted.complete


def test_bytes_of_a_free_are_flat_for_ours_and_grow_with_one_that_copies_the_list() -> None:
    class Copying:
        def __init__(self, size: int) -> None:
            self.pages = torch.arange(size, device=DEVICE)

        def alloc(self, need: int) -> torch.Tensor:
            lent, self.pages = self.pages[:need], self.pages[need:]
            return lent

        def free(self, slots: torch.Tensor) -> None:
            self.pages = torch.cat((self.pages, slots))

    def copying(size: int) -> Engine:
        allocator = Copying(size)
        return replace(our_engine(1, 64, device=DEVICE), allocator=allocator, free=allocator.free)

    ours = [growth.bytes_of_a_free(our_engine(1, size, device=DEVICE)) for size in (100, 10_000)]
    theirs = [growth.bytes_of_a_free(copying(size)) for size in (100, 10_000)]

    assert ours[0] == ours[1] > 0
    assert theirs == [100 * 8, 10_000 * 8]


def test_growth_times_every_single_operation_at_every_size() -> None:
    measured = growth.medians((1,), PLAN)

    assert set(measured) == {"page1.alloc_16", "page1.free_16", "page1.free_swa_16", "floor"}
    assert {len(taken) for taken in measured.values()} == {len(PLAN.sizes.pools)}


def test_over_whole_turns_of_a_pool_a_cycle_writes_a_bounded_number_of_bytes() -> None:
    written, _ = growth.turns(our_engine(1, 500, device=DEVICE), 500)

    assert 0 < written < 500 * WORD / 2


def test_without_the_barrier_the_steady_state_is_the_same() -> None:
    engines = [capture.switched(1, 256, barrier=barrier) for barrier in (True, False)]
    for engine in engines:
        play(capture.steady(engine))

    assert torch.equal(*(engine.allocator.full_to_swa_index_mapping for engine in engines))
    assert room(engines[0]) == room(engines[1])


@pytest.mark.parametrize("page_size", [1, 256])
def test_the_steady_state_meets_the_barrier_and_nothing_is_captured(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []
    monkeypatch.setattr(capture, "CAPTURE", lambda allocator: met.append(allocator))
    engine = capture.switched(page_size, operations.POOLS[page_size], barrier=True)
    call = capture.steady(engine).prepare()
    engine.allocator.free_group_begin()
    engine.allocator.free_group_end()
    met.clear()
    call()
    assert met == [engine.allocator]


def test_without_the_barrier_a_recovery_loses_its_peers() -> None:
    """So the barrier is really gone."""
    peers = []
    for barrier in (True, False):
        engine = capture.switched(1, 256, barrier=barrier)
        kept, incoming = engine.alloc(4)(), engine.alloc(4)()
        engine.begin()
        engine.free_swa(kept)
        engine.recover(kept, incoming)
        engine.end()
        peers.append(engine.allocator.translate_loc_from_full_to_swa(kept).tolist())

    assert all(peers[0])
    assert not any(peers[1])


def test_the_control_is_of_two_of_a_kind_and_comes_with_a_floor() -> None:
    section = control.run(PLAN)

    assert [list(contest.medians) for contest in section.contests] == [
        ["kvcore", "kvcore again"],
        ["kvcore", "kvcore again"],
        ["floor"],
    ]


def test_recordings_are_written_for_the_recorded_only(tmp_path: Path) -> None:
    section = recorder.run(replace(PLAN, scratch=tmp_path))

    assert {tuple(contest.medians) for contest in section.contests} == {
        ("kvcore", "kvcore recorded")
    }
    assert len(list(tmp_path.iterdir())) == len(section.contests)


GEOMETRY = Geometry(1, 16, 12)


def test_walks_are_timed_against_their_ops_on_the_bare_target() -> None:
    for checked in (True, False):
        walked, bare = harness.walk_and_replay(GEOMETRY, 2, seed=0, checked=checked)
        assert walked > bare > 0


def test_an_unchecked_walk_takes_the_same_ops() -> None:
    checked, unchecked = (
        take(open_target(harness.TARGET), GEOMETRY, Walker(random.Random(3), 40))
        for take in (harness.checked_walk, harness.unchecked_walk)
    )
    assert list(checked) == list(unchecked)
    assert len(checked) > 10


def test_the_empty_machine_has_the_rules_of_the_real_one_and_does_nothing() -> None:
    measured = harness.run_empty(GEOMETRY, 2, seed=0)

    assert measured.seconds > 0
    assert measured.steps > 0
    assert measured.closing_steps == 0


def test_walker_and_machine_count_checked_steps() -> None:
    for source in (harness.walk, harness.run_machine):
        measured = source(GEOMETRY, 1, 0)
        assert measured.seconds > 0
        assert measured.steps > 0


def test_what_closes_a_machines_programs_is_told_apart() -> None:
    """An empty machine has nothing to close, so neither time nor steps of it are compared."""
    measured = harness.run_machine(GEOMETRY, 4, 0)
    assert 0 < measured.closing_steps < measured.steps
    assert 0 < measured.closing_seconds < measured.seconds


def test_two_workers_are_not_measured_where_there_is_one_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "available_cpus", lambda: 1)

    assert list(harness.workers_metrics(BenchPlan(sizes=Sizes(jobs=1)))) == []


# Released engines.


@pytest.mark.skipif(not REAL_DIRECTORIES, reason="KVCORE_SGLANG_DIRS names no directory")
def test_every_operation_and_group_runs_on_released_engines() -> None:
    rivals = tuple(Rival(directory) for directory in REAL_DIRECTORIES)
    for rival in rivals:
        for case in operations.CASES:
            engine = rival.engine(case.page_size, operations.POOLS[case.page_size])
            contestant = case.contestant(engine)
            before = room(engine)
            play(contestant)
            assert room(engine) == before, f"{rival.name}: {case.label}"
        for shape in groups.shapes():
            engine = rival.engine(shape.page_size, operations.POOLS[shape.page_size])
            before = room(engine)
            play(groups.contestant(engine, shape), rounds=2)
            assert room(engine) == before, f"{rival.name}: {shape.label}"
        free = count(operations.free(rival.engine(1, 64, DEVICE)).prepare())
        assert free.kernels > 3

"""Memory under a saver, as a target shows it: what the operating system holds is measured, not what
the saver says of it.

Leaves out the savers themselves: tests/kvcore/test_memory_saver.py.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcore import HostMemorySaver
from kvcore.invariants import Run, Skipped, drive
from kvcore.models import Done, Geometry, Raised, Violation, ops
from kvcore.models.memory import pattern
from kvcore.models.ops import Op
from kvcore.strategies.replay import Recorded
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.memory import PAGE, SaverProbe, page_map, resident_bytes, whole_pages
from kvcore.targets.pool import PoolParts

torch.set_num_threads(1)

SAVED = Geometry(4, 8, 6, saver=True)
KINDS = [
    Geometry(4, 8, swa, attention=attention, saver=True)
    for attention in ("mha", "mla", "dsa")
    for swa in (0, 6)
]


def memory(target: AllocatorTarget) -> Any:
    view = target.view(stamps=True).host().memory
    assert view is not None
    return view


def apply(target: AllocatorTarget, *program: Op) -> None:
    for op in program:
        outcome = target.apply(op)
        assert not isinstance(outcome, Raised), outcome


def violation_of(geometry: Geometry, parts: PoolParts, *program: Op) -> Violation:
    """How a program ends on a target of these parts, which must be badly."""
    run = Run(core_target(geometry, parts=CoreParts(pools=parts)))
    violation = drive(run, Recorded(program)).violation
    assert violation is not None
    return violation


# What the operating system says.


def test_ranges_begin_with_a_page_and_are_as_long_wherever_they_are() -> None:
    assert whole_pages([0, PAGE + 1, 3 * PAGE - 1], [PAGE, 1, PAGE + 1]) == (
        (0, PAGE),
        (PAGE, PAGE),
        (2 * PAGE, 2 * PAGE),
    )


def test_memory_is_resident_once_it_was_written() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    rows = torch.frombuffer(memory, dtype=torch.uint8)
    ranges = whole_pages([rows.data_ptr()], [rows.nbytes])
    with page_map() as descriptor:
        assert resident_bytes(ranges, descriptor) == 0
        rows[[0, 2 * PAGE]] = 1
        assert resident_bytes(ranges, descriptor) == 2 * PAGE
        memory.madvise(mmap.MADV_DONTNEED)
        assert resident_bytes(ranges, descriptor) == 0
        assert resident_bytes((), descriptor) == 0


@pytest.mark.parametrize("geometry", KINDS, ids=Geometry.describe)
def test_every_buffer_of_the_pool_is_measured_and_given_back(geometry: Geometry) -> None:
    target = core_target(geometry)
    view = memory(target)
    buffers = {"mha": 2, "mla": 1, "dsa": 2}[geometry.attention] * (2 if geometry.hybrid else 1)
    assert len(view.pool) == buffers
    assert view.pool == view.pool_before
    whole = sum(length for _, length in view.pool)
    assert view.held["kv_cache"].resident == view.held["kv_cache"].said == whole
    assert view.held["weights"].resident == view.held["weights"].said == 0

    apply(target, ops.Pause("kv_cache"))
    assert memory(target).held["kv_cache"].resident == 0
    apply(target, ops.Resume("kv_cache"))
    assert memory(target) == view


def test_pieces_are_measured_under_their_own_tag() -> None:
    target = core_target(SAVED)
    before = memory(target).held["kv_cache"].resident
    apply(target, ops.Reserve(5, "weights", 3), ops.Reserve(2, "kv_cache", 2))
    apply(target, ops.Reserve(4, "weights", 1))
    held = memory(target).held
    assert held["weights"].resident == 4 * PAGE
    assert held["kv_cache"].resident == before + 2 * PAGE
    assert held["weights"].values == (pattern(4), pattern(5))
    assert held["kv_cache"].values == (pattern(2),)

    apply(target, ops.Pause("weights"))
    held = memory(target).held
    assert (held["weights"].resident, held["weights"].values) == (0, ())
    assert held["kv_cache"].values == (pattern(2),)
    apply(target, ops.Resume("weights"))
    assert memory(target).held["weights"].values == (0, 0)
    apply(target, ops.Drop(4), ops.Drop(2))
    held = memory(target).held
    assert held["weights"].resident == 3 * PAGE
    assert held["kv_cache"].resident == before


def test_a_closed_target_holds_no_piece() -> None:
    target = core_target(SAVED)
    apply(target, ops.Reserve(1, "weights", 3))
    target.close()
    assert memory(target).held["weights"].resident == 0


def test_memory_is_shown_only_with_the_contents() -> None:
    target = core_target(SAVED)
    assert target.view(stamps=False).host().memory is None
    assert core_target(Geometry(4, 8, 6)).view(stamps=True).host().memory is None


def test_what_a_pause_erased_reads_zero_and_new_tokens_are_stamped_again() -> None:
    target = core_target(SAVED)
    apply(target, ops.Alloc(1, 1), ops.Pause("kv_cache"), ops.Alloc(2, 1))
    assert target.view(stamps=True).host().stamps == ()
    apply(target, ops.Resume("kv_cache"))
    stamps = target.view(stamps=True).host().stamps
    assert len(stamps) == 4
    assert not any(any(rows) for rows in stamps)
    apply(target, ops.Extend(((3, 1),)))
    assert sorted(map(sum, target.view(stamps=True).host().stamps)) == [-9, -9, 9, 9]


@pytest.mark.parametrize("op", [ops.Reserve(1, "kv_cache", 1), ops.Retract(1, 1)], ids=str)
def test_calls_on_a_paused_pool_are_answered_by_its_error(op: Op) -> None:
    target = core_target(SAVED)
    apply(target, ops.Alloc(1, 1), ops.Pause("kv_cache"))
    answer = target.apply(op)
    assert isinstance(answer, Raised)
    assert answer.kind == "PausedPoolError"


@pytest.mark.parametrize("geometry", KINDS, ids=Geometry.describe)
def test_pauses_between_other_ops_keep_every_law(geometry: Geometry) -> None:
    run = Run(core_target(geometry))
    program = (
        *(ops.Alloc(1, 2), ops.Reserve(1, "weights", 2), ops.GroupBegin(), ops.Free(1, 0, 1)),
        *(ops.Pause("kv_cache"), ops.Pause("kv_cache"), ops.Alloc(2, 1), ops.Pause("weights")),
        *(ops.Decode((1,)), ops.Resume("kv_cache"), ops.Resume("kv_cache"), ops.GroupEnd()),
        *(ops.Resume("weights"), ops.Retract(1, 1), ops.Restore(1, 3), ops.Decode((3,))),
    )
    for op in program:
        assert not isinstance(run.step(op), Skipped)
    run.finish()


def test_a_target_without_pauses_asks_its_saver_for_nothing_else() -> None:
    saver = HostMemorySaver()
    probe = SaverProbe(saver, [], [])
    assert not probe.paused("kv_cache")
    probe.pause("weights")
    assert probe.paused("weights")
    probe.resume("weights")
    assert not probe.paused("weights")
    assert probe.view([], []).held["weights"].values == ()


# Savers that go wrong are seen, since it is not they who are asked.


PAUSE = (ops.Alloc(1, 1), ops.Pause("kv_cache"))


def test_a_saver_that_only_says_that_it_gave_memory_back_is_seen() -> None:
    class Boasting(HostMemorySaver):
        def __init__(self) -> None:
            super().__init__()
            self.said: set[str] = set()

        def pause(self, tag: str) -> None:
            self.said.add(tag)

        def resume(self, tag: str) -> None:
            self.said.discard(tag)

        def is_paused(self, tag: str) -> bool:
            return tag in self.said

        def resident_bytes(self, tag: str) -> int:
            return 0 if self.is_paused(tag) else super().resident_bytes(tag)

    violation = violation_of(SAVED, PoolParts(saver=Boasting), *PAUSE)
    assert violation.signature == ("saver", "pause")
    assert len(violation.clauses) == 1


def test_a_saver_that_gives_back_another_tag_too_is_seen() -> None:
    class Sweeping(HostMemorySaver):
        def pause(self, tag: str) -> None:
            for other in ("kv_cache", "weights"):
                super().pause(other)

    violation = violation_of(
        SAVED, PoolParts(saver=Sweeping), ops.Reserve(1, "weights", 2), ops.Pause("kv_cache")
    )
    assert violation.signature == ("saver", "pause")
    assert any("of weights" in clause.expected for clause in violation.clauses)


def test_a_saver_that_keeps_what_was_written_is_seen() -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Keeping(HostMemorySaver):
        def zeros(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            rows = super().zeros(tag, shape, dtype)
            kept.append((rows, torch.empty_like(rows)))
            return rows

        def pause(self, tag: str) -> None:
            for rows, copy in kept:
                copy.copy_(rows)
            super().pause(tag)

        def resume(self, tag: str) -> None:
            super().resume(tag)
            for rows, copy in kept:
                rows.copy_(copy)

    violation = violation_of(SAVED, PoolParts(saver=Keeping), *PAUSE, ops.Resume("kv_cache"))
    assert {"saver", "stamps"} <= violation.laws


def test_a_saver_that_takes_memory_from_elsewhere_is_seen() -> None:
    class Elsewhere(HostMemorySaver):
        def zeros(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(tuple(shape), dtype=dtype).zero_()

    violation = violation_of(SAVED, PoolParts(saver=Elsewhere), ops.Pause("kv_cache"))
    assert violation.signature == ("saver", "pause")
    (clause,) = violation.clauses
    assert "kv_cache resident, which is paused" in clause.expected


def test_a_target_pauses_what_its_contract_names() -> None:
    target = core_target(SAVED)
    assert {"reserve", "drop", "pause", "resume"} <= target.contract.ops
    assert target.apply(ops.Pause("weights")) == Done()

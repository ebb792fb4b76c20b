"""Shrinking: minimal, the same law at the same op, the same again, cheap on long programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import ReqToTokenPool
from kvcore.invariants import Run, Verdict
from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.reports.trace_files import read_trace
from kvcore.strategies.replay import replay
from kvcore.strategies.shrink import NotReproduced, Shrinker, Shrunk, shrink, shrink_played
from kvcore.strategies.sources import run_burst
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.faults import FAULTS
from kvcore.targets.registry import open_target

LONGEST = 8
LONGEST_OF_REQUESTS = 10
TRACES = Path(__file__).parents[1] / "traces"


def find(fault: str, seed: int = 0) -> Shrunk:
    target = f"fault:{fault}"
    plan = WalkPlan(FAULTS[fault].page_sizes, FAULTS[fault].machine)
    shown = FAULTS[fault].is_shown_by
    burst = run_burst("walker", open_target(target), plan, seed=seed, programs=300, stop_at=shown)
    _, geometry, program, violation = next(one for one in burst.failures if shown(one[3]))
    return shrink(target, geometry, program, violation)


OF_REQUESTS = [name for name, fault in FAULTS.items() if fault.machine == "requests"]
SOON_SHRUNK = ("tombstone-leaf", "cursor-in-other-unit")
"""Of those: `kvcore faults` shrinks them all."""


@pytest.mark.parametrize(
    "fault", [name for name in FAULTS if name in SOON_SHRUNK or name not in OF_REQUESTS]
)
def test_every_fault_shrinks_to_a_short_minimal_program_again_and_again(fault: str) -> None:
    shrunk = find(fault)
    assert len(shrunk.program) <= LONGEST
    assert FAULTS[fault].is_shown_by(shrunk.violation)
    factory = open_target(f"fault:{fault}")
    for cut in range(len(shrunk.program)):
        rest = shrunk.program[:cut] + shrunk.program[cut + 1 :]
        found = replay(factory, shrunk.geometry, rest).violation
        comes_back = found is not None and found.signature == shrunk.violation.signature
        assert not comes_back or found.op_index >= len(shrunk.program) - 1
    again = shrink(f"fault:{fault}", shrunk.geometry, shrunk.program, shrunk.violation)
    assert again.program == shrunk.program


@pytest.mark.parametrize("fault", OF_REQUESTS)
def test_recorded_programs_of_whole_requests_are_as_short_as_they_get(fault: str) -> None:
    trace = read_trace(TRACES / f"{fault}.jsonl")
    assert trace.violation is not None
    assert len(trace.ops) <= LONGEST_OF_REQUESTS
    again = shrink(f"fault:{fault}", trace.header.geometry, trace.ops, trace.violation)
    assert again.program == trace.ops
    assert again.geometry == trace.header.geometry


def test_a_program_that_passes_cannot_be_shrunk(geometry: Geometry) -> None:
    shrinker = Shrinker(lambda g, p: replay(core_target, g, p), ("L3", "recover"))
    with pytest.raises(NotReproduced, match="L3"):
        shrinker.shrink(geometry, [ops.Alloc(1, 1)])


KEPT, INCOMING = 10**6, 10**6 + 1
"""Names of the two rows of sglang#36081, out of the walker's way."""


REMAPPING = (ops.Recover, ops.LoadBackSwa)
"""What gives a full slot a new peer: in the group of a free it would show the fault early."""


def long_program(geometry: Geometry, length: int) -> tuple[Op, ...]:
    """A clean recorded program of ``length`` ops and its closing frees, with those of sglang#36081
    spread out over it: two rows early on, and in one long group the free and the recovery."""
    # That it is clean is for the target of the fault to show, up to where that breaks.
    run = Run(core_target(geometry), period=10**6, every=10**6)
    walker = Walker(random.Random(1), 10**9)
    due: list[tuple[float, Op]] = [
        (0.1, ops.Alloc(KEPT, 1)),
        (0.3, ops.Alloc(INCOMING, 1)),
        (0.5, ops.GroupBegin()),
        (0.6, ops.FreeSwa(KEPT)),
        (0.9, ops.Recover(KEPT, INCOMING, locked=True)),
    ]
    while len(run.program) < length:
        model = run.model
        if due and len(run.program) >= due[0][0] * length:
            op = due[0][1]
            if model.allows(op) and not model.must_refuse(op):
                due.pop(0)
                run.step(op)
                continue
        proposed = walker.next_op(model)
        in_group = 0 < len(due) < 3 and isinstance(proposed, ops.GroupEnd)
        after = not due and isinstance(proposed, ops.GroupEnd)
        if proposed is None or in_group or after or isinstance(proposed, ops.Clear):
            proposed = ops.Hostile("alloc_negative")
        if _named(proposed) & {KEPT, INCOMING} or isinstance(proposed, REMAPPING):
            proposed = ops.Hostile("alloc_negative")
        run.step(proposed)
    assert not due
    run.finish()
    return tuple(run.program)


def _named(op: Op) -> set[int]:
    match op:
        case ops.Extend():
            return {seq for seq, _ in op.parts}
        case ops.Decode():
            return set(op.seqs)
        case ops.Recover():
            return {op.kept, op.incoming}
        case ops.Alloc() | ops.SwaTail() | ops.Free() | ops.FreeSwa() | ops.FreeFull():
            return {op.seq}
        case ops.LoadBack() | ops.LoadBackSwa() | ops.Retract() | ops.Restore():
            return {op.seq}
        case _:
            return set()


@pytest.mark.parametrize(
    ("length", "page_size"),
    [
        (100, 4),
        pytest.param(5000, 1, marks=pytest.mark.campaign),
        pytest.param(5000, 4, marks=pytest.mark.campaign),
    ],
)
def test_a_long_program_shrinks_in_two_hundred_executions(length: int, page_size: int) -> None:
    geometry = Geometry(page_size=page_size, full_pages=64, swa_pages=64)
    program = long_program(geometry, length)

    def play(smaller: Geometry, part: Sequence[Op]) -> Verdict:
        return replay(open_target("fault:deferred-peer-lookup"), smaller, part, period=10**6)

    found = play(geometry, program).violation
    assert found is not None
    assert found.law == "L3"
    assert found.op_index > 0.8 * len(program)
    shrunk = Shrinker(play, found.signature).shrink(geometry, program)
    assert len(program) >= length
    assert len(shrunk.program) <= 6
    assert shrunk.executions <= 200


class ForgettingRows(ReqToTokenPool):
    """Writes down the slots of the first request alone."""

    first: int | None = None

    def write(self, indices: Any, values: torch.Tensor) -> None:
        self.first = self.first or indices[0]
        if indices[0] == self.first:
            super().write(indices, values)


@pytest.mark.parametrize("ballast", [3, 37])
def test_a_law_that_is_looked_at_now_and_then_shrinks_at_any_length(ballast: int) -> None:
    def forgetful(geometry: Geometry) -> AllocatorTarget:
        return core_target(geometry, parts=CoreParts(requests=ForgettingRows))

    geometry = Geometry(page_size=4, full_pages=16, swa_pages=16, requests=4)
    program = (
        ops.Alloc(1, 1),
        *(ops.Hostile("alloc_negative") for _ in range(ballast)),
        ops.Alloc(2, 1),
    )
    found = replay(forgetful, geometry, program).violation
    assert found is not None
    assert found.signature == ("rows", "alloc")
    shrunk = shrink_played(partial(replay, forgetful), geometry, program, found)
    assert shrunk.violation.signature == found.signature
    assert shrunk.program == (ops.Alloc(1, 1), ops.Alloc(2, 1))

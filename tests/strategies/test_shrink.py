"""Shrinking: minimal, the same law at the same op, the same again, cheap on long programs."""

from __future__ import annotations

import random

import pytest

from kvcore.invariants import Run
from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.strategies.isolation import run_program
from kvcore.strategies.replay import replay
from kvcore.strategies.shrink import NotReproduced, Shrinker, Shrunk, shrink
from kvcore.strategies.sources import run_burst
from kvcore.strategies.walker import Walker, WalkPlan
from kvcore.targets.core import core_target
from kvcore.targets.faults import FAULTS
from kvcore.targets.registry import open_target

LONGEST = 8
LONGEST_AT_EXHAUSTION = 15


def find(fault: str, seed: int = 0) -> Shrunk:
    target = f"fault:{fault}"
    plan = WalkPlan(FAULTS[fault].page_sizes)
    burst = run_burst(
        "walker", open_target(target), plan, seed=seed, programs=300, stop_at_first=True
    )
    _, geometry, program, violation = burst.failures[0]
    return shrink(target, geometry, program, violation)


@pytest.mark.parametrize("fault", FAULTS)
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


def test_a_program_that_passes_cannot_be_shrunk(geometry: Geometry) -> None:
    shrinker = Shrinker(lambda g, p: replay(core_target, g, p), ("L3", "recover"))
    with pytest.raises(NotReproduced, match="L3"):
        shrinker.shrink(geometry, [ops.Alloc(1, 1)])


def long_program(geometry: Geometry, length: int) -> tuple[Op, ...]:
    """A clean recorded program with the four ops of sglang#36081 spread out over it."""
    run = Run(core_target(geometry), period=10**6)
    walker = Walker(random.Random(1), 10**6)
    relevant = {
        length // 10: ops.Alloc(10**6, 1),
        length * 3 // 10: ops.Alloc(10**6 + 1, 1),
        length * 6 // 10: ops.FreeSwa(10**6),
        length * 9 // 10: ops.Recover(10**6, 10**6 + 1, locked=True),
    }
    protected = {10**6, 10**6 + 1}
    while len(run.program) < length:
        at = len(run.program)
        op: Op | None
        if at in relevant:
            op = relevant[at]
        elif at == length * 5 // 10 and not run.model.group_open:
            op = ops.GroupBegin()
        else:
            op = walker.next_op(run.model)
            if op is None or _touches(op, protected) or _closes(op, at, length):
                op = ops.Hostile("end_unopened") if not run.model.group_open else ops.GroupEnd()
                if run.model.group_open and _closes(op, at, length):
                    op = ops.Hostile("begin_nested")
        if not run.model.allows(op):
            op = ops.Hostile("alloc_negative")
        run.step(op)
    return tuple(run.program)


def _touches(op: Op, names: set[int]) -> bool:
    """Whether the op could take a protected row away, or clear everything."""
    if isinstance(op, ops.Clear | ops.Extend | ops.Decode | ops.SwaTail | ops.LoadBack | ops.Alloc):
        # New names follow the highest one, which the protected rows hold from early on.
        return isinstance(op, ops.Clear) or _named(op) & names != set()
    return bool(_named(op) & names)


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


def _closes(op: Op, at: int, length: int) -> bool:
    """Whether the op would open or close a group between the relevant ops."""
    inside = length * 5 // 10 <= at <= length * 9 // 10
    return inside and isinstance(op, ops.GroupEnd | ops.GroupBegin)


@pytest.mark.parametrize("page_size", [1, 4])
def test_five_thousand_ops_shrink_in_two_hundred_executions(page_size: int) -> None:
    geometry = Geometry(page_size=page_size, full_pages=64, swa_pages=64)
    program = long_program(geometry, 5000)
    target = "fault:deferred-peer-lookup"
    found = run_program(target, geometry, program).violation
    assert found is not None
    relevant = [op for op in program if _named(op) & {10**6, 10**6 + 1}]
    assert len(relevant) == 4
    shrunk = Shrinker(
        lambda g, p: replay(open_target(target), g, p, period=10**6), found.signature
    ).shrink(geometry, program)
    assert len(shrunk.program) <= 6
    assert shrunk.executions <= 200

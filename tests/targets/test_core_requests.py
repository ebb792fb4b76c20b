"""kvcore's own target over a request pool: rows come and go with sequences, the table holds their
slots, and retraction goes through the request.

Leaves out the pool itself (tests/kvcore/test_requests.py, tests/kvcore/test_request_retraction.py).
"""

from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.invariants import Run, Skipped
from kvcore.models import Done, Geometry, Lent, Raised, Refused, ops
from kvcore.models.ops import Op
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget

torch.set_num_threads(1)

REQUESTS = Geometry(4, 8, 6, requests=2)
PURE_REQUESTS = Geometry(4, 8, pure_swa=True, requests=2)


def lent(target: AllocatorTarget, op: Op) -> Lent:
    outcome = target.apply(op)
    assert isinstance(outcome, Lent), outcome
    return outcome


def host(target: AllocatorTarget) -> Any:
    return target.view(stamps=True).host()


def keeps_every_law(geometry: Geometry, *program: Op, **options: Any) -> Run:
    """Run a program whose every op must be allowed, to the end."""
    run = Run(core_target(geometry, **options))
    for op in program:
        outcome = run.step(op)
        assert not isinstance(outcome, Skipped), outcome
    run.finish()
    return run


def table(target: AllocatorTarget) -> list[list[int]]:
    """The request pool's table, row by row."""
    flat = host(target).request_rows
    rows = target.geometry.requests + 1
    width = len(flat) // rows
    return [flat[row * width : (row + 1) * width] for row in range(rows)]


def test_a_new_sequence_answers_the_row_that_it_took() -> None:
    target = core_target(REQUESTS)
    first = lent(target, ops.Alloc(1, 1)).requests
    second = lent(target, ops.Extend(((1, 2), (2, 3)))).requests
    assert len(first) == len(second) == 1
    assert {*first, *second} == {1, 2}
    assert lent(target, ops.Decode((1, 2))).requests == ()
    assert host(target).request_free == []
    assert host(target).answers.requests_available == 0
    assert target.view(stamps=False).host().request_rows == []


def test_the_table_holds_the_slots_of_every_live_row() -> None:
    target = core_target(REQUESTS)
    rows: dict[int, list[int]] = {}
    first = lent(target, ops.Extend(((1, 6), (2, 2))))
    rows = {1: [*first.slots[:6]], 2: [*first.slots[6:]]}
    rows[2] += lent(target, ops.Decode((2,))).slots
    target.apply(ops.Free(1, 0, 1))
    del rows[1][:4]
    for seq, request in zip((1, 2), first.requests, strict=True):
        assert table(target)[request][: len(rows[seq])] == rows[seq]
    moved = lent(target, ops.Relocate(2)).slots
    assert table(target)[first.requests[1]][:3] == list(moved)


def test_a_recovery_is_written_down_in_both_rows() -> None:
    keeps_every_law(
        REQUESTS,
        *(ops.Alloc(1, 2), ops.Alloc(2, 2), ops.FreeSwa(1), ops.Recover(1, 2, False, 1, 1, 0)),
        *(ops.Recover(1, 2, True, 1, 0, 0), ops.Alloc(3, 1)),
    )


@pytest.mark.parametrize(
    "op", [ops.Free(1), ops.Retract(1, 1), ops.Clear()], ids=lambda op: op.kind
)
def test_a_row_is_free_when_its_sequence_ends(op: Op) -> None:
    target = core_target(REQUESTS)
    row = lent(target, ops.Alloc(1, 1)).requests[0]
    assert row not in host(target).request_free
    assert target.apply(op) == Done()
    assert sorted(host(target).request_free) == [1, 2]


def test_without_a_free_row_nothing_is_lent() -> None:
    target = core_target(REQUESTS)
    lent(target, ops.Extend(((1, 1), (2, 1))))
    before = host(target)
    for op in (ops.Alloc(3, 1), ops.Extend(((1, 1), (3, 1))), ops.SwaTail(3, 4, 4)):
        assert target.apply(op) == Refused()
        assert host(target) == before


@pytest.mark.parametrize(
    "op", [ops.Alloc(3, 9), ops.LoadBack(3, 9, 0), ops.SwaTail(3, 36, 0)], ids=lambda op: op.kind
)
def test_a_refused_call_gives_its_row_back(op: Op) -> None:
    target = core_target(REQUESTS)
    lent(target, ops.Alloc(1, 1))
    before = host(target)
    assert target.apply(op) == Refused()
    assert host(target) == before


def test_a_call_that_raises_gives_its_row_back() -> None:
    class Raising(SWATokenToKVPoolAllocator):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            raise ValueError("no")

    target = core_target(REQUESTS, parts=CoreParts(hybrid=Raising))
    assert isinstance(target.apply(ops.Alloc(1, 1)), Raised)
    assert sorted(host(target).request_free) == [1, 2]


def test_a_retraction_goes_through_the_request_and_comes_back_with_its_window() -> None:
    target = core_target(REQUESTS)
    lent(target, ops.Alloc(1, 3))
    target.apply(ops.FreeSwa(1, 0, 2))
    assert target.apply(ops.Retract(1, 1)) == Done()
    lent(target, ops.Alloc(2, 2))
    answer = lent(target, ops.Restore(1, 3))
    assert [peer > 0 for peer in answer.peers] == [False] * 8 + [True] * 4
    assert table(target)[answer.requests[0]][:12] == list(answer.slots)
    view = target.view(stamps=True)
    full_k, _, swa_k, _ = view.host().stamps
    assert [full_k[slot] for slot in answer.slots] == list(range(1, 13))
    assert [swa_k[peer] for peer in answer.peers[8:]] == [9, 10, 11, 12]


def test_a_refused_restore_can_be_asked_again() -> None:
    target = core_target(REQUESTS)
    lent(target, ops.Alloc(1, 2))
    target.apply(ops.Retract(1, 1))
    lent(target, ops.Alloc(2, 5))
    before = host(target)
    assert target.apply(ops.Restore(1, 3)) == Refused()
    assert host(target) == before
    lent(target, ops.Extend(((4, 1),)))
    target.apply(ops.Free(2))
    assert len(lent(target, ops.Restore(1, 3)).slots) == 8
    assert host(target).request_free == []


def test_a_restored_request_does_without_what_its_window_left_behind() -> None:
    target = core_target(PURE_REQUESTS)
    lent(target, ops.Extend(((1, 10),)))
    target.apply(ops.FreeSwa(1, 0, 1))
    target.apply(ops.Retract(1, 1))
    assert len(host(target).full_free) == 8
    answer = lent(target, ops.Restore(1, 2))
    assert len(answer.slots) == 6
    assert len(host(target).full_free) == 6
    assert table(target)[answer.requests[0]][4:10] == list(answer.slots)
    assert target.apply(ops.FreeFull(2, 0, 1)) == Done()
    assert len(host(target).full_free) == 6


@pytest.mark.parametrize("geometry", [REQUESTS, PURE_REQUESTS], ids=Geometry.describe)
@pytest.mark.parametrize("moved", [1, 3])
def test_retraction_through_requests_keeps_every_law(geometry: Geometry, moved: int) -> None:
    keeps_every_law(
        geometry,
        *(ops.Alloc(1, 3), ops.Decode((1,)), ops.FreeSwa(1, 0, moved), ops.Retract(1, 1)),
        *(ops.Alloc(2, 2), ops.Restore(1, 3), ops.Decode((3,)), ops.Retract(3, 2)),
        *(ops.Restore(2, 4), ops.Free(2)),
    )


def test_what_a_retracted_request_gave_up_is_known() -> None:
    keeps_every_law(REQUESTS, ops.Alloc(1, 2), ops.Retract(1, 1), ops.Hostile("free_again", 1))


def test_hisparse_pools_have_requests_without_retraction() -> None:
    for geometry in (
        Geometry(4, 8, device_pages=4, requests=2),
        Geometry(16, 8, 6, device_pages=6, compress=4, requests=2),
    ):
        run = keeps_every_law(geometry, ops.Alloc(1, 2), ops.DeviceBuffer(1, 1, 2), ops.Free(1))
        assert "retract" not in run.target.contract.ops

"""Simpler ops and smaller pools, as a shrink tries them: each says less, and no chain of them comes
back to where it began.

Leaves out which of them fail too: test_shrink.py.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

import msgspec
import pytest

from kvcore.models import Geometry, ops
from kvcore.models.ops import OP_KINDS, AnyOp, Op
from kvcore.strategies.simpler import (
    merged,
    names,
    pages_of,
    parts_dropped,
    renumber,
    shorter,
    simpler,
)
from kvcore.strategies.smaller import PLAINER, less, resized

SIZE = 4
KNOWN = (5, 3, 1)
"""Rows started before, latest first."""

LONG: list[Op] = [
    ops.Alloc(1, 5, overwrite=True),
    ops.Extend(((1, 9), (2, 4)), overwrite=True),
    ops.ExtendLogical(((1, 9), (2, 4))),
    ops.Decode((1, 2, 3), overwrite=True),
    ops.SwaTail(1, 11, 5, 2),
    ops.Free(1, 1, 4, "segments", overwrite=True),
    ops.FreeSwa(1, 2, None, "sparse"),
    ops.FreeFull(1, 1, 2),
    ops.FreeDevice(1, 1, 3, "sparse"),
    ops.Recover(1, 2, True, 3, 2, 1),
    ops.LoadBack(1, 5, 3),
    ops.LoadBackSwa(1, 2, 5),
    ops.Restore(1, 2, tail=4),
    ops.DeviceBuffer(1, 1, 6),
    ops.Reserve(1, "weights", 7),
    ops.Hostile("recover_live", 1, 3),
]
PLAIN: list[Op] = [
    ops.Alloc(1, 1),
    ops.Extend(((1, 1),)),
    ops.ExtendLogical(((1, 1),)),
    ops.Decode((1,)),
    ops.Free(1),
    ops.FreeSwa(1),
    ops.FreeFull(1),
    ops.FreeDevice(1),
    ops.Recover(1, 2, True),
    ops.LoadBackSwa(1),
    ops.Retract(1, 1),
    ops.Relocate(1),
    ops.DeviceBuffer(1, 1, 1),
    ops.FreeBuffer(1),
    ops.Reserve(1, "weights", 1),
    ops.Drop(1),
    ops.Pause("kv_cache"),
    ops.Resume("weights"),
    ops.GroupBegin(),
    ops.GroupEnd(),
    ops.Clear(),
    ops.Hostile("alloc_negative"),
]


def test_every_kind_of_op_is_tried() -> None:
    assert {op.kind for op in LONG + PLAIN} == set(OP_KINDS)


@pytest.mark.parametrize("op", LONG, ids=str)
def test_no_chain_of_simpler_ops_comes_back_to_where_it_began(op: Op) -> None:
    chains: dict[Op, set[Op]] = {}
    waiting = [op]
    while waiting:
        each = waiting.pop()
        if each not in chains:
            chains[each] = set(simpler(each, SIZE, KNOWN))
            waiting += chains[each]
    assert len(chains) > 1
    # A cycle, an op that is simpler than itself among them, is an error of the sorter.
    assert set(TopologicalSorter(chains).static_order()) == set(chains)
    for variant in chains:
        assert msgspec.json.decode(msgspec.json.encode(variant), type=AnyOp) == variant


@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_the_plainest_ops_have_nothing_simpler(op: Op) -> None:
    assert list(simpler(op, SIZE, KNOWN)) == []


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (ops.SwaTail(1, 11, 5, 2), ops.SwaTail(1, 11, 7)),
        (ops.SwaTail(1, 11, 7), ops.Extend(((1, 11),))),
        (ops.LoadBack(1, 5, 3), ops.Extend(((1, 20),))),
        (ops.Restore(1, 2, tail=4), ops.Restore(1, 2)),
        (ops.Restore(1, 2), ops.Extend(((2, 1),))),
        (ops.Recover(1, 2, True, 3, 2, 1), ops.Recover(1, 2, True, 1, 2, 1)),
        (ops.Recover(1, 2, True, 1, 2, 1), ops.Recover(1, 2, True, 1, 0, 1)),
        (ops.Recover(1, 2, True, 1, 0, 1), ops.Recover(1, 2, True, 1, 0, 0)),
        (ops.LoadBackSwa(1, 2, 5), ops.LoadBackSwa(1, 0, 3)),
        (ops.LoadBackSwa(1, 2), ops.LoadBackSwa(1)),
        (ops.LoadBackSwa(1, 0, 3), ops.LoadBackSwa(1, 0, 1)),
        (ops.FreeDevice(1, 1, 3, "sparse"), ops.FreeDevice(1, 1, 3)),
        (ops.FreeDevice(1, 1, 3), ops.FreeDevice(1)),
        (ops.DeviceBuffer(1, 1, 6), ops.DeviceBuffer(1, 1, 1)),
        (ops.Reserve(1, "weights", 7), ops.Reserve(1, "weights", 1)),
        (ops.ExtendLogical(((1, 9), (2, 4))), ops.ExtendLogical(((2, 4),))),
        (ops.ExtendLogical(((1, 9),)), ops.ExtendLogical(((1, 1),))),
        (ops.Hostile("recover_live", 1, 3), ops.Hostile("recover_live")),
        (ops.Hostile("recover_live", 1, 3), ops.Hostile("recover_live", 5, 3)),
        (ops.Decode((1, 2)), ops.Decode((2,))),
        (ops.Alloc(1, 1, overwrite=True), ops.Alloc(1, 1)),
        (ops.Free(1, overwrite=True), ops.Free(1)),
    ],
    ids=str,
)
def test_an_op_can_say_less(op: Op, variant: Op) -> None:
    assert variant in list(simpler(op, SIZE, KNOWN))


# Whole programs.


def test_the_rows_of_a_program_are_named_latest_first() -> None:
    program = (
        *(ops.Alloc(1, 1), ops.Extend(((4, 1), (1, 2))), ops.ExtendLogical(((7, 1),))),
        *(ops.SwaTail(3, 4, 4), ops.LoadBack(6, 1, 1), ops.Restore(1, 2), ops.Free(7)),
    )
    assert names(program) == [2, 6, 3, 7, 1, 4]


def test_an_extend_takes_in_a_later_one_of_its_row_or_a_decode() -> None:
    other = ops.Alloc(2, 1)
    later = (ops.Extend(((1, 3),)), other, ops.Decode((1,)), ops.Extend(((1, 2),)))
    found = list(merged(later, 0))
    assert (ops.Extend(((1, 4),)), other, ops.Extend(((1, 2),))) in found
    assert (other, ops.Extend(((1, 4),)), ops.Extend(((1, 2),))) in found
    assert (ops.Extend(((1, 5),)), other, ops.Decode((1,))) in found
    assert list(merged(later, 1)) == []
    assert list(merged((ops.Extend(((1, 1), (2, 1))), ops.Decode((1,))), 0)) == []


@pytest.mark.parametrize(
    ("op", "pages"),
    [
        (ops.Alloc(1, 3), (3, 3)),
        (ops.Extend(((1, 5), (2, 4))), (3, 3)),
        (ops.SwaTail(1, 11, 5), (3, 2)),
        (ops.LoadBack(1, 3, 2), (3, 2)),
        (ops.Decode((1,)), (0, 0)),
    ],
    ids=str,
)
def test_a_lending_op_takes_so_many_pages_for_new_rows(op: Op, pages: tuple[int, int]) -> None:
    assert pages_of(op, Geometry(SIZE, 8, 8)) == pages


@pytest.mark.parametrize(
    ("op", "less_of_it"),
    [
        (ops.Alloc(1, 3), ops.Alloc(1, 2)),
        (ops.Extend(((1, 5),)), ops.Extend(((1, 1),))),
        (ops.Extend(((1, 4),)), None),
        (ops.Extend(((1, 5), (2, 5))), None),
        (ops.SwaTail(1, 11, 5, 1), ops.SwaTail(1, 7, 1, 1)),
        (ops.SwaTail(1, 11, 4), None),
        (ops.LoadBack(1, 3, 2), None),
    ],
    ids=str,
)
def test_a_row_can_be_shorter_by_pages(op: Op, less_of_it: Op | None) -> None:
    assert shorter(op, 1, SIZE) == less_of_it


def test_a_batch_can_have_a_part_less() -> None:
    batch = ops.Extend(((1, 5), (2, 4)))
    dropped = list(parts_dropped(batch, Geometry(SIZE, 8)))
    assert dropped == [(ops.Extend(((2, 4),)), 2), (ops.Extend(((1, 5),)), 1)]
    assert list(parts_dropped(ops.Extend(((1, 5),)), Geometry(SIZE, 8))) == []
    assert list(parts_dropped(ops.Alloc(1, 5), Geometry(SIZE, 8))) == []


def test_names_are_numbered_from_one_in_order_of_appearance() -> None:
    program = (
        *(ops.Alloc(31, 1), ops.Extend(((12, 4), (31, 4))), ops.ExtendLogical(((25, 1),))),
        *(ops.Decode((25, 12)), ops.SwaTail(44, 4, 4), ops.LoadBack(40, 1, 1)),
        *(ops.LoadBackSwa(40), ops.Free(12), ops.FreeSwa(31), ops.FreeFull(31, 0, 1)),
        *(ops.FreeDevice(25), ops.DeviceBuffer(25, 9, 1), ops.FreeBuffer(9)),
        *(ops.Recover(31, 44, True), ops.Relocate(40), ops.Retract(40, 8), ops.Restore(8, 50)),
        *(ops.Reserve(7, "weights", 1), ops.Drop(7), ops.Pause("weights"), ops.GroupBegin()),
        *(ops.Hostile("recover_live", 31, 44), ops.Hostile("restore_short", 8)),
        ops.Hostile("alloc_negative"),
    )
    assert renumber(program) == (
        *(ops.Alloc(1, 1), ops.Extend(((2, 4), (1, 4))), ops.ExtendLogical(((3, 1),))),
        *(ops.Decode((3, 2)), ops.SwaTail(4, 4, 4), ops.LoadBack(5, 1, 1)),
        *(ops.LoadBackSwa(5), ops.Free(2), ops.FreeSwa(1), ops.FreeFull(1, 0, 1)),
        *(ops.FreeDevice(3), ops.DeviceBuffer(3, 1, 1), ops.FreeBuffer(1)),
        *(ops.Recover(1, 4, True), ops.Relocate(5), ops.Retract(5, 1), ops.Restore(1, 6)),
        *(ops.Reserve(1, "weights", 1), ops.Drop(1), ops.Pause("weights"), ops.GroupBegin()),
        *(ops.Hostile("recover_live", 1, 4), ops.Hostile("restore_short", 1)),
        ops.Hostile("alloc_negative"),
    )
    assert renumber(renumber(program)) == renumber(program)


# Pools.


FULL_OF_EVERYTHING = Geometry(4, 8, 6, True, attention="dsa", requests=4, saver=True, context=40)


def test_pools_get_plainer_one_thing_at_a_time() -> None:
    found = [resized(FULL_OF_EVERYTHING, **change) for change in PLAINER]
    assert all(geometry is not None for geometry in found)
    assert len(set(found)) == len(PLAINER)
    plain = Geometry(4, 8, 6)
    assert [resized(plain, **change) for change in PLAINER] == [None] * len(PLAINER)


@pytest.mark.parametrize(
    ("geometry", "changes", "smaller"),
    [
        (Geometry(4, 8, 6), {"full_pages": 3}, Geometry(4, 3, 6)),
        (Geometry(4, 8, 6), {"full_pages": 9}, None),
        (Geometry(4, 8, 6), {"full_pages": 8}, None),
        (Geometry(4, 8, 6), {"swa_pages": 7}, None),
        (Geometry(4, 8, requests=4), {"requests": 2}, Geometry(4, 8, requests=2)),
        (Geometry(4, 8, attention="mla"), {"attention": "dsa"}, None),
        (Geometry(4, 8, attention="dsa"), {"attention": "mla"}, Geometry(4, 8, attention="mla")),
        (Geometry(4, 8, device_pages=4), {"device_pages": 3}, Geometry(4, 6, device_pages=3)),
        (Geometry(4, 8, device_pages=4), {"full_pages": 6}, None),
        (
            Geometry(4, 8, 6, device_pages=4, compress=4),
            {"device_pages": 3},
            Geometry(4, 8, 6, device_pages=3, compress=4),
        ),
    ],
    ids=str,
)
def test_a_side_gets_smaller_where_there_is_such_a_geometry(
    geometry: Geometry, changes: dict[str, int], smaller: Geometry | None
) -> None:
    assert resized(geometry, **changes) == smaller


@pytest.mark.parametrize(
    ("geometry", "full", "swa", "smaller"),
    [
        (Geometry(4, 8), 3, 0, Geometry(4, 5)),
        (Geometry(4, 8), 8, 0, None),
        (Geometry(4, 8, 6), 3, 2, Geometry(4, 5, 4)),
        (Geometry(4, 8, 6), 1, 6, None),
        (Geometry(4, 8, pure_swa=True), 3, 3, Geometry(4, 5, pure_swa=True)),
        (Geometry(4, 8, device_pages=4), 1, 0, Geometry(4, 6, device_pages=3)),
        (Geometry(4, 8, device_pages=4), 4, 0, None),
        (
            Geometry(4, 8, 6, device_pages=4, compress=4),
            *(1, 1),
            Geometry(4, 7, 5, device_pages=3, compress=4),
        ),
    ],
    ids=str,
)
def test_every_side_loses_the_pages_of_an_op(
    geometry: Geometry, full: int, swa: int, smaller: Geometry | None
) -> None:
    assert less(geometry, full, swa) == smaller

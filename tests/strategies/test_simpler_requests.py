"""Simpler request-level ops: each says less, what texts share stays shared, and no chain of them
comes back to where it began.

Leaves out which of them fail too: test_shrink.py.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

import msgspec
import pytest

from kvcore.models import Geometry
from kvcore.models.ops import GroupBegin, Op
from kvcore.models.request_ops import (
    REQUEST_OP_KINDS,
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    Flush,
    LoadPrefix,
    Prefill,
    RequestOp,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
    Speculate,
    Trim,
)
from kvcore.models.texts import length
from kvcore.strategies.simpler import merged, pages_of, renumber, shorter, simpler
from kvcore.strategies.simpler_requests import retold
from kvcore.strategies.smaller import PLAINER, SIDES, resized

SIZE = 4

LONG: list[Op] = [
    Admit(1, ((0, 5), (1, 9)), 7, tokens=6),
    SavePrefix(1, ((0, 5), (1, 9))),
    Prefill(1, 9),
    Speculate(1, 9),
    Trim(1, 9),
    DecodeStep((1, 2, 3)),
    Slide((1, 2)),
    RetractRequest(1, backup=True),
    Finish(1),
    EndLoad(1, failed=True),
    Evict(9, 40),
]
PLAIN: list[Op] = [
    Admit(1, ((0, 1),), 1),
    SavePrefix(1, ((0, 1),)),
    Prefill(1, 1),
    Speculate(1, 1),
    Trim(1, 0),
    DecodeStep((1,)),
    Slide((1,)),
    CacheUnfinished(1),
    Abort(1),
    ResumeRequest(1),
    LoadPrefix(1, 1),
    EndLoad(1),
    Evict(1, 0),
    Evict(0, 1),
    Flush(),
]


def test_every_kind_of_op_is_tried() -> None:
    assert {op.kind for op in LONG + PLAIN} == set(REQUEST_OP_KINDS)


@pytest.mark.parametrize("op", LONG, ids=str)
def test_no_chain_of_simpler_ops_comes_back_to_where_it_began(op: Op) -> None:
    chains: dict[Op, set[Op]] = {}
    waiting = [op]
    while waiting:
        each = waiting.pop()
        if each not in chains:
            chains[each] = set(simpler(each, SIZE, ()))
            waiting += chains[each]
    assert len(chains) > 1
    # A cycle, an op that is simpler than itself among them, is an error of the sorter.
    assert set(TopologicalSorter(chains).static_order()) == set(chains)
    for variant in chains:
        assert msgspec.json.decode(msgspec.json.encode(variant), type=RequestOp) == variant


@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_the_plainest_ops_have_nothing_simpler(op: Op) -> None:
    assert list(simpler(op, SIZE, ())) == []


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (Admit(1, ((0, 5), (1, 9)), 7, 6), Admit(1, ((0, 5), (1, 9)), 7)),
        (Admit(1, ((0, 5), (1, 9)), 7), Admit(1, ((1, 9),), 7)),
        (Admit(1, ((0, 5), (1, 9)), 7), Admit(1, ((0, 14),), 7)),
        (Admit(1, ((0, 14),), 7), Admit(1, ((0, 10),), 7)),
        (Admit(1, ((0, 14),), 7), Admit(1, ((0, 12),), 7)),
        (SavePrefix(1, ((0, 5),)), SavePrefix(1, ((0, 4),))),
        (Trim(1, 9), Trim(1, 0)),
        (DecodeStep((1, 2, 3)), DecodeStep((1, 3))),
        (Slide((1, 2)), Slide((2,))),
        (RetractRequest(1, True), RetractRequest(1, False)),
        (RetractRequest(1, False), Abort(1)),
        (Finish(1), Abort(1)),
        (EndLoad(1, failed=True), EndLoad(1)),
        (Evict(9, 40), Evict(0, 40)),
        (Evict(9, 40), Evict(9, 0)),
        (Evict(0, 40), Evict(0, 4)),
    ],
    ids=str,
)
def test_an_op_can_say_less(op: Op, variant: Op) -> None:
    assert variant in list(simpler(op, SIZE, ()))


def test_no_simpler_eviction_asks_for_nothing() -> None:
    for op in (Evict(9, 40), Evict(1, 0), Evict(0, 2)):
        assert Evict(0, 0) not in list(simpler(op, SIZE, ()))


# Pages of an op.


@pytest.mark.parametrize(
    ("op", "pages"),
    [
        (Admit(1, ((0, 5), (1, 9)), 7), 4),
        (Admit(1, ((0, 5), (1, 9)), 7, tokens=6), 2),
        (Prefill(1, 4), 1),
        (Finish(1), 0),
    ],
    ids=str,
)
def test_an_op_takes_so_many_pages_if_nothing_is_cached(op: Op, pages: int) -> None:
    assert pages_of(op, Geometry(SIZE, 8, 8, requests=2, window=4)) == (pages, pages)


def test_a_request_can_be_shorter_by_pages() -> None:
    assert shorter(Admit(1, ((0, 5), (1, 9)), 7), 2, SIZE) == Admit(1, ((0, 5), (1, 1)), 7)
    assert shorter(Admit(1, ((0, 9), (1, 4)), 7), 1, SIZE) is None
    assert shorter(Finish(1), 1, SIZE) is None


# Whole programs.


def test_a_request_comes_with_the_tokens_that_it_gets_later() -> None:
    program = (
        Admit(1, ((0, 5),), 7, tokens=2),
        Prefill(1, 3),
        DecodeStep((1, 2)),
        Speculate(1, 6),
        Finish(2),
        Trim(1, 4),
    )
    found = list(merged(program, 0))
    assert (Admit(1, ((0, 5), (7, 5)), 7), DecodeStep((2,)), Finish(2)) in found
    assert (Admit(1, ((0, 5),), 7), *program[2:]) in found
    assert (Admit(1, ((0, 5), (7, 4)), 7), *program[1:3], Finish(2)) in found
    assert list(merged(program, 1)) == []


def test_what_goes_on_in_the_stream_of_its_text_stays_one_piece() -> None:
    found = list(merged((Admit(1, ((7, 5),), 7), DecodeStep((1,))), 0))
    assert found == [(Admit(1, ((7, 6),), 7),)]


def test_a_piece_gets_shorter_wherever_it_stands() -> None:
    program = (Admit(1, ((2, 9),), 7), Finish(1), Admit(2, ((2, 9), (5, 8)), 7))
    found = list(retold(program, SIZE))
    assert (Admit(1, ((2, 4),), 7), Finish(1), Admit(2, ((2, 4), (5, 8)), 7)) in found
    assert (Admit(1, ((2, 9),), 7), Finish(1), Admit(2, ((2, 9),), 7)) in found
    assert (Admit(1, ((2, 9),), 7), Finish(1), Admit(2, ((2, 9), (2, 8)), 7)) in found
    assert (Admit(1, ((2, 5),), 7), Finish(1), Admit(2, ((2, 5), (5, 4)), 7)) in found


def test_no_text_is_left_without_tokens() -> None:
    program = (Admit(1, ((2, 9),), 7), SavePrefix(1, ((2, 9), (3, 1))))
    for told in retold(program, SIZE):
        assert all(length(op.text) > 0 for op in told if isinstance(op, Admit | SavePrefix))


def test_requests_copies_and_loads_are_numbered_from_one_and_streams_from_zero() -> None:
    program = (
        *(Admit(31, ((6, 5), (3, 9)), 4), Prefill(31, 1), DecodeStep((31,)), GroupBegin()),
        *(Admit(40, ((3, 2),), 6), Slide((40, 31)), Speculate(40, 1), Trim(40, 1)),
        *(SavePrefix(9, ((3, 2), (8, 1))), LoadPrefix(9, 5), EndLoad(5), CacheUnfinished(40)),
        *(RetractRequest(31, True), ResumeRequest(31), Finish(31), Abort(40), Evict(1, 1)),
    )
    assert renumber(program) == (
        *(Admit(1, ((0, 5), (1, 9)), 2), Prefill(1, 1), DecodeStep((1,)), GroupBegin()),
        *(Admit(2, ((1, 2),), 0), Slide((2, 1)), Speculate(2, 1), Trim(2, 1)),
        *(SavePrefix(1, ((1, 2), (3, 1))), LoadPrefix(1, 1), EndLoad(1), CacheUnfinished(2)),
        *(RetractRequest(1, True), ResumeRequest(1), Finish(1), Abort(2), Evict(1, 1)),
    )
    assert renumber(renumber(program)) == renumber(program)


# Pools.


def test_pools_of_requests_get_plainer_and_stay_pools_of_requests() -> None:
    serving = Geometry(4, 8, 6, True, attention="dsa", requests=4, window=6, context=40)
    changes = [*PLAINER, *({side: number} for side in SIDES for number in range(9))]
    found = [geometry for change in changes if (geometry := resized(serving, **change))]
    assert all(geometry.serves and geometry.hybrid and geometry.requests for geometry in found)
    assert {geometry.window for geometry in found} == {1, 2, 3, 4, 5, 6}
    assert {geometry.context for geometry in found} == {0, 40}


def test_pools_of_allocators_never_become_pools_of_requests() -> None:
    plain = Geometry(4, 8, 6, requests=4)
    assert all(resized(plain, window=number) is None for number in range(9))

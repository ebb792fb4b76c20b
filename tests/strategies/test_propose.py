"""What the sources have in common: integers become allowed ops, whatever the integers are."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.invariants import Run
from kvcore.models import Contract, Geometry, Model, ops
from kvcore.models.contract import ALL_FORMS
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.strategies.choices import PackedChoices
from kvcore.strategies.propose import PROPOSALS, propose
from kvcore.strategies.propose_hostile import PAIR_CALLS
from kvcore.strategies.walker import RandomChoices, Walker
from kvcore.strategies.weights import INSIDE, OUTSIDE, kinds_for, op_kind_of
from kvcore.targets.core import core_target


def busy_run(seed: int, geometry: Geometry, steps: int = 40, **contract: Any) -> Run:
    target = core_target(geometry)
    target.contract = msgspec.structs.replace(target.contract, **contract)
    run = Run(target)
    walker = Walker(random.Random(seed), steps)
    while (op := walker.next_op(run.model)) is not None:
        run.step(op)
    return run


def pools_for(kind: str, geometry: Geometry) -> Geometry:
    """The geometry, or one of that page size whose pools have ops of this kind."""
    if kind in ("extend_logical", "free_device", "device_buffer", "free_buffer"):
        return Geometry(geometry.page_size, 8, device_pages=4)
    if kind in ("reserve", "drop", "pause", "resume"):
        return msgspec.structs.replace(geometry, saver=True)
    return geometry


@cache
def busy_model(seed: int, geometry: Geometry) -> Model:
    """The state after a busy run, to be looked at only."""
    return busy_run(seed, geometry).model


@pytest.mark.parametrize("kind", PROPOSALS)
def test_every_proposal_is_allowed_where_it_is_made(kind: str, geometry: Geometry) -> None:
    rng = random.Random(1)
    geometry = pools_for(kind, geometry)
    made = 0
    for seed in range(12):
        model = busy_model(seed, geometry)
        for _ in range(6):
            op = propose(kind, model, RandomChoices(rng))
            if op is not None:
                made += 1
                assert model.allows(op)
                assert op.kind == op_kind_of(kind)
    assert made > 0, f"{kind} was never possible in 12 busy states"


@settings(max_examples=40)
@given(kind=st.sampled_from(sorted(PROPOSALS)), packed=st.integers(0, 2**48))
def test_the_same_integer_gives_the_same_op(kind: str, packed: int) -> None:
    model = busy_model(3, pools_for(kind, Geometry(page_size=2, full_pages=8, swa_pages=8)))
    first = propose(kind, model, PackedChoices(packed))
    assert propose(kind, model, PackedChoices(packed)) == first


def test_a_second_name_matters_to_hostile_calls_about_pairs_alone(geometry: Geometry) -> None:
    for model in (busy_model(seed, geometry) for seed in range(6)):
        names = [-1, *model.rows, *model.ghosts]
        for call, about in HOSTILE_CALLS.items():
            asked = [[ops.Hostile(call, seq, other) for other in names] for seq in names]
            told = [{about.possible(model, op) for op in row} for row in asked]
            assert call in PAIR_CALLS or all(len(answers) == 1 for answers in told), call


def test_an_integer_that_is_used_up_reads_as_zero() -> None:
    choices = PackedChoices(2 + 5 * (3 + 4 * 1))
    assert [choices.below(5), choices.below(4), choices.below(7)] == [2, 3, 1]
    assert choices.below(9) == 0


def test_every_weighted_kind_can_be_proposed() -> None:
    assert set(INSIDE) | set(OUTSIDE) == set(PROPOSALS)


@pytest.mark.parametrize("kind", ["free_swa", "free_swa_front", "free", "free_part", "free_full"])
def test_where_every_layer_slides_pages_are_given_up_by_every_kind(kind: str) -> None:
    rng = random.Random(2)
    made = 0
    for seed in range(12):
        model = busy_model(seed, Geometry(page_size=2, full_pages=8, pure_swa=True))
        for _ in range(6):
            made += propose(kind, model, RandomChoices(rng)) is not None
    assert made > 3


@pytest.mark.parametrize("kind", ["free_swa", "free_swa_front"])
def test_where_callers_free_live_peers_alone_proposals_name_those(
    kind: str, geometry: Geometry
) -> None:
    rng = random.Random(2)
    made = 0
    for seed in range(12):
        run = busy_run(seed, geometry, live_swa_frees=ALL_FORMS)
        for _ in range(6):
            made += propose(kind, run.model, RandomChoices(rng)) is not None
    assert made > 3


@pytest.mark.parametrize("kind", PROPOSALS)
def test_where_there_is_nothing_no_proposal_trips(kind: str) -> None:
    for geometry in (
        Geometry(page_size=2, full_pages=8),
        Geometry(page_size=2, full_pages=8, pure_swa=True),
        Geometry(page_size=2, full_pages=8, device_pages=4),
        Geometry(page_size=2, full_pages=8, swa_pages=4, requests=2, saver=True),
    ):
        run = Run(core_target(geometry))
        for packed in range(40):
            op = propose(kind, run.model, PackedChoices(packed))
            assert op is None or run.model.allows(op)


def test_device_ops_are_asked_for_where_there_are_device_slots_alone() -> None:
    device = {"extend_logical", "free_device", "device_buffer", "free_buffer"}
    sparse = core_target(Geometry(page_size=2, full_pages=8, device_pages=4)).contract
    assert device <= set(kinds_for(sparse, inside=True))
    assert device.isdisjoint(kinds_for(core_target(Geometry(2, 8, 8)).contract, inside=True))


def test_memory_is_paused_where_there_is_a_saver_alone() -> None:
    memory = {"reserve", "drop", "pause", "resume"}
    saved = core_target(Geometry(page_size=2, full_pages=8, saver=True)).contract
    assert memory <= set(kinds_for(saved, inside=False))
    assert memory.isdisjoint(kinds_for(core_target(Geometry(2, 8, 8)).contract, inside=False))


def test_a_single_pool_is_never_asked_for_swa_ops() -> None:
    target = core_target(Geometry(page_size=2, full_pages=8))
    kinds = kinds_for(target.contract, inside=True)
    assert "hostile" in kinds
    assert not {"free_swa", "recover_locked", "load_back", "swa_tail"} & set(kinds)


def test_hostile_kinds_are_left_out_where_no_hostile_call_is_on_trial() -> None:
    kinds = kinds_for(Contract(ops=frozenset(("alloc", "hostile"))), inside=False)
    assert kinds == ["alloc"]

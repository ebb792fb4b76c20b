"""What the sources have in common: integers become allowed ops, whatever the integers are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.invariants import Run
from kvcore.models import Geometry
from kvcore.strategies.propose import PROPOSALS, PackedChoices, propose
from kvcore.strategies.walker import RandomChoices, Walker
from kvcore.strategies.weights import INSIDE, OUTSIDE, kinds_for, op_kind_of
from kvcore.targets.core import core_target


def busy_run(seed: int, geometry: Geometry, steps: int = 40) -> Run:
    run = Run(core_target(geometry))
    walker = Walker(random.Random(seed), steps)
    while (op := walker.next_op(run.model)) is not None:
        run.step(op)
    return run


@pytest.mark.parametrize("kind", PROPOSALS)
def test_every_proposal_is_allowed_where_it_is_made(kind: str, geometry: Geometry) -> None:
    rng = random.Random(1)
    made = 0
    for seed in range(12):
        run = busy_run(seed, geometry)
        for _ in range(6):
            op = propose(kind, run.model, RandomChoices(rng))
            if op is not None:
                made += 1
                assert run.model.allows(op)
                assert op.kind == op_kind_of(kind)
    assert made > 0, f"{kind} was never possible in 12 busy states"


@settings(max_examples=30)
@given(kind=st.sampled_from(sorted(PROPOSALS)), packed=st.integers(0, 2**48))
def test_the_same_integer_gives_the_same_op(kind: str, packed: int) -> None:
    run = busy_run(3, Geometry(page_size=2, full_pages=8, swa_pages=8))
    first = propose(kind, run.model, PackedChoices(packed))
    assert propose(kind, run.model, PackedChoices(packed)) == first


def test_an_integer_that_is_used_up_reads_as_zero() -> None:
    choices = PackedChoices(2 + 5 * (3 + 4 * 1))
    assert [choices.below(5), choices.below(4), choices.below(7)] == [2, 3, 1]
    assert choices.below(9) == 0


def test_every_weighted_kind_can_be_proposed() -> None:
    assert set(INSIDE) | set(OUTSIDE) == set(PROPOSALS)


def test_a_single_pool_is_never_asked_for_swa_ops() -> None:
    target = core_target(Geometry(page_size=2, full_pages=8))
    kinds = kinds_for(target.contract.ops, hybrid=False, hostile=True, inside=True)
    assert not {"free_swa", "recover_locked", "load_back", "swa_tail"} & set(kinds)


def test_hostile_kinds_are_left_out_where_no_hostile_call_is_on_trial() -> None:
    kinds = kinds_for(frozenset(("alloc",)), hybrid=True, hostile=False, inside=False)
    assert kinds == ["alloc"]

"""Hostile ops in bulk: each raises its documented error and changes nothing, down to the order of
the free pages.

`pytest -m campaign` makes ten thousand of them; the default suite a thousand.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcore.invariants import Run
from kvcore.models import Geometry, Raised
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Hostile
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.propose import propose
from kvcore.strategies.walker import RandomChoices, Walker, WalkPlan
from kvcore.targets.core import core_target
from kvcore.targets.protocol import HostView

OF_ALLOCATORS = [name for name in MACHINES if name != "requests"]


def make_hostile_calls(count: int) -> Counter[str]:
    """Make ``count`` hostile calls from many states; how often each was made."""
    rng = random.Random(0)
    made: Counter[str] = Counter()
    while made.total() < count:
        geometry, length = WalkPlan((1, 2, 4, 16), rng.choice(OF_ALLOCATORS)).draw(rng)
        run = Run(core_target(geometry), period=10**6)
        walker = Walker(rng, min(length, 40))
        while (op := walker.next_op(run.model)) is not None:
            run.step(op)
            hostile = propose("hostile", run.model, RandomChoices(rng))
            if hostile is not None:
                assert isinstance(hostile, Hostile)
                check_one(run, hostile)
                made[hostile.call] += 1
    return made


def check_one(run: Run, hostile: Hostile) -> None:
    before = run.target.view(stamps=True).host()
    outcome = run.step(hostile)
    assert isinstance(outcome, Raised)
    assert outcome.kind in HOSTILE_CALLS[hostile.call].errors
    assert "KVCacheError" in outcome.bases
    assert state_of(run.target.view(stamps=True).host()) == state_of(before)


def state_of(view: HostView) -> object:
    free = view.full_free, view.swa_free, view.device_free, view.request_free, view.pending
    shown = view.mapping, view.device_mapping, view.stamps, view.request_rows, view.memory
    return (*free, *shown, view.answers)


def test_a_thousand_hostile_ops_raise_and_change_nothing() -> None:
    made = make_hostile_calls(1000)
    assert len(made) >= len(HOSTILE_CALLS) - 2  # two are rare: only the campaign asks for all


@pytest.mark.campaign
def test_ten_thousand_hostile_ops_raise_and_change_nothing() -> None:
    made = make_hostile_calls(10_000)
    assert set(made) == set(HOSTILE_CALLS)
    print(f"{made.total()} hostile ops: {dict(sorted(made.items()))}")


def test_a_target_without_value_checks_is_asked_for_state_errors_only() -> None:
    target = core_target(Geometry(2, 8, 8), validate=False)
    assert target.contract.hostile == {n for n, c in HOSTILE_CALLS.items() if not c.values}

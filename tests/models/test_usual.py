"""The quick look at usual answers held against the judge who goes slot by slot: what it follows,
that judge finds right, and the books say the same afterwards. On the answers of random programs,
each spoiled at random.
"""

import copy
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from kvcore.models import Geometry, Lent, Mismatch, Model
from kvcore.models.ops import Op
from kvcore.strategies.walker import Walker
from kvcore.targets.core import core_target

GEOMETRIES = [Geometry(1, 12), Geometry(1, 12, 9), Geometry(4, 12, 9), Geometry(4, 9, 12)]


def books(model: Model) -> Any:
    """Everything that the model remembers."""
    known = dict(vars(model))
    # What was found allowed before the answer, and by what judge it was followed.
    for name in ("_allowed", "usual"):
        known.pop(name, None)
    return known


def accepted(model: Model, op: Op, answer: Lent, *, usual: bool) -> Any:
    """The books after a copy of the model saw the answer, None if it found it wrong."""
    model = copy.deepcopy(model)
    model.usual = usual
    try:
        model.accept(op, answer)
    except Mismatch:
        return None
    return books(model)


def spoiled(answer: Lent, rng: random.Random) -> Lent:
    """The answer with one slot changed, left out or swapped with another."""
    name = "peers" if answer.peers and rng.randrange(2) else "slots"
    numbers = list(getattr(answer, name))
    at, other = rng.randrange(len(numbers)), rng.randrange(len(numbers))
    kind = rng.randrange(4)
    if kind == 0:
        numbers[at] += rng.choice((-1, 1, 4))
    elif kind == 1:
        numbers[at], numbers[other] = numbers[other], numbers[at]
    elif kind == 2:
        numbers[at] = rng.choice((0, numbers[other]))
    else:
        del numbers[at]
    return msgspec.structs.replace(answer, **{name: tuple(numbers)})


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=Geometry.describe)
def test_both_judges_accept_the_same_answers_and_follow_them_alike(geometry: Geometry) -> None:
    rng = random.Random(geometry.describe())
    seen: Counter[str] = Counter()
    for _ in range(2):
        target = core_target(geometry)
        model, walker = Model(geometry, target.contract), Walker(rng, 40)
        while (op := walker.next_op(model)) is not None:
            answer = target.apply(op)
            tried = [answer]
            if isinstance(answer, Lent) and answer.slots:
                tried += [spoiled(answer, rng) for _ in range(3)]
            for said in tried:
                quick = accepted(model, op, said, usual=True)
                assert quick == accepted(model, op, said, usual=False), f"{op}: {said}"
                seen["wrong" if quick is None else "right"] += 1
            model.accept(op, answer)
    assert seen["wrong"] > 20
    assert seen["right"] > 60

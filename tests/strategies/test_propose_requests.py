"""Proposals of request-level ops: allowed whatever the integers are, and texts that begin alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.invariants import Run
from kvcore.models import Geometry, ServingModel
from kvcore.models.request_ops import REQUEST_OP_KINDS, Admit, SavePrefix
from kvcore.models.texts import cut, length
from kvcore.strategies import prompts
from kvcore.strategies.choices import PackedChoices
from kvcore.strategies.propose import propose
from kvcore.strategies.propose_requests import REQUEST_PROPOSALS
from kvcore.strategies.walker import RandomChoices, Walker
from kvcore.strategies.weights import kinds_for, op_kind_of
from kvcore.strategies.weights_requests import REQUESTS_INSIDE, REQUESTS_OUTSIDE
from kvcore.targets.registry import open_target

SERVING = Geometry(page_size=4, full_pages=12, swa_pages=9, requests=4, window=6)


def busy_run(seed: int, geometry: Geometry = SERVING, steps: int = 40) -> Run:
    run = Run(open_target("kvcore")(geometry), period=10**6)
    walker = Walker(random.Random(seed), steps)
    while (op := walker.next_op(run.model)) is not None:
        run.step(op)
    return run


def model_of(run: Run) -> ServingModel:
    assert isinstance(run.model, ServingModel)
    return run.model


@pytest.fixture(scope="module")
def busy() -> list[Run]:
    return [busy_run(seed, steps=20 + 4 * (seed % 10)) for seed in range(20)]


@pytest.mark.parametrize("kind", REQUEST_PROPOSALS)
def test_every_proposal_is_allowed_where_it_is_made(kind: str, busy: list[Run]) -> None:
    rng = random.Random(1)
    made = 0
    for run in busy:
        for _ in range(8):
            op = propose(kind, run.model, RandomChoices(rng))
            if op is not None:
                made += 1
                assert run.model.allows(op)
                assert op.kind == op_kind_of(kind)
    if kind == "flush":
        run = Run(open_target("kvcore")(SERVING))
        assert propose(kind, run.model, RandomChoices(rng)) is not None
    else:
        assert made > 0, f"{kind} was never possible in {len(busy)} busy states"


@settings(max_examples=40)
@given(kind=st.sampled_from(sorted(REQUEST_PROPOSALS)), packed=st.integers(0, 2**48))
def test_the_same_integer_gives_the_same_op(kind: str, packed: int, busy: list[Run]) -> None:
    model = busy[5].model
    first = propose(kind, model, PackedChoices(packed))
    assert propose(kind, model, PackedChoices(packed)) == first


@pytest.mark.parametrize("kind", REQUEST_PROPOSALS)
def test_where_nothing_runs_no_proposal_trips(kind: str) -> None:
    run = Run(open_target("kvcore")(SERVING))
    for packed in range(40):
        op = propose(kind, run.model, PackedChoices(packed))
        assert op is None or run.model.allows(op)


def test_every_weighted_kind_can_be_proposed_and_every_op_is() -> None:
    assert set(REQUESTS_INSIDE) | set(REQUESTS_OUTSIDE) == set(REQUEST_PROPOSALS)
    ops = {op_kind_of(kind) for kind in REQUEST_PROPOSALS}
    assert ops == {*REQUEST_OP_KINDS, "group_begin", "group_end"}


def test_requests_and_allocators_have_kinds_of_their_own() -> None:
    serving = open_target("kvcore")(SERVING).contract
    plain = open_target("kvcore")(Geometry(4, 8, 8)).contract
    assert kinds_for(serving, inside=False) == list(REQUESTS_OUTSIDE)
    assert kinds_for(serving, inside=True) == list(REQUESTS_INSIDE)
    shared = set(kinds_for(plain, inside=False)) & set(REQUESTS_OUTSIDE)
    assert shared == {"group_begin"}


# Texts.


@pytest.mark.parametrize("draw", [prompts.front, prompts.branch], ids=["front", "branch"])
def test_texts_begin_as_known_ones_do(draw: object, busy: list[Run]) -> None:
    assert callable(draw)
    rng = random.Random(2)
    for run in busy:
        model = model_of(run)
        known = prompts.known(model)
        for _ in range(8):
            text = draw(model, RandomChoices(rng))
            assert 0 < length(text) <= model.geometry.context_len
            front = text if draw is prompts.front else text[:-1]
            fronts = {cut(one, min(length(front), length(one))) for one in known}
            assert not known or not front or cut(text, length(front)) in fronts


def test_no_text_is_longer_than_a_row() -> None:
    tight = Geometry(page_size=4, full_pages=12, swa_pages=9, requests=2, window=6, context=9)
    rng = random.Random(3)
    for seed in range(4):
        model = model_of(busy_run(seed, tight))
        for draw in (prompts.fresh, prompts.again, prompts.front, prompts.branch, prompts.large):
            for _ in range(10):
                assert length(draw(model, RandomChoices(rng))) <= 9


def test_lengths_are_around_pages_and_windows() -> None:
    assert prompts.lengths(Geometry(1, 8, 8, requests=2, window=1)) == [3, 2, 1]
    page, window = SERVING.page_size, SERVING.window
    lengths = set(prompts.lengths(SERVING))
    assert {1, page - 1, page, page + 1, window - 1, window, window + 1, window + page} <= lengths
    assert max(lengths) <= SERVING.swa_size / 2


def test_a_program_admits_texts_that_are_cached_already(busy: list[Run]) -> None:
    texts = [op.text for run in busy for op in run.program if isinstance(op, Admit | SavePrefix)]
    again = sum(text in texts[:at] for at, text in enumerate(texts))
    assert again > len(texts) / 5

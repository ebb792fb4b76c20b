"""Properties over whole programs: the model stays a partition, any part of a program is a program,
and no op, however meaningless, is more than "not allowed".
"""

import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.invariants import Run, drive
from kvcore.models import Contract, Geometry, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.strategies.replay import replay
from kvcore.strategies.walker import Walker
from kvcore.targets.core import core_target

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CONTRACT = Contract(hostile=frozenset(HOSTILE_CALLS))
geometries = st.builds(
    Geometry, st.sampled_from([1, 2, 4]), st.just(8), st.sampled_from([0, 6, 8, 10]), st.booleans()
)
seeds = st.integers(0, 2**32)


def walk(books: Any, seed: int, length: int) -> list[Op]:
    """A random program, answered by the bookkeeper; checks the model after each op."""
    walker = Walker(random.Random(seed), length)
    program: list[Op] = []
    while (op := walker.next_op(books.model)) is not None:
        books.do(op)
        program.append(op)
        assert_partition(books.model)
    return program


def assert_partition(model: Any) -> None:
    """L1 and L3 on the model itself, and its rows in page order."""
    pages = [page for _, page in model.lent_pages()]
    full = [*model.full.free, *model.full.pending, *(page.full for page in pages)]
    swa = [*model.swa.free, *model.swa.pending, *(page.swa for page in pages if page.swa)]
    assert sorted(full) == list(range(1, model.full.total + 1))
    assert sorted(swa) == list(range(1, model.swa.total + 1))
    assert set(model.detached.values()) <= model.swa.pending
    assert model.group_open or not (model.full.pending or model.swa.pending)
    for row in model.rows.values():
        assert row.pages
        assert all(page.tokens == model.geometry.page_size for page in row.pages[:-1])
        assert all(len(page.swa_stamps) == page.tokens for page in row.pages)


@settings(QUICK, max_examples=60)
@given(geometries, seeds)
def test_every_page_is_in_exactly_one_place_of_the_model(
    keep: Callable[..., Any], geometry: Geometry, seed: int
) -> None:
    books = keep(geometry.page_size, 8, geometry.swa_pages, contract=CONTRACT)
    walk(books, seed, 60)


@settings(QUICK, max_examples=60)
@given(geometries, seeds, st.data())
def test_any_part_of_a_program_is_a_program_for_the_model(
    keep: Callable[..., Any], geometry: Geometry, seed: int, data: st.DataObject
) -> None:
    program = walk(keep(geometry.page_size, 8, geometry.swa_pages, contract=CONTRACT), seed, 40)
    part = data.draw(st.lists(st.booleans(), min_size=len(program), max_size=len(program)))

    books = keep(geometry.page_size, 8, geometry.swa_pages, contract=CONTRACT)
    for op, chosen in zip(program, part, strict=True):
        if chosen and books.model.allows(op):
            books.do(op)
            assert_partition(books.model)


@settings(QUICK, max_examples=25)
@given(geometries, seeds, st.data())
def test_any_part_of_a_program_runs_on_the_core(
    geometry: Geometry, seed: int, data: st.DataObject
) -> None:
    whole = drive(Run(core_target(geometry), period=8), Walker(random.Random(seed), 25))
    assert whole.violation is None
    program = whole.program
    kept = data.draw(st.lists(st.booleans(), min_size=len(program), max_size=len(program)))

    part = [op for op, keep_it in zip(program, kept, strict=True) if keep_it]
    verdict = replay(core_target, geometry, part, period=8)

    assert verdict.violation is None
    # Giving everything back at the end makes steps too.
    assert verdict.tally.steps + verdict.tally.skipped >= len(part)


small = st.integers(-2, 4)
stops = st.none() | small
free_forms = st.sampled_from(["slots", "sparse", "segment", "segments"])
any_op: st.SearchStrategy[Op] = st.one_of(
    st.builds(ops.Alloc, small, small),
    st.builds(ops.Extend, st.lists(st.tuples(small, small), max_size=3).map(tuple)),
    st.builds(ops.Decode, st.lists(small, max_size=3).map(tuple)),
    st.builds(ops.SwaTail, small, small, small),
    st.builds(ops.Free, small, small, stops, free_forms),
    st.builds(ops.FreeSwa, small, small, stops, free_forms),
    st.builds(ops.FreeFull, small, small, stops, free_forms),
    st.builds(ops.GroupBegin),
    st.builds(ops.GroupEnd),
    st.builds(ops.Recover, small, small, st.booleans(), small, small, small),
    st.builds(ops.LoadBack, small, small, small),
    st.builds(ops.LoadBackSwa, small, small, stops),
    st.builds(ops.Retract, small, small),
    st.builds(ops.Restore, small, small, stops),
    st.builds(ops.Clear),
    st.builds(ops.Hostile, st.sampled_from([*HOSTILE_CALLS, "no_such_call"]), small, small),
)


@settings(QUICK, max_examples=150)
@given(geometries, st.lists(any_op, max_size=25))
def test_an_op_that_means_nothing_is_just_not_allowed(
    keep: Callable[..., Any], geometry: Geometry, program: list[Op]
) -> None:
    books = keep(geometry.page_size, 8, geometry.swa_pages, contract=CONTRACT)
    for op in program:
        books.model.must_refuse(op)
        if books.model.allows(op):
            books.do(op)
            assert_partition(books.model)

"""Properties over whole programs, on every machine: the model stays a partition, any part of a
program is a program, and no op, however meaningless, is more than "not allowed".
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.invariants import Run, drive
from kvcore.models import Contract, Geometry, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.replay import replay
from kvcore.strategies.walker import Walker
from kvcore.targets.core import core_contract
from kvcore.targets.registry import open_target, ways

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PAGE_SIZES = (1, 2, 4)
ALLOCATORS = [name for name in MACHINES if name != "requests"]
"""Machines of the calls of an allocator; test_serving_programs.py has whole requests."""
seeds = st.integers(0, 2**32)


def drawn(machine: str, seed: int) -> Geometry:
    """A geometry of a machine, the same for the same seed."""
    rng = random.Random(seed)
    page_size = rng.choice(MACHINES[machine].page_sizes(PAGE_SIZES))
    return MACHINES[machine].draw(rng, page_size, rng.random() < 0.5)


def contract_of(geometry: Geometry) -> Contract:
    """What callers of such pools do, every hostile call included."""
    return core_contract(geometry, validate=True)


def walk(books: Any, seed: int, length: int, check: Callable[[Any], None]) -> list[Op]:
    """A random program, answered by the bookkeeper; checks the model after each op."""
    walker = Walker(random.Random(seed), length)
    program: list[Op] = []
    while (op := walker.next_op(books.model)) is not None:
        books.do(op)
        program.append(op)
        check(books)
        check_rows(books.model)
    return program


def check_rows(model: Any) -> None:
    """What waits for the group's end is what was detached in it, and rows are in page order."""
    assert set(model.detached.values()) <= model.swa.pending | model.full.pending
    assert set(model.device_detached.values()) <= model.device.pending
    size, entries = model.geometry.page_size, model.geometry.compress
    for row in model.rows.values():
        assert row.pages
        assert all(page.tokens == size for page in row.pages[:-1])
        assert all(len(page.swa_stamps) == page.tokens for page in row.pages)
        for page in row.pages:
            assert page.gone or len(page.device_stamps) == page.tokens
            assert page.device or not any(page.device_stamps)
            assert not any(stamp for i, stamp in enumerate(page.device_stamps, 1) if i % entries), (
                page
            )


@pytest.mark.parametrize("machine", ALLOCATORS)
def test_every_page_is_in_exactly_one_place_of_the_model(
    keep: Callable[..., Any], partition: Callable[[Any], None], machine: str
) -> None:
    @settings(QUICK, max_examples=15)
    @given(seeds)
    def check(seed: int) -> None:
        geometry = drawn(machine, seed)
        walk(keep(geometry, contract=contract_of(geometry)), seed, 60, partition)

    check()


@pytest.mark.parametrize("machine", ALLOCATORS)
def test_any_part_of_a_program_is_a_program_for_the_model(
    keep: Callable[..., Any], partition: Callable[[Any], None], machine: str
) -> None:
    @settings(QUICK, max_examples=15)
    @given(seeds, st.data())
    def check(seed: int, data: st.DataObject) -> None:
        geometry = drawn(machine, seed)
        contract = contract_of(geometry)
        program = walk(keep(geometry, contract=contract), seed, 40, partition)
        part = data.draw(st.lists(st.booleans(), min_size=len(program), max_size=len(program)))

        books = keep(geometry, contract=contract)
        for op, chosen in zip(program, part, strict=True):
            if chosen and books.model.allows(op):
                books.do(op)
                partition(books)
                check_rows(books.model)

    check()


@pytest.mark.parametrize("machine", MACHINES)
def test_any_part_of_a_program_runs_on_the_core(machine: str) -> None:
    factory = open_target(ways("kvcore", machine)[0])

    @settings(QUICK, max_examples=6)
    @given(seeds, st.data())
    def check(seed: int, data: st.DataObject) -> None:
        geometry = drawn(machine, seed)
        whole = drive(Run(factory(geometry), period=8), Walker(random.Random(seed), 25))
        assert whole.violation is None
        program = whole.program
        kept = data.draw(st.lists(st.booleans(), min_size=len(program), max_size=len(program)))

        part = [op for op, keep_it in zip(program, kept, strict=True) if keep_it]
        verdict = replay(factory, geometry, part, period=8)

        assert verdict.violation is None
        # Giving everything back at the end makes steps too.
        assert verdict.tally.steps + verdict.tally.skipped >= len(part)

    check()


small = st.integers(-2, 4)
stops = st.none() | small
memories = st.sampled_from(["kv_cache", "weights"])
free_forms = st.sampled_from(["slots", "sparse", "segment", "segments"])
any_op: st.SearchStrategy[Op] = st.one_of(
    st.builds(ops.Alloc, small, small),
    st.builds(ops.Extend, st.lists(st.tuples(small, small), max_size=3).map(tuple)),
    st.builds(ops.Decode, st.lists(small, max_size=3).map(tuple)),
    st.builds(ops.SwaTail, small, small, small, small),
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
    st.builds(ops.Relocate, small),
    st.builds(ops.ExtendLogical, st.lists(st.tuples(small, small), max_size=3).map(tuple)),
    st.builds(ops.FreeDevice, small, small, stops, free_forms),
    st.builds(ops.DeviceBuffer, small, small, small),
    st.builds(ops.FreeBuffer, small),
    st.builds(ops.Reserve, small, memories, small),
    st.builds(ops.Drop, small),
    st.builds(ops.Pause, memories),
    st.builds(ops.Resume, memories),
    st.builds(ops.Clear),
    st.builds(ops.Hostile, st.sampled_from([*HOSTILE_CALLS, "no_such_call"]), small, small),
)


@settings(QUICK, max_examples=200)
@given(st.sampled_from(sorted(ALLOCATORS)), seeds, st.lists(any_op, max_size=25))
def test_an_op_that_means_nothing_is_just_not_allowed(
    keep: Callable[..., Any],
    partition: Callable[[Any], None],
    machine: str,
    seed: int,
    program: list[Op],
) -> None:
    geometry = drawn(machine, seed)
    books = keep(geometry, contract=contract_of(geometry))
    for op in program:
        books.model.must_refuse(op)
        if books.model.allows(op):
            books.do(op)
            partition(books)
            check_rows(books.model)


def test_no_rule_trips_over_a_call_that_no_caller_makes(keep: Callable[..., Any]) -> None:
    wide = Contract(hostile=frozenset(HOSTILE_CALLS))

    @settings(QUICK, max_examples=60)
    @given(st.sampled_from(sorted(ALLOCATORS)), seeds, st.lists(any_op, max_size=25))
    def check(machine: str, seed: int, program: list[Op]) -> None:
        geometry = drawn(machine, seed)
        books = keep(geometry, contract=contract_of(geometry))
        books.do(ops.Extend(((1, 3), (2, 2))))
        books.model.contract = wide
        for op in program:
            books.model.must_refuse(op)
            books.model.allows(op)

    check()

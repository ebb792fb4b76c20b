"""The scheduler: what it does with requests, told by the ops that it makes on kvcore."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvcore.invariants import Run, Skipped
from kvcore.models import Geometry, ServingModel
from kvcore.models.ops import GroupBegin, GroupEnd, Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    Finish,
    Prefill,
    ResumeRequest,
    RetractRequest,
    Slide,
)
from kvcore.strategies.scheduler import (
    CHUNKS_A_BATCH,
    DECODE_MILLISECONDS,
    Policy,
    Scheduler,
    least_swa_pages,
)
from kvcore.strategies.workload import Arrival
from kvcore.targets.registry import open_target

ROOMY = Geometry(page_size=2, full_pages=128, swa_pages=64, requests=8, window=4, context=64)
IN_CHUNKS = Policy(chunk_tokens=8)
TIGHT = Geometry(page_size=2, full_pages=20, swa_pages=12, requests=4, window=4, context=64)


def arrivals(*lengths: tuple[int, int], at: float | None = None) -> list[Arrival]:
    """Requests of (prompt, output) tokens that begin with the same four tokens."""
    return [
        Arrival(number, at, ((0, 4), (number + 1, prompt - 4)), output)
        for number, (prompt, output) in enumerate(lengths)
    ]


def serve(
    requests: Sequence[Arrival], geometry: Geometry, policy: Policy = IN_CHUNKS
) -> tuple[Scheduler, list[Op], ServingModel]:
    """Serve on kvcore to the end, each op allowed and checked."""
    scheduler = Scheduler(requests, geometry, policy)
    run = Run(open_target("kvcore")(geometry), period=50, every=10)
    assert isinstance(run.model, ServingModel)
    while (op := scheduler.next_op(run.model)) is not None:
        assert not isinstance(run.step(op), Skipped)
    program = list(run.program)
    assert not run.model.live
    assert not run.model.waiting
    run.finish()
    return scheduler, program, run.model


def groups(program: Sequence[Op]) -> list[list[Op]]:
    """The ops within each free group."""
    found: list[list[Op]] = []
    open_now = False
    for op in program:
        if isinstance(op, GroupBegin | GroupEnd):
            open_now = isinstance(op, GroupBegin)
            found += [[]] * open_now
        elif open_now:
            found[-1] = [*found[-1], op]
    return found


MANY = arrivals(*[(5 + 7 * n % 11, 1 + n % 5) for n in range(12)])


@pytest.mark.parametrize("geometry", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_every_request_gets_all_its_tokens(geometry: Geometry) -> None:
    scheduler, program, _ = serve(MANY, geometry)
    assert sorted(scheduler.served) == list(range(12))
    assert scheduler.passed == []
    decoded = sum(len(op.reqs) for op in program if isinstance(op, DecodeStep))
    assert decoded == sum(arrival.output_tokens for arrival in MANY)
    assert sum(isinstance(op, Finish) for op in program) == 12


def test_the_same_seed_makes_the_same_program() -> None:
    assert serve(MANY, TIGHT)[1] == serve(MANY, TIGHT)[1]


def test_a_prompt_is_computed_in_chunks_that_are_cached_one_by_one() -> None:
    _, program, _ = serve(arrivals((20, 1)), ROOMY)
    chunks = [op.tokens for op in program if isinstance(op, Admit | Prefill)]
    assert chunks == [8, 8, 4]
    assert sum(isinstance(op, CacheUnfinished) for op in program) == 3


def test_what_a_batch_computed_to_the_end_is_cached_in_one_group_after_its_windows_slid() -> None:
    _, program, _ = serve(arrivals((8, 2), (8, 2), (8, 2)), ROOMY)
    names = [op.req for op in program if isinstance(op, Admit)]
    first = groups(program)[0]
    assert first == [op for name in names for op in (Slide((name,)), CacheUnfinished(name))]


def test_a_batch_has_room_for_so_many_chunks() -> None:
    requests = arrivals(*[(8, 2)] * (CHUNKS_A_BATCH + 1))
    _, program, _ = serve(requests, ROOMY)
    admitted = 0
    for op in program:
        if isinstance(op, GroupBegin):
            break
        admitted += isinstance(op, Admit)
    assert admitted == CHUNKS_A_BATCH


def test_requests_that_end_together_are_freed_in_one_group() -> None:
    _, program, _ = serve(arrivals((8, 3), (8, 3), (8, 5)), ROOMY)
    ends = [group for group in groups(program) if isinstance(group[0], Finish)]
    assert [len(group) for group in ends] == [2, 1]
    assert all(isinstance(op, Finish) for group in ends for op in group)


def test_all_that_are_ready_decode_in_one_batch() -> None:
    _, program, _ = serve(arrivals((8, 3), (8, 3), (8, 3)), ROOMY)
    steps = [len(op.reqs) for op in program if isinstance(op, DecodeStep)]
    assert steps == [3, 3, 3]


def test_windows_that_moved_on_slide_while_requests_decode() -> None:
    policy = Policy(chunk_tokens=8, slide_every=4)
    _, program, _ = serve(arrivals((8, 20), (8, 20)), ROOMY, policy)
    started = program.index(next(op for op in program if isinstance(op, DecodeStep)))
    slides = [op for op in program[started:] if isinstance(op, Slide)]
    assert [op.reqs for op in slides] == [(1, 2)] * len(slides)
    assert len(slides) == 20 // policy.slide_every


def retracting() -> tuple[Scheduler, list[Op], ServingModel]:
    return serve(arrivals(*[(8, 16)] * 4), TIGHT)


def test_who_came_last_gives_way_and_comes_back_before_anybody_new() -> None:
    scheduler, program, _ = retracting()
    running: list[int] = []
    retracted: list[int] = []
    for op in program:
        match op:
            case Admit(req=name):
                assert not retracted
                running.append(name)
            case ResumeRequest(req=name):
                assert name == retracted.pop()
                running.append(name)
            case RetractRequest(req=name):
                assert name == running.pop()
                retracted.append(name)
            case Finish(req=name):
                running.remove(name)
    assert scheduler.retracted
    assert sorted(scheduler.served) == [0, 1, 2, 3]


def test_the_seed_decides_who_is_backed_up() -> None:
    requests = arrivals(*[(8, 16)] * 5)

    def backups(seed: int) -> list[bool]:
        _, program, _ = serve(requests, TIGHT, Policy(seed=seed, chunk_tokens=8))
        return [op.backup for op in program if isinstance(op, RetractRequest)]

    assert backups(0) != backups(1)


@pytest.mark.parametrize(("share", "backed_up"), [(0.0, False), (1.0, True)])
def test_a_share_of_the_retractions_is_backed_up(share: float, backed_up: bool) -> None:
    policy = Policy(chunk_tokens=8, backup_share=share)
    _, program, _ = serve(arrivals(*[(8, 16)] * 4), TIGHT, policy)
    backups = {op.backup for op in program if isinstance(op, RetractRequest)}
    assert backups == {backed_up}


def test_the_seed_orders_those_that_arrive_together() -> None:
    requests = arrivals(*[(8, 1)] * 6, at=0.0)

    def order(seed: int) -> list[int]:
        return serve(requests, ROOMY, Policy(seed=seed, chunk_tokens=8))[0].served

    assert order(0) == list(range(6))
    assert order(1) != order(0)
    assert sorted(order(1)) == order(0)


def test_a_reserve_keeps_requests_from_being_retracted() -> None:
    careful = Policy(chunk_tokens=8, reserve=1.0)
    scheduler, program, _ = serve(arrivals(*[(8, 16)] * 4), TIGHT, careful)
    assert len(scheduler.served) == 4
    assert not any(isinstance(op, RetractRequest) for op in program)


def test_requests_wait_for_their_time_on_the_virtual_clock() -> None:
    late = 1000 * DECODE_MILLISECONDS
    first, second = (Arrival(n, at, ((n + 1, 8),), 3) for n, at in enumerate((0.0, late)))
    paced = Policy("timestamps", chunk_tokens=8)
    scheduler, program, _ = serve([second, first], ROOMY, paced)
    assert scheduler.served == [0, 1]
    assert [len(op.reqs) for op in program if isinstance(op, DecodeStep)] == [1] * 6
    assert scheduler.clock >= late + 3 * DECODE_MILLISECONDS
    _, together, _ = serve([second, first], ROOMY)
    assert [len(op.reqs) for op in together if isinstance(op, DecodeStep)] == [2] * 3


def test_a_request_that_arrives_meanwhile_joins_the_batch() -> None:
    first = Arrival(0, 0.0, ((1, 8),), 6)
    second = Arrival(1, 2.5 * DECODE_MILLISECONDS, ((2, 8),), 2)
    _, program, _ = serve([first, second], ROOMY, Policy("timestamps", chunk_tokens=8))
    assert [len(op.reqs) for op in program if isinstance(op, DecodeStep)] == [1, 1, 1, 2, 2, 1]


def test_requests_that_no_pool_holds_are_passed_over() -> None:
    small = Geometry(page_size=2, full_pages=16, swa_pages=12, requests=4, window=4, context=30)
    scheduler, _, _ = serve(arrivals((8, 2), (20, 13), (29, 1), (29, 2), (6, 1)), small)
    assert sorted(scheduler.served) == [0, 2, 4]
    assert [(one.number, one.why) for one in scheduler.passed] == [
        (1, "33 tokens, more than the context"),
        (3, "31 tokens, more than the context"),
    ]
    tiny = Geometry(page_size=2, full_pages=12, swa_pages=12, requests=4, window=4, context=64)
    scheduler, _, _ = serve(arrivals((20, 5), (20, 4)), tiny)
    assert [one.why for one in scheduler.passed] == ["25 tokens, more than the full pool"]
    assert scheduler.served == [1]


def test_the_smallest_sliding_pool_serves_everybody() -> None:
    least = least_swa_pages(TIGHT)
    pools = Geometry(page_size=2, full_pages=32, swa_pages=least, requests=4, window=4, context=64)
    requests = arrivals((5, 30), (40, 20), (20, 20), (8, 3), (33, 25))
    scheduler, program, _ = serve(requests, pools)
    assert sorted(scheduler.served) == list(range(5))
    assert not any(isinstance(op, Abort) for op in program)


def test_a_pool_too_small_for_its_window_ends_too() -> None:
    pools = Geometry(page_size=2, full_pages=32, swa_pages=3, requests=4, window=16, context=64)
    scheduler, program, _ = serve(arrivals((5, 30), (40, 20), (5, 1)), pools)
    assert [one.why for one in scheduler.passed] == ["found no room, with the pools to itself"] * 2
    assert scheduler.served == [2]
    assert any(isinstance(op, Abort) for op in program)


def test_nothing_is_opened_twice_or_left_open() -> None:
    _, program, _ = serve(MANY, TIGHT)
    marks = [op for op in program if isinstance(op, GroupBegin | GroupEnd)]
    assert isinstance(marks[0], GroupBegin)
    assert isinstance(marks[-1], GroupEnd)
    assert all(type(one) is not type(other) for one, other in pairwise(marks))

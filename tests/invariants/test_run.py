"""The interpreter: what is done at each step, when laws are due, what listeners hear, what counts.

Leaves out the laws themselves.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvcore.invariants import BY_ID, DRAIN, LAWS, Cost, LawBroken, Run, Skipped, Tally, drive
from kvcore.invariants.run import LAW_ERRORS, Applied, Applying, Broke
from kvcore.models import Done, Geometry, Lent, Refused, ops, request_ops
from kvcore.models.ops import Op
from kvcore.strategies.replay import Recorded, replay
from kvcore.targets.core import core_target

Make = Callable[..., Any]
PROGRAM = (
    ops.Alloc(1, 2),
    ops.Extend(((2, 5), (3, 1))),
    ops.GroupBegin(),
    ops.FreeSwa(1),
    ops.Recover(1, 2, True),
    ops.GroupEnd(),
    ops.Alloc(4, 99),
    ops.Decode((3,)),
)


def drop_page(shown: Any) -> None:
    shown.full_free.pop()


# Steps.


def test_an_op_that_is_not_allowed_is_skipped_and_leaves_no_trace(make_scene: Make) -> None:
    heard: list[Any] = []
    scene = make_scene(listeners=[heard.append])
    outcome = scene.run.step(ops.Free(7))
    assert outcome == Skipped("there is no sequence 7")
    assert scene.run.program == []
    assert scene.target.calls == []
    assert heard == []
    assert (scene.run.tally.steps, scene.run.tally.skipped) == (0, 1)


def test_a_step_gives_the_targets_answer(make_scene: Make) -> None:
    scene = make_scene()
    assert isinstance(scene.run.step(ops.Alloc(1, 1)), Lent)
    assert scene.run.step(ops.Alloc(2, 99)) == Refused()
    assert scene.run.step(ops.Free(1)) == Done()
    assert scene.run.program == [ops.Alloc(1, 1), ops.Alloc(2, 99), ops.Free(1)]
    assert scene.target.calls == scene.run.program


# Listeners.


def test_an_op_is_told_before_it_is_applied_and_after(make_scene: Make) -> None:
    log: list[Any] = []
    scene = make_scene(listeners=[log.append])
    scene.target.calls = log
    outcome = scene.run.step(ops.GroupBegin())
    op = ops.GroupBegin()
    assert log == [Applying(0, op), op, Applied(0, op, outcome)]


def test_a_process_that_dies_in_a_call_has_told_the_op(make_scene: Make) -> None:
    class Died(BaseException):
        pass

    def die(op: Op) -> None:
        raise Died

    log: list[Any] = []
    scene = make_scene(listeners=[log.append])
    scene.target.apply = die
    with pytest.raises(Died):
        scene.run.step(ops.Alloc(1, 1))
    assert log == [Applying(0, ops.Alloc(1, 1))]


def test_a_broken_law_is_told_instead_of_the_answer(make_scene: Make) -> None:
    log: list[Any] = []
    scene = make_scene(listeners=[log.append])
    scene.do(ops.Alloc(1, 1))
    violation = scene.breaks(drop_page, ops.Free(1))
    assert log[2:] == [Applying(1, ops.Free(1)), Broke(violation)]
    assert scene.run.violation is violation


def test_all_listeners_hear_the_same(make_scene: Make) -> None:
    first: list[Any] = []
    second: list[Any] = []
    scene = make_scene(listeners=[first.append, second.append])
    scene.do(*PROGRAM)
    scene.run.finish()
    assert first == second
    applied = [event.op for event in first if isinstance(event, Applied)]
    assert applied == scene.run.program
    indices = [event.index for event in first if isinstance(event, Applying)]
    assert indices == list(range(len(scene.run.program)))


# Violations.


def test_a_violation_is_named_after_law_op_and_position(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1))
    violation = scene.breaks(drop_page, ops.Free(1))
    assert violation.signature == ("L1", "free")
    assert violation.op_index == 2


def test_the_error_carries_violation_program_and_header(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    scene.target.spoil = drop_page
    with pytest.raises(LawBroken) as caught:
        scene.run.step(ops.Free(1))
    assert caught.value.violation is scene.run.violation
    assert caught.value.program == (ops.Alloc(1, 1), ops.Free(1))
    assert caught.value.header.geometry == scene.target.geometry
    assert caught.value.header.target == scene.target.name
    assert str(caught.value).startswith("L1 (conservation) broke at op 1, free: expected ")


def test_each_law_has_an_error_class_of_its_own(make_scene: Make) -> None:
    assert set(LAW_ERRORS) == set(BY_ID)
    assert len(set(LAW_ERRORS.values())) == len(LAWS)
    assert all(issubclass(error, LawBroken) for error in LAW_ERRORS.values())
    for law, spoil in {
        "L1": drop_page,
        "L2": lambda shown: shown.full_free.append(0),
        "L4": lambda shown: shown.mapping.__setitem__(-1, 0),
    }.items():
        scene = make_scene()
        scene.target.spoil = spoil
        with pytest.raises(LAW_ERRORS[law]) as caught:
            scene.run.step(ops.GroupBegin())
        assert caught.type.__name__ == f"LawBroken_{law}"


# Cadence.


@pytest.mark.parametrize("period", [1, 3, 8])
def test_contents_are_looked_at_every_period_steps(make_scene: Make, period: int) -> None:
    scene = make_scene(period=period)
    after: list[bool] = []
    for op in PROGRAM:
        scene.do(op)
        after.append(scene.target.views[-1])
    assert after == [step % period == 0 for step in range(1, len(PROGRAM) + 1)]


@pytest.mark.parametrize(
    ("before", "op"),
    [
        ((ops.Retract(1, 1),), ops.Restore(1, 2)),
        ((), ops.Relocate(1)),
        ((ops.FreeSwa(1),), ops.LoadBackSwa(1)),
    ],
    ids=["restore", "relocate", "load_back_swa"],
)
def test_contents_are_looked_at_as_soon_as_they_come_back(
    before: tuple[Op, ...], op: Op, make_scene: Make
) -> None:
    scene = make_scene(period=1000)
    scene.do(ops.Alloc(1, 1), *before)
    assert not any(scene.target.views)
    scene.do(op)
    assert scene.target.views[-1] is True


@pytest.mark.parametrize(
    ("before", "op"),
    [
        ((request_ops.RetractRequest(1, backup=True),), request_ops.ResumeRequest(1)),
        (
            (
                request_ops.Finish(1),
                request_ops.SavePrefix(1, ((1, 8),)),
                request_ops.Evict(16, 0),
                request_ops.LoadPrefix(1, 1),
            ),
            request_ops.EndLoad(1),
        ),
    ],
    ids=["resume_request", "end_load"],
)
def test_contents_of_requests_are_looked_at_as_soon_as_they_come_back(
    before: tuple[Op, ...], op: Op, make_scene: Make
) -> None:
    scene = make_scene(Geometry(4, 12, 9, requests=2, window=4), period=1000)
    scene.do(request_ops.Admit(1, ((1, 8),), output=2), *before)
    assert not any(scene.target.views)
    scene.do(op)
    assert scene.target.views[-1] is True


def test_contents_are_looked_at_around_illegal_calls_in_a_group_and_at_the_end(
    make_scene: Make,
) -> None:
    scene = make_scene(period=1000)
    scene.do(ops.Hostile("end_unopened"), ops.GroupBegin())
    assert not any(scene.target.views)
    scene.do(ops.Hostile("begin_nested"))
    assert scene.target.views[-2:] == [True, True]
    scene.run.finish()
    assert scene.target.views[-2:] == [False, True]


def test_a_changed_stamp_is_found_at_the_next_look(make_scene: Make) -> None:
    scene = make_scene(period=3)
    scene.do(ops.Alloc(1, 1))

    def change(shown: Any) -> None:
        for rows in shown.stamps[:1]:
            rows[scene.slots(scene.full(1))[0]] += 1

    scene.target.spoil = change
    scene.do(ops.GroupBegin())
    violation = scene.breaks(change, ops.GroupEnd())
    assert violation.signature == ("stamps", "group_end")
    assert violation.op_index == 2


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_state_is_looked_at_every_so_many_steps(make_scene: Make, every: int) -> None:
    scene = make_scene(every=every)
    looked: list[bool] = []
    program = (ops.GroupBegin(), ops.GroupEnd()) * 5
    for op in program:
        before = len(scene.target.views)
        scene.do(op)
        looked.append(len(scene.target.views) > before)
    assert looked == [step % every == 0 for step in range(1, 11)]


def test_with_long_intervals_the_period_counts_the_looks(make_scene: Make) -> None:
    scene = make_scene(every=3, period=2)
    for op in (ops.GroupBegin(), ops.GroupEnd()) * 6:
        scene.do(op)
    assert scene.target.views == [False, True, False, True]


def test_with_long_intervals_what_comes_back_waits_for_the_next_look(make_scene: Make) -> None:
    scene = make_scene(every=100)
    scene.do(ops.Alloc(1, 1), ops.Retract(1, 1), ops.Restore(1, 2))
    assert scene.target.views == []


def test_between_long_intervals_a_failure_is_asked_law_l5_alone(make_scene: Make) -> None:
    scene = make_scene(every=100)
    scene.do(ops.Alloc(1, 99), ops.Alloc(2, 99))
    scene.run.step(ops.Alloc(3, 1))
    assert len(scene.target.views) == 3  # each look after a refusal is that before the next one
    scene.run.finish()
    tally = scene.run.tally
    assert tally.checks["L5"] == tally.refusals == 3
    # The probes at the end are looked at in full: all lent, one more refused, freed, drained.
    assert tally.checks["L1"] == tally.checks["L7"] == len(scene.target.calls) - 4 + 1


def test_a_failed_call_is_looked_at_whatever_the_cadence(make_scene: Make) -> None:
    scene = make_scene(every=100)
    scene.do(ops.Alloc(1, 1))
    assert scene.target.views == []
    scene.do(ops.Alloc(2, 99))
    assert len(scene.target.views) == 2  # before the call and after it
    scene.do(ops.Hostile("end_unopened"))
    assert len(scene.target.views) == 3  # the last look is still of the moment before
    scene.do(ops.GroupBegin())
    scene.do(ops.Hostile("begin_nested"))
    assert len(scene.target.views) == 5  # in a group a full look before and after


def test_the_state_before_a_call_is_the_state_after_the_last_one(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(*PROGRAM)
    assert len(scene.target.views) == len(PROGRAM) + 1


# The end.


def test_at_the_end_everything_is_given_back_as_ops_of_the_program(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(*PROGRAM[:4])
    scene.run.finish()
    assert tuple(scene.run.program[:4]) == PROGRAM[:4]
    closing = scene.run.program[4:]
    assert [op.kind for op in closing] == ["group_end", "free", "free", "free"]
    assert scene.model.rows == {}
    assert not scene.model.group_open
    assert scene.target.closed


def test_at_the_end_every_pause_ends_and_every_piece_and_buffer_is_given_back(
    make_scene: Make,
) -> None:
    scene = make_scene(Geometry(4, 16, device_pages=8, saver=True))
    program = (
        *(ops.Alloc(1, 1), ops.DeviceBuffer(1, 7, 1), ops.Reserve(3, "weights", 1)),
        *(ops.GroupBegin(), ops.Pause("weights"), ops.Pause("kv_cache")),
    )
    scene.do(*program)
    scene.run.finish()
    assert scene.run.program[len(program) :] == [
        ops.GroupEnd(),
        ops.Resume("kv_cache"),
        ops.Resume("weights"),
        ops.Drop(3),
        ops.FreeBuffer(7),
        ops.Free(1),
    ]
    assert scene.run.violation is None


def test_where_every_layer_slides_what_went_is_given_up_alone(make_scene: Make) -> None:
    scene = make_scene(Geometry(4, 8, pure_swa=True))
    scene.do(ops.Alloc(1, 5), ops.FreeSwa(1, 0, 2), ops.FreeSwa(1, 3, 4))
    scene.run.finish()
    assert scene.run.program[3:] == [
        ops.FreeFull(1, 0, 2),
        ops.Free(1, 0, 1),
        ops.FreeFull(1, 0, 1),
        ops.Free(1),
    ]
    assert scene.run.violation is None


def test_callers_that_lend_and_never_give_back_are_told_so_at_the_end(make_scene: Make) -> None:
    scene = make_scene(contract={"ops": frozenset(("alloc",))})
    scene.do(ops.Alloc(1, 1))
    with pytest.raises(ValueError, match=r"kvcore lends, but .* do not use free"):
        scene.run.finish()


@pytest.mark.parametrize("pages", [(12, 9), (9, 12), (9, 9), (12, 0)])
def test_at_the_end_all_that_is_free_is_lent_once(make_scene: Make, pages: tuple[int, int]) -> None:
    scene = make_scene(Geometry(4, *pages))
    scene.do(ops.Alloc(1, 2))
    scene.run.finish()
    probes = scene.target.calls[len(scene.run.program) :]
    room = min(side for side in pages if side)
    larger = ["load_back", "free"] if pages[1] and pages[0] > pages[1] else []
    assert [op.kind for op in probes] == ["extend", "extend", "free", *larger]
    assert [tokens for op in probes[:2] for _, tokens in op.parts] == [room * 4, 1]
    refused = scene.run.tally.refusals
    assert refused == 1


def test_where_callers_look_first_nothing_is_asked_beyond_the_room(make_scene: Make) -> None:
    scene = make_scene(contract={"exhaustion": False})
    scene.run.finish()
    assert [op.kind for op in scene.target.calls] == ["extend", "free", "load_back", "free"]
    assert scene.run.tally.refusals == 0


def test_where_tombstones_are_freed_alone_the_end_frees_them_so(make_scene: Make) -> None:
    scene = make_scene(contract={"live_frees": frozenset(("slots",))})
    scene.do(ops.Alloc(1, 5), ops.FreeSwa(1, 0, 1), ops.FreeSwa(1, 3, 4))
    scene.run.finish()
    closing = scene.run.program[3:]
    assert closing == [
        ops.FreeFull(1, 0, 1),
        ops.Free(1, 0, 2),
        ops.FreeFull(1, 0, 1),
        ops.Free(1),
    ]
    assert scene.run.violation is None


def test_what_shows_only_when_all_is_given_back_is_a_violation_of_the_drain(
    make_scene: Make,
) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))

    def lose_after_the_program(shown: Any) -> None:
        if len(scene.target.calls) > len(scene.run.program):
            shown.full_free.clear()

    violation = scene.breaks_at_the_end(lose_after_the_program)
    assert violation.op_kind == DRAIN
    assert violation.op_index == len(scene.run.program) == 2
    assert not scene.target.closed


# Driving.


def test_drive_takes_ops_to_the_end_and_gives_a_clean_verdict() -> None:
    run = Run(core_target(Geometry(4, 12, 9)))
    verdict = drive(run, Recorded(PROGRAM))
    assert verdict.violation is None
    assert verdict.program[: len(PROGRAM)] == PROGRAM
    assert verdict.tally is run.tally


def test_drive_stops_at_the_first_broken_law(make_scene: Make) -> None:
    scene = make_scene()
    scene.target.spoil = drop_page
    verdict = drive(scene.run, Recorded(PROGRAM))
    assert verdict.violation == scene.run.violation
    assert verdict.violation is not None
    assert verdict.violation.signature == ("L1", "alloc")
    assert verdict.program == PROGRAM[:1]


def test_a_source_is_shown_the_model_that_the_ops_left(make_scene: Make) -> None:
    scene = make_scene()

    class Counting:
        def __init__(self) -> None:
            self.rows: list[int] = []

        def next_op(self, model: Any) -> Op | None:
            self.rows.append(len(model.rows))
            return ops.Alloc(model.last_name + 1, 1) if len(model.rows) < 3 else None

    source = Counting()
    drive(scene.run, source)
    assert source.rows == [0, 1, 2, 3]


def test_a_program_replays_to_the_same_program() -> None:
    geometry = Geometry(4, 12, 9)
    heard: list[Any] = []
    first = replay(core_target, geometry, PROGRAM)
    second = replay(core_target, geometry, first.program, listeners=[heard.append])
    assert second == first
    assert len(heard) == 2 * len(first.program)


# Counting.


@pytest.mark.parametrize("more", [{}, {"requests": 4, "saver": True}], ids=["pools", "all"])
def test_counts_add_up_within_a_run(more: dict[str, Any], make_scene: Make) -> None:
    scene = make_scene(Geometry(4, 12, 9, **more), period=4)
    scene.run.step(ops.Free(77))
    scene.do(*PROGRAM)
    scene.run.finish()
    tally, program = scene.run.tally, scene.run.program
    applied = len(scene.target.calls)
    rounds = applied + 1  # the last look at the drained pools

    assert tally.programs == 1
    assert tally.skipped == 1
    assert tally.steps == applied  # the program, and the probes of the drained pools
    assert tally.ops == Counter(op.kind for op in program)
    assert tally.pairs == Counter((one.kind, two.kind) for one, two in pairwise(program))
    assert tally.grouped == {"free_swa": 1, "recover": 1, "group_end": 1}
    assert tally.refusals == 2  # one in the program, one page too many at the end
    assert set(tally.checks) == set(BY_ID)
    # Laws that ask at some calls only count those: failures, ends of groups, hostile calls.
    asked = {"L5": tally.refusals, "L6": 1, "hostile": 0}
    for law in LAWS:
        if law.id in asked:
            assert tally.checks[law.id] == asked[law.id]
        elif law.id in ("tree", "locks") or (law.id in ("rows", "saver") and not more):
            assert tally.checks[law.id] == 0
        elif law.id == "L8":
            assert 0 < tally.checks[law.id] <= rounds
        elif law.cost is Cost.AT_END:
            assert tally.checks[law.id] == 1
        elif law.id in ("layout", "bounds", "raises"):
            assert tally.checks[law.id] == applied
        elif law.cost is Cost.PERIODIC:
            assert 0 < tally.checks[law.id] < rounds
        else:
            assert tally.checks[law.id] == rounds


def test_a_run_that_breaks_counts_the_checks_up_to_there(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    scene.breaks(drop_page, ops.Free(1))
    assert scene.run.tally.checks["L1"] == 2
    assert scene.run.tally.checks["L10"] == 0
    assert scene.run.tally.checks["raises"] == 2


def test_tallies_of_runs_add_up() -> None:
    total = Tally()
    runs = [replay(core_target, Geometry(4, 12, 9), PROGRAM[:length]).tally for length in (3, 8)]
    for tally in runs:
        total.add(tally)
    assert total.programs == 2
    for name in ("steps", "skipped", "refusals"):
        assert getattr(total, name) == sum(getattr(tally, name) for tally in runs)
    for name in ("checks", "ops", "grouped", "pairs"):
        assert getattr(total, name) == getattr(runs[0], name) + getattr(runs[1], name)
    assert total.steps > sum(total.ops.values())  # the probes are no part of a program
    assert sum(total.ops.values()) - total.programs == sum(total.pairs.values())


# The catalogue.


def test_every_law_has_a_sentence_and_a_public_source() -> None:
    assert [law.id for law in LAWS] == list(BY_ID)
    for law in LAWS:
        assert law.sentence.endswith(".")
        assert law.title
    # Only a table that does not say what its requests hold was never reported in public.
    assert [law.id for law in LAWS if "#" not in law.source] == ["rows"]
    numbered = {f"L{number}" for number in range(1, 11)}
    assert numbered | {"tree", "locks", "stamps", "rows", "saver"} <= set(BY_ID)


def test_the_program_of_a_run_can_be_written_down(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(*PROGRAM)
    assert all(msgspec.json.encode(op) for op in scene.run.program)

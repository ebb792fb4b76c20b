"""A target whose queries or lists raise: a violation like any other, and never the end of a run.

Leaves out calls that raise (`test_laws_on_answers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.errors import DoubleFreeError
from kvcore.invariants import DRAIN, LawBroken, drive
from kvcore.models import Clause, Done, ops
from kvcore.strategies.replay import Recorded
from kvcore.targets.attempt import CallRaised, raised_by

Make = Callable[..., Any]

DEFECT = DoubleFreeError("give of 3 pages to 2 free ones\nand a line more")
CLAUSE = Clause(
    "raises",
    "capacity, free pages and mapping can be asked for",
    "DoubleFreeError: give of 3 pages to 2 free ones",
)


def raising(error: Exception) -> Callable[[Any], None]:
    def spoil(shown: Any) -> None:
        raise error

    return spoil


def test_a_query_that_raises_breaks_a_law_at_the_op_before_it(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 2), ops.GroupBegin())
    violation = scene.breaks(raising(DEFECT), ops.Free(1))
    assert (violation.law, violation.op_index, violation.op_kind) == ("raises", 2, "free")
    assert violation.clauses == (CLAUSE,)
    assert scene.run.program == [ops.Alloc(1, 2), ops.GroupBegin(), ops.Free(1)]


def test_what_was_raised_in_an_attempt_is_what_is_said(make_scene: Make) -> None:
    scene = make_scene()
    violation = scene.breaks(raising(CallRaised(raised_by(DEFECT))), ops.Alloc(1, 2))
    assert violation.clauses == (CLAUSE,)


def test_a_query_beyond_a_buffer_breaks_the_law_about_buffers(make_scene: Make) -> None:
    violation = make_scene().breaks(raising(IndexError("index 9 is out of bounds")), ops.Clear())
    assert violation.law == "bounds"


def test_an_illegal_call_that_was_accepted_is_told_beside_it(make_scene: Make) -> None:
    """The view that looks for more that is wrong must not take the place of what was found."""
    scene = make_scene()
    scene.do(ops.Alloc(1, 2))
    scene.target.inner.apply = lambda op: Done()
    violation = scene.breaks(raising(DEFECT), ops.Hostile("free_beyond"))
    assert {clause.law for clause in violation.clauses} == {"hostile", "raises"}


@pytest.mark.parametrize("every", [1, 7])
def test_a_target_that_cannot_be_looked_at_from_the_start_is_found_at_the_first_op(
    make_scene: Make, every: int
) -> None:
    scene = make_scene(every=every)
    violation = scene.breaks(raising(DEFECT), ops.Alloc(1, 99))
    assert (violation.law, violation.op_index) == ("raises", 0)


def test_it_is_found_after_the_last_op_too(make_scene: Make) -> None:
    scene = make_scene(every=10**6)
    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks_at_the_end(raising(DEFECT))
    assert (violation.law, violation.op_kind) == ("raises", DRAIN)


def test_a_run_that_is_driven_ends_with_the_violation(make_scene: Make) -> None:
    scene = make_scene()
    scene.target.spoil = raising(DEFECT)
    verdict = drive(scene.run, Recorded((ops.Alloc(1, 2), ops.Free(1))))
    assert verdict.violation is not None
    assert verdict.program == (ops.Alloc(1, 2),)


def test_an_interrupt_is_no_violation(make_scene: Make) -> None:
    scene = make_scene()

    def interrupted(shown: Any) -> None:
        raise KeyboardInterrupt

    scene.target.spoil = interrupted
    with pytest.raises(KeyboardInterrupt):
        scene.run.step(ops.Alloc(1, 2))


def test_the_error_itself_is_the_cause_for_whoever_wants_to_see_where(make_scene: Make) -> None:
    scene = make_scene()
    scene.target.spoil = raising(DEFECT)
    with pytest.raises(LawBroken) as caught:
        scene.run.step(ops.Alloc(1, 2))
    assert caught.value.__cause__ is DEFECT


class Speechless(Exception):
    """Has a message that cannot be read."""

    def __str__(self) -> str:
        raise TypeError("no message")


def test_an_error_without_a_readable_message_is_a_violation_too(make_scene: Make) -> None:
    violation = make_scene().breaks(raising(Speechless()), ops.Alloc(1, 2))
    assert violation.clauses[0].seen == "Speechless: a message that cannot be read"


def test_a_query_that_raises_once_behind_a_refusal_is_found_between_checks(
    make_scene: Make,
) -> None:
    """Law L5 takes a view of its own there, and asked again the target may answer."""
    scene = make_scene(every=5)
    asked: list[Any] = []

    def once(shown: Any) -> None:
        asked.append(shown)
        if len(asked) == 2:
            raise DEFECT

    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks(once, ops.Alloc(2, 99))
    assert (violation.law, violation.op_index) == ("raises", 1)

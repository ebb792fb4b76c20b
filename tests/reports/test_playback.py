"""A program played again is seen as it was: answers, and the state around one op."""

from __future__ import annotations

import pytest

from kvcore.invariants import DRAIN, Run, Tally, Verdict
from kvcore.invariants.run import drive
from kvcore.models import Clause, Geometry, Lent, Outcome, Violation, ops
from kvcore.models.ops import Op
from kvcore.models.trace import Trace
from kvcore.reports import playback
from kvcore.reports.moment import Owner
from kvcore.reports.playback import DEATH, Witness, died, is_broken_when_fresh, watch
from kvcore.strategies.isolation import death
from kvcore.strategies.replay import Recorded, replay
from kvcore.targets.core import core_target
from kvcore.targets.protocol import Target, View
from kvcore.targets.registry import open_target

GEOMETRY = Geometry(page_size=2, full_pages=4, swa_pages=4)
PROGRAM: tuple[Op, ...] = (
    ops.Alloc(1, 2),
    ops.Decode((1,)),
    ops.GroupBegin(),
    ops.FreeSwa(1, 0, 1),
)


class Misordering(Witness):
    """Answers every allocation with its slots in the wrong order."""

    def apply(self, op: Op) -> Outcome:
        outcome = super().apply(op)
        if isinstance(outcome, Lent):
            return Lent(outcome.slots[::-1], outcome.peers[::-1])
        return outcome


def verdict_of(program: tuple[Op, ...], violation: Violation | None = None) -> Verdict:
    return Verdict(program, violation, Tally(programs=1))


def test_the_state_after_a_step_is_what_the_program_says() -> None:
    seen = watch("kvcore", GEOMETRY, verdict_of(PROGRAM), 3)
    assert seen.before is not None
    assert seen.after is not None
    assert set(seen.after.owners.values()) == {Owner(1, 0, 2), Owner(1, 1, 2), Owner(1, 2, 1)}
    assert seen.after.group_open
    assert len(seen.after.swa.pending) == 1
    assert seen.before.swa.pending == frozenset()
    assert seen.after.full.free.total() == 4 - 3
    # The page of the open group and the two that are still mapped are not free.
    assert seen.after.swa.free.total() == 4 - 3


def test_there_is_an_answer_for_each_op_up_to_the_step() -> None:
    seen = watch("kvcore", GEOMETRY, verdict_of(PROGRAM), 1)
    first, second = seen.answers
    assert isinstance(first, Lent)
    assert isinstance(second, Lent)
    assert (len(first.slots), len(second.slots)) == (4, 1)


def test_the_state_around_the_drain_is_that_after_the_program() -> None:
    program: tuple[Op, ...] = (ops.Alloc(1, 1), ops.Free(1))
    seen = watch("kvcore", GEOMETRY, verdict_of(program), 2)
    assert seen.after is not None
    assert seen.before.full.free == seen.after.full.free
    assert len(seen.answers) == 2


def test_pages_of_a_rejected_answer_belong_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(geometry: Geometry) -> Target:
        return Misordering(core_target(geometry))

    run = Run(factory(GEOMETRY))
    verdict = drive(run, Recorded(PROGRAM))
    assert verdict.violation is not None
    monkeypatch.setattr(playback, "open_target", lambda name: factory)
    seen = watch("misordering", GEOMETRY, verdict, 0)
    assert seen.after is not None
    assert seen.after.owners == {}
    lent = {page for page in range(1, 5) if page not in seen.after.full.free}
    assert seen.after.full.unclaimed == lent
    assert len(seen.after.swa.unclaimed) == len(lent) == 2


def test_the_op_in_which_a_process_died_is_not_played() -> None:
    violation = death(PROGRAM[:2], 11)
    assert died(violation)
    seen = watch("kvcore", GEOMETRY, verdict_of(PROGRAM[:2], violation), 1)
    assert seen.after is None
    assert seen.answers[1] is None
    assert len(seen.before.owners) == 2


def test_a_step_before_the_one_in_which_a_process_died_is_played() -> None:
    violation = death(PROGRAM[:2], 11)
    seen = watch("kvcore", GEOMETRY, verdict_of(PROGRAM[:2], violation), 0)
    assert seen.after is not None


def test_other_violations_are_no_deaths(leak: Trace) -> None:
    assert leak.violation is not None
    assert not died(leak.violation)
    assert DEATH in death(PROGRAM, 256).clauses[0].seen


def test_what_was_seen_is_what_the_verdict_tells_of(leak: Trace) -> None:
    verdict = replay(open_target(leak.header.target), leak.header.geometry, leak.ops)
    seen = watch(leak.header.target, leak.header.geometry, verdict, 5)
    assert seen.violation == leak.violation
    assert seen.program == leak.ops
    assert seen.after is not None
    [lost] = (
        {1, 2, 3, 4}
        - set(seen.after.swa.free)
        - {entry for entry in seen.after.mapping[:-1] if entry}
    )
    assert leak.violation is not None
    assert leak.violation.clauses[0].swa_pages == (lost,)


def test_the_drain_of_a_target_that_breaks_there_is_watched() -> None:
    clause = Clause("L10", "all free", "one missing", (2,))
    program: tuple[Op, ...] = (ops.Alloc(1, 1), ops.Free(1))
    seen = watch("kvcore", GEOMETRY, verdict_of(program, Violation("L10", 2, DRAIN, (clause,))), 2)
    assert seen.after is not None
    assert seen.index == len(program)


def test_a_law_may_be_broken_on_a_fresh_target() -> None:
    saved = Geometry(2, 2, attention="dsa", saver=True)
    assert is_broken_when_fresh("fault:index-k-outside-saver", saved, "saver")
    assert not is_broken_when_fresh("fault:index-k-outside-saver", saved, "L3")
    assert not is_broken_when_fresh("kvcore", saved, "saver")
    # Laws that are judged on answers have nothing to ask of a target whose queries answer.
    assert not is_broken_when_fresh("kvcore", saved, "bounds")


class Unaskable(Witness):
    """Cannot be asked anything."""

    def view(self, *, stamps: bool) -> View:
        raise ValueError("not now")


def test_a_target_that_cannot_be_asked_is_broken_when_fresh_and_shown_without_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def factory(geometry: Geometry) -> Target:
        return Unaskable(core_target(geometry))

    monkeypatch.setattr(playback, "open_target", lambda name: factory)
    assert is_broken_when_fresh("anything", GEOMETRY, "raises")
    assert not is_broken_when_fresh("anything", GEOMETRY, "L3")
    clause = Clause("raises", "capacity can be asked for", "ValueError: not now")
    seen = watch(
        "anything", GEOMETRY, verdict_of(PROGRAM[:1], Violation("raises", 0, "alloc", (clause,))), 0
    )
    assert seen.before is None
    assert seen.after is None

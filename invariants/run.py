"""The one interpreter: the only place where ops, model, target and laws meet.

For each op: allowed? → tell the listeners → apply on the target → let the model judge → check
the laws that are due → tell the listeners. Leaves out where ops come from (`kvcore.strategies`) and
what becomes of a violation (`kvcore.reports`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, Protocol

from kvcore.invariants.catalogue import BY_ID, LAWS, PRECEDENCE
from kvcore.invariants.check import Check
from kvcore.invariants.clauses import query_clause
from kvcore.invariants.failures import FAILURES, failure_changes_nothing
from kvcore.invariants.image import Image, ListImage
from kvcore.invariants.schedule import schedule
from kvcore.invariants.tally import Tally
from kvcore.invariants.tensor_image import TensorImage
from kvcore.models import (
    Clause,
    Done,
    Lent,
    Mismatch,
    Model,
    Outcome,
    Violation,
    model_of,
    ops,
    request_ops,
)
from kvcore.models.ops import Op
from kvcore.models.outcomes import Refused
from kvcore.models.trace import Header, new_header
from kvcore.targets.protocol import Target, View

PLAIN_SLOTS = 4096
"""Pools with more slots than this are checked in vectorised form."""

ANSWER_LAWS = ("layout", "bounds", "raises")
"""Laws that the model judges on every answer."""

OCCASIONAL_LAWS = ("L5", "L6", "tree", "locks", "L8", "stamps", "rows", "saver", "hostile")
"""Laws that have something to ask at some steps only, or of some targets."""

ON_CONTENTS: frozenset[type[Op]] = frozenset(
    (
        *(ops.Restore, ops.Relocate, ops.LoadBackSwa),
        *(ops.Reserve, ops.Drop, ops.Pause, ops.Resume),
        *(request_ops.ResumeRequest, request_ops.EndLoad),
    )
)
"""Ops after which the periodic laws are due at once: what they write is soon overwritten."""

DRAIN = "drain"
"""Op kind of a violation that shows only after everything was given back."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The op was not allowed; nothing was done."""

    why: str


@dataclass(frozen=True, slots=True)
class Applying:
    """An op is about to be applied."""

    index: int
    op: Op


@dataclass(frozen=True, slots=True)
class Applied:
    """An op was applied and nothing broke."""

    index: int
    op: Op
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Broke:
    """A law broke; the run is over."""

    violation: Violation


Event = Applying | Applied | Broke
Listener = Callable[[Event], None]


class LawBroken(Exception):
    """A broken law, with the program so far. Each law has a subclass of its own, so that Hypothesis
    tells two faults in one run apart. ``header`` says on what the program ran."""

    def __init__(self, violation: Violation, program: Sequence[Op], header: Header) -> None:
        clause = violation.clauses[0]
        super().__init__(
            f"{violation.law} ({BY_ID[violation.law].title}) broke at op {violation.op_index}, "
            f"{violation.op_kind}: expected {clause.expected}; saw {clause.seen}"
        )
        self.violation = violation
        self.program = tuple(program)
        self.header = header


LAW_ERRORS: dict[str, type[LawBroken]] = {
    law.id: type(f"LawBroken_{law.id}", (LawBroken,), {}) for law in LAWS
}


class Run:
    """One program on one fresh target. ``period`` is how often the periodic laws are checked, in
    steps.

    ``every``: the laws are checked every so many steps, for soak runs over large pools. Above 1,
    ``period`` counts these checks and not steps; between them answers are judged as always, but no
    view is taken, except around a refusal and an illegal call, for law L5."""

    def __init__(
        self,
        target: Target,
        *,
        period: int = 1,
        every: int = 1,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.target = target
        self.model = model_of(target.geometry, target.contract)
        self.program: list[Op] = []
        self.violation: Violation | None = None
        self._listeners = tuple(listeners)
        self._period, self._every = period, every
        self._last: View | None = None
        self._cause: Exception | None = None
        self._held: dict[int, list[int]] = {}
        self._answers = 0
        geometry = target.geometry
        slots = geometry.full_size + geometry.swa_size + geometry.device_size
        small = slots <= PLAIN_SLOTS
        self._schedule = schedule(small=small, serves=geometry.serves)
        self._image: Image = ListImage(self.model) if small else TensorImage(self.model)
        # What the tally is made of beside the program.
        self._tally = Tally(programs=1)
        self._grouped: list[str] = []
        self._skipped = self._refusals = self._probes = self._judged = self._rounds = 0
        # Checks with the periodic laws and without, and those of them after everything was given
        # back, which all have them.
        self._periodic = self._usual = self._drained = 0
        self._answers_seen = 0
        self._asked = dict.fromkeys(OCCASIONAL_LAWS, 0)
        self._counted = (-1,) * 5

    def step(self, op: Op) -> Outcome | Skipped:
        """Apply one op if it is allowed; raises `LawBroken` when a law breaks."""
        model = self.model
        why = model.why_not(op)
        if why is not None:
            self._skipped += 1
            return Skipped(why)
        if model.group_open:
            self._grouped.append(op.kind)
        self.program.append(op)
        if not self._listeners:
            return self._perform(op)
        index = len(self.program) - 1
        self._tell(Applying(index, op))
        outcome = self._perform(op)
        self._tell(Applied(index, op, outcome))
        return outcome

    def finish(self) -> None:
        """Give everything back, as ops of the program; then lend everything once, give it back
        again, and check that the pools are as new. Raises `LawBroken`."""
        for op in self.model.closing_ops():
            done = self.step(op)
            if isinstance(done, Skipped):
                raise ValueError(f"the contract of {self.target.name} lends, but {done.why}")
        for op in self.model.probing_ops():
            if self.model.why_not(op) is None:
                self._probe(op)
        for op in self.model.closing_ops():
            self._probe(op)
        if clauses := self._broken_clauses(ops.Clear(), Done(), None, drained=True):
            self._break(clauses, DRAIN)
        self._settle_tally()
        self.target.close()

    @property
    def tally(self) -> Tally:
        """What was done so far: counted when somebody asks, and at the end."""
        self._settle_tally()
        return self._tally

    def _probe(self, op: Op) -> None:
        """A checked step that is no part of the program."""
        self._probes += 1
        self._perform(op, DRAIN)

    def _perform(self, op: Op, kind: str = "") -> Outcome:
        """Apply and judge an op; ``kind`` is what violations call it, empty for its label."""
        before = self._last
        if before is None or op.hostile:
            try:
                before = self._view_before(op)
            except Exception as error:
                self._break([query_clause(error)], kind or op.label, error)
        outcome = self.target.apply(op)
        answer = type(outcome)
        if answer is Refused:
            self._refusals += 1
        self._judged += 1
        if op.hostile:
            self._asked["hostile"] += 1
        try:
            self.model.accept(op, outcome)
        except Mismatch as mismatch:
            clauses = list(mismatch.clauses)
            if op.hostile:
                # The call should have changed nothing, so the model still tells the right state.
                clauses += self._broken_clauses(op, outcome, before)
            self._break(clauses, kind or op.label)
        if isinstance(outcome, Lent) and type(op) is not ops.LoadBackSwa:
            self._answers += 1
            self._held[self._answers] = list(outcome.slots)
        due = self._every == 1 or kind == DRAIN or self._is_check_due(op, outcome, before)
        if due and (clauses := self._broken_clauses(op, outcome, before)):
            self._break(clauses, kind or op.label)
        return outcome

    def _view_before(self, op: Op) -> View | None:
        """The view of the moment before ``op``: the last one, or a new one for law L5."""
        if op.hostile and self.model.group_open:
            return self.target.view(stamps=True)
        if self._last is not None:
            return self._last
        if self._every == 1 or op.hostile or self.model.must_refuse(op):
            return self.target.view(stamps=False)
        return None

    def _is_check_due(self, op: Op, outcome: Outcome, before: View | None) -> bool:
        """Where not every step is checked, whether this one is: on schedule, or because a failed
        call broke law L5."""
        if len(self.program) % self._every == 0:
            return True
        if before is not None and isinstance(outcome, FAILURES):
            return self._changed_by_failure(op, outcome, before)
        self._last = None
        return False

    def _broken_clauses(
        self, op: Op, outcome: Outcome, before: View | None, *, drained: bool = False
    ) -> list[Clause]:
        """Check every law that is due now, on a new view. Where it shows what the image says, the
        laws of the image hold; else, at the end and every so many checks they are asked."""
        if self._every == 1 and not op.hostile:
            # `_contents_are_due`, written out for nearly every op.
            periodic = drained or type(op) in ON_CONTENTS or len(self.program) % self._period == 0
        else:
            periodic = drained or self._contents_are_due(op)
        try:
            view = self._last = self.target.view(stamps=periodic)
        except Exception as error:
            self._last, self._cause = None, error
            return [query_clause(error)]
        check = Check(self.model, op, outcome, before, view, self._held, drained)
        failed = before is not None and isinstance(outcome, FAILURES)
        self._rounds += 1
        if drained:
            self._drained += 1
        elif periodic:
            self._periodic += 1
        else:
            self._usual += 1
        listed = view.listed
        if view.holds_answers if listed is None else listed.held:
            self._answers_seen += 1
        if failed or view.tree is not None or periodic or type(op) is ops.GroupEnd:
            self._note_asked(op, view, failed=failed, periodic=periodic)
        schedule = self._schedule
        in_full = drained or self._rounds % schedule.full_every == 0
        clauses: list[Clause] = []
        if self._image.shows(check) and not in_full:
            if failed:
                clauses += schedule.failure(check)
            for form in schedule.beyond_image[periodic]:
                clauses += form(check)
            return clauses
        for _, form in schedule.due[periodic, drained]:
            clauses += form(check)
        if not clauses:
            self._image.adopt(check)
        return clauses

    def _note_asked(self, op: Op, view: View, *, failed: bool, periodic: bool) -> None:
        """Count the laws that have something to ask at some steps only."""
        asked = self._asked
        if failed:
            asked["L5"] += 1
        if type(op) is ops.GroupEnd:
            asked["L6"] += 1
        if view.tree is not None:
            asked["tree"] += 1
            asked["locks"] += 1
        if periodic:
            asked["stamps"] += view.holds_stamps
            asked["rows"] += self.model.geometry.requests > 0
            asked["saver"] += view.holds_memory

    def _contents_are_due(self, op: Op) -> bool:
        """Whether the periodic laws are checked after ``op``."""
        # A hostile call in a group may have changed what waits there, which is rarely looked at.
        if op.hostile and self.model.group_open:
            return True
        if self._every > 1:
            return (self._rounds + 1) % self._period == 0
        return type(op) in ON_CONTENTS or len(self.program) % self._period == 0

    def _changed_by_failure(self, op: Op, outcome: Outcome, before: View | None) -> bool:
        """Whether law L5 alone is broken, on a new view, or there can be none."""
        try:
            self._last = self.target.view(stamps=False)
        except Exception as error:
            # Now, since it may answer when it is asked again.
            self._break([query_clause(error)], op.label, error)
        check = Check(self.model, op, outcome, before, self._last, self._held)
        broken = bool(failure_changes_nothing(check))
        self._asked["L5"] += not broken
        return broken

    def _settle_tally(self) -> None:
        """Count what the steps left uncounted: the program's ops, the ops in groups and the checks.
        Begins anew where anything was done since, so it does not matter how often, nor where a run
        was interrupted."""
        counted = (len(self.program), self._skipped, self._probes, self._judged, self._rounds)
        if counted == self._counted:
            return
        tally, kinds = self._tally, [op.kind for op in self.program]
        tally.steps = len(kinds) + self._probes
        tally.skipped, tally.refusals = self._skipped, self._refusals
        tally.ops, tally.grouped = Counter(kinds), Counter(self._grouped)
        tally.pairs = Counter(pairwise(kinds))
        tally.checks = checks = Counter[str]()
        for key, rounds in (
            ((False, False), self._usual),
            ((True, False), self._periodic),
            ((True, True), self._drained),
        ):
            if rounds:
                for law, _ in self._schedule.due[key]:
                    checks[law] += rounds
        for law in ANSWER_LAWS:
            checks[law] += self._judged
        # Laws that ask only now and then count the times when they asked.
        for law in OCCASIONAL_LAWS:
            checks[law] = self._asked[law]
        checks["L8"] = self._answers_seen
        self._counted = counted

    def _break(self, clauses: list[Clause], kind: str, cause: Exception | None = None) -> NoReturn:
        """Raise `LawBroken`; ``cause``: what a query raised, for whoever wants to see where."""
        ordered = sorted(clauses, key=lambda clause: PRECEDENCE[clause.law])
        index = len(self.program) if kind == DRAIN else len(self.program) - 1
        self.violation = Violation(ordered[0].law, index, kind, tuple(ordered))
        self._settle_tally()
        self._tell(Broke(self.violation))
        header = new_header(self.target.name, self.target.geometry)
        broken = LAW_ERRORS[self.violation.law](self.violation, self.program, header)
        raise broken from cause or self._cause

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


class Source(Protocol):
    """Where ops come from."""

    def next_op(self, model: Model) -> Op | None:
        """The next op for a run in this state, or None at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended: the ops that were applied, and the violation if there was one."""

    program: tuple[Op, ...]
    violation: Violation | None
    tally: Tally


def drive(run: Run, source: Source) -> Verdict:
    """Take ops from ``source`` until it ends or a law breaks."""
    try:
        while (op := source.next_op(run.model)) is not None:
            run.step(op)
        run.finish()
    except LawBroken:
        pass
    return Verdict(tuple(run.program), run.violation, run.tally)

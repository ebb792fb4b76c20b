"""A program played again and watched: what each op was answered, and the state around one of them.

Plays in this process, after a verdict is known: of a program that kills its process the last op is
left out. Leaves out the state itself (`kvcore.reports.moment`) and how any of it looks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvcore.invariants import LawBroken, Run, Verdict
from kvcore.invariants.check import Check
from kvcore.invariants.plain import PLAIN
from kvcore.models import Done, Geometry, Outcome, Violation, model_of
from kvcore.models.ops import Clear, Op
from kvcore.reports.moment import Moment, look
from kvcore.targets.protocol import Target, View
from kvcore.targets.registry import open_target

DEATH = "the process died"
"""How the clause of a program that killed its process begins to say what was seen."""

OF_QUERIES = ("bounds", "raises")
"""Laws that a query breaks which raises."""

BROKEN_WHEN_FRESH = "broken before the first op, whatever it is"
"""A word on a violation of which `is_broken_when_fresh` holds."""


@dataclass(frozen=True, slots=True)
class Playback:
    """How a program ended on a target. ``answers`` run beside ``program`` (None: the op never
    returned). ``before`` and ``after`` are the moments around op ``index``, which is the length of
    the program for the drain after its last op. ``after`` is None if the process died; so is either
    where the target's queries raise."""

    target: str
    geometry: Geometry
    verdict: Verdict
    answers: list[Outcome | None]
    index: int
    before: Moment | None
    after: Moment | None

    @property
    def program(self) -> tuple[Op, ...]:
        """The ops that were applied."""
        return self.verdict.program

    @property
    def violation(self) -> Violation | None:
        """What broke, if anything did."""
        return self.verdict.violation


class Witness:
    """A target that remembers what it answered, and otherwise passes everything on."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.name, self.geometry, self.contract = inner.name, inner.geometry, inner.contract
        self.answers: list[Outcome | None] = []
        self.last: Op | None = None

    def apply(self, op: Op) -> Outcome:
        """Apply ``op`` and remember it and the answer."""
        self.last = op
        self.answers.append(None)
        outcome = self.inner.apply(op)
        self.answers[-1] = outcome
        return outcome

    def view(self, *, stamps: bool) -> View:
        """The target's view."""
        return self.inner.view(stamps=stamps)

    def close(self) -> None:
        """Close the target."""
        self.inner.close()


def died(violation: Violation) -> bool:
    """Whether the violation is that the process died."""
    return any(clause.seen.startswith(DEATH) for clause in violation.clauses)


def is_broken_when_fresh(target: str, geometry: Geometry, law: str) -> bool:
    """Whether ``law`` is broken on a new target before any op: then whatever comes first seems to
    break it."""
    if law not in PLAIN and law not in OF_QUERIES:
        return False
    fresh = open_target(target)(geometry)
    try:
        view = fresh.view(stamps=True)
    except Exception:
        return law in OF_QUERIES
    finally:
        fresh.close()
    if law not in PLAIN:
        return False
    model = model_of(geometry, fresh.contract)
    check = Check(model, Clear(), Done(), before=None, after=view, held={}, drained=False)
    return bool(PLAIN[law](check))


def watch(target: str, geometry: Geometry, verdict: Verdict, index: int) -> Playback:
    """Play the program of ``verdict`` again, here, up to and including op ``index`` (the drain, if
    that is the program's length), and look at the state before and after that op."""
    witness = Witness(open_target(target)(geometry))
    run = Run(witness)
    for op in verdict.program[:index]:
        run.step(op)
    before = _look(run, witness)
    violation = verdict.violation
    if violation is not None and violation.op_index == index and died(violation):
        answers = [*witness.answers, None][: len(verdict.program)]
        return Playback(target, geometry, verdict, answers, index, before, None)
    with suppress(LawBroken):
        if index < len(verdict.program):
            run.step(verdict.program[index])
        else:
            run.finish()
    answers = witness.answers[: len(verdict.program)]
    return Playback(target, geometry, verdict, answers, index, before, _look(run, witness))


def _look(run: Run, witness: Witness) -> Moment | None:
    answer = witness.answers[-1] if witness.answers else None
    try:
        view = witness.view(stamps=True)
    except Exception:
        # Which law that breaks, the violation says.
        return None
    return look(run, view, witness.last, answer)

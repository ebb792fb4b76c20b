"""A program played again and watched: what each op was answered, and the state around one of them.

Plays in this process, after a verdict is known: of a program that kills its process the last op is
left out. Leaves out how any of it looks.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from kvcore.invariants import LawBroken, Run, Verdict
from kvcore.models import Geometry, Outcome, Violation
from kvcore.models.ops import Op
from kvcore.models.outcomes import Lent
from kvcore.targets.protocol import Target, View
from kvcore.targets.registry import open_target

DEATH = "the process died"
"""How the clause of a program that killed its process begins to say what was seen."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a full page: the ``page``-th page of ``sequence``, ``tokens`` of it in use."""

    sequence: int
    page: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A target's state between two ops, beside what the model knows of it.

    ``full_free``, ``swa_free``: how often each page is in the free containers. ``mapping``: the
    whole mapping tensor. ``owners``: by full page. ``full_pending``, ``swa_pending``: pages that
    wait in the open group. ``unclaimed_full``, ``unclaimed_swa``: pages of an answer that the model
    rejected.
    """

    geometry: Geometry
    full_free: Counter[int]
    swa_free: Counter[int]
    mapping: list[int]
    owners: dict[int, Owner]
    full_pending: frozenset[int]
    swa_pending: frozenset[int]
    group_open: bool
    unclaimed_full: frozenset[int] = frozenset()
    unclaimed_swa: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Playback:
    """How a program ended on a target. ``answers`` run beside ``program`` (None: the op never
    returned). ``before`` and ``after`` are the moments around op ``index``, which is the length of
    the program for the drain after its last op; ``after`` is None if the process died."""

    target: str
    geometry: Geometry
    verdict: Verdict
    answers: list[Outcome | None]
    index: int
    before: Moment
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

    def apply(self, op: Op) -> Outcome:
        """Apply ``op`` and remember the answer."""
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


def watch(target: str, geometry: Geometry, verdict: Verdict, index: int) -> Playback:
    """Play the program of ``verdict`` again, here, up to and including op ``index`` (the drain, if
    that is the program's length), and look at the state before and after that op."""
    witness = Witness(open_target(target)(geometry))
    run = Run(witness)
    for op in verdict.program[:index]:
        run.step(op)
    before = look(run, witness)
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
    return Playback(target, geometry, verdict, answers, index, before, look(run, witness))


def look(run: Run, witness: Witness) -> Moment:
    """The state of ``run`` now."""
    host, model = witness.view(stamps=False).host(), run.model
    size = witness.geometry.page_size
    owners = {
        page.full: Owner(seq, number, page.tokens)
        for seq, row in model.rows.items()
        for number, page in enumerate(row.pages)
    }
    unclaimed_full: frozenset[int] = frozenset()
    unclaimed_swa: frozenset[int] = frozenset()
    answer = witness.answers[-1] if witness.answers else None
    if run.violation is not None and isinstance(answer, Lent):
        unclaimed_full = frozenset(slot // size for slot in answer.slots) - owners.keys()
        held = {page.swa for _, page in model.lent_pages()}
        unclaimed_swa = frozenset(peer // size for peer in answer.peers if peer) - held
    return Moment(
        geometry=witness.geometry,
        full_free=Counter(host.full_free),
        swa_free=Counter(host.swa_free),
        mapping=host.mapping,
        owners=owners,
        full_pending=frozenset(model.full.pending),
        swa_pending=frozenset(model.swa.pending),
        group_open=model.group_open,
        unclaimed_full=unclaimed_full,
        unclaimed_swa=unclaimed_swa,
    )

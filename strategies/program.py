"""Whole programs as Hypothesis data: lists of (kinds, integer), resolved modulo what is live.

Any sublist is a program too, so that Hypothesis shrinks well; `program_test` makes a property of
it. It holds no oracle. Leaves out the stateful machine (`kvcore.strategies.machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvcore.invariants import Run
from kvcore.invariants.run import Listener
from kvcore.models import Contract, Geometry
from kvcore.models.ops import Op
from kvcore.strategies.choices import PackedChoices
from kvcore.strategies.machine import CHOICES, RunSink, widest_contract
from kvcore.strategies.propose import propose
from kvcore.strategies.weights import weighted_kinds
from kvcore.targets.protocol import TargetFactory

LENGTHS = (20, 50)


@dataclass(frozen=True, slots=True)
class Draft:
    """An op not yet resolved: a kind for inside a group, one for outside, and an integer."""

    inside: str
    outside: str
    choices: int

    def resolve(self, run: Run) -> Op | None:
        """The op that this draft names in the run's present state, if any."""
        kind = self.inside if run.model.group_open else self.outside
        return propose(kind, run.model, PackedChoices(self.choices))


def drafts(contract: Contract) -> st.SearchStrategy[Draft]:
    """Drafts of the kinds that a contract allows, in proportion to their weights."""
    return st.builds(
        Draft,
        st.sampled_from(weighted_kinds(contract, inside=True)),
        st.sampled_from(weighted_kinds(contract, inside=False)),
        CHOICES,
    )


def programs(contract: Contract) -> st.SearchStrategy[list[Draft]]:
    """Programs of 20 or 50 drafts: lists without a fixed length average six."""
    draft = drafts(contract)
    return st.sampled_from(LENGTHS).flatmap(
        lambda length: st.lists(draft, min_size=length, max_size=length)
    )


def program_test(
    factory: TargetFactory,
    geometries: Sequence[Geometry],
    *,
    name: str,
    period: int = 1,
    sink: RunSink | None = None,
    listeners: Sequence[Listener] = (),
) -> Callable[[], None]:
    """A property, ready to be called: every program keeps every law on ``factory``'s targets.

    Set Hypothesis settings on it as on any test. ``name`` must differ between properties.
    """
    source = programs(widest_contract(factory, geometries))

    def check(geometry: Geometry, program: list[Draft]) -> None:
        run = Run(factory(geometry), period=period, listeners=listeners)
        try:
            for draft in program:
                op = draft.resolve(run)
                if op is not None:
                    run.step(op)
            run.finish()
        finally:
            if sink is not None:
                sink(run)

    check.__name__ = check.__qualname__ = name
    return given(geometry=st.sampled_from(list(geometries)), program=source)(check)

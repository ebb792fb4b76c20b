"""Which laws are asked at which checks, and in which form.

Covers the choice by the size of the pools, by period, and by what an image makes superfluous
(`kvcore.invariants.image`). Leaves out when a check is due: that is the run's business.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kvcore.invariants.catalogue import BY_ID, Cost
from kvcore.invariants.check import LawForm
from kvcore.invariants.image import SHOWN
from kvcore.invariants.plain import PLAIN, answers_quickly
from kvcore.invariants.prefix_tree import locks_quickly, tree_quickly
from kvcore.invariants.vectorised import VECTORISED

OF_CACHES = ("tree", "locks")
"""Laws that have nothing to ask where no prefix cache is."""

OF_FAILURES = "L5"
"""The law that has something to ask after a refusal or an error only."""

OF_ANSWERS = ("L7", "L8", "L9")
"""Laws that one quick form asks in small pools: what the queries say, and earlier answers."""

FULL_EVERY = 64
"""Of so many checks one asks every law in full, whatever the image says: it is kept along, and what
is kept along may drift. A walker's longest program (200 ops) has three of them beside the check at
its end, which is always full; they add less than a tenth to the cost of the others."""

FULL_EVERY_LARGE = 512
"""The same of pools in vectorised form, where all laws together cost some thirty times as much as a
look at the image, and a soak run has thousands of checks."""


class Schedule(NamedTuple):
    """``due``: the laws of a check, by whether the periodic ones are due and whether everything was
    given back. ``beyond_image``: their forms where a view shows the image, by the former, but for
    that of ``failure``, which is the form of law L5. ``full_every``: of so many checks one asks all
    that is due."""

    due: dict[tuple[bool, bool], list[tuple[str, LawForm]]]
    beyond_image: dict[bool, list[LawForm]]
    failure: LawForm
    full_every: int


@cache
def schedule(*, small: bool, serves: bool) -> Schedule:
    """The schedule of a pool in plain form (``small``) or vectorised; ``serves``: with a prefix
    cache."""
    forms = PLAIN if small else {**PLAIN, **VECTORISED}
    both = (False, True)
    due = {
        (periodic, drained): [
            (law, form) for law, form in forms.items() if _is_due(law, periodic, drained)
        ]
        for periodic in both
        for drained in both
    }
    quick = {**forms, "tree": tree_quickly, "locks": locks_quickly}
    first: list[LawForm] = [answers_quickly] if small else []
    apart = SHOWN | {OF_FAILURES} | (frozenset(OF_ANSWERS) if small else frozenset())
    beyond = {
        periodic: first
        + [
            quick[law]
            for law, _ in due[periodic, False]
            if law not in apart and (serves or law not in OF_CACHES)
        ]
        for periodic in both
    }
    every = FULL_EVERY if small else FULL_EVERY_LARGE
    return Schedule(due, beyond, forms[OF_FAILURES], every)


def _is_due(law: str, periodic: bool, drained: bool) -> bool:
    match BY_ID[law].cost:
        case Cost.EACH_STEP | Cost.EACH_ANSWER:
            return True
        case Cost.PERIODIC:
            return periodic
        case Cost.AT_END:
            return drained

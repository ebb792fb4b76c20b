"""Turns a few integers into a contract-breaking call that would be wrong now.

Half of the time a call about paused memory, a group or given-up slots, since few states make those
possible. Leaves out what each call does (`kvcore.targets.hostile`) and when it is wrong
(`kvcore.models.hostile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kvcore.models import Model, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.strategies.choices import Choices

GHOST_CALLS = ("free_again", "free_pending", "map_pending")
"""Hostile calls whose ``seq`` names slots that a row gave up."""

GROUP_CALLS = ("begin_nested", "end_unopened")
"""Hostile calls about the group itself."""

PAIR_CALLS = ("map_over_live", "map_pending", "recover_live", "recover_dead")
"""Hostile calls for which ``other`` matters."""

CALLS_TRIED = 6
"""How many hostile calls are tried before the proposal is given up."""

NAMES_TRIED = 3
"""How many names are tried for each place of a hostile call."""


def propose_hostile(model: Model, choices: Choices) -> Op | None:
    """A hostile call that is allowed now, or None if none of those tried is."""
    paused = bool(model.memory.paused)
    calls, favoured = _calls(model.contract.hostile, model.group_open, paused)
    if favoured and choices.below(2):
        calls = favoured
    first, second = choices.below(16), choices.below(16)
    names = [*model.rows, *model.backups]
    for _ in range(min(len(calls), CALLS_TRIED)):
        # Drawn anew each time: the next one in the list would be tried far too often.
        call = calls[choices.below(len(calls))]
        pool = _ghosts(model) if call in GHOST_CALLS else names
        for seq, other in _pairs(pool, first, names, second, both=call in PAIR_CALLS):
            op = ops.Hostile(call, seq, other)
            if model.allows(op):
                return op
    return None


@cache
def _calls(
    allowed: frozenset[str], inside: bool, paused: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hostile calls on trial that make sense inside a group or outside, and with memory paused
    or not, in a fixed order; then those among them that few states make possible."""
    calls = [
        call
        for call in sorted(allowed)
        if (paused or not call.endswith("_paused"))
        and (inside or not HOSTILE_CALLS[call].grouped)
        and not (inside and call == "end_unopened")
    ]
    if paused:
        return tuple(calls), tuple(call for call in calls if call.endswith("_paused"))
    rare = (call for call in calls if call in GHOST_CALLS or call in GROUP_CALLS)
    return tuple(calls), tuple(rare)


def _ghosts(model: Model) -> list[int]:
    """Names that gave up pages; if there are any, those whose pages wait in the open group."""
    pending = model.full.pending
    if not pending:
        return list(model.ghosts)
    waiting = [name for name, pages in model.ghosts.items() if not pending.isdisjoint(pages)]
    return waiting or list(model.ghosts)


def _pairs(
    seqs: list[int], first: int, others: list[int], second: int, *, both: bool
) -> Iterator[tuple[int, int]]:
    """A few pairs of names, from chosen ones on; with ``both`` each with each."""
    beside = _rotated(others, second)
    for seq in _rotated(seqs, first):
        for other in beside if both else beside[:1]:
            yield seq, other


def _rotated(names: list[int], start: int) -> list[int]:
    """A few names from a chosen one on; nobody if there are none."""
    few = min(len(names), NAMES_TRIED)
    return [names[(start + i) % len(names)] for i in range(few)] or [-1]

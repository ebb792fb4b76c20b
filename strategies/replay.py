"""Replaying a recorded program on a fresh target.

An op that is not allowed there (another target refused or lent differently, or an earlier op was
cut out) is skipped, so any part of a program runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.invariants import Run, Verdict, drive
from kvcore.invariants.run import Listener
from kvcore.models import Geometry, Model
from kvcore.models.ops import Op
from kvcore.targets.protocol import TargetFactory


class Recorded:
    """A source that yields given ops in order."""

    def __init__(self, program: Sequence[Op]) -> None:
        self._ops = iter(program)

    def next_op(self, model: Model) -> Op | None:
        """The next recorded op."""
        return next(self._ops, None)


def replay(
    factory: TargetFactory,
    geometry: Geometry,
    program: Sequence[Op],
    *,
    period: int = 1,
    listeners: Sequence[Listener] = (),
) -> Verdict:
    """Run ``program`` on a fresh target; ``period`` is that of the periodic laws, in steps."""
    run = Run(factory(geometry), period=period, listeners=listeners)
    return drive(run, Recorded(program))

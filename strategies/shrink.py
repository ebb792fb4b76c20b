"""Shrinking: the smallest program, in the smallest pool, that breaks the same law at the same op.

Delta debugging on ops, whatever source found the program: large pieces first, then single ops until
none can go (1-minimal), then simpler arguments, then smaller pools, and around again until nothing
changes. Programs name logical things, so any part of one is a program. Leaves out Hypothesis' own
shrinking, which may have come before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Protocol

from kvcore.invariants import BY_ID, Cost, Verdict
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.isolation import run_program
from kvcore.strategies.simpler import (
    merged,
    names,
    pages_of,
    parts_dropped,
    renumber,
    shorter,
    simpler,
)
from kvcore.strategies.simpler_requests import Program, retold
from kvcore.strategies.smaller import FEW, PLAINER, SIDES, less, resized

Execute = Callable[[Geometry, Sequence[Op]], Verdict]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The end of a shrink. ``executions`` counts the programs that were run for it."""

    geometry: Geometry
    program: Program
    violation: Violation
    executions: int


SHORT = 30
"""Length up to which a shrink checks every law at every step, whatever it is after."""

LONG_PERIOD = 16
"""Steps between checks of the periodic laws in longer programs."""

PAIRS_UP_TO = 10
"""Length of the longest program in which pairs of ops are tried."""


class NotReproduced(Exception):
    """The program does not break the law on this target any more."""


class Play(Protocol):
    """Runs a program on a fresh target; ``period`` is that of the periodic laws, in steps."""

    def __call__(self, geometry: Geometry, program: Sequence[Op], *, period: int = 1) -> Verdict:
        """Run ``program``."""
        ...


def shrink(target: str, geometry: Geometry, program: Sequence[Op], violation: Violation) -> Shrunk:
    """Shrink a failing program of the target named ``target``."""
    return shrink_played(partial(run_program, target), geometry, program, violation)


def shrink_played(
    play: Play, geometry: Geometry, program: Sequence[Op], violation: Violation
) -> Shrunk:
    """Shrink a program that fails when ``play`` runs it; raises `NotReproduced` if it does not.

    A search checks the periodic laws now and then only: the first run, which checks them at every
    step, says where the law really breaks.
    """
    located = play(geometry, program).violation
    if located is None:
        raise NotReproduced(f"the program breaks no law any more; it broke {violation.law}")
    rare = BY_ID[located.law].cost is Cost.PERIODIC
    shrinker = Shrinker(
        lambda smaller, part: play(
            smaller, part, period=1 if rare or len(part) <= SHORT else LONG_PERIOD
        ),
        located.signature,
    )
    return shrinker.shrink(geometry, program)


class Shrinker:
    """One shrink. ``execute`` runs a program on a fresh target; ``signature`` must break again."""

    def __init__(self, execute: Execute, signature: tuple[str, str]) -> None:
        self._execute = execute
        self._signature = signature
        self._tried: set[tuple[Geometry, Program]] = set()
        self._best: tuple[Geometry, Program, Violation] | None = None
        self.executions = 0

    def shrink(self, geometry: Geometry, program: Sequence[Op]) -> Shrunk:
        """The smallest program found; raises `NotReproduced` if ``program`` does not fail."""
        if not self._fails(geometry, tuple(program)):
            raise NotReproduced(f"the program does not break {self._signature[0]} here")
        size = None
        while size != (size := self._weight()):
            self._remove_pieces()
            self._simplify()
            self._retell()
            self._shrink_pools()
            self._shrink_together()
            self._merge()
            self._remove_pairs()
            self._rename()
        assert self._best is not None
        return Shrunk(*self._best, self.executions)

    def _weight(self) -> tuple[Geometry, Program]:
        assert self._best is not None
        return self._best[0], self._best[1]

    @property
    def _geometry(self) -> Geometry:
        return self._weight()[0]

    @property
    def _program(self) -> Program:
        return self._weight()[1]

    def _fails(self, geometry: Geometry, program: Program) -> bool:
        """Whether the program breaks the same law at the same kind of op; if so it is the new
        best, cut to the ops that were applied up to the break."""
        key = (geometry, program)
        if key in self._tried:
            return False
        self._tried.add(key)
        self.executions += 1
        verdict = self._execute(geometry, program)
        found = verdict.violation
        if found is None or not self._same(found):
            return False
        if self._best is not None and not self._smaller(geometry, verdict.program):
            return False
        self._best = (geometry, verdict.program, found)
        self._tried.add((geometry, verdict.program))
        return True

    def _same(self, found: Violation) -> bool:
        """The same op breaks the same law; a smaller program may break another one besides, after
        which the violation is then named."""
        law, label = self._signature
        return law in found.laws and found.op_kind == label

    def _smaller(self, geometry: Geometry, program: Program) -> bool:
        """Whether this says less than the best so far. A run gives everything back at its end, so
        an op that was cut out may come back as one of those; that is no gain."""
        return (geometry, program) != self._weight() and len(program) <= len(self._program)

    def _remove_pieces(self) -> None:
        """Halve the piece size from half of the program down to one op; each pass tries to drop
        every piece once, from the end, where drops cost least. Single ops until none can go."""
        size = max(1, len(self._program) // 2)
        while True:
            dropped = self._one_pass(size)
            if size == 1 and not dropped:
                return
            if size > 1:
                size = max(1, min(size, len(self._program)) // 2)

    def _one_pass(self, size: int) -> bool:
        dropped = False
        stop = len(self._program)
        while stop > 0:
            start = max(0, stop - size)
            program = self._program
            if self._fails(self._geometry, program[:start] + program[stop:]):
                dropped = True
                stop = min(start, len(self._program))
            else:
                stop = start
        return dropped

    def _simplify(self) -> None:
        """Simpler arguments, op by op, each accepted if it still fails."""
        at = 0
        while at < len(self._program):
            known = names(self._program[:at])
            for variant in simpler(self._program[at], self._geometry.page_size, known):
                program = self._program
                if at < len(program) and self._fails(
                    self._geometry, (*program[:at], variant, *program[at + 1 :])
                ):
                    break
            else:
                at += 1

    def _retell(self) -> None:
        """Shorter texts and fewer streams in all ops at once: prefixes stay shared."""
        size = self._geometry.page_size
        while any(self._fails(self._geometry, told) for told in retold(self._program, size)):
            pass

    def _shrink_pools(self) -> None:
        """Plainer and smaller pools, if it still fails: small tables are easy to read."""
        for plainer in PLAINER:
            self._try(resized(self._geometry, **plainer))
        for side in SIDES:
            for number in FEW:
                if self._try(resized(self._geometry, **{side: number})):
                    break

    def _try(self, geometry: Geometry | None) -> bool:
        """Whether the program fails on smaller pools too."""
        return geometry is not None and self._fails(geometry, self._program)

    def _shrink_together(self) -> None:
        """A row and the pools smaller by the same pages: a fault at exhaustion needs full pools, so
        neither can shrink alone."""
        at = 0
        while at < len(self._program):
            op = self._program[at]
            full, swa = pages_of(op, self._geometry)
            if not any(self._fails(*both) for both in self._both_smaller(at, op, full, swa)):
                at += 1

    def _both_smaller(
        self, at: int, op: Op, full: int, swa: int
    ) -> Iterator[tuple[Geometry, Program]]:
        program, size = self._program, self._geometry.page_size
        if full and (left := less(self._geometry, full, swa)):
            yield left, program[:at] + program[at + 1 :]
        for fewer, pages in parts_dropped(op, self._geometry):
            if left := less(self._geometry, pages, pages):
                yield left, (*program[:at], fewer, *program[at + 1 :])
        for pages in sorted({full - 1, full // 2, 1}, reverse=True):
            fewer_pages = shorter(op, pages, size) if 0 < pages < full else None
            left = less(self._geometry, pages, min(swa, pages))
            if fewer_pages is not None and left:
                yield left, (*program[:at], fewer_pages, *program[at + 1 :])

    def _merge(self) -> None:
        """Two extends of one row become one."""
        at = 0
        while at < len(self._program):
            if not any(self._fails(self._geometry, p) for p in merged(self._program, at)):
                at += 1

    def _remove_pairs(self) -> None:
        """Two ops at once, where neither can go alone: only in short programs."""
        if len(self._program) > PAIRS_UP_TO:
            return
        for first, second in combinations(range(len(self._program)), 2):
            program = self._program
            rest = tuple(op for at, op in enumerate(program) if at not in (first, second))
            if second < len(program) and self._fails(self._geometry, rest):
                return

    def _rename(self) -> None:
        """Number names from 1 in order of appearance."""
        renamed = renumber(self._program)
        if renamed != self._program:
            self._fails(self._geometry, renamed)

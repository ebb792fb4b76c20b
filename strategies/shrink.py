"""Shrinking: the smallest program, in the smallest pool, that breaks the same law at the same op.

Delta debugging on ops, whatever source found the program: large pieces first, then single ops until
none can go (1-minimal), then simpler arguments, then smaller pools, and around again until nothing
changes. Programs name logical things, so any part of one is a program. Leaves out Hypothesis' own
shrinking, which may have come before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from kvcore.invariants import Verdict
from kvcore.models import Geometry, Violation, ops
from kvcore.models.ops import Op
from kvcore.strategies.isolation import run_program

Program = tuple[Op, ...]
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


def shrink(target: str, geometry: Geometry, program: Sequence[Op], violation: Violation) -> Shrunk:
    """Shrink a failing program of the target named ``target``.

    A search checks the periodic laws now and then only: the first run, which checks them at every
    step, says where the law really breaks.
    """
    located = run_program(target, geometry, program).violation
    if located is None:
        raise NotReproduced(f"the program breaks no law on {target}; it broke {violation.law}")
    rare = located.law == "stamps"
    shrinker = Shrinker(
        lambda smaller, part: run_program(
            target, smaller, part, period=1 if rare or len(part) <= SHORT else LONG_PERIOD
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
            names = _names(self._program[:at])
            for simpler in _simpler(self._program[at], self._geometry.page_size, names):
                program = self._program
                if at < len(program) and self._fails(
                    self._geometry, (*program[:at], simpler, *program[at + 1 :])
                ):
                    break
            else:
                at += 1

    def _shrink_pools(self) -> None:
        """Fewer pages and unsorted reuse, if it still fails: small tables are easy to read."""
        geometry = self._geometry
        if geometry.need_sort:
            self._fails(msgspec.structs.replace(geometry, need_sort=False), self._program)
        for side in ("full_pages", "swa_pages"):
            now = self._geometry.full_pages if side == "full_pages" else self._geometry.swa_pages
            for pages in (1, 2, 3, 4, 6, 8, 12, 16):
                if pages < now and self._fails(
                    msgspec.structs.replace(self._geometry, **{side: pages}), self._program
                ):
                    break

    def _shrink_together(self) -> None:
        """A row and the pools smaller by the same pages: a fault at exhaustion needs full pools, so
        neither can shrink alone."""
        at = 0
        while at < len(self._program):
            op = self._program[at]
            full, swa = _pages_of(op, self._geometry)
            if not any(self._fails(*both) for both in self._both_smaller(at, op, full, swa)):
                at += 1

    def _both_smaller(
        self, at: int, op: Op, full: int, swa: int
    ) -> Iterator[tuple[Geometry, Program]]:
        program, size = self._program, self._geometry.page_size
        if full and (less := _less(self._geometry, full, swa)):
            yield less, program[:at] + program[at + 1 :]
        for fewer, pages in _parts_dropped(op, self._geometry):
            if less := _less(self._geometry, pages, pages):
                yield less, (*program[:at], fewer, *program[at + 1 :])
        for pages in sorted({full - 1, full // 2, 1}, reverse=True):
            shorter = _shorter(op, pages, size) if 0 < pages < full else None
            less = _less(self._geometry, pages, min(swa, pages))
            if shorter is not None and less:
                yield less, (*program[:at], shorter, *program[at + 1 :])

    def _merge(self) -> None:
        """Two extends of one row become one."""
        at = 0
        while at < len(self._program):
            if not any(self._fails(self._geometry, p) for p in _merged(self._program, at)):
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
        """Number sequences and backups from 1 in order of appearance."""
        renamed = _renumber(self._program)
        if renamed != self._program:
            self._fails(self._geometry, renamed)


def _pages_of(op: Op, geometry: Geometry) -> tuple[int, int]:
    """Pages that a lending op takes for a new row, by side; (0, 0) for other ops."""
    match op:
        case ops.Alloc():
            return op.pages, op.pages
        case ops.Extend():
            pages = sum(geometry.pages_for(tokens) for _, tokens in op.parts)
            return pages, pages
        case ops.SwaTail():
            return geometry.pages_for(op.tokens), geometry.pages_for(op.tail)
        case ops.LoadBack():
            return op.pages, op.swa_pages
        case _:
            return 0, 0


def _parts_dropped(op: Op, geometry: Geometry) -> Iterator[tuple[Op, int]]:
    """A batch with one part less, and the pages that part takes."""
    if isinstance(op, ops.Extend) and len(op.parts) > 1:
        for index, (_, tokens) in enumerate(op.parts):
            rest = op.parts[:index] + op.parts[index + 1 :]
            yield msgspec.structs.replace(op, parts=rest), geometry.pages_for(tokens)


def _less(geometry: Geometry, full: int, swa: int) -> Geometry | None:
    """The geometry with fewer pages, if any page is left."""
    left = geometry.full_pages - full
    swa_left = geometry.swa_pages - swa if geometry.hybrid else 0
    if left < 1 or (geometry.hybrid and swa_left < 1):
        return None
    return msgspec.structs.replace(geometry, full_pages=left, swa_pages=swa_left)


def _shorter(op: Op, pages: int, size: int) -> Op | None:
    """``op`` with ``pages`` fewer pages in its row."""
    replace = msgspec.structs.replace
    match op:
        case ops.Alloc():
            return replace(op, pages=op.pages - pages)
        case ops.Extend() if len(op.parts) == 1 and op.parts[0][1] > pages * size:
            seq, tokens = op.parts[0]
            return replace(op, parts=((seq, tokens - pages * size),))
        case ops.SwaTail() if op.tail > pages * size:
            return replace(op, tokens=op.tokens - pages * size, tail=op.tail - pages * size)
        case _:
            return None


def _merged(program: Program, at: int) -> Iterator[Program]:
    """The program with the extend at ``at`` taking in a later extend of the same row."""
    first = program[at]
    if not isinstance(first, ops.Extend) or len(first.parts) != 1:
        return
    seq, tokens = first.parts[0]
    for later in range(at + 1, len(program)):
        second = program[later]
        match second:
            case ops.Extend(parts=((name, more),)) if name == seq:
                pass
            case ops.Decode(seqs=(name,)) if name == seq:
                more = 1
            case _:
                continue
        both = ops.Extend(((seq, tokens + more),))
        yield (*program[:at], both, *program[at + 1 : later], *program[later + 1 :])
        yield (*program[:at], *program[at + 1 : later], both, *program[later + 1 :])


def _names(program: Program) -> list[int]:
    """The rows that ``program`` starts, latest first."""
    names: list[int] = []
    for op in program:
        match op:
            case ops.Extend():
                names += [seq for seq, _ in op.parts]
            case ops.Alloc() | ops.SwaTail() | ops.LoadBack() | ops.Restore():
                names.append(op.seq)
    return list(dict.fromkeys(reversed(names)))


def _simpler(op: Op, size: int, names: Sequence[int]) -> Iterator[Op]:
    """Variants of ``op`` that say less, simplest first. ``size`` is the page size; ``names`` are
    the rows started before, latest first."""
    replace = msgspec.structs.replace
    match op:
        case ops.Restore():
            # A row like any other, if what it holds does not matter; then its retraction can go.
            yield ops.Extend(((op.seq, 1),))
            yield ops.Extend(((op.seq, size),))
            yield ops.Extend(((op.seq, 2 * size),))
            if op.tail is not None:
                yield replace(op, tail=None)
        case ops.Extend():
            for index in range(len(op.parts)):
                if len(op.parts) > 1:
                    yield replace(op, parts=op.parts[:index] + op.parts[index + 1 :])
            for index, (seq, tokens) in enumerate(op.parts):
                for fewer in _fewer(tokens):
                    part = ((seq, fewer),)
                    yield replace(op, parts=op.parts[:index] + part + op.parts[index + 1 :])
        case ops.Decode():
            for index in range(len(op.seqs)):
                if len(op.seqs) > 1:
                    yield replace(op, seqs=op.seqs[:index] + op.seqs[index + 1 :])
        case ops.SwaTail():
            yield ops.Extend(((op.seq, op.tokens),))
            for fewer in _fewer(op.tokens):
                yield replace(op, tokens=fewer, tail=max(0, op.tail - (op.tokens - fewer)))
        case ops.Hostile():
            # No name at all is simplest, then the latest row; never back to an earlier one.
            if op.seq != -1:
                yield replace(op, seq=-1, other=-1)
                for name in names[: names.index(op.seq) if op.seq in names else 4]:
                    yield replace(op, seq=name)
        case ops.Recover():
            if op.pages > 1:
                yield replace(op, pages=1)
            if op.kept_start:
                yield replace(op, kept_start=0)
            if op.incoming_start:
                yield replace(op, incoming_start=0)
        case ops.LoadBackSwa():
            if op.start:
                stop = None if op.stop is None else op.stop - op.start
                yield replace(op, start=0, stop=stop)
            if op.start == 0 and op.stop is not None and op.stop > 1:
                yield replace(op, stop=1)
        case ops.LoadBack():
            yield ops.Extend(((op.seq, op.pages * size),))
            for fewer in _fewer(op.pages):
                yield replace(op, pages=fewer, swa_pages=min(fewer, op.swa_pages))
        case ops.Alloc():
            for fewer in _fewer(op.pages):
                yield replace(op, pages=fewer)
        case ops.Free() | ops.FreeSwa() | ops.FreeFull():
            if op.start or op.stop is not None:
                yield replace(op, start=0, stop=None)
            if op.start:
                yield replace(op, start=0, stop=None if op.stop is None else op.stop - op.start)
            if op.stop is not None and op.stop - op.start > 1:
                yield replace(op, stop=op.start + 1)
                yield replace(op, start=op.stop - 1)
            if op.form != "slots":
                yield replace(op, form="slots")
    match op:
        case ops.Alloc() | ops.Extend() | ops.Decode() if op.overwrite:
            yield replace(op, overwrite=False)
        case ops.Free() | ops.FreeSwa() | ops.FreeFull() if op.overwrite:
            yield replace(op, overwrite=False)


def _fewer(count: int) -> Iterator[int]:
    """Smaller counts worth trying, smallest first."""
    tried = {1, 2, count // 2, count - 1}
    yield from sorted(fewer for fewer in tried if 1 <= fewer < count)


def _renumber(program: Program) -> Program:
    rows: dict[int, int] = {}
    backups: dict[int, int] = {}

    def row(name: int) -> int:
        return rows.setdefault(name, len(rows) + 1)

    def backup(name: int) -> int:
        return backups.setdefault(name, len(backups) + 1)

    def one(op: Op) -> Op:
        replace = msgspec.structs.replace
        match op:
            case ops.Extend():
                return replace(op, parts=tuple((row(seq), tokens) for seq, tokens in op.parts))
            case ops.Decode():
                return replace(op, seqs=tuple(row(seq) for seq in op.seqs))
            case ops.Recover():
                return replace(op, kept=row(op.kept), incoming=row(op.incoming))
            case ops.Retract():
                return replace(op, seq=row(op.seq), backup=backup(op.backup))
            case ops.Restore():
                return replace(op, backup=backup(op.backup), seq=row(op.seq))
            case ops.Hostile():
                names = backups if op.call == "restore_short" else rows
                return replace(
                    op, seq=names.get(op.seq, op.seq), other=rows.get(op.other, op.other)
                )
            case (
                ops.Alloc()
                | ops.SwaTail()
                | ops.Free()
                | ops.FreeSwa()
                | ops.FreeFull()
                | ops.LoadBack()
                | ops.LoadBackSwa()
            ):
                return replace(op, seq=row(op.seq))
            case _:
                return op

    return tuple(one(op) for op in program)

"""Simpler ops for a shrink: variants of an op or of a program that say less.

Leaves out request-level ops (`kvcore.strategies.simpler_requests`), the pools
(`kvcore.strategies.smaller`) and whether a program still fails (`kvcore.strategies.shrink`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.strategies.simpler_requests import (
    Program,
    merged_requests,
    renumber_requests,
    request_pages,
    shorter_request,
    simpler_request,
)


def pages_of(op: Op, geometry: Geometry) -> tuple[int, int]:
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
            pages = request_pages(op, geometry)
            return pages, pages


def parts_dropped(op: Op, geometry: Geometry) -> Iterator[tuple[Op, int]]:
    """A batch with one part less, and the pages that part takes."""
    if isinstance(op, ops.Extend) and len(op.parts) > 1:
        for index, (_, tokens) in enumerate(op.parts):
            rest = op.parts[:index] + op.parts[index + 1 :]
            yield msgspec.structs.replace(op, parts=rest), geometry.pages_for(tokens)


def shorter(op: Op, pages: int, size: int) -> Op | None:
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
            return shorter_request(op, pages * size)


def merged(program: Program, at: int) -> Iterator[Program]:
    """The program with the extend at ``at`` taking in a later extend of the same row, or the
    admission there what is computed of its request later."""
    yield from merged_requests(program, at)
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


def names(program: Program) -> list[int]:
    """The rows that ``program`` starts, latest first."""
    started: list[int] = []
    for op in program:
        match op:
            case ops.Extend():
                started += [seq for seq, _ in op.parts]
            case ops.ExtendLogical():
                started += [seq for seq, _ in op.parts]
            case ops.Alloc() | ops.SwaTail() | ops.LoadBack() | ops.Restore():
                started.append(op.seq)
    return list(dict.fromkeys(reversed(started)))


def simpler(op: Op, size: int, known: Sequence[int]) -> Iterator[Op]:
    """Variants of ``op`` that say less, simplest first. ``size`` is the page size; ``known`` are
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
        case ops.Extend() | ops.ExtendLogical():
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
            if op.beyond:
                yield replace(op, tail=op.tail + op.beyond, beyond=0)
            for fewer in _fewer(op.tokens):
                yield replace(op, tokens=fewer, tail=max(0, op.tail - (op.tokens - fewer)))
        case ops.Hostile():
            # No name at all is simplest, then the latest row; never back to an earlier one.
            if op.seq != -1:
                yield replace(op, seq=-1, other=-1)
                for name in known[: known.index(op.seq) if op.seq in known else 4]:
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
        case ops.Alloc() | ops.DeviceBuffer():
            for fewer in _fewer(op.pages):
                yield replace(op, pages=fewer)
        case ops.Reserve():
            for fewer in _fewer(op.size):
                yield replace(op, size=fewer)
        case ops.PagesOp():
            yield from _simpler_span(op)
        case _:
            yield from simpler_request(op, size)
    match op:
        case ops.Alloc() | ops.Extend() | ops.Decode() if op.overwrite:
            yield replace(op, overwrite=False)
        case ops.PagesOp() if op.overwrite:
            yield replace(op, overwrite=False)


def _simpler_span(op: ops.PagesOp) -> Iterator[Op]:
    """Other pages of the row, and the plain form."""
    replace = msgspec.structs.replace
    if op.start or op.stop is not None:
        yield replace(op, start=0, stop=None)
    if op.start:
        yield replace(op, start=0, stop=None if op.stop is None else op.stop - op.start)
    if op.stop is not None and op.stop - op.start > 1:
        yield replace(op, stop=op.start + 1)
        yield replace(op, start=op.stop - 1)
    if op.form != "slots":
        yield replace(op, form="slots")


def _fewer(count: int) -> Iterator[int]:
    """Smaller counts worth trying, smallest first."""
    tried = {1, 2, count // 2, count - 1}
    yield from sorted(fewer for fewer in tried if 1 <= fewer < count)


def renumber(program: Program) -> Program:
    """Sequences, backups, buffers and regions numbered from 1 in order of appearance, and so what
    request-level ops name."""
    rows: dict[int, int] = {}
    backups: dict[int, int] = {}
    buffers: dict[int, int] = {}
    regions: dict[int, int] = {}

    def row(name: int) -> int:
        return rows.setdefault(name, len(rows) + 1)

    def backup(name: int) -> int:
        return backups.setdefault(name, len(backups) + 1)

    def one(op: Op) -> Op:
        replace = msgspec.structs.replace
        match op:
            case ops.Extend() | ops.ExtendLogical():
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
            case ops.DeviceBuffer():
                number = buffers.setdefault(op.buffer, len(buffers) + 1)
                return replace(op, seq=row(op.seq), buffer=number)
            case ops.FreeBuffer():
                return replace(op, buffer=buffers.setdefault(op.buffer, len(buffers) + 1))
            case ops.Reserve() | ops.Drop():
                return replace(op, region=regions.setdefault(op.region, len(regions) + 1))
            case (
                ops.Alloc()
                | ops.SwaTail()
                | ops.PagesOp()
                | ops.LoadBack()
                | ops.LoadBackSwa()
                | ops.Relocate()
            ):
                return replace(op, seq=row(op.seq))
            case _:
                return op

    return renumber_requests(tuple(one(op) for op in program))

"""Ops, answers and pages in words: how programs read in tables and messages.

Leaves out layout and colour, which are the pages' business.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from kvcore.models import Geometry, Outcome, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.outcomes import Lent, Raised, Refused

FORMS = {
    "slots": "",
    "sparse": ", one slot a page",
    "segment": ", as a segment",
    "segments": ", as two segments",
}


def count(number: int, noun: str) -> str:
    """``number`` with its noun, thousands separated: "1 page", "2,000 pages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def pools(geometry: Geometry) -> str:
    """The pools in words: "16 full and 12 SWA pages of 4 slots"."""
    swa = f" and {geometry.swa_pages} SWA" if geometry.hybrid else ""
    slots = count(geometry.page_size, "slot")
    sort = ", reused in order" if geometry.need_sort else ""
    return f"{geometry.full_pages} full{swa} pages of {slots}{sort}"


def ranges(numbers: Iterable[int]) -> str:
    """Distinct numbers in order, runs of three or more drawn together: "1, 2, 4-7"."""
    ordered = sorted(set(numbers))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    runs = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])] if ordered else []
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return ", ".join(parts)


def span(start: int, stop: int | None) -> str:
    """Pages ``[start, stop)`` of a row; the last one named is included."""
    if stop is None:
        return f"pages {start} to the end" if start else "all pages"
    return f"page {start}" if stop == start + 1 else f"pages {start}-{stop - 1}"


def arguments(op: ops.Op) -> str:
    """What ``op`` is asked to do; empty for an op without arguments."""
    match op:
        case ops.Alloc():
            return f"sequence {op.seq}: {count(op.pages, 'page')}{_scribbled(op.overwrite)}"
        case ops.Extend():
            parts = ", ".join(f"sequence {seq} +{count(n, 'token')}" for seq, n in op.parts)
            return f"{parts}{_scribbled(op.overwrite)}"
        case ops.Decode():
            names = ", ".join(str(seq) for seq in op.seqs)
            plural = "s" if len(op.seqs) > 1 else ""
            return f"sequence{plural} {names} +1 token{_scribbled(op.overwrite)}"
        case ops.SwaTail():
            return f"sequence {op.seq} +{count(op.tokens, 'token')}, SWA for the last {op.tail}"
        case ops.Free() | ops.FreeSwa() | ops.FreeFull():
            pages = f"sequence {op.seq}, {span(op.start, op.stop)}"
            return f"{pages}{FORMS[op.form]}{_scribbled(op.overwrite)}"
        case ops.Hostile():
            return _hostile(op)
        case _:
            return _moving(op)


def _moving(op: ops.Op) -> str:
    match op:
        case ops.Recover():
            kept = f"sequence {op.kept} {span(op.kept_start, op.kept_start + op.pages)}"
            pages = span(op.incoming_start, op.incoming_start + op.pages)
            lock = "locked" if op.locked else "unlocked"
            return f"{kept} from sequence {op.incoming} {pages}, {lock}"
        case ops.LoadBack():
            return f"sequence {op.seq}: {count(op.pages, 'page')}, SWA for the last {op.swa_pages}"
        case ops.LoadBackSwa():
            return f"sequence {op.seq}, {span(op.start, op.stop)}"
        case ops.Retract():
            return f"sequence {op.seq} into backup {op.backup}"
        case ops.Restore():
            tail = "" if op.tail is None else f", SWA for the last {count(op.tail, 'token')}"
            return f"backup {op.backup} as sequence {op.seq}{tail}"
        case _:
            return ""


def _hostile(op: ops.Hostile) -> str:
    names = [f"sequence {name}" for name in (op.seq, op.other) if name >= 0]
    what = HOSTILE_CALLS[op.call].what
    return f"{what} ({', '.join(names)})" if names else what


def _scribbled(overwrite: bool) -> str:
    return "; tensor then overwritten" if overwrite else ""


def answer(outcome: Outcome | None, geometry: Geometry) -> str:
    """What a target answered: the pages lent, or how the call ended; None if it never ended."""
    match outcome:
        case Lent():
            size = geometry.page_size
            full = f"full {ranges(slot // size for slot in outcome.slots)}"
            peers = {peer // size for peer in outcome.peers if peer}
            return f"{full}; SWA {ranges(peers)}" if peers else full
        case Refused():
            return "None: no room"
        case Raised():
            return f"raised {outcome.kind}"
        case None:
            return "did not return"
        case _:
            return "done"

"""Ops, answers and pages in words: how programs read in tables and messages.

Leaves out layout and colour, which are the pages' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from kvcore.models import Geometry, Outcome, ops, request_ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.outcomes import Lent, Raised, Refused, Served
from kvcore.models.texts import Text

FORMS = {
    "slots": "",
    "sparse": ", one slot a page",
    "segment": ", as a segment",
    "segments": ", as two segments",
}

MOST_RUNS = 24
"""Runs of numbers in a cell; more do not help anybody."""

ON_BACKUPS = frozenset(("restore_short",))
"""Hostile calls that name a backup, where others name a sequence."""


def count(number: int, noun: str) -> str:
    """``number`` with its noun, thousands separated: "1 page", "2,000 pages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def pools(geometry: Geometry) -> str:
    """The pools in words: "16 full and 12 SWA pages of 4 slots over 8 device pages of 1 slot"."""
    sides = count(geometry.full_pages, "full page")
    if geometry.hybrid:
        sides = f"{geometry.full_pages:,} full and {count(geometry.swa_pages, 'SWA page')}"
    parts = [f"{sides} of {count(geometry.page_size, 'slot')}"]
    if geometry.sparse:
        device = count(geometry.device_pages, "device page")
        parts[0] += f" over {device} of {count(geometry.device_page_size, 'slot')}"
    parts += ["every layer sliding"] * geometry.pure_swa
    parts += [geometry.attention.upper()] * (geometry.attention != "mha")
    parts += [count(geometry.requests, "request")] * (geometry.requests > 0)
    parts += [f"window {geometry.window:,}"] * geometry.serves
    parts += [f"context {geometry.context:,}"] * (geometry.context > 0)
    parts += ["memory saver"] * geometry.saver
    parts += ["reused in order"] * geometry.need_sort
    return ", ".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """Distinct numbers in order, runs of three or more drawn together: "1, 2, 4-7"."""
    return in_order(sorted(set(numbers)))


def in_order(numbers: Iterable[int]) -> str:
    """Numbers as they stand, rising runs of three or more drawn together: "8-11, 4, 5"; of many
    runs the first ones, and how many numbers there are."""
    given = list(numbers)
    breaks = [i for i, (a, b) in enumerate(pairwise(given), 1) if b != a + 1]
    runs = [given[i:j] for i, j in pairwise([0, *breaks, len(given)])] if given else []
    parts: list[str] = []
    for run in runs[:MOST_RUNS]:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    more = f" … ({len(given):,} in all)" if len(runs) > MOST_RUNS else ""
    return ", ".join(parts) + more


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
            last = f"{op.tail} before the last {op.beyond}" if op.beyond else f"last {op.tail}"
            return f"sequence {op.seq} +{count(op.tokens, 'token')}, SWA for the {last}"
        case ops.Free() | ops.FreeSwa() | ops.FreeFull() | ops.FreeDevice():
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
        case ops.Relocate():
            return f"sequence {op.seq} into new slots"
        case _:
            return _on_devices(op)


def _on_devices(op: ops.Op) -> str:
    match op:
        case ops.ExtendLogical():
            parts = ", ".join(f"sequence {seq} +{count(n, 'token')}" for seq, n in op.parts)
            return f"{parts}, no device slots"
        case ops.DeviceBuffer():
            buffer = f"buffer {op.buffer} of {count(op.pages, 'device page')}"
            return f"sequence {op.seq} into {buffer}"
        case ops.FreeBuffer():
            return f"buffer {op.buffer}"
        case ops.Reserve():
            return f"region {op.region} under {op.memory}: {count(op.size, 'OS page')}"
        case ops.Drop():
            return f"region {op.region}"
        case ops.Pause() | ops.Resume():
            return op.memory
        case _:
            return _of_requests(op)


def _of_requests(op: ops.Op) -> str:
    match op:
        case request_ops.Admit():
            chunk = "" if op.tokens is None else f"; chunk of {op.tokens:,}"
            return f"request {op.req}: {text(op.text)}; output of {op.output}{chunk}"
        case request_ops.Prefill():
            return f"request {op.req} +{count(op.tokens, 'token')}"
        case request_ops.DecodeStep():
            return f"{_requests(op.reqs)} +1 token"
        case request_ops.Slide():
            return _requests(op.reqs)
        case request_ops.Speculate():
            return f"request {op.req} +{count(op.tokens, 'draft')}"
        case request_ops.Trim():
            return f"request {op.req} keeps {count(op.accepted, 'draft')}"
        case request_ops.RetractRequest():
            copied = "copied to the host" if op.backup else "not copied"
            return f"request {op.req}, its KV {copied}"
        case (
            request_ops.CacheUnfinished()
            | request_ops.Finish()
            | request_ops.Abort()
            | request_ops.ResumeRequest()
        ):
            return f"request {op.req}"
        case _:
            return _of_cache(op)


def _of_cache(op: ops.Op) -> str:
    match op:
        case request_ops.SavePrefix():
            return f"{text(op.text)} as copy {op.copy}"
        case request_ops.LoadPrefix():
            return f"copy {op.copy} as load {op.load}"
        case request_ops.EndLoad():
            return f"load {op.load}, which failed" if op.failed else f"load {op.load}"
        case request_ops.Evict():
            return f"{op.full_tokens:,} full and {count(op.swa_tokens, 'SWA token')}"
        case _:
            return ""


def _requests(names: tuple[int, ...]) -> str:
    return f"request{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"


def text(pieces: Text) -> str:
    """A text by its streams: "4 tokens of stream 1, 2 of 7"."""
    if not pieces:
        return "no tokens"
    (stream, number), *rest = pieces
    words = [f"{count(number, 'token')} of stream {stream}"]
    return ", ".join(words + [f"{number:,} of {stream}" for stream, number in rest])


def _hostile(op: ops.Hostile) -> str:
    noun = "backup" if op.call in ON_BACKUPS else "sequence"
    names = [f"{noun} {name}" for name in (op.seq, op.other) if name >= 0]
    what = HOSTILE_CALLS[op.call].what
    return f"{what} ({', '.join(names)})" if names else what


def _scribbled(overwrite: bool) -> str:
    return "; tensor then overwritten" if overwrite else ""


def answer(op: ops.Op, outcome: Outcome | None, geometry: Geometry) -> str:
    """What a target answered to ``op``: the pages lent, or how the call ended; None if it never
    did."""
    match outcome:
        case Lent():
            return "; ".join(_lent(op, outcome, geometry))
        case Served():
            return "; ".join(_served(outcome, geometry)) or "done"
        case Refused():
            return "None: no room"
        case Raised():
            return f"raised {outcome.kind}"
        case None:
            return "did not return"
        case _:
            return "done"


def _lent(op: ops.Op, lent: Lent, geometry: Geometry) -> Iterator[str]:
    """The pages of an answer, side by side; a side without any is left out."""
    entries = geometry.device_page_size
    if isinstance(op, ops.DeviceBuffer):
        yield f"device {ranges(slot // entries for slot in lent.slots)}"
        return
    yield f"full {ranges(slot // geometry.page_size for slot in lent.slots)}"
    peers = {peer // geometry.page_size for peer in lent.peers if peer}
    if peers and geometry.hybrid:
        yield f"SWA {ranges(peers)}"
    if device := {slot // entries for slot in lent.device if slot}:
        yield f"device {ranges(device)}"
    if lent.requests:
        yield f"request {ranges(lent.requests)}"


def _served(served: Served, geometry: Geometry) -> Iterator[str]:
    """What a request-level op did, in pages; parts without any are left out."""
    size = geometry.page_size
    if served.request:
        yield f"row {served.request}"
    if served.matched:
        yield f"prefix of {count(served.matched, 'token')}"
    if served.slots:
        yield f"full {ranges(slot // size for slot in served.slots)}"
    if peers := {peer // size for peer in served.peers if peer}:
        yield f"SWA {ranges(peers)}"
    if served.reloaded:
        yield f"SWA {ranges(slot // size for slot in served.reloaded)} for tombstones"
    if served.evicted:
        yield f"evicted full {ranges(served.evicted)}"
    if served.tombstoned:
        yield f"tombstoned full {ranges(served.tombstoned)}"

"""The laws of what lies in the pools, in plain form: stamps, the request table, the memory saver.

Leaves out who owns which page (`kvcore.invariants.plain`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import compress

from kvcore.invariants.check import Check
from kvcore.invariants.clauses import holder
from kvcore.models import Clause, Geometry
from kvcore.models.state import NO_PEER, UNKNOWN, Page
from kvcore.models.violation import some
from kvcore.targets.protocol import MemoryView, Stream


def stamps(check: Check) -> list[Clause]:
    """stamps: the rows of every lent token hold its stamps, in every stream of every pool."""
    rows = check.host.stamps
    if not rows:
        return []
    geometry, streams = check.model.geometry, check.after.streams
    pages = [page for _, page in check.model.lent_pages()]
    known: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for stream, held in zip(streams, rows, strict=True):
        side = stream.side
        if side not in known:
            known[side] = _known_of(pages, geometry, stream)
        slots, wanted, negated = known[side]
        if list(map(held.__getitem__, slots)) != (wanted if stream.sign > 0 else negated):
            break
    else:
        return []
    clauses: list[Clause] = []
    for seq, page in check.model.lent_pages():
        for stream, held in zip(streams, rows, strict=True):
            page_wanted, page_seen = _sides_of(stream, page, geometry, held)
            if page_wanted != page_seen:
                owner = holder(geometry, seq)
                clauses.append(_content_clause(owner, page, stream, page_wanted, page_seen))
    return clauses


def _known_of(
    pages: list[Page], geometry: Geometry, stream: Stream
) -> tuple[list[int], list[int], list[int]]:
    """The slots of pages on the side of a stream of which something is known, the stamp of each,
    and the same stamps with the other sign."""
    size = geometry.page_size
    slots: list[int] = []
    stamps: list[int] = []
    # `page_stamps` and `page_place`, written out for the sides that nearly every pool has.
    if stream.side == "full":
        for page in pages:
            own, start = page.full_stamps, page.full * size
            slots += range(start, start + len(own))
            stamps += own
    elif stream.side == "SWA":
        for page in pages:
            if page.swa:
                own, start = page.swa_stamps, page.swa * size
                slots += range(start, start + len(own))
                stamps += own
    else:
        for page in pages:
            own = page_stamps(stream, page, geometry)
            number, size = page_place(stream, page, geometry)
            slots += range(number * size, number * size + len(own))
            stamps += own
    skipped = _unknown(stream)
    if not skipped.isdisjoint(stamps):
        known = [stamp not in skipped for stamp in stamps]
        slots, stamps = list(compress(slots, known)), list(compress(stamps, known))
    return slots, stamps, [-stamp for stamp in stamps]


_UNKNOWN_ON_FULL = frozenset((UNKNOWN,))
_UNKNOWN_ELSEWHERE = frozenset((UNKNOWN, NO_PEER))


def _unknown(stream: Stream) -> frozenset[int]:
    """Stamps that say nothing of a slot. A full stamp 0 is an erased token, which holds 0; on the
    other sides it means no slot."""
    return _UNKNOWN_ON_FULL if stream.side == "full" else _UNKNOWN_ELSEWHERE


def _sides_of(
    stream: Stream, page: Page, geometry: Geometry, rows: list[int]
) -> tuple[list[int], list[int]]:
    """What the rows of a page must hold in a stream and what they hold, without those of which
    nothing is known."""
    own = page_stamps(stream, page, geometry)
    number, size = page_place(stream, page, geometry)
    seen = rows[number * size : number * size + len(own)]
    if NO_PEER not in own and UNKNOWN not in own:
        return (own if stream.sign > 0 else [-stamp for stamp in own]), seen
    skipped = _unknown(stream)
    known = [(stamp, value) for stamp, value in zip(own, seen, strict=True) if stamp not in skipped]
    return [stream.sign * stamp for stamp, _ in known], [value for _, value in known]


def page_stamps(stream: Stream, page: Page, geometry: Geometry) -> list[int]:
    """The stamps of a page's slots on the side of a stream, in slot order."""
    if stream.side == "full":
        return page.full_stamps
    if stream.side == "SWA":
        return page.swa_stamps if page.swa else []
    each = geometry.compress
    return page.device_stamps[each - 1 :: each] if page.device else []


def page_place(stream: Stream, page: Page, geometry: Geometry) -> tuple[int, int]:
    """The page's number on the side of a stream, and the slots of a page there."""
    if stream.side == "full":
        return page.full, geometry.page_size
    if stream.side == "SWA":
        return page.swa, geometry.page_size
    return page.device, geometry.device_page_size


def _content_clause(
    owner: str, page: Page, stream: Stream, wanted: list[int], seen: list[int]
) -> Clause:
    where = {"full": f"full page {page.full}", "SWA": f"SWA page {page.swa}"}
    place = where.get(stream.side, f"device page {page.device}")
    return Clause(
        "stamps",
        f"{owner}, {place}, {stream.name}: {wanted}",
        str(seen),
        full_pages=(page.full,),
        swa_pages=(page.swa,) if stream.side == "SWA" else (),
    )


def request_rows(check: Check) -> list[Clause]:
    """rows: the request pool's table holds the slots of every live request, in order."""
    table, model = check.host.request_rows, check.model
    if not table:
        return []
    size = model.geometry.page_size
    width = len(table) // (model.geometry.requests + 1)
    clauses: list[Clause] = []
    for seq, row in model.rows.items():
        start = row.request * width
        wanted: list[int] = []
        seen: list[int] = []
        for number, page in enumerate(row.pages):
            if not page.gone:
                wanted += range(page.full * size, page.full * size + page.tokens)
                at = start + number * size
                seen += table[at : at + page.tokens]
        if seen != wanted:
            owner = holder(model.geometry, seq)
            expected = f"row {row.request}, {owner}: slots {wanted[:16]}"
            clauses.append(Clause("rows", expected, str(seen[:16])))
    return clauses


def memory_saver(check: Check) -> list[Clause]:
    """saver: a paused tag holds no byte and the others all of theirs, addresses stay, memory that
    came back is zero, and what was not paused still holds what was written."""
    view = check.after.memory
    if view is None:
        return []
    return [*_resident(check, view), *_addresses(view), *_values(check, view), *_zeroes(check)]


def _resident(check: Check, view: MemoryView) -> Iterator[Clause]:
    books = check.model.memory
    pool = sum(length for _, length in view.pool)
    for memory, held in view.held.items():
        live = pool * (memory == "kv_cache") + books.size(memory) * mmap.PAGESIZE
        paused = memory in books.paused
        wanted = 0 if paused else live
        state = "paused" if paused else "not paused"
        if held.resident != wanted:
            expected = f"{wanted} of {live} bytes of {memory} resident, which is {state}"
            yield Clause("saver", expected, f"{held.resident} resident")
        # More than is alive may be kept for the next one; nothing is while the tag is paused.
        if held.said < wanted or (paused and held.said):
            expected = f"the saver to say that {wanted} bytes of {memory} are resident"
            yield Clause("saver", expected, str(held.said))


def _addresses(view: MemoryView) -> Iterator[Clause]:
    if view.pool != view.pool_before:
        moved = [
            i for i, (a, b) in enumerate(zip(view.pool, view.pool_before, strict=False)) if a != b
        ]
        yield Clause("saver", "the pool's buffers where they were", f"others: {some(moved)}")


def _values(check: Check, view: MemoryView) -> Iterator[Clause]:
    books = check.model.memory
    for memory, held in view.held.items():
        pieces = {name: piece for name, piece in books.pieces.items() if piece.memory == memory}
        if memory in books.paused or not pieces:
            continue
        wanted = tuple(pieces[name].value for name in sorted(pieces))
        if held.values != wanted:
            expected = f"regions {some(set(pieces))} of {memory} hold {wanted}"
            yield Clause("saver", expected, str(held.values))


def _zeroes(check: Check) -> Iterator[Clause]:
    if not check.model.memory.fresh:
        return
    for stream, rows in zip(check.after.streams, check.host.stamps, strict=False):
        if any(rows):
            where = some([slot for slot, value in enumerate(rows) if value])
            yield Clause(
                "saver", f"{stream.name} zero after the resume", f"not so in slots {where}"
            )

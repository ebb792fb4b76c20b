"""The laws of device slots (HiSparse) in plain form: conservation, entries, drain.

Parts of the laws L3, L4 and L10 for geometries with device pages. Leaves out what lies in them
(`kvcore.invariants.contents`).
"""

from __future__ import annotations

from kvcore.invariants.check import Check
from kvcore.models import Clause, Model
from kvcore.models.state import NO_PEER, Page
from kvcore.models.violation import some


def device_partition(check: Check) -> list[Clause]:
    """L3 of device pages: mapping, buffers on loan, free list and open group hold each once."""
    model, host = check.model, check.host
    size, total = model.geometry.device_page_size, model.device.total
    places: list[list[str]] = [[] for _ in range(total + 1)]

    def put(page: int, place: str) -> None:
        if 0 <= page <= total:
            places[page].append(place)

    for start in range(0, len(host.device_mapping) - 1, size):
        logical = start // size
        pages = {entry // size for entry in host.device_mapping[start : start + size] if entry}
        for page in pages:
            if model.device_detached.get(logical) != page:
                put(page, f"mapped by logical page {logical}")
    for page in host.device_free:
        put(page, "free")
    for page in model.device.pending:
        put(page, "pending in the group")
    for buffer, lent in model.buffers.items():
        for page in lent:
            put(page, f"in buffer {buffer}")
    return [
        Clause(
            "L3",
            f"device page {page} in exactly one place"
            if page
            else "device page 0 nowhere: it is the padding page",
            " and ".join(where) or "nowhere: allocated, but nothing maps to it",
        )
        for page, where in enumerate(places)
        if len(where) != (1 if page else 0)
    ]


def device_entries(check: Check) -> list[Clause]:
    """L4 of the device mapping: every entry is what the rows say; the rest is 0."""
    model, mapping = check.model, check.host.device_mapping
    geometry = model.geometry
    size = geometry.device_page_size
    length = (geometry.full_pages + 1) * size + 1
    if len(mapping) != length:
        return [Clause("L4", f"a device mapping of {length} entries", f"{len(mapping)} entries")]
    clauses: list[Clause] = []
    if mapping[-1] != -1:
        clauses.append(Clause("L4", "the device mapping's sentinel -1", str(mapping[-1])))
    lent = {page.full: page for _, page in model.lent_pages()}
    for logical in range(geometry.full_pages + 1):
        entries = mapping[logical * size : (logical + 1) * size]
        wanted = _entries_of(model, lent.get(logical))
        gone = model.device_detached.get(logical)
        old = [0] * size if gone is None else [gone * size + i for i in range(size)]
        pairs = zip(entries, wanted, old, strict=True)
        if not all(seen == want or (want == 0 and seen in (0, was)) for seen, want, was in pairs):
            expected = f"logical page {logical} mapped to device slots {wanted}"
            clauses.append(Clause("L4", expected, str(entries), (logical,)))
    return clauses


def _entries_of(model: Model, page: Page | None) -> list[int]:
    """The device slots of a logical page, entry by entry; 0 for none."""
    size, each = model.geometry.device_page_size, model.geometry.compress
    if page is None:
        return [0] * size
    ends = page.device_stamps[each - 1 :: each]
    entries = [page.device * size + i if s != NO_PEER else 0 for i, s in enumerate(ends)]
    return entries + [0] * (size - len(entries))


def device_unmapped(check: Check) -> list[Clause]:
    """L10 of the device mapping."""
    mapped = [slot for slot, entry in enumerate(check.host.device_mapping[:-1]) if entry]
    return (
        [Clause("L10", "no logical slot mapped to a device slot", some(mapped))] if mapped else []
    )

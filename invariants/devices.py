"""The laws of device slots (HiSparse) in plain form: conservation, entries, drain.

Parts of the laws L3, L4 and L10 for geometries with device pages. Leaves out what lies in them
(`kvcore.invariants.contents`).
"""

from __future__ import annotations

from collections import Counter

from kvcore.invariants.check import Check
from kvcore.models import Clause, Model
from kvcore.models.state import NO_PEER, Page
from kvcore.models.violation import some


def device_partition(check: Check) -> list[Clause]:
    """L3 of device pages: mapping, buffers on loan, free list and open group hold each once."""
    model, host = check.model, check.host
    total = model.device.total
    mapped = _mapped(model, host.device_mapping)
    lent = [page for buffer in model.buffers.values() for page in buffer]
    placed = [*(page for page, _ in mapped), *host.device_free, *model.device.pending, *lent]
    inside = [page for page in placed if 0 <= page <= total]
    if len(inside) == total == len({*inside} - {0}):
        return []
    counts = Counter(inside)
    return [
        Clause(
            "L3",
            f"device page {page} in exactly one place"
            if page
            else "device page 0 nowhere: it is the padding page",
            _places(check, mapped, page),
        )
        for page in range(total + 1)
        if counts[page] != (1 if page else 0)
    ]


def _mapped(model: Model, mapping: list[int]) -> list[tuple[int, int]]:
    """(device page, logical page) of every join that the mapping shows, but for those given up in
    the open group."""
    size, gone = model.geometry.device_page_size, model.device_detached
    joins: dict[tuple[int, int], None] = {}
    for slot, entry in enumerate(mapping[:-1]):
        if entry:
            joins[(entry // size, slot // size)] = None
    return [(page, logical) for page, logical in joins if gone.get(logical) != page]


def _places(check: Check, mapped: list[tuple[int, int]], page: int) -> str:
    """Where a device page is, in words."""
    model = check.model
    where = [f"mapped by logical page {logical}" for found, logical in mapped if found == page]
    where += ["free"] * check.host.device_free.count(page)
    where += ["pending in the group"] * (page in model.device.pending)
    for buffer, lent in model.buffers.items():
        where += [f"in buffer {buffer}"] * lent.count(page)
    return " and ".join(where) or "nowhere: allocated, but nothing maps to it"


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
        page = lent.get(logical)
        if not device_entries_right(model, logical, page, entries):
            expected = f"logical page {logical} mapped to device slots {_entries_of(model, page)}"
            clauses.append(Clause("L4", expected, str(entries), (logical,)))
    return clauses


def device_entries_right(model: Model, logical: int, page: Page | None, entries: list[int]) -> bool:
    """Whether a logical page's device entries are what the model says of ``page``, None if no row
    holds it. A detached entry may still be there."""
    if (page is None or page.device == 0) and not any(entries):
        return True
    wanted = _entries_of(model, page)
    if entries == wanted:
        return True
    size, gone = model.geometry.device_page_size, model.device_detached.get(logical)
    old = [0] * size if gone is None else [gone * size + i for i in range(size)]
    pairs = zip(entries, wanted, old, strict=True)
    return all(seen == want or (want == 0 and seen in (0, was)) for seen, want, was in pairs)


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

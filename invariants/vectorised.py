"""The laws in vectorised form: tensors of large pools, the same clauses as the plain form.

Each function works on the view's tensors on their device and brings only broken pages to the host;
what the model says is still gathered from its rows in Python. Laws without an entry here keep their
plain form, and with it the view's lists. A test
holds every entry against the plain form of the same law.
"""

from __future__ import annotations

import torch

from kvcore.invariants.check import Check, LawForm
from kvcore.invariants.contents import page_place, page_stamps
from kvcore.invariants.devices import device_entries, device_partition, device_unmapped
from kvcore.invariants.plain import identity_mapping, pending_kept
from kvcore.models import Clause, Model
from kvcore.models.state import NO_PEER, UNKNOWN, Page, Side
from kvcore.models.violation import some
from kvcore.targets.protocol import Stream


def _ids(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _counts(pages: torch.Tensor, total: int) -> torch.Tensor:
    """How often each page 0..total occurs; ids outside are left out."""
    inside = pages[(pages >= 0) & (pages <= total)]
    return torch.bincount(inside, minlength=total + 1)


def _mask(pages: set[int], total: int, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(total + 1, dtype=torch.bool, device=device)
    if pages:
        mask[torch.tensor(sorted(pages), dtype=torch.int64, device=device)] = True
    return mask


def _sides(check: Check) -> list[tuple[str, Side, torch.Tensor]]:
    full, swa, _ = check.after.tensors()
    sides = [("full", check.model.full, full)]
    if check.model.geometry.hybrid:
        sides.append(("swa", check.model.swa, swa))
    for name, side, ids in check.sides()[len(sides) :]:
        sides.append((name, side, torch.tensor(ids, dtype=torch.int64, device=full.device)))
    return sides


def _clause(law: str, expected: str, seen: str, side: str, pages: tuple[int, ...]) -> Clause:
    return Clause(law, expected, seen, pages if side == "full" else (), pages * (side == "swa"))


def conservation(check: Check) -> list[Clause]:
    """L1 on tensors."""
    clauses = pending_kept(check)
    for name, side, free in _sides(check):
        wanted = _mask(side.free, side.total, free.device)
        seen = _counts(free, side.total) > 0
        seen[0] = False
        if lost := _ids(wanted & ~seen):
            expected = f"{name} pages {some(lost)} free"
            clauses.append(_clause("L1", expected, "in no free container: lost", name, lost))
        if extra := _ids(seen & ~wanted):
            expected = f"{name} pages {some(extra)} lent or pending"
            clauses.append(_clause("L1", expected, "free", name, extra))
    return clauses


def no_page_twice(check: Check) -> list[Clause]:
    """L2 on tensors."""
    clauses: list[Clause] = []
    for name, side, free in _sides(check):
        if twice := _ids(_counts(free, side.total) > 1):
            expected = f"each {name} page once in the free containers"
            clauses.append(_clause("L2", expected, f"{some(twice)} more than once", name, twice))
        outside = free[(free < 1) | (free > side.total)]
        if outside.numel():
            wrong = tuple(sorted(set(outside.tolist())))
            expected = f"free {name} pages within 1..{side.total}"
            clauses.append(_clause("L2", expected, f"{some(wrong)} free", name, wrong))
    return clauses


def mapped_is_allocated(check: Check) -> list[Clause]:
    """L3 on tensors: one count of every SWA page over mapping, free list and open group."""
    model = check.model
    clauses = device_partition(check) if model.geometry.sparse else []
    if not model.geometry.hybrid:
        return clauses
    _, free, mapping = check.after.tensors()
    size, total = model.geometry.page_size, model.swa.total
    slots = (mapping[:-1] != 0).nonzero().flatten()
    full, swa = slots // size, mapping[slots] // size
    base = int(mapping.numel()) + 1
    pairs = torch.unique(swa * base + full)
    if model.detached:
        gone = [page * base + full_page for full_page, page in model.detached.items()]
        pairs = pairs[~torch.isin(pairs, torch.tensor(gone, device=pairs.device))]
    counts = _counts(pairs // base, total) + _counts(free, total)
    counts += _mask(model.swa.pending, total, counts.device).to(counts.dtype)
    wanted = torch.ones_like(counts)
    wanted[0] = 0
    wrong = _ids(counts != wanted)
    if not wrong:
        return clauses
    swa_of, full_of = (pairs // base).tolist(), (pairs % base).tolist()
    return clauses + [
        Clause(
            "L3",
            f"SWA page {page} in exactly one place" if page else "the padding page nowhere",
            f"in {int(counts[page])} places of mapping, free list and group",
            full_pages=tuple(
                sorted({f for s, f in zip(swa_of, full_of, strict=True) if s == page})
            ),
            swa_pages=(page,),
        )
        for page in wrong
    ]


def _mapping_of_rows(
    model: Model, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each mapping entry must be, and what else it may be: an entry beyond the tokens of its
    page may already name the peer, a detached one may still."""
    size = model.geometry.page_size
    exact = [0] * length
    other = [0] * length
    exact[-1] = other[-1] = -1
    for full, swa in model.detached.items():
        other[full * size : (full + 1) * size] = range(swa * size, (swa + 1) * size)
    for _, page in model.lent_pages():
        start = page.full * size
        if page.swa == 0:
            continue
        exact[start : start + page.tokens] = _peers(page, size)
        other[start : start + page.tokens] = _peers(page, size)
        beyond = range(page.swa * size + page.tokens, (page.swa + 1) * size)
        other[start + page.tokens : start + size] = beyond
    return torch.tensor(exact, device=device), torch.tensor(other, device=device)


def _peers(page: Page, size: int) -> list[int]:
    base = page.swa * size
    return [base + i if stamp != NO_PEER else 0 for i, stamp in enumerate(page.swa_stamps)]


def no_stale_mapping(check: Check) -> list[Clause]:
    """L4 on tensors."""
    model = check.model
    clauses = device_entries(check) if model.geometry.sparse else []
    if model.geometry.pure_swa:
        return clauses + identity_mapping(check)
    if not model.geometry.hybrid:
        return clauses
    _, _, mapping = check.after.tensors()
    size = model.geometry.page_size
    length = model.geometry.full_size + size + 1
    if mapping.numel() != length:
        wrong_length = Clause("L4", f"a mapping of {length} entries", f"{mapping.numel()} entries")
        return [*clauses, wrong_length]
    exact, other = _mapping_of_rows(model, mapping.numel(), mapping.device)
    wrong = (mapping != exact) & (mapping != other)
    if bool(wrong[-1]):
        clauses.append(Clause("L4", "the sentinel entry -1", str(int(mapping[-1]))))
    for full in torch.unique(wrong[:-1].nonzero().flatten() // size).tolist():
        entries = mapping[full * size : (full + 1) * size].tolist()
        wanted = exact[full * size : (full + 1) * size].tolist()
        swa = tuple(sorted({entry // size for entry in entries if entry > 0}))
        clauses.append(
            Clause("L4", f"full page {full} mapped to {wanted}", str(entries), (full,), swa)
        )
    return clauses


def drained(check: Check) -> list[Clause]:
    """L10 on tensors."""
    if not check.drained:
        return []
    clauses: list[Clause] = []
    for name, side, free in _sides(check):
        if free.numel() != side.total:
            missing = _counts(free, side.total) == 0
            missing[0] = False
            expected = f"all {side.total} {name} pages free"
            clauses.append(_clause("L10", expected, f"{free.numel()} free", name, _ids(missing)))
    _, _, mapping = check.after.tensors()
    mapped = mapping[:-1].nonzero().flatten() // check.model.geometry.page_size
    if mapped.numel() and not check.model.geometry.pure_swa:
        pages = tuple(torch.unique(mapped).tolist())
        clauses.append(_clause("L10", "no full slot mapped", some(pages), "full", pages))
    return clauses + device_unmapped(check)


def stamps(check: Check) -> list[Clause]:
    """stamps on tensors: one gather a stream, and a host list of the pages that differ."""
    clauses: list[Clause] = []
    for stream, rows in zip(check.after.streams, check.after.stamp_tensors(), strict=False):
        for full, swa in _wrong_pages(check.model, stream, rows):
            place = {"full": f"full page {full}", "SWA": f"SWA page {swa}"}
            where = place.get(stream.side, f"the device page of logical page {full}")
            expected = f"{where}, {stream.name}: the stamps of its tokens"
            swa_pages = (swa,) if stream.side == "SWA" else ()
            clauses.append(Clause("stamps", expected, "other contents", (full,), swa_pages))
    return clauses


def _wrong_pages(model: Model, stream: Stream, rows: torch.Tensor) -> list[tuple[int, int]]:
    """(full page, SWA page) of the pages whose rows differ in a stream."""
    slots: list[int] = []
    wanted: list[int] = []
    pages: list[tuple[int, int]] = []
    skipped = (UNKNOWN,) if stream.side == "full" else (UNKNOWN, NO_PEER)
    for _, page in model.lent_pages():
        number, size = page_place(stream, page, model.geometry)
        for offset, stamp in enumerate(page_stamps(stream, page, model.geometry)):
            if stamp not in skipped:
                slots.append(number * size + offset)
                wanted.append(stream.sign * stamp)
                pages.append((page.full, page.swa))
    at = torch.tensor(slots, dtype=torch.int64, device=rows.device)
    bad = rows[at] != torch.tensor(wanted, dtype=torch.int64, device=rows.device)
    return sorted({pages[i] for i in bad.nonzero().flatten().tolist()})


VECTORISED: dict[str, LawForm] = {
    "L3": mapped_is_allocated,
    "L2": no_page_twice,
    "L4": no_stale_mapping,
    "L1": conservation,
    "L10": drained,
    "stamps": stamps,
}
"""The vectorised form of every law whose plain form grows with the pool, by id."""

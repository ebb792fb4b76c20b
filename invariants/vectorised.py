"""The laws in vectorised form: tensors of large pools, the same clauses as the plain form.

Each function works on the view's tensors on their device and brings only broken pages to the host;
what the model says is gathered page by page, never token by token. Some laws only make sure here
that all is right, and leave the wording of what is not to their plain form. Laws without an entry
are the same for pools of every size. A test holds every entry against the plain form of its law.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.invariants import contents, plain
from kvcore.invariants.check import Check, LawForm
from kvcore.invariants.contents import page_place, page_stamps
from kvcore.invariants.devices import device_entries, device_partition, device_unmapped
from kvcore.invariants.failures import failure_changes_nothing
from kvcore.invariants.plain import identity_mapping, pending_kept
from kvcore.invariants.prefix_tree import tree_quickly
from kvcore.models import Clause, Model
from kvcore.models.ops import GroupEnd
from kvcore.models.state import NO_PEER, UNKNOWN, Page, Row, Side
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
        mask[torch.tensor(list(pages), dtype=torch.int64, device=device)] = True
    return mask


def free_tensors(check: Check) -> list[tuple[str, Side, torch.Tensor]]:
    """(name, the model's side, free pages seen) for each pool."""
    full, swa, _ = check.after.tensors()
    sides = [("full", check.model.full, full)]
    if check.model.geometry.hybrid:
        sides.append(("swa", check.model.swa, swa))
    if check.model.geometry.sparse:
        sides.append(("device", check.model.device, check.after.device_tensors()[0]))
    if check.model.geometry.requests:
        sides.append(("request", check.model.requests, check.after.request_tensors()[0]))
    return sides


def _clause(law: str, expected: str, seen: str, side: str, pages: tuple[int, ...]) -> Clause:
    return Clause(law, expected, seen, pages if side == "full" else (), pages * (side == "swa"))


def conservation(check: Check) -> list[Clause]:
    """L1 on tensors."""
    clauses = pending_kept(check)
    for name, side, free in free_tensors(check):
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
    for name, side, free in free_tensors(check):
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
    if not model.geometry.hybrid or _partition_holds(check):
        return clauses
    _, free, mapping = check.after.tensors()
    size, total = model.geometry.page_size, model.swa.total
    pairs, base = _joined(mapping, size)
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


def _partition_holds(check: Check) -> bool:
    """Whether rows, free list and group hold every SWA page once, where the mapping is known to be
    what the rows say: pages are looked at instead of slots."""
    if not _mapping_right(check):
        return False
    model, free = check.model, check.after.tensors()[1]
    placed = [page.swa for _, page in model.lent_pages() if page.swa]
    everywhere = torch.cat((_ids_on(free.device, [*placed, *model.swa.pending]), free))
    total = model.swa.total
    if everywhere.numel() != total or int(everywhere.min()) < 1:
        return False
    return int(everywhere.max()) <= total and bool((_counts(everywhere, total)[1:] == 1).all())


def _mapping_right(check: Check) -> bool:
    """Whether every entry is what the rows say; worked out once a step."""
    if check.mapping_right is None:
        model, mapping = check.model, check.after.tensors()[2]
        length = model.geometry.full_size + model.geometry.page_size + 1
        check.mapping_right = (
            mapping.numel() == length
            and int(mapping[-1]) == -1
            and not bool(_wrong_entries(model, mapping).any())
        )
    return check.mapping_right


def _joined(mapping: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
    """Every (SWA page, full page) that the mapping joins, each once, as ``SWA * base + full``."""
    base = int(mapping.numel()) + 1
    slots = (mapping[:-1] != 0).nonzero().flatten()
    return torch.unique(mapping[slots] // size * base + slots // size), base


def _wrong_entries(model: Model, mapping: torch.Tensor) -> torch.Tensor:
    """For each entry but the sentinel whether it is wrong, `[full pages + 1, page size]`. An entry
    beyond the tokens of its page may already name the peer, a detached one may still."""
    size, device = model.geometry.page_size, mapping.device
    entries = mapping[:-1].view(-1, size)
    wrong = entries != 0
    for page, peer in model.detached.items():
        wrong[page] &= entries[page] != torch.arange(peer * size, (peer + 1) * size, device=device)
    lent = [page for _, page in model.lent_pages() if page.swa]
    if not lent:
        return wrong
    full, used, swa = (_ids_on(device, ids) for ids in _numbers(lent))
    offsets = torch.arange(size, device=device)
    seen = entries[full]
    beyond = (offsets >= used[:, None]) & (seen == 0)
    wrong[full] = (seen != swa[:, None] * size + offsets) & ~beyond
    # What is served comes in whole pages: all tokens of one have their peer, or none.
    for part in lent if not model.geometry.serves else ():
        if NO_PEER in part.swa_stamps:
            wanted = _ids_on(device, _peers(part, size))
            wrong[part.full, : part.tokens] = entries[part.full, : part.tokens] != wanted
    return wrong


def _numbers(pages: list[Page]) -> tuple[list[int], list[int], list[int]]:
    """Full page, tokens and SWA page of each."""
    return (
        [page.full for page in pages],
        [len(page.full_stamps) for page in pages],
        [page.swa for page in pages],
    )


def _ids_on(device: torch.device, numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)


def _peers(page: Page, size: int) -> list[int]:
    base = page.swa * size
    return [base + i if stamp != NO_PEER else 0 for i, stamp in enumerate(page.swa_stamps)]


def no_stale_mapping(check: Check) -> list[Clause]:
    """L4 on tensors."""
    model = check.model
    clauses = device_entries(check) if model.geometry.sparse else []
    if model.geometry.pure_swa:
        return clauses + identity_mapping(check)
    if not model.geometry.hybrid or _mapping_right(check):
        return clauses
    _, _, mapping = check.after.tensors()
    size = model.geometry.page_size
    length = model.geometry.full_size + size + 1
    if mapping.numel() != length:
        wrong_length = Clause("L4", f"a mapping of {length} entries", f"{mapping.numel()} entries")
        return [*clauses, wrong_length]
    if int(mapping[-1]) != -1:
        clauses.append(Clause("L4", "the sentinel entry -1", str(int(mapping[-1]))))
    wrong = _wrong_entries(model, mapping).any(dim=1).nonzero().flatten().tolist()
    lent = {page.full: page for _, page in model.lent_pages() if page.swa} if wrong else {}
    for full in wrong:
        entries = mapping[full * size : (full + 1) * size].tolist()
        peers = _peers(lent[full], size) if full in lent else []
        wanted = peers + [0] * (size - len(peers))
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
    for name, side, free in free_tensors(check):
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
    return clauses + (device_unmapped(check) if check.model.geometry.sparse else [])


def stamps(check: Check) -> list[Clause]:
    """stamps on tensors: one gather a stream, and a host list of the pages that differ."""
    clauses: list[Clause] = []
    due: dict[str, DueStamps] = {}
    for stream, rows in zip(check.after.streams, check.after.stamp_tensors(), strict=False):
        if stream.side not in due:
            due[stream.side] = _due_stamps(check.model, stream)
        for full, swa in _wrong_pages(due[stream.side], stream, rows):
            place = {"full": f"full page {full}", "SWA": f"SWA page {swa}"}
            where = place.get(stream.side, f"the device page of logical page {full}")
            expected = f"{where}, {stream.name}: the stamps of its tokens"
            swa_pages = (swa,) if stream.side == "SWA" else ()
            clauses.append(Clause("stamps", expected, "other contents", (full,), swa_pages))
    return clauses


@dataclass(frozen=True, slots=True)
class DueStamps:
    """Slots of a side, the stamps that they must hold, and the place of their page in ``pages``,
    which are (full page, SWA page)."""

    slots: NDArray[np.int64]
    stamps: NDArray[np.int64]
    place: NDArray[np.int64]
    pages: list[tuple[int, int]]


def _due_stamps(model: Model, stream: Stream) -> DueStamps:
    """What the rows of a stream's side must hold, without those of which nothing is known."""
    geometry = model.geometry
    pages = [page for _, page in model.lent_pages()]
    own = [page_stamps(stream, page, geometry) for page in pages]
    lengths = np.fromiter(map(len, own), np.int64, len(own))
    total = int(lengths.sum())
    wanted = np.fromiter(chain.from_iterable(own), np.int64, total)
    starts = np.array(
        [number * size for number, size in (page_place(stream, p, geometry) for p in pages)],
        np.int64,
    )
    place = np.repeat(np.arange(len(pages)), lengths)
    slots = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)
    known = wanted != UNKNOWN
    if stream.side != "full":
        known &= wanted != NO_PEER
    if not known.all():
        slots, wanted, place = slots[known], wanted[known], place[known]
    return DueStamps(slots, wanted, place, [(page.full, page.swa) for page in pages])


def _wrong_pages(due: DueStamps, stream: Stream, rows: torch.Tensor) -> list[tuple[int, int]]:
    """(full page, SWA page) of the pages whose rows differ in a stream."""
    seen = rows[torch.from_numpy(due.slots).to(rows.device)]
    wrong = seen != stream.sign * torch.from_numpy(due.stamps).to(rows.device)
    places = due.place[wrong.cpu().numpy()]
    return sorted({due.pages[place] for place in places.tolist()})


def group_law(check: Check) -> list[Clause]:
    """L6 on tensors, where it holds."""
    if not isinstance(check.op, GroupEnd) or all(_as_the_model(*it) for it in free_tensors(check)):
        return []
    return plain.group_law(check)


def _as_the_model(name: str, side: Side, free: torch.Tensor) -> bool:
    """Whether the pages in the free containers are those that the model says."""
    inside = bool(((free >= 1) & (free <= side.total)).all())
    seen = _counts(free, side.total) > 0
    return inside and torch.equal(seen, _mask(side.free, side.total, free.device))


def tensors_are_owned(check: Check) -> list[Clause]:
    """L8 on tensors, where it holds: the rest of the view stays where it is."""
    held = check.after.held_tensors()
    if all(slots.tolist() == check.held[number] for number, slots in held.items()):
        return []
    return plain.tensors_are_owned(check)


def request_rows(check: Check) -> list[Clause]:
    """rows on tensors, where it holds."""
    table, model = check.after.request_tensors()[1], check.model
    if not table.numel():
        return []
    width = table.numel() // (model.geometry.requests + 1)
    if all(_row_holds(table[row.request * width :], row, model) for row in model.rows.values()):
        return []
    return contents.request_rows(check)


def _row_holds(seen: torch.Tensor, row: Row, model: Model) -> bool:
    """Whether a row of the table begins with the slots of a request whose pages are all there."""
    size = model.geometry.page_size
    if any(page.gone for page in row.pages):
        return False
    full = torch.tensor([page.full for page in row.pages], dtype=torch.int64, device=seen.device)
    slots = full[:, None] * size + torch.arange(size, device=seen.device)
    tokens = row.tokens
    return torch.equal(seen[:tokens], slots.flatten()[:tokens])


VECTORISED: dict[str, LawForm] = {
    "L3": mapped_is_allocated,
    "L2": no_page_twice,
    "L4": no_stale_mapping,
    "L5": failure_changes_nothing,
    "L6": group_law,
    "L1": conservation,
    "tree": tree_quickly,
    "L8": tensors_are_owned,
    "L10": drained,
    "stamps": stamps,
    "rows": request_rows,
}
"""The vectorised form of every law whose plain form grows with the pool, by id."""

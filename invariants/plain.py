"""The laws in plain form: lists and sets of a small pool, differences that a person can read.

Each function returns the broken clauses of one law. The vectorised forms of the same laws are in
`kvcore.invariants.vectorised`. Modules of their own have device slots, what lies in the pools, the
prefix cache, and failures (`kvcore.invariants.devices`, `.contents`, `.prefix_tree`, `.failures`).
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from kvcore.invariants.check import Check, LawForm
from kvcore.invariants.clauses import pages_clause
from kvcore.invariants.contents import memory_saver, request_rows, stamps
from kvcore.invariants.devices import device_entries, device_partition, device_unmapped
from kvcore.invariants.failures import capacities, failure_changes_no_list
from kvcore.invariants.prefix_tree import locks, tree
from kvcore.models import Clause, Model
from kvcore.models.ops import GroupEnd
from kvcore.models.state import NO_PEER, Page
from kvcore.models.violation import some
from kvcore.targets.protocol import Answers


def conservation(check: Check) -> list[Clause]:
    """L1: the free pages are exactly those that the model says are free, and a call that must
    change nothing loses none that waits for the end of the group."""
    clauses = pending_kept(check)
    for name, side, free in check.sides():
        seen = set(free)
        if seen == side.free:
            continue
        if lost := side.free - seen:
            clauses.append(
                pages_clause(
                    "L1",
                    f"{name} pages {some(lost)} free: no row and no group holds them",
                    "in no free container: lost",
                    name,
                    lost,
                )
            )
        if extra := {page for page in seen - side.free if 1 <= page <= side.total}:
            holder = "pending in the group" if extra <= side.pending else "lent"
            clauses.append(
                pages_clause(
                    "L1", f"{name} pages {some(extra)} {holder}, not free", "free", name, extra
                )
            )
    return clauses


def pending_kept(check: Check) -> list[Clause]:
    """L1 of the group: a call that must change nothing leaves what waits for the group's end. At
    other calls an implementation may keep account of that as it likes, until the end."""
    if not check.op.hostile or check.before is None:
        return []
    if not (check.before.holds_pending and check.after.holds_pending):
        return []
    clauses: list[Clause] = []
    befores, afters = check.before.host().pending, check.host.pending
    for name, before, after in zip(("full", "swa", "device"), befores, afters, strict=False):
        if set(before) != set(after):
            clauses.append(
                pages_clause(
                    "L1",
                    f"{name} pages {some(set(before))} pending in the group, as before the call",
                    f"{some(set(after))} pending",
                    name,
                    set(before) ^ set(after),
                )
            )
    return clauses


def no_page_twice(check: Check) -> list[Clause]:
    """L2: free containers hold each page once, and only pages 1..N."""
    clauses: list[Clause] = []
    for name, side, free in check.sides():
        if len(set(free)) != len(free):
            twice = {page for page, count in Counter(free).items() if count > 1}
            clauses.append(
                pages_clause(
                    "L2",
                    f"each {name} page once in the free containers",
                    f"{some(twice)} more than once",
                    name,
                    twice,
                )
            )
        if free and not (min(free) >= 1 and max(free) <= side.total):
            wrong = {page for page in free if not 1 <= page <= side.total}
            what = "the padding page" if 0 in wrong else some(wrong)
            clauses.append(
                pages_clause(
                    "L2",
                    f"free {name} pages within 1..{side.total}",
                    f"{what} is free",
                    name,
                    wrong,
                )
            )
    return clauses


def mapped_is_allocated(check: Check) -> list[Clause]:
    """L3: mapping, free list and open group hold every SWA page exactly once, and with the buffers
    on loan every device page."""
    model, host = check.model, check.host
    clauses = device_partition(check) if model.geometry.sparse else []
    if not model.geometry.hybrid or _partition_holds(check):
        return clauses
    owners = swa_owners(model, host.mapping)
    counts = [0] * (model.swa.total + 1)
    for page, full in owners:
        if 0 <= page <= model.swa.total and model.detached.get(full) != page:
            counts[page] += 1
    for page in host.swa_free:
        if 0 <= page <= model.swa.total:
            counts[page] += 1
    for page in model.swa.pending:
        counts[page] += 1
    if counts.count(1) == model.swa.total and counts[0] == 0:
        return clauses
    return clauses + [
        _partition_clause(model, host.swa_free, owners, page, counts[page])
        for page in range(model.swa.total + 1)
        if counts[page] != (1 if page else 0)
    ]


def _partition_holds(check: Check) -> bool:
    """Whether rows, free list and group hold every SWA page once, where the mapping is known to be
    what the rows say: one pass over pages instead of slots."""
    if not _mapping_right(check):
        return False
    model = check.model
    placed = [page.swa for _, page in model.lent_pages() if page.swa]
    placed += check.host.swa_free
    placed += model.swa.pending
    total = model.swa.total
    if len(placed) != total or len(set(placed)) != total:
        return False
    return min(placed) >= 1 and max(placed) <= total


def swa_owners(model: Model, mapping: list[int]) -> list[tuple[int, int]]:
    """(SWA page, full page) for every full page that the mapping joins to an SWA page; a full page
    joined to two of them appears twice."""
    size = model.geometry.page_size
    if size == 1:
        return [(peer, full) for full, peer in enumerate(mapping[:-1]) if peer]
    owners: list[tuple[int, int]] = []
    for start in range(0, len(mapping) - 1, size):
        entries = mapping[start : start + size]
        if any(entries):
            owners += [(swa, start // size) for swa in {e // size for e in entries if e}]
    return owners


def _partition_clause(
    model: Model, free: list[int], owners: list[tuple[int, int]], page: int, count: int
) -> Clause:
    fulls = sorted(
        {full for swa, full in owners if swa == page and model.detached.get(full) != page}
    )
    places = [f"mapped by full page {full}" for full in fulls]
    places += [f"free ({free.count(page)} times)"] if page in free else []
    places += ["pending in the group"] if page in model.swa.pending else []
    expected = "exactly one place" if page else "no place: it is the padding page"
    seen = " and ".join(places) if places else "nowhere: allocated, but no full page maps to it"
    return Clause(
        "L3", f"SWA page {page} in {expected}", seen, full_pages=tuple(fulls), swa_pages=(page,)
    )


def no_stale_mapping(check: Check) -> list[Clause]:
    """L4: every entry of the mapping is what the rows say; the rest is 0; the sentinel is -1."""
    model, mapping = check.model, check.host.mapping
    clauses = device_entries(check) if model.geometry.sparse else []
    if model.geometry.pure_swa:
        return clauses + identity_mapping(check)
    if not model.geometry.hybrid or _mapping_right(check):
        return clauses
    length = model.geometry.full_size + model.geometry.page_size + 1
    if len(mapping) != length:
        return [*clauses, Clause("L4", f"a mapping of {length} entries", f"{len(mapping)} entries")]
    return clauses + _stale_entries(model, mapping)


def identity_mapping(check: Check) -> list[Clause]:
    """L4 where every layer slides: each slot is its own peer, always."""
    geometry, mapping = check.model.geometry, check.host.mapping
    wanted = [*range(geometry.full_size + geometry.page_size), -1]
    if mapping == wanted:
        return []
    wrong = [i for i, (old, new) in enumerate(zip(wanted, mapping, strict=False)) if old != new]
    seen = f"{len(mapping)} entries, others at {some(wrong)}"
    return [Clause("L4", "the identity mapping and the sentinel -1", seen)]


def _mapping_right(check: Check) -> bool:
    """Whether every entry is what the rows say; worked out once a step."""
    if check.mapping_right is None:
        check.mapping_right = _all_entries_right(check.model, check.host.mapping)
    return check.mapping_right


def _all_entries_right(model: Model, mapping: list[int]) -> bool:
    """Each lent page's entries are right, and there are no others but the sentinel: counting the
    entries that are not 0 is cheaper than looking at those that must be."""
    size = model.geometry.page_size
    if len(mapping) != model.geometry.full_size + size + 1 or mapping[-1] != -1:
        return False
    explained = 0
    for _, page in model.lent_pages():
        entries = mapping[page.full * size : (page.full + 1) * size]
        if not entries_right(model, page.full, page, entries):
            return False
        explained += size - entries.count(0)
    lent = {page.full for _, page in model.lent_pages()} if model.detached else set()
    for full in model.detached.keys() - lent:
        entries = mapping[full * size : (full + 1) * size]
        if not _within(entries, model.detached[full], size):
            return False
        explained += size - entries.count(0)
    return len(mapping) - mapping.count(0) == explained + 1


def entries_right(model: Model, full: int, page: Page | None, entries: list[int]) -> bool:
    """Whether a full page's entries are what the model says of ``page``, None if no row holds it.
    An entry beyond its tokens may already name the peer, a detached one may still."""
    size = model.geometry.page_size
    if page is None or page.swa == 0:
        if not any(entries):
            return True
        gone = model.detached.get(full)
        return gone is not None and _within(entries, gone, size)
    used, whole = len(page.full_stamps), list(range(page.swa * size, (page.swa + 1) * size))
    if NO_PEER in page.swa_stamps:
        if entries[:used] != _peers_of(page, size):
            return False
    elif entries == whole:
        return True
    elif entries[:used] != whole[:used]:
        return False
    rest = entries[used:]
    return not any(rest) or _within([0] * used + rest, page.swa, size)


def _peers_of(page: Page, size: int) -> list[int]:
    base = page.swa * size
    return [base + i if stamp != NO_PEER else 0 for i, stamp in enumerate(page.swa_stamps)]


def _within(entries: list[int], swa: int, size: int) -> bool:
    """Whether each entry is 0 or the slot of ``swa`` at the same offset."""
    return all(entry in (0, swa * size + offset) for offset, entry in enumerate(entries))


def _stale_entries(model: Model, mapping: list[int]) -> list[Clause]:
    size = model.geometry.page_size
    lent = {page.full: page for _, page in model.lent_pages()}
    clauses: list[Clause] = []
    if mapping[-1] != -1:
        clauses.append(Clause("L4", "the sentinel entry -1", str(mapping[-1])))
    for full in range(model.full.total + 1):
        entries = mapping[full * size : (full + 1) * size]
        page = lent.get(full)
        if not entries_right(model, full, page, entries):
            what = f"full page {full}, which is not lent, mapped to 0"
            if page is not None:
                expected = str(_peers_of(page, size)) if page.swa else "no peer"
                what = f"lent full page {full} mapped to {expected}"
            swa = tuple(sorted({entry // size for entry in entries if entry > 0}))
            clauses.append(Clause("L4", what, str(entries), (full,), swa))
    return clauses


def group_law(check: Check) -> list[Clause]:
    """L6: a group's end releases exactly what was freed inside it."""
    if not isinstance(check.op, GroupEnd):
        return []
    clauses: list[Clause] = []
    for name, side, free in check.sides():
        if set(free) != side.free:
            lost, extra = side.free - set(free), set(free) - side.free
            clauses.append(
                pages_clause(
                    "L6",
                    f"free {name} pages after the group: {some(side.free)}",
                    f"not released: {some(lost)}; released in their place: {some(extra)}",
                    name,
                    lost | {page for page in extra if page > 0},
                )
            )
    return clauses


def capacity(check: Check) -> list[Clause]:
    """L7: the queries say what the free pages hold."""
    answers, model = check.after.answers, check.model
    if _rooms_right(model, answers):
        return []
    geometry = model.geometry
    available, full, swa, device, requests = _rooms(model)
    wanted = replace(
        answers,
        available=available,
        full_available=full,
        swa_available=swa,
        device_available=device,
        requests_available=requests,
    )
    return [Clause("L7", capacities(wanted, geometry), capacities(answers, geometry))]


def _rooms_right(model: Model, answers: Answers) -> bool:
    """Whether the queries said what room there is."""
    available, full, swa, device, requests = _rooms(model)
    return (
        answers.available == available
        and answers.full_available == full
        and answers.swa_available == swa
        and answers.device_available == device
        and answers.requests_available == requests
    )


def _rooms(model: Model) -> tuple[int, int, int, int, int]:
    """What they must say: slots that all sides have together, slots of the full, the SWA and the
    device side, and rows of the request pool."""
    geometry, size = model.geometry, model.page_size
    available = full = len(model.full.free) * size
    swa = len(model.swa.free) * size
    if model.hybrid:
        available = min(full, swa)
    if geometry.pure_swa:
        swa = full
    device = len(model.device.free) * geometry.device_page_size
    if model.sparse:
        available = min(available, device * geometry.compress)
    return available, full, swa, device, len(model.requests.free)


def answers_quickly(check: Check) -> list[Clause]:
    """L7, L8 and L9 in one: nothing is wrong at first sight, or what the three of them say."""
    view, model = check.after, check.model
    answers, twins = view.answers, view.twins
    host = view.listed or check.host
    if model.usual and model.hybrid:
        # `_rooms`, written out for the pools of nearly every check.
        size, full, swa = model.page_size, len(model.full.free), len(model.swa.free)
        are_rooms_right = (
            answers.full_available == full * size
            and answers.swa_available == swa * size
            and answers.available == (full if full < swa else swa) * size
            and answers.device_available == answers.requests_available == 0
        )
    else:
        are_rooms_right = _rooms_right(model, answers)
    if (
        are_rooms_right
        and answers.outer == answers.inner
        and twins[0] == twins[1]
        and host.held.items() <= check.held.items()
    ):
        return []
    return capacity(check) + tensors_are_owned(check) + wrapper_equivalence(check)


def tensors_are_owned(check: Check) -> list[Clause]:
    """L8: the tensors of earlier answers still hold what they held."""
    clauses: list[Clause] = []
    for number, slots in check.host.held.items():
        if slots != check.held[number]:
            size = check.model.geometry.page_size
            was = check.held[number]
            pages = {old // size for old, new in zip(was, slots, strict=False) if old != new}
            clauses.append(
                pages_clause(
                    "L8", f"answer {number} still {list(was)[:8]}", str(slots[:8]), "full", pages
                )
            )
    return clauses


def wrapper_equivalence(check: Check) -> list[Clause]:
    """L9: outer and inner allocators agree, in what they are asked and in what they are told."""
    answers, (twin_outer, twin_inner) = check.after.answers, check.after.twins
    if answers.outer == answers.inner and twin_outer == twin_inner:
        return []
    clauses: list[Clause] = []
    if answers.outer != answers.inner:
        asked = answers.asked or tuple(f"query {number}" for number in range(len(answers.inner)))
        queries = list(zip(asked, answers.inner, answers.outer, strict=True))
        wanted = ", ".join(f"{name} {inner}" for name, inner, outer in queries if inner != outer)
        seen = ", ".join(f"{name} {outer}" for name, inner, outer in queries if inner != outer)
        clauses.append(Clause("L9", f"as the inner allocators say, {wanted}", seen))
    apart = [
        (said, meant) for said, meant in zip(twin_outer, twin_inner, strict=True) if said != meant
    ]
    if apart:
        expected = "as the inner allocator, " + "; ".join(meant for _, meant in apart)
        clauses.append(Clause("L9", expected, "; ".join(said for said, _ in apart)))
    return clauses


def drained(check: Check) -> list[Clause]:
    """L10: after everything was freed, nothing is missing and nothing is mapped."""
    if not check.drained:
        return []
    clauses: list[Clause] = []
    for name, side, free in check.sides():
        if len(free) != side.total:
            missing = set(range(1, side.total + 1)) - set(free)
            clauses.append(
                pages_clause(
                    "L10", f"all {side.total} {name} pages free", f"{len(free)} free", name, missing
                )
            )
    mapping = check.host.mapping
    size = check.model.geometry.page_size
    if any(mapping[:-1]) and not check.model.geometry.pure_swa:
        mapped = {index // size for index, entry in enumerate(mapping[:-1]) if entry}
        clauses.append(
            pages_clause("L10", "no full slot mapped", f"{some(mapped)}", "full", mapped)
        )
    return clauses + device_unmapped(check)


PLAIN: dict[str, LawForm] = {
    "L3": mapped_is_allocated,
    "L2": no_page_twice,
    "L4": no_stale_mapping,
    "L5": failure_changes_no_list,
    "L6": group_law,
    "L1": conservation,
    "tree": tree,
    "locks": locks,
    "L7": capacity,
    "L8": tensors_are_owned,
    "L9": wrapper_equivalence,
    "L10": drained,
    "stamps": stamps,
    "rows": request_rows,
    "saver": memory_saver,
}
"""The plain form of every law that is judged on a view, by id."""

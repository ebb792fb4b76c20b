"""Page tables: who holds each full, SWA and device page, before and after one op.

One row a page. Full pages show which pages of the other sides lie under them; SWA and device pages
show which full page that is. Leaves out which op it was and which law, and everything that is no
page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from kvcore.models import Clause
from kvcore.reports.lines import NOTHING, Line, choose, heads, lines_table
from kvcore.reports.moment import Idle, Moment, Owner
from kvcore.reports.wording import ranges

FREE = "free"
LOST = "lost"
PADDING = "padding"

Places = dict[int, str]
"""Where pages of one side are, in words; a page that is in no place is left out."""

MAPPING_LAWS = frozenset(("L3", "L4"))
"""Laws whose full pages are concerned in what they map to, and not in who holds them."""
CACHE_LAWS = frozenset(("tree", "locks"))
"""Laws whose full pages are concerned in what the prefix cache says of them, which has a table of
its own."""
STATE_LAWS = frozenset(("L5", "L10"))
"""Laws whose full pages are concerned in both."""


@dataclass(frozen=True, slots=True)
class Concerned:
    """Pages that broke a law: in who holds them, in the SWA page or the device page under them.
    ``any``: whether there is a broken law at all."""

    held: frozenset[int] = frozenset()
    mapped: frozenset[int] = frozenset()
    device: frozenset[int] = frozenset()
    swa: frozenset[int] = frozenset()
    any: bool = False


def concerned(clauses: Sequence[Clause], moment: Moment) -> Concerned:
    """The cells that ``clauses`` point at; ``moment`` is the one in which they broke."""
    held = [c for c in clauses if c.law not in MAPPING_LAWS | CACHE_LAWS]
    mapped = {
        (page, bool(clause.swa_pages))
        for clause in clauses
        if clause.law in MAPPING_LAWS | STATE_LAWS
        for page in clause.full_pages
    }
    device = {page for page, on_swa in mapped if not on_swa and _device_is_wrong(moment, page)}
    return Concerned(
        held=frozenset(page for clause in held for page in clause.full_pages),
        mapped=frozenset(page for page, on_swa in mapped if on_swa or page not in device),
        device=frozenset(device),
        swa=frozenset(page for clause in clauses for page in clause.swa_pages),
        any=bool(clauses),
    )


def _device_is_wrong(moment: Moment, page: int) -> bool:
    """Whether a full page has other device pages than its own. Clauses do not say which of the two
    mappings they are about."""
    if not moment.geometry.sparse:
        return False
    owner = moment.owners.get(page)
    own = {owner.device} if owner is not None and owner.device else set[int]()
    size = moment.geometry.device_page_size
    seen = {entry // size for entry in _entries(moment.device_mapping, page, size) if entry}
    return seen != own or not moment.geometry.hybrid


def page_tables(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> list[Table]:
    """The table of the full side and of each other side that there is, at one moment or two."""
    broken = concerned(clauses, moments[-1])
    geometry = moments[0].geometry
    names = heads(moments)
    peers = ["SWA page"] * geometry.hybrid + ["device page"] * geometry.sparse
    if len(peers) > 1:
        # Both beside each other, twice, in 80 columns.
        peers = [peer.removesuffix(" page") for peer in peers]
    columns = [column for name in names for column in (name, *peers)]
    lines, left_out = choose(full_lines(moments, broken), geometry.full_pages, "page")
    tables = [lines_table("full page", columns, lines, left_out)]
    if geometry.hybrid:
        lines, left_out = choose(swa_lines(moments, broken), geometry.swa_pages, "page")
        tables.append(lines_table("SWA page", names, lines, left_out))
    if geometry.sparse:
        lines, left_out = choose(device_lines(moments, broken), geometry.device_pages, "page")
        tables.append(lines_table("device page", names, lines, left_out))
    return tables


def full_lines(moments: Sequence[Moment], broken: Concerned) -> list[Line]:
    """Every full page that says something: (holder, SWA page, device page) at each moment, the
    latter two where there are such sides."""
    geometry = moments[0].geometry
    places = [_full_places(moment) for moment in moments]
    lines: list[Line] = []
    for page in _pages(geometry.full_pages, places):
        cells = tuple(
            (_place(at, page), *_under(moment, page))
            for moment, at in zip(moments, places, strict=True)
        )
        marks = [page in broken.held]
        marks += [page in broken.mapped] * geometry.hybrid
        marks += [page in broken.device] * geometry.sparse
        lines.append(_line(page, geometry.full_pages, cells, tuple(marks)))
    return _telling(lines)


def swa_lines(moments: Sequence[Moment], broken: Concerned) -> list[Line]:
    """Every SWA page that says something: (where it is,) at each moment."""
    return _side_lines([_swa_places(m) for m in moments], moments[0].geometry.swa_pages, broken.swa)


def device_lines(moments: Sequence[Moment], broken: Concerned) -> list[Line]:
    """Every device page that says something: (where it is,) at each moment. Clauses do not name
    device pages by number: if any broke, a page that is not in exactly one place is marked."""
    total = moments[0].geometry.device_pages
    places = [_device_places(moment) for moment in moments]
    wrong = _misplaced(moments[-1]) if broken.any else frozenset[int]()
    return _side_lines(places, total, wrong)


def _side_lines(places: Sequence[Places], total: int, marked: frozenset[int]) -> list[Line]:
    return _telling(
        [
            _line(page, total, tuple((_place(at, page),) for at in places), (page in marked,))
            for page in _pages(total, places)
        ]
    )


def _pages(total: int, places: Sequence[Places]) -> list[int]:
    """All pages of a pool, the padding page, and ids that should not be there at all."""
    return sorted(set(range(total + 1)).union(*places))


def _line(
    page: int, total: int, cells: tuple[tuple[str, ...], ...], marks: tuple[bool, ...]
) -> Line:
    free = all(cell[0] == FREE and set(cell[1:]) <= {NOTHING} for cell in cells)
    return Line(page, page, cells, marks, idle=free and 1 <= page <= total)


def _telling(lines: Sequence[Line]) -> list[Line]:
    """Without a padding page that is where it should be."""
    nothing = {PADDING, NOTHING}
    return [
        line
        for line in lines
        if line.first
        or any(line.marked)
        or any(not set(cells) <= nothing for cells in line.moments)
    ]


# Where the pages of each side are.


def _full_places(moment: Moment) -> Places:
    size = moment.geometry.page_size
    places = _places({page: _owner(it, size) for page, it in moment.owners.items()}, moment.full)
    for page in moment.left_by.keys() - moment.owners.keys():
        rows = ", ".join(it.words for it in moment.left_by[page])
        places[page] = f"{_place(places, page)}, left by {rows}"
    return places


def _owner(owner: Owner, size: int) -> str:
    part = "" if owner.tokens == size else f" ({owner.tokens}/{size})"
    return f"{owner.words}{part}"


def _swa_places(moment: Moment) -> Places:
    by = _mapped_by(moment.mapping, moment.geometry.page_size)
    return _places({page: f"mapped by full {ranges(by[page])}" for page in by}, moment.swa)


def _device_places(moment: Moment) -> Places:
    by = _mapped_by(moment.device_mapping, moment.geometry.device_page_size)
    held = {page: f"mapped by full {ranges(by[page])}" for page in by}
    for page, buffer in moment.buffers.items():
        held[page] = f"{held[page]} + buffer {buffer}" if page in held else f"buffer {buffer}"
    return _places(held, moment.device)


def _places(held: dict[int, str], side: Idle) -> Places:
    """``held`` and every other place where pages of a side are."""
    parts = {page: [words] for page, words in held.items()}
    for page in side.unclaimed - held.keys():
        parts.setdefault(page, []).append("in the answer")
    for page, times in side.free.items():
        if times:
            parts.setdefault(page, []).append(FREE if times == 1 else f"{FREE} {times} times")
    for page in side.pending:
        parts.setdefault(page, []).append("pending")
    return {page: " + ".join(words) for page, words in parts.items()}


def _place(places: Places, page: int) -> str:
    return places.get(page, LOST if page else PADDING)


def _misplaced(moment: Moment) -> frozenset[int]:
    """Device pages that are not in exactly one place, and the padding page in any."""
    by = _mapped_by(moment.device_mapping, moment.geometry.device_page_size)
    times = Counter(range(1, moment.geometry.device_pages + 1))
    times.subtract(moment.device.free)
    times.subtract(moment.device.pending)
    times.subtract(moment.buffers.keys())
    for page, fulls in by.items():
        times[page] -= sum(moment.device_detached.get(full) != page for full in fulls)
    return frozenset(page for page, left in times.items() if left) - moment.device.unclaimed


# What lies under a full page.


def _under(moment: Moment, page: int) -> list[str]:
    """The SWA and device pages of a full page, in words, where there are such sides."""
    geometry = moment.geometry
    words: list[str] = []
    if geometry.hybrid:
        words.append(_peers(_entries(moment.mapping, page, geometry.page_size), geometry.page_size))
    if geometry.sparse:
        size = geometry.device_page_size
        words.append(_peers(_entries(moment.device_mapping, page, size), size))
    return words


def _entries(mapping: list[int], page: int, size: int) -> list[int]:
    """The mapping's entries of a page, without the sentinel at its end."""
    inside = 0 <= page < (len(mapping) - 1) // size
    return mapping[page * size : (page + 1) * size] if inside else []


def _peers(entries: list[int], size: int) -> str:
    mapped = [entry for entry in entries if entry]
    part = f" ({len(mapped)}/{len(entries)})" if len(mapped) != len(entries) else ""
    return f"{ranges(entry // size for entry in mapped)}{part}" if mapped else NOTHING


def _mapped_by(mapping: list[int], size: int) -> dict[int, set[int]]:
    """For each page of a side, the full pages with an entry into it."""
    by: defaultdict[int, set[int]] = defaultdict(set)
    for slot, entry in enumerate(mapping[:-1]):
        if entry:
            by[entry // size].add(slot // size)
    return dict(by)

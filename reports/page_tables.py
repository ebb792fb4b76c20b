"""Page tables: who holds each full page and each SWA page, before and after one op.

One row a page, the two moments side by side; what did not change is a dot, what broke the law is
marked by a sign as well as by colour. Free pages that nothing happened to are drawn together; large
pools show only what is in use or concerned. Leaves out which op it was and which law.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from kvcore.models import Clause, Geometry
from kvcore.reports.layout import new_table
from kvcore.reports.playback import Moment, Owner
from kvcore.reports.wording import count, ranges

SIGN = "!"
SAME = "·"
NOTHING = "-"
WHOLE_POOL = 40
"""Pools of more pages than this show only pages in use or concerned."""
MOST_ROWS = 40
"""A table with more rows than this shows only what changed or is concerned."""

MAPPING_LAWS = frozenset(("L3", "L4"))
"""Laws whose full pages are concerned in what they map to, and not in who holds them."""
STATE_LAWS = frozenset(("L5", "L10"))
"""Laws whose full pages are concerned in both."""


@dataclass(frozen=True, slots=True)
class Concerned:
    """Pages that broke a law: in who holds them, or in what they map to."""

    held: frozenset[int] = frozenset()
    mapped: frozenset[int] = frozenset()
    swa: frozenset[int] = frozenset()


def concerned(clauses: Sequence[Clause]) -> Concerned:
    """The cells that ``clauses`` point at."""
    held = [c for c in clauses if c.law not in MAPPING_LAWS]
    mapped = [c for c in clauses if c.law in MAPPING_LAWS | STATE_LAWS]
    return Concerned(
        held=frozenset(page for clause in held for page in clause.full_pages),
        mapped=frozenset(page for clause in mapped for page in clause.full_pages),
        swa=frozenset(page for clause in clauses for page in clause.swa_pages),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One row to be: the cells of a page at each moment, which columns are marked, and whether it
    is a free page like any other."""

    first: int
    last: int
    moments: tuple[tuple[str, ...], ...]
    marked: tuple[bool, ...]
    idle: bool

    @property
    def changed(self) -> bool:
        """Whether the op changed anything here, or a law broke here."""
        return any(self.marked) or len(set(self.moments)) > 1

    def joins(self, other: Line) -> bool:
        """Whether this free page and the one before make one row."""
        plain = self.idle and other.idle and not self.changed and not other.changed
        return plain and self.first == other.last + 1

    @property
    def label(self) -> str:
        """The page, or the first and last of several."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def full_lines(moments: Sequence[Moment], broken: Concerned) -> list[Line]:
    """Every full page that says something: (holder, SWA page) at each moment."""
    geometry = moments[0].geometry
    lines: list[Line] = []
    for page in _pages(geometry.full_pages, [_full_ids(moment) for moment in moments]):
        cells = tuple(_full_cells(moment, page) for moment in moments)
        marked = (page in broken.held, page in broken.mapped and geometry.hybrid)
        inside = 1 <= page <= geometry.full_pages
        idle = inside and all(cell == ("free", NOTHING) for cell in cells)
        if page or cells != (("padding", NOTHING),) * len(cells) or any(marked):
            lines.append(Line(page, page, cells, marked, idle))
    return lines


def swa_lines(moments: Sequence[Moment], broken: Concerned) -> list[Line]:
    """Every SWA page that says something: (where it is,) at each moment."""
    geometry = moments[0].geometry
    owners = [_mapped_by(moment) for moment in moments]
    ids = [set(moment.swa_free) | set(by) for moment, by in zip(moments, owners, strict=True)]
    lines: list[Line] = []
    for page in _pages(geometry.swa_pages, ids):
        cells = tuple(
            (_swa_cell(moment, by[page], page),) for moment, by in zip(moments, owners, strict=True)
        )
        marked = (page in broken.swa,)
        inside = 1 <= page <= geometry.swa_pages
        idle = inside and all(cell == ("free",) for cell in cells)
        if page or cells != (("padding",),) * len(cells) or any(marked):
            lines.append(Line(page, page, cells, marked, idle))
    return lines


def _pages(total: int, extra: Sequence[set[int]]) -> list[int]:
    """All pages of a pool, the padding page, and ids that should not be there at all."""
    return sorted(set(range(total + 1)).union(*extra))


def _full_ids(moment: Moment) -> set[int]:
    return set(moment.full_free) | moment.unclaimed_full


def _full_cells(moment: Moment, page: int) -> tuple[str, str]:
    size = moment.geometry.page_size
    parts: list[str] = []
    if (owner := moment.owners.get(page)) is not None:
        parts.append(_owner_words(owner, size))
    if page in moment.unclaimed_full:
        parts.append("in the answer")
    parts += _waiting(moment.full_free, moment.full_pending, page)
    inside = 0 <= page <= moment.geometry.full_pages
    entries = moment.mapping[page * size : (page + 1) * size] if inside else []
    mapped = [entry for entry in entries if entry]
    peers = ranges(entry // size for entry in mapped)
    if mapped and len(mapped) != len(entries):
        peers = f"{peers} ({len(mapped)}/{len(entries)})"
    return " + ".join(parts) or _nowhere(page), peers or NOTHING


def _owner_words(owner: Owner, size: int) -> str:
    part = "" if owner.tokens == size else f" ({owner.tokens}/{size})"
    return f"seq {owner.sequence} page {owner.page}{part}"


def _waiting(free: Counter[int], pending: frozenset[int], page: int) -> list[str]:
    times = free[page]
    parts = ["free" if times == 1 else f"free {times} times"] if times else []
    return [*parts, "pending"] if page in pending else parts


def _nowhere(page: int) -> str:
    return "lost" if page else "padding"


def _mapped_by(moment: Moment) -> defaultdict[int, set[int]]:
    """For each SWA page, the full pages with an entry into it."""
    size = moment.geometry.page_size
    by: defaultdict[int, set[int]] = defaultdict(set)
    for slot, entry in enumerate(moment.mapping[:-1]):
        if entry:
            by[entry // size].add(slot // size)
    return by


def _swa_cell(moment: Moment, fulls: set[int], page: int) -> str:
    parts = [f"mapped by full {ranges(fulls)}"] if fulls else []
    if page in moment.unclaimed_swa and not fulls:
        parts.append("in the answer")
    parts += _waiting(moment.swa_free, moment.swa_pending, page)
    return " + ".join(parts) or _nowhere(page)


def choose(lines: list[Line], total: int) -> tuple[list[Line], str]:
    """The lines worth a row in a pool of ``total`` pages, and a word on those left out."""
    chosen = lines
    if total > WHOLE_POOL:
        chosen = [line for line in lines if line.changed or not line.idle]
    if len(chosen) > MOST_ROWS:
        chosen = [line for line in chosen if line.changed][:MOST_ROWS]
    left_out = len(lines) - len(chosen)
    return list(_joined(chosen)), f"{count(left_out, 'page')} not shown" if left_out else ""


def _joined(lines: list[Line]) -> Iterator[Line]:
    """Neighbouring free pages as one line."""
    held: Line | None = None
    for line in lines:
        if held is not None and line.joins(held):
            held = Line(held.first, line.last, held.moments, held.marked, idle=True)
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def page_tables(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> list[Table]:
    """The table of the full side and, if there is one, of the SWA side, at one moment or two."""
    broken = concerned(clauses)
    geometry = moments[0].geometry
    heads = ["before", "after"] if len(moments) == 2 else ["held by"]
    columns = [column for head in heads for column in ((head, "SWA page")[: 1 + geometry.hybrid])]
    lines, left_out = choose(full_lines(moments, broken), geometry.full_pages)
    tables = [_table("full page", columns, lines, left_out, geometry)]
    if geometry.hybrid:
        lines, left_out = choose(swa_lines(moments, broken), geometry.swa_pages)
        tables.append(_table("SWA page", heads, lines, left_out, geometry))
    return tables


def _table(
    page: str, columns: list[str], lines: list[Line], left_out: str, geometry: Geometry
) -> Table:
    table = new_table(caption=left_out)
    table.add_column(page, justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(line.label, *_row(line, len(columns) // len(line.moments)))
    return table


def _row(line: Line, width: int) -> Iterator[Text]:
    """The cells of one row; only the last moment's cells are marked."""
    for number, cells in enumerate(line.moments):
        last = number == len(line.moments) - 1
        for column in range(width):
            marked = last and line.marked[column]
            same = number > 0 and cells[column] == line.moments[number - 1][column]
            yield _cell(cells[column], marked=marked, same=same, idle=line.idle, changed=number > 0)


def _cell(text: str, *, marked: bool, same: bool, idle: bool, changed: bool) -> Text:
    if marked:
        return Text(f"{SIGN} {text}", style="bold red")
    if same:
        return Text(SAME, style="dim")
    if changed:
        return Text(text, style="bold yellow")
    return Text(text, style="dim" if idle or text == NOTHING else "")

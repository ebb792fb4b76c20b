"""Rows of the tables of a state: the cells of one thing at one moment, or before and after an op.

What did not change is a dot; what broke the law is marked by a sign as well as by colour. Idle
neighbours are drawn together; of many only what is in use or concerned is shown. Leaves out what
stands in the cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from kvcore.reports.layout import new_table
from kvcore.reports.moment import Moment
from kvcore.reports.wording import count

SIGN = "!"
SAME = "·"
NOTHING = "-"
WHOLE_POOL = 40
"""Pools of more pages than this show only pages in use or concerned."""
MOST_ROWS = 40
"""A table with more rows than this shows only what changed or is concerned."""


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


def choose(lines: list[Line], total: int, noun: str) -> tuple[list[Line], str]:
    """The lines worth a row in a pool of ``total`` pages (or whatever ``noun`` says), and a word on
    those left out."""
    chosen = lines
    if total > WHOLE_POOL:
        chosen = [line for line in lines if line.changed or not line.idle]
    if len(chosen) > MOST_ROWS:
        chosen = [line for line in chosen if line.changed][:MOST_ROWS]
    left_out = len(lines) - len(chosen)
    return list(_joined(chosen)), f"{count(left_out, noun)} not shown" if left_out else ""


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


def heads(moments: Sequence[Moment], alone: str = "held by") -> list[str]:
    """What stands above the first cell of each moment."""
    return ["before", "after"] if len(moments) == 2 else [alone]


def lines_table(thing: str, columns: Sequence[str], lines: list[Line], left_out: str) -> Table:
    """A table of lines, each one of a ``thing``."""
    table = new_table(caption=left_out)
    table.add_column(thing, justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(line.label, *row(line.moments, line.marked, idle=line.idle))
    return table


def row(
    moments: Sequence[Sequence[str]], marked: Sequence[bool], *, idle: bool = False
) -> Iterator[Text]:
    """The cells of one row, moment by moment; only the last moment's cells are marked."""
    for number, cells in enumerate(moments):
        last = number == len(moments) - 1
        for column, cell in enumerate(cells):
            same = number > 0 and cell == moments[number - 1][column]
            broke = last and marked[column]
            yield _cell(cell, marked=broke, same=same, idle=idle, changed=number > 0)


def _cell(text: str, *, marked: bool, same: bool, idle: bool, changed: bool) -> Text:
    if marked:
        return Text(f"{SIGN} {text}", style="bold red")
    if same:
        return Text(SAME, style="dim")
    if changed:
        return Text(text, style="bold yellow")
    return Text(text, style="dim" if idle or text == NOTHING else "")

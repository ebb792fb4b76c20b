"""The table of the request pool: whose each row is, and which slots it holds, before and after an
op.

Leaves out the pages of those slots (`kvcore.reports.page_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvcore.models import Clause
from kvcore.reports.lines import NOTHING, Line, choose, heads, lines_table
from kvcore.reports.moment import Moment
from kvcore.reports.wording import in_order

LAW = "rows"


def request_table(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> Table:
    """One row a row of the request pool. Clauses do not name rows by number: if the law on them
    broke, a row with other slots than its sequence's is marked, and if any did, a row that is not
    in exactly one place."""
    total = moments[0].geometry.requests
    lines, left_out = choose(_lines(moments, clauses, total), total, "row")
    columns = [column for head in heads(moments) for column in (head, "slots")]
    return lines_table("request row", columns, lines, left_out)


def _lines(moments: Sequence[Moment], clauses: Sequence[Clause], total: int) -> list[Line]:
    last = moments[-1]
    rows_broke = any(clause.law == LAW for clause in clauses)
    used = [moment.requests.free.keys() | moment.request_rows.keys() for moment in moments]
    lines: list[Line] = []
    for row in sorted(set(range(1, total + 1)).union(*used)):
        cells = tuple(_cells(moment, row) for moment in moments)
        held = last.request_rows.get(row)
        places = last.requests.free[row] + (held is not None)
        misplaced = places != (1 if 1 <= row <= total else 0) and row not in last.requests.unclaimed
        wrong = held is not None and held.slots != held.due
        marked = (bool(clauses) and misplaced, rows_broke and wrong)
        idle = all(cell == ("free", NOTHING) for cell in cells)
        lines.append(Line(row, row, cells, marked, idle))
    return lines


def _cells(moment: Moment, row: int) -> tuple[str, str]:
    held, times = moment.request_rows.get(row), moment.requests.free[row]
    noun = "request" if moment.geometry.serves else "seq"
    parts = [] if held is None else [f"{noun} {held.sequence}"]
    parts += ["in the answer"] if row in moment.requests.unclaimed else []
    parts += [] if times == 0 else ["free" if times == 1 else f"free {times} times"]
    return " + ".join(parts) or "lost", in_order(held.slots) if held and held.slots else NOTHING

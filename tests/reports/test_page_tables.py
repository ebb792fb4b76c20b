"""Page tables say where every page is, what changed, and what broke, with colour and without."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from kvcore.models import Clause, Geometry
from kvcore.reports.page_tables import MOST_ROWS, WHOLE_POOL, page_tables
from kvcore.reports.playback import Moment, Owner

SMALL = Geometry(page_size=2, full_pages=4, swa_pages=4)


def moment(geometry: Geometry = SMALL, rows: dict[int, tuple[int, int]] | None = None) -> Moment:
    """A right state: ``rows`` gives each lent full page its (sequence, SWA page); SWA page 0 is
    none."""
    rows = rows or {}
    size = geometry.page_size
    mapping = [0] * ((geometry.full_pages + 1) * size) + [-1]
    for full, (_, swa) in rows.items():
        for offset in range(size if swa else 0):
            mapping[full * size + offset] = swa * size + offset
    taken = {swa for _, swa in rows.values()}
    return Moment(
        geometry=geometry,
        full_free=Counter(page for page in range(1, geometry.full_pages + 1) if page not in rows),
        swa_free=Counter(page for page in range(1, geometry.swa_pages + 1) if page not in taken),
        mapping=mapping,
        owners={full: Owner(seq, 0, size) for full, (seq, _) in rows.items()},
        full_pending=frozenset(),
        swa_pending=frozenset(),
        group_open=False,
    )


def rows_of(moments: list[Moment], *clauses: Clause) -> list[dict[str, list[str]]]:
    """The tables as read back from their print: for each, the cells by page label."""
    tables: list[dict[str, list[str]]] = []
    for table in page_tables(moments, clauses):
        paper = io.StringIO()
        Console(file=paper, width=120).print(table)
        lines = [line.rstrip() for line in paper.getvalue().splitlines()[2:]]
        cells = [[cell for cell in line.strip().split("  ") if cell.strip()] for line in lines]
        tables.append({row[0]: [cell.strip() for cell in row[1:]] for row in cells})
    return tables


def test_a_page_has_a_holder_and_a_peer() -> None:
    full, swa = rows_of([moment(rows={2: (7, 3), 3: (8, 0)})])
    assert full["2"] == ["seq 7 page 0", "3"]
    assert full["3"] == ["seq 8 page 0", "-"]
    assert swa["3"] == ["mapped by full 2"]


def test_free_pages_side_by_side_are_one_row() -> None:
    full, swa = rows_of([moment(rows={2: (7, 3)})])
    assert full["1"] == full["3-4"] == ["free", "-"]
    assert swa["1-2"] == swa["4"] == ["free"]


def test_what_the_op_did_not_change_is_a_dot() -> None:
    full, swa = rows_of([moment(rows={2: (7, 3)}), moment(rows={2: (7, 0)})])
    assert full["2"] == ["seq 7 page 0", "3", "·", "-"]
    assert swa["3"] == ["mapped by full 2", "free"]
    assert full["1"] == ["free", "-", "·", "·"]


def test_a_page_partly_used_or_partly_mapped_says_how_far() -> None:
    state = moment(rows={2: (7, 3)})
    state.mapping[4] = 0
    state = replace(state, owners={2: Owner(7, 4, 1)})
    full, _ = rows_of([state])
    assert full["2"] == ["seq 7 page 4 (1/2)", "3 (1/2)"]


def test_a_page_in_two_places_names_both() -> None:
    state = moment(rows={2: (7, 3)})
    state = replace(
        state,
        full_free=state.full_free + Counter([2, 4]),
        swa_pending=frozenset((3,)),
        full_pending=frozenset((1,)),
    )
    full, swa = rows_of([state])
    assert full["2"] == ["seq 7 page 0 + free", "3"]
    assert full["4"] == ["free 2 times", "-"]
    assert full["1"] == ["free + pending", "-"]
    assert swa["3"] == ["mapped by full 2 + pending"]


def test_a_page_that_two_pages_map_to_names_both() -> None:
    _, swa = rows_of([moment(rows={1: (7, 3), 2: (8, 3)})])
    assert swa["3"] == ["mapped by full 1, 2"]


def test_a_page_in_no_place_is_lost() -> None:
    state = moment()
    state = replace(state, full_free=state.full_free - Counter([2]), swa_free=Counter([1, 2, 3]))
    full, swa = rows_of([state])
    assert full["2"] == ["lost", "-"]
    assert swa["4"] == ["lost"]


def test_pages_of_an_answer_that_was_rejected_are_not_lost() -> None:
    state = replace(
        moment(),
        full_free=Counter([2, 3, 4]),
        swa_free=Counter([2, 3, 4]),
        unclaimed_full=frozenset((1,)),
        unclaimed_swa=frozenset((1,)),
    )
    full, swa = rows_of([state])
    assert full["1"] == ["in the answer", "-"]
    assert swa["1"] == ["in the answer"]


def test_the_padding_page_is_shown_only_where_it_should_not_be() -> None:
    state = moment()
    assert all("0" not in table for table in rows_of([state]))
    full, swa = rows_of([replace(state, swa_free=state.swa_free + Counter([0]))])
    assert "0" not in full
    assert swa["0"] == ["free"]


def test_pages_beyond_the_pool_are_shown() -> None:
    state = moment()
    full, _ = rows_of([replace(state, full_free=state.full_free + Counter([5, 99]))])
    assert full["5"] == full["99"] == ["free", "-"]


@pytest.mark.parametrize(
    ("law", "cells"),
    [
        ("L1", ["seq 7 page 0", "3", "! seq 7 page 0", "·"]),
        ("stamps", ["seq 7 page 0", "3", "! seq 7 page 0", "·"]),
        ("L3", ["seq 7 page 0", "3", "·", "! 3"]),
        ("L4", ["seq 7 page 0", "3", "·", "! 3"]),
        ("L5", ["seq 7 page 0", "3", "! seq 7 page 0", "! 3"]),
        ("L10", ["seq 7 page 0", "3", "! seq 7 page 0", "! 3"]),
    ],
)
def test_the_cell_that_broke_the_law_is_marked(law: str, cells: list[str]) -> None:
    state = moment(rows={2: (7, 3)})
    full, swa = rows_of([state, state], Clause(law, "this", "that", (2,), (4,)))
    assert full["2"] == cells
    assert swa["4"] == ["free", "! free"]
    assert swa["3"] == ["mapped by full 2", "·"]


def test_marks_are_coloured_where_there_is_colour() -> None:
    paper = io.StringIO()
    console = Console(file=paper, width=80, force_terminal=True, color_system="standard")
    state = moment(rows={2: (7, 3)})
    for table in page_tables([state, state], [Clause("L1", "this", "that", (2,))]):
        console.print(table)
    assert "\x1b[1;31m! seq 7 page 0" in paper.getvalue()


def test_a_single_pool_has_one_table_and_no_swa_column() -> None:
    tables = page_tables([moment(Geometry(page_size=2, full_pages=4))])
    assert [[str(column.header) for column in table.columns] for table in tables] == [
        ["full page", "held by"]
    ]


def test_of_a_large_pool_only_what_is_in_use_or_concerned_is_shown() -> None:
    large = Geometry(page_size=2, full_pages=WHOLE_POOL + 1, swa_pages=WHOLE_POOL + 1)
    state = moment(large, rows={2: (7, 3)})
    full, swa = rows_of([state], Clause("L1", "this", "that", (9,), (8,)))
    assert full == {
        "2": ["seq 7 page 0", "3"],
        "9": ["! free", "-"],
        f"{WHOLE_POOL - 1} pages not shown": [],
    }
    assert swa.keys() == {"3", "8", f"{WHOLE_POOL - 1} pages not shown"}


def test_of_a_crowded_pool_only_what_changed_or_is_concerned_is_shown() -> None:
    crowd = 2 * MOST_ROWS
    large = Geometry(page_size=1, full_pages=crowd, swa_pages=crowd)
    before = {page: (page, page) for page in range(1, crowd + 1)}
    after = {**before, 5: (5, 0)}
    full, swa = rows_of([moment(large, rows=before), moment(large, rows=after)])
    assert full == {"5": ["seq 5 page 0", "5", "·", "-"], f"{crowd - 1} pages not shown": []}
    assert swa == {"5": ["mapped by full 5", "free"], f"{crowd - 1} pages not shown": []}


def test_a_page_table_never_runs_away() -> None:
    crowd = 3 * MOST_ROWS
    large = Geometry(page_size=1, full_pages=crowd, swa_pages=crowd)
    everything = Clause("L1", "this", "that", tuple(range(1, crowd + 1)))
    full, _ = rows_of([moment(large)], everything)
    assert len(full) == MOST_ROWS + 1

"""Page tables say where every page is, what changed, and what broke, with colour and without."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
from rich.console import Console

from kvcore.models import Clause, Geometry
from kvcore.reports.lines import MOST_ROWS, WHOLE_POOL
from kvcore.reports.moment import Idle, Moment, Owner
from kvcore.reports.page_tables import page_tables

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
    return Moment(
        geometry=geometry,
        full=free(geometry.full_pages, rows.keys()),
        swa=free(geometry.swa_pages, {swa for _, swa in rows.values()}),
        mapping=mapping,
        owners={full: Owner(seq, 0, size) for full, (seq, _) in rows.items()},
        group_open=False,
    )


def free(total: int, taken: AbstractSet[int] = frozenset()) -> Idle:
    """Every page of a side in its free list but those taken."""
    return Idle(Counter(page for page in range(1, total + 1) if page not in taken))


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
        full=Idle(state.full.free + Counter([2, 4]), pending=frozenset((1,))),
        swa=Idle(state.swa.free, pending=frozenset((3,))),
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
    state = replace(moment(), full=free(4, {2}), swa=free(4, {4}))
    full, swa = rows_of([state])
    assert full["2"] == ["lost", "-"]
    assert swa["4"] == ["lost"]


def test_pages_of_an_answer_that_was_rejected_are_not_lost() -> None:
    answered = Idle(Counter([2, 3, 4]), unclaimed=frozenset((1,)))
    state = replace(moment(), full=answered, swa=answered)
    full, swa = rows_of([state])
    assert full["1"] == ["in the answer", "-"]
    assert swa["1"] == ["in the answer"]


def test_the_padding_page_is_shown_only_where_it_should_not_be() -> None:
    state = moment()
    assert all("0" not in table for table in rows_of([state]))
    full, swa = rows_of([replace(state, swa=Idle(state.swa.free + Counter([0])))])
    assert "0" not in full
    assert swa["0"] == ["free"]


def test_pages_beyond_the_pool_are_shown() -> None:
    state = moment()
    full, _ = rows_of([replace(state, full=Idle(state.full.free + Counter([5, 99])))])
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


# A pool under a prefix cache.

SERVING = Geometry(page_size=2, full_pages=4, swa_pages=4, requests=2, window=3)


def test_a_page_is_a_requests_the_caches_or_a_loads() -> None:
    owners = {
        1: Owner(3, 2, 1, noun="request"),
        2: Owner(0, 1, 2, noun="tree"),
        3: Owner(1, 4, 2, noun="load"),
    }
    state = replace(moment(SERVING), owners=owners, full=free(4, owners.keys()))
    full, _ = rows_of([state])
    assert full["1"] == ["request 3 page 2 (1/2)", "-"]
    assert full["2"] == ["tree page 1", "-"]
    assert full["3"] == ["load 1 page 4", "-"]
    assert full["4"] == ["free", "-"]


@pytest.mark.parametrize("law", ["tree", "locks"])
def test_what_the_cache_says_of_a_page_is_not_who_holds_it(law: str) -> None:
    state = moment(SERVING, rows={2: (7, 3)})
    full, _ = rows_of([state, state], Clause(law, "this", "that", (2,)))
    assert full["2"] == ["seq 7 page 0", "3", "·", "·"]


# A pool in which every layer slides.


def test_a_page_that_the_window_left_says_whose_it_was() -> None:
    sliding = Geometry(page_size=2, full_pages=4, pure_swa=True)
    state = replace(
        moment(sliding, rows={2: (8, 0)}),
        left_by={1: [Owner(7, 0, 2)], 2: [Owner(7, 1, 2)], 3: [Owner(7, 2, 2), Owner(9, 0, 2)]},
        full=Idle(Counter([1, 4]), pending=frozenset((3,))),
    )
    [full] = rows_of([state])
    assert full["1"] == ["free, left by seq 7 page 0"]
    assert full["2"] == ["seq 8 page 0"]
    assert full["3"] == ["pending, left by seq 7 page 2, seq 9 page 0"]
    assert full["4"] == ["free"]


# Device pages.

HISPARSE = Geometry(page_size=2, full_pages=4, device_pages=4)
COMPRESSED = Geometry(page_size=4, full_pages=4, swa_pages=4, device_pages=4, compress=4)


def on_device(
    state: Moment, under: dict[int, int], buffers: dict[int, int] | None = None
) -> Moment:
    """The state with a device page under each full page named, and buffers by device page."""
    size = state.geometry.device_page_size
    mapping = [0] * ((state.geometry.full_pages + 1) * size) + [-1]
    for full, page in under.items():
        mapping[full * size : (full + 1) * size] = range(page * size, (page + 1) * size)
    buffers = buffers or {}
    owners = {
        full: replace(owner, device=under.get(full, 0)) for full, owner in state.owners.items()
    }
    taken = set(under.values()) | buffers.keys()
    return replace(
        state,
        owners=owners,
        device=free(state.geometry.device_pages, taken),
        device_mapping=mapping,
        buffers=buffers,
    )


def test_a_device_page_is_mapped_or_in_a_buffer_or_free() -> None:
    state = on_device(moment(HISPARSE, rows={1: (7, 0), 2: (7, 0)}), {1: 3}, {2: 9})
    full, device = rows_of([state])
    assert full["1"] == ["seq 7 page 0", "3"]
    assert full["2"] == ["seq 7 page 0", "-"]
    assert device == {"1": ["free"], "2": ["buffer 9"], "3": ["mapped by full 1"], "4": ["free"]}


def test_a_page_with_few_device_entries_says_how_many() -> None:
    state = on_device(moment(HISPARSE, rows={1: (7, 0)}), {1: 3})
    state.device_mapping[3] = 0
    full, _ = rows_of([state])
    assert full["1"] == ["seq 7 page 0", "3 (1/2)"]


def test_full_swa_and_device_pages_stand_in_one_row() -> None:
    state = on_device(moment(COMPRESSED, rows={2: (7, 3)}), {2: 4})
    full, swa, device = rows_of([state])
    assert full["2"] == ["seq 7 page 0", "3", "4"]
    assert full["3-4"] == ["free", "-", "-"]
    assert swa["3"] == device["4"] == ["mapped by full 2"]


def test_a_lost_device_page_is_marked_where_a_law_broke() -> None:
    before = on_device(moment(HISPARSE, rows={1: (7, 0), 2: (7, 0)}), {1: 1, 2: 2})
    after = on_device(moment(HISPARSE, rows={1: (7, 0), 2: (7, 0)}), {}, {1: 9})
    after = replace(after, device=free(4, {1, 2}))
    _, device = rows_of([before, after], Clause("L3", "device page 2 in one place", "nowhere"))
    assert device["1"] == ["mapped by full 1", "buffer 9"]
    assert device["2"] == ["mapped by full 2", "! lost"]
    _, device = rows_of([before, after])
    assert device["2"] == ["mapped by full 2", "lost"]


def test_a_device_page_in_two_places_is_marked() -> None:
    state = on_device(moment(HISPARSE, rows={1: (7, 0), 2: (7, 0)}), {1: 3, 2: 3}, {2: 9})
    state = replace(state, device=Idle(Counter([2, 4, 4]), pending=frozenset((1,))))
    _, device = rows_of([state], Clause("L3", "this", "that"))
    assert device == {
        "1": ["pending"],
        "2": ["! buffer 9 + free"],
        "3": ["! mapped by full 1, 2"],
        "4": ["! free 2 times"],
    }


def test_old_entries_of_a_device_page_in_the_open_group_are_right() -> None:
    state = on_device(moment(HISPARSE), {1: 3})
    state = replace(
        state,
        device=Idle(Counter([1, 2, 4]), pending=frozenset((3,))),
        device_detached={1: 3},
    )
    _, device = rows_of([state], Clause("L3", "this", "that"))
    assert device["3"] == ["mapped by full 1 + pending"]


def test_device_pages_of_a_rejected_answer_are_not_lost() -> None:
    state = on_device(moment(HISPARSE), {})
    state = replace(state, device=Idle(Counter([1, 2, 3]), unclaimed=frozenset((4,))))
    _, device = rows_of([state], Clause("layout", "this", "that"))
    assert device["4"] == ["in the answer"]


def test_a_wrong_device_entry_is_marked_and_not_the_peer_beside_it() -> None:
    state = on_device(moment(COMPRESSED, rows={2: (7, 3)}), {2: 4})
    wrong = replace(state, owners={2: Owner(7, 0, 4, device=1)})
    clause = Clause("L4", "logical page 2 mapped to device slots [1]", "[4]", (2,))
    full, *_ = rows_of([wrong, wrong], clause)
    assert full["2"] == ["seq 7 page 0", "3", "4", "·", "·", "! 4"]


def test_a_wrong_peer_is_marked_and_not_the_device_entry_beside_it() -> None:
    state = on_device(moment(COMPRESSED, rows={2: (7, 3)}), {2: 4})
    clause = Clause("L4", "lent full page 2 mapped to [4, 5, 6, 7]", "[12, 13]", (2,), (3,))
    full, *_ = rows_of([state, state], clause)
    assert full["2"] == ["seq 7 page 0", "3", "4", "·", "! 3", "·"]
    full, *_ = rows_of([state, state], Clause("L4", "lent full page 2 mapped", "[0]", (2,)))
    assert full["2"] == ["seq 7 page 0", "3", "4", "·", "! 3", "·"]


def test_the_only_mapping_that_there_is_is_the_one_that_broke() -> None:
    state = on_device(moment(HISPARSE, rows={2: (7, 0)}), {2: 4})
    full, _ = rows_of([state, state], Clause("L4", "this", "that", (2,)))
    assert full["2"] == ["seq 7 page 0", "4", "·", "! 4"]

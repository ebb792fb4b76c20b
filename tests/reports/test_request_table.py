"""The table of the request pool says whose each row is and which slots it holds."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

from rich.console import Console

from kvcore.models import Clause, Geometry
from kvcore.reports.lines import WHOLE_POOL
from kvcore.reports.moment import Idle, Moment, RequestRow
from kvcore.reports.request_table import request_table


def moment(rows: dict[int, RequestRow], requests: int = 4, idle: Idle | None = None) -> Moment:
    """A right state of the request pool, unless ``idle`` says otherwise."""
    free = Counter(row for row in range(1, requests + 1) if row not in rows)
    return Moment(
        geometry=Geometry(2, 8, requests=requests),
        full=Idle(),
        swa=Idle(),
        mapping=[],
        owners={},
        group_open=False,
        requests=idle or Idle(free),
        request_rows=rows,
    )


def request(sequence: int, *slots: int) -> RequestRow:
    return RequestRow(sequence, slots, slots)


def lines_of(moments: list[Moment], *clauses: Clause) -> list[str]:
    """The table as printed, without its head; blanks drawn together."""
    paper = io.StringIO()
    Console(file=paper, width=80).print(request_table(moments, clauses))
    return [" ".join(line.split()) for line in paper.getvalue().splitlines()[2:]]


def test_a_row_is_of_a_sequence_or_free() -> None:
    state = moment({2: request(7, 4, 5, 6, 7, 12)})
    assert lines_of([state]) == ["1 free -", "2 seq 7 4-7, 12", "3-4 free -"]


def test_under_a_prefix_cache_a_row_is_of_a_request() -> None:
    serving = Geometry(2, 8, 8, requests=1, window=3)
    state = replace(moment({1: request(7, 4)}, requests=1), geometry=serving)
    assert lines_of([state]) == ["1 request 7 4"]


def test_what_the_op_changed_stands_beside_what_was() -> None:
    before, after = moment({2: request(7, 4)}), moment({2: request(7, 4, 5), 3: request(8, 2)})
    assert lines_of([before, after]) == [
        "1 free - · ·",
        "2 seq 7 4 · 4, 5",
        "3 free - seq 8 2",
        "4 free - · ·",
    ]


def test_a_row_with_other_slots_than_its_sequences_is_marked() -> None:
    state = moment({2: RequestRow(7, (4, 9), (4, 5)), 3: request(8, 2)})
    lines = lines_of([state, state], Clause("rows", "row 2, sequence 7: slots [4, 5]", "[4, 9]"))
    assert lines[1:3] == ["2 seq 7 4, 9 · ! 4, 9", "3 seq 8 2 · ·"]
    other = lines_of([state, state], Clause("L1", "this", "that"))
    assert other[1] == "2 seq 7 4, 9 · ·"


def test_a_row_in_two_places_or_in_none_is_marked_where_a_law_broke() -> None:
    state = moment({2: request(7, 4)}, idle=Idle(Counter([2, 3, 3])))
    assert lines_of([state], Clause("L2", "this", "that")) == [
        "1 ! lost -",
        "2 ! seq 7 + free 4",
        "3 ! free 2 times -",
        "4 ! lost -",
    ]
    assert lines_of([state])[0] == "1 lost -"


def test_a_row_of_a_rejected_answer_is_not_lost() -> None:
    state = moment({}, idle=Idle(Counter([1, 2, 3]), unclaimed=frozenset((4,))))
    assert lines_of([state], Clause("L1", "this", "that"))[-1] == "4 in the answer -"


def test_the_padding_row_is_shown_where_it_should_not_be() -> None:
    state = moment({}, idle=Idle(Counter(range(5))))
    assert lines_of([state], Clause("L2", "this", "that"))[0] == "0 ! free -"


def test_of_a_large_pool_only_live_requests_are_shown() -> None:
    lines = lines_of([moment({9: request(7, 4)}, requests=WHOLE_POOL + 1)])
    assert lines == ["9 seq 7 4", f"{WHOLE_POOL} rows not shown"]

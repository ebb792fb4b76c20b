"""The tables of the prefix cache say what it holds of each prefix, and what its requests say."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from kvcore.models import Clause, Geometry
from kvcore.models.texts import token_ids
from kvcore.reports.cache_table import cache_tables, token_words
from kvcore.reports.lines import MOST_ROWS
from kvcore.reports.moment import Idle, Moment
from kvcore.targets.tree_view import NodeState, NodeView, RequestView, TreeView

SIZE = 2
GEOMETRY = Geometry(SIZE, 8, 8, requests=2, window=3)


def node(
    parent: int,
    start: int,
    text: tuple[tuple[int, int], ...],
    *pages: int,
    state: NodeState = "live",
    locks: tuple[int, int] = (0, 0),
) -> NodeView:
    """A node with the tokens of ``text`` from ``start`` on."""
    tokens = np.array(token_ids(text, start, start + len(pages) * SIZE), dtype=np.int64)
    return NodeView(parent, start, tokens, list(pages), True, state, *locks)


def moment(*nodes: NodeView, requests: dict[int, RequestView] | None = None) -> Moment:
    tree = TreeView(nodes, requests or {}, 0, 0, 0, 0, (0, 0))
    return Moment(
        geometry=GEOMETRY,
        full=Idle(),
        swa=Idle(),
        mapping=[],
        owners={},
        group_open=False,
        tree=tree,
    )


def lines_of(number: int, *moments: Moment, clauses: tuple[Clause, ...] = ()) -> list[str]:
    """A table as printed, without its head; blanks drawn together, but for those in front."""
    paper = io.StringIO()
    Console(file=paper, width=100).print(cache_tables(moments, clauses)[number])
    lines = [line.rstrip() for line in paper.getvalue().splitlines()[2:]]
    return [
        line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines if line
    ]


def test_without_a_cache_there_are_no_tables() -> None:
    assert cache_tables([replace(moment(), tree=None)]) == []


def test_longer_prefixes_stand_below_their_beginning() -> None:
    common, left, right = ((1, 4),), ((1, 4), (2, 2)), ((1, 4), (3, 4))
    state = moment(
        node(-1, 0, common, 5, 6, state="tombstone", locks=(2, 0)),
        node(0, 4, left, 7, locks=(1, 1)),
        node(0, 4, right, 1, 2),
        node(-1, 0, ((4, 2),), 3, state="loading", locks=(1, 1)),
    )
    assert lines_of(0, state) == [
        "0-3 1: 0-3 full 5, 6 tombstone 2/0",
        "  4-5 2: 0, 1 full 7 live 1/1",
        "  4-7 3: 0-3 full 1, 2 live 0/0",
        "0-1 4: 0, 1 full 3 loading 1/1",
    ]


def test_where_a_node_is_split_does_not_matter() -> None:
    text = ((1, 8),)
    whole = moment(node(-1, 0, text, 1, 2, 3, 4))
    split = moment(node(-1, 0, text, 1), node(0, 2, text, 2, 3, 4))
    assert lines_of(0, whole, split) == ["0-7 1: 0-7 full 1-4 live 0/0 ·"]


def test_what_the_op_changed_stands_beside_what_was() -> None:
    text = ((1, 6),)
    before = moment(node(-1, 0, text, 1, 2, 3))
    after = moment(node(-1, 0, text, 1), node(0, 2, text, 2, state="tombstone"))
    assert lines_of(0, before, after) == [
        "0-1 1: 0, 1 full 1 live 0/0 ·",
        "  2-3 1: 2, 3 full 2 live 0/0 full 2 tombstone 0/0",
        "    4-5 1: 4, 5 full 3 live 0/0 -",
    ]


def test_a_prefix_that_is_there_twice_shows_both() -> None:
    text = ((1, 4),)
    state = moment(node(-1, 0, text, 1, 2), node(-1, 0, text, 3, 4, state="tombstone"))
    assert lines_of(0, state) == ["0-3 1: 0-3 full 1, 2 live 0/0 + full 3, 4 tombstone 0/0"]


def test_what_broke_a_law_on_the_cache_is_marked() -> None:
    state = moment(node(-1, 0, ((1, 2),), 1), node(-1, 0, ((2, 2),), 2))
    wrong = Clause("locks", "this", "that", (2,))
    assert lines_of(0, state, state, clauses=(wrong,)) == [
        "0-1 1: 0, 1 full 1 live 0/0 ·",
        "0-1 2: 0, 1 full 2 live 0/0 ! full 2 live 0/0",
    ]
    elsewhere = Clause("L1", "this", "that", (2,))
    assert "!" not in "".join(lines_of(0, state, state, clauses=(elsewhere,)))


def test_what_is_missing_is_marked_where_it_was() -> None:
    before = moment(node(-1, 0, ((1, 2),), 1))
    lost = Clause("tree", "tokens [0, 2) cached in full page 1", "not in the cache", (1,))
    assert lines_of(0, before, moment(), clauses=(lost,)) == ["0-1 1: 0, 1 full 1 live 0/0 ! -"]


def test_a_node_of_part_of_a_page_is_shown_as_it_is() -> None:
    part = node(-1, 0, ((1, 4),), 1, 2)
    state = moment(replace(part, tokens=part.tokens[:3]), replace(part, tokens=part.tokens[:0]))
    assert lines_of(0, state)[0] == "0-2 1: 0-2 full 1, 2 live 0/0"


def test_an_empty_cache_says_so() -> None:
    assert lines_of(0, moment()) == ["- - -"]
    assert [line.strip() for line in lines_of(1, moment(), moment())] == ["- - -"]


def test_of_a_crowded_cache_only_what_changed_or_is_concerned_is_shown() -> None:
    many = [node(-1, 0, ((stream, 2),), stream) for stream in range(1, 2 * MOST_ROWS)]
    before, after = moment(*many), moment(*many[:-1])
    clause = Clause("locks", "this", "that", (7,))
    assert lines_of(0, before, after, clauses=(clause,)) == [
        "0-1 7: 0, 1 full 7 live 0/0 ! full 7 live 0/0",
        f"0-1 {len(many)}: 0, 1 full {len(many)} live 0/0 -",
        f"{len(many) - 2} prefixes not shown",
    ]


def test_requests_say_how_far_everything_reaches() -> None:
    before = {1: RequestView(5, 6, 4, 2, 4), 3: RequestView(1, 1, 0, 0, 0)}
    after = {1: RequestView(5, 6, 4, 2, 4), 2: RequestView(2, 2, 0, 0, 0)}
    lines = lines_of(1, moment(requests=before), moment(requests=after))
    assert [line.strip() for line in lines] == [
        "1 5/6 prefix 4 freed 2 lock 4 ·",
        "2 - 2/2 prefix 0 freed 0 lock 0",
        "3 1/1 prefix 0 freed 0 lock 0 -",
    ]


def test_tokens_are_told_by_stream_and_place() -> None:
    text = ((1, 5), (1, 1), (20, 3))
    assert token_words(np.array(token_ids(text, 2, 9))) == "1: 2-4, 1: 0, 20: 0-2"
    assert token_words(np.empty(0, dtype=np.int64)) == ""

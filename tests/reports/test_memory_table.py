"""The table of the memory saver says what lies under each tag, and what is not as it must be."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from kvcore.models import Clause, Geometry
from kvcore.reports.memory_table import memory_table
from kvcore.reports.moment import Idle, Memory, Moment

Snapshot = Callable[[str, str], None]

BROKEN = Clause("saver", "this", "that")

CACHE = Memory(False, 24_576, 24_576, 24_576, {}, buffers=4)
PAUSED = Memory(True, 24_576, 0, 0, {}, buffers=4)
WEIGHTS = Memory(False, 8_192, 8_192, 8_192, {1: (2, 2), 3: (4, 4)})
NOTHING = Memory(False, 0, 0, 0, {})


def moment(cache: Memory = CACHE, weights: Memory = WEIGHTS) -> Moment:
    return Moment(
        geometry=Geometry(2, 4, saver=True),
        full=Idle(),
        swa=Idle(),
        mapping=[],
        owners={},
        group_open=False,
        memory={"kv_cache": cache, "weights": weights},
    )


def facts_of(moments: list[Moment], *clauses: Clause) -> dict[str, str]:
    """The table as printed: what stands beside each fact, of the last tag that has it."""
    paper = io.StringIO()
    Console(file=paper, width=80).print(memory_table(moments, clauses))
    facts: dict[str, str] = {}
    for line in paper.getvalue().splitlines()[2:]:
        what, *cells = [cell.strip() for cell in line[10:].split("  ") if cell.strip()]
        facts[what] = " ".join(cells)
    return facts


def test_a_pause_that_empties_another_tag(
    console: Console, paper: io.StringIO, snapshot: Snapshot
) -> None:
    emptied = Memory(False, 8_192, 4_096, 8_192, {1: (2, 0), 3: (4, 4)})
    console.print(memory_table([moment(), moment(PAUSED, emptied)], [BROKEN]))
    snapshot("memory", paper.getvalue())


def test_a_state_alone_is_not_compared() -> None:
    facts = facts_of([moment(PAUSED, NOTHING)])
    assert facts == {
        "state": "paused",
        "bytes allocated": "24,576",
        "bytes resident": "0",
        "resident, says the saver": "0",
        "buffers of the pool": "4 where they were",
    }


def test_a_tag_under_which_nothing_lies_is_left_out() -> None:
    assert "region 1" in facts_of([moment(), moment(weights=NOTHING)])
    paper = io.StringIO()
    Console(file=paper, width=80).print(memory_table([moment(weights=NOTHING)]))
    assert "weights" not in paper.getvalue()


def test_what_the_saver_says_is_marked_where_it_is_not_so() -> None:
    miscounts = Memory(False, 24_576, 24_576, 8_192, {}, buffers=4)
    facts = facts_of([moment(miscounts, NOTHING)] * 2, BROKEN)
    assert facts["bytes resident"] == "24,576 ·"
    assert facts["resident, says the saver"] == "8,192 ! 8,192"


def test_memory_that_the_saver_keeps_for_later_is_not_marked() -> None:
    keeps = Memory(False, 24_576, 24_576, 28_672, {}, buffers=4)
    facts = facts_of([moment(keeps, NOTHING)] * 2, BROKEN)
    assert facts["resident, says the saver"] == "28,672 ·"
    paused = Memory(True, 24_576, 0, 4_096, {}, buffers=4)
    facts = facts_of([moment(paused, NOTHING)] * 2, BROKEN)
    assert facts["resident, says the saver"] == "4,096 ! 4,096"


def test_nothing_is_marked_where_another_law_broke() -> None:
    miscounts = Memory(False, 24_576, 24_576, 8_192, {}, buffers=4)
    facts = facts_of([moment(miscounts, NOTHING)] * 2, Clause("L1", "this", "that"))
    assert facts["resident, says the saver"] == "8,192 ·"


def test_bytes_that_a_pause_leaves_are_marked() -> None:
    kept = Memory(True, 24_576, 16_384, 0, {}, buffers=4)
    facts = facts_of([moment(CACHE, NOTHING), moment(kept, NOTHING)], BROKEN)
    assert facts["state"] == "not paused paused"
    assert facts["bytes resident"] == "24,576 ! 16,384"


def test_buffers_that_moved_are_counted() -> None:
    moved = Memory(False, 24_576, 24_576, 24_576, {}, buffers=4, moved=1)
    facts = facts_of([moment(CACHE, NOTHING), moment(moved, NOTHING)], BROKEN)
    assert facts["buffers of the pool"] == "4 where they were ! 1 of 4 moved"


def test_a_region_holds_its_value_or_is_paused_or_gone() -> None:
    paused = Memory(True, 4_096, 0, 0, {3: (0, None)})
    facts = facts_of([moment(weights=WEIGHTS), moment(weights=paused)], BROKEN)
    assert facts["region 1"] == "full of 2 -"
    assert facts["region 3"] == "full of 4 paused"

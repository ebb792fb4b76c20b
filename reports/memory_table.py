"""The table of the memory saver: what lies under each tag, in bytes, before and after an op.

Leaves out what the pool's rows hold: clauses on stamps say that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from kvcore.models import Clause
from kvcore.reports.layout import new_table
from kvcore.reports.lines import NOTHING, heads, row
from kvcore.reports.moment import Memory, Moment

LAW = "saver"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to say of a tag: its cell at each moment, and whether the last one is wrong."""

    what: str
    cells: tuple[str, ...]
    wrong: bool = False


def memory_table(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> Table:
    """One block a tag that has anything to say. Clauses name no cells: if the law on the saver
    broke, what is not as it must be is marked."""
    broke = any(clause.law == LAW for clause in clauses)
    table = new_table()
    table.add_column("memory", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for head in heads(moments, "now"):
        table.add_column(head, overflow="fold")
    for tag in moments[-1].memory:
        label = tag
        for fact in _facts([moment.memory[tag] for moment in moments]):
            cells = [(cell,) for cell in fact.cells]
            table.add_row(label, fact.what, *row(cells, (broke and fact.wrong,)))
            label = ""
    return table


def _facts(states: Sequence[Memory]) -> Iterator[Fact]:
    last = states[-1]
    if not any(state.allocated or state.paused or state.resident or state.said for state in states):
        return
    yield Fact("state", tuple("paused" if state.paused else "not paused" for state in states))
    yield Fact("bytes allocated", tuple(f"{state.allocated:,}" for state in states))
    wrong = last.resident != last.due
    yield Fact("bytes resident", tuple(f"{state.resident:,}" for state in states), wrong)
    said = tuple(f"{state.said:,}" for state in states)
    yield Fact("resident, says the saver", said, last.miscounted)
    if last.buffers:
        yield Fact("buffers of the pool", tuple(map(_buffers, states)), last.moved > 0)
    for name in sorted(set[int]().union(*(state.regions for state in states))):
        yield _region(name, states)


def _buffers(state: Memory) -> str:
    if state.moved:
        return f"{state.moved} of {state.buffers} moved"
    return f"{state.buffers} where they were"


def _region(name: int, states: Sequence[Memory]) -> Fact:
    """A piece that the program reserved: every byte of it has one value."""
    cells: list[str] = []
    for state in states:
        _, seen = state.regions.get(name, (None, None))
        there = name in state.regions
        cells.append(f"full of {seen}" if seen is not None else "paused" if there else NOTHING)
    due, seen = states[-1].regions.get(name, (None, None))
    return Fact(f"region {name}", tuple(cells), seen is not None and seen != due)

"""The page on a violation: the law in words, what broke, the program, the state around its last op,
where the trace is and how to play it again.

Reads well at 80 columns and without colour. Leaves out the playing (`kvcore.reports.playback`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvcore.invariants import BY_ID, DRAIN
from kvcore.models import Clause, Violation
from kvcore.reports.cache_table import cache_tables
from kvcore.reports.layout import heading, new_table
from kvcore.reports.lines import SAME, SIGN
from kvcore.reports.memory_table import memory_table
from kvcore.reports.moment import Moment
from kvcore.reports.page_tables import page_tables
from kvcore.reports.playback import Playback, died
from kvcore.reports.request_table import request_table
from kvcore.reports.wording import answer, arguments, count, pools, ranges
from kvcore.targets.faults import Fault

CACHE_WORDS = (
    "  prefixes: full pages, state of their SWA values, locks full/SWA",
    "  requests: tokens computed/with slots, in the cache, SWA freed and lock up to",
)
"""How to read the tables of a prefix cache."""
MOST_CLAUSES = 8
MOST_OPS = 40
"""Of a longer program only the last ops are shown."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the program is kept and how to play it again; ``note`` is a word on its past, as
    "shrunk from 37 ops in 41 executions"."""

    path: str
    command: str
    note: str = ""


def render_violation(
    console: Console, playback: Playback, violation: Violation, where: Whereabouts
) -> None:
    """Print everything that there is to know about ``violation``."""
    _render_law(console, playback.target, violation)
    console.print(heading(_program_title(playback)))
    if where.note:
        console.print(Text(f"  {where.note}", style="dim"))
    console.print(program_table(playback, violation))
    console.print(Group(*_states(playback, violation)))
    render_whereabouts(console, where)


def render_resemblance(console: Console, faults: Sequence[Fault]) -> None:
    """Print the known faults under which kvcore breaks the same law at the same op."""
    if not faults:
        return
    console.print(heading("Known faults that look the same"))
    for fault in faults:
        console.print(Text(f"  {fault.id} ({fault.source}): {fault.what}"))


def render_lost(console: Console, target: str, violation: Violation, where: Whereabouts) -> None:
    """Print a violation that did not come back when its program was played again."""
    _render_law(console, target, violation)
    text = "It did not break again when its program was played again: the target is not repeatable."
    console.print(heading(text))
    render_whereabouts(console, where)


def render_step(console: Console, playback: Playback) -> None:
    """Print the program up to one op and the state after it, or before it if the process died."""
    op = playback.program[playback.index]
    name = f"op {playback.index}, {op.kind}"
    console.print(heading(_program_title(playback)))
    console.print(program_table(playback, None))
    if playback.after is None:
        console.print(Group(*_last_state(playback, name)))
        return
    console.print(heading(f"State after {name}"))
    console.print(_groups([playback.after]))
    console.print(Group(*_tables([playback.after])))


def render_whereabouts(console: Console, where: Whereabouts) -> None:
    """Print the trace's path and the replay command, each on one line however long."""
    console.print()
    for name, text in (("Trace ", where.path), ("Replay", where.command)):
        line = Text.assemble((f"{name}  ", "bold"), text)
        console.print(line, soft_wrap=True)


def _render_law(console: Console, target: str, violation: Violation) -> None:
    console.print()
    console.rule(_title(target, violation), align="left", style="red")
    console.print(_law(violation))
    console.print(Group(*_clauses(violation.clauses)))


def _title(target: str, violation: Violation) -> Text:
    at = "the drain" if violation.op_kind == DRAIN else f"op {violation.op_index}"
    kind = "" if violation.op_kind == DRAIN else f", {violation.op_kind}"
    return Text(f"{violation.law} broke at {at}{kind}, on {target}", style="bold red")


def _law(violation: Violation) -> Text:
    law = BY_ID[violation.law]
    return Text.assemble(
        ("\nThe law", "bold"),
        f" {law.id}, {law.title}: {law.sentence} An example in public: {law.source}.",
    )


def _clauses(clauses: Sequence[Clause]) -> Iterator[RenderableType]:
    yield heading("What broke")
    for clause in clauses[:MOST_CLAUSES]:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold red", min_width=6)
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        grid.add_row(clause.law, "expected", Text(clause.expected))
        grid.add_row("", "seen", Text(clause.seen))
        if pages := _pages(clause):
            grid.add_row("", "pages", pages)
        yield Padding(grid, (0, 0, 0, 2), expand=False)
    if (more := len(clauses) - MOST_CLAUSES) > 0:
        yield Text(f"  and {count(more, 'clause')} more")


def _pages(clause: Clause) -> str:
    sides = (("full", clause.full_pages), ("SWA", clause.swa_pages))
    return "; ".join(f"{side} {ranges(pages)}" for side, pages in sides if pages)


def _program_title(playback: Playback) -> str:
    ops = count(len(playback.program), "op")
    return f"The program: {ops} on {pools(playback.geometry)}"


def program_table(playback: Playback, violation: Violation | None) -> Table:
    """The program as a numbered table with what each op was answered; the op that broke the law is
    marked."""
    rows = list(enumerate(zip(playback.program, playback.answers, strict=False)))
    shown = rows[-MOST_OPS:]
    table = new_table()
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("op", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("answer", overflow="fold")
    if len(shown) < len(rows):
        table.add_row("", "…", f"{count(len(rows) - len(shown), 'op')} before these", "")
    for index, (op, outcome) in shown:
        broke = violation is not None and violation.op_index == index
        table.add_row(
            f"{SIGN} {index}" if broke else str(index),
            op.kind,
            Text(arguments(op)),
            Text(answer(op, outcome, playback.geometry)),
            style="bold red" if broke else "",
        )
    return table


def _states(playback: Playback, violation: Violation) -> Iterator[RenderableType]:
    name = f"op {playback.index}, {violation.op_kind}"
    if playback.after is None:
        yield from _last_state(playback, name)
        return
    if violation.op_kind == DRAIN:
        name = "the drain: all given back, all lent once, all given back"
    yield heading(f"State before and after {name}")
    moments = [moment for moment in (playback.before, playback.after) if moment is not None]
    yield _groups(moments)
    yield from _tables(moments, violation.clauses)


def _last_state(playback: Playback, name: str) -> Iterator[RenderableType]:
    if playback.before is None:
        yield heading(f"There is no state to show before {name}: the target's queries raise")
        return
    violation = playback.violation
    has_died = violation is not None and died(violation)
    what = "in which the process died" if has_died else "after which the target's queries raise"
    yield heading(f"State before {name}, {what}")
    yield _groups([playback.before])
    yield from _tables([playback.before])


def _tables(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> Iterator[RenderableType]:
    tables = page_tables(moments, clauses)
    if moments[0].geometry.requests:
        tables.append(request_table(moments, clauses))
    tables += cache_tables(moments, clauses)
    if moments[0].memory:
        tables.append(memory_table(moments, clauses))
    for table in tables:
        yield Text()
        yield table


def _groups(moments: Sequence[Moment]) -> Text:
    words = ["open" if moment.group_open else "closed" for moment in moments]
    changes = ", then ".join(words) if len(set(words)) > 1 else words[0]
    lines = [f"  free group {changes}"]
    if len(moments) > 1:
        lines[0] += f"; {SIGN} broke the law, {SAME} did not change"
    if moments[0].geometry.sparse:
        lines.append("  full pages are the logical pages; device pages lie under them")
    if moments[0].tree is not None:
        lines += CACHE_WORDS
    return Text("\n".join(lines), style="dim")

"""The report of a campaign: one row a machine, checks by law, op-pair coverage, verdict.

Leaves out the findings themselves (`kvcore.reports.violation_page`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.invariants import LAWS, Tally
from kvcore.models import Geometry
from kvcore.reports.layout import new_table
from kvcore.reports.wording import count, ranges
from kvcore.strategies.campaign import Finding, Report, Row
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.sources import SourceName
from kvcore.targets.registry import variants

ALL_SOURCES: tuple[str, ...] = get_args(SourceName)

SOURCES = f"Sources: {', '.join(f'{source[0]} {source}' for source in ALL_SOURCES)}."
"""What the letters in the table of machines stand for."""


def render_report(console: Console, report: Report, target: str) -> None:
    """Print the tables and the verdict."""
    console.print()
    console.print(machines_table(report))
    console.print()
    console.print(laws_table(report.tally))
    console.print()
    console.print(Text(coverage(report.rows)))
    console.print(Text(geometries({g for row in report.rows for g in row.geometries})))
    if (builds := checked_and_not(target)) is not None:
        console.print(Text(builds))
    console.print()
    console.print(verdict(report, target))


def machines_table(report: Report) -> Table:
    """One row a machine, and the sum."""
    table = new_table(footer=len(report.rows) > 1, caption=SOURCES)
    total = report.tally
    every = {geometry for row in report.rows for geometry in row.geometries}
    table.add_column("machine", footer="all", overflow="fold")
    table.add_column("sources", overflow="fold")
    sums = [len(every), total.programs, total.steps, total.checks.total()]
    names = ["geometries", "programs", "steps", "checks"]
    for name, number in zip(names, sums, strict=True):
        table.add_column(name, footer=f"{number:,}", justify="right", no_wrap=True)
    found = sum(row.findings for row in report.rows)
    table.add_column("findings", footer=f"{found:,}", justify="right", no_wrap=True)
    for row in sorted(report.rows, key=_place):
        table.add_row(*_machine(row), style="red" if row.findings else "")
    return table


def _place(row: Row) -> tuple[int, str]:
    """Rows come as their first bursts ended; they stand in the order of the machines."""
    name = row.machine.partition(",")[0]
    known = list(MACHINES)
    return known.index(name) if name in known else len(known), row.machine


def _machine(row: Row) -> tuple[str, ...]:
    tally = row.tally
    numbers = [len(row.geometries), tally.programs, tally.steps, tally.checks.total(), row.findings]
    return (row.machine, _initials(row.sources), *(f"{number:,}" for number in numbers))


def _initials(ran: set[str]) -> str:
    """The sources that ran on a machine, each by its first letter; the caption says which."""
    return " ".join(source[0] if source in ran else "-" for source in ALL_SOURCES)


def laws_table(tally: Tally) -> Table:
    """How often each law was checked."""
    table = new_table()
    table.add_column("law", no_wrap=True)
    table.add_column("what it asks", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    table.add_column("checks", justify="right", no_wrap=True)
    for law in LAWS:
        table.add_row(law.id, law.title, law.cost.value, f"{tally.checks[law.id]:,}")
    return table


def coverage(rows: Sequence[Row]) -> str:
    """How many pairs of op kinds followed each other, of those that could: of the kinds that one
    machine has."""
    kinds = {kind for row in rows for kind in row.tally.ops}
    possible = {pair for row in rows for pair in product(row.tally.ops, repeat=2)}
    seen = {pair for row in rows for pair in row.tally.pairs}
    share = f" ({len(seen) / len(possible):.0%})" if possible else ""
    pairs = f"{len(seen):,} of {len(possible):,}{share}"
    return f"Op pairs seen in a row: {pairs}, of {count(len(kinds), 'kind')} of ops."


def geometries(every: set[Geometry]) -> str:
    """The spread of the geometries, in a sentence; families that no geometry has are not named."""
    if not every:
        return "No program ran."
    sizes = {geometry.page_size for geometry in every}
    hybrid = [geometry for geometry in every if geometry.hybrid]
    below = sum(geometry.swa_pages < geometry.full_pages for geometry in hybrid)
    equal = sum(geometry.swa_pages == geometry.full_pages for geometry in hybrid)
    above = len(hybrid) - below - equal
    sort = sum(geometry.need_sort for geometry in every)
    plural = "" if len(sizes) == 1 else "s"
    families = "".join(f"; {words} in {number}" for words, number in _families(every) if number)
    return (
        f"Geometries: page size{plural} {ranges(sizes)}; sorted reuse in {sort}, "
        f"unsorted in {len(every) - sort}; SWA pool smaller than the full pool in {below}, "
        f"equal in {equal}, larger in {above}, none in {len(every) - len(hybrid)}{families}."
    )


def _families(every: set[Geometry]) -> Iterator[tuple[str, int]]:
    """What some geometries have, and how many do."""
    yield "every layer sliding", sum(geometry.pure_swa for geometry in every)
    sparse = [geometry for geometry in every if geometry.sparse]
    yield "device pages under the full ones", sum(geometry.compress == 1 for geometry in sparse)
    yield "compressed device pages", sum(geometry.compress > 1 for geometry in sparse)
    yield "MLA", sum(geometry.attention == "mla" for geometry in every)
    yield "DSA", sum(geometry.attention == "dsa" for geometry in every)
    yield "a request pool", sum(geometry.requests > 0 for geometry in every)
    yield "a memory saver", sum(geometry.saver for geometry in every)
    yield "whole requests over a prefix cache", sum(geometry.serves for geometry in every)


def checked_and_not(target: str) -> str | None:
    """That both builds of our own took turns, if they did."""
    if f"{target}#unchecked" not in variants(target):
        return None
    return (
        "Builds in turn: one that checks values, one that does not (validate=False, as engines "
        "run it), one that does all by torch, as on a device, and the three in owned groups."
    )


def verdict(report: Report, target: str) -> Text:
    """Whether the target kept the laws."""
    tally = report.tally
    done = f"{count(tally.steps, 'step')} in {report.elapsed:.0f} s"
    if not report.findings:
        return Text(f"{target} is clean: no law broke in {done}.", style="bold green")
    signatures = ", ".join(signature(finding) for finding in report.findings)
    what = count(len(report.findings), "different finding")
    return Text(f"{target} broke the laws: {what} in {done}: {signatures}.", style="bold red")


def signature(finding: Finding) -> str:
    """Law and op kind, by which two findings are the same."""
    law, kind = finding.violation.signature
    return f"{law} at {kind}"

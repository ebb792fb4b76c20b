"""The report of a campaign: one row a machine, checks by law, op-pair coverage, verdict.

Leaves out the findings themselves (`kvcore.reports.violation_page`).
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.invariants import LAWS, Tally
from kvcore.models import Geometry
from kvcore.reports.layout import new_table
from kvcore.reports.wording import count, ranges
from kvcore.strategies.campaign import Finding, Report, Row


def render_report(console: Console, report: Report, target: str) -> None:
    """Print the tables and the verdict."""
    console.print()
    console.print(machines_table(report))
    console.print()
    console.print(laws_table(report.tally))
    console.print()
    console.print(Text(coverage(report.tally)))
    console.print(Text(geometries({g for row in report.rows for g in row.geometries})))
    console.print()
    console.print(verdict(report, target))


def machines_table(report: Report) -> Table:
    """One row a machine, and the sum."""
    table = new_table(footer=len(report.rows) > 1)
    total = report.tally
    every = {geometry for row in report.rows for geometry in row.geometries}
    table.add_column("machine", footer="all", overflow="fold")
    table.add_column("source", overflow="fold")
    sums = [len(every), total.programs, total.steps, total.checks.total()]
    names = ["geometries", "programs", "steps", "checks"]
    for name, number in zip(names, sums, strict=True):
        table.add_column(name, footer=f"{number:,}", justify="right", no_wrap=True)
    found = sum(row.findings for row in report.rows)
    table.add_column("findings", footer=f"{found:,}", justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_machine(row), style="red" if row.findings else "")
    return table


def _machine(row: Row) -> tuple[str, ...]:
    tally = row.tally
    numbers = [len(row.geometries), tally.programs, tally.steps, tally.checks.total(), row.findings]
    return (row.machine, row.source, *(f"{number:,}" for number in numbers))


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


def coverage(tally: Tally) -> str:
    """How many pairs of op kinds followed each other, of those that could."""
    kinds = len(tally.ops)
    possible = kinds * kinds
    share = f" ({len(tally.pairs) / possible:.0%})" if possible else ""
    pairs = f"{len(tally.pairs):,} of {possible:,}{share}"
    return f"Op pairs seen in a row: {pairs}, of {count(kinds, 'kind')} of ops."


def geometries(every: set[Geometry]) -> str:
    """The spread of the geometries, in a sentence."""
    if not every:
        return "No program ran."
    sizes = {geometry.page_size for geometry in every}
    hybrid = [geometry for geometry in every if geometry.hybrid]
    below = sum(geometry.swa_pages < geometry.full_pages for geometry in hybrid)
    equal = sum(geometry.swa_pages == geometry.full_pages for geometry in hybrid)
    above = len(hybrid) - below - equal
    sort = sum(geometry.need_sort for geometry in every)
    plural = "" if len(sizes) == 1 else "s"
    return (
        f"Geometries: page size{plural} {ranges(sizes)}; sorted reuse in {sort}, "
        f"unsorted in {len(every) - sort}; SWA pool smaller than the full pool in {below}, "
        f"equal in {equal}, larger in {above}, none in {len(every) - len(hybrid)}."
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

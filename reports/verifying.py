"""`kvcore verify`: options into a plan, the campaign, and what becomes of its findings.

Leaves out how the campaign runs (`kvcore.strategies.campaign`) and how things look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvcore.models.trace import Trace, new_header
from kvcore.reports import edge
from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import messages, output
from kvcore.reports.playback import BROKEN_WHEN_FRESH, is_broken_when_fresh, watch
from kvcore.reports.progress import showing
from kvcore.reports.trace_files import check_directory, replay_command, save_trace
from kvcore.reports.verify_page import render_report, signature
from kvcore.reports.violation_page import (
    Whereabouts,
    render_lost,
    render_resemblance,
    render_violation,
)
from kvcore.reports.wording import count
from kvcore.strategies.campaign import Finding, Plan, default_budget, run_campaign
from kvcore.strategies.isolation import run_program
from kvcore.strategies.profiles import PROFILES
from kvcore.strategies.resemblance import resembling_faults
from kvcore.strategies.shrink import NotReproduced, Shrunk, shrink
from kvcore.strategies.workers import available_cpus
from kvcore.targets.registry import may_crash, open_target

MOST_WORKERS = 256

MOST_PAGE_SIZE = 1024
"""Larger pages than any engine's make every step of a search slow, and show nothing more."""


def make_plan(
    target: str,
    profile: str,
    page_sizes: tuple[int, ...],
    seed: int,
    time_budget: str | None,
    workers: int | None,
) -> Plan:
    """A plan that can be run; raises `BadInput` or `UnknownTarget`."""
    open_target(target)
    if profile not in PROFILES:
        raise BadInput(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    usual = default_budget(target, profile)
    for size in page_sizes:
        edge.at_least(1, size, "--page-size")
        if size > MOST_PAGE_SIZE:
            raise BadInput(f"--page-size is {size}, expected at most {MOST_PAGE_SIZE}")
    return Plan(
        target=target,
        page_sizes=tuple(dict.fromkeys(page_sizes)),
        seed=edge.at_least(0, seed, "--seed"),
        time_budget=usual if time_budget is None else edge.parse_budget(time_budget),
        workers=_workers(workers),
        profile=profile,
    )


def _workers(wanted: int | None) -> int:
    number = edge.at_least(1, available_cpus() if wanted is None else wanted, "--workers")
    if number > MOST_WORKERS:
        raise BadInput(f"--workers is {number}, expected at most {MOST_WORKERS}")
    return number


def run(plan: Plan, traces: Path) -> Status:
    """Run the campaign, report it, and shrink, save and show each finding."""
    check_directory(traces)
    console = output()
    with showing(messages()) as show:
        report = run_campaign(plan, show)
    if report.tally.steps == 0:
        raise BadInput(f"a time budget of {plan.time_budget:g} s is too short for a single step")
    findings = distinct(report.findings)
    render_report(console, replace(report, findings=findings), plan.target)
    shown: set[tuple[str, str]] = set()
    for finding in findings:
        with messages().status(f"shrinking {signature(finding)}"):
            shrunk = _shrink(finding)
        # Two laws broken by one cause may shrink to one program.
        what = (shrunk.violation if shrunk else finding.violation).signature
        if what not in shown:
            shown.add(what)
            show_finding(console, finding, shrunk, traces)
    return Status.VIOLATION if findings else Status.CLEAN


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a cause, as far as can be told: of a law that is broken before the first op, as
    many as there are kinds of ops may be found, and the plainest says it all."""
    plain: dict[str, Finding] = {}
    others: list[Finding] = []
    for finding in findings:
        law = finding.violation.law
        if not is_broken_when_fresh(finding.target, finding.geometry, law):
            others.append(finding)
        elif law not in plain or _odd(finding) < _odd(plain[law]):
            plain[law] = finding
    return [*plain.values(), *others]


def _odd(finding: Finding) -> tuple[bool, int]:
    """How much a program has to it: a call that no caller makes, and its length."""
    return any(op.hostile for op in finding.program), len(finding.program)


def show_finding(console: Console, finding: Finding, shrunk: Shrunk | None, traces: Path) -> Path:
    """Save a finding's trace and print the page on it; where the trace is. One that did not come
    back when it was to be shrunk is saved as it was found."""
    kept = shrunk or Shrunk(finding.geometry, finding.program, finding.violation, 0)
    header = new_header(finding.target, kept.geometry, seed=finding.seed, found_by=finding.source)
    path = save_trace(Trace(header, kept.program, kept.violation), traces)
    note = (
        f"shrunk from {count(len(finding.program), 'op')} in {count(kept.executions, 'execution')}"
    )
    if is_broken_when_fresh(finding.target, kept.geometry, kept.violation.law):
        note += f"; {BROKEN_WHEN_FRESH}"
    where = Whereabouts(str(path), replay_command(path), note)
    if shrunk is None:
        render_lost(console, finding.target, finding.violation, where)
        return path
    verdict = run_program(finding.target, kept.geometry, kept.program)
    playback = watch(finding.target, kept.geometry, verdict, kept.violation.op_index)
    render_violation(console, playback, kept.violation, where)
    if may_crash(finding.target):
        alike = resembling_faults(kept.geometry, kept.program, kept.violation)
        render_resemblance(console, alike)
    return path


def _shrink(finding: Finding) -> Shrunk | None:
    try:
        return shrink(finding.target, finding.geometry, finding.program, finding.violation)
    except NotReproduced:
        return None

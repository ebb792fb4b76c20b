"""`kvcore replay` and `kvcore shrink`: what becomes of a trace.

Leaves out the reading of traces (`kvcore.reports.trace_files`) and how things look.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvcore.invariants import DRAIN, Verdict
from kvcore.models import Violation
from kvcore.models.trace import Trace, new_header
from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import messages, output
from kvcore.reports.playback import BROKEN_WHEN_FRESH, is_broken_when_fresh, watch
from kvcore.reports.trace_files import check_file, replay_command, write_trace
from kvcore.reports.violation_page import (
    Whereabouts,
    render_step,
    render_violation,
    render_whereabouts,
)
from kvcore.reports.wording import count
from kvcore.strategies.isolation import run_program
from kvcore.strategies.shrink import shrink
from kvcore.targets.registry import open_target


def replay(trace: Trace, path: Path, target: str | None, step: int | None) -> Status:
    """Play ``trace`` on its target or another, and show what breaks, or the state after a step."""
    name = trace.header.target if target is None else target
    verdict = _run(trace, name)
    console = output()
    if step is not None:
        return _show_step(console, trace, name, verdict, step)
    if verdict.violation is None:
        return _show_pass(console, trace, name, verdict)
    _tell_skipped(console, trace, verdict)
    geometry = trace.header.geometry
    notes = [_compared(trace, verdict)]
    if is_broken_when_fresh(name, geometry, verdict.violation.law):
        notes.append(BROKEN_WHEN_FRESH)
    note = "; ".join(filter(None, notes))
    where = Whereabouts(str(path), replay_command(path, target), note)
    playback = watch(name, geometry, verdict, verdict.violation.op_index)
    render_violation(console, playback, verdict.violation, where)
    return Status.VIOLATION


def _run(trace: Trace, target: str) -> Verdict:
    open_target(target)
    return run_program(target, trace.header.geometry, trace.ops)


def _show_step(console: Console, trace: Trace, target: str, verdict: Verdict, step: int) -> Status:
    last = len(verdict.program) - 1
    if step > last:
        broke = verdict.violation
        ended = f"op {last}" if broke is None else f"op {last}, where {broke.law} broke"
        raise BadInput(f"--step is {step}, but the program ended with {ended}")
    _tell_skipped(console, trace, verdict)
    render_step(console, watch(target, trace.header.geometry, verdict, step))
    return Status.CLEAN


def _show_pass(console: Console, trace: Trace, target: str, verdict: Verdict) -> Status:
    if trace.ops and verdict.tally.skipped == len(trace.ops):
        # Nothing ran: a mistyped trace must not look like a clean one.
        total = count(len(trace.ops), "op")
        raise BadInput(f"none of the {total} of the trace is allowed on {target} with its pools")
    _tell_skipped(console, trace, verdict)
    checks = count(verdict.tally.checks.total(), "check")
    ran = count(len(trace.ops) - verdict.tally.skipped, "op")
    text = f"{target} passes: {ran}, then everything given back; no law broke in {checks}."
    console.print(Text(text, style="bold green"))
    if trace.violation is not None:
        console.print(Text(f"The trace tells of {_place(trace.violation)}."))
    return Status.CLEAN


def _tell_skipped(console: Console, trace: Trace, verdict: Verdict) -> None:
    """Numbers of ops are those of the ops that ran; say so when they are not the trace's."""
    if skipped := verdict.tally.skipped:
        total = count(len(trace.ops), "op")
        verbs = ("is", "was") if skipped == 1 else ("are", "were")
        allowed = f"{verbs[0]} not allowed on this target and {verbs[1]} skipped."
        text = f"{skipped} of {total} in the trace {allowed}"
        console.print(Text(text, style="yellow"))


def _compared(trace: Trace, verdict: Verdict) -> str:
    """A word if something else broke than the trace tells of."""
    told, found = trace.violation, verdict.violation
    if told is None or found is None or told.signature == found.signature:
        return ""
    return f"the trace tells of {_place(told)}"


def _place(violation: Violation) -> str:
    where = "the drain" if violation.op_kind == DRAIN else f"op {violation.op_index}"
    kind = "" if violation.op_kind == DRAIN else f", {violation.op_kind}"
    return f"{violation.law} broken at {where}{kind}"


def shrink_to(trace: Trace, out: Path, target: str | None) -> Status:
    """Shrink the program of ``trace`` and write what is left to ``out``."""
    name = trace.header.target if target is None else target
    check_file(out)
    verdict = _run(trace, name)
    if verdict.violation is None:
        raise BadInput(f"there is nothing to shrink: no law breaks on {name}")
    geometry = trace.header.geometry
    with messages().status("shrinking"):
        shrunk = shrink(name, geometry, verdict.program, verdict.violation)
    header = new_header(
        name, shrunk.geometry, seed=trace.header.seed, found_by=trace.header.found_by
    )
    write_trace(Trace(header, shrunk.program, shrunk.violation), out)
    console = output()
    before, after = count(len(trace.ops), "op"), count(len(shrunk.program), "op")
    executions = count(shrunk.executions, "execution")
    text = f"{before} shrunk to {after} in {executions}: {_place(shrunk.violation)}, on {name}."
    console.print(Text(text, style="bold"))
    render_whereabouts(console, Whereabouts(str(out), replay_command(out)))
    return Status.CLEAN

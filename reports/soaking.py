"""`kvcore soak`: options into a plan, the soak, its report, and what becomes of a violation.

Leaves out how the soak runs (`kvcore.strategies.soak`) and how things look.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.text import Text

from kvcore.models import Geometry, Violation
from kvcore.models.trace import Trace, new_header
from kvcore.reports import edge
from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import messages, output
from kvcore.reports.soak_page import render_soak, showing
from kvcore.reports.trace_files import (
    check_directory,
    check_file,
    replay_command,
    save_trace,
    write_whole,
)
from kvcore.reports.verifying import show_finding
from kvcore.reports.violation_page import Whereabouts, render_whereabouts
from kvcore.reports.wording import count
from kvcore.strategies.campaign import Finding
from kvcore.strategies.scheduler import Arrivals, Policy, least_swa_pages
from kvcore.strategies.soak import Soaked, SoakPlan, soak
from kvcore.strategies.soak_cut import Cut, cut, shrink_within
from kvcore.strategies.soak_report import encode_report
from kvcore.strategies.workload import WorkloadError, read_workload
from kvcore.targets.registry import open_target

DEFAULT_GEOMETRY = Geometry(
    page_size=128,
    full_pages=8192,
    swa_pages=3072,
    requests=128,
    window=4096,
    context=131072,
)
"""A million tokens, which an hour of conversations fills: pools that run dry now and then."""

SOURCE = "soak"
"""What traces say they were found by."""

ARRIVALS: dict[str, Arrivals] = {"asap": "asap", "timestamps": "timestamps"}
"""What ``--arrivals`` may be."""

RESIZABLE = ("page_size", "full_pages", "swa_pages", "requests", "window", "context")
"""What ``--geometry`` may set."""

CUT_SECONDS = 180.0
SHRINK_SECONDS = 180.0
"""How long a failing program is cut, and then shrunk: it may have tens of thousands of ops."""


def parse_geometry(text: str | None) -> Geometry:
    """The default pools with changes such as "full_pages=4096,window=512"; raises `BadInput`."""
    changes: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in RESIZABLE or not equals:
            known = ", ".join(RESIZABLE)
            raise BadInput(f"--geometry has {part!r}, expected NAME=N with one of {known}")
        if name in changes:
            raise BadInput(f"--geometry has {name} twice, expected it once")
        try:
            changes[name] = int(value)
        except ValueError:
            raise BadInput(f"--geometry has {name}={value}, expected a number") from None
    try:
        geometry = msgspec.structs.replace(DEFAULT_GEOMETRY, **changes)
    except ValueError as error:
        raise BadInput(f"--geometry: {error}") from None
    if not geometry.serves or geometry.requests < 1:
        raise BadInput("--geometry needs requests and a window of at least 1")
    if geometry.swa_pages < (least := least_swa_pages(geometry)):
        raise BadInput(
            f"--geometry: swa_pages is {geometry.swa_pages}, expected at least {least} for a "
            f"window of {geometry.window} in pages of {geometry.page_size}"
        )
    return geometry


def parse_arrivals(text: str) -> Arrivals:
    """The way in which requests arrive; raises `BadInput`."""
    if text not in ARRIVALS:
        raise BadInput(f"--arrivals is {text!r}, expected {' or '.join(ARRIVALS)}")
    return ARRIVALS[text]


def make_plan(
    workload: Path,
    target: str,
    requests: int | None,
    geometry: str | None,
    every: int,
    policy: Policy,
) -> SoakPlan:
    """A plan that can be run; raises `BadInput` or `UnknownTarget`."""
    pools = parse_geometry(geometry)
    edge.at_least(1, every, "--check-every")
    edge.at_least(0, policy.seed, "--seed")
    edge.at_least(1, policy.chunk_tokens, "--chunk")
    try:
        arrivals = read_workload(workload)
    except WorkloadError as error:
        raise BadInput(str(error)) from None
    if requests is not None:
        arrivals = arrivals[: edge.at_least(0, requests, "--requests")]
    open_target(target)
    return SoakPlan(target, workload.name, pools, tuple(arrivals), policy, every)


def run(plan: SoakPlan, json: Path | None, traces: Path) -> Status:
    """Run the soak, report it, and cut, save and show a violation."""
    check_directory(traces)
    if json is not None:
        check_file(json)
    console = output()
    with interruptible() as interrupted, showing(messages()) as show:
        soaked = soak(plan, show, interrupted)
    render_soak(console, soaked)
    if json is not None:
        write_whole(encode_report(soaked.report), json)
    report = soaked.report
    if report.violation is not None:
        _show_violation(plan, soaked, report.violation, traces)
        return Status.VIOLATION
    if report.requests and len(report.not_served) == report.requests:
        # Nothing was tried: pools that are too small must not look like an allocator that is right.
        raise BadInput(f"none of the {count(report.requests, 'request')} fits these pools")
    return Status.INTERRUPTED if report.ending == "interrupted" else Status.CLEAN


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Answers whether the user wants to stop. The first Ctrl-C is a wish that is granted between
    two ops; the second interrupts as usual."""
    wished = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal wished
        wished = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: wished
    finally:
        signal.signal(signal.SIGINT, before)


def _show_violation(plan: SoakPlan, soaked: Soaked, violation: Violation, traces: Path) -> None:
    """Print the page on a violation, of a program as short as it gets in a few minutes, and save
    its trace; that of the whole program where no part of it breaks the law again."""
    console = output()
    whole = count(len(soaked.program), "op")
    found = Cut(plan.geometry, soaked.program, violation, len(soaked.program))
    # First as it is: cutting may take minutes, and nothing is lost if somebody ends it.
    uncut = _save(plan, found, traces)
    text = f"All {whole} are in {uncut}; cutting and shrinking takes up to "
    text += f"{(CUT_SECONDS + SHRINK_SECONDS) / 60:.0f} minutes."
    messages().print(Text(text))
    try:
        with messages().status(f"cutting {whole}"):
            shorter = cut(plan.target, plan.geometry, soaked.program, violation, CUT_SECONDS)
        if shorter is None:
            _show_whole(console, violation, uncut, whole)
            return
        found = shorter
        part = "All" if found.window == len(soaked.program) else f"The last {found.window:,}"
        left = f"{count(len(found.program), 'op')} on smaller pools"
        console.print(Text(f"{part} of its {whole} break it again, cut to {left}."))
        with messages().status(f"shrinking {count(len(found.program), 'op')}"):
            shrunk = shrink_within(plan.target, found, SHRINK_SECONDS)
    except KeyboardInterrupt:
        _save(plan, found, traces)
        raise
    finding = Finding(
        target=plan.target,
        source=SOURCE,
        geometry=found.geometry,
        program=found.program,
        violation=found.violation,
        seed=plan.policy.seed,
    )
    if show_finding(console, finding, shrunk, traces) != uncut:
        uncut.unlink()


def _save(plan: SoakPlan, found: Cut, traces: Path) -> Path:
    header = new_header(plan.target, found.geometry, seed=plan.policy.seed, found_by=SOURCE)
    return save_trace(Trace(header, found.program, found.violation), traces)


def _show_whole(console: Console, violation: Violation, path: Path, whole: str) -> None:
    clause = violation.clauses[0]
    text = f"\n{clause.law}: expected {clause.expected}; saw {clause.seen}\n"
    text += f"No end of its {whole} broke it again within {CUT_SECONDS:.0f} s."
    console.print(Text(text))
    render_whereabouts(console, Whereabouts(str(path), replay_command(path)))

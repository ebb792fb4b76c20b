"""The page on a violation says everything that one needs to know, at 80 columns, without colour."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from kvcore.invariants import BY_ID, DRAIN, Tally, Verdict
from kvcore.models import Clause, Geometry, Violation, ops, request_ops
from kvcore.models.ops import Op
from kvcore.models.trace import Trace
from kvcore.reports.playback import watch
from kvcore.reports.violation_page import (
    MOST_CLAUSES,
    MOST_OPS,
    Whereabouts,
    render_lost,
    render_step,
    render_violation,
)
from kvcore.strategies.replay import replay
from kvcore.targets.registry import open_target

Snapshot = Callable[[str, str], None]

WHERE = Whereabouts("traces/it.jsonl", "kvcore replay traces/it.jsonl", "shrunk from 41 ops")


# Of each family of pools a program that shows a known fault of it.
FAMILIES: dict[str, tuple[str, Geometry, tuple[Op, ...]]] = {
    "sliding": (
        "fault:pure-group-frees-twice",
        Geometry(1, 4, pure_swa=True),
        (
            ops.Alloc(1, 3),
            ops.FreeSwa(1, 0, 1),
            ops.GroupBegin(),
            ops.FreeSwa(1, 1, 2),
            ops.Free(1, 1, 2),
            ops.GroupEnd(),
        ),
    ),
    "device": (
        "fault:device-buffer-lost",
        Geometry(2, 4, device_pages=4),
        (ops.Alloc(1, 2), ops.DeviceBuffer(1, 1, 1)),
    ),
    "index_k": (
        "fault:backup-misses-index-k",
        Geometry(2, 2, 2, attention="dsa"),
        (ops.Alloc(1, 1), ops.Retract(1, 1), ops.Alloc(2, 1), ops.Restore(1, 3)),
    ),
    "cache": (
        "fault:lock-not-paired",
        Geometry(4, 3, 3, requests=1, window=1),
        (
            request_ops.Admit(1, ((1, 8), (2, 1)), output=3),
            request_ops.CacheUnfinished(1),
            request_ops.SavePrefix(1, ((1, 4),)),
            request_ops.Evict(0, 1),
            request_ops.LoadPrefix(1, 1),
        ),
    ),
}

# Of the others a right state that shows what there is to see.
STATES: dict[str, tuple[Geometry, tuple[Op, ...]]] = {
    "compressed": (
        Geometry(4, 4, 4, device_pages=4, compress=4),
        (ops.Extend(((1, 9),)), ops.GroupBegin(), ops.FreeDevice(1, 0, 1)),
    ),
    "requests": (
        Geometry(2, 4, 3, attention="mla", requests=3),
        (ops.Extend(((1, 3), (2, 2))), ops.Retract(1, 1), ops.Restore(1, 3)),
    ),
    "cache": (
        Geometry(2, 10, 8, requests=3, window=3),
        (
            request_ops.Admit(1, ((1, 8), (2, 1)), output=3),
            request_ops.Slide((1,)),
            request_ops.Finish(1),
            request_ops.Admit(2, ((1, 8), (4, 2)), output=5),
            request_ops.SavePrefix(1, ((1, 8),)),
            request_ops.Speculate(2, 2),
            request_ops.Trim(2, 1),
            request_ops.CacheUnfinished(2),
            request_ops.Evict(0, 16),
        ),
    ),
}


def render(console: Console, trace: Trace) -> None:
    render_found(console, trace.header.target, trace.header.geometry, trace.ops)


def render_found(
    console: Console, target: str, geometry: Geometry, program: tuple[Op, ...]
) -> None:
    """The page on what breaks when ``program`` is played on ``target``."""
    verdict = replay(open_target(target), geometry, program)
    assert verdict.violation is not None
    playback = watch(target, geometry, verdict, verdict.violation.op_index)
    render_violation(console, playback, verdict.violation, WHERE)


def test_the_page_on_the_known_leak(
    console: Console, paper: io.StringIO, leak: Trace, snapshot: Snapshot
) -> None:
    render(console, leak)
    snapshot("violation", paper.getvalue())


def test_the_page_says_law_clauses_program_trace_and_command(
    console: Console, paper: io.StringIO, leak: Trace
) -> None:
    render(console, leak)
    words = " ".join(paper.getvalue().split())
    assert leak.violation is not None
    law = BY_ID[leak.violation.law]
    clauses = [text for clause in leak.violation.clauses for text in (clause.expected, clause.seen)]
    kinds = [f"{at} {op.kind}" for at, op in enumerate(leak.ops)]
    for part in (law.title, law.sentence, law.source, *clauses, *kinds, WHERE.path, WHERE.command):
        assert part in words


def test_no_line_is_wider_than_the_console(paper: io.StringIO, leak: Trace) -> None:
    for width in (60, 80, 120):
        render(Console(file=paper, width=width, highlight=False), leak)
        assert max(len(line) for line in paper.getvalue().splitlines()) <= width
        paper.seek(0)
        paper.truncate()


def test_paths_and_commands_stay_on_one_line_however_long(
    console: Console, paper: io.StringIO, leak: Trace
) -> None:
    path = "deep/" * 40 + "trace.jsonl"
    assert leak.violation is not None
    where = Whereabouts(path, f"kvcore replay {path}")
    render_lost(console, leak.header.target, leak.violation, where)
    lines = paper.getvalue().splitlines()
    assert f"Trace   {path}" in lines
    assert f"Replay  kvcore replay {path}" in lines


def test_a_finding_that_does_not_come_back_says_so(
    console: Console, paper: io.StringIO, leak: Trace
) -> None:
    assert leak.violation is not None
    render_lost(console, leak.header.target, leak.violation, WHERE)
    assert "It did not break again" in paper.getvalue()


def test_of_a_program_that_killed_its_process_the_state_before_is_shown(
    console: Console, paper: io.StringIO
) -> None:
    program: tuple[Op, ...] = (ops.Alloc(1, 1), ops.Decode((1,)))
    clause = Clause("bounds", "the process lives on", "the process died: signal 11 (SIGSEGV)")
    violation = Violation("bounds", 1, "decode", (clause,))
    geometry = Geometry(page_size=1, full_pages=4, swa_pages=4)
    playback = watch("kvcore", geometry, Verdict(program, violation, Tally()), 1)
    render_violation(console, playback, violation, WHERE)
    text = paper.getvalue()
    assert "State before op 1, decode, in which the process died" in text
    assert "did not return" in text
    assert playback.after is None


def test_a_single_op_that_killed_its_process_is_shown_too(
    console: Console, paper: io.StringIO
) -> None:
    clause = Clause("bounds", "the process lives on", "the process died: signal 11 (SIGSEGV)")
    violation = Violation("bounds", 0, "alloc", (clause,))
    geometry = Geometry(page_size=1, full_pages=4)
    verdict = Verdict((ops.Alloc(1, 1),), violation, Tally())
    render_violation(console, watch("kvcore", geometry, verdict, 0), violation, WHERE)
    assert "in which the process died" in paper.getvalue()


def test_what_breaks_in_the_drain_is_shown_around_it(
    console: Console, paper: io.StringIO, leak: Trace
) -> None:
    # A drain that breaks, as a release that loses a page only when all is lent would show it.
    program: tuple[Op, ...] = (ops.Alloc(1, 1), ops.Free(1))
    violation = Violation("L10", 2, DRAIN, (Clause("L10", "all free", "one missing", (2,)),))
    verdict = Verdict(program, violation, Tally())
    playback = watch("kvcore", leak.header.geometry, verdict, 2)
    render_violation(console, playback, violation, WHERE)
    text = paper.getvalue()
    assert "L10 broke at the drain, on kvcore" in text
    assert "State before and after the drain" in text


def test_a_rejected_answer_is_shown_with_its_pages(leak: Trace) -> None:
    target = "fault:kernel-before-check"
    geometry = Geometry(page_size=4, full_pages=1, swa_pages=1)
    program: tuple[Op, ...] = (ops.Extend(((1, 5),)),)
    verdict = replay(open_target(target), geometry, program)
    assert verdict.violation is not None
    assert verdict.violation.law in ("bounds", "L5", "L7")
    playback = watch(target, geometry, verdict, 0)
    assert playback.after is not None


@pytest.mark.parametrize("more", [0, 1, 5])
def test_of_many_clauses_and_ops_the_rest_is_counted(
    more: int, console: Console, paper: io.StringIO
) -> None:
    clauses = tuple(
        Clause("L7", f"promise {number}", "nothing") for number in range(MOST_CLAUSES + more)
    )
    program: tuple[Op, ...] = tuple(ops.Alloc(n, 1) for n in range(1, MOST_OPS + more + 1))
    geometry = Geometry(page_size=1, full_pages=100)
    violation = Violation("L7", len(program) - 1, "alloc", clauses)
    verdict = Verdict(program, violation, Tally())
    playback = watch("kvcore", geometry, verdict, len(program) - 1)
    render_violation(console, playback, violation, WHERE)
    text = paper.getvalue()
    plural = "" if more == 1 else "s"
    assert (f"and {more} clause{plural} more" in text) == (more > 0)
    assert (f"{more} op{plural} before these" in text) == (more > 0)


def test_a_step_shows_the_program_so_far_and_the_state_after_it(
    console: Console, paper: io.StringIO, leak: Trace, snapshot: Snapshot
) -> None:
    target, geometry = leak.header.target, leak.header.geometry
    verdict = replay(open_target(target), geometry, leak.ops)
    render_step(console, watch(target, geometry, verdict, 3))
    snapshot("step", paper.getvalue())


# The families of pools.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_on_a_fault_of_each_family(
    family: str, console: Console, paper: io.StringIO, snapshot: Snapshot
) -> None:
    render_found(console, *FAMILIES[family])
    snapshot(f"violation_{family}", paper.getvalue())


@pytest.mark.parametrize("family", STATES)
def test_the_state_of_each_family(
    family: str, console: Console, paper: io.StringIO, snapshot: Snapshot
) -> None:
    geometry, program = STATES[family]
    verdict = Verdict(program, None, Tally())
    render_step(console, watch("kvcore", geometry, verdict, len(program) - 1))
    snapshot(f"step_{family}", paper.getvalue())


@pytest.mark.parametrize(
    ("fault", "geometry", "program"),
    [
        (
            "index-k-outside-saver",
            Geometry(2, 2, 2, attention="dsa", saver=True),
            (ops.Pause("kv_cache"),),
        ),
        (
            "swa-pool-outside-saver",
            Geometry(2, 2, 2, saver=True),
            (ops.Pause("kv_cache"),),
        ),
        (
            "pause-frees-other-tag",
            Geometry(2, 2, saver=True),
            (ops.Reserve(1, "kv_cache", 1), ops.Drop(1), ops.Reserve(2, "weights", 1)),
        ),
    ],
)
def test_the_page_on_a_memory_saver_marks_the_bytes_that_are_wrong(
    fault: str,
    geometry: Geometry,
    program: tuple[Op, ...],
    console: Console,
    paper: io.StringIO,
) -> None:
    # How many bytes depends on the machine's page size, and where a faulty pool's memory lies.
    render_found(console, f"fault:{fault}", geometry, program)
    table = paper.getvalue().partition("memory    what")[2]
    marked = [line for line in table.splitlines() if "! " in line]
    assert marked
    assert all("resident" in line for line in marked)


def test_on_sparse_pools_full_pages_are_explained(console: Console, paper: io.StringIO) -> None:
    render_found(console, *FAMILIES["device"])
    assert "full pages are the logical pages" in paper.getvalue()

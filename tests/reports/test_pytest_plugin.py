"""The pytest plugin: whatever way a broken law comes up in a test, its trace is kept."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.invariants import LawBroken
from kvcore.models.trace import Trace
from kvcore.reports.pytest_plugin import broken_laws
from kvcore.reports.trace_files import read_trace

pytest_plugins = ("pytester",)

PRELUDE = """
import pytest
from kvcore.invariants import LawBroken, Run
from kvcore.models import Geometry, ops
from kvcore.targets.registry import open_target

GEOMETRY = Geometry(page_size=1, full_pages=4, swa_pages=4)
PROGRAM = (
    ops.Alloc(9, 1), ops.Free(9), ops.Alloc(1, 1), ops.Alloc(2, 1), ops.GroupBegin(),
    ops.FreeSwa(1), ops.Recover(1, 2, locked=True), ops.GroupEnd(),
)

def break_law(target="fault:deferred-peer-lookup"):
    run = Run(open_target(target)(GEOMETRY))
    for op in PROGRAM:
        run.step(op)

def broken():
    with pytest.raises(LawBroken) as caught:
        break_law()
    return caught.value
"""

WAYS_TO_FAIL = {
    "plainly": "def test_it(): break_law()",
    "in a fixture": """
@pytest.fixture
def law():
    break_law()

def test_it(law): pass
""",
    "in a teardown": """
@pytest.fixture
def law():
    yield
    break_law()

def test_it(law): pass
""",
    "in a group": """
def test_it():
    raise ExceptionGroup("two", [ValueError("other"), ExceptionGroup("one", [broken()])])
""",
    "as a cause": """
def test_it():
    raise RuntimeError("the run failed") from broken()
""",
    "in a cause's group": """
def test_it():
    raise RuntimeError("the run failed") from ExceptionGroup("one", [broken()])
""",
}


def run(pytester: pytest.Pytester, body: str, *options: str) -> str:
    """Run pytest on a file of the prelude and ``body``; what it printed."""
    pytester.makepyfile(PRELUDE + body)
    result = pytester.runpytest("-p", "no:cacheprovider", "-p", "no:randomly", *options)
    return result.stdout.str()


def traces(directory: Path) -> list[Trace]:
    return [read_trace(path) for path in sorted(directory.iterdir())]


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_a_broken_law_leaves_its_shrunk_trace(way: str, pytester: pytest.Pytester) -> None:
    out = run(pytester, WAYS_TO_FAIL[way])
    [trace] = traces(pytester.path / "kvcore-traces")
    assert trace.header.target == "fault:deferred-peer-lookup"
    assert trace.violation is not None
    assert trace.violation.signature == ("L3", "group_end")
    assert len(trace.ops) == 6
    [path] = (pytester.path / "kvcore-traces").iterdir()
    assert f"replay: kvcore replay kvcore-traces/{path.name}" in out
    assert f"trace:  kvcore-traces/{path.name}" in out


def test_the_section_on_a_broken_law(
    pytester: pytest.Pytester, snapshot: Callable[[str, str], None]
) -> None:
    out = run(pytester, WAYS_TO_FAIL["plainly"])
    lines = out.splitlines()
    start = next(at for at, line in enumerate(lines) if "kvcore trace" in line)
    stop = next(at for at, line in enumerate(lines) if line.startswith("replay: "))
    section = "\n".join(lines[start : stop + 1])
    # How much work the shrinker had, and the hash in the name, are its own business.
    section = re.sub(r"in \d+ executions", "in N executions", section)
    snapshot("pytest_section", re.sub(r"[0-9a-f]{8}\.jsonl", "HASH.jsonl", section))


def test_traces_are_written_where_asked(pytester: pytest.Pytester) -> None:
    out = run(pytester, WAYS_TO_FAIL["plainly"], "--kvcore-traces", "some/where")
    assert len(traces(pytester.path / "some" / "where")) == 1
    assert "kvcore replay some/where/" in out
    assert not (pytester.path / "kvcore-traces").exists()


def test_a_test_that_changes_the_directory_leaves_its_trace_where_pytest_started(
    pytester: pytest.Pytester,
) -> None:
    body = """
def test_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    break_law()
"""
    out = run(pytester, body)
    assert len(traces(pytester.path / "kvcore-traces")) == 1
    assert "replay: kvcore replay kvcore-traces/" in out


def test_traces_may_go_anywhere(pytester: pytest.Pytester, tmp_path: Path) -> None:
    out = run(pytester, WAYS_TO_FAIL["plainly"], "--kvcore-traces", str(tmp_path / "far"))
    [path] = (tmp_path / "far").iterdir()
    assert f"replay: kvcore replay {path}" in out


def test_the_same_violation_twice_in_a_group_is_kept_once(pytester: pytest.Pytester) -> None:
    body = """
def test_it():
    raise ExceptionGroup("two", [broken(), broken()])
"""
    out = run(pytester, body)
    assert len(traces(pytester.path / "kvcore-traces")) == 1
    assert out.count("replay: ") == 1


def test_a_target_that_cannot_be_opened_by_name_keeps_the_program_as_found(
    pytester: pytest.Pytester,
) -> None:
    body = """
from kvcore.targets.core import core_target
from kvcore.targets.faults import FAULTS

def test_it():
    parts = FAULTS["deferred-peer-lookup"].parts
    run = Run(core_target(GEOMETRY, name="my-own", parts=parts))
    for op in PROGRAM:
        run.step(op)
"""
    out = run(pytester, body)
    [trace] = traces(pytester.path / "kvcore-traces")
    assert len(trace.ops) == 8
    assert "as found: a target of this name cannot be opened" in out


def test_a_program_that_does_not_break_again_is_kept_as_found(pytester: pytest.Pytester) -> None:
    body = """
from kvcore.targets.core import core_target
from kvcore.targets.faults import FAULTS

def test_it():
    parts = FAULTS["deferred-peer-lookup"].parts
    run = Run(core_target(GEOMETRY, name="kvcore", parts=parts))
    for op in PROGRAM:
        run.step(op)
"""
    out = run(pytester, body)
    [trace] = traces(pytester.path / "kvcore-traces")
    assert len(trace.ops) == 8
    assert "as found: it did not break again" in out


def test_a_trace_that_cannot_be_kept_does_not_hide_the_failure(pytester: pytest.Pytester) -> None:
    pytester.makefile(".txt", traces="in the way")
    out = run(pytester, WAYS_TO_FAIL["plainly"], "--kvcore-traces", "traces.txt")
    assert "the trace could not be kept: TraceFileError" in out
    assert "LawBroken_L3" in out
    assert "1 failed" in out


@pytest.mark.parametrize(
    "body",
    [
        "def test_it(): pass",
        "def test_it(): raise ValueError('other')",
        "def test_it(): broken()",
        "@pytest.mark.xfail\ndef test_it(): break_law()",
        "def test_it():\n    broken()\n    pytest.skip('for now')",
    ],
)
def test_tests_that_do_not_fail_by_a_broken_law_leave_nothing(
    body: str, pytester: pytest.Pytester
) -> None:
    out = run(pytester, body)
    assert "kvcore trace" not in out
    assert not (pytester.path / "kvcore-traces").exists()


def test_under_xdist_every_worker_writes_and_the_report_is_the_same(
    pytester: pytest.Pytester,
) -> None:
    body = """
def test_one(): break_law()
def test_two(): break_law()
def test_three(): pass
"""
    out = run(pytester, body, "-n", "2", "-p", "xdist")
    assert "2 failed, 1 passed" in out
    # The same program from two workers is one trace, and whole.
    [trace] = traces(pytester.path / "kvcore-traces")
    assert len(trace.ops) == 6
    assert out.count("replay: kvcore replay kvcore-traces/") == 2


def test_a_failing_hypothesis_test_leaves_its_trace(pytester: pytest.Pytester) -> None:
    body = """
from hypothesis import given, settings, strategies as st

@settings(database=None, derandomize=True, deadline=None)
@given(st.integers(0, 3))
def test_it(number):
    if number > 1:
        break_law()
"""
    out = run(pytester, body)
    assert len(traces(pytester.path / "kvcore-traces")) == 1
    assert "replay: kvcore replay" in out


def test_causes_that_go_round_in_circles_come_to_an_end(leak: Trace) -> None:
    assert leak.violation is not None
    broken = LawBroken(leak.violation, leak.ops, leak.header)
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    second.__cause__ = ExceptionGroup("both", [first, broken])
    assert list(broken_laws(first)) == [broken]


def test_a_session_without_failures_imports_nothing_of_the_harness(tmp_path: Path) -> None:
    code = """
import sys
import kvcore.reports.pytest_plugin as plugin

assert list(plugin.broken_laws(ValueError("other"))) == []
print(*(name for name in sys.modules if name in ("hypothesis", "msgspec", "rich", "typer")
        or name.startswith(("kvcore.models", "kvcore.targets", "kvcore.invariants"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""

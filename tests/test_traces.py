"""Regression traces: each fails on its fault as recorded, passes on the core, and stays short.

`tests/traces/` holds one shrunk program for each known fault, written by
`kvcore faults --traces tests/traces`; `docs/findings/` those of released engines, which are played
on the releases where environment variable KVCORE_SGLANG_DIRS names unpacked ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcore.models import Violation
from kvcore.models.trace import Trace
from kvcore.reports.trace_files import read_trace
from kvcore.strategies.isolation import run_program
from kvcore.strategies.resemblance import resembling_faults
from kvcore.strategies.shrink import shrink
from kvcore.targets.faults import FAULTS
from kvcore.targets.sglang.release import load_release

ROOT = Path(__file__).parent.parent
FAULT_TRACES = {path.stem: path for path in sorted((ROOT / "tests/traces").glob("*.jsonl"))}
FINDINGS = {path.stem: path for path in sorted((ROOT / "docs/findings").glob("*.jsonl"))}
LONGEST = 8


def violated(trace: Trace) -> Violation:
    assert trace.violation is not None
    return trace.violation


def test_every_fault_has_its_trace() -> None:
    assert set(FAULT_TRACES) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULT_TRACES)
def test_a_fault_fails_as_recorded_and_the_core_passes(fault: str) -> None:
    trace = read_trace(FAULT_TRACES[fault])
    assert trace.header.target == f"fault:{fault}"
    assert len(trace.ops) <= LONGEST
    found = run_program(trace.header.target, trace.header.geometry, trace.ops).violation
    assert found is not None
    assert found.signature == violated(trace).signature
    assert found.op_index == violated(trace).op_index
    assert FAULTS[fault].is_shown_by(found)
    on_core = run_program("kvcore", trace.header.geometry, trace.ops)
    assert on_core.violation is None
    assert on_core.tally.skipped == 0


@pytest.mark.parametrize("fault", FAULT_TRACES)
def test_a_recorded_trace_shrinks_to_the_same_length(fault: str) -> None:
    trace = read_trace(FAULT_TRACES[fault])
    shrunk = shrink(trace.header.target, trace.header.geometry, trace.ops, violated(trace))
    assert len(shrunk.program) == len(trace.ops)


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_passes_on_the_core_and_resembles_the_fault_that_it_is_named_after(
    finding: str,
) -> None:
    trace = read_trace(FINDINGS[finding])
    on_core = run_program("kvcore", trace.header.geometry, trace.ops)
    assert on_core.violation is None
    assert on_core.tally.skipped == 0
    fault, _, _ = finding.rpartition("-")
    alike = resembling_faults(trace.header.geometry, trace.ops, violated(trace))
    assert fault in {one.id for one in alike}


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_is_found_again_on_its_release(finding: str) -> None:
    trace = read_trace(FINDINGS[finding])
    _, _, version = finding.rpartition("-")
    unpacked = [Path(d) for d in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if d]
    release = next((d for d in unpacked if load_release(d).version == version), None)
    if release is None:
        pytest.skip(f"KVCORE_SGLANG_DIRS names no unpacked sglang {version}")
    _, _, mode = trace.header.target.partition("#")
    target = f"sglang:{release}" + (f"#{mode}" if mode else "")
    found = run_program(target, trace.header.geometry, trace.ops).violation
    assert found is not None
    assert found.signature == violated(trace).signature

"""The command line: what each command says, and with which status it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from kvcore.invariants import Tally, Verdict
from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.models.trace import Trace, encode_trace, new_header
from kvcore.reports import hunting, replaying, verifying
from kvcore.reports.trace_files import read_trace, write_trace
from kvcore.strategies.campaign import Finding, Plan, Progress, Report, Row
from kvcore.strategies.hunt import Hunt
from kvcore.strategies.isolation import death, run_program
from kvcore.strategies.shrink import Shrunk
from kvcore.targets.faults import FAULTS
from kvcore.targets.registry import list_targets

Command = Callable[..., tuple[int, str, str]]
Snapshot = Callable[[str, str], None]
Campaign = Callable[[Plan, Callable[[Progress], None]], Report]

COMMANDS = ("verify", "replay", "shrink", "faults", "soak", "bench", "translate", "targets")


def finding_of(trace: Trace) -> Finding:
    assert trace.violation is not None
    header = trace.header
    return Finding(header.target, "walker", header.geometry, trace.ops, trace.violation, 7)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """Every plan that a campaign was asked for; each campaign is clean at once."""
    asked: list[Plan] = []

    def campaign(plan: Plan, on_progress: Callable[[Progress], None]) -> Report:
        asked.append(plan)
        return Report([Row("hybrid", {"walker"}, tally=Tally(programs=1, steps=10))], [], 1.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verifying, "run_campaign", campaign)
    return asked


def campaign_with(monkeypatch: pytest.MonkeyPatch, findings: Sequence[Finding]) -> None:
    """Campaigns that end with ``findings``."""
    row = Row("hybrid", {"walker"}, tally=Tally(programs=1, steps=10), findings=len(findings))
    report = Report([row], list(findings), 1.0)
    monkeypatch.setattr(verifying, "run_campaign", lambda plan, on_progress: report)


# Help.


@pytest.mark.parametrize("arguments", [("targets",), ("verify", "--time-budget", "1")])
def test_kernels_that_are_none_are_bad_input(
    arguments: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", "fast")
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvcore: KVCORE_KERNELS: expected torch, numpy, triton or nothing")


def test_without_a_command_the_help_is_shown(command: Command) -> None:
    assert command() == command("--help")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_texts(name: str, command: Command, snapshot: Snapshot) -> None:
    status, out, err = command(*name.split(), "--help")
    assert (status, err) == (0, "")
    snapshot(f"help_{name}" if name else "help", out)


# Bad input: one sentence, status 2, whatever the command.

BAD_INPUTS = [
    ("nonsense",),
    ("verify", "--nonsense"),
    ("verify", "--target", "nonsense"),
    ("verify", "--target", "fault:nonsense"),
    ("verify", "--target", "sglang:"),
    ("verify", "--target", "sglang:missing"),
    ("verify", "--profile", "nonsense"),
    ("verify", "--page-size", "0"),
    ("verify", "--page-size", "four"),
    ("verify", "--workers", "0"),
    ("verify", "--seed", "-1"),
    ("verify", "--time-budget", "soon"),
    ("verify", "--time-budget", "-3s"),
    ("verify", "--time-budget", "0"),
    ("verify", "--traces", "file"),
    ("verify", "--traces", "file/below"),
    ("replay",),
    ("replay", "missing"),
    ("replay", "."),
    ("replay", "file"),
    ("replay", "leak.jsonl", "--target", "nonsense"),
    ("replay", "leak.jsonl", "--step", "-1"),
    ("replay", "leak.jsonl", "--step", "6"),
    ("replay", "leak.jsonl", "leak.jsonl"),
    ("shrink", "leak.jsonl"),
    ("shrink", "missing", "-o", "out.jsonl"),
    ("shrink", "file", "-o", "out.jsonl"),
    ("shrink", "leak.jsonl", "-o", "missing/out.jsonl"),
    ("shrink", "leak.jsonl", "-o", "."),
    ("shrink", "leak.jsonl", "-o", "out.jsonl", "--target", "kvcore"),
    ("faults", "nonsense"),
    ("faults", "--seeds", "0"),
    ("faults", "--seeds", "some"),
    ("translate",),
    ("translate", "missing.raw"),
    ("translate", "file"),
    ("translate", "file", "-o", "out.jsonl"),
    ("translate", "missing.raw", "-o", "."),
    ("soak",),
    ("soak", "missing"),
    ("soak", "."),
    ("soak", "file"),
    ("soak", "leak.jsonl"),
    ("soak", "requests.csv", "--requests", "-1"),
    ("soak", "requests.csv", "--check-every", "0"),
    ("soak", "requests.csv", "--seed", "-1"),
    ("soak", "requests.csv", "--chunk", "0"),
    ("soak", "requests.csv", "--arrivals", "nonsense"),
    ("soak", "requests.csv", "--geometry", "nonsense"),
    ("soak", "requests.csv", "--target", "nonsense"),
    ("soak", "requests.csv", "--target", "kvcore#wrapped"),
    ("soak", "requests.csv", "--json", "missing/report.json"),
    ("soak", "requests.csv", "--traces", "file"),
    ("bench", "--section", "nonsense"),
    ("bench", "--against", "sglang:missing"),
    ("bench", "--check", "--goals", "missing"),
    ("bench", "--check", "--goals", "file"),
    ("bench", "--json", "missing/report.json"),
    ("targets", "nonsense"),
    ("targets", "--nonsense"),
    ("targets", "--target", "kvcore"),
]


@pytest.mark.parametrize("arguments", BAD_INPUTS, ids=" ".join)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: tuple[str, ...], command: Command, leak_file: Path
) -> None:
    Path("file").write_text("no trace\n")
    Path("requests.csv").write_text("input_length,output_length\n4,2\n")
    status, out, err = command(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("kvcore: ")
    assert err.count("\n") == 1


def test_each_command_has_three_bad_inputs_here() -> None:
    for name in COMMANDS:
        assert sum(arguments[0] == name for arguments in BAD_INPUTS) >= 3


# verify


def test_what_is_left_out_of_a_verification_has_a_default(
    command: Command, plans: list[Plan]
) -> None:
    status, out, _ = command("verify")
    assert status == 0
    assert "kvcore is clean" in out
    [plan] = plans
    assert (plan.target, plan.profile, plan.page_sizes, plan.seed) == ("kvcore", "ci", (), 0)
    assert plan.time_budget > 0
    assert plan.workers >= 1


def test_every_option_of_a_verification_reaches_the_plan(
    command: Command, plans: list[Plan]
) -> None:
    options = "--target kvcore#unchecked --profile ci --page-size 4 --page-size 1 --page-size 4"
    more = "--seed 3 --time-budget 2m --workers 5"
    assert command("verify", *options.split(), *more.split())[0] == 0
    assert plans == [Plan("kvcore#unchecked", (4, 1), 3, 120.0, 5, "ci")]


def test_a_clean_verification_leaves_no_directory_behind(
    command: Command, plans: list[Plan], tmp_path: Path
) -> None:
    command("verify", "--traces", "traces")
    assert list(tmp_path.iterdir()) == []


def test_a_finding_is_shrunk_saved_and_shown(
    command: Command, leak: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    longer = (ops.Alloc(9, 1), ops.Free(9), *leak.ops, ops.Clear())
    campaign_with(monkeypatch, [replace(finding_of(leak), program=longer)])
    status, out, _ = command("verify", "--target", leak.header.target, "--traces", "traces")
    assert status == 1
    [path] = Path("traces").iterdir()
    trace = read_trace(path)
    assert len(trace.ops) <= len(leak.ops)
    assert trace.violation is not None
    assert leak.violation is not None
    assert trace.violation.signature == leak.violation.signature
    assert (trace.header.seed, trace.header.found_by) == (7, "walker")
    assert f"Replay  kvcore replay {path}" in out.splitlines()
    assert command("replay", path)[0] == 1


def test_a_finding_that_does_not_come_back_is_saved_as_found(
    command: Command, leak: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    campaign_with(monkeypatch, [replace(finding_of(leak), target="kvcore")])
    status, out, _ = command("verify")
    assert status == 1
    assert "It did not break again" in out
    [path] = Path("kvcore-traces").iterdir()
    assert read_trace(path).ops == leak.ops


def test_of_a_law_that_is_broken_from_the_start_the_plainest_finding_is_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    target, geometry = "fault:index-k-outside-saver", Geometry(2, 2, attention="dsa", saver=True)
    programs: list[tuple[Op, ...]] = [
        (ops.Hostile("free_padding"),),
        (ops.Alloc(1, 1), ops.Free(1)),
        (ops.Pause("weights"),),
    ]
    findings: list[Finding] = []
    for program in programs:
        violation = run_program(target, geometry, program).violation
        assert violation is not None
        findings.append(Finding(target, "walker", geometry, program, violation, 1))
    campaign_with(monkeypatch, findings)
    status, out, _ = command("verify", "--target", target)
    assert status == 1
    assert "1 different finding in 10 steps in 1 s: saver at pause." in " ".join(out.split())
    assert "broken before the first op, whatever it is" in out
    assert len(list(Path("kvcore-traces").iterdir())) == 1


def test_a_verification_without_a_step_is_not_clean(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verifying, "run_campaign", lambda plan, on_progress: Report())
    status, out, err = command("verify", "--time-budget", "0.001")
    assert (status, out) == (2, "")
    assert "too short" in err


def test_a_failure_in_a_campaign_is_status_3(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(plan: Plan, on_progress: Callable[[Progress], None]) -> Report:
        raise ZeroDivisionError("of all things")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verifying, "run_campaign", broken)
    status, out, err = command("verify")
    assert (status, out) == (3, "")
    assert "ZeroDivisionError: of all things" in err


def test_a_real_verification_finds_a_known_fault(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    target = "fault:page-clears-one-slot"
    options = "--time-budget 2s --workers 1 --page-size 4"
    status, out, _ = command("verify", "--target", target, *options.split())
    assert status == 1
    assert f"{target} broke the laws" in out
    traces = [read_trace(path) for path in Path("kvcore-traces").iterdir()]
    fault = FAULTS["page-clears-one-slot"]
    assert any(trace.violation and fault.is_shown_by(trace.violation) for trace in traces)


# replay


def test_a_trace_replays_to_what_it_tells_of(
    command: Command, leak_file: Path, snapshot: Snapshot
) -> None:
    status, out, err = command("replay", leak_file)
    assert (status, err) == (1, "")
    snapshot("replay", out)


def test_a_trace_passes_on_a_target_that_keeps_the_law(command: Command, leak_file: Path) -> None:
    status, out, _ = command("replay", leak_file, "--target", "kvcore")
    assert status == 0
    assert "kvcore passes: 6 ops" in out
    assert "The trace tells of L3 broken at op 5, group_end" in out


def test_the_replay_command_names_another_target(command: Command, leak_file: Path) -> None:
    target = "fault:deferred-peer-lookup"
    _, out, _ = command("replay", leak_file, "--target", target)
    assert f"Replay  kvcore replay {leak_file} --target {target}" in out.splitlines()


def test_every_step_of_a_trace_can_be_looked_at(
    command: Command, leak_file: Path, leak: Trace
) -> None:
    for step, op in enumerate(leak.ops):
        status, out, _ = command("replay", leak_file, "--step", step)
        assert status == 0
        assert f"State after op {step}, {op.kind}" in out


def test_ops_that_a_target_does_not_allow_are_told(command: Command, tmp_path: Path) -> None:
    program = (ops.Alloc(1, 1), ops.Free(5), ops.Free(1))
    write_trace(Trace(new_header("kvcore", Geometry(1, 4)), program), tmp_path / "it")
    status, out, _ = command("replay", tmp_path / "it")
    assert status == 0
    assert "1 of 3 ops in the trace is not allowed on this target and was skipped." in out
    assert "kvcore passes: 2 ops" in out


def test_a_trace_of_which_nothing_is_allowed_does_not_pass(
    command: Command, tmp_path: Path
) -> None:
    write_trace(Trace(new_header("kvcore", Geometry(1, 4)), (ops.Free(5),)), tmp_path / "it")
    status, _, err = command("replay", tmp_path / "it")
    assert status == 2
    assert "none of the 1 op of the trace is allowed on kvcore" in err


def test_something_else_breaking_than_the_trace_tells_of_is_told(
    command: Command, leak: Trace, tmp_path: Path
) -> None:
    assert leak.violation is not None
    first = leak.violation.clauses[0]
    other = type(leak.violation)("L7", 2, "alloc", (first,))
    write_trace(Trace(leak.header, leak.ops, other), tmp_path / "it")
    status, out, _ = command("replay", tmp_path / "it")
    assert status == 1
    assert "the trace tells of L7 broken at op 2, alloc" in out


def test_a_law_that_is_broken_before_the_first_op_is_told(command: Command, tmp_path: Path) -> None:
    target, geometry = "fault:index-k-outside-saver", Geometry(2, 2, attention="dsa", saver=True)
    write_trace(Trace(new_header(target, geometry), (ops.Pause("weights"),)), tmp_path / "it")
    status, out, _ = command("replay", tmp_path / "it")
    assert status == 1
    assert "broken before the first op, whatever it is" in out


def test_a_trace_that_kills_its_process_does_not_kill_the_command_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (ops.Alloc(1, 1), ops.Decode((1,)))
    geometry = Geometry(1, 4, 4)
    write_trace(Trace(new_header("kvcore", geometry), program), tmp_path / "it")

    def run_program(target: str, pools: Geometry, ran: Sequence[Op]) -> Verdict:
        return Verdict(tuple(ran), death(ran, 11), Tally())

    monkeypatch.setattr(replaying, "run_program", run_program)
    status, out, _ = command("replay", tmp_path / "it")
    assert status == 1
    assert "the process died: signal 11" in out
    assert "State before op 1, decode, in which the process died" in out
    status, out, _ = command("replay", tmp_path / "it", "--step", "1")
    assert status == 0
    assert "State before op 1, decode, in which the process died" in out


def test_an_empty_program_passes(command: Command, tmp_path: Path) -> None:
    write_trace(Trace(new_header("kvcore", Geometry(1, 4)), ()), tmp_path / "it")
    status, out, _ = command("replay", tmp_path / "it")
    assert status == 0
    assert "kvcore passes: 0 ops" in out
    status, _, err = command("replay", tmp_path / "it", "--step", "0")
    assert status == 2
    assert err.count("\n") == 1


# shrink


def test_a_trace_is_shrunk_and_replays_to_the_same(
    command: Command, leak: Trace, tmp_path: Path
) -> None:
    longer = (ops.Alloc(9, 1), ops.Free(9), *leak.ops)
    source, out_file = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    write_trace(Trace(leak.header, longer, leak.violation), source)
    status, out, _ = command("shrink", source, "-o", out_file)
    assert status == 0
    assert f"kvcore replay {out_file}" in out
    shrunk = read_trace(out_file)
    assert len(shrunk.ops) <= len(leak.ops)
    assert command("replay", out_file)[0] == 1


def test_a_shrunk_trace_shrinks_to_itself(command: Command, leak_file: Path) -> None:
    command("shrink", leak_file, "-o", "once.jsonl")
    command("shrink", "once.jsonl", "-o", "twice.jsonl")
    assert Path("once.jsonl").read_bytes() == Path("twice.jsonl").read_bytes()


def test_a_trace_may_be_shrunk_in_place(command: Command, leak_file: Path, leak: Trace) -> None:
    assert command("shrink", leak_file, "-o", leak_file)[0] == 0
    assert leak_file.read_bytes() != encode_trace(leak)
    assert read_trace(leak_file).violation is not None


# faults


@pytest.fixture
def hunts(monkeypatch: pytest.MonkeyPatch, leak: Trace) -> list[tuple[str, str, int]]:
    """Every hunt that was asked for, as (fault, source, seeds). All are found at once but
    counter-drift, which the machine finds for no seed and the walker for one."""
    asked: list[tuple[str, str, int]] = []
    assert leak.violation is not None
    shrunk = Shrunk(leak.header.geometry, leak.ops, leak.violation, 17)

    def hunt(fault: str, source: str, seeds: Sequence[int], limit: int) -> Hunt:
        asked.append((fault, source, len(seeds)))
        programs: list[int | None] = [number + 1 for number, _ in enumerate(seeds)]
        if fault == "counter-drift":
            programs = [None if source == "machine" or number else 9 for number in seeds]
        found = [shrunk for number in programs if number is not None]
        return Hunt(fault, source, programs, FAULTS[fault].laws if found else frozenset(), found)

    monkeypatch.setattr(hunting, "hunt", hunt)
    # Threads instead of processes, so that what is asked for is seen here.
    monkeypatch.setattr(hunting, "worker_processes", lambda: ThreadPool(1))
    return asked


def test_all_faults_are_hunted_by_both_sources(
    command: Command, hunts: list[tuple[str, str, int]]
) -> None:
    status, _, _ = command("faults", "--seeds", "3")
    assert status == 1
    assert hunts == [(fault, source, 3) for fault in FAULTS for source in ("walker", "machine")]


def test_the_table_of_faults(
    command: Command, hunts: list[tuple[str, str, int]], snapshot: Snapshot
) -> None:
    # Named in another order than that of the layers.
    named = ("device-buffer-lost", "pause-frees-other-tag", "deferred-peer-lookup", "counter-drift")
    status, out, _ = command("faults", *named, "--seeds", "3")
    assert status == 1
    snapshot("faults", out)


def test_the_table_of_all_faults_has_each_once_and_fits(
    command: Command, hunts: list[tuple[str, str, int]]
) -> None:
    _, out, _ = command("faults", "--seeds", "3")
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 80
    first = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(first) == sorted(FAULTS)


def test_faults_that_are_all_found_are_clean(
    command: Command, hunts: list[tuple[str, str, int]]
) -> None:
    status, out, _ = command("faults", "deferred-peer-lookup")
    assert status == 0
    assert "Every fault was found: 1 of 1." in out


def test_a_real_hunt_finds_its_fault(command: Command) -> None:
    status, out, _ = command("faults", "page-clears-one-slot", "--seeds", "1")
    assert status == 0
    assert "page-clears-one-slot" in out


# targets


def test_the_targets_are_listed(command: Command) -> None:
    status, out, err = command("targets")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    for pattern, _ in list_targets():
        assert pattern in words

"""The conformance call: what it finds, what it tells, the same again for the same seed, and that
foreign code known by name runs apart from this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import strategies
from kvcore.models import Contract, Geometry, Outcome, ops
from kvcore.models.ops import Op
from kvcore.reports.trace_files import read_trace
from kvcore.strategies import (
    Breach,
    Conformance,
    ConformanceError,
    check_target,
    conformance,
    isolation,
    workers,
)
from kvcore.strategies.campaign import HarnessFailed
from kvcore.strategies.replay import replay
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.faults.hisparse import HisparseNotForwarded
from kvcore.targets.field import field_target
from kvcore.targets.protocol import Target, TargetFactory, View
from kvcore.targets.registry import MACHINES, UnknownTarget, open_target
from kvcore.targets.sglang.release import load_release
from kvcore.targets.twin import forwarded_target

torch.set_num_threads(1)

GROUPS = ("free_group_begin", "free_group_end")


class Shelf:
    """A paged allocator with free groups, in plain Python."""

    def __init__(self, geometry: Geometry) -> None:
        self.size, self.page_size = geometry.full_size, geometry.page_size
        self.free_pages = list(range(1, geometry.full_pages + 1))
        self.waiting: list[int] | None = None

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages = [self.free_pages.pop() for _ in range(count)]
        slots = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        return torch.tensor(slots, dtype=torch.int64)

    def pages_of(self, free_index: torch.Tensor) -> list[int]:
        return sorted({slot // self.page_size for slot in free_index.tolist()})

    def free(self, free_index: torch.Tensor) -> None:
        pages = self.pages_of(free_index)
        if self.waiting is None:
            self.free_pages += pages
        else:
            self.waiting += pages

    def free_group_begin(self) -> None:
        self.waiting = []

    def free_group_end(self) -> None:
        self.free_pages += self.waiting or []
        self.waiting = None


class NamingTwice(Shelf):
    """A page goes back once for each of its slots."""

    def pages_of(self, free_index: torch.Tensor) -> list[int]:
        return [slot // self.page_size for slot in free_index.tolist()]


class OneShort(Shelf):
    """Capacity off by a page."""

    def available_size(self) -> int:
        return super().available_size() - self.page_size


class Forgetful(Shelf):
    """The end of a group drops what waits."""

    def free_group_end(self) -> None:
        self.waiting = None


def shelf(geometry: Geometry) -> AllocatorTarget:
    return field_target(geometry, Shelf(geometry), GROUPS)


def naming_twice(geometry: Geometry) -> AllocatorTarget:
    return field_target(geometry, NamingTwice(geometry), GROUPS)


def one_short(geometry: Geometry) -> AllocatorTarget:
    return field_target(geometry, OneShort(geometry), GROUPS)


def forgetful(geometry: Geometry) -> AllocatorTarget:
    return field_target(geometry, Forgetful(geometry), GROUPS)


def check_single(factory: TargetFactory | str, programs: int = 30, seed: int = 0) -> Conformance:
    return check_target(factory, machines=("single pool",), programs=programs, seed=seed)


def only(result: Conformance) -> Breach:
    assert not result
    (breach,) = result.findings
    return breach


def run_code(code: str, **names: object) -> None:
    """Run what a message says, as somebody would who pastes it."""
    exec(compile(code, "message", "exec"), dict(names))


# --- a verdict -----------------------------------------------------------------------------------


def test_a_right_allocator_conforms_well_within_twenty_seconds() -> None:
    start = time.process_time()
    result = check_target(shelf, machines=("single pool",))

    assert time.process_time() - start < 20
    assert result
    assert result.findings == ()
    assert result.target == "Shelf"
    assert 120 <= result.programs <= 130  # Hypothesis counts its first example apart
    assert result.steps > 1000
    assert result.checks["L1"] >= result.steps
    assert str(result).startswith("Shelf conforms: ")
    result.raise_for_findings()


def test_the_same_seed_gives_the_same_result_and_another_seed_other_programs() -> None:
    first = check_single(shelf, 15)

    assert check_single(shelf, 15) == first
    assert check_single(shelf, 15, seed=1).steps != first.steps
    assert check_single(naming_twice) == check_single(naming_twice)


@pytest.mark.parametrize(
    ("factory", "law", "longest"),
    [(naming_twice, "L2", 2), (one_short, "L7", 1), (forgetful, "L6", 4)],
)
def test_a_planted_bug_is_found_and_shrunk(
    factory: Callable[[Geometry], AllocatorTarget], law: str, longest: int
) -> None:
    result = check_single(factory)

    assert not result
    assert {breach.violation.law for breach in result.findings} == {law}
    assert min(len(breach.program) for breach in result.findings) <= longest
    assert len({breach.violation.signature for breach in result.findings}) == len(result.findings)


def test_every_source_runs_and_finds() -> None:
    for source in ("walker", "machine", "program"):
        result = check_target(forgetful, machines=("single pool",), programs=25, sources=(source,))
        assert only(result).source == source


# --- the message ---------------------------------------------------------------------------------


def test_the_error_says_what_broke_and_how_to_see_it_again() -> None:
    with pytest.raises(ConformanceError) as raised:
        check_single(forgetful).raise_for_findings()

    assert isinstance(raised.value, AssertionError)
    message = str(raised.value)
    assert message.startswith("Forgetful does not conform: 1 finding in ")
    assert "L6, group law, broke at op 3, group_end\n" in message
    assert "  expected  free full pages after the group: 1\n" in message
    assert "  seen      not released: 1; released in their place: none\n" in message
    assert "  and broke L1, L7\n" in message
    assert "assert replay(forgetful, geometry, program).violation is None" in message


def test_the_code_in_a_message_fails_until_the_bug_is_gone() -> None:
    code = only(check_single(forgetful)).code

    with pytest.raises(AssertionError):
        run_code(code, forgetful=forgetful)
    run_code(code, forgetful=shelf)


def test_a_factory_without_a_name_is_called_factory() -> None:
    breach = only(check_single(lambda geometry: forgetful(geometry)))

    assert "assert replay(factory, geometry, program)" in breach.code


def test_a_named_target_is_run_again_by_its_name() -> None:
    breach = check_target("fault:deferred-peer-lookup", programs=20).findings[0]

    assert 'assert run_program("fault:deferred-peer-lookup", geometry, program)' in breach.code
    with pytest.raises(AssertionError):
        run_code(breach.code)


def test_a_finding_is_saved_as_a_trace(tmp_path: Path) -> None:
    breach = check_target("fault:page-clears-one-slot", page_sizes=(4,), programs=20).findings[0]
    path = tmp_path / "found.jsonl"
    breach.save(path)
    trace = read_trace(path)

    assert trace == breach.trace
    assert trace.header.target == "fault:page-clears-one-slot"
    again = replay(open_target(trace.header.target), trace.header.geometry, trace.ops).violation
    assert again == trace.violation


def test_findings_beyond_the_first_few_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "MOST_FINDINGS", 1)
    result = check_single(naming_twice)

    assert len(result.findings) == 1
    assert result.more == 1
    assert str(result).startswith("NamingTwice does not conform: 2 findings in ")
    assert str(result).endswith("1 more, not shrunk")


# --- shrinking -----------------------------------------------------------------------------------


def test_a_factory_that_builds_no_small_pools_is_shrunk_to_the_smallest_that_it_builds() -> None:
    def large(geometry: Geometry) -> AllocatorTarget:
        if geometry.full_pages < 6:
            raise ValueError("at least 6 pages")
        return forgetful(geometry)

    breach = only(check_single(large))
    assert breach.geometry.full_pages == 6
    assert len(breach.program) == 4


def test_a_finding_that_does_not_come_back_is_told_as_it_was_found() -> None:
    made = 0

    def at_first(geometry: Geometry) -> AllocatorTarget:
        nonlocal made
        made += 1
        return forgetful(geometry) if made <= 20 else shelf(geometry)

    result = check_target(at_first, machines=("single pool",), programs=30, sources=("walker",))
    assert {breach.found for breach in result.findings} == {
        len(breach.program) for breach in result.findings
    }
    assert not result
    assert "shrunk from" not in str(result)


# --- kvcore, its faults, and released engines ----------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_kvcore_conforms_on_every_machine(machine: str) -> None:
    result = check_target("kvcore", machines=(machine,), programs=4, sources=("walker",))

    assert result, str(result)
    assert result.target == "kvcore"


def test_by_default_a_named_target_is_tried_on_all_of_its_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conformance, "machines_of", lambda name: ("single pool", "pure SWA"))
    result = check_target("kvcore", programs=2, sources=("walker",))

    assert result.programs == 4


RELEASE = {
    "base": "",
    "token": "from kvcore import TokenToKVPoolAllocator\n",
    "paged": "from kvcore import PagedTokenToKVPoolAllocator\n",
}
"""A release that is nobody's: its modules hold kvcore's allocators under the names of the field."""


def write_release(directory: Path, hybrid: str, version: str = "0.5.19") -> str:
    """A double of a release whose hybrid allocator is ``hybrid``; the target's name."""
    home = directory / "sglang/srt/mem_cache/allocator"
    home.mkdir(parents=True)
    where, _, name = hybrid.rpartition(".")
    swa = f"from {where} import {name}\n\nclass SWATokenToKVPoolAllocator({name}): ...\n"
    for file, text in {**RELEASE, "swa": swa}.items():
        (home / f"{file}.py").write_text(text)
    (directory / "sglang/__init__.py").write_text("")
    metadata = directory / f"sglang-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")
    return f"sglang:{directory}"


FAULTS = "kvcore.targets.faults"


@pytest.mark.parametrize(
    ("hybrid", "page_size", "laws"),
    [
        (f"{FAULTS}.groups.DeferredPeerLookup", 1, {"L3"}),
        (f"{FAULTS}.mappings.PageClearsOneSlot", 4, {"L3", "L4"}),
    ],
)
def test_the_known_fault_of_a_release_is_reported(
    tmp_path: Path, hybrid: str, page_size: int, laws: set[str]
) -> None:
    name = write_release(tmp_path, hybrid)
    result = check_target(name, page_sizes=(page_size,), programs=30, sources=("walker",))

    assert not result
    assert laws & {breach.violation.law for breach in result.findings}
    assert all(breach.target == name for breach in result.findings)


def test_a_release_without_a_fault_conforms_under_its_callers_contract(tmp_path: Path) -> None:
    name = write_release(tmp_path, "kvcore.SWATokenToKVPoolAllocator")
    result = check_target(name, programs=20, sources=("walker",))

    assert result, str(result)


REPORTED = {"0.5.13": (4, {"L3"}), "0.5.18": (1, {"L3"}), "0.5.23": (1, set[str]())}
"""What is known of real releases under their callers' contract: a page size and the laws broken."""


@pytest.mark.parametrize("version", REPORTED)
def test_a_real_release_is_judged_as_known(version: str) -> None:
    unpacked = [Path(d) for d in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if d]
    directory = next((d for d in unpacked if load_release(d).version == version), None)
    if directory is None:
        pytest.skip(f"KVCORE_SGLANG_DIRS names no unpacked sglang {version}")
    page_size, laws = REPORTED[version]
    result = check_target(f"sglang:{directory}", page_sizes=(page_size,), programs=60)

    assert {breach.violation.law for breach in result.findings} == laws


class Deadly:
    """kvcore's target; a decode kills the process."""

    def __init__(self, geometry: Geometry) -> None:
        self._inner = core_target(geometry)
        self.name, self.geometry = "sglang:dying", geometry
        self.contract = Contract(ops=frozenset(("alloc", "decode", "free")))

    def apply(self, op: Op) -> Outcome:
        if isinstance(op, ops.Decode):
            os.kill(os.getpid(), signal.SIGSEGV)
        return self._inner.apply(op)

    def view(self, *, stamps: bool) -> View:
        return self._inner.view(stamps=stamps)

    def close(self) -> None:
        self._inner.close()


def test_the_death_of_foreign_code_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_dying(name: str) -> Callable[[Geometry], Target]:
        return Deadly

    for place in (conformance, isolation, workers):
        monkeypatch.setattr(place, "open_target", open_dying)
    breach = only(check_target("sglang:dying", programs=20, sources=("walker",)))

    assert breach.violation.signature == ("bounds", "decode")
    assert "SIGSEGV" in breach.violation.clauses[0].seen
    assert [op.kind for op in breach.program] == ["alloc", "decode"]


def test_a_harness_that_breaks_in_a_child_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = write_release(tmp_path, "kvcore.SWATokenToKVPoolAllocator")

    def broken(name: str) -> object:
        raise ZeroDivisionError("the harness broke")

    monkeypatch.setattr(workers, "open_target", broken)
    with pytest.raises(HarnessFailed, match="the harness broke"):
        check_target(name, programs=5)


# --- what wraps ----------------------------------------------------------------------------------


def not_forwarded(geometry: Geometry) -> AllocatorTarget:
    parts = CoreParts(compressed=HisparseNotForwarded)
    return forwarded_target(geometry, validate=False, parts=parts)


def test_a_right_wrapper_conforms_to_what_it_wraps() -> None:
    result = check_target(forwarded_target, inner="kvcore", page_sizes=(4,), programs=30)

    assert result, str(result)
    assert result.target == "compressed HiSparse as hybrid"


def test_a_wrapper_that_answers_otherwise_breaks_law_l9() -> None:
    result = check_target(not_forwarded, inner=core_target, page_sizes=(4,), programs=30)
    breach = next(breach for breach in result.findings if breach.violation.law == "L9")

    assert "page_size 4" in breach.violation.clauses[0].expected
    assert "page_size 1" in breach.violation.clauses[0].seen
    assert breach.target == "compressed HiSparse as hybrid beside kvcore"
    assert "replay(twin_factory(not_forwarded, core_target), geometry, program)" in breach.code
    with pytest.raises(AssertionError):
        run_code(breach.code, not_forwarded=not_forwarded, core_target=core_target)
    run_code(breach.code, not_forwarded=forwarded_target, core_target=core_target)


def test_an_inner_allocator_can_have_a_name_too() -> None:
    result = check_target(not_forwarded, inner="kvcore", page_sizes=(4,), programs=15)
    breach = next(breach for breach in result.findings if breach.violation.law == "L9")

    assert 'twin_factory(not_forwarded, open_target("kvcore"))' in breach.code
    with pytest.raises(AssertionError):
        run_code(breach.code, not_forwarded=not_forwarded)


def test_an_allocator_that_differs_from_its_inner_one_alone_is_found() -> None:
    """What an allocator says of its size is nobody's promise, but that of one that it wraps."""

    def smaller(geometry: Geometry) -> AllocatorTarget:
        allocator = Shelf(geometry)
        allocator.size -= geometry.page_size
        return field_target(geometry, allocator, GROUPS)

    assert check_single(smaller)
    result = check_target(smaller, inner=shelf, machines=("single pool",), programs=20)
    assert {breach.violation.law for breach in result.findings} == {"L9"}


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"machines": ("hybird",)}, "unknown machine 'hybird'; known: hybrid, single pool"),
        ({"machines": ()}, "machines is empty, expected some of: hybrid"),
        ({"programs": 0}, "programs is 0, expected at least 1"),
        ({"page_sizes": ()}, "page_sizes is \\(\\), expected sizes of at least 1"),
        ({"page_sizes": (0, 4)}, "page_sizes is \\(0, 4\\), expected sizes of at least 1"),
        ({"sources": ("walkers",)}, "expected some of: walker, machine, program"),
        ({"sources": ()}, "sources is \\(\\), expected some of"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_target(shelf, **{"machines": ("single pool",), **arguments})


def test_an_allocator_of_one_pool_says_so_when_it_is_taken_for_a_hybrid_one() -> None:
    with pytest.raises(ValueError, match=r'machines=\("single pool",\)'):
        check_target(shelf)


def test_a_contract_that_allows_nothing_is_no_conformance() -> None:
    def idle(geometry: Geometry) -> AllocatorTarget:
        contract = Contract(ops=frozenset(("free",)))
        return field_target(geometry, Shelf(geometry), contract=contract)

    with pytest.raises(ValueError, match="Shelf took no step: its contract leaves no op possible"):
        check_target(idle, machines=("single pool",), programs=2, sources=("walker",))


def test_a_name_that_opens_nothing_is_refused() -> None:
    with pytest.raises(UnknownTarget, match="unknown target 'kvcor'"):
        check_target("kvcor")


def test_a_factory_that_makes_no_target_of_any_pool_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def target(geometry): raise OSError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    with pytest.raises(UnknownTarget, match=r"mine:target makes no target .*OSError: not today"):
        check_target("python:mine:target")


def test_the_package_is_imported_without_hypothesis_until_the_call_is_asked_for() -> None:
    code = (
        "import sys, kvcore.strategies as s; assert 'hypothesis' not in sys.modules; "
        "assert 'check_target' in dir(s); s.check_target; assert 'hypothesis' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
    name = "check_targets"
    with pytest.raises(AttributeError, match="no attribute 'check_targets'"):
        getattr(strategies, name)

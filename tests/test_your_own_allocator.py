"""The guide for people with an allocator of their own says what happens: its code is run, and its
output is what is printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.strategies import Conformance, check_target
from kvcore.targets.field import SINGLE_CALLS
from kvcore.targets.registry import machines

pytest_plugins = ("pytester",)

torch.set_num_threads(1)

DOCS = Path(__file__).parent.parent / "docs"
GUIDE = (DOCS / "your-own-allocator.md").read_text()
TOY = (DOCS / "examples/toy_allocator.py").read_text()

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
ALLOCATOR, TEST, CALLS, HYBRID, WRAPPER, NAMED = (text for kind, text in BLOCKS if kind == "python")
VERDICT, FAILURE = (text for kind, text in BLOCKS if kind == "text")
(CHANGE,) = (text for kind, text in BLOCKS if kind == "diff")

TARGET = TEST.replace("from toy_allocator import ToyAllocator\n", "")
"""The guide's test, where the allocator is there already."""


def with_bug(source: str) -> str:
    """The allocator with the guide's change made to it."""
    old, new = CHANGE.splitlines()
    assert (old[0], new[0]) == ("-", "+")
    assert source.count(old[1:]) == 1
    return source.replace(old[1:], new[1:])


def uncounted(text: str) -> str:
    """How much was tried changes with the harness; what was found does not."""
    return re.sub(r"[\d,]+ (checks|programs|steps)", r"N \1", text)


def quick_check(factory: Any, **options: Any) -> Conformance:
    """`check_target`, of fewer programs."""
    return check_target(factory, programs=12, sources=("walker",), **options)


def run_pytest(pytester: pytest.Pytester, allocator: str) -> pytest.RunResult:
    pytester.makepyfile(toy_allocator=allocator, test_toy_allocator=TEST)
    return pytester.runpytest("-p", "no:cacheprovider", "-p", "no:randomly")


def test_the_guide_shows_the_example_as_it_is() -> None:
    _, _, code = TOY.partition("from __future__ import annotations\n\n")
    assert code == ALLOCATOR
    assert len(TOY.splitlines()) <= 42


def test_the_toy_passes(pytester: pytest.Pytester) -> None:
    run_pytest(pytester, TOY).assert_outcomes(passed=1)


def test_the_verdict_is_what_is_printed() -> None:
    names: dict[str, Any] = {}
    exec(ALLOCATOR + TARGET, names)
    result = check_target(names["toy_target"], machines=["single pool"])  # as the guide has it

    assert uncounted(str(result)) == uncounted(VERDICT.strip())


def test_the_bug_is_found_and_told_as_in_the_guide(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, with_bug(TOY))

    result.assert_outcomes(failed=1)
    shown = [line.rstrip() for line in result.outlines if re.match(r"E( |$)", line)]
    assert [uncounted(line) for line in shown] == uncounted(FAILURE).splitlines()


def test_the_last_lines_of_the_message_are_a_regression_test() -> None:
    lines = [line.removeprefix("E").strip() for line in FAILURE.splitlines()]
    pasted = "\n".join(lines[lines.index("from kvcore.models import Geometry, ops") :])

    exec(ALLOCATOR + TARGET + pasted, {})
    with pytest.raises(AssertionError):
        exec(with_bug(ALLOCATOR) + TARGET + pasted, {})


def test_the_calls_that_the_guide_names_are_calls() -> None:
    names: dict[str, Any] = {}
    exec(CALLS, names)
    assert set(names["CALLS"]) <= SINGLE_CALLS


def test_the_hybrid_example_and_the_wrapper_example_run() -> None:
    names: dict[str, Any] = {"torch": torch, "HybridAllocator": SWATokenToKVPoolAllocator}
    exec(HYBRID, names)
    assert quick_check(names["hybrid_target"])
    exec(WRAPPER, {**names, "wrapper_target": names["hybrid_target"], "check_target": quick_check})


def test_the_toy_can_be_opened_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_allocator.py").write_text(TOY)
    (tmp_path / "test_toy_allocator.py").write_text(TEST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    assert machines("python:test_toy_allocator:toy_target") == ("single pool",)
    exec(NAMED, {"check_target": quick_check})

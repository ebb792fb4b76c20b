"""`kvcore translate`: the trace of a raw recording, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcore import TokenToKVPoolAllocator
from kvcore.models import ops
from kvcore.reports.trace_files import read_trace
from kvcore.targets import record

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocator's first slots, its first free, and a free of slots that nobody was lent."""
    monkeypatch.chdir(tmp_path)
    allocator = TokenToKVPoolAllocator(8, torch.int64, "cpu", None, False, validate=False)
    recording = record(allocator, "live.jsonl")
    slots = allocator.alloc(3)
    assert slots is not None
    allocator.free(slots[1:])
    allocator.free(torch.tensor([7]))
    recording.detach()
    return recording.raw


def test_the_trace_is_where_it_was_meant_to_be(raw: Path, command: Command) -> None:
    status, out, err = command("translate", str(raw))
    assert (status, err) == (0, "")
    assert read_trace(Path("live.jsonl")).ops == (ops.Alloc(1, 3), ops.Free(1, 1))
    assert "3 calls of kvcore#unchecked: 2 ops" in out
    assert "call 3: free: it names slots of full pages 7" in out
    assert "The trace stands for calls 1 to 2" in out
    assert "kvcore replay live.jsonl" in out


def test_it_may_go_elsewhere(raw: Path, command: Command) -> None:
    assert command("translate", str(raw), "--out", "other.jsonl")[0] == 0
    assert Path("other.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing.raw",), "nothing.raw: cannot be read: No such file or directory"),
        (("live.jsonl",), "live.jsonl: cannot be read: No such file or directory"),
        (("live.raw.old",), "does not end in .raw; say with --out where the trace goes"),
        (("live.jsonl.raw", "--out", "./live.jsonl.raw"), "is the recording itself"),
        (("live.jsonl.raw", "--out", "nowhere/x.jsonl"), "there is no directory nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, raw: Path, command: Command
) -> None:
    recorded = raw.read_bytes()
    Path("live.raw.old").write_bytes(recorded)
    status, out, err = command("translate", *arguments)
    assert (status, out) == (2, "")
    assert raw.read_bytes() == recorded
    assert sentence in " ".join(err.split())
    assert err.count("kvcore:") == 1

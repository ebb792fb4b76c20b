"""`kvcore verify` from end to end on code that is not ours and breaks a law."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.models.trace import decode_trace
from kvcore.reports.cli import main

SOURCE = '''
import torch

from kvcore.targets.field import field_target


class Forgetful:
    """Takes back the first page of each free only."""

    def __init__(self, size, page_size):
        self.size, self.page_size = size, page_size
        self.free_pages = torch.arange(1, size // page_size + 1)

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size):
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def free(self, free_index):
        pages = torch.unique(free_index // self.page_size)[:1]
        self.free_pages = torch.cat([self.free_pages, pages])


class Suspicious(Forgetful):
    """Looks after itself when it is asked how much room there is."""

    def available_size(self):
        assert len(self.free_pages) >= self.expected, "a page was lost"
        return super().available_size()

    expected = 0

    def alloc(self, need_size):
        slots = super().alloc(need_size)
        self.expected = len(self.free_pages)
        return slots

    def free(self, free_index):
        self.expected += len(torch.unique(free_index // self.page_size))
        super().free(free_index)


def forgetful(geometry):
    return field_target(geometry, Forgetful(geometry.full_size, geometry.page_size))


def suspicious(geometry):
    return field_target(geometry, Suspicious(geometry.full_size, geometry.page_size))
'''


@pytest.mark.parametrize("name", ["forgetful", "suspicious"])
def test_every_finding_on_foreign_code_is_shown_and_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "somebodys_allocator.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = f"python:somebodys_allocator:{name}"
    arguments = ["verify", "--target", target, "--time-budget", "2s", "--workers", "1"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "harness failed" not in shown.err
    assert f"{target} broke the laws" in " ".join(shown.out.split())
    saved = sorted((tmp_path / "kvcore-traces").glob("*.jsonl"))
    assert saved
    assert shown.out.count("Replay  kvcore replay") == len(saved)
    for path in saved:
        trace = decode_trace(path.read_bytes(), path.name)
        assert trace.violation is not None
        assert len(trace.ops) <= 4
        assert main(["replay", str(path)]) == 1

"""What the tests of the reports share: a console of known width, snapshots, a known program."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.models.trace import Trace, new_header
from kvcore.reports.cli import main
from kvcore.reports.trace_files import write_trace
from kvcore.strategies.replay import replay
from kvcore.targets.registry import open_target

SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTH = 80

FAULTY = "fault:deferred-peer-lookup"

# Sequence 1's SWA page is given up in a group, then taken over from sequence 2: the known fault
# releases what the page maps to at the end of the group, not what it mapped to.
LEAK: tuple[Op, ...] = (
    ops.Alloc(1, 1),
    ops.Alloc(2, 1),
    ops.GroupBegin(),
    ops.FreeSwa(1),
    ops.Recover(1, 2, locked=True),
    ops.GroupEnd(),
)

Command = Callable[..., tuple[int, str, str]]
Snapshot = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns and no colour, whatever the tests run in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "KVCORE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture
def paper() -> io.StringIO:
    """What was printed on `console`."""
    return io.StringIO()


@pytest.fixture
def console(paper: io.StringIO) -> Console:
    """A console that prints as into a pipe."""
    return Console(file=paper, width=WIDTH, highlight=False)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line; answers status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def leak() -> Trace:
    """The known leak, as found on the faulty target, at page size 1."""
    geometry = Geometry(page_size=1, full_pages=4, swa_pages=4)
    verdict = replay(open_target(FAULTY), geometry, LEAK)
    assert verdict.violation is not None
    return Trace(new_header(FAULTY, geometry, seed=7, found_by="walker"), LEAK, verdict.violation)


@pytest.fixture
def leak_file(leak: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The known leak in a file of the current directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("leak.jsonl")
    write_trace(leak, path)
    return path


@pytest.fixture
def snapshot() -> Snapshot:
    """Asserts that a text is the snapshot of a name."""
    return assert_snapshot


def assert_snapshot(name: str, text: str) -> None:
    """``text`` is what the snapshot of this name holds, up to blanks at line ends. With
    KVCORE_UPDATE_SNAPSHOTS set the snapshot is written instead, to be read and committed."""
    lines = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("KVCORE_UPDATE_SNAPSHOTS"):
        path.write_text(lines, encoding="utf-8")
    assert lines == path.read_text(encoding="utf-8")

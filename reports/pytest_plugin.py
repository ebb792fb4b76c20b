"""The pytest plugin: a test that fails because a law broke leaves a shrunk trace behind.

Looks through the failure (exception groups and causes included) for broken laws, shrinks each,
writes its trace and adds the path and the replay command to the test's report. Works the same
serial and in the workers of pytest-xdist. Leaves out sessions in which nothing fails: nothing of
the harness is imported for them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvcore.invariants import LawBroken

SECTION = "kvcore trace"
DIRECTORY = "kvcore-traces"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kvcore-traces``."""
    parser.getgroup("kvcore").addoption(
        "--kvcore-traces",
        metavar="DIR",
        type=Path,
        default=Path(DIRECTORY),
        help=f"where the traces of broken laws are written (default: {DIRECTORY})",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a section to the report of a test that failed because a law broke."""
    report = yield
    if report.failed and call.excinfo is not None:
        directory: Path = item.config.getoption("--kvcore-traces")
        # Not the current directory: the test may have left it for another.
        base = item.config.invocation_params.dir
        for broken in broken_laws(call.excinfo.value):
            report.sections.append((SECTION, describe(broken, directory, base)))
    return report


def broken_laws(error: BaseException) -> Iterator[LawBroken]:
    """Every broken law in ``error``, one for each law and op kind."""
    # What was never imported was never raised.
    if "kvcore.invariants" not in sys.modules:
        return
    from kvcore.invariants import LawBroken

    told: set[tuple[str, str]] = set()
    for part in _parts(error):
        if isinstance(part, LawBroken) and part.violation.signature not in told:
            told.add(part.violation.signature)
            yield part


def _parts(error: BaseException) -> Iterator[BaseException]:
    """``error`` with its causes, and the same of each member of a group; each exception once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, BaseExceptionGroup):
            waiting += part.exceptions
        if part.__cause__ is not None:
            waiting.append(part.__cause__)


def describe(broken: LawBroken, directory: Path, base: Path) -> str:
    """Shrink a broken law and save it in ``directory``, seen from ``base``; what the test's report
    says of it."""
    # Whatever goes wrong here must not hide the failure of the test, nor end the session.
    try:
        from kvcore.reports.keeping import keep

        return keep(broken, directory, base)
    except Exception as error:
        return f"the trace could not be kept: {type(error).__name__}: {error}"

"""The edge of the command line: exit statuses, options in words, and errors in one sentence.

Covers what a command may end with and how bad input is told. The only place that reads the
environment. Leaves out the commands (`kvcore.reports.cli`).
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

import torch
import typer

from kvcore.kernels import kernels_for
from kvcore.models.trace import TraceError
from kvcore.reports.layout import messages
from kvcore.reports.trace_files import TraceFileError
from kvcore.strategies.campaign import HarnessFailed
from kvcore.targets.protocol import UnsupportedGeometry
from kvcore.targets.registry import UnknownTarget

TRACEBACK = "KVCORE_TRACEBACK"
"""Environment variable: set to anything but 0, a failure of the harness shows its traceback."""

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

# Typer carries click's errors within itself or takes those of an installed click, by version; its
# public BadParameter leads to the base of both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class Status(IntEnum):
    """Exit statuses of every command."""

    CLEAN = 0
    VIOLATION = 1
    BAD_INPUT = 2
    HARNESS_FAILED = 3
    INTERRUPTED = 130


class BadInput(Exception):
    """What the user gave cannot be used; the message is one sentence."""


def run_edge(command: Callable[[], object]) -> int:
    """Run ``command`` and turn however it ends into an exit status; says why on stderr."""
    _survive_any_encoding()
    try:
        _check_kernels()
        status = command()
    except (BadInput, UnknownTarget, UnsupportedGeometry, TraceError, TraceFileError) as error:
        return _say(str(error), Status.BAD_INPUT)
    except USAGE_ERROR as error:
        return _say(_usage(error), Status.BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", Status.INTERRUPTED)
    except Exception as error:
        return _failed(error)
    return int(status) if isinstance(status, int) else Status.CLEAN


def _check_kernels() -> None:
    """What KVCORE_KERNELS says must be possible on a CPU, where all commands work."""
    try:
        kernels_for(torch.device("cpu"))
    except (ValueError, ImportError) as error:
        raise BadInput(str(error)) from None


def _survive_any_encoding() -> None:
    """A terminal or pipe that cannot show a character shows a question mark instead."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _usage(error: Exception) -> str:
    """The message of a usage error as one line."""
    # A bad value names its option only in the long form.
    words = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
    return " ".join(words.split())


def _failed(error: Exception) -> int:
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error)
    # What failed in a worker carries a traceback as text, and that ends with what it is.
    lines = str(error).strip().splitlines() or ["no message"]
    line = lines[-1] if isinstance(error, HarnessFailed) else lines[0]
    return _say(
        f"the harness failed with {type(error).__name__}: {line} "
        f"(set {TRACEBACK}=1 to see the traceback)",
        Status.HARNESS_FAILED,
    )


def _say(sentence: str, status: Status) -> Status:
    messages().print(f"kvcore: {sentence}", markup=False, soft_wrap=True)
    return status


def parse_budget(text: str) -> float:
    """Seconds of "45", "30s", "2m" or "1.5h"; raises `BadInput`."""
    number, unit = (text[:-1], text[-1]) if text and text[-1] in SECONDS else (text, "")
    try:
        seconds = float(number) * SECONDS[unit]
    except ValueError:
        seconds = -1.0
    # Not a number and the infinities fail here too.
    if not 0 < seconds < float("inf"):
        raise BadInput(f"time budget is {text!r}, expected a time above 0 such as 45, 30s, 2m, 1h")
    return seconds


def at_least(least: int, value: int, name: str) -> int:
    """``value`` if it is large enough; raises `BadInput`."""
    if value < least:
        raise BadInput(f"{name} is {value}, expected at least {least}")
    return value

"""Traces on disk: written whole and at once, or line by line while a program runs, and read back.

Covers names, atomic writing, recording before each op, and errors of the file system in one
sentence. Leaves out the format of a line (`kvcore.models.trace`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from kvcore.invariants.run import Applying, Broke, Event
from kvcore.models.trace import Header, Trace, TraceError, decode_trace, encode_line, encode_trace

DEFAULT_DIRECTORY = Path("kvcore-traces")
SUFFIX = ".jsonl"
HASH_DIGITS = 8


class TraceFileError(Exception):
    """A trace that cannot be written; the message is one sentence."""


def read_trace(path: Path) -> Trace:
    """The trace in ``path``; raises `TraceError` with one sentence if there is none."""
    try:
        if path.is_dir():
            raise TraceError(f"{path}: is a directory, expected a trace file")
        # Reading from a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is not a regular file, expected a trace file")
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    return decode_trace(data, str(path))


def trace_name(trace: Trace) -> str:
    """A file name that says law, op kind and target, and differs between any two traces."""
    violation = trace.violation
    what = f"{violation.law}-{violation.op_kind.replace(' ', '-')}" if violation else "clean"
    digest = hashlib.sha256(encode_trace(trace)).hexdigest()[:HASH_DIGITS]
    return f"{what}-{_slug(trace.header.target)}-{digest}{SUFFIX}"


def _slug(target: str) -> str:
    """A target's name fit for a file name; of a path only the last part."""
    family, colon, rest = target.partition(":")
    short = f"{family}-{rest.rstrip('/').rsplit('/', 1)[-1]}" if colon else family
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short)


def save_trace(trace: Trace, directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Write ``trace`` under its own name into ``directory``, which is made if missing."""
    path = directory / trace_name(trace)
    with _writing(path):
        directory.mkdir(parents=True, exist_ok=True)
    write_trace(trace, path)
    return path


def write_trace(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``, see `write_whole`."""
    write_whole(encode_trace(trace), path)


def write_whole(data: bytes, path: Path) -> None:
    """Write ``data`` to ``path``: whole, or not at all. Raises `TraceFileError`.

    A link is followed; anything else than a regular file is left alone.
    """
    with _writing(path):
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise TraceFileError(f"{path}: cannot be written: it is not a regular file")
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            # mkstemp makes files that only their owner reads; a trace is there to be shared.
            os.chmod(scratch, 0o666 & ~_umask())
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise


def check_directory(directory: Path) -> None:
    """Raise `TraceFileError` unless traces can be written into ``directory``, which may be yet to
    be made: so that a long run does not find out at its end."""
    with _writing(directory):
        place = directory
        while not place.exists() and place != place.parent:
            place = place.parent
        usable = place.is_dir()
    if not usable:
        raise TraceFileError(f"{directory}: cannot be written: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise TraceFileError(f"{directory}: cannot be written: no permission to write to {place}")
    # Some file systems show only when asked that nothing can be made in them.
    with _writing(directory), tempfile.TemporaryFile(dir=place):
        pass


def check_file(path: Path) -> None:
    """Raise `TraceFileError` unless a trace can be written to ``path``, in a directory that is
    there."""
    with _writing(path):
        taken, missing = path.is_dir(), not path.parent.exists()
        special = path.exists() and not path.is_file()
    if taken:
        raise TraceFileError(f"{path}: cannot be written: it is a directory")
    if special:
        raise TraceFileError(f"{path}: cannot be written: it is not a regular file")
    if missing:
        raise TraceFileError(f"{path}: cannot be written: there is no directory {path.parent}")
    check_directory(path.parent)


def replay_command(path: Path, target: str | None = None) -> str:
    """The command that replays a trace, ready for a shell; ``target`` if it is not the trace's."""
    words = ["kvcore", "replay", str(path)]
    return shlex.join(words if target is None else [*words, "--target", target])


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be written: {error.strerror}") from None


class TraceWriter:
    """A listener that keeps the trace of a run on disk as the run goes: each op before it is
    applied, each line flushed. If the process dies in an op, the file ends with that op."""

    def __init__(self, path: Path, header: Header) -> None:
        with _writing(path):
            self._file = path.open("wb", buffering=0)
        self._file.write(encode_line(header))

    def __call__(self, event: Event) -> None:
        """Take one event of a run."""
        if isinstance(event, Applying):
            # Runs apply nothing but the ops of the vocabulary, so this is a line of the format.
            self._file.write(encode_line(event.op))
        elif isinstance(event, Broke):
            self._file.write(encode_line(event.violation))

    def close(self) -> None:
        """End the trace."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

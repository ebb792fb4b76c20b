"""A broken law that was raised as an exception, kept as a shrunk trace.

Leaves out where it was raised: `kvcore.reports.pytest_plugin` finds it in a test's failure.
"""

from __future__ import annotations

from pathlib import Path

from kvcore.invariants import BY_ID, LawBroken
from kvcore.models.trace import Trace, new_header
from kvcore.reports.trace_files import replay_command, save_trace
from kvcore.reports.wording import arguments, count
from kvcore.strategies.shrink import NotReproduced, shrink
from kvcore.targets.registry import UnknownTarget, open_target

NO_REPLAY = "not by this name; a target called python:MODULE:FACTORY can be replayed and shrunk"

MOST_OPS = 40
"""Of a longer program only the last ops are shown."""


def keep(broken: LawBroken, directory: Path, base: Path) -> str:
    """Shrink ``broken`` if its target can be opened by name, write its trace into ``directory``,
    and say in a few lines what broke, the program, the path and the replay command. Paths are
    relative to ``base``, where they can be."""
    trace, note = _smallest(broken)
    path = save_trace(trace, base / directory)
    if path.is_relative_to(base):
        path = path.relative_to(base)
    replay = replay_command(path) if _can_open(trace.header.target) else NO_REPLAY
    law = BY_ID[broken.violation.law]
    program = [f"{at:4}  {op.kind:<13}  {arguments(op)}" for at, op in enumerate(trace.ops)]
    return "\n".join(
        [
            f"{law.id}, {law.title}: {law.sentence}",
            f"{count(len(trace.ops), 'op')} on {trace.header.target}, {note}:",
            *(line.rstrip() for line in program[-MOST_OPS:]),
            f"trace:  {path}",
            f"replay: {replay}",
        ]
    )


def _can_open(target: str) -> bool:
    try:
        open_target(target)
    except UnknownTarget:
        return False
    return True


def _smallest(broken: LawBroken) -> tuple[Trace, str]:
    """The trace to keep, and how it came to be."""
    header = broken.header
    found = Trace(header, broken.program, broken.violation)
    try:
        open_target(header.target)
        shrunk = shrink(header.target, header.geometry, broken.program, broken.violation)
    except UnknownTarget:
        return found, "as found: a target of this name cannot be opened for shrinking"
    except NotReproduced:
        return found, "as found: it did not break again on a fresh target of this name"
    smaller = new_header(header.target, shrunk.geometry, seed=header.seed, found_by=header.found_by)
    executions = count(shrunk.executions, "execution")
    note = f"shrunk from {count(len(broken.program), 'op')} in {executions}"
    return Trace(smaller, shrunk.program, shrunk.violation), note

"""From a raw recording to a trace.

The trace stands for the calls from the first one on, up to one that there is no op for or that no
right allocator answers so; what it does not say is told in notes, with the call. Leaves out which
call becomes which op (`kvcore.targets.recording_calls`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvcore.models.trace import Trace, encode_trace, new_header
from kvcore.targets.recording_batches import splits_of
from kvcore.targets.recording_calls import Note, Translator
from kvcore.targets.recording_raw import Recorded
from kvcore.targets.recording_tape import RecordingError

MOST_ATTEMPTS = 32
"""How often a translation begins again because a row turned out to be two."""

FOUND_BY = "recording"
"""What the header of a trace from a recording names as its source."""


@dataclass(frozen=True, slots=True)
class Translation:
    """``calls``: how many were recorded. ``faithful``: how many of them, from the first on, the
    trace stands for; the next one is why it ends there, and has a note."""

    trace: Trace
    notes: tuple[Note, ...]
    calls: int
    faithful: int


def translate(recorded: Recorded) -> Translation:
    """The trace of a recording, up to the first call that ends it."""
    splits = splits_of(recorded)
    for _ in range(MOST_ATTEMPTS):
        translator = Translator(recorded.header, splits)
        faithful = _take_all(translator, recorded)
        if translator.wanted_split is None:
            break
        # Seen too late: with that row in two from the start it can be said.
        call, place = translator.wanted_split
        splits.setdefault(call, set()).add(place)
    header, target = recorded.header, recorded.header.target
    refused = any(call.ending == "refused" for call in recorded.calls[:faithful])
    if refused and target.startswith("sglang:") and "#" not in target:
        # Callers who do not ask for room first: as the target of this name is driven.
        target += "#exhaustion"
    trace_header = new_header(target, header.geometry, found_by=FOUND_BY)
    trace = Trace(trace_header, tuple(translator.rows.ops))
    return Translation(trace, tuple(translator.notes), len(recorded.calls), faithful)


def _take_all(translator: Translator, recorded: Recorded) -> int:
    """Translate the calls in order; how many there is a trace of."""
    if before := recorded.header.lent_before:
        text = f"{before} slots were lent before the recording began; no op says so"
        translator.note(0, text)
    for call in recorded.calls:
        if not translator.take(call, last=call.number == len(recorded.calls)):
            return call.number - 1
    translator.finish()
    if recorded.ended is not None:
        translator.note(len(recorded.calls), f"the recording ends here: {recorded.ended}")
    return len(recorded.calls)


def write_translation(translation: Translation, path: Path) -> None:
    """Write the trace to ``path``, whole or not at all.

    Raises:
        RecordingError: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(encode_trace(translation.trace))
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None

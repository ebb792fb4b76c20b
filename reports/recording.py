"""`kvcore translate`: the trace of a raw recording, and what of the recording it does not say.

Leaves out the translation (`kvcore.targets.recording_translation`) and what becomes of the trace.
"""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import output
from kvcore.reports.trace_files import check_file, replay_command, write_trace
from kvcore.reports.wording import count
from kvcore.targets.recorder import RAW_SUFFIX
from kvcore.targets.recording_raw import read_raw
from kvcore.targets.recording_tape import RecordingError
from kvcore.targets.recording_translation import Translation, translate

MOST_NOTES = 20
"""Notes that are shown; the last ones, since the end is what matters."""


def run(raw: Path, out: Path | None) -> Status:
    """Translate ``raw`` into ``out``, or beside it, and tell what is not in the trace."""
    try:
        recorded = read_raw(raw)
        path = _default(raw) if out is None else out
        check_file(path)
        if path.exists() and path.samefile(raw):
            raise BadInput(f"{path}: is the recording itself, expected another file for the trace")
        translation = translate(recorded)
    except RecordingError as error:
        raise BadInput(str(error)) from None
    write_trace(translation.trace, path)
    _show(translation, path)
    return Status.CLEAN


def _default(raw: Path) -> Path:
    """Where the recorder would have put the trace."""
    if raw.suffix != RAW_SUFFIX:
        raise BadInput(f"{raw}: does not end in {RAW_SUFFIX}; say with --out where the trace goes")
    return raw.with_suffix("")


def _show(translation: Translation, path: Path) -> None:
    console = output()
    trace, notes = translation.trace, translation.notes
    ops = count(len(trace.ops), "op")
    console.print(
        Text(f"{count(translation.calls, 'call')} of {trace.header.target}: {ops}"), soft_wrap=True
    )
    left_out = len(notes) - MOST_NOTES
    if left_out > 0:
        console.print(Text(f"  {count(left_out, 'note')} before these"))
    for note in notes[-MOST_NOTES:]:
        where = f"call {note.call}" if note.call else "before call 1"
        console.print(Text(f"  {where}: {note.text}"), soft_wrap=True)
    if translation.faithful < translation.calls:
        stands = f"The trace stands for calls 1 to {translation.faithful}"
        if translation.faithful == 0:
            stands = "The trace stands for no call"
        console.print(Text(f"{stands}; it is a program all the same."), soft_wrap=True)
    console.print(Text(f"Trace   {path}\nReplay  {replay_command(path)}"), soft_wrap=True)

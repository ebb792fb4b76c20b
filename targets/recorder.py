"""Records a live allocator: what an engine calls, so that a trace can be made of it.

`record` changes the class of the allocator object itself, and of its sides, to a subclass that
records, so that whatever the engine holds stays what it was: the same object, an instance of the
same classes. Only the outermost call is recorded; those that an allocator makes on itself follow
from it. Capacity queries and whatever else changes nothing are left alone. Names are recovered
later, when the recording is closed or by `kvcore translate`
(`kvcore.targets.recording_translation`). Leaves out calls from several threads at once, which no
allocator of the field takes, and bound methods that were looked up before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from types import TracebackType, new_class
from typing import Any

import msgspec
import torch

from kvcore.targets.recording_kinds import describe, sides_of
from kvcore.targets.recording_raw import SIDE_SHIFT, Call, RawHeader, Side, read_raw
from kvcore.targets.recording_tape import (
    COMPILED,
    UNREADABLE,
    Mark,
    RecordingError,
    Tape,
)
from kvcore.targets.recording_translation import Translation, translate, write_translation

MOST = 2**63 - 1
"""The largest number that a record holds."""

RAW_SUFFIX = ".raw"
"""What the raw recording's file name has behind that of its trace."""

Method = Callable[..., Any]
Peers = Callable[[torch.Tensor], Any]
"""The SWA slot of each full slot, as something with the buffer of an int64 vector."""


class _Wrapping:
    """Makes recording methods for the calls on one side."""

    def __init__(self, tape: Tape, side: Side, mapped: Any = None) -> None:
        """``mapped``: the allocator, where its mapping has the peers of an answer."""
        self._tape = tape
        self._side = side << SIDE_SHIFT
        self._mapped = mapped
        self._peers = _peers(mapped) if mapped is not None else None

    def make(self, name: str, method: Method) -> Method:
        """The recording form of the method of that name."""
        call, shape = METHODS[name]
        recorded = shape(self, self._side | call, method)
        return update_wrapper(recorded, method, updated=())

    def _shortest(self, form: str, tag: int, method: Method, other: Method) -> Method:
        """The compiled form of ``other``, to which it leaves all but the plainest calls; where
        there is none, that itself."""
        update_wrapper(other, method, updated=())
        if COMPILED is None:
            return other
        note = partial(_note, self._tape)
        recorded: Method = COMPILED.Recorded(
            self._tape, tag, form, method, other, note, self._answered, self._mapped
        )
        return recorded

    def index(self, tag: int, method: Method) -> Method:
        """A free: the hot one. Its tensor is called ``free_index`` in every release."""

        def write(free_index: Any) -> None:
            self._tape.tensor(tag, 0, free_index)

        return self._shortest("index", tag, method, self._guarded(tag, method, write))

    def page_ids(self, tag: int, method: Method) -> Method:
        """`free_page_ids`."""

        def write(page_ids: Any) -> None:
            self._tape.tensor(tag, 0, page_ids)

        return self._shortest("index", tag, method, self._guarded(tag, method, write))

    def segment(self, tag: int, method: Method) -> Method:
        """One tensor and where it starts in its row."""

        def write(free_index: Any, *, start_pos: int) -> None:
            self._tape.tensor(tag, _within(start_pos), free_index)

        return self._shortest("segment", tag, method, self._guarded(tag, method, write))

    def segments(self, tag: int, method: Method) -> Method:
        """Several of these; a generator is played once."""
        tape = self._tape

        def write(segments: Any) -> None:
            tape.plain(tag, len(segments))
            for index, start in segments:
                tape.tensor(Mark.PART, _within(start), index)

        guarded = self._guarded(tag, method, write)

        def recorded(self: Any, segments: Any) -> Any:
            return method(self, segments) if tape.inside else guarded(self, list(segments))

        return recorded

    def mapping(self, tag: int, method: Method) -> Method:
        """`set_full_to_swa_mapping`."""

        def write(full_indices: Any, swa_indices: Any) -> None:
            self._tape.tensor(tag, 0, full_indices)
            self._tape.tensor(Mark.PART, 0, swa_indices)

        return self._shortest("pair", tag, method, self._guarded(tag, method, write))

    def unmapping(self, tag: int, method: Method) -> Method:
        """`clear_full_to_swa_mapping`."""

        def write(full_indices: Any) -> None:
            self._tape.tensor(tag, 0, full_indices)

        return self._shortest("index", tag, method, self._guarded(tag, method, write))

    def recovery(self, tag: int, method: Method) -> Method:
        """`recover_tombstone`."""

        def write(kept_full: Any, incoming_full: Any) -> None:
            self._tape.tensor(tag, 0, kept_full)
            self._tape.tensor(Mark.PART, 0, incoming_full)

        return self._shortest("pair", tag, method, self._guarded(tag, method, write))

    def bare(self, tag: int, method: Method) -> Method:
        """A call that has nothing to write down."""

        def write(*arguments: Any, **named: Any) -> None:
            self._tape.plain(tag)

        return self._guarded(tag, method, write)

    def group(self, tag: int, method: Method) -> Method:
        """Begin and end of a group, which have to be cheap too."""
        return self._shortest("bare", tag, method, self.bare(tag, method))

    def number(self, tag: int, method: Method) -> Method:
        """`alloc`."""

        def write(need_size: int, **more: Any) -> None:
            self._tape.plain(tag, _within(need_size))

        return self._shortest("number", tag, method, self._guarded(tag, method, write, lends=True))

    def extend(self, tag: int, method: Method) -> Method:
        """`alloc_extend`; the lengths are read where they are on the host."""

        def write(
            prefix_lens: Any,
            prefix_lens_cpu: Any,
            seq_lens: Any,
            seq_lens_cpu: Any,
            last_loc: Any,
            extend_num_tokens: int,
            **more: Any,
        ) -> None:
            tape = self._tape
            tape.plain(tag, _within(extend_num_tokens))
            tape.tensor(Mark.PART, 0, prefix_lens_cpu)
            tape.tensor(Mark.PART, 0, seq_lens_cpu)
            tape.tensor(Mark.PART, 0, last_loc)

        return self._shortest("extend", tag, method, self._guarded(tag, method, write, lends=True))

    def tail(self, tag: int, method: Method) -> Method:
        """`alloc_extend_swa_tail`: a batch of one, and where its tail ends (-1: with the row)."""

        def write(
            prefix_lens: Any,
            prefix_lens_cpu: Any,
            seq_lens: Any,
            seq_lens_cpu: Any,
            last_loc: Any,
            extend_num_tokens: int,
            swa_tail_len: int,
            swa_tail_end: int | None = None,
            **more: Any,
        ) -> None:
            tape, end = self._tape, -1 if swa_tail_end is None else _within(swa_tail_end)
            tape.plain(tag, _within(swa_tail_len))
            tape.tensor(Mark.PART, 0, prefix_lens_cpu)
            tape.tensor(Mark.PART, 0, seq_lens_cpu)
            tape.tensor(Mark.PART, 0, last_loc)
            tape.octets(Mark.PART, 0, end.to_bytes(8, "little", signed=True))

        return self._guarded(tag, method, write, lends=True)

    def decode(self, tag: int, method: Method) -> Method:
        """`alloc_decode`."""

        def write(seq_lens: Any, seq_lens_cpu: Any, last_loc: Any, **more: Any) -> None:
            self._tape.plain(tag)
            self._tape.tensor(Mark.PART, 0, seq_lens_cpu)
            self._tape.tensor(Mark.PART, 0, last_loc)

        return self._shortest("decode", tag, method, self._guarded(tag, method, write, lends=True))

    def _guarded(
        self, tag: int, method: Method, write: Callable[..., None], *, lends: bool = False
    ) -> Method:
        """Write, call, and if it ``lends`` write the answer; nothing of a call within a call.

        ``write`` has the parameters of the field under their names. What it cannot write is for the
        method to refuse: a call that raises then leaves nothing on file.
        """
        tape, answered = self._tape, self._answered

        def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
            if tape.inside:
                return method(self, *arguments, **named)
            tape.inside = True
            start, is_written = tape.tail, True
            try:
                try:
                    write(*arguments, **named)
                except Exception:
                    tape.erase(start)
                    is_written = False
                try:
                    answer = method(self, *arguments, **named)
                except BaseException as error:
                    if is_written:
                        _note(tape, error)
                    raise
                if not is_written:
                    tape.plain(tag | UNREADABLE)
                if lends:
                    answered(answer)
                return answer
            finally:
                tape.inside = False

        return recorded

    def _answered(self, answer: Any) -> None:
        tape = self._tape
        if answer is None:
            tape.plain(Mark.ANSWER, -1)
            return
        tape.tensor(Mark.ANSWER, 0, answer)
        if self._peers is not None:
            tape.octets(Mark.PART, 0, self._peers(answer))


def _either(tape: Tape, method: Method, first: Any, of_first: Method, of_other: Method) -> Method:
    """One method for both sides; most of its calls are the allocator's own."""
    if COMPILED is not None:
        shared: Method = COMPILED.Either(tape, method, first, of_first, of_other)
        return shared

    def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
        if tape.inside:
            return method(self, *arguments, **named)
        return (of_first if self is first else of_other)(self, *arguments, **named)

    return recorded


def _within(number: Any) -> int:
    """A number as a record holds it; what is beyond is the allocator's to refuse."""
    return max(-MOST, min(int(number), MOST))


def _note(tape: Tape, error: BaseException) -> None:
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    tape.octets(Mark.RAISED, 0, text.encode(errors="replace"))


Shape = Callable[[_Wrapping, int, Method], Method]

METHODS: dict[str, tuple[Call, Shape]] = {
    "alloc": (Call.ALLOC, _Wrapping.number),
    "alloc_extend": (Call.EXTEND, _Wrapping.extend),
    "alloc_decode": (Call.DECODE, _Wrapping.decode),
    "alloc_extend_swa_tail": (Call.SWA_TAIL, _Wrapping.tail),
    "free": (Call.FREE, _Wrapping.index),
    "free_swa": (Call.FREE_SWA, _Wrapping.index),
    "free_full": (Call.FREE_FULL, _Wrapping.index),
    "free_segment": (Call.FREE_SEGMENT, _Wrapping.segment),
    "free_swa_segment": (Call.FREE_SWA_SEGMENT, _Wrapping.segment),
    "free_full_segment": (Call.FREE_FULL_SEGMENT, _Wrapping.segment),
    "free_segments": (Call.FREE_SEGMENTS, _Wrapping.segments),
    "free_swa_segments": (Call.FREE_SWA_SEGMENTS, _Wrapping.segments),
    "free_full_segments": (Call.FREE_FULL_SEGMENTS, _Wrapping.segments),
    "free_page_ids": (Call.FREE_PAGES, _Wrapping.page_ids),
    "free_group_begin": (Call.GROUP_BEGIN, _Wrapping.group),
    "free_group_end": (Call.GROUP_END, _Wrapping.group),
    "set_full_to_swa_mapping": (Call.MAP, _Wrapping.mapping),
    "clear_full_to_swa_mapping": (Call.UNMAP, _Wrapping.unmapping),
    "recover_tombstone": (Call.RECOVER, _Wrapping.recovery),
    "clear": (Call.CLEAR, _Wrapping.bare),
    "resize": (Call.RESIZE, _Wrapping.bare),
    "restore_state": (Call.RESTORE, _Wrapping.bare),
}
"""Every method of the field that changes an allocator, and how its arguments are written."""

_recorded: set[int] = set()
"""The objects that are being recorded now; each is kept alive by its recording."""


class Recording:
    """A recording under way. As a context manager it is closed at the end.

    ``raw``: the file that is being written. ``trace``: where `close` writes the trace.
    """

    def __init__(self, allocator: Any, path: Path, header: RawHeader, kind: str) -> None:
        self.trace = path
        self.raw = path.with_name(path.name + RAW_SUFFIX)
        self._objects = [(Side.WHOLE, allocator), *sides_of(allocator, kind)]
        if any(id(each) in _recorded for _, each in self._objects):
            raise RecordingError(f"this {header.allocator} is being recorded already")
        self._tape = Tape(self.raw, msgspec.json.encode(header))
        self._translation: Translation | None = None
        self._classes: list[tuple[Any, type]] = []
        mapped = allocator if header.geometry.hybrid else None
        self._attach([allocator], [_Wrapping(self._tape, Side.WHOLE, mapped)])
        sides = self._objects[1:]
        if sides:
            wrappings = [_Wrapping(self._tape, side) for side, _ in sides]
            self._attach([each for _, each in sides], wrappings)

    def _attach(self, objects: list[Any], wrappings: list[_Wrapping]) -> None:
        """Make the objects, which are of one class, instances of one subclass of the same name.

        Not of one each: Python finds attributes slowly where classes change from call to call. And
        not by attributes of the objects, which slow all their others.
        """
        plain = type(objects[0])
        body: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        for name in METHODS.keys() & set(dir(plain)):
            method = getattr(plain, name)
            recorded = [wrapping.make(name, method) for wrapping in wrappings]
            if len(objects) > 1:
                recorded = [_either(self._tape, method, objects[0], *recorded)]
            body[name] = recorded[0]
        subclass = new_class(plain.__name__, (plain,), exec_body=lambda own: own.update(body))
        for each in objects:
            each.__class__ = subclass
            self._classes.append((each, plain))
            _recorded.add(id(each))

    def detach(self) -> None:
        """Stop recording: the allocator is as it was, the raw file is complete."""
        for each, plain in self._classes:
            each.__class__ = plain
            _recorded.discard(id(each))
        self._classes, self._objects = [], []
        self._tape.close()

    def close(self) -> Translation:
        """Stop recording, translate, and write the trace; what of it could not be said is in the
        answer, and then the raw file stays.

        Raises:
            RecordingError: the trace cannot be written; the raw file stays.
        """
        self.detach()
        if self._translation is None:
            translation = translate(read_raw(self.raw))
            write_translation(translation, self.trace)
            self._translation = translation
            if not translation.notes:
                self.raw.unlink()
        return self._translation

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RecordingError as failed:
            if error is None:
                raise
            # What the engine raised matters more.
            warnings.warn(str(failed), stacklevel=2)


def record(allocator: Any, path: str | Path, *, target: str | None = None) -> Recording:
    """Record every call on ``allocator`` from now on; call it right after the allocator is built.

    Args:
        allocator: a token, paged, hybrid or pure SWA allocator of kvcore or of an SGLang release.
        path: where the trace goes; the raw recording is beside it, with `RAW_SUFFIX` behind the
            name, and must not be there yet.
        target: what the trace names as its target; found out from the class if left out.

    Raises:
        RecordingError: an allocator of an unknown kind, one that is recorded already, pools larger
            than a trace can name, or a path that cannot be written.
    """
    header, kind = describe(allocator, target)
    trace = Path(path)
    # Now, and not when a session of hours has ended.
    if trace.exists():
        raise RecordingError(f"{trace}: exists already: remove it, or record to another path")
    return Recording(allocator, trace, header, kind)


def _peers(allocator: Any) -> Peers:
    """Reads the mapping for an answer. On a CPU through numpy, which shares its memory."""
    seen: Any = None
    view: Any = None

    def read(slots: torch.Tensor) -> Any:
        nonlocal seen, view
        mapping = allocator.full_to_swa_index_mapping
        if mapping.device.type != "cpu" or slots.device.type != "cpu":
            return mapping[slots.long()].cpu().numpy().tobytes()
        if mapping is not seen:
            seen, view = mapping, mapping.numpy()
        return view[slots.numpy()].tobytes()

    return read

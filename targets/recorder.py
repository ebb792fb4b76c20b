"""Records a live allocator: what an engine calls, so that a trace can be made of it.

`record` changes the class of the allocator object itself, and of its sides, to a subclass that
records, so that whatever the engine holds stays what it was: the same object, an instance of the
same classes. Only the outermost call is recorded; those that an allocator makes on itself follow
from it. Capacity queries and whatever else changes nothing are left alone. Names are recovered
later, when the recording is closed or by `kvcore translate`
(`kvcore.targets.recording_translation`). Leaves out calls from several threads at once, which no
allocator of the field takes, bound methods that were looked up before, and copies of the allocator:
those that `copy` and `pickle` make are plain ones. How a call is written down is in
`kvcore.targets.recording_methods`.
"""

from __future__ import annotations

import copyreg
import warnings
from functools import partial
from pathlib import Path
from types import TracebackType, new_class
from typing import Any
from weakref import WeakSet

import msgspec

from kvcore.targets.recording_kinds import describe, sides_of
from kvcore.targets.recording_methods import METHODS, Wrapping, either
from kvcore.targets.recording_raw import RawHeader, Side, read_raw
from kvcore.targets.recording_tape import RecordingError, Tape
from kvcore.targets.recording_translation import Translation, translate, write_translation

RAW_SUFFIX = ".raw"
"""What the raw recording's file name has behind that of its trace."""

_recording_classes: WeakSet[type] = WeakSet()
"""The classes that record; an instance of one is being recorded."""

_NEW, _NEW_NAMED = vars(copyreg)["__newobj__"], vars(copyreg)["__newobj_ex__"]
"""What `object.__reduce_ex__` makes objects with."""


class Recording:
    """A recording under way. As a context manager it is closed at the end.

    ``raw``: the file that is being written. ``trace``: where `close` writes the trace.
    """

    def __init__(self, allocator: Any, path: Path, header: RawHeader, kind: str) -> None:
        self.trace = path
        self.raw = path.with_name(path.name + RAW_SUFFIX)
        self._objects = [(Side.WHOLE, allocator), *sides_of(allocator, kind)]
        for _, each in self._objects:
            _require_plain(each)
        self._tape = Tape(self.raw, msgspec.json.encode(header))
        self._translation: Translation | None = None
        self._classes = [(each, type(each)) for _, each in self._objects]
        try:
            self._attach(header)
        except BaseException as error:
            self._restore()
            self._tape.discard()
            if isinstance(error, Exception):
                raise RecordingError(f"{header.allocator} cannot be recorded: {error}") from error
            raise

    def _attach(self, header: RawHeader) -> None:
        """Make the objects instances of subclasses of the same names, one for each class.

        Not one for each object: Python finds attributes slowly where classes change from call to
        call. And not by attributes of the objects, which slow all their others.
        """
        members: dict[type, list[Wrapping]] = {}
        for side, each in self._objects:
            mapped = side is Side.WHOLE and header.geometry.hybrid
            wrapping = Wrapping(self._tape, side, each, mapped=mapped)
            members.setdefault(type(each), []).append(wrapping)
        subclasses = {
            plain: _recording_class(self._tape, plain, wrappings)
            for plain, wrappings in members.items()
        }
        for each, plain in self._classes:
            each.__class__ = subclasses[plain]

    def _restore(self) -> None:
        for each, plain in self._classes:
            if type(each) is not plain:
                each.__class__ = plain

    def detach(self) -> None:
        """Stop recording: the allocator is as it was, the raw file is complete."""
        self._restore()
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
    _require_plain(allocator)
    header, kind = describe(allocator, target)
    trace = Path(path)
    # Now, and not when a session of hours has ended.
    if trace.exists():
        raise RecordingError(f"{trace}: exists already: remove it, or record to another path")
    return Recording(allocator, trace, header, kind)


def _require_plain(allocator: Any) -> None:
    if type(allocator) in _recording_classes:
        raise RecordingError(f"this {type(allocator).__name__} is being recorded already")


def _recording_class(tape: Tape, plain: type, wrappings: list[Wrapping]) -> type:
    """A subclass that records calls on one object, or on two."""

    base: Any = plain

    def reduce(self: Any, protocol: Any) -> Any:
        return _as_plain(base.__reduce_ex__(self, protocol), type(self), plain)

    body: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__reduce_ex__": reduce,
    }
    for name in METHODS.keys() & set(dir(plain)):
        method = getattr(plain, name)
        recorded = [wrapping.make(name, method) for wrapping in wrappings]
        body[name] = recorded[0]
        if len(recorded) > 1:
            body[name] = either(tape, method, wrappings[0].owner, *recorded)
    subclass = new_class(plain.__name__, (plain,), exec_body=lambda own: own.update(body))
    _recording_classes.add(subclass)
    return subclass


def _as_plain(answer: Any, recording: type, plain: Any) -> Any:
    """What `__reduce_ex__` answers, for an object of the plain class: a copy is not recorded."""
    if isinstance(answer, str):
        return answer
    make, arguments, *rest = answer
    arguments = tuple(plain if each is recording else each for each in arguments)
    # Of these two pickle demands the class that the object itself has.
    if make is _NEW:
        make = plain.__new__
    elif make is _NEW_NAMED:
        _, by_place, by_name = arguments
        make, arguments = partial(plain.__new__, plain, *by_place, **by_name), ()
    elif make is recording:
        make = plain
    return (make, arguments, *rest)

"""The recording form of each method of the field: what it is called with is written down, and what
it answers.

A call is written before it is made, and not at all if it is interrupted before; an answer is
written with its peers, or not at all. The recording itself never makes a call raise: what cannot be
written is on file as unreadable. Leaves out how an allocator gets these methods
(`kvcore.targets.recorder`) and the file (`kvcore.targets.recording_tape`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.targets.recording_raw import SIDE_SHIFT, Call, Side
from kvcore.targets.recording_tape import COMPILED, UNREADABLE, Mark, Tape, as_vector, holds_numbers

MOST = 2**63 - 1
"""The largest number that a record holds."""

Method = Callable[..., Any]
Peers = Callable[[torch.Tensor | None], bytes | None]
"""The SWA slot of each slot of an answer, as the bytes of int64; None if that cannot be said."""


class Wrapping:
    """Makes recording methods for the calls on one object. ``owner``: that object; calls on any
    other instance of its class are made and no more. ``mapped``: whether its mapping has the peers
    of an answer."""

    def __init__(self, tape: Tape, side: Side, owner: Any, *, mapped: bool = False) -> None:
        self.owner = owner
        self._tape = tape
        self._side = side << SIDE_SHIFT
        self._peers = _peers(owner) if mapped else None

    def make(self, name: str, method: Method) -> Method:
        """The recording form of the method of that name."""
        call, shape = METHODS[name]
        return _like(method, shape(self, self._side | call, method))

    def _shortest(self, form: str, tag: int, method: Method, other: Method) -> Method:
        """The compiled form of ``other``, to which it leaves all but the plainest calls; where
        there is none, that itself."""
        _like(method, other)
        if COMPILED is None:
            return other
        recorded: Method = COMPILED.Recorded(
            self._tape,
            tag,
            form,
            method,
            other,
            partial(_note, self._tape),
            self._answered,
            self.owner,
            self._peers is not None,
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
        """Several of these; a generator is played once, before the call."""
        tape, owner = self._tape, self.owner

        def write(segments: Any) -> None:
            tape.plain(tag, len(segments))
            for index, start in segments:
                tape.tensor(Mark.PART, _within(start), index)

        guarded = self._guarded(tag, method, write)

        def recorded(self: Any, segments: Any) -> Any:
            if tape.inside or self is not owner:
                return method(self, segments)
            if not isinstance(segments, Iterator):
                return guarded(self, segments)
            taken, error = _played(segments)
            if error is None:
                return guarded(self, taken)
            return cut_off(taken, error)(self, _again(taken, error))

        def cut_off(taken: list[Any], error: BaseException) -> Method:
            return self._guarded(tag, method, lambda _: write(taken))

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
        tape, owner, answered = self._tape, self.owner, self._answered

        def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
            if tape.inside or self is not owner:
                return method(self, *arguments, **named)
            tape.inside = True
            start, is_written = tape.tail, True
            try:
                try:
                    try:
                        write(*arguments, **named)
                    except Exception:
                        is_written = False
                        tape.erase(start)
                        tape.plain(tag | UNREADABLE)
                except BaseException:
                    # Interrupted, and so the call is not made.
                    tape.erase(start)
                    raise
                try:
                    answer = method(self, *arguments, **named)
                except BaseException as error:
                    if is_written or not isinstance(error, Exception):
                        _note(tape, error)
                    else:
                        tape.erase(start)
                    raise
                if lends:
                    answered(answer)
                return answer
            finally:
                tape.inside = False

        return recorded

    def _answered(self, answer: Any) -> None:
        """Write an answer with its peers, or as unreadable, or if interrupted not at all."""
        tape = self._tape
        start = tape.tail
        try:
            try:
                self._write_answer(answer)
            except Exception:
                tape.erase(start)
                tape.plain(Mark.ANSWER | UNREADABLE)
        except BaseException:
            tape.erase(start)
            raise

    def _write_answer(self, answer: Any) -> None:
        tape = self._tape
        if answer is None:
            tape.plain(Mark.ANSWER, -1)
            return
        # Once, since it may wait for a device.
        slots = as_vector(answer)
        peers = self._peers(slots) if self._peers is not None else None
        tape.tensor(Mark.ANSWER, 0, slots)
        if peers is not None:
            tape.octets(Mark.PART, 0, peers)
        elif self._peers is not None:
            tape.plain(Mark.PART | UNREADABLE)


def either(tape: Tape, method: Method, first: Any, of_first: Method, of_other: Method) -> Method:
    """One method for two objects of one class."""
    if COMPILED is not None:
        shared: Method = COMPILED.Either(tape, method, first, of_first, of_other)
        return _like(method, shared)

    def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
        # Most of the calls are those of the allocator itself.
        if tape.inside:
            return method(self, *arguments, **named)
        return (of_first if self is first else of_other)(self, *arguments, **named)

    return _like(method, recorded)


def _like(method: Method, recorded: Method) -> Method:
    """``recorded``, looking like the method that it records."""
    update_wrapper(recorded, method, updated=())
    described: Any = recorded
    with suppress(TypeError, ValueError):
        # Not every callable has one that can be told.
        described.__signature__ = inspect.signature(method)
    return recorded


def _played(segments: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    """What an iterator yields, and what it raises after it."""
    taken: list[Any] = []
    try:
        for each in segments:
            taken.append(each)
    except BaseException as error:
        return taken, error
    return taken, None


def _again(taken: list[Any], error: BaseException) -> Iterator[Any]:
    """The same once more."""
    yield from taken
    raise error


def _within(number: Any) -> int:
    """A number as a record holds it; what is beyond is the allocator's to refuse."""
    return max(-MOST, min(int(number), MOST))


def _note(tape: Tape, error: BaseException) -> None:
    """Write down that a call raised; nothing that comes up meanwhile hides the error."""
    start = tape.tail
    try:
        try:
            said = str(error).splitlines()
            text = f"{type(error).__name__}: {said[0] if said else 'no message'}"
        except Exception:
            text = f"{type(error).__name__}: a message that cannot be read"
        tape.octets(Mark.RAISED, 0, text.encode(errors="replace"))
    except BaseException as failed:
        tape.erase(start)
        tape.plain(Mark.RAISED)
        if not isinstance(failed, Exception):
            raise


Shape = Callable[[Wrapping, int, Method], Method]

METHODS: dict[str, tuple[Call, Shape]] = {
    "alloc": (Call.ALLOC, Wrapping.number),
    "alloc_extend": (Call.EXTEND, Wrapping.extend),
    "alloc_decode": (Call.DECODE, Wrapping.decode),
    "alloc_extend_swa_tail": (Call.SWA_TAIL, Wrapping.tail),
    "free": (Call.FREE, Wrapping.index),
    "free_swa": (Call.FREE_SWA, Wrapping.index),
    "free_full": (Call.FREE_FULL, Wrapping.index),
    "free_segment": (Call.FREE_SEGMENT, Wrapping.segment),
    "free_swa_segment": (Call.FREE_SWA_SEGMENT, Wrapping.segment),
    "free_full_segment": (Call.FREE_FULL_SEGMENT, Wrapping.segment),
    "free_segments": (Call.FREE_SEGMENTS, Wrapping.segments),
    "free_swa_segments": (Call.FREE_SWA_SEGMENTS, Wrapping.segments),
    "free_full_segments": (Call.FREE_FULL_SEGMENTS, Wrapping.segments),
    "free_page_ids": (Call.FREE_PAGES, Wrapping.page_ids),
    "free_group_begin": (Call.GROUP_BEGIN, Wrapping.group),
    "free_group_end": (Call.GROUP_END, Wrapping.group),
    "set_full_to_swa_mapping": (Call.MAP, Wrapping.mapping),
    "clear_full_to_swa_mapping": (Call.UNMAP, Wrapping.unmapping),
    "recover_tombstone": (Call.RECOVER, Wrapping.recovery),
    "clear": (Call.CLEAR, Wrapping.bare),
    "resize": (Call.RESIZE, Wrapping.bare),
    "restore_state": (Call.RESTORE, Wrapping.bare),
}
"""Every method of the field that changes an allocator, and how its arguments are written."""


def _peers(allocator: Any) -> Peers:
    """Reads the mapping for an answer. On a CPU through numpy, which shares its memory."""
    seen: Any = None
    table: npt.NDArray[Any] | None = None

    def read(slots: torch.Tensor | None) -> bytes | None:
        nonlocal seen, table
        try:
            mapping = allocator.full_to_swa_index_mapping
            if slots is None or mapping.ndim != 1 or not holds_numbers(mapping):
                return None
            if not mapping.is_cpu:
                return _from_device(mapping, slots)
            if mapping is not seen or table is None:
                seen, table = mapping, mapping.numpy()
            peers: bytes = table[slots.numpy()].astype(np.int64, copy=False).tobytes()
            return peers
        except Exception:
            # Whatever it is that stands where the mapping or a slot should.
            return None

    return read


def _from_device(mapping: torch.Tensor, slots: torch.Tensor) -> bytes | None:
    """The entries of a mapping that is not on the host; waits for its device."""
    size = mapping.shape[0]
    # The device would not get over an index out of bounds.
    if bool(((slots < -size) | (slots >= size)).any()):
        return None
    found = as_vector(mapping[slots])
    return found.numpy().tobytes() if found is not None else None

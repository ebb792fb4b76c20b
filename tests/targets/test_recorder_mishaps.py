"""Recording while things go wrong: interrupts, no room on the disk, errors, unusual arguments.

The engine's calls do what they do without a recording, nothing is written where the file was, and
what is on file accuses nobody. Leaves out answers that cannot be written (`test_recorder_answers`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcore.models import ops
from kvcore.targets import Recording, record, recording_tape
from kvcore.targets.recording_raw import Call, RawCall, read_raw
from kvcore.targets.recording_tape import Tape
from kvcore.targets.recording_translation import Translation, translate

torch.set_num_threads(1)

NOTHING = torch.empty(0, dtype=torch.int64)
HEAD = recording_tape.HEAD


class Odd(SWATokenToKVPoolAllocator):
    """Answers what it is told to."""

    answer: Any = None

    def alloc(self, need_size: int) -> Any:
        return self.answer

    def alloc_extend(self, *arguments: Any, **named: Any) -> Any:
        return self.answer


def hybrid(slots: int = 8, kind: type[Any] = SWATokenToKVPoolAllocator) -> Any:
    return kind(slots, slots, 1, torch.int64, "cpu", None, False)


def calls_of(recording: Recording) -> tuple[RawCall, ...]:
    recording.detach()
    return read_raw(recording.raw).calls


def translation_of(recording: Recording) -> Translation:
    recording.detach()
    return translate(read_raw(recording.raw))


def fill(allocator: Any, tape: Tape, left: int = 1) -> int:
    """Frees of nothing until only ``left`` more records fit; how many."""
    calls = 0
    while tape.room - tape.tail > 16 * left:
        allocator.free(NOTHING)
        calls += 1
    return calls


def nothing_behind(tape: Tape) -> bool:
    """Whether the file is empty behind its last record, as it must be if the process dies now."""
    return not any(tape.buffer[tape.tail :])


def once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Callable[..., Any]
) -> None:
    """``instead`` is called once in place of a function, and is given that first."""
    real = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        return instead(real, *arguments)

    monkeypatch.setattr(owner, name, called)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupted_after(real: Callable[..., Any], *arguments: Any) -> None:
    real(*arguments)
    raise KeyboardInterrupt


def no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


# The file.


class Failing:
    """A file that fails to be cut to its size, once."""

    def __init__(self, file: Any, error: BaseException) -> None:
        self.file, self.errors = file, [error]
        self.closed = False

    def fileno(self) -> int:
        number: int = self.file.fileno()
        return number

    def truncate(self, size: int) -> None:
        if self.errors:
            raise self.errors.pop()
        self.file.truncate(size)

    def close(self) -> None:
        self.file.close()
        self.closed = True


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.filterwarnings("ignore:.*the recording ended here")
def test_an_end_for_want_of_room_that_fails_leaves_the_engine_its_calls(
    error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_tape, "FIRST_BYTES", 2**12)
    allocator = hybrid()
    recording = record(allocator, path)
    tape: Any = recording._tape
    made = fill(allocator, tape)
    tape._file = Failing(tape._file, error)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    raised = []
    for _ in range(4):
        try:
            allocator.free(NOTHING)
        except KeyboardInterrupt as caught:
            raised.append(caught)
    assert raised == [error] * isinstance(error, KeyboardInterrupt)
    assert tape.room == -1
    assert allocator.alloc(2).tolist() == [1, 2]
    recording.detach()
    recorded = read_raw(recording.raw)
    assert recorded.ended == "there was no room for more"
    assert made <= len(recorded.calls) <= made + 1


@pytest.mark.parametrize("place", ["reserve", "address", "pages"])
@pytest.mark.parametrize("instead", [interrupted, interrupted_after])
def test_a_recording_goes_on_behind_a_growth_that_was_interrupted(
    place: str, instead: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_tape, "FIRST_BYTES", 2**12)
    allocator = hybrid(2**11)
    recording = record(allocator, path)
    large = allocator.alloc(1)
    owner, name = {
        "reserve": (os, "posix_fallocate"),
        "address": (recording_tape, "_address_of"),
        "pages": (Tape, "_make_ready"),
    }[place]
    once(monkeypatch, owner, name, instead)
    with pytest.raises(KeyboardInterrupt):
        allocator.free_swa(torch.zeros(2**11, dtype=torch.int64))
    assert nothing_behind(recording._tape)
    allocator.free_swa(large)
    allocator.free_full(large)
    slots = allocator.alloc(2**11)
    allocator.free(slots)
    recording.detach()
    recorded = read_raw(recording.raw)
    assert recorded.ended is None
    assert [call.vectors for call in recorded.calls if call.call is not Call.ALLOC] == [
        [large.tolist()],
        [large.tolist()],
        [slots.tolist()],
    ]


@pytest.mark.parametrize("place", ["reserve", "address"])
def test_a_recording_may_be_ended_in_the_middle_of_a_growth(
    place: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a handler of signals."""
    monkeypatch.setattr(recording_tape, "FIRST_BYTES", 2**12)
    allocator = hybrid()
    recording = record(allocator, path)
    free = allocator.free
    made = fill(allocator, recording._tape)

    def end_it(real: Callable[..., Any], *arguments: Any) -> Any:
        if place == "reserve":
            recording.detach()
        answer = real(*arguments)
        recording.detach()
        return answer

    owner: Any = os if place == "reserve" else recording_tape
    once(
        monkeypatch, owner, {"reserve": "posix_fallocate", "address": "_address_of"}[place], end_it
    )
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(3):
            free(NOTHING)
    assert not warned
    assert recording._tape.room == -1
    assert made <= len(calls_of(recording)) <= made + 1


@pytest.mark.parametrize("record_number", [1, 2, 3])
def test_a_recording_may_be_ended_in_the_middle_of_a_record(
    record_number: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call, its answer, and the peers."""
    allocator = hybrid(kind=Odd)
    allocator.answer = torch.tensor([1, 2], dtype=torch.int32)
    recording = record(allocator, path)
    left = record_number

    class Ending:
        """Ends the recording before it writes that head."""

        size = HEAD.size

        def pack_into(self, *arguments: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                recording.detach()
            HEAD.pack_into(*arguments)

    monkeypatch.setattr(recording_tape, "HEAD", Ending())
    assert allocator.alloc(need_size=2) is allocator.answer
    endings = [call.ending for call in calls_of(recording)]
    assert endings == [[], ["interrupted"], ["interrupted"]][record_number - 1]


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_a_full_disk_does_not_raise_where_warnings_are_errors(
    left: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_tape, "FIRST_BYTES", 2**12)
    calls: list[Callable[[Any], Any]] = [
        lambda each: each.alloc(1),
        # Nothing of this can be written but that it was made.
        lambda each: each.alloc_extend(1, 2, extend_num_tokens="all"),
    ]
    for number, call in enumerate(calls):
        allocator = hybrid(kind=Odd)
        allocator.answer = torch.tensor([1])
        recording = record(allocator, path.with_name(f"{number}.jsonl"))
        tape = recording._tape
        fill(allocator, tape, left)
        if tape.room - tape.tail == 16:
            allocator.free(NOTHING)
        with monkeypatch.context() as full, warnings.catch_warnings():
            full.setattr(os, "posix_fallocate", no_room)
            warnings.simplefilter("error")
            for _ in range(4):
                assert call(allocator) is allocator.answer
        recording.detach()
        assert read_raw(recording.raw).ended == "there was no room for more"


# Interrupts.


class Pack:
    """The head of records, which is interrupted, once, before or after it is written."""

    size = recording_tape.HEAD.size

    def __init__(self, *, after: bool) -> None:
        self.after, self.armed = after, True

    def pack_into(self, *arguments: Any) -> None:
        armed, self.armed = self.armed, False
        if self.after or not armed:
            HEAD.pack_into(*arguments)
        if armed:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
def test_a_call_that_is_interrupted_while_it_is_written_is_not_made_and_not_on_file(
    after: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(6)
    monkeypatch.setattr(recording_tape, "HEAD", Pack(after=after))
    with pytest.raises(KeyboardInterrupt):
        allocator.free(free_index=slots)
    monkeypatch.undo()
    assert nothing_behind(recording._tape)
    assert allocator.available_size() == 2
    allocator.free_swa(free_index=slots[:1])
    assert [call.call for call in calls_of(recording)] == [Call.ALLOC, Call.FREE_SWA]


def test_a_call_that_is_interrupted_before_it_is_made_is_not_on_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(2)
    once(monkeypatch, Tape, "tensor", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        allocator.free(free_index=slots)
    allocator.free(slots)
    translation = translation_of(recording)
    assert translation.trace.ops == (ops.Alloc(1, 2), ops.Free(1))
    assert not translation.notes


@pytest.mark.parametrize("name", ["tensor", "octets"])
@pytest.mark.parametrize("instead", [interrupted, interrupted_after])
def test_an_answer_is_on_file_with_its_peers_or_not_at_all(
    name: str, instead: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid(kind=Odd)
    allocator.answer = torch.tensor([1, 2], dtype=torch.int32)
    recording = record(allocator, path)
    once(monkeypatch, Tape, name, instead)
    with pytest.raises(KeyboardInterrupt):
        allocator.alloc(2)
    assert nothing_behind(recording._tape)
    assert allocator.alloc(2) is allocator.answer
    recording.detach()
    recorded = read_raw(recording.raw)
    assert [call.ending for call in recorded.calls] == ["interrupted", "lent"]
    translation = translate(recorded)
    assert translation.trace.ops == (ops.Alloc(1, 2),)
    assert translation.faithful == 0
    (note,) = translation.notes
    assert "it was interrupted, and its answer is not on file; the trace ends with" in note.text


def test_an_answer_without_its_peers_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the death of a process leaves it at the end of a file; in the middle of one as well."""
    allocator = hybrid(kind=Odd)
    allocator.answer = torch.tensor([1, 2], dtype=torch.int32)
    recording = record(allocator, path)
    for _ in range(2):
        once(monkeypatch, Tape, "octets", lambda *_: None)
        allocator.alloc(2)
    recording.detach()
    calls = read_raw(recording.raw).calls
    assert [(call.ending, call.slots) for call in calls] == [("interrupted", [])] * 2
    end = recording.raw.read_bytes()[:-16]
    recording.raw.write_bytes(end)
    assert [call.ending for call in read_raw(recording.raw).calls] == ["interrupted", "unknown"]


def test_an_error_whose_note_is_interrupted_is_on_file_as_raised(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    once(monkeypatch, Tape, "octets", no_room)
    with pytest.raises(Exception, match="group"):
        allocator.free_group_end()
    allocator.free_group_begin()
    endings = [call.ending for call in calls_of(recording)]
    assert endings == ["raised", "returned"]


class Speechless(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


class Raising(Odd):
    """Raises such an error."""

    def alloc(self, need_size: int) -> Any:
        raise Speechless


def test_an_error_that_cannot_be_read_stays_the_error(path: Path) -> None:
    allocator = hybrid(kind=Raising)
    recording = record(allocator, path)
    with pytest.raises(Speechless):
        allocator.alloc(2)
    with pytest.raises(Speechless):
        allocator.alloc(need_size=2)
    errors = {call.error for call in calls_of(recording)}
    assert errors == {"Speechless: a message that cannot be read"}


class Interrupted(Exception):
    """Ctrl-C comes while it says what it is."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class RaisingThat(Odd):
    """Raises such an error."""

    def alloc(self, need_size: int) -> Any:
        raise Interrupted


def test_an_interrupt_while_an_error_is_noted_is_an_interrupt(path: Path) -> None:
    allocator = hybrid(kind=RaisingThat)
    recording = record(allocator, path)
    with pytest.raises(KeyboardInterrupt):
        allocator.alloc(2)
    assert not recording._tape.inside
    assert [call.ending for call in calls_of(recording)] == ["raised"]


# Arguments.


def test_a_call_whose_arguments_cannot_be_written_is_not_lost(path: Path) -> None:
    allocator = hybrid(kind=Odd)
    allocator.answer = torch.tensor([1])
    recording = record(allocator, path)
    assert allocator.alloc_extend(1, 2, extend_num_tokens="all") is allocator.answer
    allocator.free_group_begin()
    calls = calls_of(recording)
    assert [(call.call, call.readable) for call in calls] == [
        (Call.EXTEND, False),
        (Call.GROUP_BEGIN, True),
    ]
    translation = translation_of(recording)
    assert (translation.faithful, len(translation.notes)) == (0, 1)


class Eager(SWATokenToKVPoolAllocator):
    """Frees each segment as it comes. ``given``: what the last of these calls was given."""

    given: Any = None

    def free_segments(self, segments: Any) -> None:
        self.given = segments
        for index, start in segments:
            self.free_segment(index, start_pos=start)


def test_segments_whose_generator_raises_are_freed_as_far_as_they_came(path: Path) -> None:
    def cut_off(slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        yield slots[:2], 0
        raise KeyError("the engine's own")

    left = []
    for is_recorded in (False, True):
        allocator = hybrid(kind=Eager)
        slots = allocator.alloc(6)
        recording = record(allocator, path) if is_recorded else None
        with pytest.raises(KeyError, match="the engine's own"):
            allocator.free_segments(cut_off(slots))
        left.append(allocator.available_size())
        allocator.free_segments((each, 0) for each in (slots[2:3], slots[3:]))
        assert allocator.available_size() == 8
        if recording is not None:
            raised, whole = calls_of(recording)
            assert (raised.ending, raised.vectors) == ("raised", [slots[:2].tolist()])
            assert whole.vectors == [slots[2:3].tolist(), slots[3:].tolist()]
    assert left == [4, 4]


def test_a_recording_is_translated_the_same_way_again(path: Path) -> None:
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", None, False)
    recording = record(allocator, path)
    slots = allocator.alloc(8)
    assert slots is not None
    # As of a release that has `free_page_ids`.
    recording._tape.tensor(Call.FREE_PAGES, 0, slots[::4] // 4)
    recording.detach()
    recorded = read_raw(recording.raw)
    for _ in range(2):
        assert translate(recorded).trace.ops == (ops.Alloc(1, 2), ops.Free(1, form="sparse"))


def test_only_a_generator_is_given_on_as_something_else(path: Path) -> None:
    allocator = hybrid(kind=Eager)
    recording = record(allocator, path)
    other = type(allocator)(8, 8, 1, torch.int64, "cpu", None, False)
    segments = [(allocator.alloc(2), 0)]
    allocator.free_segments(segments)
    assert allocator.given is segments
    once_only = iter([(other.alloc(2), 0)])
    other.free_segments(once_only)
    assert other.given is once_only
    assert [call.call for call in calls_of(recording)] == [Call.ALLOC, Call.FREE_SEGMENTS]

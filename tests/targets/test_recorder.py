"""Recording a live allocator: what it does to the allocator, what is on file when the process dies,
and what cannot be recorded or read.
"""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import (
    FreeGroupError,
    GeometryError,
    HiSparseTokenToKVPoolAllocator,
    IndexTensorError,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.models import ops
from kvcore.targets import Recording, record, recording_methods, recording_tape
from kvcore.targets.recording_raw import Call, RawCall, read_raw
from kvcore.targets.recording_tape import PRELUDE, RecordingError
from kvcore.targets.recording_translation import translate

torch.set_num_threads(1)


def hybrid(pages: int = 8) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages, pages, 1, torch.int64, "cpu", None, False)


def calls_of(recording: Recording) -> tuple[RawCall, ...]:
    recording.detach()
    return read_raw(recording.raw).calls


WAYS = [
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(
            recording_tape.COMPILED is None, reason="no compiled helpers in this environment"
        ),
    ),
    "python",
]
"""How plain calls are written down."""


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are written down in this way."""
    if way == "python":
        monkeypatch.setattr(recording_methods, "COMPILED", None)


@pytest.fixture(params=WAYS)
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a recording goes, which is made in either way."""
    choose(request.param, monkeypatch)
    return tmp_path / "live.jsonl"


# The allocator.


def test_the_engine_keeps_the_object_and_the_class_that_it_has(path: Path) -> None:
    allocator, before = hybrid(), vars(hybrid()).keys()
    recording = record(allocator, path)
    assert isinstance(allocator, SWATokenToKVPoolAllocator)
    assert type(allocator).__name__ == "SWATokenToKVPoolAllocator"
    assert vars(allocator).keys() == before
    recording.detach()
    assert type(allocator) is SWATokenToKVPoolAllocator
    assert type(allocator.full_attn_allocator) is TokenToKVPoolAllocator


def test_attributes_and_answers_pass_through(path: Path) -> None:
    plain = hybrid()
    allocator: Any = hybrid()
    with record(allocator, path):
        allocator.note = "mine"
        for each in (allocator, plain):
            slots = each.alloc(3)
            assert slots is not None
            each.free_swa(slots[:1])
        assert allocator.available_size() == plain.available_size()
        assert torch.equal(allocator.full_to_swa_index_mapping, plain.full_to_swa_index_mapping)
    assert vars(allocator)["note"] == "mine"


def test_only_the_outermost_call_is_recorded(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(2)
    assert slots is not None
    allocator.free_group_begin()
    allocator.free_segment(slots, start_pos=0)
    allocator.free_group_end()
    allocator.full_attn_allocator.alloc(1)
    made = [(call.call, call.side.name) for call in calls_of(recording)]
    assert made == [
        (Call.ALLOC, "WHOLE"),
        (Call.GROUP_BEGIN, "WHOLE"),
        (Call.FREE_SEGMENT, "WHOLE"),
        (Call.GROUP_END, "WHOLE"),
        (Call.ALLOC, "FULL"),
    ]


# What is on file.


def test_a_tensor_that_the_caller_overwrites_is_on_file_as_it_was(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(3)
    assert slots is not None
    lent = slots.tolist()
    allocator.free_group_begin()
    allocator.free(slots)
    slots.fill_(0)
    calls = calls_of(recording)
    assert calls[0].slots == lent
    assert calls[2].vectors == [lent]


@pytest.mark.parametrize("form", ["int32", "strided", "empty"])
def test_an_index_of_any_form_is_on_file_by_its_values(form: str, path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(6)
    assert slots is not None
    index = {"int32": slots.to(torch.int32), "strided": slots[::2], "empty": slots[:0]}[form]
    allocator.free(index)
    assert calls_of(recording)[1].vectors == [index.tolist()]


def test_a_recording_may_be_larger_than_its_first_piece_of_file(path: Path) -> None:
    pages = recording_tape.FIRST_BYTES // 8
    allocator = hybrid(pages)
    recording = record(allocator, path)
    for _ in range(2):
        slots = allocator.alloc(pages)
        assert slots is not None
        allocator.free(slots)
    frees = [call.vectors[0] for call in calls_of(recording) if call.call is Call.FREE]
    assert [len(free or []) for free in frees] == [pages, pages]


def session(allocator: Any) -> None:
    """Calls of every kind that is written down in a way of its own, some of which raise."""
    first = allocator.alloc(4)
    allocator.free_group_begin()
    with pytest.raises(FreeGroupError):
        allocator.free_group_begin(owned=True)
    allocator.free(first[:1])
    allocator.free_segment(first[1:2], start_pos=1)
    allocator.free_group_end()
    allocator.free_swa(first[2:])
    allocator.free_swa_segment(first[2:2], start_pos=0)
    allocator.free_full_segment(free_index=first[2:3], start_pos=0)
    allocator.free_full(free_index=first[3:])
    with pytest.raises(IndexTensorError):
        allocator.free(None)
    with pytest.raises(GeometryError):
        allocator.free_segment(first, start_pos=-1)
    with pytest.raises(TypeError):
        allocator.free()
    with pytest.raises(TypeError):
        allocator.free_segment(first)
    side = allocator.full_attn_allocator
    lent = side.alloc(2)
    side.free_group_begin()
    side.free(lent)
    side.free_group_end()
    allocator.swa_attn_allocator.free(allocator.swa_attn_allocator.alloc(1))


@pytest.mark.skipif(recording_tape.COMPILED is None, reason="no compiled helpers here")
def test_both_ways_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for way in ("compiled", "python"):
        choose(way, monkeypatch)
        recording = record(hybrid(), tmp_path / way)
        session(recording._objects[0][1])
        recording.detach()
        files.append(recording.raw.read_bytes())
    assert files[0] == files[1]
    assert len(read_raw(tmp_path / "compiled.raw").calls) == 18


def test_a_call_that_raises_is_on_file_with_its_error(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    with pytest.raises(FreeGroupError):
        allocator.free_group_end()
    assert not recording._tape.inside
    slots = allocator.alloc(2)
    assert slots is not None
    allocator.free_group_begin()
    with pytest.raises(FreeGroupError):
        allocator.free_group_begin()
    allocator.free(slots)
    endings = [(call.call, call.ending) for call in calls_of(recording)]
    assert endings == [
        (Call.GROUP_END, "raised"),
        (Call.ALLOC, "lent"),
        (Call.GROUP_BEGIN, "returned"),
        (Call.GROUP_BEGIN, "raised"),
        (Call.FREE, "returned"),
    ]


def test_small_records_fill_piece_after_piece_of_the_file(path: Path) -> None:
    allocator = hybrid()
    slots = allocator.alloc(8)
    assert slots is not None
    recording = record(allocator, path)
    calls = 3 * recording_tape.FIRST_BYTES // (16 + 8 * 8)
    allocator.free_group_begin()
    for _ in range(calls):
        allocator.free_swa(slots)
    read = calls_of(recording)
    assert len(read) == calls + 1
    assert all(call.vectors == [slots.tolist()] for call in read[1:])


def test_a_method_that_is_recorded_is_told_from_its_class_as_before(path: Path) -> None:
    allocator = hybrid()
    with record(allocator, path):
        free = allocator.free
        assert free.__name__ == "free"
        assert free.__self__ is allocator
        assert free.__doc__ == SWATokenToKVPoolAllocator.free.__doc__
        assert type(allocator).free is type(allocator).__dict__["free"]
        slots = allocator.alloc(2)
        assert slots is not None
        free(slots)
        assert allocator.available_size() == 8


class Deadly(SWATokenToKVPoolAllocator):
    """The process dies in `free_swa`."""

    def free_swa(self, free_index: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_the_process_leaves_every_call_up_to_the_one_that_did_it(path: Path) -> None:
    child = os.fork()
    if child == 0:
        allocator = Deadly(8, 8, 1, torch.int64, "cpu", None, False)
        record(allocator, path)
        slots = allocator.alloc(2)
        assert slots is not None
        allocator.free_swa(slots)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    translation = translate(read_raw(path.with_name(path.name + ".raw")))
    assert translation.trace.ops == (ops.Alloc(1, 2), ops.FreeSwa(1))
    assert any("the process ended in free_swa" in note.text for note in translation.notes)


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid(recording_tape.FIRST_BYTES // 8)

    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    recording = record(allocator, path)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.warns(UserWarning, match="the recording ended here"):
        slots = allocator.alloc(allocator.size)
    assert slots is not None
    allocator.free(slots)
    assert allocator.available_size() == allocator.size
    translation = recording.close()
    assert translation.notes[-1].text.endswith("there was no room for more")
    assert recording.raw.exists()


# What cannot be recorded.


def test_other_allocators_are_refused(path: Path) -> None:
    sparse = HiSparseTokenToKVPoolAllocator(4, 1, torch.int64, "cpu", None, False, 2)
    for each in (sparse, object()):
        with pytest.raises(RecordingError, match="cannot be recorded; expected one of"):
            record(each, path)


def test_an_allocator_is_recorded_once_at_a_time(path: Path) -> None:
    allocator = hybrid()
    with record(allocator, path):
        for each in (allocator, allocator.full_attn_allocator):
            with pytest.raises(RecordingError, match="is being recorded already"):
                record(each, path.with_name("other.jsonl"))
    record(allocator, path.with_name("other.jsonl")).detach()


def test_a_path_must_be_new_and_possible(path: Path, tmp_path: Path) -> None:
    allocator = hybrid()
    with pytest.raises(RecordingError, match="cannot be written: No such file or directory"):
        record(allocator, tmp_path / "nowhere" / "live.jsonl")
    record(allocator, path).detach()
    with pytest.raises(RecordingError, match="exists already"):
        record(allocator, path)
    assert type(allocator) is SWATokenToKVPoolAllocator


# What cannot be read.


@pytest.fixture
def raw(path: Path) -> Path:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free(slots)
    recording.detach()
    return recording.raw


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda data: b"", "the file is empty"),
        (lambda data: b"{}\n", "not a raw recording"),
        (lambda data: data[:20], "cut off within its first"),
        (lambda data: data[: PRELUDE.size + 9], "cut off within its header"),
        (lambda data: data[:16] + b"\x02" + data[17:], "of version 2, this kvcore reads 1"),
        (lambda data: data[:30] + b"x" + data[31:], "no header of a recording"),
    ],
)
def test_a_spoilt_file_is_one_sentence(spoil: object, sentence: str, raw: Path) -> None:
    assert callable(spoil)
    raw.write_bytes(spoil(raw.read_bytes()))
    with pytest.raises(RecordingError, match=sentence) as caught:
        read_raw(raw)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_in_its_calls_is_read_up_to_there(raw: Path) -> None:
    raw.write_bytes(raw.read_bytes()[:-40])
    recorded = read_raw(raw)
    assert [call.call for call in recorded.calls] == [Call.ALLOC]
    assert recorded.ended == "the file was cut off in call 2"


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read: No such file or directory"):
        read_raw(tmp_path / "nothing.raw")


def test_a_damaged_file_is_one_sentence(raw: Path) -> None:
    data = bytearray(raw.read_bytes())
    start = PRELUDE.size + int.from_bytes(data[PRELUDE.size - 4 : PRELUDE.size], "little")
    data[start + 14 : start + 16] = (0x00FE).to_bytes(2, "little")
    raw.write_bytes(data)
    with pytest.raises(RecordingError, match="damaged behind call 0"):
        read_raw(raw)


def test_a_trace_that_is_there_is_not_written_over(path: Path) -> None:
    path.write_text("precious\n")
    with pytest.raises(RecordingError, match="exists already"):
        record(hybrid(), path)
    assert path.read_text() == "precious\n"


def test_a_number_that_no_pool_has_is_the_allocators_to_refuse(path: Path) -> None:
    allocator = hybrid()
    with record(allocator, path):
        assert allocator.alloc(2**70) is None


ABSURD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("free_segment", (torch.tensor([1]),), {"start_pos": None}),
    ("free_segment", (torch.tensor([1]),), {"start_pos": -(2**70)}),
    ("free_segment", ("none",), {"start_pos": 0}),
    ("free_segments", ([(torch.tensor([1]), "zero")],), {}),
    ("free_segments", ([torch.tensor([1, 2, 3])],), {}),
    ("free_segments", (None,), {}),
    ("free", ([2**70],), {}),
    ("free", (torch.ones(2),), {}),
    ("alloc", (None,), {}),
    ("alloc", (-(2**70),), {}),
    ("alloc_extend", (1, 2, 3, 4, 5, "all"), {}),
    ("alloc_decode", (None, None, None), {}),
    ("alloc_extend_swa_tail", (*[torch.tensor([1])] * 5, 0, 2**70, 2**70), {}),
    ("set_full_to_swa_mapping", (torch.tensor([1]),), {}),
    ("recover_tombstone", (torch.tensor([1]), {}), {}),
    ("no_such_method", (), {}),
]


@pytest.mark.parametrize("number", range(len(ABSURD)))
def test_what_cannot_be_written_down_is_refused_by_the_allocator_itself(
    number: int, path: Path
) -> None:
    name, arguments, named = ABSURD[number]
    with pytest.raises(Exception, match=r".") as refused:
        getattr(hybrid(), name)(*arguments, **named)
    allocator: Any = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(2)
    with pytest.raises(type(refused.value)) as again:
        getattr(allocator, name)(*arguments, **named)
    assert str(again.value) == str(refused.value)
    assert not recording._tape.inside
    allocator.free(slots)
    calls = calls_of(recording)
    assert [calls[0].call, calls[-1].call] == [Call.ALLOC, Call.FREE]
    assert [call.ending for call in calls] in (
        ["lent", "returned"],
        ["lent", "raised", "returned"],
    )


def test_an_interrupted_growth_leaves_the_recording_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = hybrid(64)
    recording = record(allocator, path)
    slots = allocator.alloc(64)
    assert slots is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording_tape.Tape, "_make_ready", interrupted)
    calls = 0

    def free_on() -> None:
        nonlocal calls
        while True:
            allocator.free_swa(slots)
            calls += 1

    with pytest.raises(KeyboardInterrupt):
        free_on()
    monkeypatch.undo()
    for _ in range(3):
        allocator.free_swa(slots)
    read = calls_of(recording)
    # The interrupted call was not made, and nobody else's ending is taken for its own.
    assert [call.vectors for call in read[1:]] == [[slots.tolist()]] * (calls + 3)
    assert {call.ending for call in read[1:]} == {"returned"}


def test_what_the_engine_raised_is_not_hidden_by_a_recording_that_cannot_be_closed(
    path: Path,
) -> None:
    def session() -> None:
        with record(hybrid(), path) as recording:
            recording.raw.unlink()
            raise KeyError("the engine's own")

    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(KeyError, match="the engine's own"),
    ):
        session()


def test_a_tensor_without_memory_is_for_the_allocator_to_refuse(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    slots = allocator.alloc(2)
    assert slots is not None
    with pytest.raises(RuntimeError):
        allocator.free(torch._efficientzerotensor((3,), dtype=torch.int64))
    allocator.free(slots)
    assert calls_of(recording)[-1].vectors == [slots.tolist()]


def test_a_recorded_method_looks_like_the_method_that_it_records(path: Path) -> None:
    plain = hybrid()
    allocator: Any = hybrid()
    with record(allocator, path):
        for name in ("free", "free_segment", "free_group_begin", "alloc", "alloc_extend"):
            mine, theirs = getattr(allocator, name), getattr(plain, name)
            assert inspect.signature(mine) == inspect.signature(theirs)
            assert (mine.__name__, mine.__module__) == (theirs.__name__, theirs.__module__)
        with pytest.raises(TypeError, match=r"free\(\) missing 1 required positional argument"):
            allocator.free()

"""Recording a live allocator: what it does to the allocator, what is on file when the process dies,
and what cannot be recorded or read.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import (
    HiSparseTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.models import ops
from kvcore.targets import Recording, record, recording_tape
from kvcore.targets.recording_raw import Call, RawCall, read_raw
from kvcore.targets.recording_tape import PRELUDE, RecordingError
from kvcore.targets.recording_translation import translate

torch.set_num_threads(1)


def hybrid(pages: int = 8) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages, pages, 1, torch.int64, "cpu", None, False)


def calls_of(recording: Recording) -> tuple[RawCall, ...]:
    recording.detach()
    return read_raw(recording.raw).calls


@pytest.fixture
def path(tmp_path: Path) -> Path:
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

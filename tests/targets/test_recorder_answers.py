"""Answers and mappings that are unusual or cannot be written down: the engine gets its answer, and
nobody is accused of a broken law because of the recording.

Leaves out what interrupts a recording (`test_recorder_mishaps`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcore.targets import Recording, record, recording_methods
from kvcore.targets.recording_raw import Call, RawCall, read_raw
from kvcore.targets.recording_tape import Mark
from kvcore.targets.recording_translation import translate

torch.set_num_threads(1)


class Odd(SWATokenToKVPoolAllocator):
    """Answers what it is told to."""

    answer: Any = None

    def alloc(self, need_size: int) -> Any:
        return self.answer


def hybrid(kind: type[Any] = Odd) -> Any:
    return kind(8, 8, 1, torch.int64, "cpu", None, False)


def calls_of(recording: Recording) -> tuple[RawCall, ...]:
    recording.detach()
    return read_raw(recording.raw).calls


def refuse_to_accuse(recording: Recording) -> None:
    """The trace ends at the call whose answer is not known, with that as the reason."""
    translation = translate(read_raw(recording.raw))
    (note,) = translation.notes
    assert (note.call, translation.faithful) == (1, 0)
    assert re.search("could not be written down; the trace ends", note.text)


ANSWERS: list[Any] = [
    (torch.tensor([1]), torch.tensor([2])),
    5,
    False,
    "12",
    torch.tensor([1, 2]).numpy(),
    torch.tensor([1.0, 2.0]),
    torch.tensor([True, False]),
    torch.tensor([3, 10**6]),
    torch.tensor([3, -(10**6)]),
    torch.tensor([1, 10**6], dtype=torch.int32),
    torch.empty(2, dtype=torch.int64, device="meta"),
    torch._efficientzerotensor((2,), dtype=torch.int64),
    torch.tensor([0, 1, 2]).to_sparse(),
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_an_answer_that_cannot_be_written_is_the_engines_all_the_same(
    number: int, path: Path
) -> None:
    allocator = hybrid()
    allocator.answer = ANSWERS[number]
    allocator.full_to_swa_index_mapping[3] = 2
    recording = record(allocator, path)
    assert allocator.alloc(2) is allocator.answer
    assert not recording._tape.inside
    # What is behind the last record would be read if the process died now.
    assert not any(recording._tape.buffer[recording._tape.tail :])
    allocator.answer = torch.tensor([3])
    allocator.alloc(1)
    first, second = calls_of(recording)
    assert (first.ending, second.ending) == ("unreadable", "lent")
    assert (second.slots, second.peers) == ([3], [2])
    refuse_to_accuse(recording)


def test_a_list_of_numbers_is_an_answer_with_peers(path: Path) -> None:
    allocator = hybrid()
    allocator.answer = [3, 4]
    allocator.full_to_swa_index_mapping[3] = 2
    recording = record(allocator, path)
    assert allocator.alloc(2) is allocator.answer
    (call,) = calls_of(recording)
    assert (call.ending, call.slots, call.peers) == ("lent", [3, 4], [2, 0])


MAPPINGS: list[Any] = [
    None,
    [0, 7, 8],
    torch.tensor([0, 7]),
    torch.tensor([0.0, 7.0, 8.0]),
    torch.tensor([[0, 1], [2, 3], [4, 5]]),
    torch.zeros(9, dtype=torch.int64, device="meta"),
]


@pytest.mark.parametrize("number", range(len(MAPPINGS)))
def test_a_mapping_that_cannot_be_read_is_the_engines_all_the_same(number: int, path: Path) -> None:
    allocator = hybrid()
    allocator.answer = torch.tensor([1, 2])
    recording = record(allocator, path)
    allocator.full_to_swa_index_mapping = MAPPINGS[number]
    assert allocator.alloc(2) is allocator.answer
    assert [(call.ending, call.slots) for call in calls_of(recording)] == [("unreadable", [1, 2])]
    refuse_to_accuse(recording)


def test_a_mapping_that_is_not_there_is_the_engines_all_the_same(path: Path) -> None:
    allocator = hybrid()
    allocator.answer = torch.tensor([1, 2])
    recording = record(allocator, path)
    del allocator.full_to_swa_index_mapping
    assert allocator.alloc(2) is allocator.answer
    recording.detach()
    refuse_to_accuse(recording)


@pytest.mark.parametrize(
    "mapping",
    [torch.tensor([0, 7, 8], dtype=torch.int32), torch.tensor([0, 0, 7, 0, 8])[::2]],
)
def test_peers_are_on_file_by_their_values(mapping: torch.Tensor, path: Path) -> None:
    allocator = hybrid()
    allocator.answer = torch.tensor([1, 2])
    recording = record(allocator, path)
    allocator.full_to_swa_index_mapping = mapping
    allocator.alloc(2)
    assert [call.peers for call in calls_of(recording)] == [[7, 8]]


def test_an_answer_of_a_single_pool_that_cannot_be_written_accuses_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenToKVPoolAllocator, "alloc", lambda *_: "slots")
    allocator: Any = TokenToKVPoolAllocator(8, torch.int64, "cpu", None, False)
    recording = record(allocator, path)
    assert allocator.alloc(2) == "slots"
    recording.detach()
    refuse_to_accuse(recording)


class Computed(Odd):
    """Its mapping is a property, which may do anything when it is read."""

    hook: Callable[[], None] | None = None

    @property
    def full_to_swa_index_mapping(self) -> Any:
        if self.hook is not None:
            self.hook()
        return vars(self)["mapping"]

    @full_to_swa_index_mapping.setter
    def full_to_swa_index_mapping(self, mapping: Any) -> None:
        vars(self)["mapping"] = mapping


def test_a_mapping_that_is_computed_may_end_the_recording(path: Path) -> None:
    allocator = hybrid(Computed)
    allocator.answer = torch.tensor([1, 2])
    recording = record(allocator, path)
    allocator.hook = recording.detach
    assert allocator.alloc(2) is allocator.answer
    assert [call.ending for call in calls_of(recording)] == ["interrupted"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_mapping_that_is_computed_may_raise(error: type[BaseException], path: Path) -> None:
    allocator = hybrid(Computed)
    allocator.answer = torch.tensor([1, 2])
    recording = record(allocator, path)

    def hook() -> None:
        raise error

    allocator.hook = hook
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            allocator.alloc(2)
    else:
        assert allocator.alloc(2) is allocator.answer
    ending = "interrupted" if error is KeyboardInterrupt else "unreadable"
    assert [call.ending for call in calls_of(recording)] == [ending]


def test_a_record_of_no_whole_numbers_cannot_be_read(path: Path) -> None:
    """As older recorders wrote the peers of an int32 mapping."""
    allocator = hybrid()
    recording = record(allocator, path)
    tape = recording._tape
    tape.plain(Call.ALLOC, 1)
    tape.tensor(Mark.ANSWER, 0, torch.tensor([1]))
    tape.octets(Mark.PART, 0, bytes(4))
    assert [call.ending for call in calls_of(recording)] == ["unreadable"]
    refuse_to_accuse(recording)


def test_a_mapping_on_a_device_is_not_asked_for_what_it_does_not_have() -> None:
    mapping = torch.tensor([0, 7, 8], dtype=torch.int32)
    slots = torch.tensor([2, 1, -1])
    peers = torch.tensor([8, 7, 8]).numpy().tobytes()
    assert recording_methods._from_device(mapping, slots) == peers
    for beyond in (3, -4):
        assert recording_methods._from_device(mapping, torch.tensor([1, beyond])) is None

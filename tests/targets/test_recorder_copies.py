"""Whose calls are recorded: those of the object itself, and not of copies or other instances.

Leaves out what is on file for a call (`test_recorder`).
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcore.targets import Recording, record
from kvcore.targets.recording_raw import Call, read_raw
from kvcore.targets.recording_tape import RecordingError

torch.set_num_threads(1)


def hybrid(kind: type[Any] = SWATokenToKVPoolAllocator) -> Any:
    return kind(8, 8, 1, torch.int64, "cpu", None, False)


def made(recording: Recording) -> list[tuple[Call, str]]:
    """The calls on file and their sides."""
    recording.detach()
    return [(call.call, call.side.name) for call in read_raw(recording.raw).calls]


def pickled(protocol: int, each: Any) -> Any:
    return pickle.loads(pickle.dumps(each, protocol))


class Newborn(TokenToKVPoolAllocator):
    """Is made with something that has a name."""

    def __new__(cls, *arguments: Any, born: str = "", **named: Any) -> Newborn:
        """An instance, not initialised."""
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, str]]:
        return (), {"born": "again"}


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    *(partial(pickled, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
]


@pytest.mark.parametrize("number", range(len(COPIES)))
def test_a_copy_is_a_plain_allocator_that_nobody_records(number: int, path: Path) -> None:
    allocator, twin = hybrid(), COPIES[number]
    recording = record(allocator, path)
    allocator.alloc(2)
    other = twin(allocator)
    assert type(other) is SWATokenToKVPoolAllocator
    if twin is not copy.copy:
        assert type(other.full_attn_allocator) is TokenToKVPoolAllocator
        other.alloc(3)
        other.full_attn_allocator.alloc(1)
        assert allocator.available_size() == 6
        with pytest.raises(RecordingError, match="is being recorded already"):
            record(allocator, path.with_name("other.jsonl"))
        record(other, path.with_name("other.jsonl")).detach()
    side = twin(allocator.swa_attn_allocator)
    assert type(side) is TokenToKVPoolAllocator
    side.alloc(1)
    assert made(recording) == [(Call.ALLOC, "WHOLE")]


@pytest.mark.parametrize("number", range(2, len(COPIES)))
def test_a_copy_that_is_made_with_names_is_plain_too(number: int, path: Path) -> None:
    allocator = Newborn(8, torch.int64, "cpu", None, False)
    with record(allocator, path):
        assert type(copy.copy(allocator)) is Newborn
        assert type(COPIES[number](allocator)) is Newborn


def test_another_instance_of_the_class_is_not_recorded(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    other = type(allocator)(8, 8, 1, torch.int64, "cpu", None, False)
    side = type(allocator.full_attn_allocator)(8, torch.int64, "cpu", None, False)
    for each in (other, side):
        slots = each.alloc(2)
        each.free(free_index=slots)
        each.free_segments([(each.alloc(1), 0)])
    allocator.swa_attn_allocator.alloc(1)
    assert made(recording) == [(Call.ALLOC, "SWA")]


def test_a_call_may_name_its_object(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    side: Any = allocator.full_attn_allocator
    type(side).alloc(self=side, need_size=1)
    type(allocator).alloc(self=allocator, need_size=1)
    assert made(recording) == [(Call.ALLOC, "FULL"), (Call.ALLOC, "WHOLE")]


def test_an_allocator_that_everybody_forgot_is_collected_with_its_recording(path: Path) -> None:
    allocator = hybrid()
    recording = record(allocator, path)
    allocator.alloc(1)
    forgotten = weakref.ref(allocator), weakref.ref(type(allocator))
    del allocator, recording
    gc.collect()
    assert [reference() for reference in forgotten] == [None, None]


class OtherSide(TokenToKVPoolAllocator):
    """A side of a class of its own."""

    asked = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self.asked += need_size
        return super().alloc(need_size)


def test_sides_of_two_classes_stay_of_their_classes(path: Path) -> None:
    allocator = hybrid()
    allocator.swa_attn_allocator.__class__ = OtherSide
    recording = record(allocator, path)
    side = allocator.swa_attn_allocator
    assert isinstance(side, OtherSide)
    assert not isinstance(allocator.full_attn_allocator, OtherSide)
    side.alloc(2)
    allocator.full_attn_allocator.alloc(1)
    assert side.asked == 2
    assert made(recording) == [(Call.ALLOC, "SWA"), (Call.ALLOC, "FULL")]
    assert type(side) is OtherSide


class Demanding(TokenToKVPoolAllocator):
    """Nobody can make a subclass of its subclasses."""

    def __init_subclass__(cls, *, secret: str) -> None:
        super().__init_subclass__()


class Unchangeable(TokenToKVPoolAllocator):
    """Its class stays what it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("not this secret class")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Demanding, Unchangeable])
def test_an_allocator_that_cannot_be_recorded_stays_as_it_is(kind: type, path: Path) -> None:
    allocator = hybrid()
    usual = allocator.swa_attn_allocator
    allocator.swa_attn_allocator = kind(8, torch.int64, "cpu", None, False)
    with pytest.raises(RecordingError, match=r"cannot be recorded: .*secret"):
        record(allocator, path)
    assert type(allocator) is SWATokenToKVPoolAllocator
    assert type(allocator.full_attn_allocator) is TokenToKVPoolAllocator
    assert type(allocator.swa_attn_allocator) is kind
    assert not list(path.parent.iterdir())
    allocator.swa_attn_allocator = usual
    record(allocator, path).detach()


def test_a_recorded_method_can_be_held_and_looked_at_as_any_method(path: Path) -> None:
    plain, allocator = hybrid(), hybrid()
    with record(allocator, path):
        for mine, theirs in (
            (allocator, plain),
            (allocator.full_attn_allocator, plain.full_attn_allocator),
        ):
            for name in ("alloc", "alloc_extend", "free", "free_segment", "free_segments"):
                ours, method = getattr(mine, name), getattr(theirs, name)
                held = weakref.WeakMethod(ours)()
                assert held == ours
                assert inspect.getfullargspec(ours) == inspect.getfullargspec(method)
                assert ours.__qualname__ == method.__qualname__

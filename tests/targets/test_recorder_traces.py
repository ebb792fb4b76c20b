"""Traces of recorded allocators: what was done to them is what the trace does, on any target."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import (
    FreeGroupError,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.invariants import Run, Skipped
from kvcore.models import Geometry, ops
from kvcore.models.ops import Op
from kvcore.strategies.replay import replay
from kvcore.strategies.walker import Walker
from kvcore.targets import record, recording_methods
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.faults.groups import DeferredPeerLookup
from kvcore.targets.recording_calls import Note
from kvcore.targets.recording_translation import Translation
from kvcore.targets.registry import open_target

torch.set_num_threads(1)

Session = Callable[[Any], None]


def hybrid(pages: int = 8, size: int = 1) -> SWATokenToKVPoolAllocator:
    slots = pages * size
    return SWATokenToKVPoolAllocator(slots, slots, size, torch.int64, "cpu", None, False)


@pytest.fixture(params=["usual", "python"])
def recorded(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Translation]:
    """What becomes of a session with an allocator, which is recorded in either way."""
    if request.param == "python":
        monkeypatch.setattr(recording_methods, "COMPILED", None)

    def play(session: Session, allocator: Any = None, **options: Any) -> Translation:
        allocator = hybrid() if allocator is None else allocator
        recording = record(allocator, tmp_path / "live.jsonl", **options)
        session(allocator)
        return recording.close()

    return play


def batch(allocator: Any, *rows: tuple[int, int, int]) -> torch.Tensor:
    """`alloc_extend` of rows: tokens before and after, and the last slot."""
    before, after, last = (torch.tensor(column) for column in zip(*rows, strict=True))
    slots = allocator.alloc_extend(before, before, after, after, last, int((after - before).sum()))
    assert slots is not None
    return slots


# Whole sessions of the walker.


def state(target: AllocatorTarget) -> tuple[int, int, int]:
    """Room on each side, and how many slots are mapped."""
    said = target.dialect.answers()
    return said.full_available, said.swa_available, int((target.dialect.mapping() > 0).sum())


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, 12, 10),
        Geometry(4, 12, 10),
        Geometry(1, 8, 8, need_sort=True),
        Geometry(4, 8),
        Geometry(4, 8, pure_swa=True),
    ],
    ids=lambda geometry: geometry.describe(),
)
def test_a_recorded_session_plays_again_to_the_same_end(geometry: Geometry, tmp_path: Path) -> None:
    factory = open_target("kvcore")
    for seed in range(2):
        target = factory(geometry)
        assert isinstance(target, AllocatorTarget)
        run, walker = Run(target, period=20), Walker(random.Random(seed), 40)
        dialect: Any = target.dialect
        allocator = dialect.allocator
        recording = record(allocator, tmp_path / f"{seed}.jsonl")
        while (op := walker.next_op(run.model)) is not None:
            run.step(op)
        end = state(target)
        translation = recording.close()
        assert translation.trace.header.geometry == geometry
        # Illegal calls were refused, and changed nothing.
        assert all(" raised " in note.text for note in translation.notes)
        assert translation.faithful == translation.calls
        again = factory(geometry)
        assert isinstance(again, AllocatorTarget)
        second = Run(again, period=20)
        outcomes = [second.step(op) for op in translation.trace.ops]
        assert not any(isinstance(outcome, Skipped) for outcome in outcomes)
        assert state(again) == end
        second.finish()


# Engines' own ways.

FAULTY = "fault:deferred-peer-lookup"


def leak(allocator: Any) -> None:
    """sglang#36081: a recovery inside a group re-points an index that the group will look up."""
    kept, incoming = allocator.alloc(1), allocator.alloc(1)
    allocator.free_group_begin()
    allocator.free_swa(kept)
    allocator.recover_tombstone(kept, incoming)
    allocator.free_group_end()


def test_a_fault_that_was_recorded_breaks_the_same_law_where_it_is_played(
    recorded: Callable[..., Translation],
) -> None:
    allocator = DeferredPeerLookup(2, 2, 1, torch.int64, "cpu", None, False)
    trace = recorded(leak, allocator, target=FAULTY).trace
    assert trace.ops == (
        ops.Alloc(1, 1),
        ops.Alloc(2, 1),
        ops.GroupBegin(),
        ops.FreeSwa(1),
        ops.Recover(1, 2, locked=True),
        ops.GroupEnd(),
    )
    violation = replay(open_target(trace.header.target), trace.header.geometry, trace.ops).violation
    assert violation is not None
    assert violation.signature == ("L3", "group_end")
    assert replay(open_target("kvcore"), trace.header.geometry, trace.ops).violation is None


def test_a_law_that_broke_in_the_engine_ends_the_trace_with_that_op(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        leak(allocator)
        allocator.alloc(1)

    allocator = DeferredPeerLookup(2, 2, 1, torch.int64, "cpu", None, False)
    translation = recorded(session, allocator, target=FAULTY)
    assert translation.trace.ops[-1] == ops.Alloc(3, 1)
    assert (translation.faithful, translation.calls) == (6, 7)
    assert "breaks law" in translation.notes[-1].text


def clear_last(allocator: Any, kept: torch.Tensor, incoming: torch.Tensor) -> None:
    """As SGLang does up to 0.5.21: the mapping is cleared by a write to the tensor."""
    allocator.set_full_to_swa_mapping(kept, allocator.translate_loc_from_full_to_swa(incoming))
    allocator.full_to_swa_index_mapping[incoming] = 0
    allocator.full_attn_allocator.free(incoming)


def clear_first(allocator: Any, kept: torch.Tensor, incoming: torch.Tensor) -> None:
    """As SGLang does from 0.5.22 on."""
    peers = allocator.translate_loc_from_full_to_swa(incoming)
    allocator.clear_full_to_swa_mapping(incoming)
    allocator.set_full_to_swa_mapping(kept, peers)
    allocator.free_full_segment(incoming, start_pos=0)


@pytest.mark.parametrize("recover", [clear_last, clear_first])
def test_the_writes_of_a_recovery_are_one_op(
    recover: Callable[..., None], recorded: Callable[..., Translation]
) -> None:
    def session(allocator: Any) -> None:
        kept, incoming = batch(allocator, (0, 12, -1)), batch(allocator, (0, 8, -1))
        allocator.free_swa(kept[:8])
        recover(allocator, kept[4:8], incoming[:4])

    translation = recorded(session, hybrid(size=4))
    assert not translation.notes
    assert translation.trace.ops == (
        ops.Extend(((1, 12),)),
        ops.Extend(((2, 8),)),
        ops.FreeSwa(1, 0, 2),
        ops.Recover(1, 2, locked=True, pages=1, kept_start=1),
    )


def test_one_alloc_for_two_requests_is_two_rows_where_peers_move_between_them(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        slots = allocator.alloc(4)
        allocator.free_swa(slots[:2])
        allocator.recover_tombstone(slots[:2], slots[2:])

    translation = recorded(session)
    assert not translation.notes
    (first, second) = (2, 3)
    assert translation.trace.ops == (
        ops.Extend(((first, 2), (second, 2))),
        ops.FreeSwa(first),
        ops.Recover(first, second, locked=True, pages=2),
    )


def test_a_load_back_is_one_op(recorded: Callable[..., Translation]) -> None:
    def session(allocator: Any) -> None:
        full = allocator.full_attn_allocator.alloc(4)
        swa = allocator.swa_attn_allocator.alloc(2)
        allocator.set_full_to_swa_mapping(full[2:], swa)
        allocator.free_swa(full[2:])
        allocator.set_full_to_swa_mapping(full[:1], allocator.swa_attn_allocator.alloc(1))

    translation = recorded(session)
    assert not translation.notes
    assert translation.trace.ops == (
        ops.LoadBack(1, 4, 2),
        ops.FreeSwa(1, 2),
        ops.LoadBackSwa(1, 0, 1),
    )


def test_rows_are_followed_by_their_last_slot(recorded: Callable[..., Translation]) -> None:
    def session(allocator: Any) -> None:
        slots = batch(allocator, (0, 5, -1), (0, 4, -1)).tolist()
        first, second = slots[4], slots[8]
        batch(allocator, (4, 6, second), (5, 6, first))
        lengths, last = torch.tensor([7]), torch.tensor([first + 1])
        allocator.alloc_decode(lengths, lengths, last)

    translation = recorded(session, hybrid(size=4))
    assert translation.trace.ops == (
        ops.Extend(((1, 5), (2, 4))),
        ops.Extend(((2, 2), (1, 1))),
        ops.Decode((1,)),
    )


def test_two_rows_behind_one_shared_prefix_are_two_rows(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        last = int(batch(allocator, (0, 4, -1))[-1])
        batch(allocator, (4, 6, last), (4, 8, last))

    translation = recorded(session, hybrid(size=4))
    assert translation.trace.ops == (ops.Extend(((1, 4),)), ops.Extend(((1, 2), (2, 4))))


def test_a_free_of_slots_that_lie_apart_is_several_ops(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        first, second = allocator.alloc(4), allocator.alloc(2)
        allocator.free(torch.stack((first[3], second[0], first[0], first[1])))

    translation = recorded(session)
    assert translation.trace.ops[2:] == (
        ops.Free(1, 3, None),
        ops.Free(1, 0, 2),
        ops.Free(2, 0, 1),
    )


def test_single_slots_name_their_pages(recorded: Callable[..., Translation]) -> None:
    def session(allocator: Any) -> None:
        slots = allocator.alloc(12)
        allocator.free(slots[1::4])

    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", None, False)
    assert recorded(session, allocator).trace.ops == (
        ops.Alloc(1, 3),
        ops.Free(1, form="sparse"),
    )


def test_a_refusal_is_an_op(recorded: Callable[..., Translation]) -> None:
    allocator = TokenToKVPoolAllocator(4, torch.int64, "cpu", None, False)
    assert recorded(lambda each: each.alloc(5), allocator).trace.ops == (ops.Alloc(1, 5),)


# What there is no op for.


def foreign(allocator: Any) -> None:
    allocator.free(torch.tensor([5]))


def resize(allocator: Any) -> None:
    allocator.resize(size=4, size_swa=4)


def lose_a_peer(allocator: Any) -> None:
    slots = allocator.alloc(1)
    allocator.clear_full_to_swa_mapping(slots)
    allocator.free_full(slots)


def free_a_peer(allocator: Any) -> None:
    slots = allocator.alloc(1)
    allocator.swa_attn_allocator.free(slots)


UNSAYABLE: list[tuple[Session, tuple[Op, ...], int, str]] = [
    (foreign, (ops.Alloc(1, 2),), 2, "no call of this recording has on loan"),
    (resize, (ops.Alloc(1, 2),), 2, "a trace has one geometry"),
    (lose_a_peer, (ops.Alloc(1, 2), ops.Alloc(2, 1)), 4, "to nobody"),
    (free_a_peer, (ops.Alloc(1, 2), ops.Alloc(2, 1)), 3, "were not lent alone"),
]


@pytest.mark.parametrize(("session", "kept", "call", "why"), UNSAYABLE)
def test_what_has_no_op_ends_the_trace_and_says_so(
    session: Session,
    kept: tuple[Op, ...],
    call: int,
    why: str,
    recorded: Callable[..., Translation],
) -> None:
    def whole(allocator: Any) -> None:
        allocator.alloc(2)
        session(allocator)
        allocator.clear()

    translation = recorded(whole)
    assert translation.trace.ops == kept
    assert translation.faithful == call - 1
    assert translation.notes[-1].call == call
    assert why in translation.notes[-1].text


def test_slots_that_were_lent_before_are_told(tmp_path: Path) -> None:
    allocator = hybrid()
    allocator.alloc(3)
    recording = record(allocator, tmp_path / "live.jsonl")
    before = "3 slots were lent before the recording began; no op says so"
    assert recording.close().notes == (Note(0, before),)
    assert recording.raw.exists()


def test_swa_slots_that_were_lent_alone_and_returned_are_told(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        allocator.swa_attn_allocator.free(allocator.swa_attn_allocator.alloc(2))

    translation = recorded(session)
    assert translation.trace.ops == ()
    assert [note.call for note in translation.notes] == [2]


def test_an_error_of_kvcore_is_no_op_and_does_not_end_the_trace(
    recorded: Callable[..., Translation],
) -> None:
    def session(allocator: Any) -> None:
        allocator.free_group_begin()
        with pytest.raises(FreeGroupError):
            allocator.free_group_begin()
        allocator.free_group_end()

    translation = recorded(session)
    assert translation.trace.ops == (ops.GroupBegin(), ops.GroupEnd())
    assert [note.call for note in translation.notes] == [2]


@pytest.mark.parametrize(("pages", "mode"), [(8, ""), (9, "#exhaustion")])
def test_a_release_that_refused_is_played_by_callers_who_do_not_ask_first(
    pages: int, mode: str, recorded: Callable[..., Translation]
) -> None:
    def session(allocator: Any) -> None:
        allocator.alloc(pages)

    translation = recorded(session, target="sglang:somewhere")
    assert translation.trace.header.target == f"sglang:somewhere{mode}"

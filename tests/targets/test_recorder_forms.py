"""The two ways of writing a call down, compiled and in Python: the same bytes for the same session.

Leaves out what is on file for a call (`test_recorder`) and what a trace makes of it
(`test_recorder_traces`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore import KVCacheError, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcore.targets import record, recording_methods, recording_tape
from kvcore.targets.recording_raw import Call, read_raw

pytestmark = pytest.mark.skipif(
    recording_tape.COMPILED is None, reason="no compiled helpers in this environment"
)

torch.set_num_threads(1)


class Caller:
    """Calls of every kind, most of them plain, some unusual or wrong."""

    def __init__(self, allocator: Any, seed: int) -> None:
        self.allocator, self.rng = allocator, random.Random(seed)
        self.rows: list[torch.Tensor] = []

    def play(self, calls: int) -> list[str]:
        """Make them; the errors that they raised."""
        errors = []
        for _ in range(calls):
            try:
                self.call()
            except (KVCacheError, TypeError, IndexError, OverflowError, RuntimeError) as error:
                errors.append(type(error).__name__)
        return errors

    def call(self) -> None:
        kind = self.rng.choice((*("alloc", "extend", "decode") * 2, *("free", "group") * 2, "map"))
        getattr(self, kind)()

    def keep(self, slots: torch.Tensor | None) -> None:
        if slots is not None and slots.numel():
            self.rows.append(slots)

    def alloc(self) -> None:
        size = self.allocator.page_size
        need: Any = self.rng.choice((size, 2 * size, 3 * size, 0, -size, 100 * size, True, 2**70))
        if self.rng.random() < 0.2:
            self.keep(self.allocator.alloc(need_size=need))
        else:
            self.keep(self.allocator.alloc(need))

    def vector(self, *numbers: int) -> torch.Tensor:
        """A vector, now and then of another dtype or with gaps between its numbers."""
        form = self.rng.random()
        if form < 0.1:
            return torch.tensor(numbers, dtype=torch.int32)
        if form < 0.2:
            return torch.tensor([numbers, numbers]).T[:, 0]
        return torch.tensor(numbers)

    def extend(self) -> None:
        before = torch.tensor([0, 0])
        tokens = self.rng.randint(1, 6)
        after = self.vector(tokens, 1)
        added: Any = self.rng.choice((tokens + 1, tokens + 1, tokens + 1, tokens, 2**70))
        last = self.vector(-1, -1)
        if self.rng.random() < 0.2:
            self.keep(
                self.allocator.alloc_extend(
                    before, before, after, after, last_loc=last, extend_num_tokens=added
                )
            )
        else:
            self.keep(self.allocator.alloc_extend(before, before, after, after, last, added))

    def decode(self) -> None:
        if not self.rows:
            return
        row = self.rng.choice(self.rows)
        length = self.vector(self.allocator.page_size + 1)
        last: Any = row[-1:] if self.rng.random() < 0.9 else None
        self.keep(self.allocator.alloc_decode(length, length, last))

    def free(self) -> None:
        if not self.rows:
            return
        row: Any = self.rows.pop(self.rng.randrange(len(self.rows)))
        name = self.rng.choice(("free", "free_swa", "free_full"))
        index = self.rng.choice((row, row, row, row[::2], row.to(torch.int32), row[:0], None))
        if self.rng.random() < 0.5:
            getattr(self.allocator, name)(index)
        else:
            start: Any = self.rng.choice((0, 0, 0, self.allocator.page_size, -1, True, None))
            getattr(self.allocator, f"{name}_segment")(index, start_pos=start)

    def group(self) -> None:
        if self.rng.random() < 0.5:
            self.allocator.free_group_begin()
        else:
            self.allocator.free_group_end()

    def map(self) -> None:
        full = self.allocator.full_attn_allocator.alloc(self.allocator.page_size)
        swa = self.allocator.swa_attn_allocator.alloc(self.allocator.page_size)
        if full is None or swa is None:
            return
        self.allocator.set_full_to_swa_mapping(full, swa)
        name = self.rng.choice(("clear_full_to_swa_mapping", "recover_tombstone", ""))
        if name == "clear_full_to_swa_mapping":
            self.allocator.clear_full_to_swa_mapping(full)
            self.allocator.swa_attn_allocator.free(swa)
        elif name and self.rows:
            self.allocator.recover_tombstone(self.rows[-1], full)
        self.keep(full)


def hybrid(page_size: int, pages: int = 40) -> SWATokenToKVPoolAllocator:
    slots = pages * page_size
    return SWATokenToKVPoolAllocator(
        slots, slots, page_size, torch.int64, "cpu", None, False, validate=True
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("page_size", [1, 4])
def test_both_ways_write_the_same_of_any_session(
    page_size: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, errors = [], []
    for way in ("compiled", "python"):
        if way == "python":
            monkeypatch.setattr(recording_methods, "COMPILED", None)
        allocator = hybrid(page_size)
        recording = record(allocator, tmp_path / way)
        errors.append(Caller(allocator, seed).play(120))
        recording.detach()
        files.append(recording.raw.read_bytes())
    assert errors[0] == errors[1]
    assert files[0] == files[1]
    kinds = {call.call for call in read_raw(tmp_path / "compiled.raw").calls}
    assert kinds >= {Call.ALLOC, Call.EXTEND, Call.DECODE, Call.GROUP_BEGIN, Call.FREE}


@pytest.mark.parametrize("left", range(1, 8))
def test_an_answer_for_which_the_file_has_to_grow_is_on_file(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fits into the first piece of the file, its answer or the peers do not."""
    monkeypatch.setattr(recording_tape, "FIRST_BYTES", 2**14)
    allocator = hybrid(1)
    recording = record(allocator, tmp_path / "live.jsonl")
    tape, nothing = recording._tape, torch.empty(0, dtype=torch.int64)
    # A call, its answer and its peers are 16 + 24 + 24 bytes; one that frees nothing is 16.
    while tape.room - tape.tail > 16 * left:
        allocator.free(nothing)
    slots = allocator.alloc(1)
    assert slots is not None
    allocator.free(slots)
    recording.detach()
    *_, lent, freed = read_raw(recording.raw).calls
    assert (lent.slots, lent.peers) == (slots.tolist(), [1])
    assert freed.vectors == [slots.tolist()]


class Odd(SWATokenToKVPoolAllocator):
    """Answers something unusual."""

    answer: Any = None

    def alloc(self, need_size: int) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "peers"),
    [
        (torch.tensor([3, 4], dtype=torch.int32), [0, 0]),
        (torch.tensor([[3, 9], [4, 9]])[:, 0], [0, 0]),
        (torch.tensor([-1, 2]), [-1, 0]),
        (torch.empty(0, dtype=torch.int64), []),
    ],
)
def test_an_unusual_answer_is_on_file_with_its_peers(
    answer: torch.Tensor, peers: list[int], tmp_path: Path
) -> None:
    allocator = Odd(8, 8, 1, torch.int64, "cpu", None, False)
    allocator.answer = answer
    recording = record(allocator, tmp_path / "live.jsonl")
    assert allocator.alloc(2) is answer
    recording.detach()
    (call,) = read_raw(recording.raw).calls
    assert (call.slots, call.peers) == (answer.tolist(), peers)


@pytest.mark.parametrize(
    "answer", [torch.tensor([3, 10**6]), torch.tensor([10**6]), torch.tensor([1.0])]
)
def test_both_ways_write_the_same_of_an_answer_that_cannot_be_written(
    answer: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for way in ("compiled", "python"):
        if way == "python":
            monkeypatch.setattr(recording_methods, "COMPILED", None)
        allocator = Odd(8, 8, 1, torch.int64, "cpu", None, False)
        allocator.answer = answer
        recording = record(allocator, tmp_path / way)
        assert allocator.alloc(2) is answer
        recording.detach()
        files.append(recording.raw.read_bytes())
    assert files[0] == files[1]


def test_a_single_pool_has_no_peers_to_write(tmp_path: Path) -> None:
    allocator = TokenToKVPoolAllocator(8, torch.int64, "cpu", None, False)
    recording = record(allocator, tmp_path / "live.jsonl")
    slots = allocator.alloc(2)
    assert slots is not None
    assert allocator.alloc(100) is None
    recording.detach()
    lent, refused = read_raw(recording.raw).calls
    assert (lent.slots, lent.peers) == (slots.tolist(), [])
    assert (refused.slots, refused.ending) == ([], "refused")


def test_a_mapping_that_was_replaced_is_read_where_it_is_now(tmp_path: Path) -> None:
    allocator: Any = hybrid(1, 8)
    recording = record(allocator, tmp_path / "live.jsonl")
    allocator.resize(size=16, size_swa=16)
    slots = allocator.alloc(16)
    recording.detach()
    call = read_raw(recording.raw).calls[-1]
    assert call.peers == allocator.full_to_swa_index_mapping[slots].tolist()

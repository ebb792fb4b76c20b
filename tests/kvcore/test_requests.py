"""The request table: rows lent once and returned once, and kv rows written where they belong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import (
    DoubleFreeError,
    GeometryError,
    HostMemorySaver,
    IndexTensorError,
    InvalidSlotError,
    KVCacheError,
    NoMemorySaver,
    PausedPoolError,
    ReqToTokenPool,
)
from kvcore.saver import KV_CACHE, default_saver

SIZE, CONTEXT = 4, 6


@dataclass
class Holder:
    req_pool_idx: int | None = None


def make_pool(size: int = SIZE) -> ReqToTokenPool:
    return ReqToTokenPool(size, CONTEXT, "cpu", False)


def state(pool: ReqToTokenPool) -> tuple[Any, ...]:
    return sorted(pool.free_slots), pool.available_size(), pool.req_to_token.tolist()


def ints(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


# Rows


def test_a_fresh_table_lends_every_row_but_the_padding_row() -> None:
    pool = make_pool()
    assert pool.req_to_token.shape == (SIZE + 1, CONTEXT)
    assert pool.req_to_token.dtype == torch.int32
    assert not pool.req_to_token.any()
    rows = pool.alloc(SIZE)
    assert rows is not None
    assert sorted(rows) == list(range(1, SIZE + 1))
    assert pool.available_size() == 0


def test_free_and_lent_rows_are_all_rows_once_whatever_is_called() -> None:
    pool = make_pool()
    first = pool.alloc(3)
    assert first is not None
    assert sorted(first + pool.free_slots) == list(range(1, SIZE + 1))
    pool.free_rows(first[:2])
    second = pool.alloc_rows(1)
    assert second is not None
    assert sorted([first[2], *second, *pool.free_slots]) == list(range(1, SIZE + 1))
    pool.clear()
    assert sorted(pool.free_slots) == list(range(1, SIZE + 1))


def test_rows_are_lent_from_the_tail_so_the_row_freed_last_is_lent_next() -> None:
    pool = make_pool()
    tail = pool.free_slots[-2:]
    assert pool.alloc(2) == tail
    pool.free_rows([tail[0]])
    assert pool.alloc(1) == [tail[0]]


def test_nothing_is_lent_where_nothing_is_asked_for() -> None:
    pool = make_pool()
    before = state(pool)
    assert pool.alloc(0) == []
    assert pool.alloc([]) == []
    pool.free_rows([])
    assert state(pool) == before


def test_an_exhausted_table_lends_none_and_changes_nothing() -> None:
    pool = make_pool()
    pool.alloc(2)
    before = state(pool)
    requests = [Holder(), Holder(), Holder()]
    assert pool.alloc(3) is None
    assert pool.alloc(requests) is None
    assert requests == [Holder(), Holder(), Holder()]
    assert state(pool) == before


def test_requests_get_rows_and_those_that_hold_one_keep_it() -> None:
    pool = make_pool()
    chunked = Holder()
    pool.alloc([chunked])
    kept = chunked.req_pool_idx
    fresh = Holder()
    rows = pool.alloc([fresh, chunked])
    assert rows == [fresh.req_pool_idx, kept]
    assert chunked.req_pool_idx == kept
    assert pool.available_size() == SIZE - 2


def test_a_request_named_twice_gets_one_row() -> None:
    pool = make_pool()
    request = Holder()
    assert pool.alloc([request, request]) == [request.req_pool_idx] * 2
    assert pool.available_size() == SIZE - 1


def test_two_requests_that_look_alike_get_a_row_each() -> None:
    pool = make_pool()
    rows = pool.alloc([Holder(), Holder()])
    assert rows is not None
    assert len(set(rows)) == 2


def test_a_freed_request_holds_no_row() -> None:
    pool = make_pool()
    request = Holder()
    pool.alloc([request])
    pool.free(request)
    assert request.req_pool_idx is None
    assert pool.available_size() == SIZE


BAD_ROWS: dict[str, tuple[type[KVCacheError], Callable[[ReqToTokenPool, int, int], object]]] = {
    "negative number": (GeometryError, lambda pool, held, free: pool.alloc(-1)),
    "a float number": (GeometryError, lambda pool, held, free: pool.alloc(2.0)),
    "a tensor of numbers": (
        GeometryError,
        lambda pool, held, free: pool.alloc(ints(1, 1)),
    ),
    "a float number of rows": (
        GeometryError,
        lambda pool, held, free: pool.alloc_rows(1.0),
    ),
    "a row claimed twice": (
        InvalidSlotError,
        lambda pool, held, free: pool.alloc([Holder(held), Holder(held), Holder()]),
    ),
    "free a float": (
        InvalidSlotError,
        lambda pool, held, free: pool.free_rows([held + 0.5]),
    ),
    "free a name": (
        InvalidSlotError,
        lambda pool, held, free: pool.free_rows(str(held)),
    ),
    "free a huge row": (InvalidSlotError, lambda pool, held, free: pool.free_rows([2**70])),
    "read a float": (
        GeometryError,
        lambda pool, held, free: pool.row(held, 1.0),
    ),
    "negative rows": (GeometryError, lambda pool, held, free: pool.alloc_rows(-1)),
    "claimed row": (
        InvalidSlotError,
        lambda pool, held, free: pool.alloc([Holder(), Holder(free)]),
    ),
    "claimed padding": (InvalidSlotError, lambda pool, held, free: pool.alloc([Holder(0)])),
    "free nothing": (DoubleFreeError, lambda pool, held, free: pool.free(Holder())),
    "free twice": (DoubleFreeError, lambda pool, held, free: pool.free_rows([held, free])),
    "free one twice": (DoubleFreeError, lambda pool, held, free: pool.free_rows([held, held])),
    "free padding": (InvalidSlotError, lambda pool, held, free: pool.free_rows([held, 0])),
    "free negative": (InvalidSlotError, lambda pool, held, free: pool.free_rows([-1])),
    "free beyond": (InvalidSlotError, lambda pool, held, free: pool.free_rows([held, SIZE + 1])),
    "read free row": (InvalidSlotError, lambda pool, held, free: pool.row(free, 1)),
    "read padding": (InvalidSlotError, lambda pool, held, free: pool.row(0, 1)),
    "read beyond": (InvalidSlotError, lambda pool, held, free: pool.row(SIZE + 1, 1)),
    "read too long": (GeometryError, lambda pool, held, free: pool.row(held, CONTEXT + 1)),
    "read negative": (GeometryError, lambda pool, held, free: pool.row(held, -1)),
}


@pytest.mark.parametrize("case", sorted(BAD_ROWS))
def test_a_rejected_call_about_rows_changes_nothing(case: str) -> None:
    error, call = BAD_ROWS[case]
    pool = make_pool()
    rows = pool.alloc(1)
    assert rows is not None
    before = state(pool)
    with pytest.raises(KVCacheError) as caught:
        call(pool, rows[0], pool.free_slots[0])
    assert caught.type is error
    assert state(pool) == before


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("alloc", lambda pool: pool.alloc(-1)),
        ("alloc_rows", lambda pool: pool.alloc_rows(-1)),
        ("free", lambda pool: pool.free(Holder(1))),
        ("free_rows", lambda pool: pool.free_rows([1])),
        ("row", lambda pool: pool.row(1, 1)),
    ],
)
def test_a_rejected_call_names_its_own_operation(
    operation: str, call: Callable[[ReqToTokenPool], object]
) -> None:
    with pytest.raises(KVCacheError, match=f"^{operation}: "):
        call(make_pool())


def test_numbers_may_be_of_any_integer_type() -> None:
    pool = ReqToTokenPool(np.int64(SIZE), np.int32(CONTEXT), "cpu", False)
    rows = pool.alloc(np.int64(2))
    assert rows is not None
    assert all(type(row) is int for row in rows)
    row = np.int64(rows[0])
    pool.write((row, slice(np.int64(0), np.int64(2))), ints(5, 6))
    assert pool.row(row, np.int64(2)).tolist() == [5, 6]
    pool.free_rows(np.array(rows))
    assert sorted(pool.free_slots) == list(range(1, SIZE + 1))
    assert all(type(row) is int for row in pool.free_slots)


def test_a_row_that_was_returned_is_neither_returned_again_nor_read() -> None:
    pool = make_pool()
    rows = pool.alloc(2)
    assert rows is not None
    pool.free_rows(rows)
    before = state(pool)
    with pytest.raises(DoubleFreeError):
        pool.free_rows(rows[:1])
    with pytest.raises(InvalidSlotError):
        pool.row(rows[1], 1)
    assert state(pool) == before


def test_a_request_whose_row_was_taken_back_cannot_free_it() -> None:
    pool = make_pool()
    request = Holder()
    pool.alloc([request])
    pool.clear()
    with pytest.raises(DoubleFreeError):
        pool.free(request)
    assert pool.available_size() == SIZE


@pytest.mark.parametrize(("size", "context"), [(0, CONTEXT), (SIZE, 0), (-1, 1)])
def test_a_table_without_a_row_or_a_token_is_rejected(size: int, context: int) -> None:
    with pytest.raises(GeometryError):
        ReqToTokenPool(size, context, "cpu", False)


# kv rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_a_piece_of_a_row_is_written_and_nothing_beside_it(dtype: torch.dtype) -> None:
    pool = make_pool()
    rows = pool.alloc(SIZE)
    assert rows is not None
    pool.write((rows[0], slice(2, 5)), ints(7, 8, 9, dtype=dtype))
    expected = torch.zeros(SIZE + 1, CONTEXT, dtype=torch.int32)
    expected[rows[0], 2:5] = torch.tensor([7, 8, 9])
    assert torch.equal(pool.req_to_token, expected)


def test_a_piece_without_bounds_is_the_whole_row() -> None:
    pool = make_pool()
    rows = pool.alloc(1)
    assert rows is not None
    pool.write((rows[0], slice(None)), torch.arange(CONTEXT))
    assert pool.row(rows[0], CONTEXT).tolist() == list(range(CONTEXT))


def test_single_tokens_of_several_rows_are_written_padding_among_them() -> None:
    pool = make_pool()
    rows = pool.alloc(2)
    assert rows is not None
    pool.write((ints(rows[0], 0, rows[1]), ints(1, 0, CONTEXT - 1)), ints(11, 12, 13))
    expected = torch.zeros(SIZE + 1, CONTEXT, dtype=torch.int32)
    expected[rows[0], 1], expected[0, 0], expected[rows[1], CONTEXT - 1] = 11, 12, 13
    assert torch.equal(pool.req_to_token, expected)


def test_a_row_that_was_read_is_int64_and_keeps_its_slots_when_the_table_changes() -> None:
    pool = make_pool()
    rows = pool.alloc(1)
    assert rows is not None
    pool.write((rows[0], slice(0, 2)), ints(5, 6))
    row = pool.row(rows[0], 2)
    pool.write((rows[0], slice(0, 2)), ints(1, 1))
    assert row.dtype == torch.int64
    assert row.tolist() == [5, 6]


Write = tuple[type[KVCacheError], Callable[[int, int], Any], torch.Tensor]

BAD_WRITES: dict[str, Write] = {
    "free row": (InvalidSlotError, lambda held, free: (free, slice(0, 2)), ints(1, 2)),
    "padding row": (InvalidSlotError, lambda held, free: (0, slice(0, 2)), ints(1, 2)),
    "negative row": (InvalidSlotError, lambda held, free: (-1, slice(0, 2)), ints(1, 2)),
    "slots beyond int32": (
        InvalidSlotError,
        lambda held, free: (held, slice(0, 2)),
        ints(1, 2**31),
    ),
    "points beyond int32": (
        InvalidSlotError,
        lambda held, free: (ints(held, held), ints(0, 1)),
        ints(1, -(2**31) - 1),
    ),
    "a float row": (InvalidSlotError, lambda held, free: (held + 0.5, slice(0, 1)), ints(1)),
    "a float piece": (GeometryError, lambda held, free: (held, slice(0, 1.0)), ints(1)),
    "a row in a tensor": (
        IndexTensorError,
        lambda held, free: (torch.tensor(held), slice(0, 1)),
        ints(1),
    ),
    "beyond the row": (
        GeometryError,
        lambda held, free: (held, slice(CONTEXT - 1, CONTEXT + 1)),
        ints(1, 2),
    ),
    "before the row": (GeometryError, lambda held, free: (held, slice(-2, 0)), ints(1, 2)),
    "backwards": (GeometryError, lambda held, free: (held, slice(3, 1)), ints(1, 2)),
    "fewer slots": (GeometryError, lambda held, free: (held, slice(0, 2)), ints(1)),
    "more slots": (GeometryError, lambda held, free: (held, slice(0, 2)), ints(1, 2, 3)),
    "steps": (IndexTensorError, lambda held, free: (held, slice(0, 4, 2)), ints(1, 2)),
    "a row alone": (IndexTensorError, lambda held, free: held, ints(1, 2)),
    "a position alone": (IndexTensorError, lambda held, free: (held, 1), ints(1)),
    "float slots": (IndexTensorError, lambda held, free: (held, slice(0, 1)), torch.tensor([1.0])),
    "slots in a matrix": (
        IndexTensorError,
        lambda held, free: (held, slice(0, 2)),
        torch.tensor([[1, 2]]),
    ),
    "points in a free row": (
        InvalidSlotError,
        lambda held, free: (ints(held, free), ints(0, 0)),
        ints(1, 2),
    ),
    "points in a negative row": (
        InvalidSlotError,
        lambda held, free: (ints(held, -1), ints(0, 0)),
        ints(1, 2),
    ),
    "points in a row beyond": (
        InvalidSlotError,
        lambda held, free: (ints(held, SIZE + 1), ints(0, 0)),
        ints(1, 2),
    ),
    "points beyond the row": (
        GeometryError,
        lambda held, free: (ints(held, held), ints(0, CONTEXT)),
        ints(1, 2),
    ),
    "points before the row": (
        GeometryError,
        lambda held, free: (ints(held, held), ints(0, -1)),
        ints(1, 2),
    ),
    "points without a slot": (
        GeometryError,
        lambda held, free: (ints(held, held), ints(0, 1)),
        ints(1),
    ),
    "float rows": (
        IndexTensorError,
        lambda held, free: (torch.tensor([1.0]), ints(0)),
        ints(1),
    ),
    "points on another device": (
        IndexTensorError,
        lambda held, free: (ints(held), torch.zeros(1, dtype=torch.int64, device="meta")),
        ints(1),
    ),
}


@pytest.mark.parametrize("case", sorted(BAD_WRITES))
def test_a_rejected_write_changes_nothing(case: str) -> None:
    error, indices, values = BAD_WRITES[case]
    pool = make_pool()
    rows = pool.alloc(1)
    assert rows is not None
    before = state(pool)
    with pytest.raises(KVCacheError) as caught:
        pool.write(indices(rows[0], pool.free_slots[0]), values)
    assert caught.type is error
    assert state(pool) == before


# The memory saver


def test_a_table_under_a_saver_is_given_back_and_comes_back_empty_in_the_same_place() -> None:
    saver = HostMemorySaver()
    pool = ReqToTokenPool(1000, 4096, "cpu", True, memory_saver=saver)
    rows = pool.alloc(1)
    assert rows is not None
    pool.write((rows[0], slice(0, 2)), ints(5, 6))
    address, nbytes = pool.req_to_token.data_ptr(), pool.req_to_token.nbytes
    assert saver.resident_bytes(KV_CACHE) >= nbytes
    saver.pause(KV_CACHE)
    assert saver.resident_bytes(KV_CACHE) == 0
    saver.resume(KV_CACHE)
    assert pool.req_to_token.data_ptr() == address
    assert not pool.req_to_token.any()
    pool.write((rows[0], slice(0, 2)), ints(7, 8))
    assert pool.row(rows[0], 2).tolist() == [7, 8]


def test_a_paused_table_is_neither_read_nor_written_but_rows_can_be_taken_back() -> None:
    saver = HostMemorySaver()
    pool = ReqToTokenPool(SIZE, CONTEXT, "cpu", True, memory_saver=saver)
    request = Holder()
    rows = pool.alloc([request])
    assert rows is not None
    saver.pause(KV_CACHE)
    reads_and_writes: list[Callable[[], object]] = [
        lambda: pool.req_to_token,
        lambda: pool.row(rows[0], 1),
        lambda: pool.write((rows[0], slice(0, 1)), ints(1)),
        lambda: pool.write((ints(rows[0]), ints(0)), ints(1)),
    ]
    for call in reads_and_writes:
        with pytest.raises(PausedPoolError):
            call()
    pool.free(request)
    assert pool.available_size() == SIZE
    saver.resume(KV_CACHE)
    assert not pool.req_to_token.any()


def test_a_table_without_a_saver_of_its_own_belongs_to_the_saver_of_the_process() -> None:
    assert ReqToTokenPool(SIZE, CONTEXT, "cpu", True).memory_saver is default_saver("cpu")
    assert ReqToTokenPool(SIZE, CONTEXT, "cpu", False).memory_saver is None


def test_a_table_without_the_flag_ignores_a_saver() -> None:
    saver = HostMemorySaver()
    with saver.region(KV_CACHE):
        pool = ReqToTokenPool(SIZE, CONTEXT, "cpu", False, memory_saver=saver)
    assert saver.resident_bytes(KV_CACHE) == 0
    saver.pause(KV_CACHE)
    assert not pool.req_to_token.any()


def test_a_saver_that_saves_nothing_never_pauses_a_table() -> None:
    saver = NoMemorySaver()
    pool = ReqToTokenPool(SIZE, CONTEXT, "cpu", True, memory_saver=saver)
    pool.req_to_token[1, 0] = 7
    saver.pause(KV_CACHE)
    assert int(pool.req_to_token[1, 0]) == 7

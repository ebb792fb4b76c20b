"""Extend and decode against a loop over requests that places one token after the other."""

import random
from typing import Any

import pytest
import torch

from kvcore import BaseTokenToKVPoolAllocator, GeometryError, IndexTensorError
from kvcore.allocator import batch as batches

PAGE_SIZES = [1, 2, 4, 16]


def place_by_hand(
    rows: list[list[int]], lengths: list[int], free_pages: list[int], page_size: int
) -> list[int] | None:
    """New slots of each row, one token at a time, new pages in the order of the free list."""
    left = list(free_pages)
    placed: list[int] = []
    for row, length in zip(rows, lengths, strict=True):
        last = row[-1] if row else -1
        for position in range(len(row), length):
            if position % page_size == 0:
                if not left:
                    return None
                last = left.pop(0) * page_size
            else:
                last += 1
            placed.append(last)
    return placed


def batch(rows: list[list[int]], lengths: list[int]) -> tuple[Any, ...]:
    prefix = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    total = torch.tensor(lengths, dtype=torch.int64)
    last = torch.tensor([row[-1] if row else -1 for row in rows], dtype=torch.int64)
    return prefix, prefix.clone(), total, total.clone(), last


def grow(
    allocator: BaseTokenToKVPoolAllocator, rows: list[list[int]], lengths: list[int]
) -> list[int] | None:
    prefix, prefix_cpu, total, total_cpu, last = batch(rows, lengths)
    if all(length == len(row) + 1 for row, length in zip(rows, lengths, strict=True)):
        slots = allocator.alloc_decode(total, total_cpu, last)
    else:
        slots = allocator.alloc_extend(
            prefix, prefix_cpu, total, total_cpu, last, int((total - prefix).sum())
        )
    return None if slots is None else slots.tolist()


@pytest.mark.parametrize("kind", ["single", "hybrid"])
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_batches_get_the_slots_that_a_loop_would_give(
    kind: str, page: int, need_sort: bool, validate: bool, laws: Any
) -> None:
    choose = random.Random(page)
    make = laws.make_single if kind == "single" else laws.make_hybrid
    allocator = make(page, need_sort=need_sort, validate=validate)
    full = allocator if kind == "single" else allocator.full_attn_allocator
    rows: list[list[int]] = []
    refused = 0
    for _ in range(150):
        rows += [[] for _ in range(choose.randint(0, 2))]
        step = choose.choice(["extend", "decode", "retire"])
        if step == "retire":
            choose.shuffle(rows)
            for row in rows[3:]:
                allocator.free(torch.tensor(row, dtype=torch.int64))
            del rows[3:]
        lengths = [
            len(row) + (1 if step == "decode" else choose.randint(0, 2 * page)) for row in rows
        ]
        # The order of the free list is the allocator's own; the law is how rows fill it.
        allocator.merge_and_sort_free()
        expected = place_by_hand(rows, lengths, full.free_pages.tolist(), page)
        if kind == "hybrid" and expected is not None:
            new_pages = sum(1 for slot in expected if slot % page == 0)
            if new_pages * page > allocator.swa_available_size():
                expected = None
        before = laws.snapshot(allocator)
        slots = grow(allocator, rows, lengths)
        assert slots == expected
        if slots is None:
            refused += 1
            assert laws.snapshot(allocator) == before
            continue
        if kind == "hybrid":
            peers = allocator.translate_loc_from_full_to_swa(torch.tensor(slots).long()).tolist()
            assert all(peer >= page for peer in peers)
            assert [peer % page for peer in peers] == [slot % page for slot in slots]
        for row, length in zip(rows, lengths, strict=True):
            row += [slots.pop(0) for _ in range(length - len(row))]
        lent = [p for row in rows for p in laws.pages_of(torch.tensor(row), page)]
        if kind == "hybrid":
            laws.check_hybrid(allocator, lent)
        else:
            laws.check_single(allocator, lent)
    assert refused > 0, "the pool must have run out at times"


def test_an_empty_batch_gets_an_empty_tensor(single: Any, hybrid: Any) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    for allocator in (single, hybrid):
        assert allocator.alloc_extend(empty, empty, empty, empty, empty, 0).shape == (0,)
        assert allocator.alloc_decode(empty, empty, empty).shape == (0,)


def test_lengths_of_any_integer_dtype_are_taken(single: Any) -> None:
    one = torch.tensor([1], dtype=torch.int32)
    none = torch.tensor([0], dtype=torch.int32)
    last = torch.tensor([-1], dtype=torch.int32)
    slots = single.alloc_extend(none, none, one, one, last, 1)
    assert slots.dtype == torch.int64
    assert single.alloc_decode(one + 1, one + 1, slots.int()).dtype == torch.int64


def test_a_decode_begins_a_page_exactly_at_a_page_boundary(single: Any, laws: Any) -> None:
    page = single.page_size
    row = laws.extend_row(single, laws.no_row, page)
    available = single.available_size()
    length = torch.tensor([page + 1])
    slots = single.alloc_decode(length, length, row[-1:])
    assert single.available_size() == available - page
    assert int(slots) % page == 0
    if page > 1:
        again = single.alloc_decode(length + 1, length + 1, slots)
        assert single.available_size() == available - page
        assert int(again) == int(slots) + 1


def test_exhaustion_is_seen_before_the_free_list_is_read(single: Any, laws: Any) -> None:
    page = single.page_size
    row = laws.extend_row(single, laws.no_row, page)
    single.alloc(single.available_size())
    before = laws.snapshot(single)
    length = torch.tensor([page + 1])
    assert single.alloc_decode(length, length, row[-1:]) is None
    assert laws.extend_row(single, row, 3 * page) is None
    assert laws.snapshot(single) == before


def test_a_continued_page_needs_no_room(laws: Any, validate: bool) -> None:
    for allocator in (laws.make_single(4, validate=validate), laws.make_hybrid(4)):
        row = laws.extend_row(allocator, laws.no_row, 2)
        allocator.alloc(allocator.available_size())
        assert laws.extend_row(allocator, row, 4).tolist()[2:] == [row[1] + 1, row[1] + 2]


def good_extend() -> dict[str, Any]:
    lengths = {"prefix_lens": [0, 0], "seq_lens": [3, 2]}
    vectors = {name: torch.tensor(values) for name, values in lengths.items()}
    return {
        **vectors,
        **{f"{name}_cpu": vector for name, vector in vectors.items()},
        "last_loc": torch.tensor([-1, -1]),
        "extend_num_tokens": 5,
    }


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"extend_num_tokens": 4}, GeometryError),
        ({"extend_num_tokens": 6}, GeometryError),
        ({"last_loc": torch.tensor([-1])}, GeometryError),
        ({"seq_lens": torch.tensor([3, 2, 1])}, GeometryError),
        ({"seq_lens_cpu": torch.tensor([5])}, GeometryError),
        ({"prefix_lens": torch.tensor([0])}, GeometryError),
        ({"prefix_lens_cpu": torch.tensor([-1, 1])}, GeometryError),
        ({"seq_lens_cpu": torch.tensor([6, -1])}, GeometryError),
        ({"last_loc": torch.tensor([-1.0, -1.0])}, IndexTensorError),
        ({"prefix_lens": torch.tensor([[0, 0]])}, IndexTensorError),
        ({"seq_lens": torch.tensor([True, True])}, IndexTensorError),
        ({"last_loc": [-1, -1]}, IndexTensorError),
        ({"seq_lens": torch.empty(2, dtype=torch.int64, device="meta")}, IndexTensorError),
        (
            {"prefix_lens_cpu": torch.empty(2, dtype=torch.int64, device="meta")},
            IndexTensorError,
        ),
    ],
)
def test_a_misshapen_extend_is_always_refused(
    single: Any, hybrid: Any, change: dict[str, Any], error: type[Exception], refuses: Any
) -> None:
    for allocator in (single, hybrid):
        refuses(allocator, error, allocator.alloc_extend, **(good_extend() | change))


def test_a_misshapen_decode_is_always_refused(single: Any, hybrid: Any, refuses: Any) -> None:
    two, one = torch.tensor([1, 1]), torch.tensor([1])
    for allocator in (single, hybrid):
        refuses(allocator, GeometryError, allocator.alloc_decode, two, one, two)
        refuses(allocator, GeometryError, allocator.alloc_decode, one, one, two)
        refuses(allocator, GeometryError, allocator.alloc_decode, one - 1, one - 1, one)
        refuses(allocator, IndexTensorError, allocator.alloc_decode, one.float(), one, one)


def test_many_rows_are_placed_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(5)
    for page_size in (2, 4, 16):
        for _ in range(40):
            rows = [
                [choose.randint(1, 9) * page_size + at % page_size for at in range(length)]
                for length in choose.choices(range(3 * page_size), k=choose.randint(1, 5))
            ]
            lengths = [len(row) + choose.randint(0, 2 * page_size) for row in rows]
            made = batches.ExtendBatch.checked(
                "test",
                *batch(rows, lengths),
                sum(lengths) - sum(map(len, rows)),
                torch.device("cpu"),
            )
            pages = torch.arange(20, 20 + made.num_new_pages(page_size))
            few = made.slots(pages, page_size)
            expected = place_by_hand(rows, lengths, pages.tolist(), page_size)
            assert few.tolist() == expected
            monkeypatch.setattr(batches, "_FEW_ROWS", 0)
            assert made.slots(pages, page_size).tolist() == expected
            monkeypatch.undo()


def test_a_decode_is_placed_by_the_device_as_by_the_host() -> None:
    choose = random.Random(6)
    for page_size in (2, 4, 16):
        for _ in range(40):
            rows = [
                [choose.randint(1, 9) * page_size + at % page_size for at in range(length)]
                for length in choose.choices(range(3 * page_size), k=choose.randint(1, 6))
            ]
            lengths = [len(row) + 1 for row in rows]
            _, _, total, total_cpu, last = batch(rows, lengths)
            made = batches.DecodeBatch.checked("test", total, total_cpu, last, torch.device("cpu"))
            pages = torch.arange(20, 20 + made.num_new_pages(page_size))
            expected = place_by_hand(rows, lengths, pages.tolist(), page_size)
            assert made.slots(pages, page_size).tolist() == expected
            if pages.numel():
                by_device = made.placed_by_the_device(last + 1, pages, page_size)
                assert by_device.tolist() == expected

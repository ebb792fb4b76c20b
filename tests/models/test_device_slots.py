"""Device slots under logical ones (HiSparse): when calls on them are allowed, what follows, and
which answers are wrong.

Leaves out how many of them an op needs: test_demand.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Contract, Done, Lent, Mismatch, Outcome, Refused, ops
from kvcore.models.ops import Op
from kvcore.models.state import NO_PEER

SIZE = 4
ROWS = (ops.Alloc(1, 2), ops.Extend(((2, 3),)))
LOGICAL = (ops.ExtendLogical(((1, 6),)),)
BUFFER = (ops.Alloc(1, 2), ops.DeviceBuffer(1, 1, 2))
NO_POOL = "no device pool"
NOT_MAPPED = "last device entry of sequence 2 is not mapped"


@pytest.fixture
def books(keep: Callable[..., Any]) -> Any:
    """One device slot for each of half the logical ones."""
    return keep(swa_pages=0, device_pages=4)


@pytest.fixture
def compressed(keep: Callable[..., Any]) -> Any:
    """One device slot for four logical ones, two of them a page, over a hybrid pool."""
    return keep(page_size=8, device_pages=4, compress=4)


def at(page: int, *offsets: int) -> tuple[int, ...]:
    """Slots of a page, all of them unless offsets are named."""
    return tuple(page * SIZE + offset for offset in offsets or range(SIZE))


# Rules.


@pytest.mark.parametrize(
    ("before", "op", "why"),
    [
        ((), ops.ExtendLogical(((1, 3), (2, 5))), None),
        ((), ops.ExtendLogical(()), "each sequence once"),
        ((), ops.ExtendLogical(((1, 3), (1, 5))), "each sequence once"),
        ((), ops.ExtendLogical(((1, 0),)), "at least one token"),
        ((*ROWS, ops.Free(1)), ops.ExtendLogical(((1, 1),)), "was used before"),
        (ROWS, ops.ExtendLogical(((2, 1),)), None),
        (ROWS, ops.Extend(((2, 1),)), None),
        (ROWS, ops.Extend(((9, 1), (2, 1))), None),
        ((*ROWS, ops.FreeDevice(2)), ops.Extend(((9, 1), (2, 1))), NOT_MAPPED),
        ((*ROWS, ops.DeviceBuffer(2, 1, 1)), ops.Extend(((2, 1),)), NOT_MAPPED),
        ((ops.ExtendLogical(((2, 3),)),), ops.Extend(((2, 1),)), NOT_MAPPED),
        ((*ROWS, ops.ExtendLogical(((2, 1),))), ops.Extend(((2, 1),)), None),
        ((*ROWS, ops.FreeDevice(2)), ops.ExtendLogical(((2, 1),)), None),
        ((*ROWS, ops.FreeDevice(2)), ops.Decode((2,)), None),
        (ROWS, ops.FreeDevice(1), None),
        (ROWS, ops.FreeDevice(1, 1, 2, "sparse"), None),
        (LOGICAL, ops.FreeDevice(1), None),
        (ROWS, ops.FreeDevice(1, form="segment"), "by segment"),
        (ROWS, ops.FreeDevice(1, form="segments"), "by segments"),
        (ROWS, ops.FreeDevice(3), "no sequence 3"),
        (ROWS, ops.FreeDevice(1, 2, 3), "has no pages"),
        (ROWS, ops.DeviceBuffer(1, 1, 1), None),
        (LOGICAL, ops.DeviceBuffer(1, 1, 1), None),
        (ROWS, ops.DeviceBuffer(1, 1, 99), None),
        (ROWS, ops.DeviceBuffer(1, 1, 0), "an empty buffer"),
        (ROWS, ops.DeviceBuffer(1, 1, -1), "an empty buffer"),
        (ROWS, ops.DeviceBuffer(3, 1, 1), "no sequence 3"),
        (BUFFER, ops.DeviceBuffer(1, 1, 1), "buffer 1 was used before"),
        ((*BUFFER, ops.FreeBuffer(1)), ops.DeviceBuffer(1, 1, 1), "buffer 1 was used before"),
        (BUFFER, ops.FreeBuffer(1), None),
        (BUFFER, ops.FreeBuffer(2), "no buffer 2"),
        ((*BUFFER, ops.FreeBuffer(1)), ops.FreeBuffer(1), "no buffer 1"),
        ((*BUFFER, ops.Clear()), ops.FreeBuffer(1), "no buffer 1"),
        ((*BUFFER, ops.Free(1)), ops.FreeBuffer(1), None),
    ],
    ids=str,
)
def test_an_op_is_allowed_exactly_when_its_rule_says_so(
    before: tuple[Op, ...], op: Op, why: str | None, books: Any
) -> None:
    books.do(*before)
    assert books.model.allows(op) is (why is None)
    assert why is None or why in books.model.why_not(op)


@pytest.mark.parametrize(
    "op",
    [ops.ExtendLogical(((9, 1),)), ops.FreeDevice(1), ops.DeviceBuffer(1, 1, 1)],
    ids=str,
)
def test_without_device_slots_there_are_no_calls_on_them(op: Op, keep: Callable[..., Any]) -> None:
    books = keep()
    books.do(*ROWS)
    assert NO_POOL in books.model.why_not(op)


def test_callers_that_keep_what_they_free_keep_it_here_too(keep: Callable[..., Any]) -> None:
    books = keep(swa_pages=0, device_pages=4, contract=Contract(overwrite_deferred=False))
    books.do(*ROWS)
    assert "keep the tensors" in books.model.why_not(ops.FreeDevice(1, overwrite=True))


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ((ops.ExtendLogical(((2, 3),)),), None),
        ((ops.ExtendLogical(((2, 4),)),), NOT_MAPPED),
        ((ops.Extend(((2, 4),)), ops.ExtendLogical(((2, 2),))), None),
        ((ops.Extend(((2, 4),)), ops.FreeDevice(2)), NOT_MAPPED),
        ((ops.ExtendLogical(((2, 8),)),), None),
    ],
    ids=str,
)
def test_a_row_without_a_whole_entry_in_its_last_page_can_always_go_on(
    before: tuple[Op, ...], why: str | None, compressed: Any
) -> None:
    compressed.do(*before)
    found = compressed.model.why_not(ops.Extend(((2, 1),)))
    assert found is None if why is None else why in found


# What follows.


def test_every_token_of_an_extend_has_an_entry_with_its_stamp(books: Any, partition: Any) -> None:
    books.do(ops.Extend(((1, 6),)))
    assert all(books.device_pages(1))
    assert [page.device_stamps for page in books.pages(1)] == [[1, 2, 3, 4], [5, 6]]
    partition(books)


def test_logical_tokens_have_no_entry(books: Any, partition: Any) -> None:
    books.do(ops.Extend(((1, 2),)), ops.Decode((1,)), ops.ExtendLogical(((1, 2),)))
    first, second = books.pages(1)
    assert first.device_stamps == [1, 2, NO_PEER, NO_PEER]
    assert (second.device, second.device_stamps) == (0, [NO_PEER])
    partition(books)


def test_where_entries_are_few_each_has_the_stamp_of_the_token_that_completes_it(
    compressed: Any, partition: Any
) -> None:
    compressed.do(ops.Extend(((1, 3),)))
    assert compressed.device_pages(1) == [0]
    compressed.do(ops.Extend(((1, 6),)))
    stamps = [page.device_stamps for page in compressed.pages(1)]
    assert stamps == [[0, 0, 0, 4, 0, 0, 0, 8], [0]]
    assert [device != 0 for device in compressed.device_pages(1)] == [True, False]
    partition(compressed)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "alone"])
def test_free_device_gives_up_the_device_side_alone(
    grouped: bool, books: Any, partition: Any
) -> None:
    books.do(*ROWS, *[ops.GroupBegin()] * grouped)
    full, (given, kept) = books.full_pages(1), books.device_pages(1)
    books.do(ops.FreeDevice(1, 0, 1))
    assert books.full_pages(1) == full
    assert books.device_pages(1) == [0, kept]
    assert books.pages(1)[0].device_stamps == [NO_PEER] * SIZE
    side = books.model.device
    assert given in (side.pending if grouped else side.free)
    assert books.model.device_detached == ({full[0]: given} if grouped else {})
    partition(books)


def test_the_end_of_a_group_settles_the_device_side_too(books: Any, partition: Any) -> None:
    books.do(*ROWS, *BUFFER[1:], ops.GroupBegin(), ops.FreeBuffer(1), ops.FreeDevice(2))
    assert len(books.model.device.pending) == 3
    books.do(ops.GroupEnd())
    assert books.model.device.free == {1, 2, 3, 4}
    assert books.model.device_detached == {}
    partition(books)


@pytest.mark.parametrize("op", [ops.Free(1), ops.Retract(1, 1)], ids=["free", "retract"])
def test_a_freed_row_gives_up_its_device_pages(op: Op, books: Any, partition: Any) -> None:
    books.do(*ROWS)
    device = set(books.device_pages(1))
    books.do(op)
    assert device <= books.model.device.free
    partition(books)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "alone"])
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_buffer_takes_the_rows_device_pages_first(
    pages: int, grouped: bool, books: Any, partition: Any
) -> None:
    books.do(ops.Alloc(1, 2), *[ops.GroupBegin()] * grouped)
    own = books.device_pages(1)
    books.do(ops.DeviceBuffer(1, 7, pages))
    buffer = books.model.buffers[7]
    assert len(buffer) == pages
    assert list(buffer[:2]) == own[:pages]
    assert books.device_pages(1) == [0, 0]
    assert [page.device_stamps for page in books.pages(1)] == [[NO_PEER] * SIZE] * 2
    surplus = set(own[pages:])
    assert surplus <= (books.model.device.pending if grouped else books.model.device.free)
    partition(books)


def test_a_row_without_device_pages_gets_a_buffer_of_new_ones(books: Any, partition: Any) -> None:
    books.do(*LOGICAL, ops.DeviceBuffer(1, 1, 3))
    assert len(books.model.buffers[1]) == 3
    partition(books)


def test_a_refused_buffer_leaves_its_name_and_the_row_alone(books: Any) -> None:
    books.do(*ROWS)
    before = books.snapshot()
    assert books.do(ops.DeviceBuffer(1, 1, 4)) == Refused()
    assert books.snapshot() == before


def test_a_buffer_given_back_is_free(books: Any, partition: Any) -> None:
    books.do(*BUFFER)
    lent = set(books.model.buffers[1])
    books.do(ops.FreeBuffer(1))
    assert lent <= books.model.device.free
    assert books.model.buffers == {}
    partition(books)


def test_a_clear_drops_buffers(books: Any, partition: Any) -> None:
    books.do(*BUFFER, ops.Clear())
    assert books.model.device.free == {1, 2, 3, 4}
    partition(books)


def test_a_refusal_for_lack_of_device_pages_changes_nothing(books: Any) -> None:
    books.do(*ROWS)
    before = books.snapshot()
    for op in (ops.Alloc(5, 2), ops.Extend(((5, 9),)), ops.Extend(((2, 6),))):
        assert books.do(op) == Refused()
        assert books.snapshot() == before
    assert isinstance(books.do(ops.ExtendLogical(((5, 9),))), Lent)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "alone"])
@pytest.mark.parametrize("locked", [True, False], ids=["locked", "unlocked"])
def test_a_recovery_keeps_the_entries_of_the_slots_that_stay(
    locked: bool, grouped: bool, compressed: Any, partition: Any
) -> None:
    compressed.do(ops.Alloc(1, 1), ops.Alloc(2, 1), *[ops.GroupBegin()] * grouped, ops.FreeSwa(1))
    own, others = compressed.device_pages(1), compressed.device_pages(2)
    stamps = [compressed.pages(seq)[0].device_stamps for seq in (1, 2)]
    compressed.do(ops.Recover(1, 2, locked))
    assert compressed.device_pages(1) == (own if locked else others)
    assert compressed.pages(1)[0].device_stamps == stamps[0 if locked else 1]
    side = compressed.model.device
    assert set(others if locked else own) <= (side.pending if grouped else side.free)
    partition(compressed)


# Answers. With the bookkeeper's lowest-first free lists, row 1 holds device pages 1 and 2, row 2
# device page 3 with three tokens.


@pytest.mark.parametrize(
    ("op", "answer", "law"),
    [
        (ops.Alloc(9, 1), Refused(), "L7"),
        (ops.Alloc(9, 2), Lent(at(4) + at(5), (), at(4) + at(1)), "L7"),
        (ops.Alloc(9, 1), Lent(at(4)), "layout"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(4, 0, 1, 2)), "layout"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(0)), "L4"),
        (ops.Alloc(9, 1), Lent(at(4), (), (0,) * SIZE), "L4"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(5)), "bounds"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(-1)), "bounds"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(3)), "L4"),
        (ops.Alloc(9, 1), Lent(at(4), (), at(4, 0, 1, 3, 2)), "L4"),
        (ops.Alloc(9, 1), Lent(at(4), (), (*at(4, 0, 1, 2), 0)), "L4"),
        (ops.Extend(((2, 1),)), Lent(at(3, 3), (), at(4, 3)), "L4"),
        (ops.Extend(((2, 1),)), Lent(at(3, 3), (), (0,)), "L4"),
        (ops.Extend(((2, 1),)), Lent(at(4, 0), (), at(3, 3)), "layout"),
        (ops.ExtendLogical(((9, 4),)), Lent(at(4), (), at(4)), "L4"),
        (ops.ExtendLogical(((9, 4),)), Refused(), "L7"),
        (ops.Decode((2,)), Lent(at(3, 3), (), at(3, 3)), "L4"),
        (ops.DeviceBuffer(1, 1, 2), Refused(), "L7"),
        (ops.DeviceBuffer(1, 1, 4), Lent(at(1) + at(2) + at(4) + at(3)), "L7"),
        (ops.DeviceBuffer(1, 1, 2), Done(), "layout"),
        (ops.DeviceBuffer(1, 1, 2), Lent(at(1)), "layout"),
        (ops.DeviceBuffer(1, 1, 2), Lent(at(1) + at(2, 0, 1, 2)), "layout"),
        (ops.DeviceBuffer(1, 1, 1), Lent(at(1, 0, 2, 1, 3)), "layout"),
        (ops.DeviceBuffer(1, 1, 1), Lent(at(1) + at(2)), "layout"),
        (ops.DeviceBuffer(1, 1, 2), Lent(at(2) + at(1)), "layout"),
        (ops.DeviceBuffer(1, 1, 2), Lent(at(1) + at(4)), "layout"),
        (ops.DeviceBuffer(1, 1, 1), Lent(at(4)), "layout"),
        (ops.DeviceBuffer(1, 1, 3), Lent(at(1) + at(2) + at(3)), "L4"),
        (ops.DeviceBuffer(1, 1, 3), Lent(at(1) + at(2) + at(0)), "L4"),
        (ops.DeviceBuffer(1, 1, 3), Lent(at(1) + at(2) + at(9)), "bounds"),
        (ops.DeviceBuffer(1, 1, 3), Lent(at(1) + at(2) + at(1)), "L4"),
        (ops.FreeDevice(1), Lent(()), "layout"),
        (ops.FreeBuffer(1), Refused(), "layout"),
    ],
    ids=str,
)
def test_a_wrong_answer_breaks_its_law_and_is_not_followed(
    op: Op, answer: Outcome, law: str, books: Any
) -> None:
    books.do(*ROWS)
    before = books.snapshot()
    with pytest.raises(Mismatch) as caught:
        books.model.accept(op, answer)
    assert law in {clause.law for clause in caught.value.clauses}
    assert books.snapshot() == before


def test_a_device_page_twice_in_one_call_is_lent_once_too_often(books: Any) -> None:
    with pytest.raises(Mismatch, match="every device page lent once"):
        books.model.accept(ops.Alloc(1, 2), Lent(at(1) + at(2), (), at(1) * 2))
    books.do(*LOGICAL)
    with pytest.raises(Mismatch, match="every device page lent once"):
        books.model.accept(ops.DeviceBuffer(1, 1, 2), Lent(at(1) * 2))


@pytest.mark.parametrize(
    ("op", "answer"),
    [
        (ops.Alloc(9, 1), Lent(at(4), (), at(3))),
        (ops.DeviceBuffer(1, 1, 3), Lent(at(1) + at(2) + at(3))),
    ],
    ids=["alloc", "buffer"],
)
def test_device_pages_of_an_open_group_wait_for_its_end(
    op: Op, answer: Outcome, books: Any
) -> None:
    books.do(*ROWS, ops.GroupBegin(), ops.FreeDevice(2))
    with pytest.raises(Mismatch, match="device pages of an open group wait for its end"):
        books.model.accept(op, answer)


def test_a_token_that_completes_no_entry_has_none(compressed: Any) -> None:
    peers = tuple(range(8, 13))
    right = (0, 0, 0, 2, 0)
    for wrong in ((0, 0, 2, 2, 0), (0, 0, 0, 2, 3), (0, 0, 0, 3, 0)):
        with pytest.raises(Mismatch) as caught:
            compressed.model.accept(ops.Extend(((1, 5),)), Lent(peers, peers, wrong))
        assert {clause.law for clause in caught.value.clauses} == {"L4"}
    compressed.model.accept(ops.Extend(((1, 5),)), Lent(peers, peers, right))


def test_a_wrong_entry_is_named_by_its_token(books: Any) -> None:
    books.do(ops.Extend(((2, 3),)))
    with pytest.raises(Mismatch, match="token 3 mapped to device slot 7, saw 4"):
        books.model.accept(ops.Extend(((2, 1),)), Lent(at(1, 3), (), at(1, 0)))


def test_any_free_device_pages_will_do(books: Any) -> None:
    books.model.accept(ops.Alloc(1, 2), Lent(at(5) + at(2), (), at(3) + at(1)))
    assert books.device_pages(1) == [3, 1]
    books.model.accept(ops.DeviceBuffer(1, 1, 3), Lent(at(3) + at(1) + at(4)))
    assert books.model.buffers == {1: (3, 1, 4)}


def test_a_mismatch_for_want_of_room_names_the_device_pages(books: Any) -> None:
    with pytest.raises(Mismatch, match=r"1 device pages lent, since .* 4 device pages"):
        books.model.accept(ops.Alloc(1, 1), Refused())

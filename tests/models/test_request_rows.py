"""The request pool in the model: a row for each live sequence, and retraction through requests.

Leaves out how many rows an op needs: test_demand.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Lent, Mismatch, Outcome, Refused, ops
from kvcore.models.ops import Op
from kvcore.models.state import NO_PEER, UNKNOWN

SIZE = 4
PAIR = (ops.Alloc(1, 2), ops.Alloc(2, 1))
BACKUP = (*PAIR, ops.Retract(1, 1))


@pytest.fixture
def books(keep: Callable[..., Any]) -> Any:
    return keep(requests=3)


@pytest.fixture
def sliding(keep: Callable[..., Any]) -> Any:
    """Requests over one pool in which every layer slides."""
    return keep(swa_pages=0, pure_swa=True, requests=3)


def at(page: int) -> tuple[int, ...]:
    return tuple(page * SIZE + offset for offset in range(SIZE))


# Rules.


@pytest.mark.parametrize(
    ("before", "op", "why"),
    [
        (PAIR, ops.Retract(1, 1), None),
        ((*PAIR, ops.FreeSwa(1)), ops.Retract(1, 1), None),
        ((*PAIR, ops.GroupBegin()), ops.Retract(1, 1), None),
        ((*PAIR, ops.GroupBegin(), ops.FreeSwa(1, 0, 1)), ops.Retract(1, 1), "under way"),
        ((*PAIR, ops.GroupBegin(), ops.FreeSwa(1, 0, 1)), ops.Retract(2, 1), None),
        (
            (*PAIR, ops.GroupBegin(), ops.FreeSwa(1, 0, 1), ops.GroupEnd()),
            ops.Retract(1, 1),
            None,
        ),
        (BACKUP, ops.Restore(1, 3), None),
        (BACKUP, ops.Restore(1, 3, 4), "whole rows"),
        (BACKUP, ops.Restore(1, 3, 0), "whole rows"),
        ((*PAIR, ops.Alloc(3, 1)), ops.Alloc(4, 1), None),
    ],
    ids=str,
)
def test_an_op_is_allowed_exactly_when_its_rule_says_so(
    before: tuple[Op, ...], op: Op, why: str | None, books: Any
) -> None:
    said = "the window of the request moves on in the open group" if why == "under way" else why
    books.do(*before)
    assert books.model.allows(op) is (why is None)
    assert said is None or said in books.model.why_not(op)


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ((), None),
        ((0,), None),
        ((0, 1), None),
        ((1,), "gone at its front only"),
        ((0, 2), "gone at its front only"),
    ],
)
def test_where_every_layer_slides_a_request_retracts_what_is_behind_its_window(
    gone: tuple[int, ...], why: str | None, sliding: Any
) -> None:
    sliding.do(ops.Alloc(1, 3), *(ops.FreeSwa(1, page, page + 1) for page in gone))
    assert sliding.model.allows(ops.Retract(1, 1)) is (why is None)
    assert why is None or why in sliding.model.why_not(ops.Retract(1, 1))


def test_a_request_grows_to_the_length_of_its_row_and_no_further(keep: Callable[..., Any]) -> None:
    books = keep(1, 2, 0, pure_swa=True, requests=2)
    assert books.model.geometry.context_len == 4
    books.do(ops.Alloc(1, 2))
    for page in range(2):
        books.do(ops.FreeSwa(1, page, page + 1), ops.Decode((1,)))
    books.do(ops.FreeSwa(1, 2, 3))
    for op in (ops.Decode((1,)), ops.Extend(((1, 1),))):
        assert "the request row of sequence 1 is full" in books.model.why_not(op)
    assert books.model.allows(ops.Alloc(2, 1))


# What follows.


@pytest.mark.parametrize(
    "op",
    [ops.Alloc(9, 1), ops.Extend(((9, 3),)), ops.SwaTail(9, 4, 4), ops.LoadBack(9, 1, 1)],
    ids=str,
)
def test_a_new_sequence_takes_a_row(op: Op, books: Any, partition: Any) -> None:
    books.do(*PAIR, op)
    rows = [books.model.rows[seq].request for seq in (1, 2, 9)]
    assert sorted(rows) == [1, 2, 3]
    partition(books)


def test_a_sequence_that_goes_on_keeps_its_row(books: Any, partition: Any) -> None:
    books.do(*PAIR)
    before = books.model.rows[1].request
    books.do(ops.Extend(((1, 3),)), ops.Decode((1, 2)), ops.Relocate(1), ops.Free(1, 0, 1))
    assert books.model.rows[1].request == before
    partition(books)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "alone"])
@pytest.mark.parametrize(
    "op", [ops.Free(1), ops.Retract(1, 1), ops.Recover(2, 1, True, 1)], ids=lambda op: op.kind
)
def test_a_row_is_free_as_soon_as_its_sequence_has_no_pages(
    op: Op, grouped: bool, books: Any, partition: Any
) -> None:
    books.do(ops.Alloc(1, 1), ops.Alloc(2, 1), ops.FreeSwa(2), *[ops.GroupBegin()] * grouped)
    request = books.model.rows[1].request
    books.do(op)
    assert request in books.model.requests.free
    partition(books)


def test_a_restored_request_takes_a_row_again(books: Any, partition: Any) -> None:
    books.do(*BACKUP, ops.Alloc(3, 1), ops.Restore(1, 4))
    assert len({row.request for row in books.model.rows.values()}) == 3
    partition(books)


def test_a_restored_request_has_peers_from_where_its_window_stood(
    books: Any, partition: Any
) -> None:
    books.do(ops.Alloc(1, 3), ops.FreeSwa(1, 0, 2), ops.Retract(1, 1))
    kept = books.model.backups[1].swa_stamps[8:]
    books.do(ops.Restore(1, 2))
    assert [page.swa != 0 for page in books.pages(2)] == [False, False, True]
    assert [page.swa_stamps for page in books.pages(2)] == [[NO_PEER] * 4] * 2 + [kept]
    partition(books)


def test_a_request_whose_window_never_moved_has_peers_throughout(
    books: Any, partition: Any
) -> None:
    books.do(ops.Alloc(1, 3), ops.FreeSwa(1, 1, 2), ops.Retract(1, 1), ops.Restore(1, 2))
    assert all(page.fully_mapped for page in books.pages(2))
    assert books.pages(2)[1].swa_stamps == [UNKNOWN] * 4
    partition(books)


def test_where_every_layer_slides_a_restored_request_does_without_what_it_left_behind(
    sliding: Any, partition: Any
) -> None:
    sliding.do(ops.Extend(((1, 10),)), ops.FreeSwa(1, 0, 1))
    kept = [stamp for page in sliding.pages(1)[1:] for stamp in page.full_stamps]
    sliding.do(ops.Retract(1, 1))
    free, stamps = len(sliding.model.full.free), sliding.model.stamps
    answer = sliding.do(ops.Restore(1, 2))
    assert len(answer.slots) == len(kept) == 6
    assert len(sliding.model.full.free) == free - 2
    assert [page.gone for page in sliding.pages(2)] == [True, False, False]
    assert sliding.model.rows[2].tokens == 10
    assert [s for page in sliding.pages(2)[1:] for s in page.full_stamps] == kept
    assert sliding.model.stamps == stamps
    partition(sliding)

    # What it does without can be given up, and is nobody's; it went in no group.
    front = sliding.pages(2)[0]
    assert (front.full, front.swa, front.device) == (0, 0, 0)
    sliding.do(ops.GroupBegin())
    assert "went" in sliding.model.why_not(ops.Free(2))
    sliding.do(ops.GroupEnd())
    sliding.do(ops.FreeFull(2, 0, 1), ops.Free(2))
    partition(sliding)


def test_a_request_that_left_everything_behind_comes_back_without_slots(
    sliding: Any, partition: Any
) -> None:
    sliding.do(ops.Alloc(1, 2), ops.FreeSwa(1), ops.Retract(1, 1))
    answer = sliding.do(ops.Restore(1, 2))
    assert answer.slots == ()
    assert sliding.model.rows[2].tokens == 8
    partition(sliding)


def test_a_pool_of_one_request_is_a_request_pool_too(
    keep: Callable[..., Any], partition: Any
) -> None:
    books = keep(swa_pages=0, pure_swa=True, requests=1)
    books.do(ops.Alloc(1, 3), ops.FreeSwa(1, 0, 2), ops.Retract(1, 1))
    assert len(books.do(ops.Restore(1, 2)).slots) == 4
    assert books.do(ops.Alloc(3, 1)) == Refused()
    partition(books)


def test_a_clear_ends_every_request(books: Any, partition: Any) -> None:
    books.do(*PAIR, ops.Clear())
    assert books.model.requests.free == {1, 2, 3}
    partition(books)


def test_a_refusal_for_lack_of_rows_changes_nothing(books: Any) -> None:
    books.do(*PAIR, ops.Retract(2, 1), ops.Alloc(3, 1), ops.Alloc(4, 1))
    before = books.snapshot()
    for op in (ops.Alloc(5, 1), ops.Extend(((1, 1), (5, 1))), ops.Restore(1, 5)):
        assert books.do(op) == Refused()
        assert books.snapshot() == before
    assert isinstance(books.do(ops.Decode((1, 3))), Lent)


# Answers. Rows 1 and 2 of the request pool are taken.


@pytest.mark.parametrize(
    ("op", "answer", "law"),
    [
        (ops.Alloc(5, 1), Lent(at(4), at(4), (), ()), "L2"),
        (ops.Alloc(5, 1), Lent(at(4), at(4), (), (3, 3)), "L2"),
        (ops.Alloc(5, 1), Lent(at(4), at(4), (), (2,)), "L1"),
        (ops.Alloc(5, 1), Lent(at(4), at(4), (), (0,)), "L1"),
        (ops.Alloc(5, 1), Lent(at(4), at(4), (), (4,)), "L1"),
        (ops.Extend(((1, 4),)), Lent(at(4), at(4), (), (3,)), "L2"),
        (ops.Alloc(5, 1), Refused(), "L7"),
        (ops.Extend(((5, 4), (6, 4))), Lent(at(4) + at(5), at(4) + at(5), (), (3, 1)), "L7"),
    ],
    ids=str,
)
def test_a_wrong_answer_breaks_its_law_and_is_not_followed(
    op: Op, answer: Outcome, law: str, books: Any
) -> None:
    books.do(*PAIR)
    before = books.snapshot()
    with pytest.raises(Mismatch) as caught:
        books.model.accept(op, answer)
    assert {clause.law for clause in caught.value.clauses} == {law}
    assert books.snapshot() == before


def test_two_new_sequences_of_a_batch_have_two_rows(books: Any) -> None:
    both = ops.Extend(((5, 4), (6, 4)))
    slots = at(1) + at(2)
    with pytest.raises(Mismatch, match="2 rows of the request pool"):
        books.model.accept(both, Lent(slots, slots, (), (2, 2)))
    books.model.accept(both, Lent(slots, slots, (), (3, 1)))
    assert [books.model.rows[seq].request for seq in (5, 6)] == [3, 1]


def test_a_mismatch_for_want_of_room_names_the_requests(books: Any) -> None:
    with pytest.raises(Mismatch, match=r"1 requests lent, since .* 3 requests"):
        books.model.accept(ops.Alloc(1, 1), Refused())

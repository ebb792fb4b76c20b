"""What a caller keeps account of: the slots of each row, what its window left behind, what a name
gave up last.
"""

import pytest

from kvcore.targets.rows import SCRIBBLE, RowBook, some_of_each_page

SIZE = 4


def at(*pages: int) -> list[int]:
    """The slots of whole pages."""
    return [page * SIZE + offset for page in pages for offset in range(SIZE)]


@pytest.fixture
def book() -> RowBook:
    """Row 1 of pages 5, 2, 7, 3 and two slots of page 4; row 2 of page 9."""
    book = RowBook(SIZE)
    book.grow(1, at(5, 2, 7))
    book.grow(1, [*at(3), 16, 17])
    book.grow(2, at(9))
    book.changed.clear()
    return book


def test_a_row_knows_its_length_and_its_last_slot(book: RowBook) -> None:
    assert (book.length(1), book.pages(1), book.last(1)) == (18, 5, 17)
    assert (book.length(3), book.pages(3), book.last(3)) == (0, 0, -1)


def test_a_batch_says_how_rows_grow(book: RowBook) -> None:
    assert book.batch(((2, 3), (8, 1))) == ([4, 0], [7, 1], [39, -1])


@pytest.mark.parametrize(
    ("start", "stop", "slots"),
    [(0, 2, at(5, 2)), (3, None, [*at(3), 16, 17]), (4, 5, [16, 17])],
)
def test_a_span_is_the_slots_of_its_pages(
    book: RowBook, start: int, stop: int | None, slots: list[int]
) -> None:
    assert book.span(1, start, stop) == slots


def test_a_row_closes_up_over_what_leaves(book: RowBook) -> None:
    book.leave(1, 1, 3)
    assert book.slots[1] == [*at(5, 3), 16, 17]
    assert book.ghosts[1] == at(2, 7)
    assert book.changed == {1}


def test_a_row_that_leaves_whole_is_no_row(book: RowBook) -> None:
    book.leave_behind(2, 0, None)
    book.leave(2, 0, None)
    assert 2 not in book.slots
    assert book.left_behind(2) == set()
    assert book.changed == {2}


@pytest.mark.parametrize(
    ("start", "stop", "left", "ghosts"),
    [
        (0, 1, {0, 2}, at(5)),
        (0, 2, {1}, at(5)),
        (2, 3, {1, 2}, at(7)),
        (4, 5, {1, 3}, [16, 17]),
        (1, 4, set(), at(7)),
    ],
    ids=str,
)
def test_what_a_window_left_behind_moves_up_with_its_row(
    book: RowBook, start: int, stop: int, left: set[int], ghosts: list[int]
) -> None:
    book.leave_behind(1, 1, 2)
    book.leave_behind(1, 3, 4)
    book.leave(1, start, stop)
    assert book.left_behind(1) == left
    # Slots that went with the window are nobody's to give up.
    assert book.ghosts[1] == ghosts


def test_a_window_may_leave_the_rest_of_a_row_behind(book: RowBook) -> None:
    book.leave_behind(1, 2, None)
    assert book.left_behind(1) == {2, 3, 4}


def test_a_row_may_begin_with_pages_that_have_no_slots_any_more(book: RowBook) -> None:
    book.put_before(2, 2)
    assert book.slots[2] == [SCRIBBLE] * 8 + at(9)
    assert book.left_behind(2) == {0, 1}
    book.put_before(1, 0)
    assert book.left_behind(1) == set()


def test_a_recovery_takes_slots_over_and_gives_others_away(book: RowBook) -> None:
    book.take_over(1, 1, at(9))
    book.give_away(2, 0, 1)
    assert book.slots == {1: [*at(5, 9, 7, 3), 16, 17]}
    assert book.changed == {1, 2}
    assert book.ghosts == {}


def test_a_clear_turns_every_row_into_a_ghost(book: RowBook) -> None:
    rows = {seq: list(slots) for seq, slots in book.slots.items()}
    book.clear()
    assert book.ghosts == rows
    assert book.slots == {}


def test_some_slots_of_each_page_are_named_last_page_first() -> None:
    for start in range(SIZE):
        named = some_of_each_page([*at(5, 2, 7), 16], SIZE, start)
        assert set(named) <= {*at(5, 2, 7), 16}
        assert len(set(named)) == len(named)
        pages = [slot // SIZE for slot in named]
        assert [pages[0], *dict.fromkeys(pages)] == [4, 4, 7, 2, 5]
        assert pages.count(2) == 2

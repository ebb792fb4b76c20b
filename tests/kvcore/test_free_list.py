"""The free list: conservation, order of reuse, ownership of what it hands out."""

import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator, free_list
from kvcore.errors import DoubleFreeError, GeometryError
from kvcore.free_list import FreeList, PageStack, SlotLog

CPU = torch.device("cpu")


def make(
    num_pages: int, *, need_sort: bool = False, newest_first: bool = False, unit: int = 1
) -> FreeList:
    kind = PageStack if newest_first else SlotLog
    return kind(num_pages, CPU, need_sort=need_sort, unit=unit)


def test_a_new_list_holds_every_page_but_the_padding_page_in_order() -> None:
    assert make(5).free_pages.tolist() == [1, 2, 3, 4, 5]
    assert make(5).release_pages.tolist() == []
    assert make(5).num_free() == 5


def test_taken_pages_leave_from_the_front() -> None:
    pages = make(5)
    assert pages.take(2).tolist() == [1, 2]
    assert pages.free_pages.tolist() == [3, 4, 5]


def test_oldest_first_puts_returned_pages_behind_all_others() -> None:
    pages = make(5)
    taken = pages.take(2)
    pages.give(taken)
    assert pages.free_pages.tolist() == [3, 4, 5, *taken.tolist()]


def test_newest_first_puts_returned_pages_before_all_others() -> None:
    pages = make(5, newest_first=True)
    taken = pages.take(3)
    pages.give(taken[1:])
    assert pages.free_pages.tolist() == [*taken[1:].tolist(), 4, 5]


def test_need_sort_keeps_returned_pages_aside_until_a_take_needs_them() -> None:
    pages = make(4, need_sort=True)
    taken = pages.take(3)
    pages.give(taken.flip(0))
    assert pages.free_pages.tolist() == [4]
    assert pages.release_pages.tolist() == [3, 2, 1]
    assert pages.num_free() == 4
    assert pages.take(1).tolist() == [4]
    assert pages.take(2).tolist() == [1, 2], "merged in ascending order"
    assert pages.release_pages.tolist() == []


@pytest.mark.parametrize("newest_first", [False, True])
def test_takes_are_undone_exactly_even_those_that_merged(newest_first: bool) -> None:
    for need_sort in (False, True):
        pages = make(6, need_sort=need_sort, newest_first=newest_first)
        pages.give(pages.take(4)[[2, 0]])
        before = (pages.free_pages.tolist(), pages.release_pages.tolist(), pages.num_free())
        position = pages.position()
        pages.take(1)
        pages.take(3)
        assert pages.num_free() == 0
        pages.rewind(position)
        assert before == (pages.free_pages.tolist(), pages.release_pages.tolist(), 4)
        assert sorted(pages.take(4).tolist()) == [1, 3, 5, 6]


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_give_that_fails_changes_nothing(newest_first: bool) -> None:
    pages = make(4, newest_first=newest_first)
    pages.take(2)
    elsewhere = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        pages.give(elsewhere)
    assert pages.free_pages.tolist() == [3, 4]


def test_merging_nothing_changes_nothing() -> None:
    pages = make(3, newest_first=True)
    pages.give(pages.take(3).flip(0))
    before = pages.free_pages.tolist()
    pages.merge_and_sort()
    assert pages.free_pages.tolist() == before


def test_room_is_what_is_free() -> None:
    pages = make(3)
    assert pages.has_room(3)
    assert not pages.has_room(4)
    assert pages.has_room(0)


def test_taking_more_than_is_free_is_refused_before_anything_is_read() -> None:
    pages = make(3)
    pages.take(2)
    with pytest.raises(GeometryError, match="2 pages, but only 1"):
        pages.take(2)
    assert pages.free_pages.tolist() == [3]


@pytest.mark.parametrize("need_sort", [False, True])
def test_more_free_pages_than_exist_are_refused(need_sort: bool) -> None:
    pages = make(3, need_sort=need_sort)
    taken = pages.take(1)
    pages.give(taken)
    with pytest.raises(DoubleFreeError, match="at most 3"):
        pages.give(taken)
    assert pages.num_free() == 3


def test_reset_makes_every_page_free_in_order() -> None:
    pages = make(4, need_sort=True)
    pages.give(pages.take(3).flip(0))
    pages.take(2)
    pages.reset()
    assert pages.free_pages.tolist() == [1, 2, 3, 4]
    assert pages.release_pages.tolist() == []
    assert pages.num_free() == 4


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("need_sort", [False, True])
def test_pages_given_with_gaps_are_free_and_the_gaps_are_not(
    need_sort: bool, newest_first: bool
) -> None:
    pages = make(6, need_sort=need_sort, newest_first=newest_first)
    taken = pages.take(6)
    pages.give_with_gaps(torch.tensor([0, taken[0], 0]))
    pages.give_with_gaps(torch.tensor([0]))
    pages.give_with_gaps(taken[2:5])
    pages.give(taken[1:2])
    assert pages.num_free() == 5
    assert pages.has_room(5)
    assert not pages.has_room(6)
    free = pages.free_pages.tolist() + pages.release_pages.tolist()
    assert sorted(free) == taken[:5].tolist()


@pytest.mark.parametrize("ask", ["free_pages", "release_pages", "take", "merge", "room"])
def test_the_gaps_are_closed_for_whoever_looks_first(ask: str) -> None:
    pages = make(4, need_sort=True)
    pages.give_with_gaps(pages.take(4) * torch.tensor([1, 0, 1, 0]))
    match ask:
        case "free_pages":
            assert pages.free_pages.tolist() == []
        case "release_pages":
            assert pages.release_pages.tolist() == [1, 3]
        case "take":
            assert pages.take(1).tolist() == [1]
        case "merge":
            pages.merge_and_sort()
            assert pages.free_pages.tolist() == [1, 3]
        case _:
            assert pages.has_room(2)


def test_gaps_are_not_counted_while_the_other_pages_suffice() -> None:
    pages = make(4, newest_first=True)
    pages.give_with_gaps(pages.take(2) * torch.tensor([0, 1]))
    assert pages.has_room(2)
    assert pages.take(1).tolist() == [3], "what is not counted yet is lent later"
    assert pages.take_gaps_closed() == 0
    assert pages.num_free() == 2
    assert pages.free_pages.tolist() == [2, 4]
    assert pages.take_gaps_closed() == 1
    assert pages.take_gaps_closed() == 0


def test_gaps_that_are_not_to_be_counted_are_not() -> None:
    pages = make(4)
    pages.give_with_gaps(pages.take(2) * torch.tensor([0, 1]))
    pages.give_with_gaps(torch.tensor([0, 1, 0]), counted=False)
    assert pages.num_free() == 4
    assert pages.take_gaps_closed() == 1


def test_too_many_pages_with_gaps_are_refused_and_stay_aside() -> None:
    pages = make(3)
    pages.take(1)
    pages.give_with_gaps(torch.tensor([1, 0, 1]))
    for _ in range(2):
        with pytest.raises(DoubleFreeError, match="give of 2 pages to 2 free ones"):
            pages.has_room(3)
    assert pages.has_room(2)
    pages.reset()
    assert pages.free_pages.tolist() == [1, 2, 3]


def test_a_count_that_fails_halfway_leaves_what_is_left_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = make(6)
    taken = pages.take(4)
    for part in (taken[:2], taken[2:]):
        pages.give_with_gaps(torch.cat((part, torch.tensor([0]))))
    places, place = iter([pages.place, None]), pages.place

    def one_place(number: int) -> torch.Tensor:
        if next(places) is None:
            raise MemoryError
        return place(number)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "place", one_place)
        with pytest.raises(MemoryError):
            pages.close_gaps()
    assert sorted(pages.free_pages.tolist()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("need_sort", [False, True])
def test_every_page_is_in_one_place_whatever_is_taken_and_given(
    need_sort: bool, newest_first: bool
) -> None:
    choose = random.Random(7)
    pages = make(9, need_sort=need_sort, newest_first=newest_first)
    lent: list[int] = []
    handed_out: list[tuple[torch.Tensor, list[int]]] = []
    for _ in range(400):
        if choose.random() < 0.5 and pages.num_free():
            count = choose.randint(0, pages.num_free())
            if newest_first or choose.random() < 0.5:
                taken = pages.take(count)
            else:
                # Of a log, a view is as good as a copy.
                taken = pages.front(count)
                pages.advance(count)
            handed_out.append((taken, taken.tolist()))
            lent += taken.tolist()
        else:
            choose.shuffle(lent)
            back = [lent.pop() for _ in range(choose.randint(0, len(lent)))]
            given = torch.tensor(back, dtype=torch.int64)
            if choose.random() < 0.3:
                pages.give_with_gaps(torch.cat((given, torch.zeros(2, dtype=torch.int64))))
            else:
                pages.give(given)
                given.fill_(-7)
        everything = pages.free_pages.tolist() + pages.release_pages.tolist() + lent
        assert Counter(everything) == Counter(range(1, 10))
        assert pages.num_free() == 9 - len(lent)
    assert all(tensor.tolist() == values for tensor, values in handed_out), "L8"


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_list_of_first_slots_deals_in_pages(need_sort: bool, newest_first: bool) -> None:
    pages = make(6, need_sort=need_sort, newest_first=newest_first, unit=16)
    assert pages.front(2).tolist() == [16, 32]
    taken = pages.take(4)
    assert taken.tolist() == [1, 2, 3, 4]
    pages.give(taken[[3, 1]])
    pages.give_with_gaps(torch.tensor([16, 0]))
    assert sorted(pages.listed()) == [1, 2, 4, 5, 6]
    assert pages.listed() == pages.free_pages.tolist() + pages.release_pages.tolist()
    if need_sort:
        assert pages.take(5).tolist() == [1, 2, 4, 5, 6]


def test_merging_puts_every_page_where_a_sort_would() -> None:
    choose = random.Random(3)
    for newest_first in (False, True):
        pages = make(40, need_sort=True, newest_first=newest_first)
        lent = pages.take(40).tolist()
        for _ in range(60):
            choose.shuffle(lent)
            back = [lent.pop() for _ in range(choose.randint(0, len(lent)))]
            pages.give(torch.tensor(back, dtype=torch.int64))
            expected = sorted(pages.free_pages.tolist() + pages.release_pages.tolist())
            pages.merge_and_sort()
            assert pages.free_pages.tolist() == expected
            lent += pages.take(choose.randint(0, len(expected))).tolist()


def test_what_is_written_into_a_place_is_free_when_it_is_committed() -> None:
    for newest_first in (False, True):
        pages = make(4, newest_first=newest_first)
        taken = pages.take(2)
        pages.place(2).copy_(taken)
        assert pages.free_pages.tolist() == [3, 4]
        assert pages.num_free() == 2
        pages.commit(2)
        assert sorted(pages.free_pages.tolist()) == [1, 2, 3, 4]
        assert pages.num_free() == 4
        with pytest.raises(DoubleFreeError, match="give of 1 pages to 4 free ones"):
            pages.place(1)


def test_a_log_moves_once_in_as_many_gives_as_it_has_pages() -> None:
    pages = make(1000)
    stores = [pages._store]
    for _ in range(600):
        pages.give(pages.take(7))
        if pages._store is not stores[-1]:
            stores.append(pages._store)
    assert len(stores) - 1 == 600 * 7 // 1000
    assert stores[0].numel() == 2000


def test_a_stack_never_moves() -> None:
    pages = make(1000, newest_first=True)
    store = pages._store
    for _ in range(600):
        pages.give(pages.take(7))
    assert pages._store is store
    assert store.numel() == 1000


class InterruptAt:
    """Interrupts what runs under it at the so-manieth line of the module of free lists."""

    def __init__(self, line: int) -> None:
        self._left = line
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._before)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != free_list.__file__:
            return None
        self._left -= event == "line"
        if self._left == 0:
            raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_interrupt_leaves_no_address_of_memory_that_is_gone(page_size: int) -> None:
    """Wherever it comes: compiled code writes to that address."""
    size = 8 * page_size
    allocator = SWATokenToKVPoolAllocator(size, size, page_size, torch.int64, "cpu", None, True)
    lists = [allocator.full_attn_allocator.free_list, allocator.swa_attn_allocator.free_list]
    interrupted = 0
    for line in range(1, 100):
        try:
            with InterruptAt(line):
                allocator.clear()
        except KeyboardInterrupt:
            interrupted += 1
        for each in lists:
            assert each._address == each._host_store.ctypes.data
    assert 10 < interrupted < 99

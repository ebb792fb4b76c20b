"""Tail extensions: SWA slots for a part of one row's new tokens, and what follows on such pages."""

from typing import Any

import pytest
import torch

from kvcore import (
    DeadPeerError,
    GeometryError,
    InvalidSlotError,
    LivePeerError,
    PureSWATokenToKVPoolAllocator,
)


def tail_call(
    allocator: Any, row: torch.Tensor, length: int, tail: int, end: int | None = None
) -> Any:
    prefix, total = torch.tensor([row.numel()]), torch.tensor([length])
    last = row[-1:] if row.numel() else torch.tensor([-1])
    given = (prefix, prefix, total, total, last, length - row.numel(), tail)
    return allocator.alloc_extend_swa_tail(*given, swa_tail_end=end)


def peers(allocator: Any, slots: torch.Tensor) -> list[int]:
    return allocator.translate_loc_from_full_to_swa(slots).tolist()


# -- up to the row's end ----------------------------------------------------------------------


@pytest.mark.parametrize("tail_pages", [0, 1, 3])
def test_a_tail_has_peers_and_the_rest_of_the_extend_has_none(
    hybrid: Any, tail_pages: int, laws: Any
) -> None:
    page = hybrid.page_size
    length, tail = 5 * page - page // 2, max(0, tail_pages * page - page // 2)
    slots = tail_call(hybrid, laws.no_row, length, tail)
    assert slots.numel() == length
    assert peers(hybrid, slots[: length - tail]) == [0] * (length - tail)
    assert all(peer >= page for peer in peers(hybrid, slots[length - tail :]))
    assert hybrid.swa_available_size() == hybrid.size_swa - tail_pages * page
    laws.check_hybrid(hybrid, laws.pages_of(slots, page))
    hybrid.free_segment(slots, start_pos=0)
    laws.check_hybrid(hybrid, [])


def test_a_tail_may_be_the_whole_extend(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, page)
    slots = tail_call(hybrid, row, 3 * page, 2 * page)
    laws.check_hybrid(hybrid, laws.pages_of(torch.cat((row, slots)), page))
    assert hybrid.swa_available_size() == hybrid.size_swa - 3 * page


@pytest.mark.parametrize("tail", [0, 4])
def test_a_tail_unmaps_the_new_slots_of_a_page_that_goes_on(
    tail: int, laws: Any, validate: bool
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    row = laws.extend_row(allocator, laws.no_row, 2)
    before = peers(allocator, row)
    slots = tail_call(allocator, row, 8, tail)
    assert peers(allocator, slots[: 6 - tail]) == [0] * (6 - tail)
    assert peers(allocator, row) == before
    allocator.free(torch.cat((row, slots)))
    laws.check_hybrid(allocator, [])


def test_a_tail_clears_entries_that_another_path_left_behind(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    # By breaking the contract of the full side, every free page is made to carry a stale entry.
    hybrid.full_to_swa_index_mapping[page:-1] = page
    slots = tail_call(hybrid, laws.no_row, 3 * page, page)
    assert peers(hybrid, slots[: 2 * page]) == [0] * (2 * page)
    # The last page is lent in part, and unmapped as a whole.
    slots = tail_call(hybrid, laws.no_row, 2 * page - page // 2, 0)
    for lent in laws.pages_of(slots, page):
        row = torch.arange(lent * page, (lent + 1) * page)
        assert peers(hybrid, row) == [0] * page


def test_a_row_goes_on_behind_its_tail(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    row = tail_call(hybrid, laws.no_row, 2 * page + 1, 1)
    row = laws.extend_row(hybrid, row, 3 * page)
    assert peers(hybrid, row[: 2 * page]) == [0] * (2 * page)
    assert all(peer >= page for peer in peers(hybrid, row[2 * page :]))
    laws.check_hybrid(hybrid, laws.pages_of(row, page))


def test_a_tail_that_starts_within_a_page_is_refused(
    laws: Any, validate: bool, refuses: Any
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    for length, tail in ((8, 3), (6, 3), (7, 1)):
        refuses(allocator, GeometryError, tail_call, allocator, laws.no_row, length, tail)


def test_a_tail_longer_than_the_extend_or_negative_is_refused(
    hybrid: Any, laws: Any, refuses: Any
) -> None:
    page = hybrid.page_size
    refuses(hybrid, GeometryError, tail_call, hybrid, laws.no_row, page, 2 * page)
    refuses(hybrid, GeometryError, tail_call, hybrid, laws.no_row, page, -page)


def test_a_tail_is_for_one_row(hybrid: Any, refuses: Any) -> None:
    zeros, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    call = hybrid.alloc_extend_swa_tail
    refuses(hybrid, GeometryError, call, zeros, zeros, ones, ones, -ones, 2, 0)


# -- an end before the row's end ------------------------------------------------------------


def tail_cases(page: int) -> list[tuple[int, int, int]]:
    """(length, tail, end) of rows from nothing: ends before, on and behind page boundaries."""
    cases = [(5 * page, 2 * page, 4 * page), (5 * page, page, 2 * page), (3 * page, 0, page)]
    if page > 1:
        # An end within a page: of several, of the first, and of the page on which the row ends.
        cases += [
            (5 * page, 2 * page - 1, 4 * page - 1),
            (4 * page + 1, 2, 2),
            (3 * page - 1, page + 1, 2 * page + 1),
            (3 * page - 1, 0, page + 1),
        ]
    return cases


def test_a_tail_may_end_before_its_row(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    for length, tail, end in tail_cases(page):
        slots = tail_call(hybrid, laws.no_row, length, tail, end)
        assert slots.numel() == length
        lent = peers(hybrid, slots)
        assert lent[: end - tail] == [0] * (end - tail)
        assert all(peer >= page for peer in lent[end - tail : end])
        assert lent[end:] == [0] * (length - end)
        tail_pages = -(-tail // page)
        assert hybrid.swa_available_size() == hybrid.size_swa - tail_pages * page
        laws.check_hybrid(hybrid, laws.pages_of(slots, page))
        # The rest of the page on which the tail ended has no peer either, lent or not.
        if tail and end % page:
            behind = torch.arange(int(slots[end - 1]) + 1, (int(slots[end - 1]) // page + 1) * page)
            assert peers(hybrid, behind) == [0] * len(behind)
        hybrid.free(slots)
        laws.check_hybrid(hybrid, [])


@pytest.mark.parametrize("begun", [1, 3, 4])
def test_a_tail_of_a_row_that_has_begun_ends_before_it(
    begun: int, laws: Any, validate: bool
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    row = laws.extend_row(allocator, laws.no_row, begun)
    before = peers(allocator, row)
    slots = tail_call(allocator, row, 17, 6, 14)
    assert peers(allocator, row) == before
    lent = peers(allocator, slots)
    assert lent[: 8 - begun] == [0] * (8 - begun)
    assert all(peer >= 4 for peer in lent[8 - begun : 14 - begun])
    assert lent[14 - begun :] == [0] * 3
    laws.check_hybrid(allocator, laws.pages_of(torch.cat((row, slots)), 4))


def test_a_tail_that_ends_with_its_row_needs_no_end(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    length, tail = 3 * page + 1, page + 1
    one = tail_call(hybrid, laws.no_row, length, tail)
    other = tail_call(hybrid, laws.no_row, length, tail, length)
    for slots in (one, other):
        rest = torch.arange(int(slots[-1]), (int(slots[-1]) // page + 1) * page)
        assert all(peer >= page for peer in peers(hybrid, rest)), "the row goes on in its page"
    assert [bool(peer) for peer in peers(hybrid, one)] == [
        bool(peer) for peer in peers(hybrid, other)
    ]


@pytest.mark.parametrize("starved", ["full", "swa"])
def test_a_tail_that_ends_early_takes_from_both_sides_or_neither(
    hybrid: Any, starved: str, laws: Any
) -> None:
    page = hybrid.page_size
    side = hybrid.full_attn_allocator if starved == "full" else hybrid.swa_attn_allocator
    side.alloc(side.available_size() - page)
    before = laws.snapshot(hybrid)
    assert tail_call(hybrid, laws.no_row, 4 * page, 2 * page, 3 * page) is None
    assert laws.snapshot(hybrid) == before


def test_the_room_that_a_tail_needs_ends_with_it(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    hybrid.swa_attn_allocator.alloc(hybrid.swa_available_size() - page)
    assert tail_call(hybrid, laws.no_row, 5 * page, page, 2 * page) is not None
    assert hybrid.swa_available_size() == 0


FRONT_FREES = ["free", "free_swa", "free_swa_segment", "free_segment"]


@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("name", FRONT_FREES)
def test_a_page_with_peers_at_its_front_goes_back_whole(
    name: str, grouped: bool, laws: Any, validate: bool
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    row = tail_call(allocator, laws.no_row, 7, 2, 6)
    if grouped:
        allocator.free_group_begin()
    match name:
        case "free" | "free_swa":
            # Named by a slot without a peer only.
            getattr(allocator, name)(row[[0, 6]])
        case _:
            getattr(allocator, name)(row, start_pos=0)
    if grouped:
        allocator.free_group_end()
    swa_alone = name.startswith("free_swa")
    laws.check_hybrid(allocator, laws.pages_of(row, 4) if swa_alone else [])
    assert allocator.swa_available_size() == allocator.size_swa
    assert peers(allocator, row) == [0] * 7


def test_a_recovery_moves_a_page_with_peers_at_its_front_as_it_is(
    laws: Any, validate: bool
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    incoming = tail_call(allocator, laws.no_row, 4, 2, 2)
    kept = allocator.alloc(4)
    allocator.free_swa(kept)
    moved = peers(allocator, incoming)
    allocator.recover_tombstone(kept[:2], incoming[:2])
    assert peers(allocator, kept) == moved
    laws.check_hybrid(allocator, laws.pages_of(kept, 4))


def test_a_tail_that_ends_early_starts_on_a_page_boundary(
    laws: Any, validate: bool, refuses: Any
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    for length, tail, end in ((9, 4, 6), (9, 1, 6), (8, 3, 4)):
        refuses(allocator, GeometryError, tail_call, allocator, laws.no_row, length, tail, end)


def test_a_tail_ends_within_the_extend_and_begins_within_it(
    hybrid: Any, laws: Any, refuses: Any
) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, 2 * page)
    for tail, end in (
        (page, 5 * page),
        (0, 5 * page),
        (0, page),
        (page, page),
        (2 * page, 3 * page),
    ):
        refuses(hybrid, GeometryError, tail_call, hybrid, row, 4 * page, tail, end)
    refuses(hybrid, GeometryError, tail_call, hybrid, row, 4 * page, -page, 3 * page)


# -- values ------------------------------------------------------------------------------------


def test_a_row_does_not_go_on_behind_a_tail_that_ended_before_it(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = tail_call(allocator, laws.no_row, 6, 1, 5)
    length = torch.tensor([7])
    message = refuses(allocator, DeadPeerError, allocator.alloc_decode, length, length, row[-1:])
    assert f"{int(row[-1]) // 4} (1 in all)" in message
    refuses(allocator, DeadPeerError, laws.extend_row, allocator, row, 12)
    # A tail needs no peer before it, and what follows it finds its own.
    row = torch.cat((row, tail_call(allocator, row, 8, 0)))
    assert laws.extend_row(allocator, row, 9) is not None


def test_a_slot_behind_the_end_of_a_tail_is_nothing_to_recover_from(
    laws: Any, refuses: Any
) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    incoming = tail_call(allocator, laws.no_row, 4, 2, 2)
    kept = allocator.alloc(4)
    allocator.free_swa(kept)
    refuses(allocator, DeadPeerError, allocator.recover_tombstone, kept, incoming)


def test_a_page_with_peers_at_its_front_has_a_live_peer(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = tail_call(allocator, laws.no_row, 4, 2, 2)
    swa = allocator.swa_attn_allocator.alloc(4)
    refuses(allocator, LivePeerError, allocator.free_full, row[2:])
    refuses(allocator, LivePeerError, allocator.set_full_to_swa_mapping, row[2:], swa[2:])


def test_a_tail_of_a_sliding_pool_names_itself_in_errors() -> None:
    pure = PureSWATokenToKVPoolAllocator(16, 4, torch.float16, "cpu", None, False, validate=True)
    prefix, total, unlent = torch.tensor([4]), torch.tensor([8]), torch.tensor([7])
    with pytest.raises(InvalidSlotError, match=r"^alloc_extend_swa_tail: "):
        pure.alloc_extend_swa_tail(prefix, prefix, total, total, unlent, 4, 4)

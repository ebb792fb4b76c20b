"""Free groups: nothing is lent before the end, and nothing done meanwhile changes the outcome."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import FreeGroupError, SWATokenToKVPoolAllocator
from kvcore.allocator import SinglePoolAllocator


@pytest.fixture(params=["single", "hybrid"])
def either(
    request: pytest.FixtureRequest, page_size: int, need_sort: bool, validate: bool, laws: Any
) -> Any:
    make = laws.make_single if request.param == "single" else laws.make_hybrid
    return make(page_size, need_sort=need_sort, validate=validate)


def full_side(allocator: Any) -> SinglePoolAllocator:
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        return allocator.full_attn_allocator
    assert isinstance(allocator, SinglePoolAllocator)
    return allocator


def free_sets(allocator: Any, laws: Any) -> tuple[set[int], set[int], list[int]]:
    """The state up to the order of free pages and to the names of SWA pages' owners."""
    return (
        set(laws.free_ids(allocator.full_attn_allocator)),
        set(laws.free_ids(allocator.swa_attn_allocator)),
        allocator.full_to_swa_index_mapping.tolist(),
    )


def test_groups_do_not_nest_and_end_once(either: Any, refuses: Any) -> None:
    refuses(either, FreeGroupError, either.free_group_end)
    either.free_group_begin()
    slots = either.alloc(either.page_size)
    either.free(slots)
    refuses(either, FreeGroupError, either.free_group_begin)
    either.free_group_end()
    refuses(either, FreeGroupError, either.free_group_end)
    assert either.available_size() == either.size


def test_a_group_opened_on_one_side_alone_is_a_group(hybrid: Any, refuses: Any) -> None:
    hybrid.full_attn_allocator.free_group_begin()
    refuses(hybrid, FreeGroupError, hybrid.free_group_begin)
    hybrid.full_attn_allocator.free_group_end()
    hybrid.free_group_begin()
    hybrid.swa_attn_allocator.free_group_end()
    refuses(hybrid, FreeGroupError, hybrid.free_group_end)


def test_an_empty_group_changes_nothing(either: Any, laws: Any) -> None:
    before = laws.snapshot(either)
    either.free_group_begin()
    either.free_group_end()
    assert laws.snapshot(either) == before


def test_pages_freed_in_a_group_are_lent_after_its_end_only(either: Any) -> None:
    page = either.page_size
    slots = either.alloc(either.size)
    either.free_group_begin()
    either.free(slots[: 2 * page])
    either.free_segment(slots[2 * page : 4 * page], start_pos=2 * page)
    assert either.available_size() == 0
    assert either.alloc(page) is None
    either.free_group_end()
    assert either.available_size() == 4 * page
    assert either.alloc(4 * page) is not None


def test_pages_waiting_in_a_group_can_be_seen(either: Any, laws: Any) -> None:
    page = either.page_size
    full = full_side(either)
    slots = either.alloc(3 * page)
    either.free_group_begin()
    either.free(slots[page : 2 * page])
    either.free_segment(slots[2 * page :], start_pos=0)
    assert full.pending_pages.tolist() == laws.pages_of(slots[page:], page)
    either.free_group_end()
    assert full.pending_pages.tolist() == []


def test_a_deferred_free_keeps_no_view_of_the_callers_tensor(either: Any, laws: Any) -> None:
    page = either.page_size
    slots, others = either.alloc(4 * page), either.alloc(page)
    either.free_group_begin()
    either.free(slots[:page])
    either.free_segment(slots[page:], start_pos=page)
    slots[:] = others.repeat(4)
    either.free_group_end()
    assert either.available_size() == either.size - page
    laws.check_single(full_side(either), laws.pages_of(others, page))


@pytest.mark.parametrize("call", ["free_swa", "free_swa_segment", "free_full"])
def test_one_sided_deferred_frees_keep_no_view_either(hybrid: Any, call: str, laws: Any) -> None:
    page = hybrid.page_size
    slots, others = hybrid.alloc(2 * page), hybrid.alloc(page)
    lent = laws.pages_of(torch.cat((slots, others)), page)
    if call == "free_full":
        hybrid.free_swa(slots)
        lent = laws.pages_of(others, page)
    hybrid.free_group_begin()
    if call == "free_swa_segment":
        hybrid.free_swa_segment(slots, start_pos=0)
    else:
        getattr(hybrid, call)(slots)
    slots[:] = others.repeat(2)
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, lent)
    assert hybrid.swa_available_size() == hybrid.size_swa - page


def test_a_recovery_in_a_group_keeps_the_page_that_it_installed(hybrid: Any, laws: Any) -> None:
    """sglang#36081: free_swa a; recover a from b; the flush must free the page a had before."""
    page = hybrid.page_size
    a, b = hybrid.alloc(page), hybrid.alloc(page)
    old, new = (hybrid.translate_loc_from_full_to_swa(slots) for slots in (a, b))
    hybrid.free_group_begin()
    hybrid.free_swa(a)
    hybrid.recover_tombstone(a, b)
    assert hybrid.translate_loc_from_full_to_swa(a).tolist() == new.tolist()
    hybrid.free_group_end()
    assert hybrid.translate_loc_from_full_to_swa(a).tolist() == new.tolist()
    free_swa = laws.free_ids(hybrid.swa_attn_allocator)
    assert set(laws.pages_of(old, page)) <= set(free_swa)
    laws.check_hybrid(hybrid, laws.pages_of(a, page))


def test_a_load_back_in_a_group_keeps_the_page_that_it_installed(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    a = hybrid.alloc(page)
    fresh = hybrid.swa_attn_allocator.alloc(page)
    hybrid.free_group_begin()
    hybrid.free_swa(a)
    hybrid.set_full_to_swa_mapping(a, fresh)
    hybrid.free_group_end()
    assert hybrid.translate_loc_from_full_to_swa(a).tolist() == fresh.tolist()
    laws.check_hybrid(hybrid, laws.pages_of(a, page))


def test_what_was_recovered_in_a_group_can_be_freed_in_it(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    a, b = hybrid.alloc(page), hybrid.alloc(page)
    hybrid.free_group_begin()
    hybrid.free_swa(a)
    hybrid.recover_tombstone(a, b)
    hybrid.free_swa(a)
    hybrid.free(a)
    laws.check_hybrid(hybrid, [])
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, [])
    assert hybrid.available_size() == hybrid.size


def test_an_entry_cleared_after_its_free_stays_freed(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    a = hybrid.alloc(2 * page)
    hybrid.free_group_begin()
    hybrid.free_swa(a)
    hybrid.clear_full_to_swa_mapping(a)
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, laws.pages_of(a, page))
    assert hybrid.swa_available_size() == hybrid.size_swa


def test_a_page_freed_on_its_swa_side_and_then_whole_goes_back_once(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    slots = hybrid.alloc(4 * page)
    hybrid.free_group_begin()
    hybrid.free_swa(slots[: 2 * page])
    hybrid.free_swa_segment(slots, start_pos=0)
    hybrid.free(slots[:page])
    hybrid.free_full(slots[page : 2 * page])
    hybrid.free_segment(slots[2 * page : 3 * page], start_pos=0)
    hybrid.free_full_segment(slots[3 * page :], start_pos=0)
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, [])


def test_an_allocation_in_a_group_captures_what_is_queued(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    a = hybrid.alloc(page)
    hybrid.free_group_begin()
    hybrid.free(a)
    b = hybrid.alloc(2 * page)
    assert hybrid.queued_peer_slots.numel() == 0
    laws.check_hybrid(hybrid, laws.pages_of(b, page))
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, laws.pages_of(b, page))


def test_frees_on_a_side_wait_for_the_end_as_well(hybrid: Any, laws: Any) -> None:
    page = hybrid.page_size
    full, swa = (
        hybrid.full_attn_allocator.alloc(page),
        hybrid.swa_attn_allocator.alloc(page),
    )
    hybrid.free_group_begin()
    hybrid.full_attn_allocator.free(full)
    hybrid.swa_attn_allocator.free(swa)
    assert hybrid.available_size() == hybrid.size - page
    hybrid.free_group_end()
    laws.check_hybrid(hybrid, [])


class Walk:
    """One random walk of legal calls, played with groups on one allocator and without on another.

    Every allocation happens outside groups, so both see the same pages as long as they agree.
    """

    def __init__(self, grouped: Any, plain: Any, seed: int) -> None:
        self.choose = random.Random(seed)
        self.grouped, self.plain = grouped, plain
        self.live: list[torch.Tensor] = []
        self.dead: list[torch.Tensor] = []

    def both(self, call: Callable[[Any], Any]) -> None:
        call(self.grouped)
        call(self.plain)

    def lend(self) -> None:
        for allocator in (self.grouped, self.plain):
            # The order of free pages may differ by law: sorting makes the outcomes comparable.
            allocator.merge_and_sort_free()
        slots = self.grouped.alloc(self.grouped.page_size)
        again = self.plain.alloc(self.plain.page_size)
        if slots is None:
            assert again is None
        else:
            assert again.tolist() == slots.tolist()
            self.live.append(slots)

    def step(self) -> None:
        self.choose.shuffle(self.live)
        kind = self.choose.choice(["free", "swa", "swa", "recover", "recover", "full", "again"])
        if kind in ("free", "swa") and self.live:
            slots = self.live.pop()
            if kind == "free":
                self.both(lambda allocator: allocator.free(slots))
            else:
                self.both(lambda allocator: allocator.free_swa(slots))
                self.dead.append(slots)
        elif kind == "recover" and self.live and self.dead:
            kept, incoming = self.dead.pop(), self.live.pop()
            self.both(lambda allocator: allocator.recover_tombstone(kept, incoming))
            self.live.append(kept)
        elif kind == "full" and self.dead:
            slots = self.dead.pop()
            self.both(lambda allocator: allocator.free_full(slots))
        elif kind == "again" and self.dead:
            self.both(lambda allocator: allocator.free_swa(self.dead[-1]))


@pytest.mark.parametrize("seed", range(4))
def test_a_group_ends_where_the_same_calls_without_it_end(
    page_size: int, validate: bool, seed: int, laws: Any
) -> None:
    options = {"need_sort": True, "validate": validate}
    walk = Walk(
        laws.make_hybrid(page_size, **options), laws.make_hybrid(page_size, **options), seed
    )
    for _ in range(60):
        for _ in range(3):
            walk.lend()
        walk.grouped.free_group_begin()
        for _ in range(walk.choose.randint(1, 6)):
            walk.step()
            lent = [p for slots in walk.live + walk.dead for p in laws.pages_of(slots, page_size)]
            laws.check_hybrid(walk.plain, lent)
        walk.grouped.free_group_end()
        assert free_sets(walk.grouped, laws) == free_sets(walk.plain, laws)
        laws.check_hybrid(walk.grouped, lent)

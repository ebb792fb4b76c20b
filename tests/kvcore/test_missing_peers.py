"""Frees whose peers may be missing: what the host cannot count waits aside, and nothing is lost.

Without `validate`, where no free reads a value.
"""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from kvcore import DoubleFreeError, SWATokenToKVPoolAllocator


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device; on a CPU the host can count, and nothing has to wait."""
    monkeypatch.setenv("KVCORE_KERNELS", "torch")


@pytest.fixture
def hybrid(page_size: int, laws: Any) -> SWATokenToKVPoolAllocator:
    made = laws.make_hybrid(page_size, validate=False)
    assert isinstance(made, SWATokenToKVPoolAllocator)
    return made


def row_of(hybrid: SWATokenToKVPoolAllocator, pages: int) -> torch.Tensor:
    slots = hybrid.alloc(pages * hybrid.page_size)
    assert slots is not None
    return slots


def aside(hybrid: SWATokenToKVPoolAllocator) -> bool:
    """Whether peers wait to be counted."""
    free = hybrid.swa_attn_allocator.free_list
    return bool(free._with_gaps)


def test_peers_that_are_all_there_are_free_at_once(hybrid: Any) -> None:
    hybrid.free_segment(row_of(hybrid, 2), start_pos=0)
    assert not aside(hybrid)


def test_a_tombstone_on_loan_puts_peers_aside_until_somebody_counts(hybrid: Any, laws: Any) -> None:
    row = row_of(hybrid, 3)
    hybrid.free_swa_segment(row[: hybrid.page_size], start_pos=0)
    hybrid.free_segment(row, start_pos=0)
    assert aside(hybrid)
    laws.check_hybrid(hybrid, [])
    assert not aside(hybrid)
    hybrid.free_segment(row_of(hybrid, 2), start_pos=0)
    assert not aside(hybrid), "the gap was the tombstone, which is gone"


def test_a_tombstone_that_is_freed_as_one_is_forgotten_at_once(hybrid: Any) -> None:
    row, other = row_of(hybrid, 2), row_of(hybrid, 1)
    hybrid.free_swa_segment(row, start_pos=0)
    hybrid.free_full_segment(row, start_pos=0)
    hybrid.free_segment(other, start_pos=0)
    assert not aside(hybrid)


def test_a_recovered_tombstone_has_its_peer(hybrid: Any, laws: Any) -> None:
    kept, incoming = row_of(hybrid, 2), row_of(hybrid, 2)
    hybrid.free_swa_segment(kept, start_pos=0)
    hybrid.recover_tombstone(kept, incoming)
    # How many pages a set of slots was is known when they have been counted.
    hybrid.full_available_size()
    hybrid.free_segment(kept, start_pos=0)
    assert not aside(hybrid)
    laws.check_hybrid(hybrid, [])


def test_slots_of_a_side_alone_have_no_peer(hybrid: Any, laws: Any) -> None:
    alone = hybrid.full_attn_allocator.alloc(2 * hybrid.page_size)
    hybrid.free_segment(alone, start_pos=0)
    assert aside(hybrid)
    laws.check_hybrid(hybrid, [])


def test_the_head_of_a_tail_allocation_has_no_peer(hybrid: Any, laws: Any) -> None:
    size = hybrid.page_size
    length = torch.tensor([3 * size])
    batch = (torch.tensor([0]), torch.tensor([0]), length, length, torch.tensor([-1]), 3 * size)
    row = hybrid.alloc_extend_swa_tail(*batch, size)
    hybrid.free_segment(row, start_pos=0)
    assert aside(hybrid)
    laws.check_hybrid(hybrid, [])


def test_a_mapping_that_a_caller_clears_leaves_no_peer(hybrid: Any, laws: Any) -> None:
    row = row_of(hybrid, 1)
    peers = hybrid.translate_loc_from_full_to_swa(row)
    hybrid.clear_full_to_swa_mapping(row)
    hybrid.free_segment(row, start_pos=0)
    hybrid.swa_attn_allocator.free(peers)
    laws.check_hybrid(hybrid, [])


def test_lending_goes_on_from_what_is_known_to_be_free(hybrid: Any) -> None:
    row = row_of(hybrid, 3)
    hybrid.free_swa_segment(row[: hybrid.page_size], start_pos=0)
    hybrid.free_segment(row, start_pos=0)
    row_of(hybrid, 2)
    assert aside(hybrid), "there was room enough without counting"
    row_of(hybrid, hybrid.swa_available_size() // hybrid.page_size)
    assert hybrid.alloc(hybrid.page_size) is None


def test_slots_of_one_page_in_any_order_free_it_once(laws: Any) -> None:
    hybrid = laws.make_hybrid(4, validate=False)
    row = row_of(hybrid, 3)
    hybrid.free_swa(row[[9, 1, 2, 8]])
    hybrid.free(row[[0, 11, 5, 4, 3, 6]])
    laws.check_hybrid(hybrid, [])


def test_peers_freed_too_often_are_refused_when_they_are_counted(hybrid: Any) -> None:
    row = row_of(hybrid, 1)
    hybrid.free_swa_segment(row, start_pos=0)
    mapping = hybrid.full_to_swa_index_mapping
    mapping[row] = row
    hybrid.free_swa_segment(row, start_pos=0)
    with pytest.raises(DoubleFreeError):
        hybrid.swa_available_size()


@pytest.mark.parametrize("seed", range(3))
def test_no_gap_ever_enters_a_free_list(page_size: int, laws: Any, seed: int) -> None:
    """A long walk that counts rarely, so that much waits aside for long."""
    choose = random.Random(seed)
    hybrid = laws.make_hybrid(page_size, validate=False)
    live: list[torch.Tensor] = []
    for step in range(300):
        if choose.random() < 0.5 or not live:
            slots = hybrid.alloc(choose.randint(1, 2) * page_size)
            live += [] if slots is None else [slots]
        else:
            slots = live[choose.randrange(len(live))]
            match choose.randrange(4):
                case 0:
                    hybrid.free_swa(slots)
                case 1:
                    hybrid.free_swa_segment(slots[:page_size], start_pos=0)
                case _:
                    free = choose.choice((hybrid.free, None))
                    if free is None:
                        hybrid.free_segment(slots, start_pos=0)
                    else:
                        free(slots)
                    live = [other for other in live if other is not slots]
        if step % 37 == 0:
            lent = [page for slots in live for page in laws.pages_of(slots, page_size)]
            laws.check_hybrid(hybrid, lent)
    for slots in live:
        hybrid.free(slots)
    assert Counter(laws.free_ids(hybrid.swa_attn_allocator)) == Counter(
        range(1, laws.swa_pages + 1)
    )


@pytest.mark.parametrize("seed", range(2))
def test_on_a_cpu_nothing_waits(
    page_size: int, laws: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCORE_KERNELS")
    choose = random.Random(seed)
    hybrid = laws.make_hybrid(page_size, validate=False)
    for _ in range(100):
        slots = row_of(hybrid, choose.randint(1, 3))
        part = slots[: choose.randint(0, slots.numel())]
        choose.choice((hybrid.free_swa, lambda _: None))(part)
        hybrid.free(slots) if choose.random() < 0.5 else hybrid.free_segment(slots, start_pos=0)
        assert not aside(hybrid)
        laws.check_hybrid(hybrid, [])


def test_repeated_slots_hide_no_page_without_a_peer(laws: Any) -> None:
    hybrid = laws.make_hybrid(4, validate=False)
    rows = [row_of(hybrid, 2), row_of(hybrid, 3)]
    hybrid.free_swa_segment(rows[0], start_pos=0)
    hybrid.free_swa_segment(rows[1], start_pos=0)
    hybrid.free_full(rows[0][:2].repeat(4))
    hybrid.free_segment(rows[1], start_pos=0)
    laws.check_hybrid(hybrid, laws.pages_of(rows[0][4:], 4))


def test_an_empty_free_forgets_no_gap(hybrid: Any, laws: Any) -> None:
    row, other = row_of(hybrid, 2), row_of(hybrid, 1)
    hybrid.free_swa_segment(row, start_pos=0)
    for slots in (row, other):
        hybrid.free_segment(slots, start_pos=0)
    hybrid.free_group_begin(owned=True)
    hybrid.free(row[:0])
    hybrid.free_group_end()
    again = row_of(hybrid, 3)
    hybrid.free_swa_segment(again, start_pos=0)
    hybrid.free_segment(again, start_pos=0)
    laws.check_hybrid(hybrid, [])


def test_a_take_that_is_undone_loses_no_page_that_was_given_with_gaps(
    page_size: int, laws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = laws.make_hybrid(page_size, validate=False, need_sort=True)
    row = row_of(hybrid, laws.swa_pages)
    hybrid.free_swa_segment(row[:page_size], start_pos=0)
    hybrid.free_segment(row, start_pos=0)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "_map_pages", fail)
        with pytest.raises(KeyboardInterrupt):
            hybrid.alloc(page_size)
    laws.check_hybrid(hybrid, [])


@pytest.mark.parametrize("owned", [False, True])
def test_a_side_whose_group_was_opened_again_loses_nothing(
    laws: Any, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCORE_KERNELS")
    hybrid = laws.make_hybrid(1, validate=False)
    row = row_of(hybrid, 4)
    hybrid.free_group_begin(owned=owned)
    hybrid.free(row[:2])
    side = hybrid.full_attn_allocator
    side.free_group_end()
    side.free_group_begin()
    hybrid.free(row[2:])
    hybrid.free_group_end()
    assert Counter(laws.free_ids(side)) == Counter(range(1, laws.full_pages + 1))

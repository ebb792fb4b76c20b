"""Contract-breaking calls: the documented error, a message that helps, and nothing changed."""

from typing import Any

import pytest
import torch

from kvcore import (
    DeadPeerError,
    DoubleFreeError,
    GeometryError,
    IndexTensorError,
    InvalidSlotError,
    KVCacheError,
    LivePeerError,
    MappingError,
    PagedTokenToKVPoolAllocator,
    PausedPoolError,
    PendingFreeError,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator.ownership import validate_by_default

FREES = ["free", "free_swa", "free_full"]
SEGMENT_FREES = ["free_segment", "free_swa_segment", "free_full_segment"]


def tensor(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def outside(allocator: Any) -> list[int]:
    """Slots that can never be lent: negative, padding, behind the last page."""
    page = allocator.page_size
    end = (allocator.full_attn_allocator.num_pages + 1) * page
    return [-1, -page, 0, page - 1, end, end + 1, 10**12]


@pytest.fixture(params=FREES)
def free_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SEGMENT_FREES)
def segment_free_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- the error types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (GeometryError, ValueError),
        (IndexTensorError, TypeError),
        (InvalidSlotError, ValueError),
        (DoubleFreeError, ValueError),
        (PendingFreeError, DoubleFreeError),
        (LivePeerError, ValueError),
        (DeadPeerError, ValueError),
        (MappingError, ValueError),
        (PausedPoolError, RuntimeError),
    ],
)
def test_every_error_has_the_common_base_and_a_builtin_one(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, KVCacheError)
    assert issubclass(error, builtin)


# -- the switch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("1", True), ("true", True), ("on", True), ("0", False), ("", False), ("No", False)],
)
def test_the_environment_sets_the_default_of_validate(
    setting: str, expected: bool, monkeypatch: pytest.MonkeyPatch, laws: Any
) -> None:
    monkeypatch.setenv("KVCORE_VALIDATE", setting)
    assert validate_by_default() is expected
    assert laws.make_hybrid(4).validate is expected
    assert laws.make_hybrid(4).swa_attn_allocator.validate is expected
    assert laws.make_hybrid(4, validate=not expected).validate is not expected


def test_values_are_not_read_unless_asked_for(monkeypatch: pytest.MonkeyPatch, laws: Any) -> None:
    monkeypatch.delenv("KVCORE_VALIDATE", raising=False)
    allocator = laws.make_single(4)
    assert not allocator.validate
    assert allocator.ledger is None


# -- shape, dtype, device: with and without validate -------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor(4),
        torch.tensor([[4]]),
        torch.tensor([4.0]),
        torch.tensor([True]),
        torch.empty(1, dtype=torch.int64, device="meta"),
        [4],
    ],
    ids=["scalar", "matrix", "float", "bool", "device", "list"],
)
def test_anything_but_a_vector_of_indices_is_always_refused(
    hybrid: Any, index: Any, refuses: Any
) -> None:
    slots = hybrid.alloc(hybrid.page_size)
    for name in [*FREES, "clear_full_to_swa_mapping"]:
        refuses(hybrid, IndexTensorError, getattr(hybrid, name), index)
    for name in SEGMENT_FREES:
        refuses(hybrid, IndexTensorError, getattr(hybrid, name), index, start_pos=0)
    for call in (hybrid.set_full_to_swa_mapping, hybrid.recover_tombstone):
        refuses(hybrid, IndexTensorError, call, index, slots)
        refuses(hybrid, IndexTensorError, call, slots, index)
    refuses(hybrid.full_attn_allocator, IndexTensorError, hybrid.full_attn_allocator.free, index)


def test_a_segment_starts_on_a_page_boundary_always(
    laws: Any, validate: bool, segment_free_name: str, refuses: Any
) -> None:
    allocator = laws.make_hybrid(4, validate=validate)
    slots = allocator.alloc(8)
    for start in (2, -4):
        call = getattr(allocator, segment_free_name)
        refuses(allocator, GeometryError, call, slots[start:], start_pos=start)
    single = allocator.full_attn_allocator
    refuses(single, GeometryError, single.free_segment, slots[2:], start_pos=2)


def test_segments_ascend_and_share_no_page_always(hybrid: Any, laws: Any, refuses: Any) -> None:
    page = hybrid.page_size
    row = laws.extend_row(hybrid, laws.no_row, 4 * page)
    first, second = (row[: 2 * page], 0), (row[2 * page :], 2 * page)
    overlapping = (row[page:], page)
    single = hybrid.full_attn_allocator
    for allocator, call in (
        (hybrid, hybrid.free_segments),
        (hybrid, hybrid.free_swa_segments),
        (single, single.free_segments),
    ):
        refuses(allocator, GeometryError, call, [second, first])
        refuses(allocator, DoubleFreeError, call, [first, overlapping])
        refuses(allocator, DoubleFreeError, call, [first, first])


# -- slots that may not be freed ---------------------------------------------------------------


def test_slots_that_are_never_lent_are_refused(checked: Any, free_name: str, refuses: Any) -> None:
    good = checked.alloc(checked.page_size)
    for slot in outside(checked):
        index = torch.cat((good, tensor(slot)))
        message = refuses(checked, InvalidSlotError, getattr(checked, free_name), index)
        assert free_name in message
        assert str(slot) in message


def test_slots_that_are_free_are_refused(checked: Any, free_name: str, refuses: Any) -> None:
    slots = checked.alloc(2 * checked.page_size)
    checked.free(slots[checked.page_size :])
    call = getattr(checked, free_name)
    refuses(checked, DoubleFreeError, call, slots[checked.page_size :])
    refuses(checked, DoubleFreeError, call, slots)


def test_segments_that_are_not_lent_are_refused(
    checked: Any, segment_free_name: str, refuses: Any
) -> None:
    page = checked.page_size
    row = checked.alloc(2 * page)
    checked.free(row[page:])
    call = getattr(checked, segment_free_name)
    refuses(checked, DoubleFreeError, call, row, start_pos=0)
    for slot in outside(checked):
        refuses(checked, InvalidSlotError, call, tensor(slot), start_pos=0)


def test_at_page_size_1_a_slot_named_twice_is_freed_twice(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(1, validate=True)
    slots = allocator.alloc(2)
    allocator.free_swa(slots[1:])
    for name, twice in (
        ("free", slots[[0, 0]]),
        ("free_swa", slots[[0, 0]]),
        ("free_full", slots[[1, 1]]),
    ):
        message = refuses(allocator, DoubleFreeError, getattr(allocator, name), twice)
        assert f"named more than once: {int(twice[0])} (1 in all)" in message


def test_pages_freed_in_the_group_are_refused_until_its_end(
    checked: Any, free_name: str, refuses: Any
) -> None:
    slots = checked.alloc(2 * checked.page_size)
    checked.free_group_begin()
    checked.free(slots[: checked.page_size])
    refuses(checked, PendingFreeError, getattr(checked, free_name), slots)
    checked.free_group_end()
    refuses(checked, DoubleFreeError, getattr(checked, free_name), slots)


def test_segments_freed_in_the_group_are_refused_until_its_end(
    checked: Any, segment_free_name: str, refuses: Any
) -> None:
    slots = checked.alloc(2 * checked.page_size)
    checked.free_group_begin()
    checked.free_segment(slots, start_pos=0)
    call = getattr(checked, segment_free_name)
    refuses(checked, PendingFreeError, call, slots, start_pos=0)
    refuses(checked, PendingFreeError, checked.free_full, slots)


def test_a_segment_runs_through_its_pages_slot_by_slot(
    laws: Any, segment_free_name: str, refuses: Any
) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = allocator.alloc(8)
    call = getattr(allocator, segment_free_name)
    for askew in (row[1:], row[[0, 1, 3, 2]], row[[0, 1, 2, 4]], row[[0, 0]]):
        refuses(allocator, GeometryError, call, askew, start_pos=0)
    single = allocator.full_attn_allocator
    refuses(single, GeometryError, single.free_segment, row[1:], start_pos=0)


def test_segments_name_a_page_once(checked: Any, segment_free_name: str, refuses: Any) -> None:
    page = checked.page_size
    row = checked.alloc(page)
    call = getattr(checked, segment_free_name)
    refuses(checked, DoubleFreeError, call, row.repeat(2), start_pos=0)
    pieces = [(row, 0), (row, page)]
    refuses(checked, DoubleFreeError, getattr(checked, f"{segment_free_name}s"), pieces)


def test_a_live_peer_is_not_left_behind(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    slots = checked.alloc(2 * page)
    checked.free_swa(slots[:page])
    message = refuses(checked, LivePeerError, checked.free_full, slots)
    assert f": {int(slots[page]) // page} (1 in all)" in message
    refuses(checked, LivePeerError, checked.free_full_segment, slots, start_pos=0)
    refuses(checked, LivePeerError, checked.free_full_segments, [(slots[page:], page)])


def test_a_message_shows_the_first_offenders_and_their_number(checked: Any, laws: Any) -> None:
    slots = checked.alloc(6 * checked.page_size)
    checked.free(slots)
    with pytest.raises(DoubleFreeError) as caught:
        checked.free(slots)
    first = ", ".join(str(page) for page in laws.pages_of(slots, checked.page_size)[:4])
    assert str(caught.value) == (
        f"free: full pages that are not lent: {first}, ... (6 in all); expected pages on loan"
    )


def test_more_frees_than_pages_are_seen_even_without_validate() -> None:
    allocator = PagedTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False, validate=False)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free_segment(slots, start_pos=0)
    with pytest.raises(DoubleFreeError):
        allocator.free_segment(slots, start_pos=0)
    with pytest.raises(DoubleFreeError):
        allocator.free(slots)


def test_on_a_device_too_many_slots_are_seen_when_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", "torch")
    allocator = PagedTokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False, validate=False)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free(slots)
    allocator.free(slots)
    with pytest.raises(DoubleFreeError):
        allocator.available_size()


def test_one_pool_alone_refuses_the_same(page_size: int, laws: Any, refuses: Any) -> None:
    allocator = laws.make_single(page_size, validate=True)
    slots = allocator.alloc(page_size)
    refuses(allocator, InvalidSlotError, allocator.free, tensor(0))
    refuses(allocator, InvalidSlotError, allocator.free, tensor(-1))
    allocator.free_group_begin()
    allocator.free(slots)
    refuses(allocator, PendingFreeError, allocator.free, slots)
    allocator.free_group_end()
    refuses(allocator, DoubleFreeError, allocator.free, slots)
    refuses(allocator, DoubleFreeError, allocator.free_segment, slots, start_pos=0)


# -- rows that may not be continued ------------------------------------------------------------


def decode(allocator: Any, length: int, last: int) -> object:
    total = tensor(length)
    return allocator.alloc_decode(total, total, tensor(last))


def extend(allocator: Any, prefix: int, length: int, last: int) -> object:
    before, total = tensor(prefix), tensor(length)
    return allocator.alloc_extend(before, before, total, total, tensor(last), length - prefix)


def tail(allocator: Any, prefix: int, length: int, last: int) -> object:
    before, total, new = tensor(prefix), tensor(length), length - prefix
    return allocator.alloc_extend_swa_tail(before, before, total, total, tensor(last), new, 0)


def test_the_last_slot_must_fit_the_prefix(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = laws.extend_row(allocator, laws.no_row, 6)
    side = allocator.full_attn_allocator
    for target in (allocator, side):
        refuses(target, GeometryError, decode, target, 6, int(row[5]))
        refuses(target, GeometryError, decode, target, 8, int(row[5]))
        refuses(target, GeometryError, extend, target, 5, 9, int(row[5]))
        refuses(target, GeometryError, extend, target, 0, 4, int(row[3]))
        refuses(target, GeometryError, extend, target, 4, 8, -1)
    refuses(allocator, GeometryError, tail, allocator, 5, 9, int(row[5]))


def test_the_last_slot_must_be_lent(checked: Any, laws: Any, refuses: Any) -> None:
    page = checked.page_size
    row = laws.extend_row(checked, laws.no_row, 2 * page)
    last = int(row[-1])
    checked.free(row[page:])
    for call in (extend, tail):
        refuses(checked, InvalidSlotError, call, checked, 2 * page, 3 * page, last)
    refuses(checked, InvalidSlotError, decode, checked, 2 * page + 1, last)
    refuses(checked, InvalidSlotError, decode, checked, 2 * page + 1, page - 1)
    refuses(checked, InvalidSlotError, decode, checked, 2 * page + 1, 10**6 * page - 1)
    checked.free_group_begin()
    checked.free(row[:page])
    refuses(checked, PendingFreeError, decode, checked, page + 1, int(row[page - 1]))


def test_two_rows_do_not_go_on_in_one_page(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = laws.extend_row(allocator, laws.no_row, 2)
    last, length = row[[1, 1]], tensor(3, 3)
    for target in (allocator, allocator.full_attn_allocator):
        refuses(target, InvalidSlotError, target.alloc_decode, length, length, last)


def test_lengths_agree_on_device_and_host(checked: Any, refuses: Any) -> None:
    none, last = tensor(0), tensor(-1)
    call = checked.alloc_extend
    refuses(checked, GeometryError, call, none, none, tensor(3), tensor(2), last, 2)
    refuses(checked, GeometryError, checked.alloc_decode, tensor(2), tensor(1), last)


def test_a_page_goes_on_only_with_a_live_peer(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    row = laws.extend_row(allocator, laws.no_row, 6)
    allocator.free_swa(row[:4])
    allocator.free_group_begin()
    allocator.free_swa(row[4:])
    last = int(row[-1])
    for _ in ("while the free waits", "after it happened"):
        message = refuses(allocator, DeadPeerError, decode, allocator, 7, last)
        assert "without an SWA peer" in message
        refuses(allocator, DeadPeerError, extend, allocator, 6, 12, last)
        if allocator.free_group_is_open:
            allocator.free_group_end()
    # A row that ends with its page begins a new one, and a tail needs no peer before it.
    assert tail(allocator, 6, 8, last) is not None


def test_a_full_page_without_a_peer_may_be_followed(checked: Any, laws: Any) -> None:
    page = checked.page_size
    row = laws.extend_row(checked, laws.no_row, page)
    checked.free_swa(row)
    longer = laws.extend_row(checked, row, 2 * page)
    laws.check_hybrid(checked, laws.pages_of(longer, page))


# -- mapping writes that would lose or share a page --------------------------------------------


def test_a_mapping_is_not_written_over_a_live_entry(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    full, swa = checked.alloc(page), checked.swa_attn_allocator.alloc(page)
    refuses(checked, LivePeerError, checked.set_full_to_swa_mapping, full, swa)


def test_only_lent_slots_are_mapped(checked: Any, laws: Any, refuses: Any) -> None:
    page = checked.page_size
    full, swa = checked.full_attn_allocator.alloc(page), checked.swa_attn_allocator.alloc(page)
    call = checked.set_full_to_swa_mapping
    refuses(checked, MappingError, call, full, swa + page)
    refuses(checked, DoubleFreeError, call, full + page, swa)
    for slot in outside(checked):
        refuses(checked, InvalidSlotError, call, tensor(slot), swa[:1])
    end = (laws.swa_pages + 1) * page
    for slot in (-1, 0, end):
        refuses(checked, InvalidSlotError, call, full[:1], tensor(slot))


def test_an_swa_page_has_one_full_page(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    mapped = checked.alloc(page)
    full, swa = checked.full_attn_allocator.alloc(2 * page), checked.swa_attn_allocator.alloc(page)
    taken = checked.translate_loc_from_full_to_swa(mapped)
    call = checked.set_full_to_swa_mapping
    refuses(checked, MappingError, call, full[:page], taken)
    refuses(checked, MappingError, call, full, swa.repeat(2))
    other = checked.swa_attn_allocator.alloc(page)
    refuses(checked, MappingError, call, full[:page].repeat(2), torch.cat((swa, other)))


def test_slots_freed_in_the_group_are_not_mapped(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    gone, dead = checked.alloc(page), checked.alloc(page)
    full, swa = checked.full_attn_allocator.alloc(page), checked.swa_attn_allocator.alloc(page)
    dying = checked.translate_loc_from_full_to_swa(dead)
    checked.free_group_begin()
    checked.free(gone)
    checked.free_swa(dead)
    refuses(checked, PendingFreeError, checked.set_full_to_swa_mapping, gone, swa)
    refuses(checked, PendingFreeError, checked.clear_full_to_swa_mapping, gone)
    refuses(checked, PendingFreeError, checked.set_full_to_swa_mapping, full, dying)
    checked.set_full_to_swa_mapping(dead, swa)
    refuses(checked, PendingFreeError, checked.set_full_to_swa_mapping, full, dying)
    checked.free_group_end()
    refuses(checked, MappingError, checked.set_full_to_swa_mapping, full, dying)


def test_offsets_agree_in_a_mapping(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    full, swa = allocator.full_attn_allocator.alloc(4), allocator.swa_attn_allocator.alloc(4)
    call = allocator.set_full_to_swa_mapping
    refuses(allocator, GeometryError, call, full, swa.flip(0))


def test_entries_of_slots_that_are_not_lent_are_not_cleared(checked: Any, refuses: Any) -> None:
    slots = checked.alloc(checked.page_size)
    checked.free(slots)
    refuses(checked, DoubleFreeError, checked.clear_full_to_swa_mapping, slots)
    for slot in outside(checked):
        refuses(checked, InvalidSlotError, checked.clear_full_to_swa_mapping, tensor(slot))


def test_translation_of_a_slot_beyond_the_pool_is_refused(checked: Any, refuses: Any) -> None:
    end = (checked.full_attn_allocator.num_pages + 1) * checked.page_size
    for slot in (-2, end, end + 1, 10**12):
        index = tensor(slot)
        refuses(checked, InvalidSlotError, checked.translate_loc_from_full_to_swa, index)


# -- recoveries --------------------------------------------------------------------------------


def test_a_recovery_wants_a_tombstone_and_a_live_sequence(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    live, other, dead, gone = (checked.alloc(page) for _ in range(4))
    checked.free_swa(dead)
    checked.free(gone)
    call = checked.recover_tombstone
    refuses(checked, LivePeerError, call, live, other)
    refuses(checked, LivePeerError, call, live, live)
    refuses(checked, DeadPeerError, call, dead, dead)
    refuses(checked, DoubleFreeError, call, gone, live)
    refuses(checked, DoubleFreeError, call, dead, gone)
    for slot in outside(checked):
        refuses(checked, InvalidSlotError, call, tensor(slot), live[:1])
        refuses(checked, InvalidSlotError, call, dead[:1], tensor(slot))


def test_a_recovery_in_a_group_sees_what_is_queued(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    live, other, dead, gone = (checked.alloc(page) for _ in range(4))
    checked.free_swa(dead)
    checked.free_group_begin()
    checked.free(gone)
    checked.free_swa(other)
    call = checked.recover_tombstone
    refuses(checked, PendingFreeError, call, gone, live)
    refuses(checked, PendingFreeError, call, dead, gone)
    refuses(checked, DeadPeerError, call, dead, other)
    call(dead, live)
    refuses(checked, PendingFreeError, checked.free_full, live)
    refuses(checked, PendingFreeError, call, other, live)
    refuses(checked, LivePeerError, call, dead, dead)


def test_a_recovery_pairs_pages_one_to_one(checked: Any, refuses: Any) -> None:
    page = checked.page_size
    dead, live = checked.alloc(2 * page), checked.alloc(2 * page)
    checked.free_swa(dead)
    call = checked.recover_tombstone
    refuses(checked, GeometryError, call, dead[:page].repeat(2), live)
    error = DoubleFreeError if page == 1 else GeometryError
    refuses(checked, error, call, dead, live[:page].repeat(2))


def test_offsets_agree_in_a_recovery(laws: Any, refuses: Any) -> None:
    allocator = laws.make_hybrid(4, validate=True)
    dead, live = allocator.alloc(4), allocator.alloc(4)
    allocator.free_swa(dead)
    refuses(allocator, GeometryError, allocator.recover_tombstone, dead, live.flip(0))


def test_the_sentinel_survives_every_hostile_index(checked: Any) -> None:
    for call in (
        checked.free,
        checked.free_swa,
        checked.free_full,
        checked.clear_full_to_swa_mapping,
        lambda index: checked.set_full_to_swa_mapping(index, index),
        lambda index: checked.recover_tombstone(index, index),
    ):
        with pytest.raises(InvalidSlotError):
            call(tensor(-1))
    assert isinstance(checked, SWATokenToKVPoolAllocator)
    assert int(checked.full_to_swa_index_mapping[-1]) == -1

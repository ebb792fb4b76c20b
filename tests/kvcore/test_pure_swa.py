"""One pool in which every layer slides: the surface of a hybrid pool, every slot released once."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    DoubleFreeError,
    FreeGroupError,
    GeometryError,
    IndexTensorError,
    InvalidSlotError,
    MappingError,
    PendingFreeError,
    PureSWATokenToKVPoolAllocator,
    SWAKVPool,
)

PAGES = 8
FREES = ["free", "free_swa"]
SEGMENT_FREES = ["free_segment", "free_swa_segment"]


class RecordingPool:
    """A pool that remembers which mapping it was given."""

    def __init__(self) -> None:
        self.mappings: list[torch.Tensor] = []

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.mappings.append(full_to_swa_index_mapping)

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the allocator reads its own mapping")


def make(page_size: int, **options: Any) -> PureSWATokenToKVPoolAllocator:
    given: dict[str, Any] = {"kvcache": None, "need_sort": False} | options
    return PureSWATokenToKVPoolAllocator(
        PAGES * page_size, page_size, torch.float16, "cpu", **given
    )


@pytest.fixture
def sliding(page_size: int, need_sort: bool, validate: bool) -> PureSWATokenToKVPoolAllocator:
    return make(page_size, need_sort=need_sort, validate=validate)


@pytest.fixture
def checked(page_size: int) -> PureSWATokenToKVPoolAllocator:
    return make(page_size, validate=True)


def check(allocator: PureSWATokenToKVPoolAllocator, lent: list[int], laws: Any) -> None:
    """Every page exactly once, and the identity mapping as it was."""
    laws.check_single(allocator.swa_attn_allocator, lent)
    mapping = allocator.full_to_swa_index_mapping
    assert mapping.tolist() == [*range(allocator.size + allocator.page_size), -1]


def state(allocator: PureSWATokenToKVPoolAllocator, laws: Any) -> tuple[Any, ...]:
    return (
        allocator.free_group_is_open,
        allocator.full_to_swa_index_mapping.tolist(),
        laws.snapshot(allocator.swa_attn_allocator),
    )


@pytest.fixture
def leaves(laws: Any) -> Callable[..., str]:
    """Require that a call raises exactly that type and changes nothing; gives the message."""

    def run(
        allocator: PureSWATokenToKVPoolAllocator,
        error: type[Exception],
        call: Callable[..., object],
        *args: Any,
        **kwargs: Any,
    ) -> str:
        before = state(allocator, laws)
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert caught.type is error
        assert state(allocator, laws) == before
        return str(caught.value)

    return run


# -- geometry ----------------------------------------------------------------------------------


def test_attributes_carry_the_names_of_a_hybrid(sliding: Any) -> None:
    page = sliding.page_size
    assert sliding.size == sliding.size_full == sliding.size_swa == PAGES * page
    assert sliding.queued_peer_slots.tolist() == []
    assert sliding.full_attn_allocator is sliding.swa_attn_allocator
    sliding.alloc(3 * page)
    assert sliding.available_size() == 5 * page
    assert sliding.full_available_size() == sliding.swa_available_size() == 5 * page
    assert sliding.new_pages_available(5, 5), "a page is both"
    assert not sliding.new_pages_available(6, 0)
    assert not sliding.new_pages_available(0, 6)
    assert f"{5 * page} of {PAGES * page}" in sliding.debug_print()


def test_the_mapping_is_the_identity_and_belongs_to_the_pool_too(page_size: int, laws: Any) -> None:
    pool = RecordingPool()
    allocator = make(page_size, kvcache=pool)
    check(allocator, [], laws)
    assert len(pool.mappings) == 1
    assert pool.mappings[0] is allocator.full_to_swa_index_mapping
    assert allocator.get_kvcache() is pool
    allocator.clear()
    assert len(pool.mappings) == 1
    allocator.resize(size_swa=3 * page_size)
    assert pool.mappings[1] is allocator.full_to_swa_index_mapping
    check(allocator, [], laws)


def test_the_side_knows_the_sub_pool_of_a_split_pool(page_size: int) -> None:
    pool = SWAKVPool(
        size=8 * page_size,
        size_swa=8 * page_size,
        page_size=page_size,
        dtype=torch.float16,
        head_num=1,
        head_dim=8,
        swa_attention_layer_ids=[0, 1],
        full_attention_layer_ids=[],
        device="cpu",
    )
    allocator = make(page_size, kvcache=pool)
    assert allocator.swa_attn_allocator.get_kvcache() is pool.swa_kv_pool
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    assert torch.equal(pool.translate_loc_from_full_to_swa(slots), slots)


@pytest.mark.parametrize(("size", "page"), [(0, 1), (3, 4), (-8, 4), (4, 0)])
def test_a_pool_without_a_page_is_refused(size: int, page: int) -> None:
    with pytest.raises(GeometryError):
        PureSWATokenToKVPoolAllocator(size, page, torch.float16, "cpu", None, False)


def test_a_slot_translates_to_itself(sliding: Any) -> None:
    square = torch.tensor([[-1, 0], [1, 2]], dtype=torch.int32)
    translated = sliding.translate_loc_from_full_to_swa(square)
    assert translated.dtype == torch.int64
    assert translated.tolist() == square.tolist()
    slots = sliding.alloc(sliding.page_size)
    translated = sliding.translate_loc_from_full_to_swa(slots)
    translated.zero_()
    assert 0 not in slots.tolist(), "in storage of its own"
    with pytest.raises(IndexTensorError):
        sliding.translate_loc_from_full_to_swa(square.float())


# -- lending -----------------------------------------------------------------------------------


def test_rows_grow_as_in_one_pool(sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    plain = laws.make_single(page, need_sort=sliding.need_sort)
    plain.resize(size=sliding.size)
    rows = [laws.extend_row(allocator, laws.no_row, page + 1) for allocator in (sliding, plain)]
    assert torch.equal(*rows)
    rows = [laws.extend_row(sliding, rows[0], 3 * page), laws.extend_row(plain, rows[1], 3 * page)]
    assert torch.equal(*rows)
    length = torch.tensor([3 * page + 1])
    assert torch.equal(
        sliding.alloc_decode(length, length, rows[0][-1:]),
        plain.alloc_decode(length, length, rows[1][-1:]),
    )
    assert torch.equal(sliding.alloc(2 * page), plain.alloc(2 * page))


def test_what_does_not_fit_is_none_and_changes_nothing(sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    row = laws.extend_row(sliding, laws.no_row, page)
    sliding.alloc(sliding.available_size() - page)
    before = state(sliding, laws)
    assert sliding.alloc(2 * page) is None
    assert laws.extend_row(sliding, row, 4 * page) is None
    assert state(sliding, laws) == before
    assert sliding.alloc(page) is not None


def tail_call(
    allocator: Any, row: torch.Tensor, length: int, tail: int, end: int | None = None
) -> Any:
    prefix, total = torch.tensor([row.numel()]), torch.tensor([length])
    last = row[-1:] if row.numel() else torch.tensor([-1])
    given = (prefix, prefix, total, total, last, length - row.numel(), tail)
    return allocator.alloc_extend_swa_tail(*given, swa_tail_end=end)


def test_a_tail_is_the_whole_extend(sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    row = tail_call(sliding, laws.no_row, 2 * page + 1, 2 * page + 1)
    rest = tail_call(sliding, row, 4 * page, 2 * page - 1, 4 * page)
    row = torch.cat((row, rest))
    assert (row % page).tolist() == [*range(page)] * 4
    check(sliding, laws.pages_of(row, page), laws)
    assert tail_call(sliding, row, row.numel(), 0).numel() == 0


def test_less_than_the_whole_extend_is_no_tail(sliding: Any, laws: Any, leaves: Any) -> None:
    page = sliding.page_size
    for tail, end in ((0, None), (page, None), (page, page), (page, 2 * page)):
        message = leaves(
            sliding, MappingError, tail_call, sliding, laws.no_row, 3 * page, tail, end
        )
        assert f"all {3 * page} new tokens, got {tail}" in message
    for tail, end in ((4 * page, None), (-page, None), (page, 4 * page)):
        leaves(sliding, GeometryError, tail_call, sliding, laws.no_row, 3 * page, tail, end)
    zeros, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    call = sliding.alloc_extend_swa_tail
    leaves(sliding, GeometryError, call, zeros, zeros, ones, ones, -ones, 2, 2)


# -- returning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FREES)
def test_either_free_releases_whole_pages_once(name: str, sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    slots = sliding.alloc(4 * page)
    getattr(sliding, name)(slots[[0, page]])
    check(sliding, laws.pages_of(slots[2 * page :], page), laws)
    if page > 1:
        getattr(sliding, name)(slots[[2 * page, 2 * page]])
        check(sliding, laws.pages_of(slots[3 * page :], page), laws)
    sliding.free(slots[3 * page :])


@pytest.mark.parametrize("name", SEGMENT_FREES)
def test_either_segment_free_releases_whole_pages_once(name: str, sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    row = laws.extend_row(sliding, laws.no_row, 4 * page + 1)
    getattr(sliding, name)(row[:page], start_pos=0)
    check(sliding, laws.pages_of(row[page:], page), laws)
    pieces = [(row[page : 2 * page], page), (row[3 * page :], 3 * page)]
    getattr(sliding, f"{name}s")(pieces)
    check(sliding, laws.pages_of(row[2 * page : 3 * page], page), laws)


def test_free_full_releases_nothing(sliding: Any, laws: Any) -> None:
    page = sliding.page_size
    row = laws.extend_row(sliding, laws.no_row, 4 * page)
    sliding.free_swa(row[: 2 * page])
    for slots, start in ((row[: 2 * page], 0), (row[2 * page :], 2 * page)):
        sliding.free_full(slots)
        sliding.free_full_segment(slots, start_pos=start)
    sliding.free_full_segments([(row[: 2 * page], 0), (row[2 * page :], 2 * page)])
    check(sliding, laws.pages_of(row[2 * page :], page), laws)


def test_freeing_nothing_is_nothing(sliding: Any, laws: Any) -> None:
    before = state(sliding, laws)
    for name in (*FREES, "free_full"):
        getattr(sliding, name)(laws.no_row)
    for name in (*SEGMENT_FREES, "free_full_segment"):
        getattr(sliding, name)(laws.no_row, start_pos=0)
        getattr(sliding, f"{name}s")([])
    assert state(sliding, laws) == before


# -- free groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", ["free_swa", "free_swa_segment", "free_swa_segments"])
@pytest.mark.parametrize("whole", ["free", "free_segment", "free_segments"])
def test_a_window_that_moves_and_a_row_that_ends_in_one_group_release_a_page_once(
    behind: str, whole: str, sliding: Any, laws: Any
) -> None:
    page = sliding.page_size
    row, other = laws.extend_row(sliding, laws.no_row, 4 * page), sliding.alloc(page)

    def release(name: str, slots: torch.Tensor) -> None:
        call = getattr(sliding, name)
        if name.endswith("segments"):
            call([(slots[:page], 0), (slots[page:], page)])
        elif name.endswith("segment"):
            call(slots, start_pos=0)
        else:
            call(slots)

    sliding.free_group_begin()
    release(behind, row[: 2 * page])
    release(behind, row[: 3 * page])
    release(whole, row)
    sliding.free_full(row)
    assert sliding.available_size() == 3 * page
    check(sliding, laws.pages_of(other, page), laws)
    sliding.free_group_end()
    check(sliding, laws.pages_of(other, page), laws)
    assert sliding.available_size() == 7 * page


def test_pages_freed_in_a_group_are_lent_after_its_end_only(sliding: Any) -> None:
    page = sliding.page_size
    slots = sliding.alloc(sliding.size)
    sliding.free_group_begin()
    sliding.free_swa(slots[: 2 * page])
    sliding.free_segment(slots[2 * page : 4 * page], start_pos=0)
    assert sliding.alloc(page) is None
    sliding.free_group_end()
    assert sliding.alloc(4 * page) is not None


@pytest.mark.parametrize("name", [*FREES, *SEGMENT_FREES])
def test_a_deferred_free_keeps_no_view_of_the_callers_tensor(
    name: str, sliding: Any, laws: Any
) -> None:
    page = sliding.page_size
    slots, other = sliding.alloc(2 * page), sliding.alloc(page)
    sliding.free_group_begin()
    getattr(sliding, name)(slots, **({"start_pos": 0} if "segment" in name else {}))
    slots[:] = other.repeat(2)
    sliding.free_group_end()
    check(sliding, laws.pages_of(other, page), laws)


def test_groups_do_not_nest_and_end_once(sliding: Any, leaves: Any) -> None:
    leaves(sliding, FreeGroupError, sliding.free_group_end)
    sliding.free_group_begin()
    sliding.free(sliding.alloc(sliding.page_size))
    leaves(sliding, FreeGroupError, sliding.free_group_begin)
    sliding.swa_attn_allocator.free_group_end()
    leaves(sliding, FreeGroupError, sliding.free_group_end)
    sliding.clear()
    sliding.swa_attn_allocator.free_group_begin()
    leaves(sliding, FreeGroupError, sliding.free_group_begin)


def test_a_group_that_cannot_end_stays_open(page_size: int, laws: Any, leaves: Any) -> None:
    allocator = make(page_size, validate=False)
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    allocator.free(slots)
    allocator.free_group_begin()
    # A segment says how many pages it is; of a set of slots the host cannot know.
    allocator.free_segment(slots, start_pos=0)
    leaves(allocator, DoubleFreeError, allocator.free_group_end)
    allocator.clear()
    check(allocator, [], laws)


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FREES)
def test_outside_a_group_a_page_that_went_is_gone(name: str, checked: Any, leaves: Any) -> None:
    slots = checked.alloc(2 * checked.page_size)
    getattr(checked, name)(slots)
    for again in FREES:
        message = leaves(checked, DoubleFreeError, getattr(checked, again), slots)
        assert message.startswith(f"{again}: SWA pages that are not lent")
    for again in SEGMENT_FREES:
        leaves(checked, DoubleFreeError, getattr(checked, again), slots, start_pos=0)


def test_a_row_that_ended_in_the_group_is_not_named_again(checked: Any, leaves: Any) -> None:
    page = checked.page_size
    slots = checked.alloc(2 * page)
    checked.free_group_begin()
    checked.free_swa(slots[:page])
    checked.free(slots)
    for name in FREES:
        message = leaves(checked, PendingFreeError, getattr(checked, name), slots)
        assert message.startswith(f"{name}: SWA pages already freed")
    for name in SEGMENT_FREES:
        leaves(checked, PendingFreeError, getattr(checked, name), slots, start_pos=0)
    checked.free_group_end()
    leaves(checked, DoubleFreeError, checked.free, slots)


def test_a_page_that_the_window_left_in_the_group_does_not_go_on(laws: Any, leaves: Any) -> None:
    allocator = make(4, validate=True)
    row = laws.extend_row(allocator, laws.no_row, 6)
    allocator.free_group_begin()
    allocator.free_swa(row[4:])
    leaves(allocator, PendingFreeError, laws.extend_row, allocator, row, 7)
    allocator.free_group_end()
    leaves(allocator, InvalidSlotError, laws.extend_row, allocator, row, 7)


def test_at_page_size_1_one_call_names_a_slot_once(leaves: Any) -> None:
    allocator = make(1, validate=True)
    slots = allocator.alloc(2)
    assert slots is not None
    for grouped in (False, True):
        if grouped:
            allocator.free_group_begin()
        for name in FREES:
            leaves(allocator, DoubleFreeError, getattr(allocator, name), slots[[0, 0]])


@pytest.mark.parametrize("name", [*FREES, "free_full"])
def test_slots_that_are_never_lent_are_refused(name: str, checked: Any, leaves: Any) -> None:
    page, end = checked.page_size, (PAGES + 1) * checked.page_size
    for slot in (-1, 0, page - 1, end, 10**12):
        message = leaves(checked, InvalidSlotError, getattr(checked, name), torch.tensor([slot]))
        assert message.startswith(f"{name}: ")
        piece = torch.tensor([slot])
        leaves(checked, InvalidSlotError, getattr(checked, f"{name}_segment"), piece, start_pos=0)
    for slot in (-2, end):
        call = checked.translate_loc_from_full_to_swa
        leaves(checked, InvalidSlotError, call, torch.tensor([slot]))


@pytest.mark.parametrize("index", [torch.tensor(4), torch.tensor([4.0]), [4]])
def test_anything_but_a_vector_of_indices_is_always_refused(
    index: Any, sliding: Any, leaves: Any
) -> None:
    slots = sliding.alloc(sliding.page_size)
    for name in (*FREES, "free_full", "clear_full_to_swa_mapping"):
        leaves(sliding, IndexTensorError, getattr(sliding, name), index)
    for name in (*SEGMENT_FREES, "free_full_segment"):
        leaves(sliding, IndexTensorError, getattr(sliding, name), index, start_pos=0)
    for call in (sliding.set_full_to_swa_mapping, sliding.recover_tombstone):
        leaves(sliding, IndexTensorError, call, index, slots)
        leaves(sliding, IndexTensorError, call, slots, index)


def test_segments_are_aligned_always(laws: Any, validate: bool, leaves: Any) -> None:
    allocator = make(4, validate=validate)
    row = laws.extend_row(allocator, laws.no_row, 8)
    for name in (*SEGMENT_FREES, "free_full_segment"):
        leaves(allocator, GeometryError, getattr(allocator, name), row[2:], start_pos=2)
        pieces = [(row[4:], 4), (row[:4], 0)]
        leaves(allocator, GeometryError, getattr(allocator, f"{name}s"), pieces)


def test_nothing_can_be_remapped(sliding: Any, leaves: Any) -> None:
    slots = sliding.alloc(2 * sliding.page_size)
    for call, indices in (
        (sliding.set_full_to_swa_mapping, (slots, slots)),
        (sliding.clear_full_to_swa_mapping, (slots,)),
        (sliding.recover_tombstone, (slots, slots)),
        (sliding.recover_tombstone, (slots[:0], slots[:0])),
    ):
        assert "its own SWA slot" in leaves(sliding, MappingError, call, *indices)


# -- the whole pool ----------------------------------------------------------------------------


def test_clear_takes_everything_back_and_closes_the_group(sliding: Any, laws: Any) -> None:
    slots = sliding.alloc(3 * sliding.page_size)
    sliding.free_group_begin()
    sliding.free_swa(slots)
    sliding.clear()
    check(sliding, [], laws)
    assert not sliding.free_group_is_open
    assert sliding.alloc(sliding.size) is not None


@pytest.mark.parametrize("pages", [3, 40])
def test_resize_goes_both_ways_by_any_name(sliding: Any, pages: int, laws: Any) -> None:
    size = pages * sliding.page_size
    for given in (
        {"size": size},
        {"size_swa": size},
        {"size": size, "size_swa": size},
        {"config": SimpleNamespace(swa_max_total_num_tokens=size)},
    ):
        sliding.free_group_begin()
        sliding.free(sliding.alloc(sliding.page_size))
        sliding.resize(**given)
        check(sliding, [], laws)
        assert sliding.size == sliding.size_full == sliding.size_swa == size
        assert not sliding.free_group_is_open
        assert sliding.alloc(size).numel() == size
        sliding.clear()


def test_resize_wants_one_size(sliding: Any, leaves: Any) -> None:
    config = SimpleNamespace(swa_max_total_num_tokens=8)
    leaves(sliding, GeometryError, sliding.resize)
    leaves(sliding, GeometryError, sliding.resize, size=8, size_swa=12)
    leaves(sliding, GeometryError, sliding.resize, config, size=8)
    leaves(sliding, GeometryError, sliding.resize, size_swa=0)


def test_need_sort_merges_on_demand(page_size: int) -> None:
    allocator = make(page_size, need_sort=True)
    slots = allocator.alloc(PAGES * page_size)
    assert slots is not None
    allocator.free(slots)
    assert allocator.swa_attn_allocator.release_pages.numel() == PAGES
    allocator.merge_and_sort_free()
    assert allocator.swa_attn_allocator.free_pages.tolist() == list(range(1, PAGES + 1))

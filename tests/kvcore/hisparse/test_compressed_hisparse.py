"""The compressed variant over its hybrid allocator: what it forwards and what it adds.

Expected answers are those of a bare hybrid allocator that gets the same calls.
"""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    CompressedHiSparseTokenToKVPoolAllocator,
    DeadPeerError,
    DoubleFreeError,
    FreeGroupError,
    GeometryError,
    KVCacheError,
    LivePeerError,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator.hisparse import CompressedPool


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


NO_ROW = tensor()


def tail_call(bench: Any, length: int, tail: int, **options: int) -> Any:
    """The tail extension of a new row, as a callable of an allocator."""
    batch = bench.batch([NO_ROW], [length])
    return lambda allocator: allocator.alloc_extend_swa_tail(*batch, tail, **options)


def unpaired(bench: Any, pages: int) -> torch.Tensor:
    """A new row of whole pages with device slots and without SWA peers."""
    row = bench.new_row(pages * bench.kind.page_size)
    bench.allocator.free_swa(row)
    assert isinstance(row, torch.Tensor)
    return row


DRIVING = {
    *("check_batch", "lend", "lend_batch"),
    *("become", "new_sizes", "register_mapping", "resized"),
}
"""By these the wrapper drives the hybrid allocator; they are nothing that a caller asks."""

# -- forwarding ------------------------------------------------------------------------------------


def test_every_public_name_of_the_hybrid_allocator_is_answered(compressed: Any) -> None:
    inner = compressed.allocator.logical_attn_allocator
    missing = {name for name in dir(inner) if not name.startswith("_")} - set(
        dir(compressed.allocator)
    )
    assert missing == DRIVING


def test_geometry_is_that_of_the_hybrid_allocator(compressed: Any) -> None:
    wrapper, inner = compressed.allocator, compressed.allocator.logical_attn_allocator
    for name in ("page_size", "dtype", "device", "need_sort", "size", "size_full", "size_swa"):
        assert getattr(wrapper, name) == getattr(inner, name), name
    for name in ("full_attn_allocator", "swa_attn_allocator", "full_to_swa_index_mapping"):
        assert getattr(wrapper, name) is getattr(inner, name), name
    assert wrapper.get_kvcache() is inner.get_kvcache()
    assert wrapper.swa_available_size() == inner.swa_available_size()
    assert inner.debug_print() in wrapper.debug_print()
    assert wrapper.validate is inner.validate is True
    for pages in ((0, 0), (6, 10), (6, 11), (0, 11)):
        assert wrapper.new_pages_available(*pages) == inner.new_pages_available(*pages)


def test_pages_are_available_where_slots_are(compressed: Any) -> None:
    wrapper, page = compressed.allocator, compressed.kind.page_size
    pages = wrapper.full_available_size() // page
    assert pages == compressed.device_pages < compressed.logical_pages
    assert wrapper.new_pages_available(pages, pages)
    assert not wrapper.new_pages_available(pages + 1, 0), "no device page for it"
    assert wrapper.alloc(pages * page) is not None
    assert not wrapper.new_pages_available(1, 0)
    assert wrapper.new_pages_available(0, 1)


def test_a_pool_on_another_device_is_refused(compressed: Any) -> None:
    kind = compressed.kind
    pool = compressed.allocator.hisparse_kvcache
    pool.device = "meta"
    with pytest.raises(GeometryError, match=r"constructor: expected a pool on cpu, got .* meta"):
        CompressedHiSparseTokenToKVPoolAllocator(kind.make_hybrid(), pool)


def test_a_value_error_is_not_hidden_by_a_device_side_without_room(compressed: Any) -> None:
    wrapper, page = compressed.allocator, compressed.kind.page_size
    row = unpaired(compressed, 1)[: page - 1]
    rows = [row, NO_ROW]
    whole = compressed.batch(rows, [page, compressed.device_pages * page])
    beyond = compressed.batch(rows, [page, (compressed.logical_pages + 1) * page])
    for batch in (whole, beyond):
        compressed.refuses(DeadPeerError, wrapper.alloc_extend, *batch)
    assert wrapper.alloc_extend(*compressed.batch([NO_ROW], [batch[-1]])) is None


class Twins:
    """A wrapper with plenty of device pages and a bare hybrid allocator, called alike."""

    def __init__(self, bench: Any, pool: CompressedPool, need_sort: bool) -> None:
        self.bench = bench
        self.bare: SWATokenToKVPoolAllocator = bench.kind.make_hybrid(need_sort=need_sort)
        self.wrapper = CompressedHiSparseTokenToKVPoolAllocator(
            bench.kind.make_hybrid(need_sort=need_sort), pool
        )

    def call(self, name: str, *args: Any, named: str | None = None, **kwargs: Any) -> Any:
        """One call on both; the common answer, or None where both raised the same error.

        `named` is the name of the wrapper's call where it differs.
        """
        seen = self._outcome(getattr(self.wrapper, named or name), *args, **kwargs)
        expected = self._outcome(getattr(self.bare, name), *args, **kwargs)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(seen, expected), name
        else:
            assert seen == expected, name
        self.compare()
        return None if isinstance(expected, type) else expected

    def both(self) -> tuple[Any, Any]:
        return self.wrapper, self.bare

    def compare(self) -> None:
        states = [self._state(each) for each in (self.wrapper.logical_attn_allocator, self.bare)]
        assert states[0] == states[1]
        assert self.wrapper.available_size() == self.bare.available_size()
        assert self.wrapper.full_available_size() == self.bare.full_available_size()
        assert self.wrapper.free_group_is_open == self.bare.free_group_is_open
        assert torch.equal(self.wrapper.queued_peer_slots, self.bare.queued_peer_slots)

    @staticmethod
    def _outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except KVCacheError as error:
            return type(error)

    @staticmethod
    def _state(allocator: SWATokenToKVPoolAllocator) -> list[Any]:
        sides = (allocator.full_attn_allocator, allocator.swa_attn_allocator)
        return [
            allocator.full_to_swa_index_mapping.tolist(),
            *([s.free_pages.tolist(), s.release_pages.tolist()] for s in sides),
            *(side.pending_pages.tolist() for side in sides),
        ]


BY_SLOTS = ("free", "free_swa", "free_full", "clear_full_to_swa_mapping")
BY_SEGMENT = ("free_segment", "free_swa_segment", "free_full_segment")
BY_SEGMENTS = ("free_segments", "free_swa_segments", "free_full_segments")
WITHOUT_ARGUMENTS = (
    *("free_group_begin", "free_group_end", "merge_and_sort_free", "swa_available_size"),
)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_calls_have_the_same_answers(compressed: Any, need_sort: bool, seed: int) -> None:
    """L9, right calls and wrong ones: rows are also named after they were freed."""
    choose = random.Random(seed)
    page = compressed.kind.page_size
    pool = type(compressed.allocator.hisparse_kvcache)(64 * page // 4, page // 4)
    twins = Twins(compressed, pool, need_sort)
    rows: list[torch.Tensor] = []

    def keep(slots: torch.Tensor | None) -> None:
        rows.extend([] if slots is None or not len(slots) else [slots])

    def row() -> torch.Tensor:
        return choose.choice(rows) if rows else NO_ROW

    def extended() -> None:
        old = row() if choose.random() < 0.5 else NO_ROW
        batch = compressed.batch([old], [len(old) + choose.randint(0, 2 * page)])
        # Behind decoded tokens a row goes on without device slots.
        named = "alloc_extend" if len(old) % page == 0 else "alloc_logical_only"
        slots = twins.call("alloc_extend", *batch, named=named)
        if slots is not None and len(old):
            rows[:] = [each for each in rows if each is not old]
            slots = torch.cat((old, slots))
        keep(slots)

    def decoded() -> None:
        old = row()
        if len(old):
            length = tensor(len(old) + 1)
            slot = twins.call("alloc_decode", length, length.clone(), old[-1:])
            if slot is not None:
                rows[:] = [each for each in rows if each is not old]
                keep(torch.cat((old, slot)))

    def tailed() -> None:
        length, tail = choose.randint(1, 3) * page, choose.choice([0, page, page + 1])
        batch = compressed.batch([NO_ROW], [length])
        keep(twins.call("alloc_extend_swa_tail", *batch, tail, swa_tail_end=length))

    def recovered() -> None:
        kept, incoming = row(), row()
        shorter = min(len(kept), len(incoming)) // page * page
        twins.call("recover_tombstone", kept[:shorter], incoming[:shorter])

    def paired() -> None:
        full = row()[:page]
        lent = [each.swa_attn_allocator.alloc(page) for each in twins.both()]
        if lent[0] is not None:
            twins.call("set_full_to_swa_mapping", full, lent[0][: len(full)])

    calls: list[Callable[[], object]] = [
        lambda: keep(twins.call("alloc", choose.randint(0, 2) * page)),
        extended,
        extended,
        decoded,
        tailed,
        recovered,
        paired,
        *[lambda: twins.call(choose.choice(BY_SLOTS), row())] * 2,
        lambda: twins.call(choose.choice(BY_SEGMENT), row(), start_pos=0),
        lambda: twins.call(choose.choice(BY_SEGMENTS), [(row()[:page], 0), (row()[page:], page)]),
        lambda: twins.call("translate_loc_from_full_to_swa", row()),
        *(partial(twins.call, name) for name in WITHOUT_ARGUMENTS),
    ]
    for _ in range(400):
        choose.choice(calls)()
        rows[:] = rows[-8:]
        if choose.random() < 0.02:
            twins.call("clear")
            rows.clear()


def test_the_transfer_indices_are_those_of_the_hybrid_allocator(compressed: Any) -> None:
    row = compressed.new_row(compressed.kind.page_size)
    allocator = compressed.allocator
    inner = allocator.logical_attn_allocator
    expected = inner.translate_kv_indices_for_transfer(row)
    assert torch.equal(allocator.translate_kv_indices_for_transfer(row), expected)


# -- the device side -------------------------------------------------------------------------------


def test_capacity_counts_the_entries_that_device_slots_can_hold(compressed: Any) -> None:
    bench, allocator, page = compressed, compressed.allocator, compressed.kind.page_size
    assert allocator.full_available_size() == bench.device_pages * page
    assert allocator.swa_available_size() == bench.swa_pages * page
    bench.extend_logical(NO_ROW, (bench.swa_pages - 2) * page)
    assert allocator.full_available_size() == 4 * page
    assert allocator.available_size() == 2 * page


def test_a_page_gets_its_device_page_with_its_first_complete_entry(compressed: Any) -> None:
    bench, page = compressed, compressed.kind.page_size
    row = bench.new_row(page + 3)
    assert bench.free_device_pages() == bench.device_pages - 1
    row = bench.extend(row, page + 4)
    assert bench.free_device_pages() == bench.device_pages - 2
    assert len([slot for slot in bench.mapping[:-1] if slot]) == (page + 4) // 4


def test_which_slots_have_an_entry_is_asked_of_the_pool(compressed: Any) -> None:
    bench, allocator = compressed, compressed.allocator
    asked: list[torch.Tensor] = []
    inner = allocator.hisparse_kvcache.translate_loc_from_full_to_compressed

    def translate(slots: torch.Tensor) -> torch.Tensor:
        asked.append(slots)
        answer = inner(slots)
        assert isinstance(answer, torch.Tensor)
        return answer

    allocator.hisparse_kvcache.translate_loc_from_full_to_compressed = translate
    row = bench.new_row(bench.kind.page_size)
    assert [slots.tolist() for slots in asked] == [row.tolist()]


def test_a_tail_extension_takes_no_device_slots(compressed: Any) -> None:
    bench, page = compressed, compressed.kind.page_size
    row = tail_call(bench, 3 * page, page)(bench.allocator)
    early = tail_call(bench, 3 * page, page, swa_tail_end=2 * page)(bench.allocator)
    for slots, expected in ((row, [0, 0, 1]), (early, [0, 1, 0])):
        peers = bench.allocator.translate_loc_from_full_to_swa(slots[::page])
        assert (peers > 0).tolist() == [bool(each) for each in expected]
        assert set(bench.device_slots(slots)) == {0}
    assert bench.free_device_pages() == bench.device_pages
    with pytest.raises(GeometryError):
        tail_call(bench, 3 * page, page + 1)(bench.allocator)


def test_freeing_swa_slots_keeps_the_device_slots(compressed: Any) -> None:
    bench, page = compressed, compressed.kind.page_size
    row = bench.new_row(3 * page)
    before = bench.device_slots(row)
    bench.allocator.free_swa(row[:page])
    bench.allocator.free_swa_segment(row[page : 2 * page], start_pos=page)
    bench.allocator.free_swa_segments([(row[2 * page :], 2 * page)])
    assert set(bench.allocator.translate_loc_from_full_to_swa(row).tolist()) == {0}
    assert bench.device_slots(row) == before


@pytest.mark.parametrize("way", ["free_full", "free_full_segment", "free_full_segments"])
def test_freeing_full_slots_returns_their_device_pages(compressed: Any, way: str) -> None:
    bench, allocator = compressed, compressed.allocator
    row = unpaired(bench, 2)
    calls: dict[str, Callable[[], None]] = {
        "free_full": lambda: allocator.free_full(row),
        "free_full_segment": lambda: allocator.free_full_segment(row, start_pos=0),
        "free_full_segments": lambda: allocator.free_full_segments(iter([(row, 0)])),
    }
    calls[way]()
    assert bench.free_device_pages() == bench.device_pages
    assert bench.slot_side.available_size() == bench.slot_side.size
    assert set(bench.mapping) == {0, -1}
    bench.refuses(DoubleFreeError, calls[way])


def test_full_slots_with_a_live_peer_keep_their_device_pages(compressed: Any) -> None:
    bench, allocator = compressed, compressed.allocator
    row = bench.new_row(bench.kind.page_size)
    bench.refuses(LivePeerError, allocator.free_full, row)
    bench.refuses(LivePeerError, allocator.free_full_segment, row, start_pos=0)


def test_a_recovery_keeps_the_kept_entries_and_returns_the_incoming_ones(compressed: Any) -> None:
    bench, allocator, page = compressed, compressed.allocator, compressed.kind.page_size
    kept, incoming = unpaired(bench, 1), bench.new_row(page)
    before = bench.device_slots(kept)
    allocator.free_group_begin()
    allocator.recover_tombstone(kept, incoming)
    assert bench.free_device_pages() == bench.device_pages - 2
    allocator.free_group_end()
    assert bench.device_slots(kept) == before
    assert bench.free_device_pages() == bench.device_pages - 1
    assert bench.slot_side.available_size() == bench.slot_side.size - page
    assert all(slot > 0 for slot in allocator.translate_loc_from_full_to_swa(kept).tolist())
    allocator.recover_tombstone(NO_ROW, NO_ROW)


def test_one_slot_recovers_its_page(compressed: Any) -> None:
    bench, page = compressed, compressed.kind.page_size
    kept, incoming = unpaired(bench, 1), bench.new_row(page)
    bench.allocator.recover_tombstone(kept[:1], incoming[:1])
    assert bench.free_device_pages() == bench.device_pages - 1
    assert bench.slot_side.available_size() == bench.slot_side.size - page


def test_a_refused_recovery_changes_nothing_on_either_side(compressed: Any) -> None:
    bench, allocator, page = compressed, compressed.allocator, compressed.kind.page_size
    row, other = bench.new_row(page), bench.new_row(page)
    bench.refuses(LivePeerError, allocator.recover_tombstone, row, other)
    bench.refuses(GeometryError, allocator.recover_tombstone, row, other[:-1])
    dead = unpaired(bench, 1)
    bench.refuses(DeadPeerError, allocator.recover_tombstone, dead, unpaired(bench, 1))


def test_an_exhausted_swa_side_moves_no_device_page(compressed: Any) -> None:
    bench, allocator, page = compressed, compressed.allocator, compressed.kind.page_size
    allocator.swa_attn_allocator.alloc((bench.swa_pages - 1) * page)
    before = bench.snapshot()
    assert allocator.alloc(2 * page) is None
    assert allocator.alloc_extend(*bench.batch([NO_ROW], [2 * page])) is None
    assert bench.snapshot() == before


# -- construction and the whole pool ---------------------------------------------------------------


def quarter(compressed: Any, size: int, page_size: int) -> Any:
    return type(compressed.allocator.hisparse_kvcache)(size, page_size)


@pytest.mark.parametrize("wrong", ["other pages", "no page", "odd page size"])
def test_pages_must_be_four_to_one(compressed: Any, wrong: str) -> None:
    per_page = compressed.kind.device_page_size
    inner = compressed.kind.make_hybrid()
    pool = quarter(compressed, 24 * per_page, per_page)
    if wrong == "other pages":
        pool.page_size = 4 * per_page
    elif wrong == "no page":
        pool.size = per_page - 1
    else:
        inner = SWATokenToKVPoolAllocator(60, 60, 6, torch.float16, "cpu", None, False)
    with pytest.raises(GeometryError):
        CompressedHiSparseTokenToKVPoolAllocator(inner, pool)


def test_an_allocator_with_an_open_group_cannot_be_wrapped(compressed: Any) -> None:
    inner = compressed.kind.make_hybrid()
    inner.free_group_begin()
    pool = compressed.allocator.hisparse_kvcache
    with pytest.raises(FreeGroupError):
        CompressedHiSparseTokenToKVPoolAllocator(inner, pool)


@pytest.mark.parametrize("inner_checks", [False, True])
@pytest.mark.parametrize("asked", [False, True, None])
def test_checks_follow_the_hybrid_allocator_unless_asked_for(
    compressed: Any, inner_checks: bool, asked: bool | None
) -> None:
    inner = compressed.kind.make_hybrid(validate=inner_checks)
    pool = compressed.allocator.hisparse_kvcache
    wrapper = CompressedHiSparseTokenToKVPoolAllocator(inner, pool, validate=asked)
    expected = inner_checks if asked is None else asked
    assert wrapper.validate == expected
    assert (wrapper.hisparse_attn_allocator.ledger is not None) == expected
    row = wrapper.alloc(wrapper.page_size)
    assert row is not None
    wrapper.free(row)
    assert wrapper.available_size() == wrapper.full_available_size()


def test_a_resize_follows_the_pool_and_registers_another_mapping(compressed: Any) -> None:
    bench, allocator, page = compressed, compressed.allocator, compressed.kind.page_size
    pool = allocator.hisparse_kvcache
    allocator.free_group_begin()
    bench.new_row(page)
    pool.size = 3 * bench.kind.device_page_size
    allocator.resize(size=8 * page, size_swa=5 * page)
    assert (allocator.size_full, allocator.size_swa) == (8 * page, 5 * page)
    assert allocator.available_size() == 3 * page
    assert not allocator.free_group_is_open
    assert pool.mappings[-1] is allocator.full_to_hisparse_device_index_mapping
    assert len(bench.mapping) == 9 * bench.kind.device_page_size + 1
    config = SimpleNamespace(full_max_total_num_tokens=4 * page, swa_max_total_num_tokens=page)
    allocator.resize(config)
    assert allocator.available_size() == page
    pool.size = 0
    bench.refuses(GeometryError, allocator.resize, size=8 * page, size_swa=5 * page)

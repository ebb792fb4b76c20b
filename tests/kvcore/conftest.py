"""Shared by the allocator tests: allocators to test, and the laws written again, plainly."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.allocator import SinglePoolAllocator

torch.set_num_threads(1)

FULL_PAGES = 12
SWA_PAGES = 8


def make_single(page_size: int, **options: Any) -> SinglePoolAllocator:
    """A single-pool allocator of FULL_PAGES pages."""
    common: dict[str, Any] = {
        "dtype": torch.float16,
        "device": "cpu",
        "kvcache": None,
        "need_sort": False,
    }
    common.update(options)
    if page_size == 1:
        return TokenToKVPoolAllocator(FULL_PAGES, **common)
    return PagedTokenToKVPoolAllocator(FULL_PAGES * page_size, page_size, **common)


def make_hybrid(page_size: int, **options: Any) -> SWATokenToKVPoolAllocator:
    """A hybrid allocator of FULL_PAGES full and SWA_PAGES SWA pages."""
    common: dict[str, Any] = {
        "dtype": torch.float16,
        "device": "cpu",
        "kvcache": None,
        "need_sort": False,
    }
    common.update(options)
    return SWATokenToKVPoolAllocator(
        FULL_PAGES * page_size, SWA_PAGES * page_size, page_size, **common
    )


def free_ids(allocator: SinglePoolAllocator) -> list[int]:
    """Every id in the free containers, repetitions kept."""
    return allocator.free_pages.tolist() + allocator.release_pages.tolist()


def snapshot(allocator: BaseTokenToKVPoolAllocator) -> tuple[Any, ...]:
    """The whole visible state, order included."""
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        return (
            allocator.full_to_swa_index_mapping.tolist(),
            allocator.queued_peer_slots.tolist(),
            allocator.free_group_is_open,
            snapshot(allocator.full_attn_allocator),
            snapshot(allocator.swa_attn_allocator),
        )
    assert isinstance(allocator, SinglePoolAllocator)
    return (
        allocator.free_pages.tolist(),
        allocator.release_pages.tolist(),
        allocator.pending_pages.tolist(),
        allocator.available_size(),
        allocator.free_group_is_open,
    )


def check_single(allocator: SinglePoolAllocator, lent_pages: list[int]) -> None:
    """L1, L2 and the counter of L7: every page exactly once."""
    seen = Counter(free_ids(allocator) + allocator.pending_pages.tolist() + lent_pages)
    assert seen == Counter(range(1, allocator.num_pages + 1))
    assert allocator.available_size() == len(free_ids(allocator)) * allocator.page_size


def check_hybrid(
    allocator: SWATokenToKVPoolAllocator,
    lent_full_pages: list[int],
    unowned_swa_pages: list[int] | None = None,
) -> None:
    """L1 to L4: both partitions, with the mapping as the list of lent SWA pages."""
    page_size = allocator.page_size
    mapping = allocator.full_to_swa_index_mapping
    assert mapping.shape == (allocator.size_full + page_size + 1,)
    assert int(mapping[-1]) == -1
    assert (mapping[:page_size] == 0).all()
    queued = pages_of(allocator.queued_peer_slots, page_size)
    peers: list[int] = []
    for page in range(1, allocator.full_attn_allocator.num_pages + 1):
        row = mapping[page * page_size : (page + 1) * page_size].tolist()
        peer = max(row) // page_size
        for offset, entry in enumerate(row):
            assert entry in (0, peer * page_size + offset), f"page {page} mixes peers: {row}"
        if peer > 0:
            assert page in lent_full_pages or page in queued, f"page {page} is mapped, not lent"
            peers.append(peer)
    check_single(allocator.full_attn_allocator, lent_full_pages)
    check_single(allocator.swa_attn_allocator, peers + (unowned_swa_pages or []))


def pages_of(slots: torch.Tensor, page_size: int) -> list[int]:
    """Distinct pages of the slots, ascending."""
    return sorted({slot // page_size for slot in slots.tolist()})


def extend_row(
    allocator: BaseTokenToKVPoolAllocator, row: torch.Tensor, length: int
) -> torch.Tensor | None:
    """Extend one kv row to `length` tokens; the whole row, or None."""
    prefix, total = torch.tensor([row.numel()]), torch.tensor([length])
    last = row[-1:] if row.numel() else torch.tensor([-1])
    slots = allocator.alloc_extend(prefix, prefix, total, total, last, length - row.numel())
    return None if slots is None else torch.cat((row, slots))


@pytest.fixture
def laws() -> SimpleNamespace:
    """The plain checks and helpers above, since test modules cannot import each other."""
    return SimpleNamespace(
        check_single=check_single,
        check_hybrid=check_hybrid,
        snapshot=snapshot,
        free_ids=free_ids,
        pages_of=pages_of,
        extend_row=extend_row,
        make_single=make_single,
        make_hybrid=make_hybrid,
        full_pages=FULL_PAGES,
        swa_pages=SWA_PAGES,
        no_row=torch.empty(0, dtype=torch.int64),
    )


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[False, True], ids=["unsorted", "need_sort"])
def need_sort(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["trusting", "validate"])
def validate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def single(page_size: int, need_sort: bool, validate: bool) -> SinglePoolAllocator:
    return make_single(page_size, need_sort=need_sort, validate=validate)


@pytest.fixture
def hybrid(page_size: int, need_sort: bool, validate: bool) -> SWATokenToKVPoolAllocator:
    return make_hybrid(page_size, need_sort=need_sort, validate=validate)


@pytest.fixture
def checked(page_size: int) -> SWATokenToKVPoolAllocator:
    """A hybrid allocator that reads values."""
    return make_hybrid(page_size, validate=True)


@pytest.fixture
def refuses() -> Callable[..., str]:
    """Require that a call raises exactly that type and changes nothing; gives the message."""

    def run(
        allocator: BaseTokenToKVPoolAllocator,
        error: type[Exception],
        call: Callable[..., object],
        *args: Any,
        **kwargs: Any,
    ) -> str:
        before = snapshot(allocator)
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert caught.type is error
        assert snapshot(allocator) == before
        return str(caught.value)

    return run

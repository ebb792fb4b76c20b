"""Shared by the HiSparse tests: both variants at several page sizes, and calls on kv rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvcore import (
    CompressedHiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)

LOGICAL_PAGES, DEVICE_PAGES, SWA_PAGES = 12, 6, 10


class QuarterPool:
    """The layout of compressed rows, and a memory of the mappings that were registered."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.mappings: list[torch.Tensor] = []

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        self.mappings.append(full_to_hisparse_device_index_mapping)

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        return full_indices[(full_indices + 1) % 4 == 0] // 4


@dataclass(frozen=True)
class Kind:
    """A variant and its page size."""

    compressed: bool
    page_size: int

    @property
    def ratio(self) -> int:
        return 4 if self.compressed else 1

    @property
    def device_page_size(self) -> int:
        return self.page_size // self.ratio

    def make_hybrid(self, **options: Any) -> SWATokenToKVPoolAllocator:
        """What the compressed variant wraps."""
        arguments: dict[str, Any] = {
            "dtype": torch.float16,
            "device": "cpu",
            "kvcache": None,
            "need_sort": False,
            "validate": True,
        }
        size, size_swa = LOGICAL_PAGES * self.page_size, SWA_PAGES * self.page_size
        return SWATokenToKVPoolAllocator(size, size_swa, self.page_size, **(arguments | options))

    def make(self, faulty: type[Any] | None = None, **options: Any) -> Any:
        """An allocator of LOGICAL_PAGES logical and DEVICE_PAGES device pages."""
        size = DEVICE_PAGES * self.device_page_size
        pool = QuarterPool(size, self.device_page_size)
        if self.compressed:
            wrapper = faulty or CompressedHiSparseTokenToKVPoolAllocator
            return wrapper(self.make_hybrid(**options), pool)
        arguments: dict[str, Any] = {"need_sort": False, "validate": True} | options
        plain = faulty or HiSparseTokenToKVPoolAllocator
        return plain(size, self.page_size, torch.float16, "cpu", pool, **arguments)


KINDS = {
    "page1": Kind(False, 1),
    "page4": Kind(False, 4),
    "compressed4": Kind(True, 4),
    "compressed8": Kind(True, 8),
    "compressed16": Kind(True, 16),
}


def pages_in(slots: list[int], page_size: int) -> list[int]:
    """The pages of the slots, each where it first appears."""
    return list(dict.fromkeys(slot // page_size for slot in slots))


class Bench:
    """One allocator, and calls on kv rows; lengths in tokens, rows as int64 tensors."""

    logical_pages, device_pages, swa_pages = LOGICAL_PAGES, DEVICE_PAGES, SWA_PAGES

    def __init__(self, kind: Kind, allocator: Any) -> None:
        self.kind = kind
        self.allocator = allocator

    @property
    def device(self) -> Any:
        """The pool of device slots."""
        return self.allocator.hisparse_attn_allocator

    @property
    def slot_side(self) -> Any:
        """The single pool of logical slots."""
        logical = self.allocator.logical_attn_allocator
        return logical.full_attn_allocator if self.kind.compressed else logical

    @property
    def mapping(self) -> list[int]:
        mapping: list[int] = self.allocator.full_to_hisparse_device_index_mapping.tolist()
        return mapping

    def remade(self, **options: Any) -> Bench:
        """A new allocator of the same kind."""
        return Bench(self.kind, self.kind.make(**options))

    def batch(self, rows: list[torch.Tensor], lengths: list[int]) -> tuple[Any, ...]:
        """The arguments of an extend of all rows to the given lengths."""
        prefixes = torch.tensor([len(row) for row in rows])
        last = torch.tensor([int(row[-1]) if len(row) else -1 for row in rows])
        total = torch.tensor(lengths)
        return prefixes, prefixes.clone(), total, total.clone(), last, int((total - prefixes).sum())

    def extend(self, row: torch.Tensor, length: int) -> torch.Tensor:
        slots = self.allocator.alloc_extend(*self.batch([row], [length]))
        assert slots is not None
        return torch.cat((row, slots))

    def new_row(self, length: int) -> torch.Tensor:
        return self.extend(torch.empty(0, dtype=torch.int64), length)

    def extend_logical(self, row: torch.Tensor, length: int) -> torch.Tensor:
        slots = self.allocator.alloc_logical_only(*self.batch([row], [length]))
        assert slots is not None
        return torch.cat((row, slots))

    def decode(self, row: torch.Tensor) -> torch.Tensor:
        length = torch.tensor([len(row) + 1])
        slot = self.allocator.alloc_decode(length, length.clone(), row[-1:])
        assert slot is not None
        return torch.cat((row, slot))

    def entries(self, row: torch.Tensor) -> torch.Tensor:
        """The entries of a row, by the rule: token i completes one when (i + 1) % ratio == 0."""
        return row[self.kind.ratio - 1 :: self.kind.ratio] // self.kind.ratio

    def device_slots(self, row: torch.Tensor) -> list[int]:
        """The device slot of each entry of a row."""
        return [self.mapping[entry] for entry in self.entries(row).tolist()]

    def device_pages_of(self, row: torch.Tensor) -> list[int]:
        """The device pages of a row, in its order."""
        return pages_in([s for s in self.device_slots(row) if s], self.kind.device_page_size)

    def pages(self, buffer: torch.Tensor) -> list[int]:
        """The pages of device slots, in their order."""
        return pages_in(buffer.tolist(), self.kind.device_page_size)

    def free_ids(self, pool: Any) -> list[int]:
        return [*pool.free_pages.tolist(), *pool.release_pages.tolist()]

    def free_device_pages(self) -> int:
        return int(self.device.available_size()) // self.kind.device_page_size

    def snapshot(self) -> list[Any]:
        """The whole visible state, order included."""
        pools = [self.slot_side, self.device]
        state: list[Any] = [self.mapping, self.allocator.free_group_is_open]
        if self.kind.compressed:
            pools.append(self.allocator.swa_attn_allocator)
            state.append(self.allocator.full_to_swa_index_mapping.tolist())
            state.append(self.allocator.queued_peer_slots.tolist())
        for pool in pools:
            state += [pool.free_pages.tolist(), pool.release_pages.tolist()]
            state += [pool.pending_pages.tolist(), pool.free_group_is_open]
        return state

    def refuses(
        self, error: type[Exception], call: Callable[..., object], *args: Any, **kwargs: Any
    ) -> str:
        """Require that a call raises exactly that type and changes nothing; gives the message."""
        before = self.snapshot()
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert caught.type is error
        assert self.snapshot() == before
        return str(caught.value)


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    assert isinstance(request.param, Kind)
    return request.param


@pytest.fixture
def bench(kind: Kind, need_sort: bool) -> Bench:
    return Bench(kind, kind.make(need_sort=need_sort))


@pytest.fixture
def allocator(bench: Bench) -> Any:
    return bench.allocator


@pytest.fixture
def page4() -> Bench:
    """One device slot a token, several slots a page."""
    return Bench(KINDS["page4"], KINDS["page4"].make())


@pytest.fixture(params=["page4", "compressed8", "compressed16"])
def paged(request: pytest.FixtureRequest) -> Bench:
    """Device pages of more than one slot."""
    kind = KINDS[request.param]
    return Bench(kind, kind.make())


@pytest.fixture(params=["compressed4", "compressed8", "compressed16"])
def compressed(request: pytest.FixtureRequest) -> Bench:
    """The variant over a hybrid allocator."""
    kind = KINDS[request.param]
    return Bench(kind, kind.make())

"""Whatever raises in the middle of a call, memory, a pool or a kernel, the call changed nothing.

Leaves out arguments that are refused before anything starts: test_value_errors.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from kvcore import (
    CompressedHiSparseTokenToKVPoolAllocator,
    GeometryError,
    HiSparseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from kvcore.allocator import SinglePoolAllocator

PAGES = 8
TOO_MUCH = 2**50
"""More tokens than any address space has bytes for."""
FAILURES = [RuntimeError, KeyboardInterrupt]


class Pool:
    """A pool of whatever kind that remembers its mapping and refuses whatever is asked of it."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.mapping: torch.Tensor | None = None
        self.failure: type[BaseException] | None = None
        self.entries: torch.Tensor | None = None

    def register_mapping(self, mapping: torch.Tensor) -> None:
        if self.failure is not None:
            raise self.failure("no other mapping")
        self.mapping = mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return kv_indices

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        if self.failure is not None:
            raise self.failure("no entries")
        if self.entries is not None:
            return self.entries
        return full_indices[(full_indices + 1) % 4 == 0] // 4


class FailingKernels:
    """Kernels that cannot be launched."""

    def __init__(self, failure: type[BaseException]) -> None:
        self.failure = failure

    def extend_slots(self, *_: Any, **__: Any) -> NoReturn:
        raise self.failure("no launch")

    def decode_slots(self, *_: Any, **__: Any) -> NoReturn:
        raise self.failure("no launch")


class FailingMapping(SWATokenToKVPoolAllocator):
    """A mapping whose writes of whole pages fail when they are done."""

    failure: type[BaseException] | None = None

    by_numpy = False

    def _map_pages(self, full_pages: torch.Tensor, swa_pages: torch.Tensor) -> None:
        super()._map_pages(full_pages, swa_pages)
        if self.failure is not None:
            raise self.failure("no mapping")


def single_state(pool: SinglePoolAllocator) -> tuple[Any, ...]:
    every = np.arange(pool.num_pages + 1)
    return (
        *(pool.size, pool.num_pages, pool.available_size(), pool.free_group_is_open),
        *(pool.free_pages.tolist(), pool.release_pages.tolist(), pool.pending_pages.tolist()),
        None if pool.ledger is None else pool.ledger.is_lent(every).tolist(),
    )


def state(allocator: Any) -> tuple[Any, ...]:
    """Everything that can be seen, order included, and which tensors are the mappings."""
    if isinstance(allocator, SinglePoolAllocator):
        return single_state(allocator)
    seen: list[Any] = [allocator.free_group_is_open, allocator.size, allocator.available_size()]
    if not isinstance(allocator, HiSparseTokenToKVPoolAllocator):
        mapping = allocator.full_to_swa_index_mapping
        seen += [id(mapping), mapping.tolist(), allocator.queued_peer_slots.tolist()]
        seen += [single_state(allocator.full_attn_allocator)]
        seen += [single_state(allocator.swa_attn_allocator)]
    if hasattr(allocator, "hisparse_attn_allocator"):
        mapping = allocator.full_to_hisparse_device_index_mapping
        seen += [id(mapping), mapping.tolist(), single_state(allocator.hisparse_attn_allocator)]
    if isinstance(allocator, HiSparseTokenToKVPoolAllocator):
        seen.append(single_state(allocator.logical_attn_allocator))
    return tuple(seen)


class Kind(SimpleNamespace):
    """How an allocator is built, its pools, and the sizes of which one is too much."""

    name: str
    page_size: int

    def make(self, need_sort: bool, laws: Any) -> tuple[Any, list[Pool]]:
        page, size = self.page_size, PAGES * self.page_size
        common = (torch.float16, "cpu")
        options: dict[str, Any] = {"need_sort": need_sort, "validate": True}
        pool = Pool(size, page)
        if self.name == "single":
            return laws.make_single(page, **options), []
        if self.name == "pure":
            pure = PureSWATokenToKVPoolAllocator(size, page, *common, pool, **options)
            return pure, [pool]
        if self.name == "hisparse":
            return HiSparseTokenToKVPoolAllocator(size, page, *common, pool, **options), [pool]
        hybrid = SWATokenToKVPoolAllocator(size, size, page, *common, pool, **options)
        if self.name == "hybrid":
            return hybrid, [pool]
        device = Pool(size // 4, page // 4)
        return CompressedHiSparseTokenToKVPoolAllocator(hybrid, device), [pool, device]

    @property
    def two_sizes(self) -> bool:
        return self.name in ("hybrid", "compressed")

    def sizes(self, size: Any, size_swa: Any) -> dict[str, Any]:
        return {"size": size, "size_swa": size_swa} if self.two_sizes else {"size": size}


KINDS = [
    *(Kind(name=name, page_size=1) for name in ("single", "pure", "hybrid", "hisparse")),
    *(Kind(name=name, page_size=4) for name in ("single", "pure", "hybrid", "hisparse")),
    Kind(name="compressed", page_size=8),
]


@pytest.fixture(params=KINDS, ids=[f"{kind.name}{kind.page_size}" for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    assert isinstance(request.param, Kind)
    return request.param


@pytest.fixture
def used(kind: Kind, need_sort: bool, laws: Any) -> SimpleNamespace:
    """An allocator in use: one row on loan, a page freed, another one pending in an open group."""
    allocator, pools = kind.make(need_sort, laws)
    page = kind.page_size
    slots = [allocator.alloc(page) for _ in range(4)]
    row = laws.extend_row(allocator, laws.no_row, page + (page > 1))
    allocator.free(slots[1])
    allocator.free_group_begin()
    allocator.free(slots[2])
    return SimpleNamespace(allocator=allocator, pools=pools, row=row, page=page)


def unchanged(
    allocator: Any, failure: type[BaseException], call: Callable[..., object], *args: Any, **kw: Any
) -> str:
    """Require that a call raises exactly that type and changes nothing; gives the message."""
    before = state(allocator)
    with pytest.raises(failure) as caught:
        call(*args, **kw)
    assert caught.type is failure
    assert state(allocator) == before
    return str(caught.value)


# -- resize ------------------------------------------------------------------------------------


def test_a_resize_without_memory_changes_nothing(kind: Kind, used: Any) -> None:
    small = 4 * kind.page_size
    sizes = [kind.sizes(TOO_MUCH, small)]
    if kind.two_sizes:
        sizes.append(kind.sizes(small, TOO_MUCH))
    for given in sizes:
        unchanged(used.allocator, RuntimeError, used.allocator.resize, **given)
    if kind.name == "compressed":
        used.pools[1].size = TOO_MUCH
        given = kind.sizes(small, small)
        unchanged(used.allocator, RuntimeError, used.allocator.resize, **given)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_resize_that_a_pool_refuses_changes_nothing(kind: Kind, used: Any, failure: Any) -> None:
    small = 4 * kind.page_size
    held = [pool.mapping for pool in used.pools]
    for pool in used.pools:
        pool.failure = failure
        given = kind.sizes(small, small)
        unchanged(used.allocator, failure, used.allocator.resize, **given)
        pool.failure = None
        for each, mapping in zip(used.pools, held, strict=True):
            assert each.mapping is mapping


@pytest.mark.parametrize("size", [16.0, "16", True, torch.tensor(16)], ids=str)
def test_a_resize_to_no_integer_changes_nothing(kind: Kind, used: Any, size: Any) -> None:
    resize = used.allocator.resize
    message = unchanged(used.allocator, GeometryError, resize, **kind.sizes(size, 64))
    assert message.startswith("resize: expected an integer size, got ")
    if kind.two_sizes:
        unchanged(used.allocator, GeometryError, resize, **kind.sizes(64, size))


def test_the_sides_stay_the_same_objects_over_a_resize(kind: Kind, used: Any) -> None:
    names = ("full_attn_allocator", "swa_attn_allocator", "hisparse_attn_allocator")
    sides = {name: vars(used.allocator)[name] for name in names if name in vars(used.allocator)}
    used.allocator.resize(**kind.sizes(4 * kind.page_size, 4 * kind.page_size))
    for name, side in sides.items():
        assert getattr(used.allocator, name) is side
    assert not used.allocator.free_group_is_open
    available = used.allocator.available_size()
    assert available == 4 * kind.page_size if kind.name != "compressed" else available > 0
    used.allocator.free(used.allocator.alloc(available))
    assert used.allocator.available_size() == available


# -- kernels -----------------------------------------------------------------------------------


def batches(used: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
    """An extension that needs two pages and goes on in another, and a decode."""
    allocator, row, page = used.allocator, used.row, used.page
    prefix = torch.tensor([row.numel(), 0])
    total = prefix + torch.tensor([1 if page > 1 else 0, 2 * page])
    last = torch.tensor([int(row[-1]), -1])
    extend = (prefix, prefix, total, total, last, int((total - prefix).sum()))
    length = torch.tensor([row.numel() + 1])
    return [
        (allocator.alloc_extend, extend),
        (allocator.alloc_decode, (length, length, row[-1:])),
    ]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_kernel_that_fails_changes_nothing(used: Any, failure: type[BaseException]) -> None:
    allocator = used.allocator
    inner = [allocator, *(side for side in vars(allocator).values() if hasattr(side, "_kernels"))]
    for each in inner:
        each._kernels = FailingKernels(failure)
    # At page size 1 the slots are the pages, and nothing is launched for them.
    for call, arguments in batches(used) if used.page > 1 else []:
        unchanged(allocator, failure, call, *arguments)
    for each in inner:
        each._kernels = None
    for call, arguments in batches(used):
        assert call(*arguments) is not None


@pytest.mark.parametrize("failure", FAILURES)
def test_a_kernel_that_fails_in_a_merge_leaves_the_release_list(
    page_size: int, failure: type[BaseException], laws: Any
) -> None:
    hybrid = laws.make_hybrid(page_size, need_sort=True, validate=True)
    row = hybrid.alloc(laws.swa_pages * page_size)
    hybrid.free(row[page_size:])
    # At page size 1 nothing is launched for the slots, but the mapping is written.
    hybrid._kernels = FailingKernels(failure)
    map_pages, hybrid._map_pages = hybrid._map_pages, hybrid._kernels.decode_slots
    empty, total = torch.tensor([0]), torch.tensor([2 * page_size])
    batch = (empty, empty, total, total, torch.tensor([-1]), 2 * page_size)
    assert hybrid.swa_attn_allocator.free_pages.numel() == 0, "the pages are in the release list"
    unchanged(hybrid, failure, hybrid.alloc_extend, *batch)
    unchanged(hybrid, failure, hybrid.alloc_extend_swa_tail, *batch, page_size)
    hybrid._kernels, hybrid._map_pages = None, map_pages
    assert hybrid.alloc_extend(*batch) is not None
    laws.check_single(hybrid.swa_attn_allocator, hybrid_peers(hybrid))


def hybrid_peers(hybrid: Any) -> list[int]:
    """The SWA pages that the mapping names."""
    mapping = hybrid.full_to_swa_index_mapping[:-1]
    return sorted({slot // hybrid.page_size for slot in mapping.tolist() if slot > 0})


def test_a_mapping_write_that_fails_gives_both_pages_back(page_size: int, need_sort: bool) -> None:
    size = PAGES * page_size
    hybrid = FailingMapping(
        size, size, page_size, torch.float16, "cpu", None, need_sort, validate=True
    )
    row = hybrid.alloc(2 * page_size)
    assert row is not None
    hybrid.failure = RuntimeError
    unchanged(hybrid, RuntimeError, hybrid.alloc, page_size)
    empty, total = torch.tensor([0]), torch.tensor([2 * page_size])
    batch = (empty, empty, total, total, torch.tensor([-1]), 2 * page_size)
    unchanged(hybrid, RuntimeError, hybrid.alloc_extend, *batch)
    unchanged(hybrid, RuntimeError, hybrid.alloc_extend_swa_tail, *batch, page_size)


# -- the pool of compressed rows -----------------------------------------------------------------


@pytest.fixture
def compressed(need_sort: bool, laws: Any) -> SimpleNamespace:
    kind = KINDS[-1]
    allocator, pools = kind.make(need_sort, laws)
    row = laws.extend_row(allocator, laws.no_row, 5)
    one_row = (torch.tensor([5]), torch.tensor([5]), torch.tensor([21]), torch.tensor([21]))
    batch = (*one_row, row[-1:], 16)
    return SimpleNamespace(allocator=allocator, device=pools[1], batch=batch)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_pool_that_names_no_entries_changes_nothing(compressed: Any, failure: Any) -> None:
    compressed.device.failure = failure
    unchanged(compressed.allocator, failure, compressed.allocator.alloc_extend, *compressed.batch)
    compressed.device.failure = None
    assert compressed.allocator.alloc_extend(*compressed.batch) is not None


@pytest.mark.parametrize("entries", [[1, 2, 3], [3, 4, 5, 999]], ids=["too few", "outside"])
def test_a_pool_that_names_wrong_entries_changes_nothing(compressed: Any, entries: Any) -> None:
    compressed.device.entries = torch.tensor(entries)
    before = state(compressed.allocator)
    with pytest.raises((RuntimeError, IndexError)):
        compressed.allocator.alloc_extend(*compressed.batch)
    assert state(compressed.allocator) == before


@pytest.mark.parametrize("failure", FAILURES)
def test_a_side_that_fails_last_leaves_no_entries_behind(
    compressed: Any, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = compressed.allocator

    def fail(*_: Any) -> NoReturn:
        raise failure("no mapping")

    with monkeypatch.context() as patch:
        patch.setattr(allocator.logical_attn_allocator, "_map_pages", fail)
        unchanged(allocator, failure, allocator.alloc_extend, *compressed.batch)
        unchanged(allocator, failure, allocator.alloc, 8)
    assert allocator.alloc_extend(*compressed.batch) is not None


# -- what callers hold ---------------------------------------------------------------------------


def storages(value: Any, seen: set[int]) -> set[int]:
    """Storages of all tensors that can be reached from an object's attributes."""
    if id(value) in seen:
        return set()
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    parts = list(value) if isinstance(value, (list, tuple)) else []
    if hasattr(value, "__dict__"):
        parts += vars(value).values()
    return set().union(*(storages(part, seen) for part in parts))


def logs(allocator: Any) -> set[int]:
    """Storages of the free lists that lend views of themselves."""
    pools = [allocator, *(part for part in vars(allocator).values())]
    lists = [pool.free_list for pool in pools if isinstance(pool, SinglePoolAllocator)]
    return {found._store.untyped_storage()._cdata for found in lists}


def test_no_tensor_of_the_allocator_is_handed_out(kind: Kind, used: Any) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    empty = torch.tensor([0])
    no_growth = (empty, empty, empty, empty, empty - 1, 0)
    allocator = used.allocator
    given = [
        *(allocator.alloc(0), allocator.alloc(kind.page_size)),
        *(allocator.alloc_extend(*no_growth), allocator.alloc_decode(nothing, nothing, nothing)),
        *(call(*arguments) for call, arguments in batches(used)),
    ]
    for name in ("queued_peer_slots", "free_pages", "release_pages", "pending_pages"):
        if hasattr(allocator, name):
            given.append(getattr(allocator, name))
    held = storages(allocator, set())
    if kind.page_size == 1:
        # Views of a log are handed out, whose places are not written again: test_free_list.
        held -= logs(allocator)
    for tensor in given:
        assert tensor is not None
        assert tensor.untyped_storage()._cdata not in held


def test_what_an_empty_alloc_returns_is_the_callers(used: Any) -> None:
    assert used.allocator.alloc(0) is not used.allocator.alloc(0)

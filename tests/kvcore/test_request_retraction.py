"""Requests leave the pool and come back, with all their slots and their row, or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    GeometryError,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    PausedPoolError,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    Retraction,
    RetractionBackup,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

FULL_PAGES, SWA_PAGES, ROWS = 12, 8, 3
FULL_LAYER, SWA_LAYER = 0, 1
CONTEXT = 64
SLIDING = ["hybrid", "pure"]


@dataclass
class Request:
    kv_len: int = 0
    swa_evicted_seqlen: int = 0
    req_pool_idx: int | None = None
    retraction: RetractionBackup[Any] | None = None


class ReluctantPool(MHATokenToKVPool):
    """Fails at the copies and loads whose turn is named, and keeps the length of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copied: list[int] = []
        self.loaded: list[int] = []
        self.failing: tuple[str, int] | None = None

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        self.copied.append(len(indices))
        if self.failing == ("copy", len(self.copied)):
            raise PausedPoolError("copy")
        return super().get_cpu_copy(indices)

    def load_cpu_copy(self, copy: Any, indices: torch.Tensor) -> None:
        self.loaded.append(len(indices))
        if self.failing == ("load", len(self.loaded)):
            raise PausedPoolError("load")
        super().load_cpu_copy(copy, indices)


class World:
    """An allocator of one kind on a pool of int64 stamps, a request table, and the calls that an
    engine makes around them."""

    def __init__(self, kind: str, page_size: int, laws: SimpleNamespace, **options: Any) -> None:
        self.laws = laws
        self.page_size = page_size
        self.allocator, self.pool = build(kind, page_size)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.retraction = Retraction(self.allocator, self.rows, **options)
        self.stamps = 0

    def start(self, num_tokens: int) -> Request:
        """A running request, its tokens stamped."""
        request = Request(kv_len=num_tokens)
        assert self.rows.alloc([request]) is not None
        slots = self.laws.extend_row(self.allocator, self.laws.no_row, num_tokens)
        assert slots is not None
        assert request.req_pool_idx is not None
        self.rows.write((request.req_pool_idx, slice(0, num_tokens)), slots)
        self.stamp(slots)
        return request

    def row(self, request: Request) -> torch.Tensor:
        assert request.req_pool_idx is not None
        return self.rows.row(request.req_pool_idx, request.kv_len)

    def stamp(self, slots: torch.Tensor) -> None:
        """New numbers in the keys and values of these slots, in every kind of layer."""
        for layer in self.layers():
            keys = torch.arange(self.stamps + 1, self.stamps + 1 + len(slots)).view(-1, 1, 1)
            self.pool.set_kv_buffer(layer, slots, keys, -keys)
            self.stamps += len(slots)

    def slide(self, request: Request, num_tokens: int) -> None:
        """The window moves: the first `num_tokens` lose their SWA part."""
        assert isinstance(self.allocator, SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator)
        self.allocator.free_swa(self.row(request)[request.swa_evicted_seqlen : num_tokens])
        request.swa_evicted_seqlen = num_tokens

    def fill(self) -> list[torch.Tensor]:
        """Others take every page that can be lent and overwrite it."""
        others = []
        while (page := self.allocator.alloc(self.page_size)) is not None:
            self.stamp(page)
            others.append(page)
        return others

    def layers(self) -> list[int]:
        if isinstance(self.pool, SWAKVPool):
            return sorted(self.pool.layers_mapping)
        return [FULL_LAYER]

    def contents(self, request: Request) -> list[list[int]]:
        """Stamps of a request's tokens, layer by layer; of sliding layers in the window only."""
        row = self.row(request)
        seen = []
        for layer in self.layers():
            held = row
            if isinstance(self.pool, SWAKVPool) and self.pool.layers_mapping[layer][1]:
                window = row[request.swa_evicted_seqlen :]
                held = self.pool.translate_loc_from_full_to_swa(window)
                assert (held > 0).all(), "a token in the window without an SWA slot"
            for buffer in self.pool.get_kv_buffer(layer):
                seen.append(buffer[held].view(-1).tolist())
        return seen

    def capacity(self) -> tuple[int, ...]:
        sides = [self.rows.available_size(), self.allocator.available_size()]
        if isinstance(self.allocator, SWATokenToKVPoolAllocator):
            sides += [self.allocator.full_available_size(), self.allocator.swa_available_size()]
        return tuple(sides)

    def state(self) -> tuple[Any, ...]:
        """Allocator and table, to the last free page."""
        allocator = self.allocator
        if isinstance(allocator, PureSWATokenToKVPoolAllocator):
            allocator = allocator.swa_attn_allocator
        table = self.rows.req_to_token.tolist()
        return self.laws.snapshot(allocator), list(self.rows.free_slots), table

    def reluctant_pool(self) -> ReluctantPool:
        pool = self.pool
        if isinstance(pool, SWAKVPool):
            sliding = pool.swa_kv_pool
            assert isinstance(sliding, ReluctantPool)
            return sliding
        assert isinstance(pool, ReluctantPool)
        return pool


def build(
    kind: str, page_size: int
) -> tuple[BaseTokenToKVPoolAllocator, ReluctantPool | SWAKVPool]:
    size, size_swa = FULL_PAGES * page_size, SWA_PAGES * page_size
    shape: dict[str, Any] = {"head_num": 1, "head_dim": 1, "device": "cpu", "dtype": torch.int64}
    rest: dict[str, Any] = {
        "dtype": torch.int64,
        "device": "cpu",
        "need_sort": False,
        "validate": True,
    }
    if kind == "single":
        pool = ReluctantPool(
            size=size, page_size=page_size, layer_num=1, enable_memory_saver=False, **shape
        )
        if page_size == 1:
            return TokenToKVPoolAllocator(size, kvcache=pool, **rest), pool
        return PagedTokenToKVPoolAllocator(size, page_size, kvcache=pool, **rest), pool
    full_layers = [FULL_LAYER] if kind == "hybrid" else []
    hybrid_pool = SWAKVPool(
        size,
        size_swa,
        page_size,
        swa_attention_layer_ids=[SWA_LAYER],
        full_attention_layer_ids=full_layers,
        token_to_kv_pool_class=ReluctantPool,
        **shape,
    )
    if kind == "pure":
        return PureSWATokenToKVPoolAllocator(
            size_swa, page_size, kvcache=hybrid_pool, **rest
        ), hybrid_pool
    return SWATokenToKVPoolAllocator(
        size, size_swa, page_size, kvcache=hybrid_pool, **rest
    ), hybrid_pool


@pytest.fixture
def make_world(page_size: int, laws: SimpleNamespace) -> Callable[..., World]:
    def make(kind: str, **options: Any) -> World:
        options.setdefault("chunk_tokens", 2 * page_size)
        return World(kind, page_size, laws, **options)

    return make


@pytest.fixture(params=["single", "hybrid", "pure"])
def world(request: pytest.FixtureRequest, make_world: Callable[..., World]) -> World:
    return make_world(request.param)


@pytest.fixture(params=SLIDING)
def sliding(request: pytest.FixtureRequest, make_world: Callable[..., World]) -> World:
    return make_world(request.param)


def tokens(world: World, pages: int, more: int = 1) -> int:
    """`pages` whole pages and a part of another one."""
    return pages * world.page_size + min(more, world.page_size - 1)


# Retracting


def test_a_retracted_request_holds_nothing_on_the_device(world: World) -> None:
    empty = world.capacity()
    request = world.start(tokens(world, 3))
    world.retraction.retract(request)
    assert world.capacity() == empty
    assert request.req_pool_idx is None
    assert request.retraction is not None
    assert len(request.retraction) == request.kv_len


def test_a_row_is_copied_in_whole_pages_of_at_most_a_chunk(world: World) -> None:
    request = world.start(tokens(world, 5))
    world.retraction.retract(request)
    copied = world.reluctant_pool().copied
    assert sum(copied) == request.kv_len
    assert max(copied) <= world.retraction.chunk_tokens
    assert all(length % world.page_size == 0 for length in copied[:-1])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 8, 9, 8192])
def test_a_chunk_is_whole_pages_and_at_least_one(
    make_world: Callable[..., World], page_size: int, chunk_tokens: int
) -> None:
    chunk = make_world("single", chunk_tokens=chunk_tokens).retraction.chunk_tokens
    assert chunk % page_size == 0
    assert max(page_size, chunk_tokens - page_size + 1) <= chunk <= max(page_size, chunk_tokens)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_copy_that_fails_leaves_the_request_running(world: World, failing: int) -> None:
    request = world.start(tokens(world, 5))
    before, contents = world.state(), world.contents(request)
    world.reluctant_pool().failing = ("copy", failing)
    with pytest.raises(PausedPoolError):
        world.retraction.retract(request)
    assert world.state() == before
    assert request.retraction is None
    assert world.contents(request) == contents


def test_slots_of_a_request_retracted_in_a_group_are_free_at_its_end(world: World) -> None:
    empty = world.capacity()
    request = world.start(tokens(world, 3))
    running = world.capacity()
    world.allocator.free_group_begin()
    world.retraction.retract(request)
    # The row is no page: it does not wait for the group.
    assert world.capacity()[1:] == running[1:]
    world.allocator.free_group_end()
    assert world.capacity() == empty


def test_tokens_behind_the_window_are_not_freed_twice(sliding: World) -> None:
    empty = sliding.capacity()
    request = sliding.start(tokens(sliding, 5))
    sliding.slide(request, 3 * sliding.page_size)
    sliding.retraction.retract(request)
    assert sliding.capacity() == empty


def test_a_window_that_moves_in_the_group_of_the_retraction_frees_each_page_once(
    sliding: World,
) -> None:
    empty = sliding.capacity()
    request = sliding.start(tokens(sliding, 5))
    sliding.allocator.free_group_begin()
    sliding.slide(request, 2 * sliding.page_size)
    contents = sliding.contents(request)
    sliding.retraction.retract(request)
    sliding.allocator.free_group_end()
    assert sliding.capacity() == empty
    for page in sliding.fill():
        sliding.allocator.free(page)
    assert sliding.retraction.restore(request)
    assert sliding.contents(request) == contents


# Restoring


@pytest.mark.parametrize("pages", [0, 1, 3, 5])
def test_a_restored_request_has_its_kv_in_slots_that_others_used(world: World, pages: int) -> None:
    request = world.start(tokens(world, pages))
    contents = world.contents(request)
    world.retraction.retract(request)
    others = world.fill()
    for page in others[::2] + others[1::2]:
        world.allocator.free(page)
    assert world.retraction.restore(request)
    assert request.retraction is None
    assert world.contents(request) == contents


@pytest.mark.parametrize("evicted_pages", [1, 3, 5])
def test_a_partial_window_takes_swa_slots_for_its_tokens_only(
    sliding: World, evicted_pages: int
) -> None:
    request = sliding.start(tokens(sliding, 5, more=0))
    sliding.slide(request, evicted_pages * sliding.page_size)
    running, contents = sliding.capacity(), sliding.contents(request)
    sliding.retraction.retract(request)
    for page in sliding.fill():
        sliding.allocator.free(page)
    assert sliding.retraction.restore(request)
    assert sliding.capacity() == running
    assert request.swa_evicted_seqlen == evicted_pages * sliding.page_size
    assert sliding.contents(request) == contents


def test_where_every_layer_slides_tokens_behind_the_window_name_the_padding_slot(
    make_world: Callable[..., World],
) -> None:
    world = make_world("pure")
    request = world.start(tokens(world, 5))
    world.slide(request, 2 * world.page_size)
    world.retraction.retract(request)
    assert world.retraction.restore(request)
    row = world.row(request)
    assert (row[: request.swa_evicted_seqlen] == 0).all()
    assert (row[request.swa_evicted_seqlen :] >= world.page_size).all()


def test_a_restored_row_goes_on_where_it_ended(world: World) -> None:
    request = world.start(tokens(world, 3))
    world.retraction.retract(request)
    assert world.retraction.restore(request)
    # The allocator validates: it refuses a last slot that does not fit the length.
    row = world.laws.extend_row(world.allocator, world.row(request), request.kv_len + 2)
    assert row is not None
    world.allocator.free(row)


def test_retracting_and_restoring_again_and_again_keeps_everything(world: World) -> None:
    empty = world.capacity()
    request = world.start(tokens(world, 4))
    contents = world.contents(request)
    for _ in range(4):
        world.retraction.retract(request)
        others = world.fill()
        for page in others:
            world.allocator.free(page)
        assert world.retraction.restore(request)
        assert world.contents(request) == contents
    world.allocator.free(world.row(request))
    world.rows.free(request)
    assert world.capacity() == empty


def test_without_a_row_nothing_is_restored_and_nothing_changes(world: World) -> None:
    request = world.start(tokens(world, 2))
    world.retraction.retract(request)
    world.rows.alloc(ROWS)
    refused(world, request)


def test_without_slots_nothing_is_restored_and_nothing_changes(world: World) -> None:
    request = world.start(tokens(world, 3))
    world.retraction.retract(request)
    world.allocator.free(world.fill()[0])
    refused(world, request)


@pytest.mark.parametrize("evicted_pages", [0, 2])
@pytest.mark.parametrize("side", ["full", "SWA"])
def test_without_room_on_one_side_neither_side_moves(
    make_world: Callable[..., World], side: str, evicted_pages: int
) -> None:
    world = make_world("hybrid")
    assert isinstance(world.allocator, SWATokenToKVPoolAllocator)
    request = world.start(tokens(world, 4, more=0))
    world.slide(request, evicted_pages * world.page_size)
    world.retraction.retract(request)
    short = world.allocator.full_attn_allocator
    needed = 4
    if side == "SWA":
        short, needed = world.allocator.swa_attn_allocator, 4 - evicted_pages
    leave = (needed - 1) * world.page_size
    assert short.alloc(short.available_size() - leave) is not None
    refused(world, request)
    # One page more would have done.
    assert short.available_size() == leave


def refused(world: World, request: Request) -> None:
    """`restore` says False, and nothing is other than before."""
    backup, before = request.retraction, world.state()
    assert world.retraction.restore(request) is False
    assert world.state() == before
    assert request.req_pool_idx is None
    assert request.retraction is backup


# Failures in the middle


def free_pages(world: World) -> list[list[int]]:
    allocator = world.allocator
    if isinstance(allocator, SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator):
        sides = [allocator.full_attn_allocator, allocator.swa_attn_allocator]
        return [sorted(world.laws.free_ids(side)) for side in sides]
    return [sorted(world.laws.free_ids(allocator))]


@pytest.mark.parametrize("field", ["kv_len", "swa_evicted_seqlen"])
def test_lengths_that_are_not_whole_leave_the_request_running(world: World, field: str) -> None:
    request = world.start(tokens(world, 2))
    setattr(request, field, float(getattr(request, field)))
    before = world.state()
    with pytest.raises(GeometryError, match=field):
        world.retraction.retract(request)
    assert world.state() == before


def fails_and_can_be_repeated(
    world: World, request: Request, contents: list[list[int]], repair: Callable[[], None]
) -> None:
    backup, capacity = request.retraction, world.capacity()
    pages, rows = free_pages(world), sorted(world.rows.free_slots)
    with pytest.raises(PausedPoolError):
        world.retraction.restore(request)
    assert world.capacity() == capacity
    assert free_pages(world) == pages
    assert sorted(world.rows.free_slots) == rows
    assert request.req_pool_idx is None
    assert request.retraction is backup
    repair()
    assert world.retraction.restore(request)
    assert world.contents(request) == contents


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_load_that_fails_gives_everything_back(world: World, failing: int) -> None:
    request = world.start(tokens(world, 5))
    load_fails_and_can_be_repeated(world, request, failing)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_load_of_a_partial_window_that_fails_gives_everything_back(
    sliding: World, failing: int
) -> None:
    request = sliding.start(tokens(sliding, 6))
    sliding.slide(request, sliding.page_size)
    load_fails_and_can_be_repeated(sliding, request, failing)


def load_fails_and_can_be_repeated(world: World, request: Request, failing: int) -> None:
    contents = world.contents(request)
    world.retraction.retract(request)
    for page in world.fill():
        world.allocator.free(page)
    pool = world.reluctant_pool()
    pool.failing = ("load", failing)

    def repair() -> None:
        pool.failing = None

    fails_and_can_be_repeated(world, request, contents, repair)


def test_a_row_that_cannot_be_written_gives_everything_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = world.start(tokens(world, 3))
    contents = world.contents(request)
    world.retraction.retract(request)

    def paused(*_: object) -> None:
        raise PausedPoolError("write")

    monkeypatch.setattr(world.rows, "write", paused)
    fails_and_can_be_repeated(world, request, contents, monkeypatch.undo)


def test_what_a_failed_restore_took_in_a_group_comes_back_at_its_end(world: World) -> None:
    request = world.start(tokens(world, 5))
    world.retraction.retract(request)
    capacity = world.capacity()
    world.reluctant_pool().failing = ("load", 2)
    world.allocator.free_group_begin()
    with pytest.raises(PausedPoolError):
        world.retraction.restore(request)
    world.allocator.free_group_end()
    assert world.capacity() == capacity

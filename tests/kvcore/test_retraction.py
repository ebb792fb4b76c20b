"""Retract, let others overwrite, restore elsewhere: a row comes back bit for bit, or not at all."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    HiSparseKVPool,
    HiSparseTokenToKVPoolAllocator,
    HostMemorySaver,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.errors import (
    DoubleFreeError,
    GeometryError,
    IndexTensorError,
    InvalidSlotError,
    KVCacheError,
    MappingError,
    PausedPoolError,
)
from kvcore.pools import HostRows, MHATokenToKVPool, SWAKVPool
from kvcore.retraction import Retraction, RetractionBackup
from kvcore.saver import KV_CACHE

SIZE, SIZE_SWA, HEADS, K_WIDTH, V_WIDTH = 12, 8, 2, 3, 5
FULL_LAYERS, SWA_LAYERS = [0, 2], [1, 3]


def mha_pool(dtype: torch.dtype = torch.int64, layer_num: int = 2) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        SIZE, 1, dtype, HEADS, K_WIDTH, layer_num, "cpu", False, v_head_dim=V_WIDTH
    )


def swa_pool(peers: dict[int, int], **changes: Any) -> SWAKVPool:
    arguments: dict[str, Any] = {"head_dim": K_WIDTH, "v_head_dim": V_WIDTH, "dtype": torch.int64}
    arguments |= {"size": SIZE, "size_swa": SIZE_SWA, "page_size": 1}
    pool = SWAKVPool(
        head_num=HEADS,
        swa_attention_layer_ids=SWA_LAYERS,
        full_attention_layer_ids=FULL_LAYERS,
        device="cpu",
        **(arguments | changes),
    )
    pool.register_mapping(torch.zeros(SIZE + 2, dtype=torch.int64))
    remap(pool, peers)
    return pool


def remap(pool: SWAKVPool, peers: dict[int, int]) -> None:
    """As an allocator would: the mapping names exactly these peers from now on."""
    mapping = pool.full_to_swa_index_mapping
    assert mapping is not None
    mapping.zero_()
    mapping[-1] = -1
    for full, swa in peers.items():
        mapping[full] = swa


def buffers_of(pool: MHATokenToKVPool | SWAKVPool) -> list[torch.Tensor]:
    pools = [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]
    return [buffer for each in pools for buffer in each.slot_buffers()]


def stamp_every_row(pool: MHATokenToKVPool | SWAKVPool, first: int = 1) -> None:
    """Give every element of every buffer a number of its own."""
    for buffer in buffers_of(pool):
        buffer.copy_(torch.arange(first, first + buffer.numel()).reshape(buffer.shape))
        first += buffer.numel()


def snapshot(pool: MHATokenToKVPool | SWAKVPool) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in buffers_of(pool)]


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# One pool


def test_keys_and_values_of_every_layer_come_back_in_other_slots() -> None:
    pool = mha_pool()
    stamp_every_row(pool)
    old, new = slots(3, 7, 1), slots(10, 2, 5)
    expected = [rows[old] for rows in snapshot(pool)]
    backup = RetractionBackup.take(pool, old)
    stamp_every_row(pool, first=1_000_000)
    overwritten = snapshot(pool)
    backup.restore(pool, new)
    others = [row for row in range(SIZE + 1) if row not in new.tolist()]
    for buffer, rows, before in zip(buffers_of(pool), expected, overwritten, strict=True):
        assert torch.equal(buffer[new], rows)
        assert torch.equal(buffer[others], before[others])


def test_a_backup_needs_no_further_word_of_the_pool_it_came_from() -> None:
    first, second = mha_pool(), mha_pool()
    stamp_every_row(first)
    copy = first.get_cpu_copy(slots(4, 5))
    RetractionBackup(cpu_tensors=copy).restore(second, slots(8, 9))
    assert torch.equal(second.get_key_buffer(1)[8:10], first.get_key_buffer(1)[4:6])


def test_a_backup_lies_in_host_memory_and_shares_none_of_the_pools() -> None:
    pool = mha_pool()
    [copy] = RetractionBackup.take(pool, torch.arange(SIZE + 1)).chunks
    owned = {rows.untyped_storage().data_ptr() for rows in copy.buffers}
    assert all(rows.device.type == "cpu" for rows in copy.buffers)
    assert not owned & {buffer.untyped_storage().data_ptr() for buffer in buffers_of(pool)}


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32]
)
def test_every_bit_pattern_survives_also_those_that_are_no_number(dtype: torch.dtype) -> None:
    pool = mha_pool(dtype)
    for buffer in buffers_of(pool):
        as_bytes = buffer.view(torch.uint8)
        as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, dtype=torch.uint8))
    old, new = slots(1, 2, 3, 4, 5), slots(8, 9, 10, 11, 12)
    expected = [rows[old].view(torch.uint8) for rows in snapshot(pool)]
    backup = RetractionBackup.take(pool, old)
    backup.restore(pool, new)
    for buffer, rows in zip(buffers_of(pool), expected, strict=True):
        assert torch.equal(buffer[new].view(torch.uint8), rows)


@pytest.mark.parametrize("pool", [mha_pool(), swa_pool({})], ids=["mha", "swa"])
def test_a_request_without_tokens_is_retracted_and_restored_too(
    pool: MHATokenToKVPool | SWAKVPool,
) -> None:
    stamp_every_row(pool)
    before = snapshot(pool)
    backup: RetractionBackup[Any] = RetractionBackup.take(pool, slots())
    assert len(backup.cpu_tensors) == 0
    backup.restore(pool, slots())
    assert all(map(torch.equal, buffers_of(pool), before))


# In chunks


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 6, 100])
@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_row_copied_in_chunks_comes_back_as_one_copied_whole(
    kind: str, chunk_tokens: int
) -> None:
    old, new = slots(3, 7, 1, 2, 8), slots(10, 4, 5, 12, 6)
    restored = []
    for chunk in (None, chunk_tokens):
        pool = mha_pool() if kind == "mha" else swa_pool({3: 1, 1: 2, 8: 3, 10: 4, 5: 5, 12: 6})
        stamp_every_row(pool)
        backup: RetractionBackup[Any] = RetractionBackup.take(pool, old, chunk_tokens=chunk)
        assert len(backup) == len(old)
        stamp_every_row(pool, first=1_000_000)
        backup.restore(pool, new)
        restored.append(snapshot(pool))
    whole, in_chunks = restored
    assert all(map(torch.equal, whole, in_chunks))


def test_the_chunks_of_a_row_are_its_pieces_in_order() -> None:
    pool = mha_pool()
    stamp_every_row(pool)
    backup = RetractionBackup.take(pool, slots(1, 2, 3, 4, 5), chunk_tokens=2)
    assert [len(chunk) for chunk in backup.chunks] == [2, 2, 1]
    assert torch.equal(backup.chunks[1].buffers[0], pool.slot_buffers()[0][slots(3, 4)])
    empty = RetractionBackup.take(pool, slots(), chunk_tokens=2)
    assert [len(chunk) for chunk in empty.chunks] == [0]


def test_slots_are_counted_before_the_first_chunk_is_written() -> None:
    pool = mha_pool()
    backup = RetractionBackup.take(pool, slots(1, 2, 3, 4, 5), chunk_tokens=2)
    stamp_every_row(pool)
    before = snapshot(pool)
    for wrong in (slots(6, 7, 8, 9), slots(6, 7, 8, 9, 10, 11)):
        with pytest.raises(GeometryError):
            backup.restore(pool, wrong)
    assert all(map(torch.equal, buffers_of(pool), before))


def test_a_chunk_without_tokens_is_rejected() -> None:
    with pytest.raises(GeometryError):
        RetractionBackup.take(mha_pool(), slots(1), chunk_tokens=0)


def test_what_is_no_tensor_is_rejected() -> None:
    pool = mha_pool()
    backup = RetractionBackup.take(pool, slots(1))
    not_a_tensor: Any = [1]
    with pytest.raises(IndexTensorError):
        RetractionBackup.take(pool, not_a_tensor)
    with pytest.raises(IndexTensorError):
        backup.restore(pool, not_a_tensor)


# The hybrid pool

OLD, NEW = (1, 2, 3, 4), (5, 6, 7, 8)
MASKS = list(itertools.product([False, True], repeat=len(OLD)))


def peers_where(mask: tuple[bool, ...], full: tuple[int, ...], first: int) -> dict[int, int]:
    return {slot: first + i for i, (slot, kept) in enumerate(zip(full, mask, strict=True)) if kept}


@pytest.mark.parametrize("had", MASKS)
def test_swa_rows_come_back_exactly_where_both_slots_have_a_peer(had: tuple[bool, ...]) -> None:
    for has in MASKS:
        old_peers, new_peers = peers_where(had, OLD, 1), peers_where(has, NEW, 5)
        pool = swa_pool(old_peers)
        stamp_every_row(pool)
        full_before, swa_before = (
            [buffer.clone() for buffer in sub_pool.slot_buffers()]
            for sub_pool in (pool.full_kv_pool, pool.swa_kv_pool)
        )
        backup = RetractionBackup.take(pool, slots(*OLD))
        stamp_every_row(pool, first=1_000_000)
        overwritten = [buffer.clone() for buffer in pool.swa_kv_pool.slot_buffers()]
        remap(pool, new_peers)
        backup.restore(pool, slots(*NEW))

        for buffer, before in zip(pool.full_kv_pool.slot_buffers(), full_before, strict=True):
            assert torch.equal(buffer[slots(*NEW)], before[slots(*OLD)])
        pairs = zip(OLD, NEW, strict=True)
        restored = {
            new_peers[new]: old_peers[old]
            for old, new in pairs
            if old in old_peers and new in new_peers
        }
        for buffer, before, after_overwrite in zip(
            pool.swa_kv_pool.slot_buffers(), swa_before, overwritten, strict=True
        ):
            for row in range(SIZE_SWA + 1):
                expected = before[restored[row]] if row in restored else after_overwrite[row]
                assert torch.equal(buffer[row], expected), (had, has, row)


def test_a_hybrid_copy_holds_swa_rows_of_mapped_slots_only() -> None:
    pool = swa_pool({2: 4, 4: 1})
    stamp_every_row(pool)
    copy = pool.get_cpu_copy(slots(1, 2, 3, 4))
    assert len(copy) == len(copy.full) == 4
    assert copy.had_peer.tolist() == [False, True, False, True]
    assert len(copy.swa) == 2
    assert torch.equal(copy.swa.buffers[0], pool.swa_kv_pool.slot_buffers()[0][slots(4, 1)])


def test_a_pool_without_a_mapping_is_neither_copied_nor_restored() -> None:
    pool = swa_pool({1: 1})
    copy = pool.get_cpu_copy(slots(1))
    pool.full_to_swa_index_mapping = None
    before = snapshot(pool)
    with pytest.raises(MappingError):
        pool.get_cpu_copy(slots(1))
    with pytest.raises(MappingError):
        pool.load_cpu_copy(copy, slots(2))
    assert all(map(torch.equal, buffers_of(pool), before))


# Errors come before the first write


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        (slots(5, 6), GeometryError),
        (slots(5, 6, 7, 8), GeometryError),
        (torch.tensor([[5, 6, 7]]), IndexTensorError),
        (torch.tensor(5), IndexTensorError),
        (torch.tensor([5.0, 6.0, 7.0]), IndexTensorError),
        (torch.zeros(3, dtype=torch.int64, device="meta"), IndexTensorError),
    ],
    ids=["too few", "too many", "two dimensions", "no dimension", "float", "other device"],
)
@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_rejected_restore_changes_nothing(
    kind: str, indices: torch.Tensor, error: type[KVCacheError]
) -> None:
    pool = mha_pool() if kind == "mha" else swa_pool({1: 1, 2: 2, 5: 5, 6: 6})
    backup: RetractionBackup[Any] = RetractionBackup.take(pool, slots(1, 2, 3))
    stamp_every_row(pool)
    before = snapshot(pool)
    with pytest.raises(error):
        backup.restore(pool, indices)
    assert all(map(torch.equal, buffers_of(pool), before))


@pytest.mark.parametrize("pool", [mha_pool(), swa_pool({})], ids=["mha", "swa"])
def test_a_copy_of_a_matrix_of_slots_is_rejected(pool: MHATokenToKVPool | SWAKVPool) -> None:
    with pytest.raises(IndexTensorError):
        pool.get_cpu_copy(torch.tensor([[1, 2]]))


def copies_of_other_pools() -> dict[str, tuple[MHATokenToKVPool | SWAKVPool, Any]]:
    swa = swa_pool({1: 1})
    hybrid, plain = swa.get_cpu_copy(slots(1)), mha_pool().get_cpu_copy(slots(1))
    wide = swa_pool({1: 1}, swa_head_dim=K_WIDTH + 1)
    return {
        "hybrid into plain": (mha_pool(), hybrid),
        "plain into hybrid": (swa, plain),
        "other number of layers": (mha_pool(layer_num=3), plain),
        "other dtype": (mha_pool(torch.float64), plain),
        "other widths of sliding layers": (wide, hybrid),
    }


@pytest.mark.parametrize("case", sorted(copies_of_other_pools()))
def test_a_copy_of_a_pool_of_another_shape_is_rejected_before_anything_is_written(
    case: str,
) -> None:
    pool, copy = copies_of_other_pools()[case]
    stamp_every_row(pool)
    before = snapshot(pool)
    with pytest.raises(GeometryError):
        RetractionBackup(cpu_tensors=copy).restore(pool, slots(2))
    assert all(map(torch.equal, buffers_of(pool), before))


def test_a_pool_without_layers_says_so_when_a_copy_does_not_fit() -> None:
    copy = mha_pool().get_cpu_copy(slots(1))
    with pytest.raises(GeometryError, match="this pool has 0 x nothing"):
        mha_pool(layer_num=0).load_cpu_copy(copy, slots(1))


# Requests that are not what a call expects

CONTEXT_LEN = 16

RUNNING: dict[str, tuple[type[KVCacheError], dict[str, Any]]] = {
    "a row that is not lent": (InvalidSlotError, {"req_pool_idx": 1}),
    "the padding row": (InvalidSlotError, {"req_pool_idx": 0}),
    "no row": (DoubleFreeError, {"req_pool_idx": None}),
    "a backup that would be lost": (InvalidSlotError, {"retraction": RetractionBackup([])}),
    "a negative length": (GeometryError, {"kv_len": -1}),
    "a length beyond the row": (GeometryError, {"kv_len": CONTEXT_LEN + 1}),
    "a negative window": (GeometryError, {"swa_evicted_seqlen": -2}),
    "a window within a page": (GeometryError, {"swa_evicted_seqlen": 3}),
    "a window beyond the length": (GeometryError, {"swa_evicted_seqlen": 6}),
}

RETRACTED: dict[str, tuple[type[KVCacheError], dict[str, Any]]] = {
    "a row": (InvalidSlotError, {"req_pool_idx": 2}),
    "no backup": (InvalidSlotError, {"retraction": None}),
    "fewer tokens": (GeometryError, {"kv_len": 4}),
    "more tokens": (GeometryError, {"kv_len": 6}),
    "another window": (GeometryError, {"swa_evicted_seqlen": 2}),
}


@dataclass
class Request:
    kv_len: int
    swa_evicted_seqlen: int = 0
    req_pool_idx: int | None = None
    retraction: RetractionBackup[Any] | None = None


def hybrid_retraction(page_size: int) -> Retraction:
    pool = swa_pool({}, page_size=page_size, size=SIZE * page_size, size_swa=SIZE_SWA * page_size)
    allocator = SWATokenToKVPoolAllocator(
        pool.size, pool.size_swa, page_size, torch.int64, "cpu", pool, False, validate=True
    )
    return Retraction(allocator, ReqToTokenPool(2, CONTEXT_LEN, "cpu", False))


def start(retraction: Retraction, num_tokens: int) -> Request:
    request = Request(num_tokens)
    rows = retraction.req_to_token_pool.alloc([request])
    none, length = torch.tensor([0]), torch.tensor([num_tokens])
    kv_row = retraction.allocator.alloc_extend(
        none, none, length, length, torch.tensor([-1]), num_tokens
    )
    assert rows is not None
    assert kv_row is not None
    retraction.req_to_token_pool.write((rows[0], slice(0, num_tokens)), kv_row)
    return request


@pytest.fixture
def rejected(laws: SimpleNamespace) -> Callable[..., None]:
    """Require that a call raises exactly that type and changes nothing."""

    def run(retraction: Retraction, call: str, request: Request, error: type[KVCacheError]) -> None:
        def state() -> tuple[Any, ...]:
            rows = retraction.req_to_token_pool
            free = laws.snapshot(retraction.allocator)
            return free, list(rows.free_slots), rows.req_to_token.tolist()

        before, as_it_was = state(), Request(**vars(request))
        with pytest.raises(KVCacheError) as caught:
            getattr(retraction, call)(request)
        assert caught.type is error
        assert state() == before
        assert request == as_it_was

    return run


@pytest.mark.parametrize("case", sorted(RUNNING))
def test_a_request_that_cannot_be_retracted_is_left_as_it_is(
    rejected: Callable[..., None], case: str
) -> None:
    error, attributes = RUNNING[case]
    retraction = hybrid_retraction(page_size=2)
    request = start(retraction, 5)
    vars(request).update(attributes)
    rejected(retraction, "retract", request, error)


@pytest.mark.parametrize("case", sorted(RETRACTED))
def test_a_request_that_cannot_be_restored_is_left_as_it_is(
    rejected: Callable[..., None], case: str
) -> None:
    error, attributes = RETRACTED[case]
    retraction = hybrid_retraction(page_size=2)
    request = start(retraction, 5)
    retraction.retract(request)
    assert retraction.req_to_token_pool.alloc(1) == [2]
    vars(request).update(attributes)
    rejected(retraction, "restore", request, error)


def test_a_running_request_is_not_restored_and_a_retracted_one_not_retracted(
    rejected: Callable[..., None],
) -> None:
    retraction = hybrid_retraction(page_size=1)
    request = start(retraction, 3)
    rejected(retraction, "restore", request, InvalidSlotError)
    retraction.retract(request)
    rejected(retraction, "retract", request, DoubleFreeError)


def test_a_window_where_nothing_slides_is_rejected(rejected: Callable[..., None]) -> None:
    pool = mha_pool()
    allocator = TokenToKVPoolAllocator(SIZE, torch.int64, "cpu", pool, False, validate=True)
    retraction = Retraction(allocator, ReqToTokenPool(2, CONTEXT_LEN, "cpu", False))
    request = start(retraction, 5)
    request.swa_evicted_seqlen = 1
    rejected(retraction, "retract", request, GeometryError)


def test_a_retraction_needs_a_pool_chunks_of_some_length_and_one_device(
    laws: SimpleNamespace,
) -> None:
    rows = ReqToTokenPool(1, CONTEXT_LEN, "cpu", False)
    with pytest.raises(GeometryError):
        Retraction(laws.make_single(1), rows)
    latent = HiSparseKVPool(8, 4, torch.int64, 2, 1, 1, "cpu", False)
    sparse = HiSparseTokenToKVPoolAllocator(8, 4, torch.int64, "cpu", latent, False)
    with pytest.raises(GeometryError, match="holds the KV of every slot"):
        Retraction(sparse, rows)
    allocator = hybrid_retraction(page_size=1).allocator
    with pytest.raises(GeometryError):
        Retraction(allocator, rows, chunk_tokens=0)
    with pytest.raises(GeometryError):
        Retraction(allocator, ReqToTokenPool(1, CONTEXT_LEN, "meta", False))


def test_a_request_retracted_before_a_pause_is_restored_after_the_resume() -> None:
    saver = HostMemorySaver()
    pool = MHATokenToKVPool(
        SIZE, 1, torch.int64, HEADS, K_WIDTH, 1, "cpu", True, memory_saver=saver
    )
    allocator = TokenToKVPoolAllocator(SIZE, torch.int64, "cpu", pool, False, validate=True)
    rows = ReqToTokenPool(2, CONTEXT_LEN, "cpu", True, memory_saver=saver)
    retraction = Retraction(allocator, rows)
    request = start(retraction, 4)
    assert request.req_pool_idx is not None
    stamp_every_row(pool)
    expected = pool.get_key_buffer(0)[rows.row(request.req_pool_idx, 4)]
    retraction.retract(request)
    saver.pause(KV_CACHE)
    with pytest.raises(PausedPoolError):
        retraction.restore(request)
    assert (allocator.available_size(), rows.available_size()) == (SIZE, 2)
    saver.resume(KV_CACHE)
    assert retraction.restore(request)
    assert torch.equal(pool.get_key_buffer(0)[rows.row(request.req_pool_idx, 4)], expected)


# Host copies


def test_selecting_rows_keeps_their_order_and_count() -> None:
    rows = HostRows(3, (torch.tensor([10, 20, 30]),))
    kept = rows.select(torch.tensor([True, False, True]))
    assert len(kept) == 2
    assert kept.buffers[0].tolist() == [10, 30]

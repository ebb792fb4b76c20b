"""The pools of device rows: which row a location has, and that no other row is ever touched.

Every element of every buffer starts as a number of its own, so a row in a wrong place shows.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore import (
    CompressedHiSparseTokenToKVPoolAllocator,
    CompressedKVPool,
    GeometryError,
    HiSparseKVPool,
    HiSparseTokenToKVPoolAllocator,
    HostMemorySaver,
    IndexTensorError,
    MappingError,
    PausedPoolError,
    RetractionBackup,
    SWATokenToKVPoolAllocator,
)
from kvcore.pools import HostRows, MLATokenToKVPool

RANK, ROPE, LAYERS = 3, 2, 2
WIDTH = RANK + ROPE
SIZE, PAGE = 8, 2
POOLS = {"plain": HiSparseKVPool, "compressed": CompressedKVPool}


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def make(kind: str, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.int64,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return POOLS[kind](**(arguments | changes))


def mapping_of(device_slots: dict[int, int], locations: int = 20) -> torch.Tensor:
    mapping = torch.zeros(locations + 1, dtype=torch.int64)
    mapping[-1] = -1
    for location, slot in device_slots.items():
        mapping[location] = slot
    return mapping


def stamp(pool: Any, first: int = 1) -> None:
    """A number of its own for every element of every buffer."""
    for buffer in pool.slot_buffers():
        buffer.copy_(torch.arange(first, first + buffer.numel()).reshape(buffer.shape))
        first += buffer.numel()


def rows_of(pool: Any, layer: int = 0) -> torch.Tensor:
    rows: torch.Tensor = pool.get_key_buffer(layer).clone()
    return rows


@pytest.fixture(params=POOLS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(kind: str) -> Any:
    """A stamped pool in which locations 3, 12 and 17 have device slots 5, 2 and 9."""
    pool = make(kind)
    pool.register_mapping(mapping_of({3: 5, 12: 2, 17: 9}))
    stamp(pool)
    return pool


# -- geometry and the mapping ----------------------------------------------------------------------


def test_the_buffers_are_those_of_the_device_side(pool: Any) -> None:
    assert isinstance(pool, MLATokenToKVPool)
    assert [tuple(buffer.shape) for buffer in pool.kv_buffer] == [(SIZE + PAGE, 1, WIDTH)] * LAYERS
    assert pool.get_value_buffer(0).shape == (SIZE + PAGE, 1, RANK)
    assert pool.get_contiguous_buf_infos()[2] == [PAGE * WIDTH * 8] * LAYERS


def test_locations_keep_their_shape_and_no_location_stays_none(pool: Any) -> None:
    asked = torch.tensor([[3, 4], [17, -1]], dtype=torch.int32)
    seen = pool.translate_loc_to_hisparse_device(asked)
    assert seen.tolist() == [[5, 0], [9, -1]]
    assert seen.dtype == torch.int64
    with pytest.raises(IndexTensorError):
        pool.translate_loc_to_hisparse_device(asked.float())


def test_the_allocators_writes_are_seen_at_once(pool: Any) -> None:
    mapping = mapping_of({4: 7})
    pool.register_mapping(mapping)
    assert pool.full_to_hisparse_device_index_mapping is mapping
    mapping[4] = 3
    assert pool.translate_loc_to_hisparse_device(slots(4)).tolist() == [3]


def test_only_a_mapping_is_registered(pool: Any) -> None:
    before = pool.full_to_hisparse_device_index_mapping
    for wrong in (mapping_of({}).int(), mapping_of({}).float(), mapping_of({}).reshape(3, 7)):
        with pytest.raises(IndexTensorError):
            pool.register_mapping(wrong)
    assert pool.full_to_hisparse_device_index_mapping is before


def test_without_a_mapping_no_row_is_found(kind: str) -> None:
    pool = make(kind)
    for call in (
        lambda: pool.translate_loc_to_hisparse_device(slots(3)),
        lambda: pool.get_cpu_copy(slots(3)),
        lambda: pool.move_kv_cache(slots(3), slots(4)),
        lambda: pool.set_kv_buffer(0, slots(3), torch.zeros(1, 1, WIDTH)),
    ):
        with pytest.raises(MappingError, match="register_mapping"):
            call()


def test_every_token_of_the_plain_pool_is_a_location() -> None:
    pool = make("plain", host_to_device_ratio=3)
    assert pool.compress_ratio == 1
    assert pool.logical_size == 3 * SIZE
    asked = torch.tensor([[0, 7], [-1, 2]], dtype=torch.int32)
    assert pool.translate_loc_from_full_to_compressed(asked).tolist() == asked.tolist()
    pool.register_mapping(mapping_of({7: 4}))
    assert pool.translate_loc_from_full_to_hisparse_device(asked).tolist() == [[0, 4], [-1, 0]]
    assert make("plain", host_to_device_ratio=1).logical_size == SIZE
    with pytest.raises(GeometryError):
        make("plain", host_to_device_ratio=0)


def test_every_fourth_token_of_the_compressed_pool_is_a_location() -> None:
    pool = make("compressed")
    assert pool.compress_ratio == 4
    row = torch.arange(16, 32).flip(0).to(torch.int32)
    expected = [slot // 4 for slot in row.tolist() if (slot + 1) % 4 == 0]
    assert pool.translate_loc_from_full_to_compressed(row).tolist() == expected
    pool.register_mapping(mapping_of({expected[0]: 6}))
    assert pool.translate_loc_from_full_to_hisparse_device(row).tolist() == [6, 0, 0, 0]
    with pytest.raises(IndexTensorError):
        pool.translate_loc_from_full_to_compressed(row.reshape(4, 4))


# -- reading and writing ---------------------------------------------------------------------------


def test_rows_are_written_through_the_mapping(pool: Any) -> None:
    before = rows_of(pool)
    rows = -torch.arange(1, 3 * WIDTH + 1).reshape(3, 1, WIDTH)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots(17, 12, 3).int(), rows, rows)
    after = rows_of(pool)
    assert torch.equal(after[[9, 2, 5]], rows)
    others = [row for row in range(SIZE + PAGE) if row not in (9, 2, 5)]
    assert torch.equal(after[others], before[others])
    assert torch.equal(rows_of(pool, 1), torch.arange(51, 101).reshape(-1, 1, WIDTH))


def test_the_two_parts_of_a_row_go_the_same_way(pool: Any) -> None:
    nope, rope = torch.full((1, 1, RANK), -7), torch.full((1, 1, ROPE), -8)
    pool.set_mla_kv_buffer(1, slots(12), nope, rope)
    assert torch.equal(rows_of(pool, 1)[2:3], torch.cat((nope, rope), dim=-1))
    read = pool.get_mla_kv_buffer(1, slots(12))
    assert torch.equal(read[0], nope)
    assert torch.equal(read[1], rope)


def test_what_has_no_device_slot_is_written_to_the_padding_row(pool: Any) -> None:
    before = rows_of(pool)
    pool.set_kv_buffer(0, slots(4, -1), torch.full((2, 1, WIDTH), -1))
    after = rows_of(pool)
    assert torch.equal(after[1:], before[1:])
    assert (after[0] == -1).all()


@pytest.mark.parametrize(("target", "source"), [(3, 4), (4, 3), (-1, 3), (3, -1), (4, 5)])
def test_a_move_needs_two_device_slots(pool: Any, target: int, source: int) -> None:
    before = rows_of(pool)
    pool.move_kv_cache(slots(target), slots(source))
    assert torch.equal(rows_of(pool), before)


def test_the_first_device_slot_is_moved_like_the_others(kind: str) -> None:
    pool = make(kind, page_size=1)
    pool.register_mapping(mapping_of({3: 1, 4: 2}))
    for target, source in ((3, 4), (4, 3)):
        stamp(pool)
        before = rows_of(pool)
        pool.move_kv_cache(slots(target), slots(source))
        moved = pool.translate_loc_to_hisparse_device(slots(target, source))
        assert torch.equal(rows_of(pool)[moved[0]], before[moved[1]])


def test_moves_leave_out_what_has_no_device_slot(pool: Any) -> None:
    before = rows_of(pool)
    pool.move_kv_cache(slots(3, 4, 12, 5), slots(12, 17, 3, 6))
    expected = before.clone()
    expected[5], expected[2] = before[2], before[5]
    assert torch.equal(rows_of(pool), expected)
    with pytest.raises(GeometryError):
        pool.move_kv_cache(slots(3), slots(3, 4))


# -- host copies -----------------------------------------------------------------------------------


def test_a_host_copy_comes_back_where_old_and_new_have_device_slots(pool: Any) -> None:
    layers = [rows_of(pool, layer) for layer in range(LAYERS)]
    backup = RetractionBackup.take(pool, slots(3, 4, 12, 17))
    assert len(backup) == 4
    stamp(pool, first=10_000)
    overwritten = [rows_of(pool, layer) for layer in range(LAYERS)]
    pool.register_mapping(mapping_of({6: 1, 7: 3, 9: 8}))
    backup.restore(pool, slots(6, 7, 8, 9))
    for layer in range(LAYERS):
        expected = overwritten[layer].clone()
        expected[1], expected[8] = layers[layer][5], layers[layer][9]
        assert torch.equal(rows_of(pool, layer), expected)


def test_a_host_copy_that_does_not_fit_writes_nothing(pool: Any) -> None:
    copy = pool.get_cpu_copy(slots(3, 4))
    before = rows_of(pool)
    with pytest.raises(GeometryError):
        pool.load_cpu_copy(copy, slots(3))
    with pytest.raises(GeometryError, match="DeviceRows"):
        pool.load_cpu_copy(HostRows(copy.count, copy.buffers), slots(3, 4))
    with pytest.raises(GeometryError):
        make("plain", layer_num=1).load_cpu_copy(copy, slots(3, 4))
    with pytest.raises(IndexTensorError):
        pool.load_cpu_copy(copy, slots(3, 4).float())
    assert torch.equal(rows_of(pool), before)


# -- the memory saver ------------------------------------------------------------------------------


def test_a_paused_pool_is_not_touched(kind: str) -> None:
    saver = HostMemorySaver()
    pool = make(kind, enable_memory_saver=True, memory_saver=saver)
    pool.register_mapping(mapping_of({3: 5}))
    copy = pool.get_cpu_copy(slots(3))
    saver.pause("kv_cache")
    for call in (
        lambda: pool.get_cpu_copy(slots(3)),
        lambda: pool.load_cpu_copy(copy, slots(3)),
        lambda: pool.move_kv_cache(slots(3), slots(4)),
        lambda: pool.set_kv_buffer(0, slots(3), torch.zeros(1, 1, WIDTH)),
    ):
        with pytest.raises(PausedPoolError):
            call()
    saver.resume("kv_cache")
    assert not pool.get_key_buffer(0).any()
    pool.set_kv_buffer(0, slots(3), torch.ones(1, 1, WIDTH, dtype=torch.int64))
    assert pool.get_key_buffer(0)[5].all()


# -- together with their allocators ----------------------------------------------------------------


def batch(length: int) -> tuple[Any, ...]:
    none, total = slots(0), slots(length)
    return none, none.clone(), total, total.clone(), slots(-1), length


def test_an_extension_writes_the_rows_of_its_tokens() -> None:
    pool = make("plain", size=24, page_size=4)
    allocator = HiSparseTokenToKVPoolAllocator(24, 4, torch.int64, "cpu", pool, False)
    row = allocator.alloc_extend(*batch(6))
    assert row is not None
    stamps = torch.arange(1, 6 * WIDTH + 1).reshape(6, 1, WIDTH)
    pool.set_kv_buffer(0, row, stamps)
    buffer = allocator.alloc_device_buffer(row, 8)
    assert buffer is not None
    assert torch.equal(pool.get_key_buffer(0)[buffer[:6]], stamps)
    assert pool.translate_loc_to_hisparse_device(row).tolist() == [0] * 6


def test_a_compressed_extension_writes_the_rows_of_its_entries() -> None:
    pool = make("compressed", size=24, page_size=4)
    hybrid = SWATokenToKVPoolAllocator(128, 64, 16, torch.int64, "cpu", None, False)
    allocator = CompressedHiSparseTokenToKVPoolAllocator(hybrid, pool)
    row = allocator.alloc_extend(*batch(23))
    assert row is not None
    entries = pool.translate_loc_from_full_to_compressed(row)
    stamps = torch.arange(1, 5 * WIDTH + 1).reshape(5, 1, WIDTH)
    pool.set_kv_buffer(0, entries, stamps)
    assert allocator.get_last_loc_compressed(row[-4:-3]).tolist() == entries[-1:].tolist()
    buffer = allocator.alloc_device_buffer(entries, 8)
    assert buffer is not None
    assert torch.equal(pool.get_key_buffer(0)[buffer[:5]], stamps)

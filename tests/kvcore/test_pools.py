"""The MHA pool and the hybrid SWA pool: geometry, reads and writes, moves, transfer tables.

Other kinds of sub-pools are in `test_swa_pool_kinds.py`, the memory saver in
`test_memory_saver.py`.

Every written row carries numbers that occur nowhere else, so a row in a wrong place shows.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcore.errors import GeometryError, IndexTensorError, KVCacheError, MappingError
from kvcore.pools import MHATokenToKVPool, SWAKVPool

HEADS, K_WIDTH, V_WIDTH = 2, 3, 5
FULL_LAYERS, SWA_LAYERS = [0, 3], [1, 2, 4]
FP8_TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def mha_pool(size: int = 8, page_size: int = 2, **changes: Any) -> MHATokenToKVPool:
    arguments: dict[str, Any] = {
        "dtype": torch.int64,
        "head_num": HEADS,
        "head_dim": K_WIDTH,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
        "v_head_dim": V_WIDTH,
    }
    return MHATokenToKVPool(size, page_size, **(arguments | changes))


def swa_pool(peers: dict[int, int] | None = None, **changes: Any) -> SWAKVPool:
    """8 full and 6 SWA slots at page size 2, with the given full -> SWA mapping registered."""
    arguments: dict[str, Any] = {
        "size": 8,
        "size_swa": 6,
        "page_size": 2,
        "dtype": torch.int64,
        "head_num": HEADS,
        "head_dim": K_WIDTH,
        "swa_attention_layer_ids": SWA_LAYERS,
        "full_attention_layer_ids": FULL_LAYERS,
        "device": "cpu",
        "v_head_dim": V_WIDTH,
    }
    pool = SWAKVPool(**(arguments | changes))
    if peers is not None:
        pool.register_mapping(mapping_of(pool, peers))
    return pool


def mapping_of(pool: SWAKVPool, peers: dict[int, int]) -> torch.Tensor:
    mapping = torch.zeros(pool.size + pool.page_size + 1, dtype=torch.int64)
    mapping[-1] = -1
    for full, swa in peers.items():
        mapping[full] = swa
    return mapping


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def stamps(count: int, width: int, first: int) -> torch.Tensor:
    """`[count, HEADS, width]` of numbers from `first` on, no two alike."""
    return torch.arange(first, first + count * HEADS * width).reshape(count, HEADS, width)


def fill(pool: MHATokenToKVPool | SWAKVPool, layer: int, loc: torch.Tensor, first: int) -> None:
    keys, values = stamps(len(loc), K_WIDTH, first), stamps(len(loc), V_WIDTH, first + 10_000)
    pool.set_kv_buffer(layer, loc, keys, values)


# Geometry


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_every_buffer_has_a_row_for_each_slot_and_the_padding_page(page_size: int) -> None:
    pool = mha_pool(size=32, page_size=page_size)
    for layer in range(pool.layer_num):
        keys, values = pool.get_kv_buffer(layer)
        assert keys.shape == (32 + page_size, HEADS, K_WIDTH)
        assert values.shape == (32 + page_size, HEADS, V_WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, *FP8_TYPES])
def test_buffers_start_as_zeros_of_the_asked_dtype(dtype: torch.dtype) -> None:
    for buffer in mha_pool(dtype=dtype).get_kv_buffer(0):
        assert buffer.dtype == dtype
        assert not buffer.float().any()


def test_values_are_as_wide_as_keys_unless_told_otherwise() -> None:
    assert mha_pool(v_head_dim=None).get_value_buffer(0).shape[-1] == K_WIDTH


@pytest.mark.parametrize("dtype", FP8_TYPES)
def test_fp8_is_stored_as_bytes_and_read_as_fp8(dtype: torch.dtype) -> None:
    pool = mha_pool(dtype=dtype)
    written = torch.full((1, HEADS, K_WIDTH), 1.5).to(dtype)
    pool.set_kv_buffer(0, slots(3), written, torch.zeros(1, HEADS, V_WIDTH).to(dtype))
    assert pool.k_buffer[0].dtype == torch.uint8
    assert torch.equal(pool.get_key_buffer(0)[3].float(), written[0].float())


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": -1},
        {"page_size": 0},
        {"layer_num": -1},
        {"head_num": 0},
        {"head_dim": 0},
        {"v_head_dim": 0},
    ],
)
def test_sizes_that_no_buffer_can_have_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(GeometryError):
        mha_pool(**wrong)


# Writing and reading one pool


def test_a_written_row_is_read_back_and_no_other_row_changes() -> None:
    pool = mha_pool()
    loc = slots(5, 2)
    fill(pool, 1, loc, first=1)
    expected_keys = torch.zeros_like(pool.get_key_buffer(1))
    expected_keys[loc] = stamps(2, K_WIDTH, 1)
    expected_values = torch.zeros_like(pool.get_value_buffer(1))
    expected_values[loc] = stamps(2, V_WIDTH, 10_001)
    assert torch.equal(pool.get_key_buffer(1), expected_keys)
    assert torch.equal(pool.get_value_buffer(1), expected_values)
    assert not pool.get_key_buffer(0).any()
    assert not pool.get_value_buffer(0).any()


def test_a_layer_may_be_an_engine_layer_object() -> None:
    pool = mha_pool()
    layer = SimpleNamespace(layer_id=1)
    pool.set_kv_buffer(layer, slots(4), stamps(1, K_WIDTH, 1), stamps(1, V_WIDTH, 100))
    assert torch.equal(pool.get_key_buffer(layer), pool.get_key_buffer(1))
    assert torch.equal(pool.get_key_buffer(1)[4], stamps(1, K_WIDTH, 1)[0])


def test_flat_rows_and_narrow_indices_are_taken_as_engines_pass_them() -> None:
    pool = mha_pool()
    keys, values = stamps(2, K_WIDTH, 1), stamps(2, V_WIDTH, 100)
    pool.set_kv_buffer(0, slots(1, 6).int(), keys.flatten(1), values.flatten(1))
    assert torch.equal(pool.get_key_buffer(0)[slots(1, 6)], keys)
    assert torch.equal(pool.get_value_buffer(0)[slots(1, 6)], values)


def test_rows_of_another_dtype_are_scaled_and_cast_without_touching_the_callers_tensor() -> None:
    pool = mha_pool(dtype=torch.float32)
    keys = torch.full((1, HEADS, K_WIDTH), 6.0, dtype=torch.float64)
    values = torch.full((1, HEADS, V_WIDTH), 6.0, dtype=torch.float64)
    pool.set_kv_buffer(0, slots(1), keys, values, 2.0, 3.0)
    assert torch.equal(pool.get_key_buffer(0)[1], torch.full((HEADS, K_WIDTH), 3.0))
    assert torch.equal(pool.get_value_buffer(0)[1], torch.full((HEADS, V_WIDTH), 2.0))
    assert keys.eq(6.0).all()
    assert values.eq(6.0).all()


def test_layers_are_numbered_from_the_start_layer() -> None:
    pool = mha_pool(start_layer=4)
    assert pool.end_layer == 5
    fill(pool, 5, slots(1), first=1)
    assert torch.equal(pool.k_buffer[1][1], stamps(1, K_WIDTH, 1)[0])


@pytest.mark.parametrize("layer", [-1, 0, 3, 6])
def test_a_layer_that_the_pool_does_not_hold_is_an_error(layer: int) -> None:
    with pytest.raises(GeometryError, match=f"layer {layer}"):
        mha_pool(start_layer=4).get_key_buffer(layer)


@pytest.mark.parametrize(
    ("loc", "error"),
    [
        (torch.tensor([[1, 2]]), IndexTensorError),
        (torch.tensor([1.0, 2.0]), IndexTensorError),
        (torch.tensor([True, False]), IndexTensorError),
        (torch.zeros(2, dtype=torch.int64, device="meta"), IndexTensorError),
        (torch.tensor([1]), GeometryError),
        (torch.tensor([1, 2, 3]), GeometryError),
    ],
    ids=["two dimensions", "float", "bool", "other device", "too short", "too long"],
)
@pytest.mark.parametrize("layer", [FULL_LAYERS[0], SWA_LAYERS[0]])
def test_a_rejected_write_changes_nothing(
    layer: int, loc: torch.Tensor, error: type[KVCacheError]
) -> None:
    pool = swa_pool({1: 2, 2: 3})
    with pytest.raises(error):
        pool.set_kv_buffer(layer, loc, stamps(2, K_WIDTH, 1), stamps(2, V_WIDTH, 100))
    assert not any(buffer.any() for buffer in pool.get_kv_buffer(layer))


def test_rows_of_a_wrong_width_are_rejected_before_the_keys_are_written() -> None:
    pool = mha_pool()
    with pytest.raises(GeometryError, match="values of shape"):
        pool.set_kv_buffer(0, slots(1), stamps(1, K_WIDTH, 1), stamps(1, K_WIDTH, 1))
    assert not pool.get_key_buffer(0).any()


# Sizes and transfer tables


def test_sizes_in_bytes_count_keys_and_values_of_every_layer() -> None:
    pool = mha_pool(size=8, page_size=2, layer_num=3, dtype=torch.bfloat16)
    rows = 3 * (8 + 2) * HEADS * 2
    assert pool.get_kv_size_bytes() == (rows * K_WIDTH, rows * V_WIDTH)


def test_transfer_tables_name_every_buffer_with_its_bytes_a_page() -> None:
    pool = mha_pool(size=8, page_size=2, dtype=torch.int64)
    pointers, lengths, page_lengths = pool.get_contiguous_buf_infos()
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert pointers == [buffer.data_ptr() for buffer in buffers]
    assert lengths == [(8 + 2) * HEADS * width * 8 for width in (3, 3, 5, 5)]
    assert [length // page for length, page in zip(lengths, page_lengths, strict=True)] == [5] * 4


def test_hybrid_transfer_tables_are_apart_because_their_pages_are_numbered_apart() -> None:
    pool = swa_pool()
    full, state = pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()
    assert full == pool.full_kv_pool.get_contiguous_buf_infos()
    assert state == pool.swa_kv_pool.get_contiguous_buf_infos()
    assert len(full[0]) == 2 * len(FULL_LAYERS)
    assert len(state[0]) == 2 * len(SWA_LAYERS)
    assert not set(full[0]) & set(state[0])


def test_hybrid_sizes_are_the_sum_of_both_sub_pools() -> None:
    full = 2 * (8 + 2) * HEADS * 8
    swa = 3 * (6 + 2) * HEADS * 8
    assert swa_pool().get_kv_size_bytes() == ((full + swa) * K_WIDTH, (full + swa) * V_WIDTH)


# The hybrid pool


def test_layers_keep_their_rows_in_the_sub_pool_of_their_kind() -> None:
    pool = swa_pool()
    for local, layer in enumerate(FULL_LAYERS):
        assert pool.layers_mapping[layer] == (local, False)
        assert pool.get_key_buffer(layer).data_ptr() == pool.full_kv_pool.k_buffer[local].data_ptr()
    for local, layer in enumerate(SWA_LAYERS):
        assert pool.layers_mapping[layer] == (local, True)
        assert pool.get_value_buffer(layer).shape[0] == 6 + 2
        keys, values = pool.get_kv_buffer(layer)
        assert keys.data_ptr() == pool.swa_kv_pool.k_buffer[local].data_ptr()
        assert values.data_ptr() == pool.swa_kv_pool.v_buffer[local].data_ptr()


@pytest.mark.parametrize(("full", "swa"), [([0, 1], []), ([], [0, 1])])
def test_a_model_may_have_layers_of_one_kind_only(full: list[int], swa: list[int]) -> None:
    pool = swa_pool({3: 2}, full_attention_layer_ids=full, swa_attention_layer_ids=swa)
    fill(pool, 1, slots(3), first=1)
    row = 2 if swa else 3
    assert torch.equal(pool.get_key_buffer(1)[row], stamps(1, K_WIDTH, 1)[0])


def test_sliding_layers_may_have_other_heads_and_widths() -> None:
    pool = swa_pool(swa_head_num=4, swa_head_dim=6, swa_v_head_dim=7)
    assert pool.get_key_buffer(SWA_LAYERS[0]).shape == (8, 4, 6)
    assert pool.get_value_buffer(SWA_LAYERS[0]).shape == (8, 4, 7)
    assert pool.get_key_buffer(FULL_LAYERS[0]).shape == (10, HEADS, K_WIDTH)


def test_the_class_of_both_sub_pools_can_be_chosen() -> None:
    class Traced(MHATokenToKVPool):
        pass

    pool = swa_pool(token_to_kv_pool_class=Traced)
    assert isinstance(pool.full_kv_pool, Traced)
    assert isinstance(pool.swa_kv_pool, Traced)


def test_a_layer_of_both_kinds_is_rejected() -> None:
    with pytest.raises(GeometryError, match=r"\[1\]"):
        swa_pool(full_attention_layer_ids=[0, 1], swa_attention_layer_ids=[1, 2])


def test_a_layer_of_no_kind_is_an_error() -> None:
    with pytest.raises(GeometryError, match="layer 7"):
        swa_pool().get_key_buffer(7)


def test_the_registered_mapping_is_the_allocators_own_tensor() -> None:
    pool = swa_pool()
    mapping = mapping_of(pool, {})
    pool.register_mapping(mapping)
    assert pool.full_to_swa_index_mapping is mapping
    mapping[5] = 4
    assert pool.translate_loc_from_full_to_swa(slots(5)).tolist() == [4]


@pytest.mark.parametrize(
    "mapping",
    [
        torch.zeros(11, dtype=torch.int32),
        torch.zeros(11, 1, dtype=torch.int64),
        torch.zeros(11, dtype=torch.int64, device="meta"),
    ],
    ids=["narrow", "two dimensions", "other device"],
)
def test_a_mapping_that_cannot_be_indexed_is_not_registered(mapping: torch.Tensor) -> None:
    pool = swa_pool()
    with pytest.raises(IndexTensorError):
        pool.register_mapping(mapping)
    assert pool.full_to_swa_index_mapping is None


def test_translation_keeps_the_shape_and_maps_minus_one_to_itself() -> None:
    pool = swa_pool({4: 2, 5: 3})
    translated = pool.translate_loc_from_full_to_swa(torch.tensor([[4, 5], [6, -1]]))
    assert translated.tolist() == [[2, 3], [0, -1]]
    assert translated.dtype == torch.int64


def test_translation_without_a_mapping_says_what_is_missing() -> None:
    with pytest.raises(MappingError, match="register_mapping"):
        swa_pool().translate_loc_from_full_to_swa(slots(1))


def test_a_sliding_layer_is_written_at_the_peers_of_full_slots() -> None:
    pool = swa_pool({4: 3, 7: 2})
    fill(pool, SWA_LAYERS[1], slots(4, 7), first=1)
    keys = pool.get_key_buffer(SWA_LAYERS[1])
    assert torch.equal(keys[slots(3, 2)], stamps(2, K_WIDTH, 1))
    assert not keys[slots(0, 1, 4, 5, 6, 7)].any()
    assert not any(buffer.any() for buffer in pool.get_kv_buffer(SWA_LAYERS[0]))


def test_a_row_without_a_peer_reaches_no_row_that_can_be_lent() -> None:
    pool = swa_pool({4: 3})
    before = [buffer.clone() for buffer in pool.get_kv_buffer(SWA_LAYERS[0])]
    # 5 was evicted from the window; -1 is "no slot", whose translation would index the last row.
    fill(pool, SWA_LAYERS[0], slots(5, -1), first=1)
    for old, new in zip(before, pool.get_kv_buffer(SWA_LAYERS[0]), strict=True):
        assert torch.equal(old[1:], new[1:])


# Moves


def test_a_move_copies_every_layer_and_survives_overlap() -> None:
    pool = mha_pool()
    for layer in range(2):
        fill(pool, layer, slots(1, 2, 3), first=100 * layer + 1)
    pool.move_kv_cache(tgt_loc=slots(2, 3, 4), src_loc=slots(1, 2, 3))
    for layer in range(2):
        first = 100 * layer + 1
        assert torch.equal(pool.get_key_buffer(layer)[2:5], stamps(3, K_WIDTH, first))
        assert torch.equal(pool.get_value_buffer(layer)[2:5], stamps(3, V_WIDTH, first + 10_000))


def test_a_hybrid_move_copies_the_peers_where_both_slots_have_one() -> None:
    pool = swa_pool({2: 2, 3: 3, 6: 4, 8: 6})
    for layer in FULL_LAYERS + SWA_LAYERS:
        fill(pool, layer, slots(2, 3, 8), first=1_000 * layer + 1)
    swa_before = pool.get_key_buffer(SWA_LAYERS[0]).clone()
    # 2 -> 6: both have a peer; 3 -> 7: only the source; 5 -> 8: only the target.
    pool.move_kv_cache(tgt_loc=slots(6, 7, 8), src_loc=slots(2, 3, 5))
    full_keys = pool.get_key_buffer(FULL_LAYERS[0])
    assert torch.equal(full_keys[slots(6, 7, 8)], full_keys[slots(2, 3, 5)])
    expected = swa_before.clone()
    expected[4] = swa_before[2]
    assert torch.equal(pool.get_key_buffer(SWA_LAYERS[0]), expected)


@pytest.mark.parametrize("pool", [mha_pool(), swa_pool({})], ids=["mha", "swa"])
def test_a_move_of_unequal_lengths_is_rejected(pool: MHATokenToKVPool | SWAKVPool) -> None:
    with pytest.raises(GeometryError):
        pool.move_kv_cache(slots(1, 2), slots(3))

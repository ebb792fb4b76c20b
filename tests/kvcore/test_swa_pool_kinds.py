"""The hybrid pool over MHA, MLA and DSA sub-pools, a kind for each side: writes through the
mapping, host copies, moves, transfer tables, and arguments that a sub-pool may have of its own.

The hybrid pool over two MHA pools is in `test_pools.py`, the memory saver in
`test_memory_saver.py`.
"""

from itertools import product
from typing import Any

import pytest
import torch

from kvcore.errors import GeometryError, IndexTensorError
from kvcore.pools import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

FULL_LAYERS, SWA_LAYERS = [0, 3], [1, 2]
FP8 = torch.float8_e4m3fn
CLASSES = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool, "dsa": DSATokenToKVPool}
FULL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "mha": {"head_num": 2, "head_dim": 3, "v_head_dim": 5},
    "mla": {"kv_lora_rank": 5, "qk_rope_head_dim": 3},
    "dsa": {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "index_head_dim": 128, "kv_cache_dim": 6},
}
SWA_ARGUMENTS: dict[str, dict[str, Any]] = {
    "mha": {"head_num": 1, "head_dim": 4},
    "mla": {"kv_lora_rank": 2, "qk_rope_head_dim": 1},
    "dsa": {"kv_lora_rank": 3, "qk_rope_head_dim": 1, "index_head_dim": 256, "kv_cache_dim": 4},
}
KINDS = list(product(CLASSES, CLASSES))
PEERS = {2: 2, 3: 3, 6: 5, 7: 4, 8: 6}


def hybrid_pool(full: str, swa: str, **changes: Any) -> SWAKVPool:
    """8 full and 6 SWA slots at page size 2, with the mapping `PEERS` registered."""
    arguments: dict[str, Any] = {
        "size": 8,
        "size_swa": 6,
        "page_size": 2,
        "dtype": torch.int64,
        "head_num": 0,
        "head_dim": 0,
        "swa_attention_layer_ids": SWA_LAYERS,
        "full_attention_layer_ids": FULL_LAYERS,
        "device": "cpu",
        "full_kv_pool_class": CLASSES[full],
        "swa_kv_pool_class": CLASSES[swa],
        "full_kv_pool_kwargs": FULL_ARGUMENTS[full],
        "swa_kv_pool_kwargs": SWA_ARGUMENTS[swa],
    }
    pool = SWAKVPool(**(arguments | changes))
    mapping = torch.zeros(8 + 2 + 1, dtype=torch.int64)
    mapping[-1] = -1
    for slot, peer in PEERS.items():
        mapping[slot] = peer
    pool.register_mapping(mapping)
    return pool


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def stamps(count: int, width: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + count * width).reshape(count, width)


def fill(pool: SWAKVPool, loc: torch.Tensor, first: int) -> None:
    """Write every layer of the full slots `loc`, through the hybrid pool's own calls."""
    for layer in FULL_LAYERS + SWA_LAYERS:
        start = first + 1000 * layer
        keys, values = (buffer[0].numel() for buffer in pool.get_kv_buffer(layer))
        pool.set_kv_buffer(
            layer, loc, stamps(len(loc), keys, start), stamps(len(loc), values, start + 500)
        )
        sub_pool = pool.swa_kv_pool if layer in SWA_LAYERS else pool.full_kv_pool
        if isinstance(sub_pool, DSATokenToKVPool):
            keys = (stamps(len(loc), sub_pool.index_head_dim, start) % 251).to(torch.uint8)
            scales = stamps(len(loc), sub_pool.index_head_dim // 128, start).float()
            pool.set_index_k_scale_buffer(layer, loc, keys, scales)


def held(pool: MHATokenToKVPool | MLATokenToKVPool, rows: torch.Tensor) -> list[torch.Tensor]:
    """Copies of everything that rows of a sub-pool hold."""
    return [each.clone() for each in pool.get_cpu_copy(rows).buffers]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_each_side_is_of_its_own_kind_and_dimensions(full: str, swa: str) -> None:
    pool = hybrid_pool(full, swa)
    assert type(pool.full_kv_pool) is CLASSES[full]
    assert type(pool.swa_kv_pool) is CLASSES[swa]
    for sub_pool, arguments in (
        (pool.full_kv_pool, FULL_ARGUMENTS[full]),
        (pool.swa_kv_pool, SWA_ARGUMENTS[swa]),
    ):
        assert {name: vars(sub_pool)[name] for name in arguments} == arguments
        assert (sub_pool.page_size, sub_pool.dtype, sub_pool.layer_num) == (2, torch.int64, 2)
    assert (pool.full_kv_pool.size, pool.swa_kv_pool.size) == (8, 6)


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_a_write_lands_at_full_slots_and_at_their_peers(full: str, swa: str) -> None:
    pool, alone = hybrid_pool(full, swa), hybrid_pool(full, swa)
    fill(pool, slots(2, 7), 1)
    # The same rows, written into the SWA pool by its own numbers.
    alone.register_mapping(torch.arange(11))
    fill(alone, slots(2, 4), 1)
    assert same(held(pool.swa_kv_pool, slots(2, 4)), held(alone.swa_kv_pool, slots(2, 4)))
    assert not any(rows.any() for rows in held(pool.swa_kv_pool, slots(1, 3, 5, 6)))
    assert all(rows.any() for rows in held(pool.full_kv_pool, slots(2, 7)))
    assert not any(rows.any() for rows in held(pool.full_kv_pool, slots(1, 3, 4, 5, 6, 8)))


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_a_row_without_a_peer_reaches_no_row_that_can_be_lent(full: str, swa: str) -> None:
    pool = hybrid_pool(full, swa)
    fill(pool, slots(5, -1), 1)
    assert not any(rows.any() for rows in held(pool.swa_kv_pool, torch.arange(1, 8)))


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_a_host_copy_is_restored_bit_for_bit_where_old_and_new_slots_have_peers(
    full: str, swa: str
) -> None:
    pool = hybrid_pool(full, swa)
    fill(pool, slots(2, 3, 4, 8), 1)
    full_rows = held(pool.full_kv_pool, slots(2, 3, 4, 8))
    # 2 -> 6: both have a peer; 3 -> 1: only the old; 4 -> 7: only the new; 8 -> 3: both.
    swa_rows = held(pool.swa_kv_pool, slots(PEERS[2], PEERS[8]))
    copy = pool.get_cpu_copy(slots(2, 3, 4, 8))
    fill(pool, torch.arange(1, 9), 7)
    kept = held(pool.swa_kv_pool, slots(PEERS[2], PEERS[7], PEERS[8]))
    pool.load_cpu_copy(copy, slots(6, 1, 7, 3))
    assert same(held(pool.full_kv_pool, slots(6, 1, 7, 3)), full_rows)
    assert same(held(pool.swa_kv_pool, slots(PEERS[6], PEERS[3])), swa_rows)
    assert same(held(pool.swa_kv_pool, slots(PEERS[2], PEERS[7], PEERS[8])), kept)


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_a_move_takes_along_the_peers_where_both_slots_have_one(full: str, swa: str) -> None:
    pool = hybrid_pool(full, swa)
    fill(pool, slots(2, 3, 4), 1)
    full_rows = held(pool.full_kv_pool, slots(2, 3, 4))
    swa_row = held(pool.swa_kv_pool, slots(PEERS[2]))
    pool.move_kv_cache(tgt_loc=slots(6, 5, 7), src_loc=slots(2, 3, 4))
    assert same(held(pool.full_kv_pool, slots(6, 5, 7)), full_rows)
    assert same(held(pool.swa_kv_pool, slots(PEERS[6])), swa_row)
    assert not any(rows.any() for rows in held(pool.swa_kv_pool, slots(PEERS[7], PEERS[8])))


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_sizes_and_transfer_tables_are_those_of_the_sub_pools(full: str, swa: str) -> None:
    pool = hybrid_pool(full, swa)
    sides = (pool.full_kv_pool, pool.swa_kv_pool)
    assert sum(pool.get_kv_size_bytes()) == sum(sum(side.get_kv_size_bytes()) for side in sides)
    assert pool.get_contiguous_buf_infos() == pool.full_kv_pool.get_contiguous_buf_infos()
    assert pool.get_state_buf_infos() == pool.swa_kv_pool.get_contiguous_buf_infos()


@pytest.mark.parametrize(("full", "swa"), KINDS)
def test_fp8_is_stored_as_bytes_on_both_sides(full: str, swa: str) -> None:
    pool = hybrid_pool(full, swa, dtype=FP8)
    for layer in (FULL_LAYERS[0], SWA_LAYERS[0]):
        shapes = [buffer[:1].shape for buffer in pool.get_kv_buffer(layer)]
        pool.set_kv_buffer(layer, slots(7), *(torch.full(shape, 1.5) for shape in shapes))
        row = PEERS[7] if layer in SWA_LAYERS else 7
        for buffer in pool.get_kv_buffer(layer):
            assert buffer.dtype == FP8
            assert buffer[row].float().eq(1.5).all()
    for side in (pool.full_kv_pool, pool.swa_kv_pool):
        assert {buffer.dtype for buffer in side.slot_buffers()} == {torch.uint8}


# Calls of one kind


@pytest.mark.parametrize("layer", [FULL_LAYERS[1], SWA_LAYERS[1]])
def test_the_parts_of_a_latent_row_are_written_at_the_slots_of_the_layer(layer: int) -> None:
    pool, whole = hybrid_pool("mla", "dsa"), hybrid_pool("mla", "dsa")
    rank = FULL_ARGUMENTS["mla" if layer in FULL_LAYERS else "dsa"]["kv_lora_rank"]
    if layer in SWA_LAYERS:
        rank = SWA_ARGUMENTS["dsa"]["kv_lora_rank"]
    rows = stamps(2, pool.get_key_buffer(layer).shape[-1], 1)
    pool.set_mla_kv_buffer(layer, slots(6, 7), rows[:, :rank], rows[:, rank:])
    whole.set_kv_buffer(layer, slots(6, 7), rows, rows[:, :rank])
    assert torch.equal(pool.get_key_buffer(layer), whole.get_key_buffer(layer))


@pytest.mark.parametrize("layer", [FULL_LAYERS[1], SWA_LAYERS[1]])
def test_index_keys_of_a_batch_are_read_by_the_pages_of_the_layers_own_side(layer: int) -> None:
    pool = hybrid_pool("dsa", "dsa")
    fill(pool, slots(2, 3, 8), 1)
    pages = slots(1, 4) if layer in FULL_LAYERS else slots(1, 3)
    keys, scales = pool.get_index_k_scale_buffer(layer, slots(3), pages.view(1, 2), 3, 3)
    side = pool.full_kv_pool if layer in FULL_LAYERS else pool.swa_kv_pool
    assert isinstance(side, DSATokenToKVPool)
    expected = (stamps(3, side.index_head_dim, 1 + 1000 * layer) % 251).to(torch.uint8)
    assert torch.equal(keys, expected)
    expected = stamps(3, side.index_head_dim // 128, 1 + 1000 * layer).float()
    assert torch.equal(scales.view(torch.float32), expected)
    local = 1
    assert (
        pool.get_index_k_with_scale_buffer(layer).data_ptr()
        == side.index_k_with_scale_buffer[local].data_ptr()
    )


def test_a_call_for_another_kind_of_layer_names_both_kinds() -> None:
    pool = hybrid_pool("mla", "mha")
    with pytest.raises(GeometryError, match="layer 1 is kept in a MHATokenToKVPool"):
        pool.set_mla_kv_buffer(1, slots(2), stamps(1, 2, 1), stamps(1, 1, 1))
    with pytest.raises(GeometryError, match="expected a DSATokenToKVPool"):
        pool.get_index_k_with_scale_buffer(0)
    with pytest.raises(GeometryError, match="expected a DSATokenToKVPool"):
        pool.set_index_k_scale_buffer(0, slots(2), stamps(1, 128, 1), torch.ones(1))
    with pytest.raises(GeometryError, match="expected a DSATokenToKVPool"):
        pool.get_index_k_scale_buffer(0, slots(1), slots(1).view(1, 1), 1, 1)


def test_slots_of_a_rejected_write_are_named_by_the_call() -> None:
    pool = hybrid_pool("dsa", "dsa")
    for layer in (0, 1):
        with pytest.raises(IndexTensorError, match="set_mla_kv_buffer"):
            pool.set_mla_kv_buffer(layer, torch.ones(1), stamps(1, 4, 1), stamps(1, 2, 1))


# Arguments of the sub-pools


def test_arguments_for_heads_describe_the_side_that_has_none_of_its_own() -> None:
    pool = hybrid_pool("mla", "mha", swa_kv_pool_kwargs=None, head_num=2, head_dim=3, v_head_dim=4)
    assert pool.swa_kv_pool.get_key_buffer(0).shape == (8, 2, 3)
    assert pool.swa_kv_pool.get_value_buffer(0).shape == (8, 2, 4)
    assert isinstance(pool.full_kv_pool, MLATokenToKVPool)


def test_a_sub_pool_may_repeat_what_it_shares_as_the_fields_callers_do() -> None:
    repeated = {"page_size": 2, "device": torch.device("cpu"), "enable_memory_saver": False}
    pool = hybrid_pool("mla", "mla", full_kv_pool_kwargs=FULL_ARGUMENTS["mla"] | repeated)
    assert pool.full_kv_pool.page_size == 2
    assert not pool.enable_memory_saver


@pytest.mark.parametrize(
    "change", [{"page_size": 4}, {"dtype": torch.float32}, {"device": "meta"}, {"size": 4}]
)
def test_a_sub_pool_may_not_change_what_it_shares(change: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match=next(iter(change))):
        hybrid_pool("mla", "mla", swa_kv_pool_kwargs=SWA_ARGUMENTS["mla"] | change)


@pytest.mark.parametrize("name", ["swa_head_num", "swa_head_dim", "swa_v_head_dim", "v_head_dim"])
def test_an_argument_that_would_reach_no_sub_pool_is_refused(name: str) -> None:
    with pytest.raises(GeometryError, match="reach no sub-pool"):
        hybrid_pool("mha", "mha", **{name: 2})


def test_latent_layers_cannot_be_described_by_heads() -> None:
    with pytest.raises(GeometryError, match="no heads"):
        hybrid_pool("mla", "mla", full_kv_pool_kwargs=None)

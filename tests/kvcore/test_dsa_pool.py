"""The DSA pool: index keys and scales in page rows beside the latent rows, packed rows, and what a
host copy and a move must carry.

Every token has its own key bytes and scale, so one in a wrong place shows.
"""

from typing import Any

import pytest
import torch

from kvcore.errors import GeometryError, IndexTensorError, KVCacheError
from kvcore.pools import DSATokenToKVPool, MLATokenToKVPool
from kvcore.pools.packing import FP8, pack, packed_width, unpack

RANK, ROPE, DIM = 4, 2, 128


def dsa_pool(size: int = 8, page_size: int = 2, **changes: Any) -> DSATokenToKVPool:
    arguments: dict[str, Any] = {
        "kv_lora_rank": RANK,
        "dtype": torch.int64,
        "qk_rope_head_dim": ROPE,
        "layer_num": 2,
        "device": "cpu",
        "index_head_dim": DIM,
        "enable_memory_saver": False,
    } | changes
    arguments.setdefault("kv_cache_dim", arguments["kv_lora_rank"] + arguments["qk_rope_head_dim"])
    return DSATokenToKVPool(size, page_size, **arguments)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def index_of(tokens: torch.Tensor, layer: int, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Key bytes and scales that no other token of any layer has."""
    number = tokens + 100 * layer
    keys = (number[:, None] * 7 + torch.arange(dim)).remainder(251).to(torch.uint8)
    scales = number[:, None] + torch.arange(dim // 128) / 4 + 0.5
    return keys, scales.float()


def fill(pool: DSATokenToKVPool, loc: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write every layer of the slots `loc` with the rows and index keys of `tokens`."""
    for layer, skips in enumerate(pool.skip_topk_layers):
        rows = tokens.view(-1, 1, 1) * 1000 + 100 * layer + torch.arange(pool.kv_cache_dim)
        pool.set_kv_buffer(layer, loc, rows)
        if not skips:
            pool.set_index_k_scale_buffer(layer, loc, *index_of(tokens, layer, pool.index_head_dim))


def read(pool: DSATokenToKVPool, loc: torch.Tensor) -> list[torch.Tensor]:
    """Everything that the slots `loc` hold, byte by byte from the buffers: the law, in short."""
    held = [buffer[loc] for buffer in pool.kv_buffer]
    dim, scale = pool.index_head_dim, pool.index_head_dim // 128 * 4
    for buffer in pool.index_k_with_scale_buffer:
        for slot in loc.tolist() if len(buffer) else []:
            page = buffer[slot // pool.page_size]
            offset, keys_end = slot % pool.page_size, pool.page_size * dim
            held.append(page[offset * dim : (offset + 1) * dim])
            held.append(page[keys_end + offset * scale : keys_end + (offset + 1) * scale])
    return held


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


# Geometry


@pytest.mark.parametrize(("page_size", "pages"), [(1, 9), (2, 5), (16, 2)])
def test_index_keys_have_a_row_a_page_and_the_padding_page(page_size: int, pages: int) -> None:
    pool = dsa_pool(size=8, page_size=page_size)
    for buffer in pool.index_k_with_scale_buffer:
        assert buffer.shape == (pages, page_size * (DIM + 4))
        assert buffer.dtype == torch.uint8
        assert not buffer.any()
    # The last slot that a row exists for has a page.
    assert (pool.rows - 1) // page_size == pages - 1


def test_positional_arguments_stand_in_the_fields_order() -> None:
    # The rank comes before the dtype here, and after it in the MLA pool.
    pool = DSATokenToKVPool(
        8, 2, RANK, torch.float32, ROPE, 1, "cpu", DIM, False, RANK + ROPE, 4, 4, 10
    )
    assert (pool.kv_lora_rank, pool.dtype, pool.qk_rope_head_dim) == (RANK, torch.float32, ROPE)
    assert (pool.index_head_dim, pool.kv_cache_dim) == (DIM, RANK + ROPE)
    assert (pool.start_layer, pool.end_layer, pool.index_buf_size) == (4, 4, 10)
    assert pool.get_index_k_with_scale_buffer(4).shape[0] == 6


def test_dtype_and_rank_in_the_other_order_are_told_apart() -> None:
    with pytest.raises(GeometryError, match="kv_lora_rank comes before dtype"):
        dsa_pool(kv_lora_rank=RANK, dtype=7)


def test_layers_that_reuse_the_last_top_k_have_no_rows() -> None:
    pool = dsa_pool(layer_num=3, skip_topk_layers=[False, True, False])
    assert [len(buffer) for buffer in pool.index_k_with_scale_buffer] == [5, 0, 5]
    assert pool.get_index_k_with_scale_buffer(1).shape == (0, 2 * (DIM + 4))
    with pytest.raises(GeometryError, match="reuses the top-k"):
        pool.set_index_k_scale_buffer(1, slots(1), *index_of(slots(1), 1))


def test_every_block_of_a_wide_index_key_has_a_scale() -> None:
    pool = dsa_pool(index_head_dim=256)
    assert pool.index_k_with_scale_buffer[0].shape == (5, 2 * (256 + 8))
    fill(pool, slots(3, 6), slots(1, 2))
    keys, scales = index_of(slots(1, 2), 0, 256)
    held = read(pool, slots(3, 6))[2:6]
    assert torch.equal(held[0], keys[0])
    assert torch.equal(held[1].view(torch.float32), scales[0])
    assert torch.equal(held[2], keys[1])
    assert torch.equal(held[3].view(torch.float32), scales[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"index_head_dim": 64},
        {"index_head_dim": 0},
        {"index_buf_size": 7},
        {"skip_topk_layers": [True]},
        {"kv_cache_dim": RANK + ROPE + 1},
        {"dtype": FP8, "kv_cache_dim": packed_width(RANK, ROPE) + 1},
        {"dtype": torch.bfloat16, "kv_lora_rank": 128, "kv_cache_dim": packed_width(128, ROPE)},
    ],
)
def test_sizes_that_contradict_each_other_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match="DSATokenToKVPool"):
        dsa_pool(**wrong)


# Writing and reading index keys


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_keys_of_a_page_come_first_and_then_its_scales(page_size: int) -> None:
    pool = dsa_pool(page_size=page_size)
    loc = slots(6, 3, 5)
    fill(pool, loc, slots(10, 11, 12))
    keys, scales = index_of(slots(10, 11, 12), 1)
    buffer = pool.get_index_k_with_scale_buffer(1)
    for token, slot in enumerate(loc.tolist()):
        page, offset = buffer[slot // page_size], slot % page_size
        assert torch.equal(page[offset * DIM :][:DIM], keys[token])
        own = page[page_size * DIM + offset * 4 :][:4]
        assert torch.equal(own.clone().view(torch.float32), scales[token])


def test_a_written_index_key_reaches_no_other_token() -> None:
    pool = dsa_pool()
    fill(pool, slots(1, 2, 3, 4), slots(1, 2, 3, 4))
    before = [row.clone() for row in read(pool, slots(1, 2, 4))]
    fill(pool, slots(3), slots(50))
    assert same(read(pool, slots(1, 2, 4)), before)


def test_keys_keep_their_bits_whatever_eight_bit_type_they_come_in() -> None:
    pool, other = dsa_pool(), dsa_pool()
    keys, scales = index_of(slots(9), 0)
    pool.set_index_k_scale_buffer(0, slots(3).int(), keys, scales)
    other.set_index_k_scale_buffer(0, slots(3), keys.view(FP8), scales[:, 0])
    assert torch.equal(*(each.index_k_with_scale_buffer[0] for each in (pool, other)))


def test_index_minus_one_reaches_no_row_that_can_be_lent() -> None:
    pool = dsa_pool()
    pool.set_index_k_scale_buffer(0, slots(-1), *index_of(slots(9), 0))
    assert not any(row.any() for row in read(pool, torch.arange(1, pool.rows)))


@pytest.mark.parametrize(
    ("loc", "keys", "scales", "error"),
    [
        (torch.tensor([1.0]), torch.ones(1, DIM).to(FP8), torch.ones(1), IndexTensorError),
        (slots(1, 2), torch.ones(1, DIM).to(FP8), torch.ones(2), GeometryError),
        (slots(1), torch.ones(1, DIM).to(FP8), torch.ones(2), GeometryError),
        (slots(1), torch.ones(1, DIM - 1).to(FP8), torch.ones(1), GeometryError),
        (slots(1), torch.ones(1, DIM), torch.ones(1), GeometryError),
        (slots(1), torch.ones(1, DIM).to(FP8), torch.ones(1).double(), GeometryError),
    ],
    ids=["float slots", "few keys", "many scales", "narrow", "wide dtype", "double scales"],
)
def test_a_rejected_write_changes_nothing(
    loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, error: type[KVCacheError]
) -> None:
    pool = dsa_pool()
    with pytest.raises(error, match="set_index_k_scale_buffer"):
        pool.set_index_k_scale_buffer(0, loc, keys, scales)
    assert not any(buffer.any() for buffer in pool.index_k_with_scale_buffer)


def test_keys_of_a_row_are_read_in_token_order_from_scattered_pages() -> None:
    pool = dsa_pool()
    row = slots(6, 7, 2, 3, 4)
    fill(pool, row, slots(1, 2, 3, 4, 5))
    keys, scales = index_of(slots(1, 2, 3, 4, 5), 1)
    pages = slots(3, 1, 2)
    assert torch.equal(pool.get_index_k_continuous(1, 5, pages), keys)
    read_scales = pool.get_index_k_scale_continuous(1, 5, pages)
    assert torch.equal(read_scales.view(torch.float32), scales)
    with pytest.raises(GeometryError, match="7 tokens in 3 pages"):
        pool.get_index_k_continuous(1, 7, pages)


def test_keys_of_a_batch_are_read_one_sequence_after_the_other() -> None:
    pool = dsa_pool()
    fill(pool, slots(6, 7, 2, 4, 5, 8), slots(1, 2, 3, 4, 5, 6))
    pages = slots(3, 1, 2, 4).view(2, 2)
    keys, scales = pool.get_index_k_scale_buffer(0, slots(3, 3), pages, 6, 3)
    expected_keys, expected_scales = index_of(slots(1, 2, 3, 4, 5, 6), 0)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(scales.view(torch.float32), expected_scales)
    with pytest.raises(GeometryError, match="5 tokens in 2 pages"):
        pool.get_index_k_scale_buffer(0, slots(5, 1), pages, 6, 5)
    with pytest.raises(GeometryError, match="a row of pages for each"):
        pool.get_index_k_scale_buffer(0, slots(3), pages, 3, 3)


# Host copies


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("skips", [[False, False], [False, True]], ids=["all layers", "one skips"])
def test_a_host_copy_of_any_slots_carries_rows_keys_and_scales(
    page_size: int, skips: list[bool]
) -> None:
    pool = dsa_pool(size=32, page_size=page_size, skip_topk_layers=skips)
    everywhere = torch.arange(1, pool.rows)
    fill(pool, everywhere, everywhere)
    old, new = slots(7, 30, 2, 19), slots(20, 1, 31, 8)
    expected = [row.clone() for row in read(pool, old)]
    copy = pool.get_cpu_copy(old)
    fill(pool, everywhere, everywhere + 40)
    others = everywhere[~torch.isin(everywhere, new)]
    untouched = [row.clone() for row in read(pool, others)]
    pool.load_cpu_copy(copy, new)
    assert same(read(pool, new), expected)
    assert same(read(pool, others), untouched)


def test_a_copy_without_index_keys_is_refused_whole() -> None:
    latent = MLATokenToKVPool(8, 2, torch.int64, RANK, ROPE, 2, "cpu", False)
    pool = dsa_pool()
    with pytest.raises(GeometryError, match="buffers"):
        pool.load_cpu_copy(latent.get_cpu_copy(slots(1)), slots(1))
    assert not any(row.any() for row in read(pool, slots(1)))


# Moves


@pytest.mark.parametrize(
    ("targets", "sources"),
    [
        (slots(6, 7, 2, 3), slots(2, 3, 4, 5)),
        (slots(7, 6, 2, 3), slots(2, 3, 4, 5)),
        (slots(3, 4), slots(2, 3)),
        (
            slots(
                8,
            ),
            slots(
                5,
            ),
        ),
        (slots(), slots()),
    ],
    ids=["whole pages", "a page out of order", "across pages", "one token", "nothing"],
)
@pytest.mark.parametrize("page_size", [1, 2])
def test_a_move_carries_rows_keys_and_scales_and_nothing_else(
    page_size: int, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    pool = dsa_pool(page_size=page_size, skip_topk_layers=[True, False])
    everywhere = torch.arange(1, pool.rows)
    fill(pool, everywhere, everywhere)
    expected = [row.clone() for row in read(pool, sources)]
    others = everywhere[~torch.isin(everywhere, targets)]
    untouched = [row.clone() for row in read(pool, others)]
    pool.move_kv_cache(targets, sources)
    assert same(read(pool, targets), expected)
    assert same(read(pool, others), untouched)


@pytest.mark.parametrize(
    ("targets", "sources", "pages"),
    [
        (slots(6, 7, 2, 3), slots(2, 3, 4, 5), ([3, 1], [1, 2])),
        (slots(6, 7, 3, 2), slots(2, 3, 4, 5), None),
        (slots(6, 7), slots(3, 4), None),
        (slots(6), slots(2), None),
    ],
)
def test_whole_pages_are_moved_as_page_rows(
    targets: torch.Tensor, sources: torch.Tensor, pages: tuple[list[int], list[int]] | None
) -> None:
    seen = dsa_pool()._whole_pages(targets, sources)
    assert (None if seen is None else (seen[0].tolist(), seen[1].tolist())) == pages


# Sizes and transfer tables


def test_index_keys_count_as_memory_and_have_a_transfer_of_their_own() -> None:
    pool = dsa_pool(layer_num=3, skip_topk_layers=[False, True, False])
    page_bytes = 2 * (DIM + 4)
    latent = 3 * (8 + 2) * (RANK + ROPE) * 8
    assert pool.get_kv_size_bytes() == (latent + 2 * 5 * page_bytes, 0)
    assert pool.get_contiguous_buf_infos()[0] == [each.data_ptr() for each in pool.kv_buffer]
    pointers, lengths, page_lengths = pool.get_state_buf_infos()
    assert pointers == [each.data_ptr() for each in pool.index_k_with_scale_buffer]
    assert lengths == [5 * page_bytes, 0, 5 * page_bytes]
    assert page_lengths == [page_bytes, 0, page_bytes]


# Packed rows


def test_packed_rows_are_as_wide_as_the_kernels_expect() -> None:
    # DeepSeek V3.2: 512 bytes, four float32 scales, 64 bfloat16.
    assert packed_width(512, 64) == 656


def test_a_block_is_scaled_to_the_whole_range_of_fp8() -> None:
    nope = torch.cat([torch.full((1, 128), -3.0), torch.zeros(1, 128)], dim=1)
    rope = torch.tensor([[0.1, 7.0]]).bfloat16()
    rows = pack(nope, rope)
    assert rows.shape == (1, packed_width(256, 2))
    assert rows[:, :128].contiguous().view(FP8).float().eq(-448).all()
    back, tail = unpack(rows, 256)
    assert torch.allclose(back, nope)
    assert torch.equal(tail, rope)


def test_quantised_rows_come_back_within_the_precision_of_fp8() -> None:
    pool = dsa_pool(
        kv_lora_rank=256, qk_rope_head_dim=4, dtype=FP8, kv_cache_dim=packed_width(256, 4)
    )
    assert pool.dsa_kv_cache_store_fp8
    assert pool.kv_buffer[0].shape == (10, 1, packed_width(256, 4))
    generator = torch.Generator().manual_seed(1)
    nope = torch.randn(3, 1, 256, generator=generator).bfloat16()
    rope = torch.randn(3, 1, 4, generator=generator).bfloat16()
    pool.set_mla_kv_buffer(1, slots(2, 8, 5), nope, rope)
    seen, tail = pool.get_mla_kv_buffer(1, slots(2, 8, 5), torch.float32)
    # Three mantissa bits, relative to the largest of a block near zero.
    error = (seen - nope.float()).abs()
    largest = nope.float().abs().amax()
    assert (error <= nope.float().abs() / 16 + largest / 448).all()
    assert torch.equal(tail, rope.float())
    assert not pool.kv_buffer[1][slots(0, 1, 3, 4, 6, 7, 9)].any()


def test_whole_rows_cannot_be_written_where_rows_are_packed() -> None:
    pool = dsa_pool(kv_lora_rank=128, dtype=FP8, kv_cache_dim=packed_width(128, ROPE))
    with pytest.raises(GeometryError, match="set_mla_kv_buffer"):
        pool.set_kv_buffer(0, slots(1), torch.zeros(1, 1, pool.kv_cache_dim))


def test_unpacked_fp8_rows_are_stored_as_bytes() -> None:
    pool = dsa_pool(dtype=FP8)
    pool.set_mla_kv_buffer(0, slots(1), torch.ones(1, 1, RANK), torch.ones(1, 1, ROPE))
    assert not pool.dsa_kv_cache_store_fp8
    assert pool.kv_buffer[0].dtype == torch.uint8
    assert pool.get_key_buffer(0)[1].float().eq(1).all()


def test_no_two_tokens_of_these_tests_have_the_same_index_key() -> None:
    keys = [index_of(slots(token), layer)[0] for layer in (0, 1) for token in range(90)]
    assert len({tuple(key.flatten().tolist()) for key in keys}) == len(keys)

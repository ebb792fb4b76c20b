"""The MLA pool: whole rows and their two parts, the value as a view, host copies, moves.

Every written row carries numbers that occur nowhere else, so a row in a wrong place shows.
"""

from typing import Any

import pytest
import torch

from kvcore.errors import GeometryError, IndexTensorError, KVCacheError
from kvcore.pools import MHATokenToKVPool, MLATokenToKVPool

RANK, ROPE = 5, 3
FP8_TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def mla_pool(size: int = 8, page_size: int = 2, **changes: Any) -> MLATokenToKVPool:
    arguments: dict[str, Any] = {
        "dtype": torch.int64,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return MLATokenToKVPool(size, page_size, **(arguments | changes))


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def stamps(count: int, first: int, width: int = RANK + ROPE) -> torch.Tensor:
    """`[count, 1, width]` of numbers from `first` on, no two alike."""
    return torch.arange(first, first + count * width).reshape(count, 1, width)


# Geometry


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_one_buffer_a_layer_has_a_row_for_each_slot_and_the_padding_page(page_size: int) -> None:
    pool = mla_pool(size=32, page_size=page_size, layer_num=3)
    assert [buffer.shape for buffer in pool.kv_buffer] == [(32 + page_size, 1, RANK + ROPE)] * 3
    assert not any(buffer.any() for buffer in pool.kv_buffer)
    assert pool.kv_cache_dim == RANK + ROPE


def test_positional_arguments_stand_in_the_fields_order() -> None:
    pool = MLATokenToKVPool(8, 2, torch.float32, RANK, ROPE, 3, "cpu", False, 4, 6)
    assert (pool.size, pool.page_size, pool.dtype) == (8, 2, torch.float32)
    assert (pool.kv_lora_rank, pool.qk_rope_head_dim, pool.layer_num) == (RANK, ROPE, 3)
    assert (pool.device, pool.start_layer, pool.end_layer) == ("cpu", 4, 6)


@pytest.mark.parametrize("wrong", [{"kv_lora_rank": 0}, {"qk_rope_head_dim": -1}, {"size": -1}])
def test_sizes_that_no_buffer_can_have_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(GeometryError):
        mla_pool(**wrong)


# Writing and reading


def test_the_value_is_a_view_of_the_first_columns_of_the_row() -> None:
    pool = mla_pool()
    pool.set_kv_buffer(1, slots(5, 2), stamps(2, 1))
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys[slots(5, 2)], stamps(2, 1))
    assert torch.equal(values, keys[..., :RANK])
    assert values.data_ptr() == keys.data_ptr()


def test_a_written_row_reaches_no_other_row_and_no_other_layer() -> None:
    pool = mla_pool()
    pool.set_kv_buffer(1, slots(5), stamps(1, 1))
    expected = torch.zeros_like(pool.get_key_buffer(1))
    expected[5] = stamps(1, 1)[0]
    assert torch.equal(pool.get_key_buffer(1), expected)
    assert not pool.get_key_buffer(0).any()


def test_the_value_argument_is_ignored_as_in_the_field() -> None:
    pool = mla_pool()
    pool.set_kv_buffer(0, slots(3), stamps(1, 1), torch.full((7, 9), 99))
    assert torch.equal(pool.get_key_buffer(0)[3], stamps(1, 1)[0])


@pytest.mark.parametrize("flat", [False, True])
def test_a_row_written_in_two_parts_is_the_row_written_whole(flat: bool) -> None:
    whole, parts = mla_pool(), mla_pool()
    rows = stamps(2, 1)
    nope, rope = rows[..., :RANK], rows[..., RANK:]
    whole.set_kv_buffer(0, slots(4, 7), rows.flatten(1) if flat else rows)
    if flat:
        nope, rope = nope.flatten(1), rope.flatten(1)
    parts.set_mla_kv_buffer(0, slots(4, 7).int(), nope, rope)
    assert torch.equal(whole.get_key_buffer(0), parts.get_key_buffer(0))


def test_a_model_without_a_rotated_part_writes_none() -> None:
    pool = mla_pool(qk_rope_head_dim=0)
    pool.set_mla_kv_buffer(0, slots(4), stamps(1, 1, RANK), None)
    nope, rope = pool.get_mla_kv_buffer(0, slots(4))
    assert torch.equal(nope, stamps(1, 1, RANK))
    assert rope.shape == (1, 1, 0)


def test_the_two_parts_are_read_back_in_the_asked_dtype() -> None:
    pool = mla_pool()
    pool.set_kv_buffer(0, slots(2, 6), stamps(2, 1))
    nope, rope = pool.get_mla_kv_buffer(0, slots(6, 2), dst_dtype=torch.float32)
    expected = stamps(2, 1).flip(0).float()
    assert torch.equal(nope, expected[..., :RANK])
    assert torch.equal(rope, expected[..., RANK:])


@pytest.mark.parametrize("dtype", FP8_TYPES)
def test_fp8_is_stored_as_bytes_and_read_as_fp8(dtype: torch.dtype) -> None:
    pool = mla_pool(dtype=dtype)
    pool.set_kv_buffer(0, slots(3), torch.full((1, 1, RANK + ROPE), 1.5))
    assert pool.kv_buffer[0].dtype == torch.uint8
    for buffer in pool.get_kv_buffer(0):
        assert buffer.dtype == dtype
        assert buffer[3].float().eq(1.5).all()


def test_rows_of_another_dtype_are_scaled_and_cast_without_touching_the_callers_tensor() -> None:
    pool = mla_pool(dtype=torch.float32)
    rows = torch.full((1, 1, RANK + ROPE), 6.0, dtype=torch.float64)
    pool.set_kv_buffer(0, slots(1), rows, None, 2.0, 3.0)
    assert pool.get_key_buffer(0)[1].eq(3.0).all()
    assert rows.eq(6.0).all()


def test_index_minus_one_reaches_no_row_that_can_be_lent() -> None:
    pool = mla_pool()
    pool.set_kv_buffer(0, slots(-1), stamps(1, 1))
    assert not pool.get_key_buffer(0)[1:].any()


@pytest.mark.parametrize(
    ("loc", "rows", "error"),
    [
        (torch.tensor([1.0]), stamps(1, 1), IndexTensorError),
        (torch.tensor([[1]]), stamps(1, 1), IndexTensorError),
        (slots(1, 2), stamps(1, 1), GeometryError),
        (slots(1), stamps(1, 1, RANK), GeometryError),
    ],
    ids=["float", "two dimensions", "too few rows", "half a row"],
)
def test_a_rejected_write_changes_nothing(
    loc: torch.Tensor, rows: torch.Tensor, error: type[KVCacheError]
) -> None:
    pool = mla_pool()
    with pytest.raises(error, match="set_kv_buffer"):
        pool.set_kv_buffer(0, loc, rows)
    assert not pool.get_key_buffer(0).any()


def test_a_part_of_a_wrong_width_is_named() -> None:
    pool = mla_pool()
    with pytest.raises(GeometryError, match="set_mla_kv_buffer: rope part"):
        pool.set_mla_kv_buffer(0, slots(1), stamps(1, 1, RANK), stamps(1, 1, RANK))
    assert not pool.get_key_buffer(0).any()


def test_a_layer_that_the_pool_does_not_hold_is_an_error() -> None:
    with pytest.raises(GeometryError, match="layer 2"):
        mla_pool().set_mla_kv_buffer(2, slots(1), stamps(1, 1, RANK), stamps(1, 1, ROPE))


# Sizes, transfer tables, moves, host copies


def test_the_bytes_are_counted_once_though_keys_and_values_share_them() -> None:
    pool = mla_pool(dtype=torch.bfloat16)
    assert pool.get_kv_size_bytes() == (2 * (8 + 2) * (RANK + ROPE) * 2, 0)
    pointers, lengths, page_lengths = pool.get_contiguous_buf_infos()
    assert pointers == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert sum(lengths) == sum(pool.get_kv_size_bytes())
    assert page_lengths == [2 * (RANK + ROPE) * 2] * 2


def test_a_move_copies_every_layer_and_survives_overlap() -> None:
    pool = mla_pool()
    for layer in range(2):
        pool.set_kv_buffer(layer, slots(1, 2, 3), stamps(3, 100 * layer + 1))
    pool.move_kv_cache(tgt_loc=slots(2, 3, 4), src_loc=slots(1, 2, 3))
    for layer in range(2):
        assert torch.equal(pool.get_key_buffer(layer)[2:5], stamps(3, 100 * layer + 1))


@pytest.mark.parametrize("dtype", [torch.int64, *FP8_TYPES])
def test_a_host_copy_survives_others_in_the_old_slots(dtype: torch.dtype) -> None:
    pool = mla_pool(dtype=dtype)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    expected = [buffer[slots(7, 2, 5)].clone() for buffer in pool.kv_buffer]
    copy = pool.get_cpu_copy(slots(7, 2, 5))
    for buffer in pool.kv_buffer:
        buffer.fill_(99)
    pool.load_cpu_copy(copy, slots(1, 8, 3))
    for buffer, rows in zip(pool.kv_buffer, expected, strict=True):
        assert torch.equal(buffer[slots(1, 8, 3)], rows)
        assert buffer[slots(0, 2, 4, 5, 6, 7)].eq(99).all()


def test_a_copy_of_another_kind_of_pool_is_refused() -> None:
    other = MHATokenToKVPool(8, 2, torch.int64, 1, RANK + ROPE, 1, "cpu", False)
    pool = mla_pool(layer_num=2, qk_rope_head_dim=ROPE + 1)
    with pytest.raises(GeometryError, match="buffers"):
        pool.load_cpu_copy(other.get_cpu_copy(slots(1)), slots(1))
    assert not any(buffer.any() for buffer in pool.kv_buffer)

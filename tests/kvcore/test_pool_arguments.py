"""What pools of every kind refuse before the first row is written, and where slot -1 leads: to the
padding row and never to the last live one.

Every element of every buffer starts as a number of its own, so a row in a wrong place shows.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kvcore.errors import GeometryError, IndexTensorError, InvalidSlotError
from kvcore.pools import (
    DSATokenToKVPool,
    HiSparseKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
)

SIZE, PAGE, LAST = 8, 2, 9
FULL_LAYER, SWA_LAYER = 0, 1
LATENT: dict[str, Any] = {"kv_lora_rank": 4, "qk_rope_head_dim": 2}
SPARSE: dict[str, Any] = LATENT | {"index_head_dim": 128, "kv_cache_dim": 6}
SHARED: dict[str, Any] = {
    "size": SIZE,
    "page_size": PAGE,
    "dtype": torch.float32,
    "device": "cpu",
    "enable_memory_saver": False,
}


def identity_mapping() -> torch.Tensor:
    """Every slot is its own peer, and -1 leads to -1."""
    mapping = torch.arange(SIZE + PAGE + 1)
    mapping[-1] = -1
    return mapping


def hybrid_pool(kind: type[Any], arguments: dict[str, Any]) -> SWAKVPool:
    pool = SWAKVPool(
        **SHARED,
        size_swa=SIZE,
        head_num=0,
        head_dim=0,
        swa_attention_layer_ids=[SWA_LAYER],
        full_attention_layer_ids=[FULL_LAYER],
        token_to_kv_pool_class=kind,
        full_kv_pool_kwargs=arguments,
        swa_kv_pool_kwargs=arguments,
    )
    pool.register_mapping(identity_mapping())
    return pool


def make(name: str) -> Any:
    """A pool with an own number in every element."""
    if name == "mha":
        pool: Any = MHATokenToKVPool(**SHARED, head_num=1, head_dim=2, layer_num=2)
    elif name == "mla":
        pool = MLATokenToKVPool(**SHARED, **LATENT, layer_num=2)
    elif name == "dsa":
        pool = DSATokenToKVPool(**SHARED, **SPARSE, layer_num=2)
    elif name == "hisparse":
        pool = HiSparseKVPool(**SHARED, **LATENT, layer_num=2, host_to_device_ratio=1)
        pool.register_mapping(identity_mapping())
    elif name == "swa over mha":
        pool = hybrid_pool(MHATokenToKVPool, {"head_num": 1, "head_dim": 2})
    else:
        pool = hybrid_pool(DSATokenToKVPool, SPARSE)
    for first, buffer in enumerate(buffers(pool)):
        numbers = torch.arange(buffer.numel()) + 1000 * first
        buffer.copy_(
            numbers.remainder(251 if buffer.dtype == torch.uint8 else 1 << 20).view_as(buffer)
        )
    return pool


def buffers(pool: Any) -> list[torch.Tensor]:
    sides = [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]
    found: list[torch.Tensor] = []
    for side in sides:
        found += side.slot_buffers()
        found += side.index_k_with_scale_buffer if isinstance(side, DSATokenToKVPool) else []
    return found


def content(pool: Any) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in buffers(pool)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


POOLS = ["mha", "mla", "dsa", "hisparse", "swa over mha", "swa over dsa"]

HEADS, LATENT_ROWS = ((1, 2), (1, 2)), ((1, 6),)
LATENT_PARTS, INDEX_PARTS = ((1, 4), (1, 2)), ((128,), (1,))
SETTERS: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = [
    ("mha", "set_kv_buffer", HEADS),
    ("swa over mha", "set_kv_buffer", HEADS),
    *((name, "set_kv_buffer", LATENT_ROWS) for name in ("mla", "dsa", "hisparse")),
    *(
        (name, "set_mla_kv_buffer", LATENT_PARTS)
        for name in ("mla", "dsa", "hisparse", "swa over dsa")
    ),
    *((name, "set_index_k_scale_buffer", INDEX_PARTS) for name in ("dsa", "swa over dsa")),
]
"""Pool, setter, and the shapes of the parts that a token has there."""


def parts_of(setter: str, shapes: tuple[tuple[int, ...], ...], count: int) -> list[Any]:
    """Good parts for `count` tokens."""
    parts = [torch.ones(count, *shape) for shape in shapes]
    if setter == "set_index_k_scale_buffer":
        parts[0] = parts[0].to(torch.uint8)
    return parts


def wrong_parts(part: torch.Tensor) -> dict[str, Any]:
    return {
        "on another device": part.to("meta"),
        "a list": part.tolist(),
        "too wide": torch.cat([part, part], dim=-1),
        "too many": torch.cat([part, part]),
        "complex": part.to(torch.complex64),
    }


@pytest.mark.parametrize("layer", [FULL_LAYER, SWA_LAYER])
@pytest.mark.parametrize(("name", "setter", "shapes"), SETTERS)
def test_no_token_is_written_by_half(
    name: str, setter: str, shapes: tuple[tuple[int, ...], ...], layer: int
) -> None:
    pool = make(name)
    before = content(pool)
    write = getattr(pool, setter)
    for position in range(len(shapes)):
        good = parts_of(setter, shapes, 2)
        for wrong in wrong_parts(good[position]).values():
            parts = [*good[:position], wrong, *good[position + 1 :]]
            with pytest.raises((GeometryError, IndexTensorError), match=setter):
                write(layer, slots(4, 5), *parts)
    assert same(content(pool), before)
    write(layer, slots(4, 5), *parts_of(setter, shapes, 2))
    assert not same(content(pool), before)


@pytest.mark.parametrize("beyond", [99, -2])
@pytest.mark.parametrize("layer", [FULL_LAYER, SWA_LAYER])
@pytest.mark.parametrize(("name", "setter", "shapes"), SETTERS)
def test_a_slot_beyond_the_pool_is_refused_before_the_others_are_written(
    name: str, setter: str, shapes: tuple[tuple[int, ...], ...], layer: int, beyond: int
) -> None:
    pool = make(name)
    before = content(pool)
    with pytest.raises(InvalidSlotError, match=str(beyond)):
        getattr(pool, setter)(layer, slots(4, beyond), *parts_of(setter, shapes, 2))
    assert same(content(pool), before)


@pytest.mark.parametrize("name", POOLS)
def test_moves_and_host_copies_beyond_the_pool_change_nothing(name: str) -> None:
    pool = make(name)
    before = content(pool)
    copy = pool.get_cpu_copy(slots(4, 5))
    for call in (
        lambda: pool.move_kv_cache(slots(4, 99), slots(5, 6)),
        lambda: pool.move_kv_cache(slots(4, 5), slots(6, 99)),
        lambda: pool.get_cpu_copy(slots(4, 99)),
        lambda: pool.load_cpu_copy(copy, slots(6, 99)),
    ):
        with pytest.raises(InvalidSlotError, match="99"):
            call()
    assert same(content(pool), before)


@pytest.mark.parametrize("name", POOLS)
def test_slot_minus_one_is_the_padding_row_in_moves_and_host_copies(name: str) -> None:
    pool = make(name)
    before = content(pool)
    copy = pool.get_cpu_copy(slots(4, 5))
    pool.move_kv_cache(slots(-1), slots(4))
    pool.move_kv_cache(slots(-1, -1), slots(4, 5))
    pool.load_cpu_copy(copy, slots(-1, 7))
    # What a lendable slot holds is what it held, but for slot 7, which got the row of slot 5.
    expected = make(name)
    expected.move_kv_cache(slots(7), slots(5))
    live = slots(*range(PAGE, LAST + 1))
    got, wanted = pool.get_cpu_copy(live), expected.get_cpu_copy(live)
    for left, right in zip(copies(got), copies(wanted), strict=True):
        assert torch.equal(left, right)
    assert not same(content(pool), before)


def copies(copy: Any) -> list[torch.Tensor]:
    return [*copy.full.buffers, *copy.swa.buffers] if hasattr(copy, "full") else [*copy.buffers]


@pytest.mark.parametrize("name", ["mha", "mla", "dsa"])
def test_a_host_copy_of_slot_minus_one_is_one_of_the_padding_row(name: str) -> None:
    pool = make(name)
    nowhere, padding = pool.get_cpu_copy(slots(-1)), pool.get_cpu_copy(slots(0))
    assert all(map(torch.equal, nowhere.buffers, padding.buffers))


def test_page_minus_one_of_index_keys_is_the_padding_page() -> None:
    pool = make("dsa")
    for read in (pool.get_index_k_continuous, pool.get_index_k_scale_continuous):
        assert torch.equal(read(0, PAGE, slots(-1)), read(0, PAGE, slots(0)))
        with pytest.raises(InvalidSlotError, match="99"):
            read(0, PAGE, slots(99))


@pytest.mark.parametrize(
    "scale", ["2", torch.ones(2, 2, 1, 1), torch.ones(1, device="meta"), torch.ones(3)]
)
def test_a_scale_that_does_not_fit_writes_nothing(scale: Any) -> None:
    pool = make("mha")
    before = content(pool)
    rows = torch.ones(2, 1, 2, dtype=torch.float64)
    with pytest.raises((GeometryError, IndexTensorError), match="values: scale"):
        pool.set_kv_buffer(0, slots(4, 5), rows, rows, None, scale)
    assert same(content(pool), before)
    pool.set_kv_buffer(0, slots(4, 5), rows, rows, 2, torch.full((2, 1, 1), 4.0))
    assert pool.get_key_buffer(0)[4].eq(0.5).all()
    assert pool.get_value_buffer(0)[5].eq(0.25).all()


@pytest.mark.parametrize(
    ("lengths", "total", "longest"),
    [((3,), 2, 3), ((3,), 4, 4), ((6,), 6, 3), ((-1, 1), 0, 1)],
    ids=["sum too small", "sum too large", "longer than said", "negative"],
)
def test_lengths_that_the_host_was_told_wrong_are_refused(
    lengths: tuple[int, ...], total: int, longest: int
) -> None:
    pages = torch.ones(len(lengths), 2, dtype=torch.int64)
    with pytest.raises(GeometryError, match=r"get_index_k_scale_buffer: lengths"):
        make("dsa").get_index_k_scale_buffer(0, slots(*lengths), pages, total, longest)


@pytest.mark.parametrize("name", POOLS)
def test_layer_numbers_may_be_of_any_integer_type_and_of_no_other(name: str) -> None:
    pool = make(name)
    assert torch.equal(pool.get_key_buffer(np.int64(1)), pool.get_key_buffer(1))
    for wrong in (1.0, "1", None):
        with pytest.raises(GeometryError, match="layer"):
            pool.get_key_buffer(wrong)


@pytest.mark.parametrize("field", ["size", "page_size", "layer_num", "head_num", "head_dim"])
def test_sizes_may_be_of_any_integer_type_and_of_no_other(field: str) -> None:
    arguments = SHARED | {"head_num": 1, "head_dim": 2, "layer_num": 2}
    same_shape = MHATokenToKVPool(**arguments | {field: np.int32(arguments[field])})
    assert [buffer.shape for buffer in buffers(same_shape)] == [
        buffer.shape for buffer in buffers(MHATokenToKVPool(**arguments))
    ]
    with pytest.raises(GeometryError, match=field):
        MHATokenToKVPool(**arguments | {field: float(arguments[field])})


@pytest.mark.parametrize("mapping", [None, [1], torch.ones(3), torch.ones(3, dtype=torch.int32)])
@pytest.mark.parametrize("name", ["hisparse", "swa over mha"])
def test_what_is_no_mapping_is_not_registered(name: str, mapping: Any) -> None:
    with pytest.raises(IndexTensorError, match="register_mapping"):
        make(name).register_mapping(mapping)


def test_skipping_layers_stand_behind_the_index_size_in_the_fields_order() -> None:
    pool = DSATokenToKVPool(
        SIZE, PAGE, 4, torch.float32, 2, 2, "cpu", 128, False, 6, 0, 1, 16, [True, False]
    )
    assert [len(buffer) for buffer in pool.index_k_with_scale_buffer] == [0, 16 // PAGE + 1]
    with pytest.raises(GeometryError, match="skip_topk_layers 1"):
        DSATokenToKVPool(SIZE, PAGE, 4, torch.float32, 2, 2, "cpu", 128, False, 6, 0, 1, 16, 1)


def test_index_keys_beyond_the_latent_rows_are_written_where_there_are_some() -> None:
    pool = DSATokenToKVPool(**SHARED, **SPARSE, layer_num=1, index_buf_size=2 * SIZE)
    pool.set_index_k_scale_buffer(0, slots(2 * SIZE), *parts_of_index(1))
    assert pool.get_index_k_continuous(0, 1, slots(SIZE)).eq(1).all()


def parts_of_index(count: int) -> list[Any]:
    return parts_of("set_index_k_scale_buffer", INDEX_PARTS, count)


@pytest.mark.parametrize("layer", [FULL_LAYER, SWA_LAYER])
def test_the_hybrid_pool_reads_what_its_setters_write(layer: int) -> None:
    pool = make("swa over dsa")
    nope, rope = torch.rand(2, 1, 4), torch.rand(2, 1, 2)
    pool.set_mla_kv_buffer(layer, slots(4, 5), nope, rope)
    read = pool.get_mla_kv_buffer(layer, slots(4, 5), torch.float64)
    assert torch.equal(read[0], nope.double())
    assert torch.equal(read[1], rope.double())
    keys, scales = torch.randint(0, 256, (2, 128), dtype=torch.uint8), torch.rand(2, 1)
    pool.set_index_k_scale_buffer(layer, slots(4, 5), keys, scales)
    page = slots(4 // PAGE)
    assert torch.equal(pool.get_index_k_continuous(layer, 2, page), keys)
    assert torch.equal(
        pool.get_index_k_scale_continuous(layer, 2, page).view(torch.float32), scales
    )


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get_mla_kv_buffer", (slots(4),)),
        ("get_index_k_continuous", (1, slots(1))),
        ("get_index_k_scale_continuous", (1, slots(1))),
    ],
)
def test_the_hybrid_pool_says_which_kind_of_layer_a_read_needs(
    call: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(GeometryError, match=f"{call}: layer 0 is kept in a MHATokenToKVPool"):
        getattr(make("swa over mha"), call)(FULL_LAYER, *arguments)

"""One spec, one pool: every field reaches every sub-pool, and fields that contradict each other are
refused when the spec is made."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.errors import GeometryError
from kvcore.pools import (
    DSALayers,
    DSATokenToKVPool,
    KVPoolSpec,
    MHALayers,
    MHATokenToKVPool,
    MLALayers,
    MLATokenToKVPool,
    SlotPool,
    SWAKVPool,
    build_kv_pool,
)
from kvcore.pools.spec import Layers
from kvcore.saver import KV_CACHE, NoMemorySaver, default_saver

KINDS: list[tuple[Layers, type[SlotPool]]] = [
    (MHALayers(head_num=2, head_dim=3, v_head_dim=5), MHATokenToKVPool),
    (MLALayers(kv_lora_rank=5, qk_rope_head_dim=3), MLATokenToKVPool),
    (DSALayers(kv_lora_rank=4, qk_rope_head_dim=2, index_head_dim=128), DSATokenToKVPool),
]
NAMES = ["mha", "mla", "dsa"]
PLAIN = KVPoolSpec(
    full_layers=KINDS[0][0],
    full_layer_ids=(4, 5, 6),
    size=8,
    page_size=2,
    dtype=torch.float16,
    device="cpu",
)
HYBRID = replace(
    PLAIN, full_layer_ids=(0, 3), swa_layers=KINDS[0][0], swa_layer_ids=(1, 2, 4), size_swa=6
)


@pytest.mark.parametrize(("layers", "pool_class"), KINDS, ids=NAMES)
def test_layers_of_one_kind_make_a_pool_of_that_kind(
    layers: Layers, pool_class: type[SlotPool]
) -> None:
    pool = build_kv_pool(replace(PLAIN, full_layers=layers))
    assert type(pool) is pool_class
    assert (pool.size, pool.page_size, pool.dtype, pool.device) == (8, 2, torch.float16, "cpu")
    assert (pool.layer_num, pool.start_layer, pool.end_layer) == (3, 4, 6)
    assert pool.memory_saver is None
    assert pool.get_key_buffer(6).shape[0] == 8 + 2


@pytest.mark.parametrize(("full", "swa"), list(product(KINDS, KINDS)))
@pytest.mark.parametrize("saver", [None, NoMemorySaver()], ids=["default saver", "own saver"])
def test_every_field_reaches_both_sub_pools(
    full: tuple[Layers, type[SlotPool]],
    swa: tuple[Layers, type[SlotPool]],
    saver: NoMemorySaver | None,
) -> None:
    spec = replace(
        HYBRID,
        full_layers=full[0],
        swa_layers=swa[0],
        enable_memory_saver=True,
        memory_saver=saver,
    )
    pool = build_kv_pool(spec)
    assert isinstance(pool, SWAKVPool)
    assert sorted(pool.layers_mapping) == [0, 1, 2, 3, 4]
    sides = ((pool.full_kv_pool, full, 8, 2), (pool.swa_kv_pool, swa, 6, 3))
    for side, (layers, pool_class), size, layer_num in sides:
        assert type(side) is pool_class
        assert (side.size, side.page_size, side.layer_num) == (size, 2, layer_num)
        assert (side.dtype, side.device) == (torch.float16, "cpu")
        assert side.enable_memory_saver
        assert side.memory_saver is (default_saver("cpu") if saver is None else saver)
        given = layers.arguments()
        given = {name: value for name, value in given.items() if value is not None}
        assert {name: vars(side)[name] for name in given} == given


def test_the_optional_fields_of_sparse_layers_reach_their_pool() -> None:
    layers = DSALayers(
        kv_lora_rank=128,
        qk_rope_head_dim=2,
        index_head_dim=128,
        kv_cache_dim=128 + 4 + 4,
        index_buf_size=20,
        skip_topk_layers=(False, True, False),
    )
    pool = build_kv_pool(replace(PLAIN, full_layers=layers, dtype=torch.float8_e4m3fn))
    assert isinstance(pool, DSATokenToKVPool)
    assert pool.dsa_kv_cache_store_fp8
    assert [len(buffer) for buffer in pool.index_k_with_scale_buffer] == [11, 0, 11]


def test_a_model_whose_layers_all_slide_may_still_have_a_hybrid_pool() -> None:
    pool = build_kv_pool(replace(HYBRID, full_layer_ids=()))
    assert isinstance(pool, SWAKVPool)
    assert pool.full_kv_pool.layer_num == 0


def test_with_the_saver_off_no_saver_hears_of_the_pool() -> None:
    class Deaf(NoMemorySaver):
        def region(self, tag: str) -> Any:
            raise AssertionError(tag)

    build_kv_pool(replace(HYBRID, memory_saver=Deaf()))
    with pytest.raises(AssertionError, match=KV_CACHE):
        build_kv_pool(replace(HYBRID, memory_saver=Deaf(), enable_memory_saver=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swa_layers": None}, "all three or none"),
        ({"swa_layer_ids": ()}, "all three or none"),
        ({"size_swa": None}, "all three or none"),
        ({"full_layer_ids": (0, 1)}, "each once"),
        ({"full_layer_ids": (-1, 3)}, "from 0 on"),
    ],
)
def test_a_hybrid_spec_that_contradicts_itself_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(GeometryError, match=named):
        replace(HYBRID, **changes)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [((), "no layer"), ((0, 2), "consecutive"), ((1, 0), "consecutive"), ((1, 1), "each once")],
)
def test_layers_of_one_kind_are_numbered_without_a_gap(
    numbers: tuple[int, ...], named: str
) -> None:
    with pytest.raises(GeometryError, match=named):
        replace(PLAIN, full_layer_ids=numbers)


def test_layer_numbers_of_any_integer_type_are_kept_as_ints() -> None:
    numbers: Any = np.array([2, 3])
    spec = replace(PLAIN, full_layer_ids=numbers)
    assert spec.full_layer_ids == (2, 3)
    assert all(type(number) is int for number in spec.full_layer_ids)
    assert not build_kv_pool(spec).get_key_buffer(3).any()
    floats: Any = (0.0, 1.0)
    with pytest.raises(GeometryError, match=r"layer number 0\.0"):
        replace(PLAIN, full_layer_ids=floats)


@pytest.mark.parametrize(
    "changes", [{"full_layer_ids": (3, 0)}, {"swa_layer_ids": (5, 4)}], ids=["full", "sliding"]
)
def test_layers_of_a_side_are_named_in_ascending_order(changes: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match="ascending"):
        replace(HYBRID, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"page_size": 0},
        {"size_swa": -1},
        {"full_layers": MHALayers(0, 3)},
        {"swa_layers": MLALayers(0, 3)},
        {"full_layers": DSALayers(4, 2, 128, skip_topk_layers=(True,))},
    ],
)
def test_dimensions_that_a_pool_rejects_are_rejected_by_the_builder(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(GeometryError):
        build_kv_pool(replace(HYBRID, **changes))

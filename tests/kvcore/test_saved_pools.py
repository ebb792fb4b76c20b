"""Pools built with a memory saver: all their bytes and no others are given back, they come back as
new at the same addresses, and nobody reads or writes them meanwhile; three known faults; the table.

Resident memory is read here from /proc/self/smaps, mapping by mapping, not from the saver.
"""

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore.errors import GeometryError, PausedPoolError, SaverMemoryError
from kvcore.pools import (
    DSALayers,
    DSATokenToKVPool,
    KVPoolSpec,
    MHALayers,
    MLALayers,
    MLATokenToKVPool,
    SlotPool,
    SWAKVPool,
    build_kv_pool,
)
from kvcore.pools.spec import Layers
from kvcore.saver import KV_CACHE, HostMemorySaver, MemorySaver
from kvcore.saver.host import Segment
from kvcore.targets.faults.saver import (
    ExplicitKwargsBypassSaver,
    IndexKOutsideSaver,
    SwaPoolOutsideSaver,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host saver needs Linux")

PAGE = mmap.PAGESIZE
KINDS: dict[str, Layers] = {
    "mha": MHALayers(head_num=2, head_dim=64),
    "mla": MLALayers(kv_lora_rank=128, qk_rope_head_dim=64),
    "dsa": DSALayers(kv_lora_rank=128, qk_rope_head_dim=64, index_head_dim=128),
}


def spec(kind: str, saver: MemorySaver, **changes: Any) -> KVPoolSpec:
    """A hybrid pool of a few MiB whose layers are all of one kind."""
    fields: dict[str, Any] = {
        "full_layers": KINDS[kind],
        "full_layer_ids": (0, 2),
        "swa_layers": KINDS[kind],
        "swa_layer_ids": (1, 3),
        "size": 4096,
        "size_swa": 1024,
        "page_size": 64,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "enable_memory_saver": True,
        "memory_saver": saver,
    }
    return KVPoolSpec(**(fields | changes))


def hybrid(kind: str, saver: MemorySaver, **changes: Any) -> SWAKVPool:
    pool = build_kv_pool(spec(kind, saver, **changes))
    assert isinstance(pool, SWAKVPool)
    return pool


def buffers_of(pool: SWAKVPool | SlotPool) -> list[torch.Tensor]:
    """Every buffer that a pool owns, also while it is paused."""
    if isinstance(pool, SWAKVPool):
        return [*buffers_of(pool.full_kv_pool), *buffers_of(pool.swa_kv_pool)]
    index = pool._index_buffer if isinstance(pool, DSATokenToKVPool) else []
    return [buffer for buffer in [*pool.slot_buffers(), *index] if buffer.numel()]


def mapped_rss(addresses: set[int]) -> int:
    """Resident bytes of the mappings that begin at these addresses, as smaps has them."""
    total, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            wanted = int(first.split("-")[0], 16) in addresses
        elif wanted and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def rss(tensors: list[torch.Tensor]) -> int:
    """Resident bytes of tensors of a host saver, each of which is a mapping of its own."""
    return mapped_rss({tensor.data_ptr() for tensor in tensors})


def whole_pages(tensors: list[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // PAGE) * PAGE for tensor in tensors)


def ones(saver: MemorySaver, tag: str, nbytes: int = 1 << 20) -> torch.Tensor:
    with saver.region(tag) as region:
        tensor = region.zeros((nbytes,), torch.uint8, "cpu")
    return tensor.fill_(1)


# Pause and resume


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_pool_gives_back_all_its_bytes_and_none_of_another_tag(kind: str) -> None:
    saver = HostMemorySaver()
    bystander = ones(saver, "weights")
    pool = hybrid(kind, saver)
    buffers = buffers_of(pool)
    size = sum(pool.get_kv_size_bytes())
    assert size > 2 << 20
    assert rss(buffers) == saver.resident_bytes(KV_CACHE) == whole_pages(buffers) >= size
    saver.pause(KV_CACHE)
    # At least 99 % is what is asked for; a page here and there may be somebody's.
    assert rss(buffers) <= size / 100
    assert saver.resident_bytes(KV_CACHE) == 0
    assert rss([bystander]) == whole_pages([bystander])
    assert bystander.eq(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_pool_is_as_new_at_the_same_addresses(kind: str) -> None:
    saver = HostMemorySaver()
    pool = hybrid(kind, saver)
    buffers = buffers_of(pool)
    addresses = [buffer.data_ptr() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(1)
    tables = (pool.get_contiguous_buf_infos(), pool.get_state_buf_infos())
    saver.pause(KV_CACHE)
    assert (pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()) == tables
    saver.resume(KV_CACHE)
    assert rss(buffers) == whole_pages(buffers)
    assert [buffer.data_ptr() for buffer in buffers_of(pool)] == addresses
    assert not any(buffer.any() for buffer in buffers)
    for buffer in buffers:
        assert buffer.fill_(1).eq(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_dropped_while_paused_leaves_nothing_mapped(kind: str) -> None:
    saver = HostMemorySaver()
    pool = hybrid(kind, saver)
    addresses = {buffer.data_ptr() for buffer in buffers_of(pool)}
    saver.pause(KV_CACHE)
    del pool
    begins = {line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert not {f"{address:x}" for address in addresses} & begins
    saver.resume(KV_CACHE)
    assert saver.resident_bytes(KV_CACHE) == 0
    assert sum(hybrid(kind, saver).get_kv_size_bytes()) <= saver.resident_bytes(KV_CACHE) + PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_saver_off_nothing_changes(kind: str) -> None:
    saver = HostMemorySaver()
    pool = hybrid(kind, saver, enable_memory_saver=False)
    with saver.region(KV_CACHE):
        pass
    saver.pause(KV_CACHE)
    buffers = buffers_of(pool)
    assert saver.resident_bytes(KV_CACHE) == 0
    assert mapped_rss({buffer.data_ptr() for buffer in buffers}) == 0
    for buffer in buffers:
        assert not buffer.any()
    assert pool.get_key_buffer(0).fill_(1).eq(1).all()


def test_on_in_a_sub_pools_own_arguments_is_on_everywhere() -> None:
    # As the field's callers say it: in the sub-pools' arguments, not in the hybrid pool's.
    saver = HostMemorySaver()
    latent = {"kv_lora_rank": 128, "qk_rope_head_dim": 64}
    for full, swa, whole in ((True, True, False), (True, False, False), (False, False, True)):
        pool = SWAKVPool(
            *(1024, 1024, 64, torch.bfloat16, 0, 0, [1], [0], "cpu", MLATokenToKVPool, whole),
            full_kv_pool_kwargs=latent | {"enable_memory_saver": full},
            swa_kv_pool_kwargs=latent | {"enable_memory_saver": swa},
            memory_saver=saver,
        )
        assert pool.enable_memory_saver
        assert saver.resident_bytes(KV_CACHE) == whole_pages(buffers_of(pool))
        del pool


def test_a_sub_pool_may_not_have_a_saver_of_its_own() -> None:
    latent = {"kv_lora_rank": 128, "qk_rope_head_dim": 64}
    with pytest.raises(GeometryError, match="memory_saver"):
        SWAKVPool(
            *(1024, 1024, 64, torch.bfloat16, 0, 0, [1], [0], "cpu", MLATokenToKVPool, True),
            full_kv_pool_kwargs=latent,
            swa_kv_pool_kwargs=latent | {"memory_saver": HostMemorySaver()},
        )


class Short(HostMemorySaver):
    """Finds memory for three buffers only."""

    room = 3

    def _populate(self, segment: Segment) -> None:
        if self.room == 0:
            raise OSError(12, "Cannot allocate memory")
        self.room -= 1
        super()._populate(segment)


def test_a_pool_that_finds_no_memory_leaves_none_behind() -> None:
    saver = Short()
    with pytest.raises(SaverMemoryError):
        hybrid("mha", saver)
    assert saver.resident_bytes(KV_CACHE) == 0


# Access while paused

Access = Callable[[Any], Any]
ONE = torch.tensor([1])
ANY_POOL: dict[str, Access] = {
    "get_key_buffer": lambda pool: pool.get_key_buffer(0),
    "get_value_buffer": lambda pool: pool.get_value_buffer(0),
    "get_kv_buffer": lambda pool: pool.get_kv_buffer(0),
    "set_kv_buffer": lambda pool: pool.set_kv_buffer(0, ONE, ONE, ONE),
    "move_kv_cache": lambda pool: pool.move_kv_cache(ONE, ONE),
    "get_cpu_copy": lambda pool: pool.get_cpu_copy(ONE),
    "load_cpu_copy": lambda pool: pool.load_cpu_copy(COPIES[type(pool)], ONE),
}
MHA_ONLY: dict[str, Access] = {
    "k_buffer": lambda pool: pool.k_buffer,
    "v_buffer": lambda pool: pool.v_buffer,
}
MLA_ONLY: dict[str, Access] = {
    "kv_buffer": lambda pool: pool.kv_buffer,
    "set_mla_kv_buffer": lambda pool: pool.set_mla_kv_buffer(0, ONE, ONE, ONE),
    "get_mla_kv_buffer": lambda pool: pool.get_mla_kv_buffer(0, ONE),
}
DSA_ONLY: dict[str, Access] = {
    "index_k_with_scale_buffer": lambda pool: pool.index_k_with_scale_buffer,
    "set_index_k_scale_buffer": lambda pool: pool.set_index_k_scale_buffer(0, ONE, ONE, ONE),
    "get_index_k_with_scale_buffer": lambda pool: pool.get_index_k_with_scale_buffer(0),
    "get_index_k_continuous": lambda pool: pool.get_index_k_continuous(0, 1, ONE),
    "get_index_k_scale_continuous": lambda pool: pool.get_index_k_scale_continuous(0, 1, ONE),
    "get_index_k_scale_buffer": lambda pool: pool.get_index_k_scale_buffer(0, ONE, ONE, 1, 1),
}


def plain(kind: str, saver: MemorySaver) -> SlotPool:
    changes = {"swa_layers": None, "swa_layer_ids": (), "size_swa": None, "full_layer_ids": (0,)}
    pool = build_kv_pool(spec(kind, saver, size=64, **changes))
    assert isinstance(pool, SlotPool)
    return pool


def small_hybrid(kind: str, saver: MemorySaver) -> SWAKVPool:
    pool = hybrid(kind, saver, size=64, size_swa=64)
    pool.register_mapping(torch.zeros(64 + 64 + 1, dtype=torch.int64))
    return pool


def accesses() -> Iterator[tuple[str, str, str]]:
    for kind in KINDS:
        own = MHA_ONLY if kind == "mha" else MLA_ONLY | (DSA_ONLY if kind == "dsa" else {})
        yield from (("plain", kind, name) for name in ANY_POOL | own)
        yield from (("hybrid", kind, name) for name in ANY_POOL)
    yield "hybrid", "mla", "set_mla_kv_buffer"
    for name in DSA_ONLY:
        if name != "index_k_with_scale_buffer" and not name.endswith("continuous"):
            yield "hybrid", "dsa", name


COPIES: dict[type, Any] = {}
CALLS = ANY_POOL | MHA_ONLY | MLA_ONLY | DSA_ONLY


@pytest.mark.parametrize(("shape", "kind", "name"), list(accesses()))
def test_a_paused_pool_is_neither_read_nor_written(shape: str, kind: str, name: str) -> None:
    saver = HostMemorySaver()
    pool = plain(kind, saver) if shape == "plain" else small_hybrid(kind, saver)
    COPIES[type(pool)] = pool.get_cpu_copy(ONE)
    saver.pause(KV_CACHE)
    with pytest.raises(PausedPoolError, match=r"resume\('kv_cache'\)"):
        CALLS[name](pool)
    assert saver.resident_bytes(KV_CACHE) == 0, "the attempt touched the memory"
    saver.resume(KV_CACHE)
    pool.load_cpu_copy(COPIES[type(pool)], ONE)


def test_another_saver_that_is_paused_is_no_matter_of_this_pool() -> None:
    mine, other = HostMemorySaver(), HostMemorySaver()
    pool = plain("mha", mine)
    with other.region(KV_CACHE):
        pass
    other.pause(KV_CACHE)
    assert not pool.get_key_buffer(0).any()


def test_no_pool_is_built_while_the_tag_is_paused() -> None:
    saver = HostMemorySaver()
    with saver.region(KV_CACHE):
        pass
    saver.pause(KV_CACHE)
    empty = {"full_layer_ids": (), "swa_layer_ids": (1,)}
    for kind, changes in (("mha", {}), ("dsa", empty)):
        with pytest.raises(PausedPoolError):
            hybrid(kind, saver, **changes)


def test_sizes_and_translation_stay_available_while_paused() -> None:
    saver = HostMemorySaver()
    pool = small_hybrid("dsa", saver)
    sizes = pool.get_kv_size_bytes()
    saver.pause(KV_CACHE)
    assert pool.get_kv_size_bytes() == sizes
    assert pool.translate_loc_from_full_to_swa(ONE).tolist() == [0]
    assert len(pool.full_kv_pool.get_contiguous_buf_infos()[0]) == 2


# Known faults


def arguments_of(kind: str, dsa_class: type[DSATokenToKVPool] = DSATokenToKVPool) -> dict[str, Any]:
    """The hybrid pool of `spec(kind)`, described as the field's callers do."""
    shared: dict[str, Any] = {
        "size": 4096,
        "size_swa": 1024,
        "page_size": 64,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 64,
        "swa_attention_layer_ids": [1, 3],
        "full_attention_layer_ids": [0, 2],
        "device": "cpu",
        "enable_memory_saver": True,
    }
    if kind == "mha":
        return shared
    latent = KINDS[kind].arguments()
    return shared | {
        "token_to_kv_pool_class": dsa_class if kind == "dsa" else MLATokenToKVPool,
        "full_kv_pool_kwargs": latent,
        "swa_kv_pool_kwargs": latent,
    }


def freed_share(pool: SWAKVPool, saver: HostMemorySaver) -> float:
    """The share of the pool's bytes that a pause gives back."""
    size = sum(buffer.nbytes for buffer in buffers_of(pool))
    with saver.region(KV_CACHE):
        pass
    before = saver.resident_bytes(KV_CACHE)
    saver.pause(KV_CACHE)
    return (before - saver.resident_bytes(KV_CACHE)) / size


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_outside_the_saver_gives_nothing_back(kind: str) -> None:
    saver = HostMemorySaver()
    pool = SwaPoolOutsideSaver(**arguments_of(kind), memory_saver=saver)
    assert freed_share(pool, saver) == 0


@pytest.mark.parametrize(("kind", "expected"), [("mha", 1), ("mla", 0), ("dsa", 0)])
def test_explicit_arguments_that_bypass_the_saver_cost_the_kinds_that_have_some(
    kind: str, expected: int
) -> None:
    saver = HostMemorySaver()
    pool = ExplicitKwargsBypassSaver(**arguments_of(kind), memory_saver=saver)
    assert freed_share(pool, saver) == pytest.approx(expected, abs=0.01)


def test_index_keys_outside_the_saver_stay_resident() -> None:
    saver = HostMemorySaver()
    pool = SWAKVPool(**arguments_of("dsa", IndexKOutsideSaver), memory_saver=saver)
    sides = (pool.full_kv_pool, pool.swa_kv_pool)
    latent = sum(buffer.nbytes for side in sides for buffer in side.slot_buffers())
    whole = sum(pool.get_kv_size_bytes())
    assert freed_share(pool, saver) == pytest.approx(latent / whole, abs=0.01)
    assert latent / whole < 0.8


def test_the_right_pools_give_back_everything_by_the_same_measure() -> None:
    for kind in KINDS:
        saver = HostMemorySaver()
        pool = SWAKVPool(**arguments_of(kind), memory_saver=saver)
        assert freed_share(pool, saver) >= 0.99


# The benchmark


def test_the_benchmark_prints_the_table_of_the_guide() -> None:
    root = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, root / "benchmarks" / "memory_saver.py", "--mib", "4"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["kind", "---", "MHA", "MLA", "DSA"]
    for row in rows[2:]:
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        assert int(cells[0].replace(",", "")) >= 4 << 20
        assert float(cells[1].removesuffix(" %")) >= 99
        assert cells[2] == "0.0 %"
    guide = (root / "docs" / "memory-saver.md").read_text()
    assert rows[0] in guide

"""How much of a hybrid pool's memory a pause gives back: the right pools against known faults.

`python benchmarks/memory_saver.py` builds a hybrid pool of each kind (256 MiB or more), writes
every byte of it, pauses the tag `kv_cache`, and reads from /proc/self/smaps what became of the
resident memory of the pool's buffers, and of a bystander under another tag. Prints bytes and
shares, so two runs print the same.

Leaves out how long it takes, and memory of a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kvcore import (
    DSATokenToKVPool,
    HostMemorySaver,
    MLATokenToKVPool,
    SWAKVPool,
)
from kvcore.saver import KV_CACHE
from kvcore.targets.faults.saver import (
    ExplicitKwargsBypassSaver,
    IndexKOutsideSaver,
    SwaPoolOutsideSaver,
)

PAGE_SIZE = 64
LAYERS = 8
TOKEN_BYTES = {"MHA": 2 * 2 * 128 * 2, "MLA": (256 + 32) * 2, "DSA": (256 + 32) * 2 + 128 + 4}
"""Bytes of a token in one layer, bfloat16."""
BYSTANDER_BYTES = 16 << 20
HYBRIDS: dict[str, Callable[..., SWAKVPool]] = {
    "the right code": SWAKVPool,
    "swa-pool-outside-saver": SwaPoolOutsideSaver,
    "explicit-kwargs-bypass-saver": ExplicitKwargsBypassSaver,
    "index-k-outside-saver": SWAKVPool,
}

Mapping: TypeAlias = tuple[int, int, int]
"""Begin, end, and resident bytes of one mapping of this process."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What one pause did."""

    pool_bytes: int
    before: int
    """Resident bytes of the mappings of the pool's buffers."""
    after: int
    bystander_lost: int
    """Resident bytes that a region of another tag lost."""

    @property
    def share(self) -> float:
        """The share of the pool's bytes that were given back."""
        return (self.before - self.after) / self.pool_bytes


def smaps() -> list[Mapping]:
    """Every mapping of this process, as the kernel has it."""
    mappings: list[Mapping] = []
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            begin, end = (int(address, 16) for address in first.split("-"))
        elif first == "Rss:":
            mappings.append((begin, end, int(line.split()[1]) * 1024))
    return mappings


def resident(tensors: Sequence[torch.Tensor]) -> int:
    """Resident bytes of these tensors, at most.

    A tensor of the host saver is a mapping of its own, so for it the figure is exact. One that a
    fault leaves to torch may share its mapping with other memory; then as much of what is resident
    there is counted as the tensor can be.
    """
    mappings = smaps()
    total = 0
    for each in tensors:
        first, last = each.data_ptr(), each.data_ptr() + each.nbytes
        for begin, end, rss in mappings:
            total += max(0, min(rss, min(last, end) - max(first, begin)))
    return total


def buffers_of(pool: SWAKVPool) -> list[torch.Tensor]:
    """Every buffer of both sub-pools."""
    buffers: list[torch.Tensor] = []
    for side in (pool.full_kv_pool, pool.swa_kv_pool):
        buffers += side.slot_buffers()
        if isinstance(side, DSATokenToKVPool):
            buffers += side.index_k_with_scale_buffer
    return buffers


def arguments_of(kind: str, mib: int, index_k_outside: bool) -> dict[str, Any]:
    """A hybrid pool of at least `mib` MiB, described as the field's callers do."""
    token_pages = (mib << 20) // (LAYERS * TOKEN_BYTES[kind]) // PAGE_SIZE
    size = (token_pages + 1) * PAGE_SIZE
    shared: dict[str, Any] = {
        "size": size,
        "size_swa": size,
        "page_size": PAGE_SIZE,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 128,
        "full_attention_layer_ids": [0, 2, 4, 6],
        "swa_attention_layer_ids": [1, 3, 5, 7],
        "device": "cpu",
        "enable_memory_saver": True,
    }
    if kind == "MHA":
        return shared
    latent = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
    if kind == "DSA":
        latent |= {"index_head_dim": 128, "kv_cache_dim": 256 + 32}
    dsa_class = IndexKOutsideSaver if index_k_outside else DSATokenToKVPool
    return shared | {
        "token_to_kv_pool_class": dsa_class if kind == "DSA" else MLATokenToKVPool,
        "full_kv_pool_kwargs": latent,
        "swa_kv_pool_kwargs": latent,
    }


def measure(kind: str, mib: int, variant: str) -> Freed:
    """Build a pool, write every byte, pause, and look."""
    saver = HostMemorySaver()
    with saver.region("weights") as region:
        bystander = region.zeros((BYSTANDER_BYTES,), torch.uint8, "cpu").fill_(1)
    with saver.region(KV_CACHE):
        pass
    arguments = arguments_of(kind, mib, variant == "index-k-outside-saver")
    pool = HYBRIDS[variant](**arguments, memory_saver=saver)
    buffers = buffers_of(pool)
    for buffer in buffers:
        buffer.fill_(1)
    before, bystander_before = resident(buffers), resident([bystander])
    saver.pause(KV_CACHE)
    return Freed(
        pool_bytes=sum(pool.get_kv_size_bytes()),
        before=before,
        after=resident(buffers),
        bystander_lost=bystander_before - resident([bystander]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="smallest size of a pool in MiB")
    mib = parser.parse_args().mib
    if mib < 1:
        parser.error(f"--mib is {mib}, expected at least 1")
    variants = list(HYBRIDS)
    print("| kind | bytes | freed with", " | freed with ".join(variants), "|")
    print("|", " | ".join(["---"] * (2 + len(variants))), "|")
    lost = 0
    for kind in TOKEN_BYTES:
        cells, pool_bytes = [], 0
        for variant in variants:
            if variant == "index-k-outside-saver" and kind != "DSA":
                cells.append("no index keys")
                continue
            freed = measure(kind, mib, variant)
            pool_bytes = freed.pool_bytes
            lost += freed.bystander_lost
            cells.append(f"{100 * freed.share:.1f} %")
        print("|", " | ".join([kind, f"{pool_bytes:,}", *cells]), "|")
    print(
        f"\nA region of another tag, {BYSTANDER_BYTES:,} bytes, lost {lost:,} in all these pauses."
    )


if __name__ == "__main__":
    main()

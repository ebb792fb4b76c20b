"""What the allocator modules of a release find in place of the serving stack: the few helpers that
they import, with the behaviour of a plain machine that has no debug switch set.

Leaves out everything else: a module that is not listed here cannot be imported by a release.
"""

import abc
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.targets.sglang.kernels import DOUBLES

KERNEL_MODULES = (
    "sglang.srt.mem_cache.triton_ops.allocator",  # to 0.5.15.post1
    "sglang.kernels.ops.memory.allocator",  # from 0.5.16
)
"""Where releases keep their page kernels."""


class BaseSWAKVPool(abc.ABC):
    """The pool type that a hybrid allocator insists on; one class for all releases.

    A subclass keeps the tensor that `register_mapping` gives it in `full_to_swa_index_mapping`.
    """

    full_to_swa_index_mapping: torch.Tensor | None = None
    full_kv_pool: Any = None
    swa_kv_pool: Any = None
    swa_req_ring_size: int | None = None
    """Tokens of a per-request ring (releases from 0.5.20); None is the paged SWA pool."""

    @abc.abstractmethod
    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Take the allocator's mapping: int64 `[size_full + page_size + 1]`, the last entry -1."""

    @abc.abstractmethod
    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The SWA slots of full slots, same shape; -1 stays -1."""


def is_npu() -> bool:
    """No: the CPU and CUDA paths are on trial."""
    return False


def is_hip() -> bool:
    """No: see `is_npu`."""
    return False


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Every switch is off, whatever the environment says: a verdict must not depend on it."""
    return False


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and 1 for n below 1."""
    return 1 << (max(n, 1) - 1).bit_length()


def get_num_new_pages(
    seq_lens: torch.Tensor,
    page_size: int,
    prefix_lens: torch.Tensor | None = None,
    decode: bool = False,
) -> int:
    """Pages that a batch opens when it grows to `seq_lens`; host tensors `[batch]`.

    A decode adds one token a request, so it opens a page where the length is one past a boundary.
    """
    lengths: list[int] = seq_lens.tolist()
    if decode:
        return sum(length % page_size == 1 for length in lengths)
    if prefix_lens is None:
        raise TypeError("get_num_new_pages: prefix_lens is missing; expected it unless decoding")
    pages_before: int = sum(-(-prefix // page_size) for prefix in prefix_lens.tolist())
    pages_after: int = sum(-(-length // page_size) for length in lengths)
    return pages_after - pages_before


def async_h2d(args: list[int], *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A host list as a tensor on `device`."""
    return torch.tensor(args, dtype=dtype, device=device)


@dataclass(frozen=True)
class Capabilities:
    """What a platform can do; page kernels are launched, not their torch fallbacks."""

    supports_triton: bool = True


@dataclass(frozen=True)
class Platform:
    """A platform that brings no allocator of its own."""

    capabilities: Capabilities = Capabilities()

    def get_paged_allocator_cls(self) -> None:
        """None: the release's own paged allocator."""


class Bucket(enum.Enum):
    """How bad it is when a declared invariant does not hold."""

    SOFTEN = "soften"
    GUARD = "guard"
    FATAL_CONTAINABLE = "fatal_containable"
    FATAL_UNCONTAINABLE = "fatal_uncontainable"


@dataclass(frozen=True)
class IsTrue:
    """The property of a tensor of conditions that all of them hold."""


@dataclass(frozen=True)
class Invariant:
    """An invariant that an allocator declares; with the checks off it is only a name."""

    name: str
    bucket: Bucket
    prop: object


def expect(inv: Invariant, value: torch.Tensor | None, *, msg: str = "") -> torch.Tensor | None:
    """Pass the value through: the level of a release's own checks defaults to off."""
    return value


_UTILS: Mapping[str, object] = {
    "async_h2d": async_h2d,
    "get_bool_env_var": get_bool_env_var,
    "get_num_new_pages": get_num_new_pages,
    "is_hip": is_hip,
    "is_npu": is_npu,
    "next_power_of_2": next_power_of_2,
}

SERVING_STACK: Mapping[str, Mapping[str, object]] = {
    "sglang.srt.mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": BaseSWAKVPool},
    "sglang.srt.platforms": {"current_platform": Platform()},
    "sglang.srt.utils": _UTILS,
    "sglang.srt.utils.common": _UTILS,
    "sglang.srt.utils.invariants": {
        "Bucket": Bucket,
        "Invariant": Invariant,
        "IsTrue": IsTrue,
        "expect": expect,
    },
}
"""Module name to what a release may import from it."""

KERNEL_DOUBLES: Mapping[str, Mapping[str, object]] = dict.fromkeys(KERNEL_MODULES, DOUBLES)
"""The page kernels' doubles, wherever a release looks for them."""

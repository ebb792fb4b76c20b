"""The allocators that are compared, all called in the same few ways: kvcore's hybrid allocator
without value checks, as engines run it, and those of released engines.

At page size 1 rows come from `alloc` and go by `free`; at larger pages they come from
`alloc_extend` and go by segment frees where the allocator has them. Leaves out what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.benchmarks.page_kernels import LEAN_KERNELS
from kvcore.kernels import chosen_kernels
from kvcore.native import NATIVE
from kvcore.targets.sglang.release import Release, load_release
from kvcore.targets.sglang.stand_ins import BaseSWAKVPool
from kvcore.targets.sglang.target import ReleaseDialect

OURS = "kvcore"
OURS_BY_NUMPY = "kvcore by numpy"

Ready = Callable[[Any], object]
"""Gets a new allocator before its calls are looked up."""


def as_it_is(allocator: Any) -> None:
    """Does nothing to a new allocator."""


Slots = torch.Tensor
"""Full slots on the allocator's device, int64 `[n]`."""


class MappingPool(BaseSWAKVPool):
    """A pool without buffers: what a release needs of one to lend its slots."""

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Keep the mapping."""
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """SWA slots of full slots, same shape."""
        mapping = self.full_to_swa_index_mapping
        if mapping is None:
            raise RuntimeError("the pool was given no mapping")
        return mapping[kv_indices]


@dataclass(frozen=True)
class Row:
    """The tensors by which a batch is asked for, on the device and on the host."""

    prefix_lens: torch.Tensor
    prefix_lens_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    last_loc: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class Engine:
    """An allocator of two pools of one size, and its calls.

    ``alloc_pages`` lends whole pages; ``free`` gives slots of whole pages back, those of one row in
    order; ``free_set`` any slots; ``free_swa`` the peers alone; ``free_full`` slots whose peers are
    gone; ``recover(kept, incoming)`` moves peers to slots that have none, and frees the incoming
    ones.
    """

    name: str
    allocator: Any
    page_size: int
    device: str
    alloc_pages: Callable[[int], Slots | None]
    free: Callable[[Slots], None]
    free_set: Callable[[Slots], None]
    free_swa: Callable[[Slots], None]
    free_full: Callable[[Slots], None]
    recover: Callable[[Slots, Slots], None]
    begin: Callable[[], None]
    end: Callable[[], None]

    def alloc(self, slots: int) -> Callable[[], Slots]:
        """What lends a new row of ``slots``, in whole pages; its arguments are made here."""
        if self.page_size == 1:
            return partial(self.allocator.alloc, slots)
        row = self._row([0], [slots], torch.tensor([-1]))
        return partial(
            self.allocator.alloc_extend,
            row.prefix_lens,
            row.prefix_lens_cpu,
            row.seq_lens,
            row.seq_lens_cpu,
            row.last_loc,
            row.tokens,
        )

    def decode(self, length: int, last: Slots) -> Callable[[], Slots]:
        """What lends a token to each row, which has ``length`` and ends at ``last``."""
        if self.page_size == 1:
            return partial(self.allocator.alloc, len(last))
        row = self._row([length] * len(last), [length + 1] * len(last), last)
        return partial(self.allocator.alloc_decode, row.seq_lens, row.seq_lens_cpu, row.last_loc)

    def _row(self, before: list[int], after: list[int], last: torch.Tensor) -> Row:
        prefix, seq = torch.tensor(before), torch.tensor(after)
        # Where waits are counted, making the arguments of a call is none.
        on_device = [one.to(self.device, non_blocking=True) for one in (prefix, seq, last)]
        return Row(on_device[0], prefix, on_device[1], seq, on_device[2], sum(after) - sum(before))


class ByNumpy(SWATokenToKVPoolAllocator):
    """kvcore's hybrid allocator as it is where no C compiler was at hand."""

    by_native = False


def engines_by_numpy(page_size: int, size: int) -> list[Engine]:
    """`our_engine` without compiled code, if otherwise there is some."""
    if NATIVE is None or chosen_kernels():
        return []
    return [our_engine(page_size, size, kind=ByNumpy, name=OURS_BY_NUMPY)]


def our_engine(
    page_size: int,
    size: int,
    *,
    device: str = "cpu",
    owned: bool = False,
    kind: type[SWATokenToKVPoolAllocator] = SWATokenToKVPoolAllocator,
    name: str = OURS,
    ready: Ready = as_it_is,
) -> Engine:
    """kvcore's hybrid allocator; ``owned``: its groups keep the tensors that callers free."""
    allocator = kind(size, size, page_size, torch.int64, device, None, False, validate=False)
    ready(allocator)
    paged = page_size > 1
    return Engine(
        name=name,
        allocator=allocator,
        page_size=page_size,
        device=device,
        alloc_pages=allocator.alloc,
        free=partial(allocator.free_segment, start_pos=0) if paged else allocator.free,
        free_set=allocator.free,
        free_swa=partial(allocator.free_swa_segment, start_pos=0) if paged else allocator.free_swa,
        free_full=allocator.free_full,
        recover=allocator.recover_tombstone,
        begin=partial(allocator.free_group_begin, owned=True)
        if owned
        else allocator.free_group_begin,
        end=allocator.free_group_end,
    )


@dataclass(frozen=True)
class Rival:
    """A released engine to compare with. Its page kernels, which are no Python, are replaced."""

    directory: Path

    @cached_property
    def release(self) -> Release:
        """Its classes. Raises `ReleaseError`."""
        return load_release(self.directory, kernels=LEAN_KERNELS)

    @property
    def version(self) -> str:
        """Its version, such as 0.5.23."""
        return self.release.version

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"sglang {self.version}"

    @property
    def frees_segments(self) -> bool:
        """Whether it has segment frees of both sides; the frees of older ones name any slots."""
        return self.release.version_at_least("0.5.20")

    def engine(
        self,
        page_size: int,
        size: int,
        device: str = "cpu",
        *,
        name: str | None = None,
        ready: Ready = as_it_is,
    ) -> Engine:
        """Its hybrid allocator."""
        allocator: Any = self.release.swa_allocator(
            size, size, page_size, torch.int64, device, MappingPool(), False
        )
        ready(allocator)
        dialect = ReleaseDialect(self.release, allocator, torch.device(device))
        segments = page_size > 1 and self.frees_segments
        return Engine(
            name=name or self.name,
            allocator=allocator,
            page_size=page_size,
            device=device,
            alloc_pages=allocator.alloc if page_size == 1 else _both_sides(allocator),
            free=partial(allocator.free_segment, start_pos=0) if segments else allocator.free,
            free_set=allocator.free,
            free_swa=partial(allocator.free_swa_segment, start_pos=0)
            if segments
            else allocator.free_swa,
            free_full=dialect.replace,
            recover=dialect.recover,
            begin=allocator.free_group_begin,
            end=allocator.free_group_end,
        )


def _both_sides(allocator: Any) -> Callable[[int], Slots]:
    """Pages of both sides, paired: a release's own `alloc` of both is for page size 1 only."""
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator

    def alloc(slots: int) -> Slots:
        lent: Slots = full.alloc(slots)
        allocator.set_full_to_swa_mapping(lent, swa.alloc(slots))
        return lent

    return alloc

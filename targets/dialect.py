"""How to talk to one family of allocators: the calls of the field, in that family's form.

A dialect is the only place that knows an allocator's method names. Leaves out which slots belong to
whom: that is `kvcore.targets.driver`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from kvcore.models.ops import Form
from kvcore.targets.protocol import Answers

Slots = torch.Tensor
"""int64 slot indices, 1-D, on the allocator's device."""


CPU = torch.device("cpu")


def as_tensor(numbers: list[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor; through numpy, which is several times faster on short lists."""
    tensor = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return tensor if device == CPU else tensor.to(device)


Vectors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Vectors5 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def extend_vectors(
    before: list[int], after: list[int], last: list[int], device: torch.device
) -> Vectors5:
    """A batch as the field passes it to an extend: row lengths before and after, each on the device
    and on the host, and the last slots on the device; int64 `[batch]`, views of one copy."""
    packed = np.array((before, after, last), dtype=np.int64)
    prefix, seq = torch.from_numpy(packed[0]), torch.from_numpy(packed[1])
    loc = torch.from_numpy(packed[2])
    if device == CPU:
        return prefix, prefix, seq, seq, loc
    return prefix.to(device), prefix, seq.to(device), seq, loc.to(device)


def decode_vectors(after: list[int], last: list[int], device: torch.device) -> Vectors3:
    """The same of a decode: row lengths after it, on the device and on the host, and the last
    slots."""
    packed = np.array((after, last), dtype=np.int64)
    seq, loc = torch.from_numpy(packed[0]), torch.from_numpy(packed[1])
    return (seq, seq, loc) if device == CPU else (seq.to(device), seq, loc.to(device))


class Dialect(Protocol):
    """Calls on one allocator. Those that lend answer None when there is too little room."""

    def alloc(self, need: int) -> Slots | None:
        """``need`` slots in whole pages, both sides."""
        ...

    def extend(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """A batch: row lengths before and after, last slot of each row (-1 if empty)."""
        ...

    def decode(self, after: list[int], last: list[int]) -> Slots | None:
        """One slot more for each row of the batch."""
        ...

    def swa_tail(
        self, before: int, after: int, last: int, tail: int, beyond: int = 0
    ) -> Slots | None:
        """An extend of one row with peers for ``tail`` slots only: the last ones, but for
        ``beyond`` after them."""
        ...

    def free(self, slots: Slots, form: Form, start: int) -> None:
        """Both sides; ``start`` is the row position of the first slot."""
        ...

    def free_swa(self, slots: Slots, form: Form, start: int) -> None:
        """The peers of ``slots``."""
        ...

    def free_full(self, slots: Slots, form: Form, start: int) -> None:
        """The full side alone, of slots without peers."""
        ...

    def group_begin(self) -> None:
        """Open a free group."""
        ...

    def group_end(self) -> None:
        """Close it."""
        ...

    def recover(self, kept: Slots, incoming: Slots) -> None:
        """The kept slots take over the peers of the incoming ones, which are freed."""
        ...

    def replace(self, old: Slots) -> None:
        """Free tombstoned slots that other slots replaced."""
        ...

    def alloc_full(self, need: int) -> Slots | None:
        """Full slots alone, for a load-back."""
        ...

    def alloc_swa(self, need: int) -> Slots | None:
        """SWA slots alone, for a load-back."""
        ...

    def free_unpaired_swa(self, slots: Slots) -> None:
        """SWA slots that `alloc_swa` lent and nothing was mapped to."""
        ...

    def map(self, full: Slots, swa: Slots) -> None:
        """Raw mapping write."""
        ...

    def clear(self) -> None:
        """Drop everything."""
        ...

    def peers(self, slots: Slots) -> Slots:
        """The SWA slot of each full slot, 0 where it has none."""
        ...

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids in all free containers of the (full, SWA) side, int64."""
        ...

    def free_lists(self) -> tuple[list[int], list[int]]:
        """`free_pages` as numbers, in new lists: what small pools on a CPU are asked for, without a
        tensor where that can be."""
        ...

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """(full, SWA) pages that wait for the end of the group; empty if nobody can tell."""
        ...

    def pending_lists(self) -> tuple[list[int], ...]:
        """`pending_pages` as numbers, in new lists, as `free_lists` is to `free_pages`."""
        ...

    def mapping(self) -> torch.Tensor:
        """The mapping tensor; empty without an SWA side."""
        ...

    def answers(self) -> Answers:
        """What the public queries say."""
        ...


class SparseDialect(Protocol):
    """Calls on the device slots of a HiSparse allocator, beside those of `Dialect`."""

    def extend_logical(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`Dialect.extend` of logical slots alone."""
        ...

    def free_device(self, slots: Slots) -> None:
        """The device slots of logical ``slots``."""
        ...

    def device_buffer(self, slots: Slots, need: int) -> Slots | None:
        """The device slots of logical ``slots`` become a buffer of ``need`` device slots."""
        ...

    def free_buffer(self, buffer: Slots) -> None:
        """Give a buffer back."""
        ...

    def device_slots(self, slots: Slots) -> Slots:
        """The device slot of each logical slot; 0 for none, also for a slot without an entry of its
        own."""
        ...

    def free_device_pages(self) -> torch.Tensor:
        """Page ids in all free containers of the device side, int64."""
        ...

    def free_device_list(self) -> list[int]:
        """`free_device_pages` as numbers, in a new list."""
        ...

    def pending_device_pages(self) -> torch.Tensor:
        """Device pages that wait for the end of the group."""
        ...

    def device_mapping(self) -> torch.Tensor:
        """The mapping tensor of the device side."""
        ...

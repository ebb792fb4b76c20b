"""Faults of the memory saver: buffers that a pause does not reach, and one that it should not.

Leaves out the savers' own work with the operating system (`kvcore.saver`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from kvcore import DSATokenToKVPool, HostMemorySaver, SWAKVPool
from kvcore.saver.host import Segment


class SwaPoolOutsideSaver(SWAKVPool):
    """The hybrid pool takes the flag and builds its sub-pools with the saver off (sglang#22807)."""

    def _saver_arguments(self, explicit: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"enable_memory_saver": False}


class ExplicitKwargsBypassSaver(SWAKVPool):
    """Sub-pools with arguments of their own, as MLA and DSA have them, are not told of the flag
    (the second half of the fault that sglang#22807 reports)."""

    def _saver_arguments(self, explicit: Mapping[str, Any] | None) -> dict[str, Any]:
        if explicit is None:
            return super()._saver_arguments(explicit)
        return {"enable_memory_saver": False}


class IndexKOutsideSaver(DSATokenToKVPool):
    """The index-K cache is made by torch alone, outside the region of the latent rows (the third
    part of the same)."""

    def _index_zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)


class SegmentReusedUnderAnotherTag(HostMemorySaver):
    """A freed segment is kept and handed out again under whatever tag asks next, while its record
    says the first tag: pausing that one empties the other (torch_memory_saver#85)."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Segment] = []
        self._tensors: dict[int, ref[torch.Tensor]] = {}

    def zeros(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As in the right saver, remembering which tensor uses which address."""
        tensor = super().zeros(tag, shape, dtype)
        self._tensors[tensor.data_ptr()] = ref(tensor)
        return tensor

    def _segment(self, tag: str, nbytes: int) -> Segment:
        for segment in self._kept:
            if self._tensors[segment.address]() is None and segment.usable >= nbytes:
                segment.drop()
                segment.populate()
                return segment
        self._kept.append(super()._segment(tag, nbytes))
        return self._kept[-1]

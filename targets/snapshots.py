"""Takes the view of an allocator and of what lies beside it: pools, rows, memory.

Small pools on a CPU are shown in plain lists, which cost less there than a single tensor; large
ones and those on another device in tensors, packed by one copy. Leaves out what is done to the
allocator (`kvcore.targets.driver`) and what a view is (`kvcore.targets.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcore.models import Geometry
from kvcore.targets.dialect import Dialect, SparseDialect, as_tensor
from kvcore.targets.held import HeldAnswers
from kvcore.targets.host_arrays import SharedArray
from kvcore.targets.memory import SaverProbe
from kvcore.targets.pool import StampedPool
from kvcore.targets.protocol import Answers, HostView, ListedView, MemoryView, View
from kvcore.targets.requests import RequestRows

LISTED_SLOTS = 4096
"""Pools with more slots than this are shown in tensors."""


@dataclass(slots=True)
class Snapshots:
    """Takes views of one target."""

    geometry: Geometry
    dialect: Dialect
    pool: StampedPool
    held: HeldAnswers
    sparse: SparseDialect | None
    requests: RequestRows | None
    memory: SaverProbe | None
    _mapping: SharedArray = field(default_factory=SharedArray)
    _device_mapping: SharedArray = field(default_factory=SharedArray)
    _in_lists: bool = False

    def __post_init__(self) -> None:
        geometry = self.geometry
        slots = geometry.full_size + geometry.swa_size + geometry.device_size
        self._in_lists = self.pool.device.type == "cpu" and slots <= LISTED_SLOTS

    def take(self, *, stamps: bool) -> View:
        """The state now; see `Target.view`."""
        if not self._in_lists:
            return self._packed(stamps)
        full, swa = self.dialect.free_lists()
        host = HostView(
            full,
            swa,
            self._mapping.over(self.dialect.mapping()).tolist(),
            self.held.lists(),
            self.dialect.answers() if self.requests is None else self._answers(),
        )
        if self.sparse is not None:
            host.device_free = self.sparse.free_device_list()
            host.device_mapping = self._device_mapping.over(self.sparse.device_mapping()).tolist()
        if self.requests is not None:
            host.request_free = self.requests.free_rows()
        if stamps:
            if not self.paused():
                host.stamps = self.pool.content_lists()
            host.pending = self._pending_lists()
            if self.requests is not None:
                host.request_rows = self.requests.table_list()
            host.memory = self._memory_view()
        return ListedView(host, self.pool.streams)

    def paused(self) -> bool:
        """Whether the pool's memory is given back, so that nobody may look at it."""
        return self.memory is not None and self.memory.paused("kv_cache")

    def _answers(self) -> Answers:
        answers = self.dialect.answers()
        if self.requests is None:
            return answers
        return answers.with_requests(self.requests.available())

    def _memory_view(self) -> MemoryView | None:
        return self.memory.view(*self.pool.ranges()) if self.memory is not None else None

    def _pending(self) -> tuple[torch.Tensor, ...]:
        pending = self.dialect.pending_pages()
        if pending and self.sparse is not None:
            return (*pending, self.sparse.pending_device_pages())
        return pending

    def _pending_lists(self) -> tuple[list[int], ...]:
        pending = self.dialect.pending_lists()
        if pending and self.sparse is not None:
            return (*pending, self.sparse.pending_device_pages().tolist())
        return pending

    def _packed(self, stamps: bool) -> View:
        full, swa = self.dialect.free_pages()
        sparse, requests = self.sparse, self.requests
        device = (sparse.free_device_pages(), sparse.device_mapping()) if sparse else None
        rows = None
        if requests is not None:
            free = as_tensor(requests.free_rows(), self.pool.device)
            rows = (free, requests.table() if stamps else free[:0])
        return View(
            full_free=full,
            swa_free=swa,
            mapping=self.dialect.mapping(),
            stamps=self.pool.contents() if stamps and not self.paused() else (),
            streams=self.pool.streams,
            pending=self._pending() if stamps else (),
            held=self.held.tensors(),
            answers=self._answers(),
            device=device,
            requests=rows,
            memory=self._memory_view() if stamps else None,
        )

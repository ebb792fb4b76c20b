"""The request pool under a target: a row for each live sequence, and retraction through it.

Leaves out the slots themselves (`kvcore.targets.driver`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcore import ReqToTokenPool, Retraction, RetractionBackup
from kvcore.targets.host_arrays import SharedArray


@dataclass(slots=True)
class Requested:
    """A request as the core's calls take it."""

    req_pool_idx: int | None = None
    kv_len: int = 0
    swa_evicted_seqlen: int = 0
    retraction: RetractionBackup[Any] | None = None


class RequestRows:
    """Requests by sequence, their rows in a `ReqToTokenPool`, and those in host memory by backup's
    name."""

    def __init__(self, pool: ReqToTokenPool, retraction: Retraction | None) -> None:
        self._pool = pool
        self._retraction = retraction
        self._requests: dict[int, Requested] = {}
        self._table = SharedArray()

    def begin(self, seqs: Sequence[int]) -> bool:
        """Take a row for each new sequence, or none at all."""
        new = [Requested() for _ in seqs]
        if self._pool.alloc(new) is None:
            return False
        self._requests.update(zip(seqs, new, strict=True))
        return True

    def rows_of(self, seqs: Sequence[int]) -> tuple[int, ...]:
        """The rows of sequences."""
        return tuple(self._requests[seq].req_pool_idx or 0 for seq in seqs)

    def end(self, seq: int) -> None:
        """The sequence's row is free again, if it has one."""
        request = self._requests.pop(seq, None)
        if request is not None and request.req_pool_idx is not None:
            self._pool.free(request)

    def write(self, seq: int, slots: torch.Tensor) -> None:
        """The sequence holds ``slots`` now, in token order."""
        request = self._requests[seq]
        request.kv_len = len(slots)
        assert request.req_pool_idx is not None
        self._pool.write((request.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))

    def retract(self, seq: int, *, evicted: int) -> Requested:
        """Retract the sequence; what is to be kept of it."""
        request = self._requests[seq]
        assert self._retraction is not None
        request.swa_evicted_seqlen = evicted
        self._retraction.retract(request)
        return self._requests.pop(seq)

    def restore(self, kept: Requested, seq: int, *, evicted: int) -> torch.Tensor | None:
        """Bring it back as ``seq``, its window from token ``evicted`` on: its slots, or None."""
        assert self._retraction is not None
        kept.swa_evicted_seqlen = evicted
        if not self._retraction.restore(kept):
            return None
        self._requests[seq] = kept
        assert kept.req_pool_idx is not None
        return self._pool.row(kept.req_pool_idx, kept.kv_len).to(torch.int64)

    def clear(self) -> None:
        """Every row is free."""
        self._pool.clear()
        self._requests = {}

    def available(self) -> int:
        """Rows that can be taken."""
        return self._pool.available_size()

    def free_rows(self) -> list[int]:
        """Rows in the pool's free list."""
        return list(self._pool.free_slots)

    def table(self) -> torch.Tensor:
        """The whole table, flat, int64."""
        return self._pool.req_to_token.flatten().to(torch.int64)

    def table_list(self) -> list[int]:
        """The same as numbers, of a pool on a CPU."""
        flat: list[int] = self._table.over(self._pool.req_to_token).reshape(-1).tolist()
        return flat

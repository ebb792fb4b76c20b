"""What a prefix cache needs of an allocator and of a request.

Leaves out the request table (`kvcore.requests`), which it uses as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.prefix_cache.node import TreeNode
from kvcore.requests import RowHolder


class SideAllocator(Protocol):
    """One side of a hybrid allocator, asked for slots of its own."""

    def alloc(self, need_size: int, /) -> torch.Tensor | None:
        """Slots of whole pages, int64 `[need_size]`; None if there are too few."""

    def free(self, free_index: torch.Tensor, /) -> None:
        """Return slots of its own that were never paired."""


class CacheAllocator(Protocol):
    """A hybrid allocator, as far as prefix cache and serving go; what each call means is told at
    `kvcore.SWATokenToKVPoolAllocator`.

    Slots whose peers are gone are given to `free_full`, slots with live peers to `free`; one call
    never gets both."""

    @property
    def page_size(self) -> int:
        """Slots a page."""

    @property
    def device(self) -> str | torch.device:
        """Where index tensors live."""

    @property
    def full_attn_allocator(self) -> SideAllocator:
        """The full side alone."""

    @property
    def swa_attn_allocator(self) -> SideAllocator:
        """The SWA side alone."""

    def full_available_size(self) -> int:
        """Tokens that can be lent on the full side."""

    def swa_available_size(self) -> int:
        """Tokens that can be lent on the SWA side."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        /,
    ) -> torch.Tensor | None:
        """Slots for the new tokens of each row, on both sides; None if there are too few."""

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor, /
    ) -> torch.Tensor | None:
        """One slot a row, on both sides; None if there are too few."""

    def free(self, free_index: torch.Tensor, /) -> None:
        """Return full pages and their peers."""

    def free_swa(self, free_index: torch.Tensor, /) -> None:
        """Return the peers of full pages."""

    def free_full(self, free_index: torch.Tensor, /) -> None:
        """Return full pages whose peers are gone."""

    def recover_tombstone(self, kept_full: torch.Tensor, incoming_full: torch.Tensor, /) -> None:
        """Give the peers of the incoming pages to the kept ones and free the incoming ones."""

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor, /
    ) -> None:
        """Pair full slots with SWA slots."""

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor, /) -> torch.Tensor:
        """The SWA slot of each full slot, 0 for none."""

    @property
    def free_group_is_open(self) -> bool:
        """Whether frees are held back, whoever asked for it."""

    def free_group_begin(self) -> None:
        """Hold frees back."""

    def free_group_end(self) -> None:
        """Make what was freed since available."""

    def get_kvcache(self) -> Any:
        """The pool."""


class CachedRequest(RowHolder, Protocol):
    """A running request. Lengths are in tokens from the front of its row:

        0 ≤ prefix_len ≤ kv_len ≤ kv_allocated_len, and swa_evicted_seqlen ≤ kv_len

    `prefix_len` and `swa_evicted_seqlen` are whole pages."""

    @property
    def token_ids(self) -> Sequence[int] | NDArray[np.int64]:
        """All tokens that are known, `kv_len` or more."""

    @property
    def extra_key(self) -> str | None:
        """See `RadixKey`."""

    kv_len: int
    """Tokens whose KV is computed."""

    kv_allocated_len: int
    """Tokens that have slots; more than `kv_len` while drafts are outstanding."""

    prefix_len: int
    """Tokens at the front whose slots belong to the cache."""

    swa_evicted_seqlen: int
    """Tokens at the front whose SWA slots the window has left behind; what the cache owns of them
    is the cache's business. Never shrinks while the request runs."""

    last_node: TreeNode | None
    """The node that the request has locked: it ends at `prefix_len`. None for none."""

"""Any family's allocator as the prefix cache and the request life see one: the names of kvcore's
hybrid allocator, made of the calls of a dialect.

So the same cache runs over a released SGLang allocator, over somebody's own, and over kvcore's.
Leaves out forms of frees that the cache does not use, and the calls themselves
(`kvcore.targets.dialect`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcore.models import Contract
from kvcore.targets.dialect import Dialect, Slots
from kvcore.targets.protocol import UnsupportedGeometry

NEEDED = frozenset(
    ("extend", "decode", "free", "free_swa", "recover", "load_back", "load_back_swa")
) | {"group_begin", "group_end"}
"""Ops of an allocator without which no prefix cache can be kept over it."""


class OneSide:
    """The full or the SWA side of an allocator alone, for load-back."""

    def __init__(
        self, lend: Callable[[int], Slots | None], take_back: Callable[[Slots], None]
    ) -> None:
        self._lend, self._take_back = lend, take_back

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` slots in whole pages, int64; None if there are too few."""
        return self._lend(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        """Slots of this side that no slot of the other one was paired with."""
        self._take_back(free_index)


class DialectAllocator:
    """`kvcore.CacheAllocator` over a dialect.

    Args:
        dialect: the calls of the allocator.
        contract: what its callers do: where they have no call for the full side alone, slots whose
            peers are gone go as a replaced tombstone does.
        page_size: slots a page.
        device: where its slots are.
        kvcache: the pool that it lends slots of.

    Raises:
        UnsupportedGeometry: the allocator lacks a call that a prefix cache makes.
    """

    def __init__(
        self,
        dialect: Dialect,
        contract: Contract,
        *,
        page_size: int,
        device: torch.device,
        kvcache: Any,
    ) -> None:
        missing = sorted(NEEDED - contract.ops)
        if not contract.locked_recovery:
            missing.append("recovery of a locked value")
        if missing:
            raise UnsupportedGeometry(
                f"a prefix cache runs over allocators with every call that it makes; this one has "
                f"no {', '.join(missing)}"
            )
        self.page_size = page_size
        self.device = device
        self.full_attn_allocator = OneSide(dialect.alloc_full, self.free_full)
        self.swa_attn_allocator = OneSide(dialect.alloc_swa, dialect.free_unpaired_swa)
        self.free_group_is_open = False
        """Whether a group is open that was opened here."""
        self._dialect = dialect
        self._kvcache = kvcache
        self._has_free_full = "free_full" in contract.ops

    def full_available_size(self) -> int:
        """Tokens available on the full side."""
        return self._dialect.answers().full_available

    def swa_available_size(self) -> int:
        """Tokens available on the SWA side."""
        return self._dialect.answers().swa_available

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots of the tokens ``[prefix_len, seq_len)`` of each request, both sides."""
        before, after = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        return self._dialect.extend(before, after, last_loc.tolist())

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request, both sides."""
        return self._dialect.decode(seq_lens_cpu.tolist(), last_loc.tolist())

    def free(self, free_index: torch.Tensor) -> None:
        """Slots that have a peer, with their peers."""
        self._dialect.free(free_index, "slots", 0)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """The peers of full slots."""
        self._dialect.free_swa(free_index, "slots", 0)

    def free_full(self, free_index: torch.Tensor) -> None:
        """Full slots whose peers are gone."""
        if self._has_free_full:
            self._dialect.free_full(free_index, "slots", 0)
        else:
            self._dialect.replace(free_index)

    def recover_tombstone(self, kept_full: torch.Tensor, incoming_full: torch.Tensor) -> None:
        """The kept full slots take over the peers of the incoming ones, which are freed."""
        self._dialect.recover(kept_full, incoming_full)

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Raw mapping write."""
        self._dialect.map(full_indices, swa_indices)

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """SWA slots of full slots, 0 where unmapped."""
        return self._dialect.peers(kv_indices)

    def free_group_begin(self) -> None:
        """Open a free group."""
        self._dialect.group_begin()
        self.free_group_is_open = True

    def free_group_end(self) -> None:
        """Close it."""
        self._dialect.group_end()
        self.free_group_is_open = False

    def get_kvcache(self) -> Any:
        """The pool."""
        return self._kvcache

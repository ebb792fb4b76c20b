"""Kernels that compute the slots of a batch, or lend pages and take them back together with their
peers, in one launch each, where the device has them.

Left out: the same computations in torch, which every device has (`kvcore.allocator`), and which
pages are lent.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch

TORCH, TRITON, NUMPY = "torch", "triton", "numpy"


class SlotKernels(Protocol):
    """Slots of a batch's new tokens, and full pages with their SWA peers.

    Each call is one launch, of nothing where there is nothing to do, waits for no device value, and
    allocates nothing but the answer. All vectors are int64 on one device; what is read has any
    stride, what is written is contiguous. A page's peer is named by its first SWA slot.

    `mapping` is the SWA slot of each full slot, 0 for none, contiguous, page by page from the
    padding page 0 on: `[rows * page_size + rest + 1]`, of which the rest and the last entry, the
    sentinel -1, belong to no page.

    No kernel reads beyond a vector or writes outside the answer, the given vectors and the rows of
    `mapping`, whatever the values. Of vectors that should be equally long, the shortest counts.
    """

    def extend_slots(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        *,
        num_tokens: int,
        page_size: int,
    ) -> torch.Tensor:
        """Slots of tokens `[prefix_len, seq_len)` of each row, concatenated: `[num_tokens]`.

        Args:
            prefix_lens: tokens that each row has, `[batch]`.
            seq_lens: tokens that each row will have, `[batch]`.
            last_loc: slot of each row's last token, `[batch]`.
            new_pages: pages in the order in which the rows begin them.
            num_tokens: sum of `seq_lens - prefix_lens`.
            page_size: slots a page.
        """

    def decode_slots(
        self,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        *,
        page_size: int,
    ) -> torch.Tensor:
        """Slot of the last token of each row: `[batch]`; see `extend_slots`."""

    def decode_paired(
        self,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
    ) -> torch.Tensor:
        """`decode_slots` with `full_pages` as the new pages, and their `map_pages`."""

    def lend(
        self,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
    ) -> torch.Tensor:
        """All slots of the pages, page by page, `[n * page_size]`, and their `map_pages`."""

    def map_pages(
        self,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
    ) -> None:
        """Pair whole pages: every slot of a page is mapped to the slot of its peer as far in.

        The padding page, and what is no page of the mapping, gets no peer.

        Args:
            full_pages: pages, `[n]`, each once.
            swa_firsts: first slot of each one's peer, `[n]`.
            mapping: see above.
            page_size: slots a page.
        """

    def release(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
    ) -> None:
        """Unmap whole pages; write which they are, and their peers.

        Args:
            slots: a slot of each page, `[n]`, each page once.
            mapping: see above; all entries of the pages become 0.
            page_size: slots a page.
            full_pages: gets the page of each slot, `[n]`.
            swa_firsts: gets the SWA slot of each page's first slot, `[n]`; 0 where it has none, or
                the page is none of the mapping.
        """

    def release_peers(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
        swa_firsts: torch.Tensor,
    ) -> None:
        """`release` where the full pages stay lent."""


def chosen_kernels() -> str:
    """What environment variable KVCORE_KERNELS says, empty if nothing."""
    return os.environ.get("KVCORE_KERNELS", "").strip().lower()


def kernels_for(device: torch.device, choice: str | None = None) -> SlotKernels | None:
    """The kernels for tensors on `device`; None where torch computes the slots.

    Args:
        device: where an allocator's index tensors are.
        choice: `torch`, `numpy` (for a CPU), `triton`, or nothing for Triton's kernels on a CUDA
            device if Triton is installed; None means environment variable KVCORE_KERNELS. On a CPU,
            `triton` needs Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported).

    Raises:
        ValueError: another choice, `triton` on a CPU without the interpreter, or `numpy` elsewhere.
        ImportError: `triton` was chosen and is not installed.
    """
    if choice is None:
        choice = chosen_kernels()
    if choice not in ("", NUMPY, TORCH, TRITON):
        raise ValueError(
            f"KVCORE_KERNELS: expected {TORCH}, {NUMPY}, {TRITON} or nothing, got {choice!r}"
        )
    if choice == NUMPY and device.type != "cpu":
        raise ValueError(f"KVCORE_KERNELS: {NUMPY} on {device}; expected {TORCH} or {TRITON}")
    if not choice:
        installed = device.type == "cuda" and find_spec(TRITON) is not None
        choice = TRITON if installed else TORCH
    if choice in (TORCH, NUMPY):
        return None
    # Not at the top: without a GPU nobody should need Triton, or wait for its import.
    triton_slots = import_module("kvcore.kernels.triton_slots")
    if device.type == "cpu" and not triton_slots.INTERPRETED:
        raise ValueError(
            "KVCORE_KERNELS: triton on a CPU; expected TRITON_INTERPRET=1 from before Triton was "
            "imported, or torch"
        )
    kernels: SlotKernels = triton_slots.TritonSlots()
    return kernels

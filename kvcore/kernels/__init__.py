"""Kernels that compute the slots of a batch in one launch, where the device has them.

Left out: the same computation in torch, which every device has (`kvcore.allocator.batch`), and the
pages that the slots come from.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch

TORCH, TRITON = "torch", "triton"


class SlotKernels(Protocol):
    """Slots of the new tokens of a batch: one launch, nothing allocated but the answer.

    All vectors are int64 on one device, of any stride. No kernel reads beyond a vector or writes
    beyond the answer, whatever the values.
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


def kernels_for(device: torch.device, choice: str | None = None) -> SlotKernels | None:
    """The kernels for tensors on `device`; None where torch computes the slots.

    Args:
        device: where an allocator's index tensors are.
        choice: `torch`, `triton`, or nothing for Triton's kernels on a CUDA device if Triton is
            installed; None means environment variable KVCORE_KERNELS. On a CPU, `triton` needs
            Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported).

    Raises:
        ValueError: another choice, or `triton` on a CPU without the interpreter.
        ImportError: `triton` was chosen and is not installed.
    """
    if choice is None:
        choice = os.environ.get("KVCORE_KERNELS", "").strip().lower()
    if choice not in ("", TORCH, TRITON):
        raise ValueError(f"KVCORE_KERNELS: expected {TORCH}, {TRITON} or nothing, got {choice!r}")
    if not choice:
        installed = device.type == "cuda" and find_spec(TRITON) is not None
        choice = TRITON if installed else TORCH
    if choice == TORCH:
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

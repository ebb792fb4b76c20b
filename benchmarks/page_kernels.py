"""Stand-ins for the page kernels of released engines, as cheap as Python makes them.

A release launches Triton kernels to fill pages with slots. There is no GPU here, and the harness's
own doubles (`kvcore.targets.sglang.kernels`) are slow, so timing them would flatter us. These write
through numpy, a few microseconds a launch, about what launching a kernel costs the host; they check
nothing. Leaves out everything that the benchmarks do not ask for: rows extend from nothing, and all
rows of a decode open a page or none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from kvcore.targets.sglang.kernels import PageKernel, get_and_clear_swa_pages


@cache
def _offsets(page_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(page_size)


def extend_rows(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    padded_batch: int,
    page_size: int,
) -> None:
    """Write the slots of whole new pages; `out_indices` is int64 `[pages * page_size]`."""
    if out_indices.is_meta:
        out_indices.zero_()  # where launches are counted, one is one
        return
    answer = out_indices.numpy().reshape(-1, page_size)
    starts = free_pages.numpy()[: len(answer), None] * page_size
    np.add(starts, _offsets(page_size), out=answer)


def decode_rows(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    padded_batch: int,
    page_size: int,
) -> None:
    """Write one slot a row, `out_indices` int64 `[batch]`: after `last_loc`, or of a new page."""
    if out_indices.is_meta:
        out_indices.zero_()
        return
    answer = out_indices.numpy()
    if last_loc.numpy()[0] % page_size == page_size - 1:
        np.multiply(free_pages.numpy()[: len(answer)], page_size, out=answer)
    else:
        np.add(last_loc.numpy(), 1, out=answer)


LEAN_KERNELS: Mapping[str, object] = {
    "alloc_extend_kernel": PageKernel(extend_rows),
    "alloc_decode_kernel": PageKernel(decode_rows),
    "get_and_clear_swa_pages": get_and_clear_swa_pages,
}
"""The stand-ins under the names that a release imports."""

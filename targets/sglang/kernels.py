"""Plain doubles of the page kernels that a release's paged allocators launch: same arguments, same
result, on any torch device and without Triton. One thing is stricter: a kernel that would read
beyond the free list stops with `OverreadError` instead of fetching whatever lies there.

Leaves out launch configuration: the grid and the padded batch size are accepted and ignored.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch


class OverreadError(IndexError):
    """A page kernel read an entry that the free list does not have (sglang#34399).

    `kernel` is the kernel's name, `request` the first request of the batch whose pages are not all
    there, `needed` the pages that the whole batch reads, `length` the pages in the free list.
    """

    def __init__(self, kernel: str, request: int, needed: int, length: int) -> None:
        super().__init__(
            f"{kernel}: request {request} reads entry {length} of a free list of {length} pages; "
            f"the batch needs {needed}"
        )
        self.kernel = kernel
        self.request = request
        self.needed = needed
        self.length = length


@dataclass(frozen=True)
class PageKernel:
    """Gives a plain function the `kernel[grid](...)` call form of a Triton kernel."""

    body: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The function itself: the batch size is the length of its tensors."""
        return self.body


def extend_rows(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    padded_batch: int,
    page_size: int,
) -> None:
    """Write the slots of tokens `[prefix_len, seq_len)` of every request, concatenated.

    `prefix_lens`, `seq_lens` and `last_loc` are integer tensors `[batch]`, `free_pages` and
    `out_indices` int64 `[pages]` and `[tokens]`. The rest of the page of `last_loc` comes first,
    then pages in the order of the free list. Raises `OverreadError`, and IndexError when the
    batch does not fill `out_indices` exactly; either way nothing is written.
    """
    prefixes: list[int] = prefix_lens.tolist()
    lengths: list[int] = seq_lens.tolist()
    needs = [
        -(-length // page_size) + (-prefix // page_size)
        for prefix, length in zip(prefixes, lengths, strict=True)
    ]
    pages = _read_pages("alloc_extend_kernel", needs, free_pages)
    out: list[int] = []
    taken = 0
    for prefix, length, last, need in zip(prefixes, lengths, last_loc.tolist(), needs, strict=True):
        left = length - prefix
        head = min(left, -prefix % page_size)
        out.extend(range(last + 1, last + 1 + head))
        left -= head
        for page in pages[taken : taken + need]:
            start = page * page_size
            out.extend(range(start, start + min(left, page_size)))
            left -= page_size
        taken += need
    _write("alloc_extend_kernel", out, out_indices)


def decode_rows(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    padded_batch: int,
    page_size: int,
) -> None:
    """Write one slot a request: the one after `last_loc`, or the first of a new page.

    `seq_lens`, which count the new token, and `last_loc` are integer tensors `[batch]`,
    `free_pages` and `out_indices` int64 `[pages]` and `[batch]`. Raises as `extend_rows` does.
    """
    opens_page = [(length - 1) % page_size == 0 for length in seq_lens.tolist()]
    pages = iter(_read_pages("alloc_decode_kernel", opens_page, free_pages))
    out = [
        next(pages) * page_size if opens else last + 1
        for opens, last in zip(opens_page, last_loc.tolist(), strict=True)
    ]
    _write("alloc_decode_kernel", out, out_indices)


def get_and_clear_swa_pages(
    full_page_representatives: torch.Tensor,
    mapping: torch.Tensor,
    page_size: int,
    check_page_mappings: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Look the SWA pages of distinct full pages up, and unmap those full pages whole.

    `full_page_representatives` is `[pages]`, one slot of each full page. Returns the SWA page ids
    (dtype of `mapping`), whether each slot given was mapped, and, if asked for, whether all mapped
    slots of each page agree on the SWA page. Releases use it for CUDA tensors only.
    """
    representatives = full_page_representatives.to(torch.int64)
    peers = mapping[representatives]
    swa_pages = peers // page_size
    is_mapped = peers > 0
    offsets = torch.arange(page_size, dtype=torch.int64, device=mapping.device)
    slots = (representatives // page_size * page_size)[:, None] + offsets
    agrees = None
    if check_page_mappings:
        page_peers = mapping[slots]
        strays = (page_peers > 0) & (page_peers // page_size != swa_pages[:, None])
        agrees = is_mapped & ~strays.any(dim=1)
    mapping[slots] = 0
    return swa_pages, is_mapped, agrees


def _read_pages(kernel: str, needs: list[int] | list[bool], free_pages: torch.Tensor) -> list[int]:
    """The first entries of the free list, as many as the requests need one after the other."""
    needed = sum(needs)
    length = free_pages.numel()
    if needed > length:
        request = bisect_right(list(accumulate(needs)), length)
        raise OverreadError(kernel, request, needed, length)
    pages: list[int] = free_pages.narrow(0, 0, needed).tolist()
    return pages


def _write(kernel: str, slots: list[int], out_indices: torch.Tensor) -> None:
    if len(slots) != out_indices.numel():
        raise IndexError(
            f"{kernel}: the batch has {len(slots)} new tokens, its output {out_indices.numel()} "
            "entries; expected the same number"
        )
    # Through numpy: a third of the time of torch.tensor on the short lists of a test program.
    out_indices.copy_(torch.from_numpy(np.array(slots, dtype=np.int64)))


DOUBLES: dict[str, object] = {
    "alloc_extend_kernel": PageKernel(extend_rows),
    "alloc_decode_kernel": PageKernel(decode_rows),
    "get_and_clear_swa_pages": get_and_clear_swa_pages,
}
"""The doubles under the names that a release imports."""

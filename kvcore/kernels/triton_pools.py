"""Triton kernels for pages that come back with their peers, or are lent with them.

A program handles a tile of `page_block` pages by `entry_block` entries of their mapping rows, and
goes along the rows if they are longer than the tile:

    release   takes the first entry of each row by an exchange with 0 and clears the others
    lend      writes each row, and the page's slots into the answer

Lanes run in no order, so none may read what another clears. The exchange reads and clears an entry
at once, and the entries that other lanes clear are read by nobody. A page that is given twice,
against the contract, yields its peer once and 0 the other time.

Loads and stores are masked by the lengths of what they touch, and rows by how many there are: what
is no page of the mapping has no row, and page 0, the padding page, gets no peer.

Left out: the launches (`kvcore.kernels.triton_slots`).
"""

import triton
import triton.language as tl


@triton.jit(
    # Each would otherwise be compiled again for 1, for multiples of 16, and where a view starts.
    do_not_specialize=["num_pages", "num_rows"],
    do_not_specialize_on_alignment=["slots", "slot_stride", "full_pages", "swa_firsts"],
)
def release_kernel(
    slots: tl.tensor,
    slot_stride: tl.tensor,
    mapping: tl.tensor,
    full_pages: tl.tensor | None,
    swa_firsts: tl.tensor,
    num_pages: tl.tensor,
    num_rows: tl.tensor,
    page_size: tl.constexpr,
    page_block: tl.constexpr,
    entry_block: tl.constexpr,
) -> None:
    """Page and peer of each slot, and the page's row cleared, in one launch.

    For each page it reads the slot and the row's first entry, and writes the row, the peer, and the
    page where `full_pages` is given: 8 * (page_size + 4) bytes.
    """
    item = tl.program_id(0).to(tl.int64) * page_block + tl.arange(0, page_block)
    given = item < num_pages
    slot = tl.load(slots + item * slot_stride, mask=given, other=0)
    # A division that rounds down, as torch's: the kernel's own one rounds towards 0.
    page = tl.where(slot < 0, ~(~slot // page_size), slot // page_size)
    inside = given & (page >= 0) & (page < num_rows)
    row = mapping + page * page_size
    nothing = tl.full((page_block,), 0, tl.int64)
    first = tl.atomic_xchg(row, nothing, mask=inside, sem="relaxed")
    tl.store(swa_firsts + item, tl.where(inside, first, 0), mask=given)
    if full_pages is not None:
        tl.store(full_pages + item, page, mask=given)
    if page_size > 1:
        for start in range(0, page_size, entry_block):
            offset = start + tl.arange(0, entry_block)
            others = inside[:, None] & ((offset > 0) & (offset < page_size))[None, :]
            tl.store(row[:, None] + offset[None, :], 0, mask=others)


@triton.jit
def write_rows(
    block: tl.tensor,
    answer: tl.tensor | None,
    full_pages: tl.tensor,
    full_stride: tl.tensor,
    swa_firsts: tl.tensor,
    swa_stride: tl.tensor,
    mapping: tl.tensor,
    num_pages: tl.tensor,
    num_rows: tl.tensor,
    page_size: tl.constexpr,
    page_block: tl.constexpr,
    entry_block: tl.constexpr,
) -> None:
    """The rows of the `block`-th `page_block` pages, and their slots where `answer` is given."""
    item = block.to(tl.int64) * page_block + tl.arange(0, page_block)
    given = item < num_pages
    page = tl.load(full_pages + item * full_stride, mask=given, other=0)
    first = tl.load(swa_firsts + item * swa_stride, mask=given, other=0)
    # Lanes behind the last page hold page 0.
    mapped = (page > 0) & (page < num_rows)
    for start in range(0, page_size, entry_block):
        offset = start + tl.arange(0, entry_block).to(tl.int64)
        in_page = (offset < page_size)[None, :]
        slot = page[:, None] * page_size + offset[None, :]
        peer = first[:, None] + offset[None, :]
        tl.store(mapping + slot, peer, mask=mapped[:, None] & in_page)
        if answer is not None:
            place = item[:, None] * page_size + offset[None, :]
            tl.store(answer + place, slot, mask=given[:, None] & in_page)


@triton.jit(
    do_not_specialize=["num_pages", "num_rows"],
    do_not_specialize_on_alignment=["full_pages", "full_stride", "swa_firsts", "swa_stride"],
)
def lend_kernel(
    answer: tl.tensor | None,
    full_pages: tl.tensor,
    full_stride: tl.tensor,
    swa_firsts: tl.tensor,
    swa_stride: tl.tensor,
    mapping: tl.tensor,
    num_pages: tl.tensor,
    num_rows: tl.tensor,
    page_size: tl.constexpr,
    page_block: tl.constexpr,
    entry_block: tl.constexpr,
) -> None:
    """The rows of all pages, and their slots where `answer` is given, in one launch.

    For each page it reads the page and its peer, and writes the row, and the slots where `answer`
    is given: 8 * (2 * page_size + 2) bytes.
    """
    write_rows(
        tl.program_id(0),
        answer,
        full_pages,
        full_stride,
        swa_firsts,
        swa_stride,
        mapping,
        num_pages,
        num_rows,
        page_size,
        page_block,
        entry_block,
    )

"""Triton kernels for the slots of extend and decode batches, and the launches of all kernels.

Every program adds up for itself what the rows before its own take, so one launch does it all and
nothing is kept in between:

    extend   a program places a block of the batch's tokens; a token finds its row, and the tokens
             and pages before that row, by adding up the rows that end at or before it
    decode   a program places a block of rows; a row finds its page by counting the rows before it
             that begin one too; where a mapping is given, further programs pair the new pages

Loads and stores are masked by the lengths of what they touch, so lengths or pages that do not fit
each other give wrong slots, and never an access outside a tensor.

Left out: the same computation in torch (`kvcore.allocator.batch`), which is the reference; the
kernels that know pages alone (`kvcore.kernels.triton_pools`).
"""

import torch
import triton
import triton.language as tl

from kvcore.kernels.triton_pools import lend_kernel, release_kernel, write_rows


@triton.jit(
    # Each would otherwise be compiled again for 1, for multiples of 16, and where a view starts.
    do_not_specialize=["num_tokens", "num_rows", "num_pages"],
    do_not_specialize_on_alignment=["new_pages"],
)
def _extend_kernel(
    slots: tl.tensor,
    prefix_lens: tl.tensor,
    prefix_stride: tl.tensor,
    seq_lens: tl.tensor,
    seq_stride: tl.tensor,
    last_loc: tl.tensor,
    last_stride: tl.tensor,
    new_pages: tl.tensor,
    page_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_pages: tl.tensor,
    page_size: tl.constexpr,
    row_block: tl.constexpr,
    token_block: tl.constexpr,
) -> None:
    """Slots of the tokens of all rows, in one launch.

    Each program reads the lengths of all rows, 16 bytes a row; for each of its tokens it reads the
    row's prefix, last slot and new page, 24 bytes, and writes 8.
    """
    token = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)
    placed = token < num_tokens
    # Of the rows that end at or before each token: how many, their tokens, their new pages.
    row = tl.full((token_block,), 0, tl.int64)
    tokens_before = tl.full((token_block,), 0, tl.int64)
    pages_before = tl.full((token_block,), 0, tl.int64)
    start_of_block = tl.full((1,), 0, tl.int64)
    for start in range(0, num_rows, row_block):
        other = start + tl.arange(0, row_block).to(tl.int64)
        inside = other < num_rows
        had = tl.load(prefix_lens + other * prefix_stride, mask=inside, other=0)
        has = tl.load(seq_lens + other * seq_stride, mask=inside, other=0)
        growth = has - had
        begun = (has + page_size - 1) // page_size - (had + page_size - 1) // page_size
        end = start_of_block + tl.cumsum(growth)
        start_of_block += tl.sum(growth)
        before = inside[:, None] & (end[:, None] <= token[None, :])
        row += tl.sum(before.to(tl.int64), axis=0)
        tokens_before += tl.sum(tl.where(before, growth[:, None], 0), axis=0)
        pages_before += tl.sum(tl.where(before, begun[:, None], 0), axis=0)
    known = placed & (row < num_rows)
    prefix = tl.load(prefix_lens + row * prefix_stride, mask=known, other=0)
    last = tl.load(last_loc + row * last_stride, mask=known, other=0)
    position = prefix + token - tokens_before
    first_new = (prefix + page_size - 1) // page_size
    rank = pages_before + position // page_size - first_new
    begins = position >= first_new * page_size
    readable = known & begins & (rank >= 0) & (rank < num_pages)
    page = tl.load(new_pages + rank * page_stride, mask=readable, other=0)
    fresh = page * page_size + position % page_size
    continued = last + 1 + position - prefix
    tl.store(slots + token, tl.where(begins, fresh, continued), mask=placed)


@triton.jit(
    do_not_specialize=["num_rows", "num_row_programs", "num_pages", "num_paired", "num_mapped"],
    do_not_specialize_on_alignment=["new_pages", "swa_firsts", "swa_stride"],
)
def _decode_kernel(
    slots: tl.tensor,
    seq_lens: tl.tensor,
    seq_stride: tl.tensor,
    last_loc: tl.tensor,
    last_stride: tl.tensor,
    new_pages: tl.tensor,
    page_stride: tl.tensor,
    swa_firsts: tl.tensor | None,
    swa_stride: tl.tensor,
    mapping: tl.tensor | None,
    num_rows: tl.tensor,
    num_row_programs: tl.tensor,
    num_pages: tl.tensor,
    num_paired: tl.tensor,
    num_mapped: tl.tensor,
    page_size: tl.constexpr,
    row_block: tl.constexpr,
    page_block: tl.constexpr,
    entry_block: tl.constexpr,
) -> None:
    """Slot of each row's last token, and where `mapping` is given the rows of the new pages, in one
    launch.

    A program of rows reads the lengths up to its last row, 8 bytes a row; for each of its rows it
    reads the last slot and the new page, 16 bytes, and writes 8. Programs of pages touch what
    `kvcore.kernels.triton_pools.lend_kernel` touches without an answer.
    """
    program = tl.program_id(0)
    if program < num_row_programs:
        first = program.to(tl.int64) * row_block
        lane = tl.arange(0, row_block)
        begun = tl.full((row_block,), 0, tl.int64)
        for start in range(0, first, row_block):
            # Blocks before this program's are full: no mask.
            length = tl.load(seq_lens + (start + lane) * seq_stride)
            begun += ((length - 1) % page_size == 0).to(tl.int64)
        row = first + lane
        placed = row < num_rows
        length = tl.load(seq_lens + row * seq_stride, mask=placed, other=0)
        begins = placed & ((length - 1) % page_size == 0)
        rank = tl.sum(begun) + tl.cumsum(begins.to(tl.int64)) - 1
        readable = begins & (rank < num_pages)
        page = tl.load(new_pages + rank * page_stride, mask=readable, other=0)
        last = tl.load(last_loc + row * last_stride, mask=placed, other=0)
        tl.store(slots + row, tl.where(begins, page * page_size, last + 1), mask=placed)
    elif mapping is not None:
        write_rows(
            program - num_row_programs,
            None,
            new_pages,
            page_stride,
            swa_firsts,
            swa_stride,
            mapping,
            num_paired,
            num_mapped,
            page_size,
            page_block,
            entry_block,
        )


INTERPRETED = not isinstance(_extend_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, which works on a CPU; settled at import."""


class TritonSlots:
    """`kvcore.kernels.SlotKernels` by Triton; each argument is a power of 2.

    Args:
        row_block: rows of an extend that a program adds up at a time.
        token_block: tokens of an extend that a program places.
        decode_block: rows of a decode that a program places.
        entry_block: entries of the mapping that a program reads or writes at a time; the rows of
            several pages where they are shorter.
    """

    def __init__(
        self,
        row_block: int = 16,
        token_block: int = 256,
        decode_block: int = 256,
        entry_block: int = 1024,
    ) -> None:
        self._row_block = row_block
        self._token_block = token_block
        self._decode_block = decode_block
        self._entry_block = entry_block

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
        """See the protocol."""
        slots = self._answer(num_tokens, new_pages.device)
        if num_tokens == 0:
            return slots
        # Triton launches on the current device, which need not be the allocator's.
        with torch.cuda.device_of(slots):
            _extend_kernel[(triton.cdiv(num_tokens, self._token_block),)](
                slots,
                prefix_lens,
                prefix_lens.stride(0),
                seq_lens,
                seq_lens.stride(0),
                last_loc,
                last_loc.stride(0),
                new_pages,
                new_pages.stride(0),
                num_tokens,
                prefix_lens.numel(),
                new_pages.numel(),
                page_size=page_size,
                row_block=self._row_block,
                token_block=self._token_block,
            )
        return slots

    def decode_slots(
        self,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        *,
        page_size: int,
    ) -> torch.Tensor:
        """See the protocol."""
        return self._decode(seq_lens, last_loc, new_pages, None, None, page_size)

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
        """See the protocol."""
        return self._decode(seq_lens, last_loc, full_pages, swa_firsts, mapping, page_size)

    def _decode(
        self,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        swa_firsts: torch.Tensor | None,
        mapping: torch.Tensor | None,
        page_size: int,
    ) -> torch.Tensor:
        slots = self._answer(seq_lens.numel(), new_pages.device)
        row_programs = triton.cdiv(slots.numel(), self._decode_block)
        page_block, entry_block = self._tile(page_size)
        swa_stride = num_paired = num_mapped = 0
        if swa_firsts is not None and mapping is not None:
            swa_stride = swa_firsts.stride(0)
            num_paired = min(new_pages.numel(), swa_firsts.numel())
            num_mapped = _num_rows(mapping, page_size)
        programs = row_programs + triton.cdiv(num_paired, page_block)
        if programs == 0:
            return slots
        with torch.cuda.device_of(slots):
            _decode_kernel[(programs,)](
                slots,
                seq_lens,
                seq_lens.stride(0),
                last_loc,
                last_loc.stride(0),
                new_pages,
                new_pages.stride(0),
                swa_firsts,
                swa_stride,
                mapping,
                slots.numel(),
                row_programs,
                new_pages.numel(),
                num_paired,
                num_mapped,
                page_size=page_size,
                row_block=self._decode_block,
                page_block=page_block,
                entry_block=entry_block,
            )
        return slots

    def lend(
        self,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
    ) -> torch.Tensor:
        """See the protocol."""
        num_pages = min(full_pages.numel(), swa_firsts.numel())
        slots = self._answer(num_pages * page_size, mapping.device)
        self._pair(slots, full_pages, swa_firsts, mapping, page_size)
        return slots

    def map_pages(
        self,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
    ) -> None:
        """See the protocol."""
        self._pair(None, full_pages, swa_firsts, mapping, page_size)

    def _pair(
        self,
        answer: torch.Tensor | None,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
        mapping: torch.Tensor,
        page_size: int,
    ) -> None:
        num_pages = min(full_pages.numel(), swa_firsts.numel())
        if num_pages == 0:
            return
        page_block, entry_block = self._tile(page_size)
        with torch.cuda.device_of(mapping):
            lend_kernel[(triton.cdiv(num_pages, page_block),)](
                answer,
                full_pages,
                full_pages.stride(0),
                swa_firsts,
                swa_firsts.stride(0),
                mapping,
                num_pages,
                _num_rows(mapping, page_size),
                page_size=page_size,
                page_block=page_block,
                entry_block=entry_block,
            )

    def release(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
        full_pages: torch.Tensor,
        swa_firsts: torch.Tensor,
    ) -> None:
        """See the protocol."""
        num_pages = min(slots.numel(), full_pages.numel(), swa_firsts.numel())
        self._release(slots, mapping, full_pages, swa_firsts, num_pages, page_size)

    def release_peers(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        *,
        page_size: int,
        swa_firsts: torch.Tensor,
    ) -> None:
        """See the protocol."""
        num_pages = min(slots.numel(), swa_firsts.numel())
        self._release(slots, mapping, None, swa_firsts, num_pages, page_size)

    def _release(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        full_pages: torch.Tensor | None,
        swa_firsts: torch.Tensor,
        num_pages: int,
        page_size: int,
    ) -> None:
        if num_pages == 0:
            return
        page_block, entry_block = self._tile(page_size)
        with torch.cuda.device_of(mapping):
            release_kernel[(triton.cdiv(num_pages, page_block),)](
                slots,
                slots.stride(0),
                mapping,
                full_pages,
                swa_firsts,
                num_pages,
                _num_rows(mapping, page_size),
                page_size=page_size,
                page_block=page_block,
                entry_block=entry_block,
            )

    def _tile(self, page_size: int) -> tuple[int, int]:
        """Pages that a program handles, and entries of each that it handles at a time."""
        width: int = min(triton.next_power_of_2(page_size), self._entry_block)
        return self._entry_block // width, width

    @staticmethod
    def _answer(count: int, device: torch.device) -> torch.Tensor:
        """Where a kernel writes: everything that a call allocates."""
        return torch.empty(count, dtype=torch.int64, device=device)


def _num_rows(mapping: torch.Tensor, page_size: int) -> int:
    """Whole rows of the mapping, the padding page's included, before its sentinel."""
    return (mapping.numel() - 1) // page_size

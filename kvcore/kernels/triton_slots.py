"""Triton kernels for the slots of extend and decode batches.

Every program adds up for itself what the rows before its own take, so one launch does it all and
nothing is kept in between:

    extend   a program places a block of the batch's tokens; a token finds its row, and the tokens
             and pages before that row, by adding up the rows that end at or before it
    decode   a program places a block of rows; a row finds its page by counting the rows before it
             that begin one too

Loads and stores are masked by the lengths of what they touch, so lengths or pages that do not fit
each other give wrong slots, and never an access outside a tensor.

Left out: the same computation in torch (`kvcore.allocator.batch`), which is the reference.
"""

import torch
import triton
import triton.language as tl


@triton.jit
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


@triton.jit
def _decode_kernel(
    slots: tl.tensor,
    seq_lens: tl.tensor,
    seq_stride: tl.tensor,
    last_loc: tl.tensor,
    last_stride: tl.tensor,
    new_pages: tl.tensor,
    page_stride: tl.tensor,
    num_rows: tl.tensor,
    num_pages: tl.tensor,
    page_size: tl.constexpr,
    row_block: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * row_block
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


INTERPRETED = not isinstance(_extend_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, which works on a CPU; settled at import."""


class TritonSlots:
    """`kvcore.kernels.SlotKernels` by Triton.

    Args:
        row_block: rows of an extend that a program adds up at a time, a power of 2.
        token_block: tokens of an extend that a program places, a power of 2.
        decode_block: rows of a decode that a program places, a power of 2.
    """

    def __init__(
        self, row_block: int = 16, token_block: int = 256, decode_block: int = 256
    ) -> None:
        self._row_block = row_block
        self._token_block = token_block
        self._decode_block = decode_block

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
        slots = self._answer(seq_lens.numel(), new_pages.device)
        if slots.numel() == 0:
            return slots
        with torch.cuda.device_of(slots):
            _decode_kernel[(triton.cdiv(slots.numel(), self._decode_block),)](
                slots,
                seq_lens,
                seq_lens.stride(0),
                last_loc,
                last_loc.stride(0),
                new_pages,
                new_pages.stride(0),
                slots.numel(),
                new_pages.numel(),
                page_size=page_size,
                row_block=self._decode_block,
            )
        return slots

    @staticmethod
    def _answer(count: int, device: torch.device) -> torch.Tensor:
        """Where a kernel writes: everything that a call allocates."""
        return torch.empty(count, dtype=torch.int64, device=device)

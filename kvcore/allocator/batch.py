"""Extend and decode batches: how many new pages they need, and the slots they get.

Page counts come from the host copies of the lengths, so they are known before the free list is read
and without a synchronisation; slots are computed on the device for the whole batch at once, in a
few torch operations or by the kernels of `kvcore.kernels`, which give the same answer.

Left out: where the pages come from, and whether `last_loc` is really on loan.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvcore.allocator.arguments import (
    as_index,
    as_number,
    is_index,
    require_equal_lengths,
)
from kvcore.errors import GeometryError
from kvcore.kernels import SlotKernels

HOST = torch.device("cpu")
"""Where the host's copies of lengths are."""

_FEW_ROWS = 32
"""Rows of an extend up to which torch is asked for each by itself."""


@lru_cache(maxsize=64)
def _offsets(page_size: int, device: torch.device) -> torch.Tensor:
    """0..page_size-1, int64, shared by all who only read it."""
    return torch.arange(page_size, device=device)


def _vector(operation: str, name: str, vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`as_index`, which says the name of the vector if it refuses it."""
    if is_index(vector, device):
        return vector
    return as_index(f"{operation}({name})", vector, device)


def _are_plain(vectors: tuple[torch.Tensor, ...]) -> bool:
    """Whether all are int64 vectors on a CPU: `is_index` of each, in one call."""
    for vector in vectors:
        if not (
            type(vector) is torch.Tensor
            and vector.dtype is torch.int64
            and vector.dim() == 1
            and vector.is_cpu
        ):
            return False
    return True


def _pages_up_to(lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that hold the first `lengths` tokens of each row."""
    return (lengths + page_size - 1) // page_size


@dataclass(eq=False)
class ExtendBatch:
    """Rows that grow from `prefix_lens` to `seq_lens` tokens; all vectors int64 `[batch]`."""

    operation: str
    prefix_lens: torch.Tensor
    prefix_lens_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    last_loc: torch.Tensor
    num_tokens: int

    @classmethod
    def checked(
        cls,
        operation: str,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        num_tokens: int,
        device: torch.device,
    ) -> "ExtendBatch":
        """Check what the host can see.

        Raises:
            IndexTensorError: rank, dtype or device of a vector.
            GeometryError: unequal lengths, a negative prefix, a row that shrinks, extensions that
                do not add up to `num_tokens`, or `num_tokens` that is no integer.
        """
        num_tokens = as_number(operation, "extend_num_tokens", num_tokens)
        vectors = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc)
        if device != HOST or not _are_plain(vectors):
            vectors = (
                _vector(operation, "prefix_lens", prefix_lens, device),
                _vector(operation, "prefix_lens_cpu", prefix_lens_cpu, HOST),
                _vector(operation, "seq_lens", seq_lens, device),
                _vector(operation, "seq_lens_cpu", seq_lens_cpu, HOST),
                _vector(operation, "last_loc", last_loc, device),
            )
        batch = cls(operation, *vectors, num_tokens)
        count = last_loc.numel()
        if not (
            prefix_lens.numel() == count == prefix_lens_cpu.numel()
            and seq_lens.numel() == count == seq_lens_cpu.numel()
        ):
            require_equal_lengths(
                operation,
                prefix_lens=prefix_lens,
                prefix_lens_cpu=prefix_lens_cpu,
                seq_lens=seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                last_loc=last_loc,
            )
        prefixes, lengths = batch.host_prefix_lens, batch.host_seq_lens
        for prefix, length in zip(prefixes, lengths, strict=True):
            if not 0 <= prefix <= length:
                raise GeometryError(
                    f"{operation}: expected 0 <= prefix_len <= seq_len for every row"
                )
        growth = sum(lengths) - sum(prefixes)
        if growth != num_tokens:
            raise GeometryError(
                f"{operation}: expected extensions that add up to extend_num_tokens {num_tokens}, "
                f"got {growth}"
            )
        return batch

    def __post_init__(self) -> None:
        # As numbers: torch costs more to call on short vectors than to run.
        self.host_prefix_lens: list[int] = self.prefix_lens_cpu.tolist()
        """`prefix_lens_cpu` as numbers."""
        self.host_seq_lens: list[int] = self.seq_lens_cpu.tolist()
        """`seq_lens_cpu` as numbers."""

    def num_new_pages(self, page_size: int) -> int:
        """Pages that the whole batch needs beyond those its rows have already begun."""
        lengths, prefixes = self.host_seq_lens, self.host_prefix_lens
        if page_size == 1:
            return sum(lengths) - sum(prefixes)
        pages = 0
        for prefix, length in zip(prefixes, lengths, strict=True):
            pages += -(-length // page_size) - -(-prefix // page_size)
        return pages

    def slots(
        self, new_pages: torch.Tensor, page_size: int, kernels: SlotKernels | None = None
    ) -> torch.Tensor:
        """Slots of all new tokens in row order, concatenated: int64 `[num_tokens]`.

        Each row first fills the page of its `last_loc`, then takes its share of `new_pages`
        (int64 `[num_new_pages]`) in order. Without `kernels`, torch computes them. At page size 1
        the answer is `new_pages` itself.
        """
        if page_size == 1:
            return new_pages
        if kernels is not None:
            return kernels.extend_slots(
                self.prefix_lens,
                self.seq_lens,
                self.last_loc,
                new_pages,
                num_tokens=self.num_tokens,
                page_size=page_size,
            )
        if len(self.host_prefix_lens) <= _FEW_ROWS:
            return self._slots_row_by_row(new_pages, page_size)
        growth = self.seq_lens - self.prefix_lens
        row = torch.repeat_interleave(growth, output_size=self.num_tokens)
        # Position of every new token in its row: how far it is from the batch's first token of
        # that row, plus the prefix.
        row_start = torch.cumsum(growth, 0) - growth
        token = torch.arange(self.num_tokens, device=row.device)
        position = token - row_start[row] + self.prefix_lens[row]
        continued = self.last_loc[row] + 1 + position - self.prefix_lens[row]
        if new_pages.numel() == 0:
            return continued
        first_page = _pages_up_to(self.prefix_lens, page_size)
        pages_per_row = _pages_up_to(self.seq_lens, page_size) - first_page
        rank = (torch.cumsum(pages_per_row, 0) - pages_per_row - first_page)[row]
        page_in_row = position // page_size
        # Tokens on a continued page have no new page; the clamp keeps their unused read in range.
        page = new_pages[(rank + page_in_row).clamp(0, new_pages.numel() - 1)]
        fresh = page * page_size + position % page_size
        return torch.where(page_in_row < first_page[row], continued, fresh)

    def _slots_row_by_row(self, new_pages: torch.Tensor, page_size: int) -> torch.Tensor:
        """`slots` where everything but slots and pages is known to the host.

        One kernel for all new pages, one for each row that goes on in a page, and two to join them:
        with few rows far less than asking the device who is who.
        """
        offsets = _offsets(page_size, new_pages.device)
        fresh = torch.add(offsets, new_pages.unsqueeze(1), alpha=page_size).view(-1)
        parts: list[torch.Tensor] = []
        start = 0
        behind: torch.Tensor | None = None
        rows = zip(self.host_prefix_lens, self.host_seq_lens, strict=True)
        for row, (prefix, length) in enumerate(rows):
            tokens = length - prefix
            onto_last = min(-prefix % page_size, tokens)
            if onto_last:
                if behind is None:
                    behind = self.last_loc + 1
                parts.append(torch.add(offsets[:onto_last], behind[row]))
            if tokens > onto_last:
                parts.append(fresh[start : start + tokens - onto_last])
                start += -(-(tokens - onto_last) // page_size) * page_size
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else fresh


@dataclass(frozen=True)
class SwaTail:
    """The part `[start, end)` of one row's extension that gets SWA slots; positions in the row."""

    start: int
    end: int

    @classmethod
    def checked(cls, batch: ExtendBatch, tail_len: int, tail_end: int | None) -> "SwaTail":
        """The last `tail_len` tokens before `tail_end`, None meaning the end of the row.

        Raises:
            GeometryError: a batch of more or less than one row, numbers that are no integers, or a
                tail that is no part of the extension.
        """
        tail_len = as_number(batch.operation, "swa_tail_len", tail_len)
        rows = batch.seq_lens_cpu.numel()
        if rows != 1:
            raise GeometryError(f"{batch.operation}: expected a batch of one row, got {rows}")
        prefix, length = int(batch.prefix_lens_cpu[0]), int(batch.seq_lens_cpu[0])
        end = length
        if tail_end is not None:
            end = as_number(batch.operation, "swa_tail_end", tail_end)
        if not prefix <= end <= length:
            raise GeometryError(
                f"{batch.operation}: expected swa_tail_end in {prefix}..{length}, got {end}"
            )
        if not 0 <= tail_len <= end - prefix:
            raise GeometryError(
                f"{batch.operation}: expected swa_tail_len in 0..{end - prefix}, got {tail_len}"
            )
        return cls(end - tail_len, end)

    def require_aligned(self, operation: str, page_size: int) -> None:
        """Raise GeometryError unless the tail, if there is one, starts on a page boundary."""
        if self.start < self.end and self.start % page_size != 0:
            raise GeometryError(
                f"{operation}: expected a tail that starts on a page boundary of "
                f"{page_size} tokens, got token {self.start}"
            )

    def num_pages(self, page_size: int) -> int:
        """SWA pages that a page-aligned tail needs."""
        return -(-(self.end - self.start) // page_size)


@dataclass(eq=False)
class DecodeBatch:
    """Rows that grow by one token to `seq_lens`; all vectors int64 `[batch]`."""

    operation: str
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    last_loc: torch.Tensor

    @classmethod
    def checked(
        cls,
        operation: str,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        device: torch.device,
    ) -> "DecodeBatch":
        """Check what the host can see.

        Raises:
            IndexTensorError: rank, dtype or device of a vector.
            GeometryError: unequal lengths, or a row of less than one token.
        """
        vectors = (seq_lens, seq_lens_cpu, last_loc)
        if device != HOST or not _are_plain(vectors):
            vectors = (
                _vector(operation, "seq_lens", seq_lens, device),
                _vector(operation, "seq_lens_cpu", seq_lens_cpu, HOST),
                _vector(operation, "last_loc", last_loc, device),
            )
        batch = cls(operation, *vectors)
        count = seq_lens.numel()
        if not count == seq_lens_cpu.numel() == last_loc.numel():
            require_equal_lengths(
                operation, seq_lens=seq_lens, seq_lens_cpu=seq_lens_cpu, last_loc=last_loc
            )
        if min(batch.host_seq_lens, default=1) < 1:
            raise GeometryError(f"{operation}: expected seq_lens of at least 1")
        return batch

    def __post_init__(self) -> None:
        self.host_seq_lens: list[int] = self.seq_lens_cpu.tolist()
        """`seq_lens_cpu` as numbers."""

    @property
    def host_prefix_lens(self) -> list[int]:
        """Tokens that each row has already, as numbers."""
        return [length - 1 for length in self.host_seq_lens]

    @property
    def prefix_lens(self) -> torch.Tensor:
        """Tokens that each row has already."""
        return self.seq_lens - 1

    @property
    def prefix_lens_cpu(self) -> torch.Tensor:
        """Host copy of `prefix_lens`."""
        return self.seq_lens_cpu - 1

    def num_new_pages(self, page_size: int) -> int:
        """Rows whose new token starts a page."""
        if page_size == 1:
            return len(self.host_seq_lens)
        return sum(length % page_size == 1 for length in self.host_seq_lens)

    def slots(
        self, new_pages: torch.Tensor, page_size: int, kernels: SlotKernels | None = None
    ) -> torch.Tensor:
        """Slot of each row's new token: int64 `[batch]`; see `ExtendBatch.slots`."""
        if page_size == 1:
            return new_pages
        if kernels is not None:
            return kernels.decode_slots(
                self.seq_lens, self.last_loc, new_pages, page_size=page_size
            )
        num_new = new_pages.numel()
        if num_new == self.last_loc.numel():
            return new_pages * page_size
        continued = self.last_loc + 1
        if num_new == 0:
            return continued
        if new_pages.device == HOST:
            # The host knows which rows begin a page; here it can say so without a copy.
            begun = [row for row, n in enumerate(self.host_seq_lens) if n % page_size == 1]
            rows = torch.from_numpy(np.array(begun, dtype=np.int64))
            return continued.index_copy_(0, rows, new_pages * page_size)
        return self.placed_by_the_device(continued, new_pages, page_size)

    def placed_by_the_device(
        self, continued: torch.Tensor, new_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """`continued` but for the rows that begin a page, which the device finds out."""
        starts_page = self.prefix_lens % page_size == 0
        rank = torch.cumsum(starts_page, 0) - 1
        page = new_pages[rank.clamp(0, new_pages.numel() - 1)]
        return torch.where(starts_page, page * page_size, continued)

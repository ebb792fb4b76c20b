"""Which row of the request table belongs to whom, and the kv rows written there: for each running
request the slots of its tokens, in token order.

Left out: the slots themselves (`kvcore.allocator`), and what becomes of a row that loses them
(`kvcore.retraction`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index
from typing import Protocol, SupportsIndex, TypeAlias

import numpy as np
import torch

from kvcore.allocator.arguments import as_index, require_equal_lengths
from kvcore.allocator.ownership import Ids, on_host, refuse
from kvcore.errors import (
    DoubleFreeError,
    GeometryError,
    IndexTensorError,
    InvalidSlotError,
    KVCacheError,
    PausedPoolError,
)
from kvcore.pools.arguments import as_count, ends
from kvcore.saver import KV_CACHE, MemorySaver, default_saver


class RowHolder(Protocol):
    """A request, as far as its row is concerned."""

    req_pool_idx: int | None
    """The row it holds, or None."""


_SLOT_LIMITS = torch.iinfo(torch.int32)
FEW_ROWS = 16
"""So many rows are looked at one by one."""

Places: TypeAlias = tuple[int | torch.Tensor, slice | torch.Tensor]
"""A piece of a row, `(row, slice(start, stop))`, or single tokens, `(rows, positions)` pairwise."""


def _as_rows(operation: str, rows: Iterable[SupportsIndex]) -> list[int]:
    """Row numbers of any integer type as ints.

    Raises:
        InvalidSlotError: one is not an integer, or is larger than any table.
    """
    numbers = list(rows)
    try:
        return np.array([index(number) for number in numbers], dtype=np.int64).tolist()
    except (TypeError, OverflowError) as error:
        raise InvalidSlotError(
            f"{operation}: rows {numbers!r}; expected whole numbers, of an integer type"
        ) from error


def _as_ids(rows: Sequence[int]) -> Ids:
    """Row numbers as numpy, `[n]`."""
    return np.array(rows, dtype=np.int64)


def _repeated(rows: Sequence[int]) -> Ids:
    """Rows named more than once."""
    return _as_ids([row for row, count in Counter(rows).items() if count > 1])


class ReqToTokenPool:
    """A table of rows 1..size; row 0 is padding, absorbs what padded batches write, and is never
    lent.

    Args:
        size: requests that can run at once.
        max_context_len: tokens that a row can hold.
        device: where the table lives.
        enable_memory_saver: allocate the table under the tag `kv_cache` of a memory saver, so that
            its `pause` gives it back. The saver resumes it as zeros.
        memory_saver: the saver, where `enable_memory_saver` is True; `default_saver(device)` for
            None.

    While the tag is paused, reading and writing kv rows raises `PausedPoolError`; rows can be lent
    and taken back.

    Raises:
        GeometryError: no row, rows without a token, or a size that is not a whole number.
        PausedPoolError: the saver's tag `kv_cache` is paused.
        SaverMemoryError: the saver found no memory.
        SaverUnavailableError: there is no saver for `device`.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        *,
        memory_saver: MemorySaver | None = None,
    ) -> None:
        size = as_count("ReqToTokenPool", "size", size)
        max_context_len = as_count("ReqToTokenPool", "max_context_len", max_context_len)
        if size < 1 or max_context_len < 1:
            raise GeometryError(
                f"ReqToTokenPool: size {size}, max_context_len {max_context_len}; expected at "
                "least 1 each"
            )
        self.size = size
        self.max_context_len = max_context_len
        self.device = device
        self.enable_memory_saver = enable_memory_saver
        self.memory_saver: MemorySaver | None = None
        """The saver that the table belongs to; None with the memory saver off."""
        if enable_memory_saver:
            self.memory_saver = default_saver(device) if memory_saver is None else memory_saver
        self._req_to_token = self._zeros((size + 1, max_context_len))
        self._index_device = self._req_to_token.device
        # On a CPU short rows are read and written by numpy: a dispatch of torch costs more.
        self._host_table = self._req_to_token.numpy() if self._req_to_token.is_cpu else None
        self.clear()

    def _zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        if self.memory_saver is None:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)
        with self.memory_saver.region(KV_CACHE) as region:
            return region.zeros(shape, torch.int32, self.device)

    @property
    def req_to_token(self) -> torch.Tensor:
        """The table, int32 `[size + 1, max_context_len]`; places not yet written are undefined.

        Raises:
            PausedPoolError: the memory of the table was given back.
        """
        if self.memory_saver is not None and self.memory_saver.is_paused(KV_CACHE):
            raise PausedPoolError(
                "req_to_token: the memory of this table is given back; expected "
                f"resume({KV_CACHE!r}) of its saver first"
            )
        return self._req_to_token

    def available_size(self) -> int:
        """Rows that can be lent now."""
        return len(self.free_slots)

    # -- lending -------------------------------------------------------------------------------

    def alloc(self, requests: Sequence[RowHolder] | SupportsIndex) -> list[int] | None:
        """Lend rows: to requests, or as many as a number says; all or none.

        Each request that holds no row gets one in its `req_pool_idx`; one that holds a row keeps
        it, as the next chunk of a chunked prefill does.

        Returns:
            The rows of the requests in their order, or that many rows; None if too few are free.

        Raises:
            GeometryError: a negative number, or neither requests nor a whole number.
            InvalidSlotError: a request claims a row that is not lent, or that another one claims
                too.
        """
        # Lists first: what is a number takes long to find out.
        if not isinstance(requests, list | tuple) and (
            isinstance(requests, SupportsIndex) or not isinstance(requests, Iterable)
        ):
            return self._lend("alloc", requests)
        requests = list(requests)
        # By identity: a request named twice gets one row.
        distinct = {id(each): each for each in requests}.values()
        held = [each.req_pool_idx for each in distinct if each.req_pool_idx is not None]
        claimed = self._require_lent("alloc", held)
        refuse(InvalidSlotError, "alloc", _repeated(claimed), "rows of two requests", "one each")
        waiting = [each for each in distinct if each.req_pool_idx is None]
        rows = self._lend("alloc", len(waiting))
        if rows is None:
            return None
        for request, row in zip(waiting, rows, strict=True):
            request.req_pool_idx = row
        return [request.req_pool_idx for request in requests if request.req_pool_idx is not None]

    def alloc_rows(self, num_rows: SupportsIndex) -> list[int] | None:
        """Lend rows that no request holds: from the tail of `free_slots`, all or none.

        Raises:
            GeometryError: a negative number, or none that is whole.
        """
        return self._lend("alloc_rows", num_rows)

    def _lend(self, operation: str, number: SupportsIndex) -> list[int] | None:
        num_rows = as_count(operation, "number of rows", number)
        if num_rows < 0:
            raise GeometryError(f"{operation}: expected a number of rows >= 0, got {num_rows}")
        if num_rows > len(self.free_slots):
            return None
        first = len(self.free_slots) - num_rows
        rows = self.free_slots[first:]
        del self.free_slots[first:]
        self._lent[rows] = True
        return rows

    # -- returning -----------------------------------------------------------------------------

    def free(self, request: RowHolder) -> None:
        """Take the row of `request` back; its slots are the caller's business.

        Raises:
            DoubleFreeError: the request holds no row, or one that is not lent.
            InvalidSlotError: its row is not one of 1..size.
        """
        if request.req_pool_idx is None:
            raise DoubleFreeError("free: a request without a row; expected one that holds a row")
        self._take_back("free", [request.req_pool_idx])
        request.req_pool_idx = None

    def free_rows(self, rows: Iterable[SupportsIndex]) -> None:
        """Take rows back.

        Raises:
            DoubleFreeError: a row that is not lent, or named twice.
            InvalidSlotError: a row that is not one of 1..size.
        """
        self._take_back("free_rows", rows)

    def _take_back(self, operation: str, rows: Iterable[SupportsIndex]) -> None:
        returned = self._require_lent(operation, rows, otherwise=DoubleFreeError)
        if len(set(returned)) < len(returned):
            twice, once = "rows named twice", "each row once"
            refuse(DoubleFreeError, operation, _repeated(returned), twice, once)
        self._lent[returned] = False
        self.free_slots.extend(returned)

    def clear(self) -> None:
        """Take every row back; what the rows hold stays."""
        self.free_slots = list(range(1, self.size + 1))
        """Rows that are not lent; the last one is lent next. For inspection."""
        # Beside the list: looking a row up there would cost a walk through all of it.
        self._lent = np.zeros(self.size + 1, dtype=np.bool_)

    # -- kv rows -------------------------------------------------------------------------------

    def row(self, req_pool_idx: SupportsIndex, length: SupportsIndex) -> torch.Tensor:
        """The slots of the first `length` tokens of a row: int64 `[length]`, a copy.

        Raises:
            InvalidSlotError: not a row on loan.
            GeometryError: a length outside 0..max_context_len.
            PausedPoolError: the memory of the table was given back.
        """
        table = self.req_to_token
        (row,) = self._require_lent("row", [req_pool_idx])
        _, stop = self._require_tokens("row", 0, length)
        if self._host_table is not None:
            return torch.from_numpy(self._host_table[row, :stop].astype(np.int64))
        return table[row, :stop].to(torch.int64)

    def write(self, indices: Places, values: torch.Tensor) -> None:
        """Write slots into rows: a piece of one row, or single tokens of several.

        Args:
            indices: `(row, slice(start, stop))`, or `(rows, positions)` as tensors `[n]` of any
                integer dtype on the pool's device. Row 0 may be among the latter.
            values: the slots, `[stop - start]` or `[n]` of any integer dtype. They are kept as
                int32. Larger ones are refused on the host; in device memory they are not read, and
                wrap.

        Raises:
            IndexTensorError: not one of both forms, or a tensor of the wrong rank, dtype or device.
            GeometryError: another number of slots than places, or a position outside the row.
            InvalidSlotError: a row that is not lent, or a slot beyond int32.
                Rows, positions and slots in device memory are not read, so they are checked for
                pieces (rows) and for a table on the host only. In all cases nothing was written.
            PausedPoolError: the memory of the table was given back.
        """
        table = self.req_to_token
        slots = as_index("write(values)", values, self._index_device)
        self._require_int32(slots)
        match indices:
            case (torch.Tensor() as rows, torch.Tensor() as positions):
                places = self._places(rows, positions)
                require_equal_lengths("write", rows=places[0], positions=places[1], values=slots)
                table[places] = slots.to(torch.int32)
            # A row number in a tensor may be on a device, and reading it would wait.
            case (row, slice(start=start, stop=stop, step=None)) if not isinstance(
                row, torch.Tensor
            ):
                (row,) = self._require_lent("write", [row])
                start, stop = self._require_tokens(
                    "write",
                    0 if start is None else start,
                    self.max_context_len if stop is None else stop,
                )
                if slots.numel() != stop - start:
                    raise GeometryError(
                        f"write: {slots.numel()} slots for tokens {start}..{stop} of a row; "
                        f"expected {stop - start}"
                    )
                if self._host_table is not None:
                    self._host_table[row, start:stop] = slots.numpy()
                else:
                    table[row, start:stop] = slots.to(torch.int32)
            case _:
                raise IndexTensorError(
                    "write: expected (row, slice(start, stop)) or (rows, positions) as tensors, "
                    f"got {indices!r}"
                )

    def _places(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = as_index("write(rows)", rows, self._index_device)
        positions = as_index("write(positions)", positions, self._index_device)
        if self._index_device.type == "cpu":
            self._require_lent("write", rows[rows != 0].tolist())
            last = self.max_context_len - 1
            outside = positions[(positions < 0) | (positions > last)]
            refuse(GeometryError, "write", on_host(outside), "positions outside", f"0..{last}")
        return rows, positions

    # -- checks --------------------------------------------------------------------------------

    def _require_lent(
        self,
        operation: str,
        rows: Iterable[SupportsIndex],
        *,
        otherwise: type[KVCacheError] = InvalidSlotError,
    ) -> list[int]:
        """The rows as ints; raises InvalidSlotError for those outside the table, `otherwise` for
        those not lent."""
        given = list(rows)
        if len(given) <= FEW_ROWS and all(self._is_plainly_lent(row) for row in given):
            return [index(row) for row in given]
        numbers = _as_rows(operation, given)
        named = _as_ids(numbers)
        outside = named[(named < 1) | (named > self.size)]
        expected = f"rows on loan, of 1..{self.size}"
        refuse(InvalidSlotError, operation, outside, "rows outside the table", expected)
        refuse(otherwise, operation, named[~self._lent[named]], "rows that are not lent", expected)
        return numbers

    def _is_plainly_lent(self, row: SupportsIndex) -> bool:
        """Whether it is what nearly every call names: the number of a row on loan."""
        return type(row) is int and 0 < row <= self.size and bool(self._lent[row])

    def _require_int32(self, slots: torch.Tensor) -> None:
        """Raise InvalidSlotError for slots that the table cannot hold, where the host knows."""
        if self._host_table is None or slots.numel() == 0:
            return
        lowest, highest = ends(slots)
        if lowest < _SLOT_LIMITS.min or highest > _SLOT_LIMITS.max:
            outside = slots[(slots < _SLOT_LIMITS.min) | (slots > _SLOT_LIMITS.max)]
            expected = f"at most {_SLOT_LIMITS.max}"
            refuse(InvalidSlotError, "write", on_host(outside), "slots beyond int32", expected)

    def _require_tokens(
        self, operation: str, first: SupportsIndex, end: SupportsIndex
    ) -> tuple[int, int]:
        start = as_count(operation, "first token", first)
        stop = as_count(operation, "number of tokens", end)
        if not 0 <= start <= stop <= self.max_context_len:
            raise GeometryError(
                f"{operation}: tokens {start}..{stop}; expected a range within "
                f"0..{self.max_context_len} (max_context_len)"
            )
        return start, stop

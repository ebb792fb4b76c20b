"""Checks of arguments that cost no device synchronisation: shape, dtype, device, sign, alignment.

They hold with and without `validate` and raise before anything changes.
Left out: the values of device tensors (`kvcore.allocator.ownership`).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import DoubleFreeError, GeometryError, IndexTensorError

Segment = tuple[torch.Tensor, int]
"""Slots `kv_row[start_pos : start_pos + n]` of one request, and `start_pos`."""

_CPU = torch.device("cpu")

_INTEGER_DTYPES = frozenset(
    {
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


def resolved_device(device: str | torch.device) -> torch.device:
    """The device of a tensor that is made on `device`: "cuda" names the current one of several."""
    return _CPU if device in ("cpu", _CPU) else torch.empty(0, device=device).device


def as_locations(operation: str, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`index`, of any shape, as int64 (the same object where it is int64 already).

    Raises:
        IndexTensorError: not a tensor, not of an integer dtype, or on another device.
    """
    if not isinstance(index, torch.Tensor):
        raise IndexTensorError(f"{operation}: expected an index tensor, got {type(index).__name__}")
    if index.dtype not in _INTEGER_DTYPES:
        raise IndexTensorError(f"{operation}: expected integer indices, got {index.dtype}")
    if index.device != device:
        raise IndexTensorError(f"{operation}: expected indices on {device}, got {index.device}")
    return index if index.dtype is torch.int64 else index.to(torch.int64)


INT64 = np.dtype(np.int64)
"""Of the array over every int64 tensor: the very object."""


def plain_vector(index: torch.Tensor) -> npt.NDArray[np.int64] | None:
    """The memory of what nearly every call on a CPU passes, an int64 vector; None of all else."""
    if type(index) is not torch.Tensor:
        return None
    try:
        numbers: npt.NDArray[np.int64] = index.numpy()
    except (RuntimeError, TypeError):
        # Of another device, or with something else that makes it no plain memory.
        return None
    return numbers if numbers.dtype is INT64 and numbers.ndim == 1 else None


def is_start(start_pos: int, page_size: int) -> bool:
    """Whether `as_segment` takes it as it is for a start."""
    return type(start_pos) is int and start_pos >= 0 and start_pos % page_size == 0


def is_index(index: torch.Tensor, device: torch.device) -> bool:
    """Whether it is what nearly every call passes: a vector, int64, on the device."""
    return (
        type(index) is torch.Tensor
        and index.dtype is torch.int64
        and index.dim() == 1
        and index.device == device
    )


def as_index(operation: str, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`as_locations` of a vector.

    Raises:
        IndexTensorError: as there, or not one-dimensional.
    """
    if is_index(index, device):
        return index
    locations = as_locations(operation, index, device)
    if locations.dim() != 1:
        raise IndexTensorError(
            f"{operation}: expected a vector of slots, got shape {tuple(locations.shape)}"
        )
    return locations


def require_equal_lengths(operation: str, **vectors: torch.Tensor) -> None:
    """Raise GeometryError unless all vectors have the same length."""
    lengths = {name: vector.numel() for name, vector in vectors.items()}
    if len(set(lengths.values())) > 1:
        seen = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise GeometryError(f"{operation}: expected equal lengths, got {seen}")


def as_number(operation: str, name: str, number: object) -> int:
    """`number`, called `name` in the message, as an int of Python's.

    Raises:
        GeometryError: not an integer: a bool, a float and a tensor are none either.
    """
    if type(number) is int:
        return number
    if isinstance(number, np.integer):
        return int(number)
    raise GeometryError(f"{operation}: expected an integer {name}, got {type(number).__name__}")


def whole_pages(operation: str, need_size: int, page_size: int) -> int:
    """Pages in `need_size` tokens.

    Raises:
        GeometryError: not an integer, negative, or not a multiple of the page size.
    """
    need_size = as_number(operation, "need_size", need_size)
    if need_size < 0 or need_size % page_size != 0:
        raise GeometryError(
            f"{operation}: expected a non-negative multiple of page_size {page_size}, "
            f"got {need_size}"
        )
    return need_size // page_size


def pool_pages(operation: str, size: int, page_size: int) -> int:
    """Pages in a pool of `size` tokens; a remainder that fills no page is left unused.

    Raises:
        GeometryError: numbers that are no integers, page_size below 1, or a pool without a single
            page.
    """
    size = as_number(operation, "size", size)
    page_size = as_number(operation, "page_size", page_size)
    if page_size < 1:
        raise GeometryError(f"{operation}: expected page_size >= 1, got {page_size}")
    if size < page_size:
        raise GeometryError(
            f"{operation}: expected a size of at least one page of {page_size} tokens, got {size}"
        )
    return size // page_size


def as_segment(
    operation: str, index: torch.Tensor, start_pos: int, page_size: int, device: torch.device
) -> torch.Tensor:
    """The slots of one segment of a kv row, int64.

    Raises:
        IndexTensorError: see `as_index`.
        GeometryError: a start that is no integer, negative or not page aligned.
    """
    checked = as_index(operation, index, device)
    if type(start_pos) is not int:
        start_pos = as_number(operation, "start_pos", start_pos)
    if start_pos < 0 or start_pos % page_size != 0:
        raise GeometryError(
            f"{operation}: expected segment starts that are non-negative multiples of "
            f"page_size {page_size}, got {start_pos}"
        )
    return checked


def as_segments(
    operation: str, segments: Iterable[Segment], page_size: int, device: torch.device
) -> list[torch.Tensor]:
    """The slots of the non-empty segments of one kv row, int64.

    Raises:
        IndexTensorError: see `as_index`.
        GeometryError: not pairs, a start that is no integer, negative or not page aligned, or
            segments out of order.
        DoubleFreeError: a segment that starts on the last page of the one before it.
    """
    if type(segments) is list and len(segments) == 1 and type(segments[0]) is tuple:
        only = segments[0]
        if len(only) == 2:
            index = as_segment(operation, only[0], only[1], page_size, device)
            return [index] if index.numel() else []
    checked: list[torch.Tensor] = []
    previous_start = previous_end = 0
    for segment in segments:
        if not isinstance(segment, (tuple, list)) or len(segment) != 2:
            raise GeometryError(
                f"{operation}: expected segments (free_index, start_pos), got "
                f"{type(segment).__name__}"
            )
        index = as_segment(operation, segment[0], segment[1], page_size, device)
        start_pos = int(segment[1])
        if index.numel() == 0:
            continue
        if start_pos < previous_start:
            raise GeometryError(
                f"{operation}: expected ascending segments, got {start_pos} after {previous_start}"
            )
        if start_pos < previous_end:
            raise DoubleFreeError(
                f"{operation}: segment at {start_pos} shares a page with the one that ends at "
                f"{previous_end}; expected each page once"
            )
        previous_start, previous_end = start_pos, start_pos + index.numel()
        checked.append(index)
    return checked

"""Checks of what pools are given: counts, layers, slots, and rows to write. All of them raise
before anything changes, and none waits for a device; so the *values* of slots are checked on a CPU
only, and a location beyond a pool on a CUDA device is the device's own assertion.

Left out: rank, dtype and device of index tensors (`kvcore.allocator.arguments`).
"""

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Protocol, SupportsIndex, TypeAlias

import torch

from kvcore.allocator.ownership import on_host, refuse
from kvcore.errors import GeometryError, IndexTensorError, InvalidSlotError


class HasLayerId(Protocol):
    """An attention layer as engines pass it: only its number matters here."""

    @property
    def layer_id(self) -> int:
        """The number of the layer in the model."""


Layer: TypeAlias = SupportsIndex | HasLayerId


def layer_number(layer: Layer) -> int:
    """The number of `layer`, given as such or as an object that carries it.

    Raises:
        GeometryError: neither.
    """
    try:
        return index(layer if isinstance(layer, SupportsIndex) else layer.layer_id)
    except (AttributeError, TypeError) as error:
        raise GeometryError(
            f"layer {layer!r}: expected its number, or an object with a layer_id"
        ) from error


def as_count(operation: str, name: str, value: SupportsIndex) -> int:
    """`value`, of any integer type (numpy's too), as an int.

    Raises:
        GeometryError: not an integer; a float is none, also where it has no fraction.
    """
    try:
        return index(value)
    except TypeError as error:
        raise GeometryError(
            f"{operation}: {name} {value!r}; expected a whole number, of an integer type"
        ) from error


def layer_ids(operation: str, ids: Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Layer numbers of any integer type as ints.

    Raises:
        GeometryError: one is not an integer.
    """
    return tuple(as_count(operation, "layer number", number) for number in ids)


FEW = 256
"""Of so many numbers Python finds the ends sooner than numpy."""


def ends(numbers: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest of some integers on a CPU, at least one."""
    if numbers.numel() <= FEW and numbers.dim() == 1:
        few: list[int] = numbers.tolist()
        return min(few), max(few)
    array = on_host(numbers)
    return int(array.min()), int(array.max())


def require_within(operation: str, locations: torch.Tensor, count: int) -> bool:
    """Raise InvalidSlotError for a location outside 0..count - 1 that is not -1; on a CPU only.

    Returns:
        Whether -1 may be among them; it may, on any other device.
    """
    if not locations.is_cpu:
        return True
    if locations.numel() == 0:
        return False
    lowest, highest = ends(locations)
    if lowest < -1 or highest >= count:
        named = on_host(locations)
        outside = named[(named < -1) | (named >= count)]
        expected = f"0..{count - 1}, or -1 for none"
        refuse(InvalidSlotError, operation, outside, "locations outside", expected)
    return lowest < 0


def require_tensor(what: str, rows: torch.Tensor, device: torch.device) -> None:
    """Raise IndexTensorError unless `rows` is a tensor on `device`; `what` names operation and
    rows."""
    if not isinstance(rows, torch.Tensor):
        raise IndexTensorError(f"{what}: a {type(rows).__name__}; expected a tensor on {device}")
    if rows.device != device:
        raise IndexTensorError(f"{what} on {rows.device}; expected {device}")


def shaped(
    what: str, rows: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """`rows`, given in `shape` or flat (`[shape[0], …]`), in `shape`.

    Raises:
        IndexTensorError: not a tensor on `device`; `what` names operation and rows.
        GeometryError: another shape, or complex numbers.
    """
    require_tensor(what, rows, device)
    if tuple(rows.shape) not in (shape, (shape[0], prod(shape[1:]))):
        raise GeometryError(f"{what} of shape {tuple(rows.shape)}; expected {shape}")
    if rows.dtype.is_complex:
        raise GeometryError(f"{what} of {rows.dtype}; expected real numbers")
    return rows.reshape(shape)


def scaled(what: str, rows: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """`rows / scale`, of the same shape.

    Raises:
        IndexTensorError: a scale that is neither a number nor a tensor on the device of the rows; a
            tensor without dimensions may be on the host.
        GeometryError: a scale that the rows would be spread over.
    """
    if isinstance(scale, torch.Tensor):
        if scale.dim() > 0:
            require_tensor(f"{what}: scale", scale, rows.device)
        if scale.dtype.is_complex or not _broadcasts(scale.shape, rows.shape):
            raise GeometryError(
                f"{what}: scale of shape {tuple(scale.shape)} and {scale.dtype}; expected one real"
                f" number, or one for each of {tuple(rows.shape)}"
            )
    elif not isinstance(scale, float | int):
        raise IndexTensorError(
            f"{what}: scale {scale!r}; expected a number, or a tensor on {rows.device}"
        )
    return rows / scale


def _broadcasts(small: torch.Size, shape: torch.Size) -> bool:
    """Whether a tensor of shape `small` spreads over one of `shape` and leaves that as it is."""
    tail = shape[len(shape) - len(small) :] if len(small) <= len(shape) else ()
    return len(tail) == len(small) and all(
        own in (1, other) for own, other in zip(small, tail, strict=True)
    )

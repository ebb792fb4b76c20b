"""Counts what a call asks of a device: kernels, waits for the device, bytes written.

The allocator under count lives on torch's `meta` device, whose tensors have shapes and no values.
So a pool of any size costs nothing, host tensors are known by their device, and whoever asks for a
value of a device tensor cannot get one: `.item()`, `.tolist()`, `.numpy()`, `bool()` stop the call
and are counted, whatever way they take. A shape that depends on values is counted too and answered
as if every entry stayed, so that the rest of the call can be counted. Leaves out time, and kernels
that are launched past torch's dispatcher (Triton).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "meta"
"""Where the allocators under count keep their tensors."""

NO_KERNEL = frozenset(
    (
        *("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty"),
        *("new_empty_strided", "_unsafe_view", "detach_", "resize_", "set_"),
    )
)
"""Ops that launch nothing: memory without a fill, and changes of metadata that are no views."""

VALUES = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal"))
"""Ops that bring a value to the host."""

SHAPES = frozenset(
    (
        *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("bincount", "repeat_interleave"),
    )
)
"""Ops whose shape depends on values, which the host must know to go on."""

MASKS = frozenset((torch.bool, torch.uint8))

ROWS = frozenset(("index_fill_", "index_copy_", "index_add_", "index_fill", "index_copy"))
"""Ops that write the rows that an index names."""

UPLOADS = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor))
"""Functions that make a device tensor of host values without the dispatcher's knowledge."""


class ValueNeeded(Exception):
    """A call asked for a value of a device tensor; it cannot go on."""


@dataclass(frozen=True, slots=True)
class Count:
    """What a call asked for. ``ops`` names every kernel in order. Where ``complete`` is false, the
    call could not go on without values, and what would come after is not counted."""

    ops: tuple[str, ...]
    waits: Mapping[str, int]
    bytes_written: int
    complete: bool

    @property
    def kernels(self) -> int:
        """Kernels launched."""
        return len(self.ops)

    @property
    def synchronisations(self) -> int:
        """Times the host had to wait for the device."""
        return sum(self.waits.values())


def count(call: Callable[[], object]) -> Count:
    """What ``call``, on tensors of the meta device, asks of the device."""
    counter = DispatchCounter()
    complete = True
    # Under inference mode the dispatcher shows ops before they are taken apart.
    with torch.inference_mode(False), torch.no_grad(), _Uploads(counter), counter:
        try:
            call()
        except Exception as error:
            if any(words in str(error) for words in ("meta tensor", "meta device")):
                # What never reaches the dispatcher, such as `.numpy()`, fails in these words.
                counter.waits["value"] += 1
            elif not counter.waits:
                raise
            # Else a value was asked for, or a shape as if every entry stayed was contradicted.
            complete = False
    return Count(tuple(counter.ops), dict(counter.waits), counter.bytes_written, complete)


class DispatchCounter(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.ops: list[str] = []
        self.waits: Counter[str] = Counter()
        self.bytes_written = 0
        self._numbers: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count one op and perform it."""
        kwargs = kwargs or {}
        name: str = func.overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        on_device = any(tensor.is_meta for tensor in given)
        if on_device and name in VALUES:
            self.waits[name] += 1
            raise ValueNeeded(name)
        if on_device and (answer := _shape_answer(name, func, args, kwargs)) is not None:
            self.waits[name] += 1
        elif on_device and _reads_back(name, args, kwargs):
            self.waits[name] += 1
            raise ValueNeeded(name)
        else:
            answer = func(*args, **kwargs)
        results = list(_tensors(answer))
        if not (on_device or any(tensor.is_meta for tensor in results)):
            return answer
        if func.is_view or name in NO_KERNEL:
            return answer
        if name == "scalar_tensor":
            self._numbers += results
        if _uploads(name, args, kwargs) or self._assigns_a_number(name, args):
            self.waits[f"{name} from the host"] += 1
        self.ops.append(name)
        self.bytes_written += _bytes_written(name, func, args, kwargs, results)
        return answer

    def _assigns_a_number(self, name: str, args: Sequence[Any]) -> bool:
        """Whether the op is `x[index] = 0` or `x[0] = 0`: a device first gets the number from the
        host, as a tensor. Spread over a slice it is an argument of the fill instead."""
        place = {"index_put_": 2, "copy_": 1}.get(name)
        return place is not None and any(args[place] is number for number in self._numbers)


class _Uploads(TorchFunctionMode):
    """Sees the functions that make device tensors of host values: each copies and waits."""

    def __init__(self, counter: DispatchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count one function and call it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and args[0].is_meta and _lists(args[1]):
            # An index in a list becomes a tensor on the host, and is copied.
            self._counter.waits["list from the host"] += 1
        values = args[1:] if func is torch.Tensor.new_tensor else args
        if func in UPLOADS and made.is_meta and not any(t.is_meta for t in _tensors(values)):
            self._counter.waits[f"{func.__name__} from the host"] += 1
            self._counter.ops.append(func.__name__)
            self._counter.bytes_written += made.nbytes
        return made


def _lists(index: Any) -> bool:
    """Whether an index has a list of numbers in it."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from _tensors(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)


def _masks(args: Sequence[Any]) -> list[torch.Tensor]:
    """The masks among the indices of an `index` or `index_put_`."""
    if len(args) < 2 or not isinstance(args[1], list | tuple):
        return []
    return [index for index in _tensors(args[1]) if index.dtype in MASKS]


def _shape_answer(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where the shape of the answer depends on values, the answer in which every entry stays."""
    masks = _masks(args) if name in ("index", "index_put_", "_index_put_impl_") else []
    if name == "index" and masks:
        dims = sum(mask.dim() for mask in masks)
        return args[0].new_empty((masks[0].numel(), *args[0].shape[dims:]))
    if masks:
        return args[0]
    if name not in SHAPES or kwargs.get("output_size") is not None:
        return None
    source = args[0]
    if name == "nonzero":
        return source.new_empty((source.numel(), source.dim()), dtype=torch.int64)
    if name in ("masked_select", "bincount", "repeat_interleave"):
        return source.new_empty(source.numel())
    rest = len(func._schema.returns) - 1
    return (source.new_empty(source.numel()), *[source.new_empty(source.numel())] * rest)


def _reads_back(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the op copies a device tensor to the host."""
    if name == "_to_copy":
        wanted = kwargs.get("device")
        return wanted is not None and torch.device(wanted).type != DEVICE
    return name == "copy_" and not args[0].is_meta and args[1].is_meta


def _uploads(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the op copies values from the host and waits until they are there."""
    if name == "_to_copy":
        return not args[0].is_meta and not kwargs.get("non_blocking", False)
    if name == "copy_":
        blocking = not (kwargs.get("non_blocking", False) or (len(args) > 2 and args[2]))
        return args[0].is_meta and not args[1].is_meta and blocking
    indexed = name in ("index", "index_put_")
    return indexed and not all(tensor.is_meta for tensor in _tensors(args))


def _bytes_written(
    name: str,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[torch.Tensor],
) -> int:
    if name in ("index_put_", "_index_put_impl_"):
        return _indexed(args[0], args[1])
    if name in ROWS:
        target, dim, index = args[:3]
        return int(index.numel() * target.nbytes // max(1, target.shape[dim]))
    if name.startswith("scatter") or name == "put_":
        index = args[1] if name == "put_" else args[2]
        return int(index.numel() * args[0].element_size())
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return sum(tensor.nbytes for tensor in (_tensors(written) if written else results))


def _indexed(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int:
    """Bytes of the entries that these indices name."""
    named = [index for index in indices if index is not None]
    if any(index.dtype in MASKS for index in named):
        return target.nbytes
    rows = prod(torch.broadcast_shapes(*(index.shape for index in named)))
    whole = [
        size for dim, size in enumerate(target.shape) if dim >= len(indices) or indices[dim] is None
    ]
    return int(rows * prod(whole) * target.element_size())

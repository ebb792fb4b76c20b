"""The saver of CUDA memory, through the public calls of the package `torch_memory_saver`.

Left out: that package's host and disk backups (what a paused tensor held is lost), CUDA graphs, and
tags that somebody pauses behind the saver's back through the package itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Protocol
from weakref import ref

import torch

from kvcore.errors import GeometryError, PausedPoolError, SaverUnavailableError
from kvcore.saver.tags import Tags


class TorchMemorySaver(Protocol):
    """What is used of `torch_memory_saver.torch_memory_saver`."""

    def region(self, tag: str) -> AbstractContextManager[None]:
        """Device memory allocated inside belongs to `tag`."""

    def pause(self, tag: str) -> None:
        """Unmap the physical memory of `tag`."""

    def resume(self, tag: str) -> None:
        """Map physical memory again, whose content is undefined."""


class CudaMemorySaver:
    """A `MemorySaver` of CUDA memory; never run on a GPU by its authors, see docs/memory-saver.md.

    What the package leaves open is settled here: a second pause or resume is a no-op, an unknown
    tag an error, and resumed memory is zeroed. The package can be asked for no figure, so
    `resident_bytes` is counted: the bytes of the tensors that are alive, 0 while paused.

    Args:
        library: the package's entry object; imported when None.

    Raises:
        SaverUnavailableError: `torch_memory_saver` is not installed.
    """

    device_type = "cuda"

    def __init__(self, library: TorchMemorySaver | None = None) -> None:
        self._library = _installed_library() if library is None else library
        self._tags = Tags()
        self._tensors: dict[str, list[ref[torch.Tensor]]] = {}
        self._lock = Lock()

    @contextmanager
    def region(self, tag: str) -> Iterator["CudaRegion"]:
        """Allocate under `tag`, see `MemorySaver.region`."""
        with self._lock:
            self._tags.open(tag)
            self._tensors.setdefault(tag, [])
        yield CudaRegion(self, tag)

    def zeros(
        self, tag: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of zeros whose memory belongs to `tag`; callers go through `region`."""
        with self._lock:
            if self.is_paused(tag):
                raise PausedPoolError(f"zeros: tag {tag!r} was paused inside its region")
            # The package's region is entered for each tensor, so that none can be allocated after
            # it.
            with self._on(device), self._library.region(tag=tag):
                tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._tensors[tag].append(ref(tensor))
            return tensor

    def pause(self, tag: str) -> None:
        """Give back the memory of `tag` once the work that uses it is done."""
        with self._lock:
            if self._tags.is_paused("pause", tag):
                return
            self._wait()
            self._library.pause(tag=tag)
            self._tags.mark_paused(tag)

    def resume(self, tag: str) -> None:
        """Take the memory of `tag` again, see `MemorySaver.resume`."""
        with self._lock:
            if not self._tags.is_paused("resume", tag):
                return
            self._library.resume(tag=tag)
            for tensor in self._live(tag):
                tensor.zero_()
            self._tags.mark_resumed(tag)

    def resident_bytes(self, tag: str) -> int:
        """Bytes of the live tensors of `tag`, 0 while it is paused: counted, not measured."""
        with self._lock:
            if self._tags.is_paused("resident_bytes", tag):
                return 0
            return sum(tensor.nbytes for tensor in self._live(tag))

    def is_paused(self, tag: str) -> bool:
        """Whether `tag` is paused."""
        return self._tags.is_paused("is_paused", tag)

    def _live(self, tag: str) -> list[torch.Tensor]:
        """The tensors of `tag` that somebody still holds."""
        alive = [tensor for entry in self._tensors[tag] if (tensor := entry()) is not None]
        self._tensors[tag] = [ref(tensor) for tensor in alive]
        return alive

    def _on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make `device` the current one: the package keeps one memory pool for each."""
        return torch.cuda.device(device)

    def _wait(self) -> None:
        """Wait for the kernels that may still use the memory."""
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """Allocates CUDA memory of one tag."""

    saver: CudaMemorySaver
    tag: str

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> torch.Tensor:
        """A tensor of zeros on `device`, see `Region.zeros`."""
        place = torch.device(device)
        if place.type != self.saver.device_type or any(length < 0 for length in shape):
            raise GeometryError(
                f"zeros: shape {list(shape)} on {device}; expected no negative size, on "
                f"{self.saver.device_type}"
            )
        return self.saver.zeros(self.tag, shape, dtype, place)


def _installed_library() -> TorchMemorySaver:
    """The entry object of the installed package."""
    try:
        library: TorchMemorySaver = import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise SaverUnavailableError(
            "CudaMemorySaver: the package torch_memory_saver is missing; install the extra with "
            "`pip install 'kvcore[saver]'`"
        ) from error
    return library

"""What every allocator of this package has in common: geometry, the calls, segments of one row.

Left out: the free pages themselves (`kvcore.allocator.single`) and the pairing of two pools
(`kvcore.allocator.swa`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from kvcore.allocator.arguments import Segment, as_number, resolved_device
from kvcore.allocator.ownership import validate_by_default
from kvcore.errors import FreeGroupError
from kvcore.kernels import NUMPY, chosen_kernels, kernels_for
from kvcore.native import NATIVE


class BaseTokenToKVPoolAllocator(ABC):
    """Lends the slots of a KV pool, in whole pages.

    Index tensors are one-dimensional, of any integer dtype, on the allocator's device; slots come
    back as int64. Allocations return None when the pages do not suffice. A call that returns None
    or raises has changed nothing.

    Every call raises IndexTensorError for an index tensor of the wrong rank, dtype or device. With
    `validate=True`, calls also read the values: InvalidSlotError for slots that are never lent,
    DoubleFreeError for slots that are not lent now, PendingFreeError for slots already freed in the
    open group. Without it such calls are undefined, but write nothing outside the buffers. A free
    that waits for no device value cannot count what it returns; so pages that an illegal free
    returned too often may show later, as the DoubleFreeError of a capacity query or of an
    allocation that needs them. `clear` and `resize` mend that.

    Args:
        page_size: slots a page.
        dtype: element type of the pool; kept for callers.
        device: device of all index tensors.
        kvcache: the pool whose slots are lent, or None.
        need_sort: keep freed pages aside and merge them in ascending order on demand.
        validate: check values; None means environment variable KVCORE_VALIDATE.

    Slots, lists and mappings are computed by Triton's kernels on a CUDA device where Triton is
    installed, by numpy on a CPU, plain frees there by compiled code where a C compiler was at hand
    (`kvcore.native`), and by torch otherwise; environment variable KVCORE_KERNELS (`torch`,
    `triton`, `numpy`) decides when an allocator is built.
    """

    by_numpy: ClassVar[bool] = True
    """Whether numpy may do the work on a CPU. Not in a subclass that changes what torch does."""

    by_native: ClassVar[bool] = True
    """Whether compiled code may do some of that. Not in a subclass that changes what numpy does."""

    def __init__(
        self,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        validate: bool | None,
    ) -> None:
        self.page_size = as_number("constructor", "page_size", page_size)
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self.validate = validate_by_default() if validate is None else validate
        self._kvcache = kvcache
        # "cuda" names the current device; index tensors carry its number.
        self._index_device = resolved_device(device)
        chosen = chosen_kernels()
        self._kernels = kernels_for(self._index_device, chosen)
        self._group_open = False
        self._group_owned = False
        self._on_cpu = self._index_device.type == "cpu"
        # Short vectors on a CPU are read and written by numpy, unless somebody chose torch.
        may_be_numpy = self.by_numpy and chosen in ("", NUMPY)
        self._by_host = may_be_numpy and self._on_cpu and self._kernels is None
        # Where there is a compiled form of the same, it goes first.
        self._uses_native = NATIVE is not None and self._by_host and self.by_native and not chosen

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens of the pool, the padding page not counted."""

    @property
    @abstractmethod
    def size_full(self) -> int:
        """Tokens of the full-attention pool."""

    @property
    def free_group_is_open(self) -> bool:
        """Whether frees are being held back until `free_group_end`."""
        return self._group_open

    @abstractmethod
    def available_size(self) -> int:
        """Tokens that one `alloc` could get now.

        Raises:
            DoubleFreeError: without `validate`, an earlier free returned pages that were not lent.
        """

    @abstractmethod
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Lend whole pages: int64 `[need_size]`, page by page.

        Raises:
            GeometryError: `need_size` is no integer, negative or not a multiple of the page size.
            DoubleFreeError: without `validate`, an earlier free returned pages that were not lent.
        """

    @abstractmethod
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Lend the slots of tokens `[prefix_len, seq_len)` of each row, concatenated.

        Each row first fills the page of its `last_loc`, then begins new pages.

        Args:
            prefix_lens: tokens that each row has already, integer `[batch]`.
            prefix_lens_cpu: the same on the host.
            seq_lens: tokens that each row will have, integer `[batch]`.
            seq_lens_cpu: the same on the host.
            last_loc: slot of each row's last token, -1 for an empty row, integer `[batch]`.
            extend_num_tokens: sum of `seq_lens - prefix_lens`.

        Returns:
            int64 `[extend_num_tokens]`, or None if the pages do not suffice.

        Raises:
            GeometryError: unequal lengths, rows that shrink, a wrong sum; with `validate`, lengths
                that differ between device and host, or `last_loc` that does not fit the prefix.
            InvalidSlotError: with `validate`, `last_loc` that is not lent, or continued twice.
        """

    @abstractmethod
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Lend one slot a row; a page begins exactly where `(seq_len - 1) % page_size == 0`.

        Args:
            seq_lens: tokens of each row, the new one included, integer `[batch]`.
            seq_lens_cpu: the same on the host.
            last_loc: slot of the last token already in the row, integer `[batch]`.

        Returns:
            int64 `[batch]`, or None if the pages do not suffice.

        Raises:
            GeometryError, InvalidSlotError: as `alloc_extend`.
        """

    @abstractmethod
    def free(self, free_index: torch.Tensor) -> None:
        """Return any set of slots; every page touched is freed whole, once."""

    @abstractmethod
    def free_full(self, free_index: torch.Tensor) -> None:
        """`free` of the full side alone; the caller has released the SWA peers."""

    def free_segments(self, segments: Iterable[Segment]) -> None:
        """Return pieces `(free_index, start_pos)` of one kv row, ascending, no page shared.

        `free_index` is `kv_row[start_pos : start_pos + n]`; the last page is freed whole.

        Raises:
            GeometryError: a start that is not page aligned, segments out of order; with `validate`,
                slots that do not run through their pages in order.
            DoubleFreeError: two segments share a page.
        """
        self.return_segments("free_segments", segments)

    def free_full_segments(self, segments: Iterable[Segment]) -> None:
        """`free_segments` of the full side alone; the caller has released the SWA peers."""
        self.return_full_segments("free_full_segments", segments)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_segments` of a single piece."""
        self.return_segments("free_segment", [(free_index, start_pos)])

    def free_full_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_full_segments` of a single piece."""
        self.return_full_segments("free_full_segment", [(free_index, start_pos)])

    @abstractmethod
    def return_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free_segments` under the name that its errors give."""

    @abstractmethod
    def return_full_segments(self, operation: str, segments: Iterable[Segment]) -> None:
        """`free_full_segments` under the name that its errors give."""

    @abstractmethod
    def free_group_begin(self, *, owned: bool = False) -> None:
        """Hold frees back from now on; what they free can be lent after `free_group_end` only.

        Args:
            owned: the caller touches no tensor that it passes to any call of this group before its
                end, so that none has to be copied.

        Raises:
            FreeGroupError: a group is open already (sglang#36739).
        """

    @abstractmethod
    def free_group_end(self) -> None:
        """Make everything freed in the group available.

        Raises:
            FreeGroupError: no group is open (sglang#36739).
        """

    @abstractmethod
    def merge_and_sort_free(self) -> None:
        """Merge pages set aside by `need_sort` into the free list now."""

    @abstractmethod
    def clear(self) -> None:
        """Take everything back and close an open group."""

    @abstractmethod
    def debug_print(self) -> str:
        """One line of capacity for logs."""

    def get_kvcache(self) -> Any:
        """The pool given to the constructor; host copies are its business (sglang#28494)."""
        return self._kvcache

    def translate_kv_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Slots as a transfer engine addresses them: the slots themselves."""
        return kv_indices

    def _is_plain(self, index: torch.Tensor) -> bool:
        """Whether an index is what nearly every call passes: an int64 vector on the device.

        `as_index` says the same and more; this is all that is asked on hot paths.
        """
        return (
            type(index) is torch.Tensor
            and index.dtype is torch.int64
            and index.dim() == 1
            and (index.is_cpu if self._on_cpu else index.device == self._index_device)
        )

    @staticmethod
    def _own_copy(index: torch.Tensor) -> torch.Tensor:
        """An index that stays as it is when the caller overwrites its tensor."""
        return index.clone()

    def require_group(self, operation: str, *, is_open: bool) -> None:
        """Raise FreeGroupError unless a group is open, or is not open, as expected."""
        if self.free_group_is_open != is_open:
            expected = "an open free group" if is_open else "no open free group"
            raise FreeGroupError(f"{operation}: expected {expected}")

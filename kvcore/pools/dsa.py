"""The pool of sparse latent attention (DeepSeek sparse attention): the latent rows, and for each
token an index key and its scale, by which a layer picks the tokens that it attends to.

Left out: index keys pooled over several tokens, layouts shuffled for one vendor's kernels, and
index keys spread over devices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from kvcore.allocator.arguments import as_index, as_locations
from kvcore.errors import GeometryError
from kvcore.pools.arguments import Layer, as_count, require_tensor, require_within, shaped
from kvcore.pools.base import BufferInfos, SlotRows
from kvcore.pools.mla import MLATokenToKVPool
from kvcore.pools.packing import BLOCK, FP8, pack, packed_width, unpack
from kvcore.saver import MemorySaver

_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of tokens inside page rows, addressed by slots.

    `pages` is a view `[pages, page_size, width]`; it cannot be flattened to one row a slot, because
    other things lie between the pages.
    """

    pages: torch.Tensor

    def __getitem__(self, slots: torch.Tensor, /) -> torch.Tensor:
        """A new tensor `[n, width]` of the rows of `slots`."""
        size = self.pages.shape[1]
        return self.pages[slots // size, slots % size]

    def __setitem__(self, slots: torch.Tensor, rows: torch.Tensor, /) -> None:
        """Write `rows` into the rows of `slots`."""
        size = self.pages.shape[1]
        self.pages[slots // size, slots % size] = rows


class DSATokenToKVPool(MLATokenToKVPool):
    """An MLA pool with the index-K cache: for each layer a row a **page**, uint8
    `[pages, page_size * (index_head_dim + index_head_dim // 128 * 4)]`, the padding page included.

    In a page row come first the keys of all its tokens, then their scales (float32, one a block of
    128 columns). So whole pages are moved and transferred as rows, and single tokens are two
    pieces. Layers that reuse the previous layer's top-k have zero rows.

    With dtype `float8_e4m3fn` and the `kv_cache_dim` of that layout, latent rows are packed
    (`kvcore.pools.packing`): `set_mla_kv_buffer` quantises them, `get_mla_kv_buffer` undoes it, and
    the key and value buffers are raw bytes that only kernels make sense of.

    Args:
        size: see `SlotPool`.
        page_size: see `SlotPool`.
        kv_lora_rank: columns of the compressed part. **Before** `dtype`, unlike the MLA pool: the
            field's order.
        dtype: see `SlotPool`.
        qk_rope_head_dim: columns of the rotated part.
        layer_num: see `SlotPool`.
        device: see `SlotPool`.
        index_head_dim: columns of an index key, a multiple of 128.
        enable_memory_saver: see `SlotPool`.
        kv_cache_dim: columns of a latent row, `kv_lora_rank + qk_rope_head_dim` unless packed.
        start_layer: see `SlotPool`.
        end_layer: see `SlotPool`.
        index_buf_size: slots that have an index key, at least `size`, which it is by default.
        skip_topk_layers: for each layer, whether it reuses the previous layer's top-k.
        memory_saver: see `SlotPool`.

    Raises:
        GeometryError: a size that no buffer can have, or sizes that contradict each other.
        PausedPoolError, SaverMemoryError, SaverUnavailableError: see `SlotPool`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device,
        index_head_dim: int,
        enable_memory_saver: bool,
        kv_cache_dim: int,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_buf_size: int | None = None,
        skip_topk_layers: Sequence[bool] | None = None,
        *,
        memory_saver: MemorySaver | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise GeometryError(
                f"DSATokenToKVPool: dtype {dtype!r}; expected a torch.dtype; here kv_lora_rank"
                " comes before dtype, as in the field"
            )
        kind = "DSATokenToKVPool"
        self.index_head_dim = as_count(kind, "index_head_dim", index_head_dim)
        self.index_buf_size = as_count(
            kind, "index_buf_size", size if index_buf_size is None else index_buf_size
        )
        self.skip_topk_layers = _skips(skip_topk_layers, as_count(kind, "layer_num", layer_num))
        self._asked_width = as_count(kind, "kv_cache_dim", kv_cache_dim)
        _check_index(self.index_head_dim, self.index_buf_size, as_count(kind, "size", size))
        super().__init__(
            size,
            page_size,
            dtype,
            kv_lora_rank,
            qk_rope_head_dim,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
            memory_saver=memory_saver,
        )
        self.index_scale_bytes = self.index_head_dim // BLOCK * _SCALE_BYTES
        pages = -(-self.index_buf_size // self.page_size) + 1
        width = self.page_size * (self.index_head_dim + self.index_scale_bytes)
        self._index_buffer = [
            self._index_zeros((0 if skips else pages, width)) for skips in self.skip_topk_layers
        ]

    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]:
        """The index-K buffers in layer order, uint8.

        Raises:
            PausedPoolError: the pool is paused.
        """
        self.require_awake("index_k_with_scale_buffer")
        return self._index_buffer

    def copied_rows(self) -> list[SlotRows]:
        """The latent rows, then of each layer with index keys the keys, then the scales."""
        kept = [buffer for buffer in self._index_buffer if len(buffer)]
        index: list[SlotRows] = [*map(self._keys, kept), *map(self._scales, kept)]
        return [*self.slot_buffers(), *index]

    def set_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """As in the MLA pool, where rows are not packed; index keys are written on their own.

        Raises:
            GeometryError: rows are packed here; else as in the MLA pool.
            IndexTensorError, PausedPoolError: as in the MLA pool.
        """
        if self.dsa_kv_cache_store_fp8:
            raise GeometryError(
                f"set_kv_buffer: rows of this pool are packed into {self.kv_cache_dim} bytes;"
                " expected set_mla_kv_buffer, which packs them"
            )
        super().set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale)

    def set_index_k_scale_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        index_k: torch.Tensor,
        index_k_scale: torch.Tensor,
    ) -> None:
        """Write one index key and its scale a token into the slots `loc` of `layer`.

        Args:
            layer: its number, or an object with `layer_id`.
            loc: slots, `[n]` of any integer dtype.
            index_k: `[n, index_head_dim]` of an eight-bit dtype; its bits are kept.
            index_k_scale: float32, `[n, index_head_dim // 128]`, or `[n]` if that is 1.

        Raises:
            IndexTensorError: slots that are no vector of integers, or keys or scales that are no
                tensor, on the pool's device.
            InvalidSlotError: a slot beyond the index keys, on a CPU.
            GeometryError: an unknown layer, one without index keys, or another number of rows,
                columns or dtype.
            PausedPoolError: the pool is paused. In all cases nothing was written.
        """
        operation = "set_index_k_scale_buffer"
        self.require_awake(operation)
        local = self._local_layer(layer)
        buffer = self._index_buffer[local]
        if not len(buffer):
            raise GeometryError(
                f"{operation}: layer position {local} reuses the top-k of the layer before it and"
                " has no index keys"
            )
        slots = as_index(operation, loc, self._resolved_device)
        require_within(operation, slots, len(buffer) * self.page_size)
        slots = slots.clamp(min=0)
        for name, part in (("keys", index_k), ("scales", index_k_scale)):
            require_tensor(f"{operation}: {name}", part, self._resolved_device)
        if index_k.dtype.itemsize != 1 or index_k_scale.dtype != torch.float32:
            raise GeometryError(
                f"{operation}: keys of {index_k.dtype}, scales of {index_k_scale.dtype}; expected"
                " eight-bit keys and float32 scales"
            )
        count = len(slots)
        blocks = self.index_head_dim // BLOCK
        if blocks == 1:
            index_k_scale = index_k_scale.reshape(-1, 1)
        device = self._resolved_device
        keys = shaped(f"{operation}: keys", index_k, (count, self.index_head_dim), device)
        scales = shaped(f"{operation}: scales", index_k_scale, (count, blocks), device).contiguous()
        self._keys(buffer)[slots] = keys.view(torch.uint8)
        self._scales(buffer)[slots] = scales.view(torch.uint8)

    def get_index_k_with_scale_buffer(self, layer: Layer) -> torch.Tensor:
        """The page rows of `layer`, uint8 `[pages, page bytes]`; no rows if it keeps no keys."""
        self.require_awake("get_index_k_with_scale_buffer")
        return self._index_buffer[self._local_layer(layer)]

    def get_index_k_continuous(
        self, layer: Layer, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """The index keys of the first `seq_len` tokens of the pages `page_indices`, in order.

        Returns:
            uint8 `[seq_len, index_head_dim]`.

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a page beyond the index keys, on a CPU; page -1 is the padding page.
            GeometryError: an unknown layer, or more tokens than the pages hold.
            PausedPoolError: the pool is paused.
        """
        buffer = self.get_index_k_with_scale_buffer(layer)
        pages = self._first_pages("get_index_k_continuous", buffer, seq_len, page_indices)
        return self._keys(buffer).pages[pages].flatten(0, 1)[:seq_len]

    def get_index_k_scale_continuous(
        self, layer: Layer, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """The scales of the same tokens, as bytes: uint8 `[seq_len, index_head_dim // 128 * 4]`.

        Raises:
            IndexTensorError, InvalidSlotError, GeometryError, PausedPoolError: as
                `get_index_k_continuous`.
        """
        buffer = self.get_index_k_with_scale_buffer(layer)
        pages = self._first_pages("get_index_k_scale_continuous", buffer, seq_len, page_indices)
        return self._scales(buffer).pages[pages].flatten(0, 1)[:seq_len]

    def get_index_k_scale_buffer(
        self,
        layer: Layer,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index keys and scales of a batch of sequences, one after the other.

        Args:
            layer: its number, or an object with `layer_id`.
            seq_len_tensor: tokens of each sequence, `[batch]`.
            page_indices: pages of each sequence, `[batch, most pages]`; what is beyond a sequence's
                end is not read.
            seq_len_sum: the sum of `seq_len_tensor`, known on the host.
            max_seq_len: at least the largest of `seq_len_tensor`, known on the host.

        Returns:
            uint8 `[seq_len_sum, index_head_dim]` and `[seq_len_sum, index_head_dim // 128 * 4]`.

        Raises:
            IndexTensorError: not integers on the pool's device.
            InvalidSlotError: a page beyond the index keys, on a CPU; page -1 is the padding page.
            GeometryError: an unknown layer, or sequences longer than the pages hold; on a CPU also
                a negative length, or lengths that are not as `seq_len_sum` and `max_seq_len` say.
                A device is not asked, and nobody else notices there.
            PausedPoolError: the pool is paused.
        """
        operation = "get_index_k_scale_buffer"
        buffer = self.get_index_k_with_scale_buffer(layer)
        lengths = as_index(operation, seq_len_tensor, self._resolved_device)
        pages = as_locations(operation, page_indices, self._resolved_device)
        if pages.dim() != 2 or len(pages) != len(lengths):
            raise GeometryError(
                f"{operation}: pages of shape {tuple(pages.shape)} for {len(lengths)} sequences;"
                " expected a row of pages for each"
            )
        seq_len_sum = as_count(operation, "seq_len_sum", seq_len_sum)
        self._require_pages(operation, max_seq_len, pages.shape[1])
        _require_lengths(operation, lengths, seq_len_sum, max_seq_len)
        # The host knows the sum, so no shape here waits for the device.
        owner = torch.repeat_interleave(
            torch.arange(len(lengths), device=lengths.device), lengths, output_size=seq_len_sum
        )
        starts = lengths.cumsum(0) - lengths
        token = torch.arange(seq_len_sum, device=lengths.device) - starts[owner]
        size = self.page_size
        slots = self._page_rows(operation, pages[owner, token // size], buffer) * size
        slots += token % size
        return self._keys(buffer)[slots], self._scales(buffer)[slots]

    def get_state_buf_infos(self) -> BufferInfos:
        """Address, bytes, and bytes a page of every index-K buffer: a transfer of its own.

        Layers without index keys keep their place, with 0 bytes a page.
        """
        buffers = self._index_buffer
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes if len(buffer) else 0 for buffer in buffers],
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of latent rows and index keys, and 0: the values are part of the rows."""
        latent, _ = super().get_kv_size_bytes()
        return latent + sum(buffer.nbytes for buffer in self._index_buffer), 0

    @property
    def dsa_kv_cache_store_fp8(self) -> bool:
        """Whether latent rows are packed."""
        return self.kv_cache_dim != self.kv_lora_rank + self.qk_rope_head_dim

    def _row_width(self) -> int:
        plain = super()._row_width()
        if self._asked_width == plain:
            return plain
        packed = packed_width(self.kv_lora_rank, self.qk_rope_head_dim)
        if self.dtype != FP8 or self.kv_lora_rank % BLOCK or self._asked_width != packed:
            raise GeometryError(
                f"DSATokenToKVPool: kv_cache_dim {self._asked_width} with dtype {self.dtype} and"
                f" kv_lora_rank {self.kv_lora_rank}; expected {plain}, or {packed} with {FP8} and a"
                f" rank that is a multiple of {BLOCK}"
            )
        return packed

    def _joined(self, count: int, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        if not self.dsa_kv_cache_store_fp8:
            return super()._joined(count, nope, rope)
        widths = (self.kv_lora_rank, self.qk_rope_head_dim)
        latent, rotated = (
            shaped(
                f"set_mla_kv_buffer: {name} part", part, (count, 1, width), self._resolved_device
            )
            for name, part, width in zip(("nope", "rope"), (nope, rope), widths, strict=True)
        )
        return pack(latent[:, 0], rotated[:, 0])[:, None]

    def _parted(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.dsa_kv_cache_store_fp8:
            return super()._parted(rows)
        nope, rope = unpack(rows[:, 0], self.kv_lora_rank)
        return nope[:, None], rope[:, None]

    def _move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        super()._move(targets, sources)
        kept = [buffer for buffer in self._index_buffer if len(buffer)]
        pages = self._whole_pages(targets, sources)
        for buffer in kept:
            if pages is not None:
                buffer[pages[0]] = buffer[pages[1]]
                continue
            for rows in (self._keys(buffer), self._scales(buffer)):
                rows[targets] = rows[sources]

    def _whole_pages(
        self, targets: torch.Tensor, sources: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The pages that a move is made of, or None if it moves anything but whole pages.

        Waits for the device, but only where the number of slots is one of whole pages.
        """
        size = self.page_size
        if len(targets) % size:
            return None
        order = torch.arange(size, device=targets.device)
        firsts = torch.stack([targets, sources]).view(2, -1, size)
        pages = firsts[..., 0] // size
        if size > 1 and not torch.equal(firsts, pages[..., None] * size + order):
            return None
        return pages[0], pages[1]

    def _index_zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        """A new index-K buffer, in the same region as all the others."""
        return self._zeros(shape, torch.uint8)

    def _keys(self, buffer: torch.Tensor) -> PagedRows:
        """The index keys of one layer."""
        end = self.page_size * self.index_head_dim
        return PagedRows(buffer[:, :end].unflatten(1, (self.page_size, self.index_head_dim)))

    def _scales(self, buffer: torch.Tensor) -> PagedRows:
        """The scales of one layer, as bytes."""
        start = self.page_size * self.index_head_dim
        return PagedRows(buffer[:, start:].unflatten(1, (self.page_size, self.index_scale_bytes)))

    def _first_pages(
        self, operation: str, buffer: torch.Tensor, seq_len: int, page_indices: torch.Tensor
    ) -> torch.Tensor:
        """Those of the pages that hold the first `seq_len` tokens, as rows of `buffer`."""
        pages = as_index(operation, page_indices, self._resolved_device)
        self._require_pages(operation, seq_len, len(pages))
        return self._page_rows(operation, pages[: -(-seq_len // self.page_size)], buffer)

    def _page_rows(self, operation: str, pages: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Pages as rows of `buffer`: the padding page for -1, as slot -1 is a padding slot."""
        require_within(operation, pages, len(buffer))
        return pages.clamp(min=0)

    def _require_pages(self, operation: str, seq_len: SupportsIndex, pages: int) -> None:
        """Raise GeometryError unless `pages` pages hold `seq_len` tokens."""
        if not 0 <= as_count(operation, "length", seq_len) <= pages * self.page_size:
            raise GeometryError(
                f"{operation}: {seq_len} tokens in {pages} pages of {self.page_size}"
            )


def _require_lengths(
    operation: str, lengths: torch.Tensor, seq_len_sum: int, max_seq_len: int
) -> None:
    """Raise GeometryError where the lengths are known not to be what the host was told."""
    if lengths.device.type != "cpu":
        return
    seen = lengths.tolist()
    if sum(seen) != seq_len_sum or any(not 0 <= length <= max_seq_len for length in seen):
        raise GeometryError(
            f"{operation}: lengths {seen}; expected none negative, seq_len_sum {seq_len_sum} in all"
            f" and at most max_seq_len {max_seq_len} each"
        )


def _skips(skip_topk_layers: Sequence[bool] | None, layer_num: int) -> list[bool]:
    """For each layer, whether it keeps no index keys; raises GeometryError for another number."""
    if skip_topk_layers is None:
        return [False] * layer_num
    skips = list(skip_topk_layers) if isinstance(skip_topk_layers, Iterable) else None
    if skips is None or len(skips) != layer_num:
        raise GeometryError(
            f"DSATokenToKVPool: skip_topk_layers {skip_topk_layers!r}; expected a sequence of"
            f" {layer_num}, one for each layer"
        )
    return skips


def _check_index(index_head_dim: int, index_buf_size: int, size: int) -> None:
    """Raise GeometryError unless there can be an index-K cache of these sizes."""
    if index_head_dim < BLOCK or index_head_dim % BLOCK:
        raise GeometryError(
            f"DSATokenToKVPool: index_head_dim {index_head_dim}; expected a multiple of {BLOCK}"
        )
    if index_buf_size < size:
        raise GeometryError(
            f"DSATokenToKVPool: index_buf_size {index_buf_size}; expected at least size {size}"
        )

"""The pool of multi-head latent attention: one buffer a layer, whose rows hold the compressed key
and value of a token beside the part of the key that carries its position.

Left out: the index keys of sparse attention (`kvcore.pools.dsa`), and rows spread over devices.
"""

import torch

from kvcore.errors import GeometryError
from kvcore.pools.arguments import Layer, as_count
from kvcore.pools.base import SlotPool
from kvcore.saver import MemorySaver


class MLATokenToKVPool(SlotPool):
    """Rows `[rows, 1, kv_lora_rank + qk_rope_head_dim]` for each layer.

    A whole row is the key; its first `kv_lora_rank` columns, the part without position ("nope"),
    are the value too. So there is no value buffer of its own.

    Args:
        size: as the others, see `SlotPool`.
        page_size: see `SlotPool`.
        dtype: see `SlotPool`.
        kv_lora_rank: columns of the compressed part.
        qk_rope_head_dim: columns of the rotated part; may be 0.
        layer_num: see `SlotPool`.
        device: see `SlotPool`.
        enable_memory_saver: see `SlotPool`.
        start_layer: see `SlotPool`.
        end_layer: see `SlotPool`.
        memory_saver: see `SlotPool`.

    Raises:
        GeometryError: a size that no buffer can have.
        PausedPoolError, SaverMemoryError, SaverUnavailableError: see `SlotPool`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        memory_saver: MemorySaver | None = None,
    ) -> None:
        super().__init__(
            size,
            page_size,
            dtype,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
            memory_saver=memory_saver,
        )
        kind = type(self).__name__
        kv_lora_rank = as_count(kind, "kv_lora_rank", kv_lora_rank)
        qk_rope_head_dim = as_count(kind, "qk_rope_head_dim", qk_rope_head_dim)
        if kv_lora_rank < 1 or qk_rope_head_dim < 0:
            raise GeometryError(
                f"{kind}: kv_lora_rank {kv_lora_rank}, qk_rope_head_dim"
                f" {qk_rope_head_dim}; expected at least 1 and at least 0"
            )
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = self._row_width()
        shape = (self.rows, 1, self.kv_cache_dim)
        self._kv_buffer = [self._zeros(shape, self.store_dtype) for _ in range(self.layer_num)]

    @property
    def kv_buffer(self) -> list[torch.Tensor]:
        """The buffers in layer order, in storage dtype.

        Raises:
            PausedPoolError: the pool is paused.
        """
        self.require_awake("kv_buffer")
        return self._kv_buffer

    def slot_buffers(self) -> list[torch.Tensor]:
        """The one buffer of each layer, in layer order."""
        return list(self._kv_buffer)

    def get_key_buffer(self, layer: Layer) -> torch.Tensor:
        """The rows of `layer`, `[rows, 1, kv_cache_dim]`, a view of dtype `dtype`."""
        self.require_awake("get_key_buffer")
        return self._kv_buffer[self._local_layer(layer)].view(self.dtype)

    def get_value_buffer(self, layer: Layer) -> torch.Tensor:
        """Their first columns, `[rows, 1, kv_lora_rank]`: a view of the same memory."""
        self.require_awake("get_value_buffer")
        return self.get_key_buffer(layer)[..., : self.kv_lora_rank]

    def set_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write one whole row a token into the slots `loc` of `layer`.

        The value is part of the row, so `cache_v` and `v_scale` are ignored, as in the field:
        callers pass them because they know no kinds of pools. Half a row is refused; the parts are
        written together by `set_mla_kv_buffer`.

        Args:
            layer: its number, or an object with `layer_id`.
            loc: slots, `[n]` of any integer dtype.
            cache_k: rows `[n, 1, kv_lora_rank + qk_rope_head_dim]`, or flat `[n, …]`.
            cache_v: ignored.
            k_scale: what rows of another dtype are divided by before they are cast to the pool's.
            v_scale: ignored.

        Raises:
            IndexTensorError: slots that are no vector of integers, or rows that are no tensor, on
                the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: an unknown layer, or another number of rows or columns.
            PausedPoolError: the pool is paused. In all cases nothing was written.
        """
        local, slots = self._place_rows("set_kv_buffer", layer, loc)
        shape = (len(slots), 1, self.kv_cache_dim)
        self._kv_buffer[local][slots] = self._stored("set_kv_buffer: rows", cache_k, shape, k_scale)

    def set_mla_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor | None,
    ) -> None:
        """Write one row a token into the slots `loc` of `layer`, given in its two parts.

        Args:
            layer: its number, or an object with `layer_id`.
            loc: slots, `[n]` of any integer dtype.
            cache_k_nope: `[n, 1, kv_lora_rank]`, or flat.
            cache_k_rope: `[n, 1, qk_rope_head_dim]`, or flat; None if that is 0.

        Raises:
            IndexTensorError: slots that are no vector of integers, or rows that are no tensor, on
                the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: an unknown layer, or another number of rows or columns.
            PausedPoolError: the pool is paused. In all cases nothing was written.
        """
        local, slots = self._place_rows("set_mla_kv_buffer", layer, loc)
        if cache_k_rope is None:
            cache_k_rope = torch.empty(len(slots), 0, device=slots.device)
        self._kv_buffer[local][slots] = self._joined(len(slots), cache_k_nope, cache_k_rope)

    def get_mla_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of the rows `loc` of `layer`, copied, as `dst_dtype` (`dtype` for None).

        Raises:
            IndexTensorError: not a vector of integers on the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: an unknown layer.
            PausedPoolError: the pool is paused.
        """
        local, slots = self._place_rows("get_mla_kv_buffer", layer, loc)
        nope, rope = self._parted(self._kv_buffer[local][slots])
        kind = self.dtype if dst_dtype is None else dst_dtype
        return nope.to(kind), rope.to(kind)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the buffers, and 0: the values are part of the keys. Padding included."""
        return sum(buffer.nbytes for buffer in self._kv_buffer), 0

    def _row_width(self) -> int:
        """Columns of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _joined(self, count: int, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Rows `[count, 1, kv_cache_dim]` in storage dtype, made of their two parts."""
        shapes = ((count, 1, self.kv_lora_rank), (count, 1, self.qk_rope_head_dim))
        parts = (
            self._stored(f"set_mla_kv_buffer: {name} part", rows, shape, None)
            for name, rows, shape in zip(("nope", "rope"), (nope, rope), shapes, strict=True)
        )
        return torch.cat(tuple(parts), dim=-1)

    def _parted(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of rows in storage dtype."""
        whole = rows.view(self.dtype)
        return whole[..., : self.kv_lora_rank], whole[..., self.kv_lora_rank :]

    def _place_rows(
        self, operation: str, layer: Layer, loc: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """Position of `layer` among the buffers, and the slots `loc` as rows of one."""
        self.require_awake(operation)
        return self._local_layer(layer), self._rows_of(operation, loc)

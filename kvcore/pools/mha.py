"""The pool of multi-head (and grouped-query) attention: a key and a value buffer a layer.

Left out: quantised formats with separate scales, and layouts other than one row a slot.
"""

import torch

from kvcore.errors import GeometryError
from kvcore.pools.arguments import Layer, as_count
from kvcore.pools.base import SlotPool
from kvcore.saver import MemorySaver


class MHATokenToKVPool(SlotPool):
    """Keys `[rows, head_num, head_dim]`, values `[rows, head_num, v_head_dim]`, for each layer.

    Arguments and errors as in `SlotPool`; `v_head_dim` is `head_dim` unless given.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
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
        self.head_num = as_count("MHATokenToKVPool", "head_num", head_num)
        self.head_dim = as_count("MHATokenToKVPool", "head_dim", head_dim)
        self.v_head_dim = (
            self.head_dim
            if v_head_dim is None
            else as_count("MHATokenToKVPool", "v_head_dim", v_head_dim)
        )
        if self.head_num < 1 or self.head_dim < 1 or self.v_head_dim < 1:
            raise GeometryError(
                f"MHATokenToKVPool: head_num {head_num}, head_dim {head_dim},"
                f" v_head_dim {self.v_head_dim}; expected at least 1 each"
            )
        self._k_buffer, self._v_buffer = (
            [
                self._zeros((self.rows, self.head_num, width), self.store_dtype)
                for _ in range(self.layer_num)
            ]
            for width in (self.head_dim, self.v_head_dim)
        )

    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """The key buffers in layer order, in storage dtype.

        Raises:
            PausedPoolError: the pool is paused.
        """
        self.require_awake("k_buffer")
        return self._k_buffer

    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """The value buffers in layer order, in storage dtype.

        Raises:
            PausedPoolError: the pool is paused.
        """
        self.require_awake("v_buffer")
        return self._v_buffer

    def slot_buffers(self) -> list[torch.Tensor]:
        """All key buffers, then all value buffers, in layer order."""
        return [*self._k_buffer, *self._v_buffer]

    def get_key_buffer(self, layer: Layer) -> torch.Tensor:
        """The keys of `layer`, `[rows, head_num, head_dim]`, a view of dtype `dtype`."""
        self.require_awake("get_key_buffer")
        return self._k_buffer[self._local_layer(layer)].view(self.dtype)

    def get_value_buffer(self, layer: Layer) -> torch.Tensor:
        """The values of `layer`, `[rows, head_num, v_head_dim]`, a view of dtype `dtype`."""
        self.require_awake("get_value_buffer")
        return self._v_buffer[self._local_layer(layer)].view(self.dtype)

    def set_kv_buffer(
        self,
        layer: Layer,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write one row a token into the slots `loc` of `layer`.

        Args:
            layer: its number, or an object with `layer_id`.
            loc: slots, `[n]` of any integer dtype.
            cache_k: keys `[n, head_num, head_dim]`, or flat `[n, head_num * head_dim]`.
            cache_v: values, the same with `v_head_dim`.
            k_scale: what keys of another dtype are divided by before they are cast to the pool's.
            v_scale: the same for values.

        Raises:
            IndexTensorError: slots that are no vector of integers, or rows that are no tensor, on
                the pool's device.
            InvalidSlotError: a slot beyond the pool, on a CPU.
            GeometryError: an unknown layer, or another number of rows or columns.
            PausedPoolError: the pool is paused. In all cases nothing was written.
        """
        self.require_awake("set_kv_buffer")
        local = self._local_layer(layer)
        slots = self._rows_of("set_kv_buffer", loc)
        heads = (len(slots), self.head_num)
        keys = self._stored("set_kv_buffer: keys", cache_k, (*heads, self.head_dim), k_scale)
        values = self._stored("set_kv_buffer: values", cache_v, (*heads, self.v_head_dim), v_scale)
        self._k_buffer[local][slots] = keys
        self._v_buffer[local][slots] = values

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the key buffers and of the value buffers, padding pages included."""
        return (
            sum(buffer.nbytes for buffer in self._k_buffer),
            sum(buffer.nbytes for buffer in self._v_buffer),
        )

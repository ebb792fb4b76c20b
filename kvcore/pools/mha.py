"""The pool of multi-head (and grouped-query) attention: a key and a value buffer a layer.

Left out: quantised formats with separate scales, and layouts other than one row a slot.
"""

import torch

from kvcore.allocator.arguments import as_index
from kvcore.errors import GeometryError
from kvcore.pools.base import Layer, SlotPool


class MHATokenToKVPool(SlotPool):
    """Keys `[rows, head_num, head_dim]`, values `[rows, head_num, v_head_dim]`, for each layer.

    Arguments as in `SlotPool`; `v_head_dim` is `head_dim` unless given.

    Raises:
        GeometryError: a size that no buffer can have.
        NotImplementedError: `enable_memory_saver` is True.
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
    ) -> None:
        super().__init__(
            size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer
        )
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        if head_num < 1 or head_dim < 1 or self.v_head_dim < 1:
            raise GeometryError(
                f"MHATokenToKVPool: head_num {head_num}, head_dim {head_dim},"
                f" v_head_dim {self.v_head_dim}; expected at least 1 each"
            )
        self.k_buffer = [self._zeros(self.head_dim) for _ in range(layer_num)]
        self.v_buffer = [self._zeros(self.v_head_dim) for _ in range(layer_num)]

    def slot_buffers(self) -> list[torch.Tensor]:
        """All key buffers, then all value buffers, in layer order."""
        return [*self.k_buffer, *self.v_buffer]

    def get_key_buffer(self, layer: Layer) -> torch.Tensor:
        """The keys of `layer`, `[rows, head_num, head_dim]`, a view of dtype `dtype`."""
        return self.k_buffer[self._local_layer(layer)].view(self.dtype)

    def get_value_buffer(self, layer: Layer) -> torch.Tensor:
        """The values of `layer`, `[rows, head_num, v_head_dim]`, a view of dtype `dtype`."""
        return self.v_buffer[self._local_layer(layer)].view(self.dtype)

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
            IndexTensorError: not a vector of integers on the pool's device; nothing was written.
            GeometryError: an unknown layer, or another number of rows or columns.
        """
        local = self._local_layer(layer)
        # Index -1 means "no slot"; as a row it would be the last live one.
        slots = as_index("set_kv_buffer", loc, self._resolved_device).clamp(min=0)
        keys = self._stored("keys", cache_k, len(slots), self.head_dim, k_scale)
        values = self._stored("values", cache_v, len(slots), self.v_head_dim, v_scale)
        self.k_buffer[local][slots] = keys
        self.v_buffer[local][slots] = values

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the key buffers and of the value buffers, padding pages included."""
        return (
            sum(buffer.nbytes for buffer in self.k_buffer),
            sum(buffer.nbytes for buffer in self.v_buffer),
        )

    def _zeros(self, width: int) -> torch.Tensor:
        shape = (self.rows, self.head_num, width)
        return torch.zeros(shape, dtype=self.store_dtype, device=self.device)

    def _stored(
        self,
        what: str,
        rows: torch.Tensor,
        count: int,
        width: int,
        scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """`rows` as the buffers keep them: `[count, head_num, width]` in storage dtype."""
        shapes = ((count, self.head_num, width), (count, self.head_num * width))
        if tuple(rows.shape) not in shapes:
            raise GeometryError(
                f"set_kv_buffer: {what} of shape {tuple(rows.shape)}; expected {shapes[0]}"
            )
        if rows.dtype != self.dtype:
            # Not in place: the tensor is the caller's.
            rows = rows if scale is None else rows / scale
            rows = rows.to(self.dtype)
        return rows.reshape(shapes[0]).view(self.store_dtype)

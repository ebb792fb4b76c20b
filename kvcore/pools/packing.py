"""Rows of sparse latent attention in mixed precision, as its kernels read them: the compressed part
in fp8, one scale a block of it, and the rotated part in bfloat16, side by side in bytes.

Left out: fused kernels that write this layout.
"""

import torch

BLOCK = 128
"""Columns that share a scale."""
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


def packed_width(nope: int, rope: int) -> int:
    """Bytes of a row with `nope` compressed columns, a multiple of `BLOCK`, and `rope` rotated."""
    return nope + nope // BLOCK * torch.float32.itemsize + rope * torch.bfloat16.itemsize


def pack(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, packed_width]` (uint8) of the rows with parts `[n, nope]` and `[n, rope]`.

    A block is divided by its scale, so that its largest entry becomes the largest fp8 number.
    """
    blocks = nope.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2) / _LARGEST
    # A block of zeros has scale 0 and stays zeros.
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    quantised = (blocks / divisors[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8).flatten(1)
    parts = (quantised, scales, rope.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack(rows: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of packed rows `[n, packed_width]`: `[n, nope]` float32, `[n, rope]` bfloat16."""
    end = nope + nope // BLOCK * torch.float32.itemsize
    scales = rows[:, nope:end].contiguous().view(torch.float32)
    blocks = rows[:, :nope].contiguous().view(FP8).float().unflatten(1, (-1, BLOCK))
    rope = rows[:, end:].contiguous().view(torch.bfloat16)
    return (blocks * scales[..., None]).flatten(1), rope

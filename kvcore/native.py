"""The compiled helpers for frees on a CPU, where there are any.

They are compiled when the package is installed if there is a C compiler, and need a torch that
offers DLPack's exchange table (2.10 and newer). Without them numpy does the same, in some three to
five times as long. Environment variable KVCORE_KERNELS set to anything leaves them out.

Left out: what they do (`_native.c`, and the same in Python where it is used).
"""

from types import ModuleType

import torch

_EXCHANGE = "__dlpack_c_exchange_api__"


def _bound() -> ModuleType | None:
    """The compiled module, ready to read tensors; None if there is none, or torch is too old."""
    exchange = getattr(torch.Tensor, _EXCHANGE, None)
    if exchange is None:
        return None
    try:
        from kvcore import _native

        _native.bind(exchange, torch.Tensor)
    except (ImportError, ValueError):
        return None
    return _native


NATIVE = _bound()
"""The compiled module, or None."""

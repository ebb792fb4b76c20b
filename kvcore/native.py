"""The compiled helpers for frees on a CPU, where there are any.

They are compiled when the package is installed if there is a C compiler, and need a torch that
offers DLPack's exchange table. Without them numpy does the same, in up to five times as long.
Environment variable KVCORE_KERNELS, set to anything, leaves them out.

Left out: what they do (`_native.c`, and the same in Python where it is used).
"""

from importlib import import_module
from types import ModuleType

import torch

_EXCHANGE = "__dlpack_c_exchange_api__"


def bound(name: str) -> ModuleType | None:
    """The compiled module of that name, ready to read tensors.

    None if it was not compiled, or torch is too old.
    """
    exchange = getattr(torch.Tensor, _EXCHANGE, None)
    if exchange is None:
        return None
    try:
        module = import_module(name)
        module.bind(exchange, torch.Tensor)
    except (ImportError, ValueError):
        return None
    return module


NATIVE = bound("kvcore._native")
"""The compiled module of the core, or None."""

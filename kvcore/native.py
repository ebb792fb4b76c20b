"""The compiled helpers, where there are any: for frees on a CPU, and for recording calls.

They are compiled when the package is installed if there is a C compiler, and need a torch that
offers DLPack's exchange table. Without them Python does the same, a free by numpy in up to five
times as long. An allocator that is built while environment variable KVCORE_KERNELS says anything
does without them.

Left out: what they do (`_native.c`, `targets/_tape.c`, and the same in Python where it is used).
"""

from importlib import import_module
from types import ModuleType

import torch

_EXCHANGE = "__dlpack_c_exchange_api__"

LAYOUT = 3
"""What the compiled modules and their users agree on (`_vector.h`)."""


def bound(name: str) -> ModuleType | None:
    """The compiled module of that name, ready to read tensors.

    None if it was not compiled, or for another version of this package, or torch is too old.
    """
    exchange = getattr(torch.Tensor, _EXCHANGE, None)
    if exchange is None:
        return None
    try:
        module = import_module(name)
        if getattr(module, "LAYOUT", None) != LAYOUT:
            return None
        module.bind(exchange, torch.Tensor)
    except (ImportError, ValueError):
        return None
    return module


NATIVE = bound("kvcore._native")
"""The compiled module of the core, or None."""

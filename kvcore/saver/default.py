"""The saver that pools use unless they are given one: one a device kind, for the whole process, so
that one `pause` reaches every pool.

Left out: choosing a saver for a pool; that is the pool's `memory_saver` argument.
"""

from collections.abc import Callable

import torch

from kvcore.errors import SaverUnavailableError
from kvcore.saver.cuda import CudaMemorySaver
from kvcore.saver.host import HostMemorySaver
from kvcore.saver.protocol import MemorySaver

_KINDS: dict[str, Callable[[], MemorySaver]] = {"cpu": HostMemorySaver, "cuda": CudaMemorySaver}
_savers: dict[str, MemorySaver] = {}


def default_saver(device: str | torch.device) -> MemorySaver:
    """The process-wide saver for memory on devices of the kind of `device`.

    Raises:
        SaverUnavailableError: there is none for that kind, or it cannot work here.
    """
    kind = torch.device(device).type
    if kind not in _KINDS:
        raise SaverUnavailableError(
            f"default_saver: none for device {device}; expected one of {sorted(_KINDS)}, or pass "
            "memory_saver to the pool"
        )
    if kind not in _savers:
        _savers[kind] = _KINDS[kind]()
    return _savers[kind]

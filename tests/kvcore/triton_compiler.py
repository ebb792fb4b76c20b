"""Makes every call of the Triton kernels with Triton's compiler, for a GPU that need not be there;
run by test_kernels in a process of its own, without the interpreter.

Prints, as JSON, a list for each call: `[kernel, hash of what was compiled]` a launch, and the torch
operations that the call dispatches.

Left out: running what was compiled.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvcore.kernels.triton_slots import TritonSlots


class AbsentGpu:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Dispatched(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.names.append(func.overloadpacket.__name__)
        answer: torch.Tensor = func(*args, **(kwargs or {}))
        return answer


def calls(count: int, start: int) -> dict[str, Callable[[], object]]:
    """Every call, of `count` rows or pages; vectors in the free lists' storage start at `start`."""
    page_size = 16
    kernels = TritonSlots()
    mapping = torch.zeros(page_size * 40 + 1, dtype=torch.int64)
    storage = torch.zeros((2, 64), dtype=torch.int64)
    full_pages, swa_firsts = storage[0, start : start + count], storage[1, start : start + count]
    rows = torch.zeros(count, dtype=torch.int64)
    slots = torch.zeros(64 * page_size, dtype=torch.int64)[start::page_size][:count]
    batch = (rows, rows, full_pages)
    paired = (full_pages, swa_firsts, mapping)
    given: dict[str, Any] = {"page_size": page_size, "swa_firsts": swa_firsts}
    return {
        "extend_slots": lambda: kernels.extend_slots(
            rows, *batch, num_tokens=count, page_size=page_size
        ),
        "decode_slots": lambda: kernels.decode_slots(*batch, page_size=page_size),
        "decode_paired": lambda: kernels.decode_paired(rows, rows, *paired, page_size=page_size),
        "lend": lambda: kernels.lend(*paired, page_size=page_size),
        "map_pages": lambda: kernels.map_pages(*paired, page_size=page_size),
        "release": lambda: kernels.release(slots, mapping, full_pages=full_pages, **given),
        "release_peers": lambda: kernels.release_peers(slots, mapping, **given),
    }


def main() -> None:
    launched: list[tuple[str, str]] = []

    def launch(kernel: JITFunction, grid: tuple[int]) -> Callable[..., None]:
        def compile_only(*arguments: Any, **constants: Any) -> None:
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **constants)
            launched.append((kernel.__name__, compiled.hash))

        return compile_only

    driver.set_active(AbsentGpu())
    JITFunction.__getitem__ = launch
    told = []
    for count, start in ((0, 0), (1, 3), (5, 1), (16, 0)):
        for name, call in calls(count, start).items():
            launched.clear()
            with Dispatched() as dispatched:
                call()
            told.append((name, count, list(launched), dispatched.names))
    print(json.dumps(told))


if __name__ == "__main__":
    main()

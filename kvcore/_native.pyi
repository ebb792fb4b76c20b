"""What `kvcore._native`, compiled from C, offers; see there. Use it through `kvcore.native`."""

from typing import Any

import torch

from kvcore.allocator.ownership import Ids

def bind(exchange: object, tensor_type: type[torch.Tensor]) -> None: ...
def copied(index: torch.Tensor, page_size: int = 1, start_pos: int = 0, /) -> bytes | None: ...

class Releaser:
    def __init__(
        self,
        full: Any,
        swa: Any,
        mapping: Ids,
        page_size: int,
        num_rows: int,
        stacks: bool,
        full_capacity: int,
        swa_capacity: int,
    ) -> None: ...
    def release(self, index: torch.Tensor, with_full: bool, start_pos: int = 0, /) -> int: ...

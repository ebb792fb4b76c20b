"""Every hostile call, made once on kvcore where it is wrong: it raises what is documented and
changes nothing.

Leaves out when a call is wrong: tests/models/test_hostile_calls.py.
"""

from typing import Any

import pytest
import torch

from kvcore import PagedTokenToKVPoolAllocator, SWAKVPool, SWATokenToKVPoolAllocator
from kvcore.invariants import Run, Skipped
from kvcore.models import Geometry, Raised, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.targets.core import core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.hostile import CoreHostility
from kvcore.targets.pool import build_pool

torch.set_num_threads(1)

HYBRID = Geometry(4, 8, 6)
SINGLE = Geometry(4, 8)


def state(target: AllocatorTarget) -> tuple[Any, ...]:
    """All that the view shows but the held tensors; free pages in any order."""
    host = target.view(stamps=True).host()
    free = sorted(host.full_free), sorted(host.swa_free)
    return (*free, host.mapping, host.stamps, host.answers)


TWO = (ops.Alloc(1, 1), ops.Alloc(2, 1))
DEAD = (*TWO, ops.FreeSwa(1))
IN_GROUP = (*TWO, ops.GroupBegin(), ops.Free(1))
SCENES: dict[str, tuple[Op, ...]] = {
    "free_again": (*TWO, ops.Free(1)),
    "free_pending": IN_GROUP,
    "map_pending": IN_GROUP,
    "recover_dead": (*DEAD, ops.FreeSwa(2)),
    "decode_dead_page": (ops.Extend(((1, 2),)), ops.FreeSwa(1)),
    "begin_nested": (ops.GroupBegin(),),
    "restore_short": (*TWO, ops.Retract(1, 1)),
}
"""What comes before a hostile call on row or backup 1 and row 2; two rows where nothing is said."""


PAGE_SIZES = {
    "free_slot_twice": 1,
    "alloc_unaligned": 4,
    "decode_dead_page": 4,
    "tail_misaligned": 4,
    "segment_misaligned": 4,
}
"""Where a call is wrong at one of the two page sizes only."""


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("call", HOSTILE_CALLS)
def test_a_hostile_call_raises_what_is_documented_and_changes_nothing(
    call: str, page_size: int
) -> None:
    made = 0
    for swa_pages in (6, 0):
        geometry = Geometry(page_size, 8, swa_pages)
        target = core_target(geometry)
        run = Run(target)
        for op in SCENES.get(call, TWO):
            run.step(op)
        before = state(target)
        outcome = run.step(ops.Hostile(call, 1, 2))
        if isinstance(outcome, Skipped):
            continue
        assert isinstance(outcome, Raised)
        assert outcome.kind in HOSTILE_CALLS[call].errors
        assert "KVCacheError" in outcome.bases
        assert outcome.message
        assert state(target) == before
        run.finish()
        made += 1

    can_be_made = page_size == PAGE_SIZES[call] if call in PAGE_SIZES else True
    assert (made > 0) is can_be_made


def test_a_hostile_call_that_nobody_knows_is_a_key_error() -> None:
    pool = build_pool(HYBRID)
    assert isinstance(pool, SWAKVPool)
    allocator = SWATokenToKVPoolAllocator(32, 24, 4, torch.int64, "cpu", pool, False)
    caller = CoreHostility(allocator, pool, HYBRID, torch.device("cpu"))
    with pytest.raises(KeyError, match="free_everything"):
        caller.prepare("free_everything", rows={}, ghost=[], backup=None, seq=1, other=2)


def test_a_hostile_call_on_the_mapping_needs_one() -> None:
    pool = build_pool(SINGLE)
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", pool, False)
    caller = CoreHostility(allocator, pool, SINGLE, torch.device("cpu"))
    with pytest.raises(TypeError, match="only a hybrid allocator"):
        caller.prepare("clear_negative", rows={}, ghost=[], backup=None, seq=1, other=2)

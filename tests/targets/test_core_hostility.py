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


def geometries(size: int) -> list[Geometry]:
    """Every kind of pools that there is at this page size."""
    kinds = [
        Geometry(size, 8, 6),
        Geometry(size, 8),
        Geometry(size, 8, pure_swa=True),
        Geometry(size, 8, device_pages=4),
        Geometry(size, 8, 6, requests=4),
        Geometry(size, 8, 6, saver=True, attention="dsa"),
        Geometry(size, 8, saver=True),
        Geometry(size, 8, pure_swa=True, saver=True),
    ]
    return kinds if size % 4 else [*kinds, Geometry(size, 8, 6, device_pages=4, compress=4)]


def state(target: AllocatorTarget) -> tuple[Any, ...]:
    """All that the view shows but the held tensors; free pages in any order."""
    host = target.view(stamps=True).host()
    free = [host.full_free, host.swa_free, host.device_free, host.request_free, *host.pending]
    shown = host.mapping, host.device_mapping, host.stamps, host.request_rows, host.memory
    return (*map(sorted, free), *shown, host.answers)


TWO = (ops.Alloc(1, 1), ops.Alloc(2, 1))
DEAD = (*TWO, ops.FreeSwa(1))
IN_GROUP = (*TWO, ops.GroupBegin(), ops.Free(1))
PAUSED = (*TWO, ops.Reserve(1, "kv_cache", 1), ops.Pause("kv_cache"))
SCENES: dict[str, tuple[Op, ...]] = {
    "free_again": (*TWO, ops.Free(1)),
    "free_pending": IN_GROUP,
    "map_pending": IN_GROUP,
    "recover_dead": (*DEAD, ops.FreeSwa(2)),
    "decode_dead_page": (ops.Extend(((1, 2),)), ops.FreeSwa(1)),
    "begin_nested": (ops.GroupBegin(),),
    "restore_short": (*TWO, ops.Retract(1, 1)),
    "read_paused": PAUSED,
    "write_paused": PAUSED,
    "copy_paused": PAUSED,
    "move_paused": PAUSED,
    "reserve_paused": PAUSED,
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

ON_A_MAPPING = {
    *("free_swa_padding", "free_swa_negative", "free_full_live", "clear_negative"),
    *("map_over_live", "map_negative", "map_pending", "recover_live", "recover_dead"),
    *("decode_dead_page", "tail_misaligned"),
}
"""Calls that there are on hybrid pools alone."""


def can_be_made(call: str, geometry: Geometry) -> bool:
    """Whether a caller of such pools can make the call at all."""
    right_size = geometry.page_size == PAGE_SIZES.get(call, geometry.page_size)
    if call in ON_A_MAPPING:
        return right_size and geometry.hybrid
    if call.endswith("_paused"):
        return geometry.saver
    if call == "restore_short":
        return not geometry.sparse and geometry.requests == 0
    return right_size


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("call", HOSTILE_CALLS)
def test_a_hostile_call_raises_what_is_documented_and_changes_nothing(
    call: str, page_size: int
) -> None:
    for geometry in geometries(page_size):
        target = core_target(geometry)
        run = Run(target)
        for op in SCENES.get(call, TWO):
            run.step(op)
        before = state(target)
        outcome = run.step(ops.Hostile(call, 1, 2))
        assert isinstance(outcome, Skipped) is not can_be_made(call, geometry), geometry
        if isinstance(outcome, Skipped):
            continue
        assert isinstance(outcome, Raised), geometry
        assert outcome.kind in HOSTILE_CALLS[call].errors
        assert "KVCacheError" in outcome.bases
        assert outcome.message
        assert state(target) == before
        run.finish()


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


def test_memory_can_be_reserved_only_where_there_is_a_saver() -> None:
    pool = build_pool(SINGLE)
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", pool, False)
    caller = CoreHostility(allocator, pool, SINGLE, torch.device("cpu"))
    with pytest.raises(KeyError, match="reserve_paused needs a memory saver"):
        caller.prepare("reserve_paused", rows={}, ghost=[], backup=None, seq=-1, other=-1)


def test_a_restore_into_too_few_slots_needs_a_backup() -> None:
    pool = build_pool(SINGLE)
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", pool, False)
    caller = CoreHostility(allocator, pool, SINGLE, torch.device("cpu"))
    with pytest.raises(KeyError, match="restore_short needs a backup"):
        caller.prepare("restore_short", rows={}, ghost=[], backup=None, seq=1, other=-1)

"""Anybody's allocator by the names of the field: which calls are made, under which contract, what
the view shows, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcore import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.invariants import Run
from kvcore.models import Contract, Geometry, Lent, Raised, Refused, ops
from kvcore.strategies.sources import Burst, run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.field import (
    ALL_CALLS,
    SINGLE_CALLS,
    field_contract,
    field_target,
    free_and_released,
)
from kvcore.targets.pool import build_pool

torch.set_num_threads(1)

GROUPS = ("free_group_begin", "free_group_end")


class Shelf:
    """The least that an allocator has, in plain Python; counts what is asked of it."""

    def __init__(self, geometry: Geometry) -> None:
        self.size, self.page_size = geometry.full_size, geometry.page_size
        self.free_pages = list(range(1, geometry.full_pages + 1))
        self.asked: list[str] = []

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self.asked.append(f"alloc {need_size}")
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages = [self.free_pages.pop() for _ in range(count)]
        slots = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        return torch.tensor(slots, dtype=torch.int64)

    def free(self, free_index: torch.Tensor) -> None:
        self.asked.append(f"free {len(free_index)}")
        self.free_pages += sorted({slot // self.page_size for slot in free_index.tolist()})


def shelf_target(geometry: Geometry) -> AllocatorTarget:
    return field_target(geometry, Shelf(geometry))


def paged_target(geometry: Geometry) -> AllocatorTarget:
    """kvcore's own single-pool allocators, known by their names only."""
    rest = (torch.int64, "cpu", None, geometry.need_sort)
    if geometry.page_size == 1:
        token = TokenToKVPoolAllocator(geometry.full_size, *rest)
        return field_target(geometry, token, SINGLE_CALLS, free_pages=free_and_released)
    paged = PagedTokenToKVPoolAllocator(geometry.full_size, geometry.page_size, *rest)
    return field_target(geometry, paged, SINGLE_CALLS, free_pages=free_and_released)


def hybrid_target(geometry: Geometry) -> AllocatorTarget:
    """The hybrid one, known by its names only."""
    pool = build_pool(geometry)
    hybrid = SWATokenToKVPoolAllocator(
        geometry.full_size,
        geometry.swa_size,
        geometry.page_size,
        torch.int64,
        "cpu",
        pool,
        geometry.need_sort,
    )
    return field_target(geometry, hybrid, ALL_CALLS, free_pages=free_and_released, pool=pool)


def walk(
    factory: Callable[[Geometry], AllocatorTarget], machine: str, sizes: tuple[int, ...]
) -> Burst:
    return run_burst("walker", factory, WalkPlan(sizes, machine), seed=0, programs=12)


# --- driving -------------------------------------------------------------------------------------


def test_three_calls_are_enough_for_a_trial() -> None:
    burst = walk(shelf_target, "single pool", (4,))

    assert burst.failures == []
    assert set(burst.tally.ops) == {"alloc", "free"}
    assert burst.tally.refusals > 0


def test_single_slots_grow_by_alloc_where_there_is_nothing_else() -> None:
    shelf = Shelf(Geometry(1, 8))
    run = Run(field_target(Geometry(1, 8), shelf))
    run.step(ops.Extend(((1, 2), (2, 1))))
    run.step(ops.Decode((1, 2)))

    assert shelf.asked == ["alloc 3", "alloc 2"]
    assert walk(shelf_target, "single pool", (1,)).failures == []


def test_an_allocator_with_every_call_is_driven_by_all_of_them() -> None:
    burst = walk(paged_target, "single pool", (1, 4))

    assert burst.failures == []
    assert set(burst.tally.ops) == {
        *("alloc", "extend", "decode", "free", "group_begin", "group_end", "clear")
    }


def test_a_hybrid_allocator_is_driven_on_both_sides() -> None:
    burst = walk(hybrid_target, "hybrid", (1, 4))

    assert burst.failures == []
    sides = {"free_swa", "free_full", "swa_tail", "recover", "load_back", "load_back_swa"}
    assert sides <= set(burst.tally.ops)
    assert burst.tally.checks["stamps"] > 0


def test_a_slot_beyond_the_pool_is_a_broken_bound() -> None:
    class Generous(Shelf):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            slots = super().alloc(need_size)
            return None if slots is None else slots + self.size

    outcome = field_target(Geometry(4, 2), Generous(Geometry(4, 2))).apply(ops.Alloc(1, 1))
    assert isinstance(outcome, Raised)
    assert outcome.kind == "IndexError"


# --- the view ------------------------------------------------------------------------------------


def test_the_view_shows_free_pages_and_capacity() -> None:
    target = shelf_target(Geometry(4, 3))
    lent = target.apply(ops.Alloc(1, 2))
    host = target.view(stamps=True).host()

    assert isinstance(lent, Lent)
    assert host.full_free == [1]
    assert host.swa_free == host.mapping == []
    assert host.answers.available == host.answers.full_available == 4
    assert host.answers.outer == host.answers.inner == (4, 12)
    assert isinstance(target.apply(ops.Alloc(2, 2)), Refused)


def test_the_view_is_a_copy_of_a_free_list_in_a_tensor() -> None:
    target = paged_target(Geometry(4, 3))
    before = target.view(stamps=False)
    target.apply(ops.Alloc(1, 3))

    assert sorted(before.host().full_free) == [1, 2, 3]
    assert target.view(stamps=False).host().full_free == []


def test_pages_that_are_kept_aside_are_free_too() -> None:
    target = paged_target(Geometry(4, 3, need_sort=True))
    target.apply(ops.Alloc(1, 3))
    target.apply(ops.Free(1))

    assert sorted(target.view(stamps=False).host().full_free) == [1, 2, 3]


def test_a_target_is_called_after_its_allocator_or_as_told() -> None:
    geometry = Geometry(4, 3)

    assert shelf_target(geometry).name == "Shelf"
    assert field_target(geometry, Shelf(geometry), name="mine").name == "mine"


# --- the contract --------------------------------------------------------------------------------


def test_what_is_not_named_is_not_used() -> None:
    bare, grouped = field_contract(Geometry(4, 8)), field_contract(Geometry(4, 8), GROUPS)

    assert bare.ops == {"alloc", "free"}
    assert bare.free_forms == {"slots", "sparse"}
    assert bare.hostile == set()
    assert grouped.ops == bare.ops | {"group_begin", "group_end"}


def test_segments_are_forms_of_their_free() -> None:
    contract = field_contract(Geometry(4, 8, 8), ("free_segment", "free_swa", "free_swa_segments"))

    assert contract.free_forms == {"slots", "sparse", "segment"}
    assert contract.free_swa_forms == {"slots", "sparse", "segments"}


def test_locked_values_are_recovered_where_there_is_a_call_for_it() -> None:
    hybrid = Geometry(4, 8, 8)

    assert not field_contract(hybrid, ("free_full",)).locked_recovery
    assert "recover" in field_contract(hybrid, ("free_full",)).ops
    assert field_contract(hybrid, ("free_full", "recover_tombstone")).locked_recovery


def test_a_narrower_contract_is_the_callers_word() -> None:
    narrow = Contract(ops=frozenset(("alloc", "free")), exhaustion=False)
    geometry = Geometry(1, 4)

    assert field_target(geometry, Shelf(geometry), contract=narrow).contract is narrow


# --- what is refused -----------------------------------------------------------------------------


def test_calls_that_there_are_not_are_named() -> None:
    with pytest.raises(ValueError, match="calls names alloc_many, free_swa; known of an allocator"):
        field_contract(Geometry(4, 8), ("alloc_many", "free_swa"))
    with pytest.raises(ValueError, match="known of a hybrid allocator: alloc_decode"):
        field_contract(Geometry(4, 8, 8), ("alloc_many",))


def test_half_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="free_group_begin and free_group_end, expected both"):
        field_contract(Geometry(4, 8), ("free_group_begin",))


def test_a_hybrid_geometry_needs_a_pool_with_the_mapping() -> None:
    geometry = Geometry(4, 8, 8)
    with pytest.raises(ValueError, match=r'machines=\("single pool",\)'):
        field_target(geometry, Shelf(geometry))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 8, device_pages=4),
        Geometry(4, 8, pure_swa=True),
        Geometry(4, 8, requests=2),
        Geometry(4, 8, saver=True),
    ],
)
def test_other_machines_are_not_for_field_targets(geometry: Geometry) -> None:
    with pytest.raises(ValueError, match="expected a single or a hybrid pool"):
        field_target(geometry, Shelf(geometry))

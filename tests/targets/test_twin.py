"""Twins: a right wrapper keeps law L9 whatever is asked of it, and every call that it does not
forward breaks it, at that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvcore import CompressedHiSparseTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator
from kvcore.invariants import LawBroken, Run
from kvcore.models import Contract, Done, Geometry, Lent, Raised, Refused, ops
from kvcore.models.ops import Op
from kvcore.strategies.sources import Burst, run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.field import field_target
from kvcore.targets.protocol import Answers, UnsupportedGeometry
from kvcore.targets.twin import (
    TwinTarget,
    as_single_target,
    common_contract,
    forwarded_target,
    forwarding_twin,
    in_words,
    queries_in_words,
    single_twin,
    twin_factory,
)

torch.set_num_threads(1)

HYBRID = Geometry(4, 8, 6)


def walk(factory: Callable[[Geometry], Any], machine: str, programs: int = 12) -> Burst:
    sizes = (4, 16) if machine == "hybrid" else (1, 4)
    return run_burst("walker", factory, WalkPlan(sizes, machine), seed=0, programs=programs)


# --- right allocators ----------------------------------------------------------------------------


def test_the_compressed_wrapper_answers_as_the_hybrid_allocator_that_it_wraps() -> None:
    burst = walk(forwarding_twin, "hybrid")

    assert burst.failures == []
    assert burst.tally.checks["L9"] > 500
    forwarded = {"swa_tail", "free_swa", "free_full", "recover", "load_back", "load_back_swa"}
    grouped = {"group_begin", "group_end", "hostile", "retract", "restore"}
    assert forwarded | grouped <= set(burst.tally.ops)


def test_the_wrapper_keeps_every_law_of_a_hybrid_allocator() -> None:
    assert walk(forwarded_target, "hybrid").failures == []


def test_a_hybrid_allocator_with_equal_sides_answers_as_a_single_pool() -> None:
    burst = walk(single_twin, "single pool")

    assert burst.failures == []
    assert burst.tally.ops["hostile"] > 0
    assert walk(as_single_target, "single pool", 5).failures == []


def test_rows_go_on_without_device_slots_behind_tokens_that_have_none() -> None:
    """A decode adds a token without a device slot; no caller extends that page on the device."""
    run = Run(forwarding_twin(HYBRID))
    for op in (
        ops.Extend(((1, 7),)),
        ops.Decode((1,)),
        ops.Extend(((1, 3),)),
        ops.SwaTail(2, 4, 0),
        ops.Extend(((2, 4),)),
    ):
        assert isinstance(run.step(op), Lent)
    run.finish()


# --- what is compared ----------------------------------------------------------------------------


class KeepsSwa(CompressedHiSparseTokenToKVPoolAllocator):
    def free_swa(self, free_index: torch.Tensor) -> None:
        """Not forwarded."""


class HasNoTail(CompressedHiSparseTokenToKVPoolAllocator):
    def alloc_extend_swa_tail(self, *arguments: Any, **keywords: Any) -> torch.Tensor | None:
        raise NotImplementedError("no tail here")


class LendsWholeTails(CompressedHiSparseTokenToKVPoolAllocator):
    def alloc_extend_swa_tail(self, *arguments: Any, **keywords: Any) -> torch.Tensor | None:
        return self.alloc_logical_only(*arguments[:-1])


class MapsNothing(CompressedHiSparseTokenToKVPoolAllocator):
    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Not forwarded."""


class HasNoGroups(CompressedHiSparseTokenToKVPoolAllocator):
    def free_group_begin(self) -> None:
        """Not forwarded."""

    def free_group_end(self) -> None:
        """Not forwarded."""


class LosesDevicePages(CompressedHiSparseTokenToKVPoolAllocator):
    def _give_device_pages(self, pages: torch.Tensor) -> None:
        """Forgotten, so that its own capacity falls behind."""


class TellsDevicePageSize(CompressedHiSparseTokenToKVPoolAllocator):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.page_size = self.hisparse_page_size


class TellsDeviceSize(CompressedHiSparseTokenToKVPoolAllocator):
    @property
    def size(self) -> int:
        return self.hisparse_attn_allocator.size


FORGETFUL = [
    (KeepsSwa, (ops.Extend(((1, 4),)), ops.FreeSwa(1)), "SWA side 24", "SWA side 20"),
    (HasNoTail, (ops.SwaTail(1, 8, 4),), "8 slots, 4 with", "raised NotImplementedError"),
    (LendsWholeTails, (ops.SwaTail(1, 8, 4),), "8 slots, 4 with", "8 slots, 8 with"),
    (MapsNothing, (ops.LoadBack(1, 2, 1),), "8 slots, 4 with", "8 slots, 0 with"),
    (
        HasNoGroups,
        (ops.Extend(((1, 4),)), ops.GroupBegin(), ops.Free(1)),
        "available 20",
        "available 24",
    ),
    (LosesDevicePages, (ops.Alloc(1, 3), ops.Free(1)), "full side 32", "full side 20"),
    (TellsDevicePageSize, (ops.Extend(((1, 4),)),), "page_size 4", "page_size 1"),
    (TellsDeviceSize, (ops.Extend(((1, 4),)),), "size 24", "size 8"),
]


@pytest.mark.parametrize(
    ("wrapper", "program", "expected", "seen"),
    FORGETFUL,
    ids=[row[0].__name__ for row in FORGETFUL],
)
def test_a_call_that_is_not_forwarded_breaks_law_l9_at_that_call(
    wrapper: type[CompressedHiSparseTokenToKVPoolAllocator],
    program: tuple[Op, ...],
    expected: str,
    seen: str,
) -> None:
    run = Run(forwarding_twin(HYBRID, parts=CoreParts(compressed=wrapper)))
    for op in program[:-1]:
        run.step(op)
    with pytest.raises(LawBroken) as broken:
        run.step(program[-1])

    violation = broken.value.violation
    assert violation.signature == ("L9", program[-1].label)
    assert violation.laws == {"L9"}
    assert expected in violation.clauses[0].expected
    assert seen in violation.clauses[0].seen


def test_an_error_of_another_type_breaks_law_l9() -> None:
    class Rewording(CompressedHiSparseTokenToKVPoolAllocator):
        def free(self, free_index: torch.Tensor) -> None:
            try:
                super().free(free_index)
            except Exception as error:
                raise ValueError(str(error)) from error

    run = Run(forwarding_twin(HYBRID, parts=CoreParts(compressed=Rewording)))
    with pytest.raises(LawBroken) as broken:
        run.step(ops.Hostile("free_padding"))

    assert broken.value.violation.laws == {"L9"}
    assert "raised InvalidSlotError" in broken.value.violation.clauses[0].expected
    assert "raised ValueError" in broken.value.violation.clauses[0].seen


def test_a_refusal_on_one_side_breaks_law_l9_and_not_law_l5() -> None:
    """The inner allocator's refusal changed nothing, whatever the outer one did meanwhile."""
    larger = core_target(Geometry(4, 9, 9))
    larger.geometry = HYBRID  # it lends more than the geometry says
    run = Run(TwinTarget(larger, core_target(HYBRID)))
    with pytest.raises(LawBroken) as broken:
        run.step(ops.Extend(((1, 28),)))

    assert broken.value.violation.laws == {"L9"}
    assert "extend: None" in broken.value.violation.clauses[0].expected
    assert "extend: 28 slots, 28 with a peer" in broken.value.violation.clauses[0].seen


def test_every_answer_is_told_by_its_kind() -> None:
    op = ops.Alloc(1, 1)

    assert in_words(op, Lent((4, 5), (8, 0))) == "alloc: 2 slots, 1 with a peer"
    assert (
        in_words(op, Lent((4,), (), (), (1, 2))) == "alloc: 1 slots, 0 with a peer, 2 request rows"
    )
    assert in_words(op, Refused()) == "alloc: None"
    assert in_words(op, Done()) == "alloc: done"
    assert in_words(op, Raised("ValueError", "no")) == "alloc: raised ValueError"


def test_queries_have_their_names_where_somebody_knows_them() -> None:
    named = Answers(8, 8, 0, outer=(4, 32), asked=("page_size", "size"))

    assert queries_in_words(named)[-2:] == ("page_size 4", "size 32")
    assert queries_in_words(replace(named, asked=()))[-2:] == ("query 0 4", "query 1 32")


# --- two targets as one --------------------------------------------------------------------------


def test_callers_do_what_callers_of_both_may_do() -> None:
    outer = Contract(
        ops=frozenset(("alloc", "free", "decode")),
        free_forms=frozenset(("slots", "segment")),
        live_frees=frozenset(("segment",)),
        exhaustion=False,
        full_side_joins_group=False,
        hostile=frozenset(("free_again",)),
    )
    inner = Contract(ops=frozenset(("alloc", "free")), live_frees=frozenset(("slots",)))
    common = common_contract(outer, inner)

    assert common.ops == {"alloc", "free"}
    assert common.free_forms == {"slots", "segment"}
    assert common.live_frees == {"slots", "segment"}
    assert not common.exhaustion
    assert common.full_side_joins_group  # what the model follows is the inner allocator
    assert common.hostile == set()


def test_targets_of_different_geometries_are_no_twins() -> None:
    with pytest.raises(ValueError, match=r"8\+6 pages of 4, expected the geometry of kvcore: 9\+9"):
        TwinTarget(forwarded_target(HYBRID), core_target(Geometry(4, 9, 9)))


def test_targets_that_are_asked_different_queries_are_no_twins() -> None:
    single = Geometry(4, 8)
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", None, False)
    with pytest.raises(ValueError, match="mine answers 2 queries about itself and kvcore 0"):
        TwinTarget(field_target(single, allocator, name="mine"), core_target(single))


def test_a_wrapper_needs_a_hybrid_geometry_of_pages_that_can_be_compressed() -> None:
    for other in (Geometry(4, 8), Geometry(2, 8, 8), Geometry(4, 8, 8, requests=2)):
        with pytest.raises(
            UnsupportedGeometry, match="hybrid geometry in pages of a multiple of 4"
        ):
            forwarded_target(other)


def test_a_factory_of_twins_names_both_and_closes_both() -> None:
    twin = twin_factory(forwarded_target, core_target)(HYBRID)

    assert twin.name == "compressed HiSparse as hybrid beside kvcore"
    assert forwarding_twin(HYBRID, name="fault:x").name == "fault:x"
    twin.apply(ops.Alloc(1, 1))
    twin.close()

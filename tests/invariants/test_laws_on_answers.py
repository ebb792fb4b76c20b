"""Laws that a target breaks by what it answers, or by what an answer leaves behind: small faulty
variants of the core, each with one method that goes wrong.

Leaves out laws on the state alone: test_laws_on_views.py.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.errors import GeometryError
from kvcore.models import Geometry, Refused, ops
from kvcore.models.outcomes import Raised
from kvcore.targets.core import CoreParts


class Refusing(SWATokenToKVPoolAllocator):
    """Never lends whole pages."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return None


class RefusingTheLast(SWATokenToKVPoolAllocator):
    """Holds a page back that its queries promise (vllm#52707)."""

    def alloc_extend(self, *args: Any) -> torch.Tensor | None:
        wanted = int(args[3].sum() - args[1].sum())
        return None if wanted == self.available_size() else super().alloc_extend(*args)


class LendingTwice(SWATokenToKVPoolAllocator):
    """Answers the same slots again, whatever is left."""

    last: torch.Tensor | None = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self.last = self.last if self.last is not None else super().alloc(need_size)
        return self.last


class Raising(SWATokenToKVPoolAllocator):
    """Trips over its own assertion."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        raise AssertionError("free list and count differ\nsecond line")


class Overrunning(SWATokenToKVPoolAllocator):
    """Reads beyond the free list (sglang#34399)."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self.full_attn_allocator.free_pages[[10**6]]


class LosingOnRefusal(SWATokenToKVPoolAllocator):
    """Keeps a full page when it refuses, as decodes did to release 0.5.23."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is None:
            self.full_attn_allocator.alloc(self.page_size)
        return slots


class LosingOnError(SWATokenToKVPoolAllocator):
    """Raises the documented error, a page too late."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size < 0:
            self.swa_attn_allocator.alloc(self.page_size)
            raise GeometryError("a negative size")
        return super().alloc(need_size)


class Lenient(SWATokenToKVPoolAllocator):
    """Takes a second end of a group for granted (sglang#36739)."""

    def free_group_end(self) -> None:
        if self.free_group_is_open:
            super().free_group_end()


class Mistaken(SWATokenToKVPoolAllocator):
    """Raises, but not what is documented."""

    def free_group_end(self) -> None:
        if not self.free_group_is_open:
            raise AssertionError("no group")
        super().free_group_end()


class Negligent(SWATokenToKVPoolAllocator):
    """Does not look at values, so that a slot freed twice is free twice (sglang#40305)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "validate": False})


Make = Callable[..., Any]


def test_l7_a_refusal_where_there_is_room_is_reported(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Refusing))
    violation = scene.breaks(None, ops.Alloc(1, 1))
    assert violation.signature == ("L7", "alloc")
    assert violation.clauses[0].seen == "None"


def test_l7_slots_where_there_is_no_room_are_reported(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=LendingTwice))
    scene.do(ops.Alloc(1, 5))
    violation = scene.breaks(None, ops.Alloc(2, 5))
    assert violation.signature == ("L7", "alloc")


def test_l7_a_promise_that_is_not_kept_is_found_at_the_end(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=RefusingTheLast))
    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks_at_the_end()
    assert violation.signature == ("L7", "drain")


def test_pages_lent_a_second_time_are_reported(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=LendingTwice))
    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks(None, ops.Alloc(2, 2))
    assert violation.laws == {"L1", "L4"}
    pages = {page for clause in violation.clauses for page in clause.full_pages}
    assert pages == {scene.full(1, 0), scene.full(1, 1)}


def test_a_legal_call_that_raises_is_reported_with_its_error(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Raising))
    violation = scene.breaks(None, ops.Alloc(1, 1))
    assert violation.signature == ("raises", "alloc")
    assert violation.clauses[0].seen == "AssertionError: free list and count differ"


def test_an_index_error_is_out_of_bounds(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Overrunning))
    violation = scene.breaks(None, ops.Alloc(1, 1))
    assert violation.signature == ("bounds", "alloc")
    assert violation.clauses[0].seen.startswith("IndexError: ")


@pytest.mark.parametrize("every", [1, 4])
def test_l5_a_refusal_that_keeps_a_page_is_reported(make_scene: Make, every: int) -> None:
    scene = make_scene(parts=CoreParts(hybrid=LosingOnRefusal), every=every)
    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks(None, ops.Alloc(2, 8))
    assert {"L1", "L5", "L7"} <= violation.laws
    changed = {clause.full_pages for clause in violation.clauses if clause.law in ("L1", "L5")}
    assert [len(pages) for pages in changed - {()}] == [1]


@pytest.mark.parametrize("every", [1, 4])
def test_l5_an_error_that_keeps_a_page_is_reported(make_scene: Make, every: int) -> None:
    scene = make_scene(parts=CoreParts(hybrid=LosingOnError), every=every)
    scene.do(ops.Alloc(1, 2))
    violation = scene.breaks(None, ops.Hostile("alloc_negative"))
    assert {"L1", "L3", "L5", "L7"} <= violation.laws
    changed = {clause.swa_pages for clause in violation.clauses if clause.law in ("L3", "L5")}
    assert [len(pages) for pages in changed - {()}] == [1]


def too_many(scene: Any) -> ops.Op:
    return ops.Alloc(9, scene.model.full.total + 1)


def test_l5_a_refusal_that_clears_a_live_entry_is_reported(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    full = scene.full(1)
    violation = scene.breaks(lambda shown: scene.remap(shown, full, 0), too_many(scene))
    clause = next(clause for clause in violation.clauses if clause.law == "L5")
    assert clause.full_pages == (full,)
    assert "mapping" in clause.expected


def test_l5_a_refusal_that_resizes_the_mapping_is_reported(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    violation = scene.breaks(lambda shown: shown.mapping.insert(4, 0), too_many(scene))
    assert "L5" in violation.laws


def test_l5_a_refusal_that_moves_a_counter_is_reported(make_scene: Make) -> None:
    def move(shown: Any) -> None:
        shown.answers = msgspec.structs.replace(shown.answers, available=0)

    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    violation = scene.breaks(move, too_many(scene))
    assert violation.laws == {"L5", "L7"}


def test_l5_a_refusal_that_doubles_a_page_is_reported_though_the_set_is_the_same(
    make_scene: Make,
) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    page = min(scene.model.full.free)
    violation = scene.breaks(lambda shown: shown.full_free.append(page), too_many(scene))
    assert violation.laws == {"L2", "L5"}


def test_l5_a_refusal_in_a_group_may_capture_what_the_group_detached(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1), ops.GroupBegin())
    full, swa = scene.full(1), scene.swa(1)
    scene.do(ops.FreeSwa(1))
    scene.target.spoil = lambda shown: scene.remap(shown, full, swa)
    scene.do(ops.Decode((2,)))
    scene.target.spoil = lambda shown: scene.remap(shown, full, 0)
    assert isinstance(scene.do(too_many(scene)), Refused)


def test_l5_a_refusal_in_a_group_may_not_bring_a_detached_peer_back(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1), ops.GroupBegin())
    full, swa = scene.full(1), scene.swa(1)
    scene.do(ops.FreeSwa(1))
    scene.target.spoil = lambda shown: scene.remap(shown, full, 0)
    scene.do(ops.Decode((2,)))
    violation = scene.breaks(lambda shown: scene.remap(shown, full, swa), too_many(scene))
    clause = next(clause for clause in violation.clauses if clause.law == "L5")
    assert clause.full_pages == (full,)


def test_l5_is_about_failed_calls_alone(make_scene: Make) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1))
    lost = min(scene.model.full.free)
    violation = scene.breaks(lambda shown: shown.full_free.remove(lost), ops.GroupBegin())
    assert violation.laws == {"L1"}


def test_an_illegal_call_without_an_error_is_reported(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Lenient))
    op = ops.Hostile("end_unopened")
    violation = scene.breaks(None, op)
    assert violation.signature == ("hostile", op.label)
    assert "FreeGroupError" in violation.clauses[0].expected
    assert violation.clauses[0].seen == "no error"


def test_an_illegal_call_with_an_undocumented_error_is_reported(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Mistaken))
    op = ops.Hostile("end_unopened")
    violation = scene.breaks(None, op)
    assert violation.signature == ("hostile", op.label)
    assert violation.clauses[0].seen == "AssertionError: no group"


def test_what_an_illegal_call_broke_is_reported_with_it(make_scene: Make) -> None:
    scene = make_scene(parts=CoreParts(hybrid=Negligent))
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1))
    full = scene.full(1)
    scene.do(ops.Free(1))
    violation = scene.breaks(None, ops.Hostile("free_again", 1))
    assert {"hostile", "L2", "L7"} <= violation.laws
    assert {clause.full_pages for clause in violation.clauses if clause.law == "L2"} == {(full,)}


def test_an_illegal_call_with_the_documented_error_breaks_nothing(make_scene: Make) -> None:
    scene = make_scene()
    outcome = scene.do(ops.Hostile("end_unopened"))
    assert isinstance(outcome, Raised)
    assert outcome.kind == "FreeGroupError"
    assert "KVCacheError" in outcome.bases
    scene.run.finish()


@pytest.mark.parametrize("side", ["full", "swa", "device"])
def test_an_illegal_call_that_loses_what_waits_in_the_group_is_reported(
    side: str, make_scene: Make
) -> None:
    scene = make_scene(Geometry(16, 12, 9, device_pages=8, compress=4))
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1), ops.GroupBegin(), ops.Free(1))
    place = ("full", "swa", "device").index(side)
    looks = len(scene.target.views)

    def lose(shown: Any) -> None:
        # The first look is that of the moment before the call.
        if len(scene.target.views) > looks + 1:
            assert len(shown.pending[place]) == 1
            shown.pending[place].clear()

    violation = scene.breaks(lose, ops.Hostile("begin_nested"))
    assert violation.signature == ("L1", "hostile begin_nested")
    (clause,) = violation.clauses
    assert f"{side} pages " in clause.expected
    assert "pending in the group, as before the call" in clause.expected
    assert clause.seen == "none pending"


def test_what_waits_in_the_group_may_be_kept_account_of_in_any_way_at_other_calls(
    make_scene: Make,
) -> None:
    scene = make_scene()
    scene.do(ops.Alloc(1, 1), ops.Alloc(2, 1), ops.GroupBegin(), ops.Free(1))
    scene.target.spoil = lambda shown: [pages.clear() for pages in shown.pending]
    scene.do(ops.Decode((2,)), ops.GroupEnd())

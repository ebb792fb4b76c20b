"""kvcore's own target on every kind of pools: what the calls answered is what it answers, in slots
and device slots.

Leaves out what hybrid and single pools do (test_core_target.py), the request pool
(test_core_requests.py), contents and memory (test_stamped_pool.py, test_saver_probe.py), and
whether answers are right: that is judged by model and laws.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import (
    HiSparseTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
)
from kvcore.invariants import Run, Skipped
from kvcore.models import Done, Geometry, Lent, Outcome, Raised, Refused, ops
from kvcore.models.ops import OP_KINDS, Op
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.core_dialects import HybridDialect, PureDialect
from kvcore.targets.core_sparse import CompressedDialect, HiSparseDialect
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.protocol import UnsupportedGeometry, View

torch.set_num_threads(1)

CPU = torch.device("cpu")

PURE = Geometry(4, 8, pure_swa=True)
SPARSE = Geometry(4, 8, device_pages=4)
COMPRESSED = Geometry(16, 8, 6, device_pages=6, compress=4)
REQUESTS = Geometry(4, 8, 6, requests=2)
PURE_REQUESTS = Geometry(4, 8, pure_swa=True, requests=2)

SWA = {"swa_tail", "recover", "load_back", "load_back_swa"}
WINDOW = {"free_swa", "free_full"}
DEVICE = {"extend_logical", "free_device", "device_buffer", "free_buffer"}
COPIES = {"retract", "restore", "relocate"}
MEMORY = {"reserve", "drop", "pause", "resume"}
EVERYWHERE = {"alloc", "extend", "decode", "free", "group_begin", "group_end", "clear", "hostile"}


def lent(target: AllocatorTarget, op: Op) -> Lent:
    outcome = target.apply(op)
    assert isinstance(outcome, Lent), outcome
    return outcome


def host(target: AllocatorTarget) -> Any:
    return target.view(stamps=True).host()


def keeps_every_law(geometry: Geometry, *program: Op, **options: Any) -> Run:
    """Run a program whose every op must be allowed, to the end."""
    run = Run(core_target(geometry, **options))
    for op in program:
        outcome = run.step(op)
        assert not isinstance(outcome, Skipped), outcome
    run.finish()
    return run


# Contracts.


@pytest.mark.parametrize(
    ("geometry", "more"),
    [
        (Geometry(4, 8), COPIES),
        (Geometry(4, 8, 6), COPIES | SWA | WINDOW),
        (PURE, COPIES | WINDOW),
        (SPARSE, DEVICE),
        (COMPRESSED, DEVICE | SWA | WINDOW),
        (REQUESTS, COPIES | SWA | WINDOW),
        (Geometry(4, 8, saver=True), COPIES | MEMORY),
        (Geometry(4, 8, 6, requests=2, saver=True), COPIES | SWA | WINDOW | MEMORY),
    ],
    ids=["single", "hybrid", "pure", "sparse", "compressed", "requests", "saver", "composed"],
)
def test_a_target_takes_the_ops_of_its_pools(geometry: Geometry, more: set[str]) -> None:
    assert core_target(geometry).contract.ops == EVERYWHERE | more


def test_every_op_is_taken_by_some_target() -> None:
    assert set(OP_KINDS) == EVERYWHERE | SWA | WINDOW | DEVICE | COPIES | MEMORY


@pytest.mark.parametrize(
    "op", [ops.ExtendLogical(((1, 4),)), ops.DeviceBuffer(1, 1, 1), ops.FreeBuffer(1)], ids=str
)
def test_a_target_without_device_slots_says_so(op: Op) -> None:
    with pytest.raises(RuntimeError, match="kvcore has no device slots"):
        core_target(Geometry(4, 8)).apply(op)


@pytest.mark.parametrize("op", [ops.Reserve(1, "weights", 1), ops.Pause("kv_cache")], ids=str)
def test_a_target_without_a_saver_says_so(op: Op) -> None:
    with pytest.raises(RuntimeError, match="kvcore has no memory saver"):
        core_target(Geometry(4, 8)).apply(op)


# Every layer slides.


def test_in_a_sliding_pool_every_slot_is_its_own_peer() -> None:
    target = core_target(PURE)
    answer = lent(target, ops.Alloc(1, 2))
    assert answer.peers == answer.slots
    assert host(target).mapping == [*range(36), -1]
    assert host(target).swa_free == []
    answers = host(target).answers
    assert answers.available == answers.full_available == answers.swa_available == 24


@pytest.mark.parametrize("form", ["slots", "sparse", "segment", "segments"])
def test_every_form_of_free_swa_gives_pages_back(form: Any) -> None:
    target = core_target(PURE)
    lent(target, ops.Alloc(1, 5))
    assert target.apply(ops.FreeSwa(1, 0, 3, form)) == Done()
    assert len(host(target).full_free) == 6
    assert target.apply(ops.FreeFull(1, 0, 3)) == Done()
    assert target.apply(ops.Free(1)) == Done()
    assert len(host(target).full_free) == 8


@pytest.mark.parametrize("form", ["slots", "sparse", "segment", "segments"])
def test_a_row_freed_in_the_group_in_which_its_window_moved_on_keeps_every_law(form: Any) -> None:
    keeps_every_law(
        PURE,
        *(ops.Alloc(1, 4), ops.GroupBegin(), ops.FreeSwa(1, 0, 2, form), ops.Free(1, form=form)),
        ops.GroupEnd(),
    )


@pytest.mark.parametrize("gone", [(0,), (0, 1, 2), (1,), (0, 2)], ids=str)
def test_a_row_with_pages_that_went_is_retracted_and_restored(gone: tuple[int, ...]) -> None:
    moved = [ops.FreeSwa(1, page, page + 1) for page in gone]
    keeps_every_law(
        PURE,
        *(ops.Extend(((1, 14),)), *moved, ops.Alloc(2, 1), ops.Retract(1, 1)),
        *(ops.Alloc(3, 2), ops.Restore(1, 4), ops.Decode((4,))),
    )


def test_the_slots_of_a_row_that_closes_up_are_named_rightly() -> None:
    keeps_every_law(
        PURE,
        *(ops.Alloc(1, 5), ops.FreeSwa(1, 1, 2), ops.FreeSwa(1, 3, 4), ops.Free(1, 0, 1)),
        *(ops.FreeFull(1, 0, 1), ops.FreeSwa(1, 0, 1), ops.Retract(1, 1)),
        *(ops.Hostile("free_again", 1), ops.Restore(1, 2), ops.Free(2)),
    )


def test_what_a_row_left_behind_is_not_freed_again_by_a_hostile_call() -> None:
    moved = (ops.Alloc(1, 3), ops.FreeSwa(1, 0, 1))
    keeps_every_law(PURE, *moved, ops.Free(1, 1), ops.Hostile("free_again", 1))
    run = Run(core_target(PURE))
    for op in (*moved, ops.FreeFull(1, 0, 1)):
        run.step(op)
    assert isinstance(run.step(ops.Hostile("free_again", 1)), Skipped)


def test_a_hostile_call_after_a_clear_names_no_slot_that_a_request_did_without() -> None:
    keeps_every_law(
        PURE_REQUESTS,
        *(ops.Alloc(1, 3), ops.FreeSwa(1, 0, 1), ops.Retract(1, 1), ops.Restore(1, 2)),
        *(ops.Clear(), ops.Hostile("free_again", 2)),
    )


# Device slots.


@pytest.mark.parametrize("geometry", [SPARSE, COMPRESSED], ids=Geometry.describe)
def test_device_slots_in_an_answer_are_the_mappings_entries(geometry: Geometry) -> None:
    target = core_target(geometry)
    each, size = geometry.compress, geometry.page_size
    answer = lent(target, ops.Extend(((1, size + each + 1),)))
    mapping = host(target).device_mapping
    for slot, device in zip(answer.slots, answer.device, strict=True):
        assert device == (mapping[slot // each] if (slot + 1) % each == 0 else 0)
    assert sum(device > 0 for device in answer.device) == len(answer.slots) // each
    assert len(mapping) == (geometry.full_pages + 1) * geometry.device_page_size + 1
    assert mapping[-1] == -1


@pytest.mark.parametrize("geometry", [SPARSE, COMPRESSED], ids=Geometry.describe)
@pytest.mark.parametrize(
    "op", [ops.ExtendLogical(((2, 16),)), ops.Decode((1,))], ids=lambda op: op.kind
)
def test_logical_calls_take_no_device_slot(geometry: Geometry, op: Op) -> None:
    target = core_target(geometry)
    lent(target, ops.Alloc(1, 1))
    room = host(target).answers.device_available
    assert not any(lent(target, op).device)
    assert host(target).answers.device_available == room


@pytest.mark.parametrize("geometry", [SPARSE, COMPRESSED], ids=Geometry.describe)
@pytest.mark.parametrize("form", ["slots", "sparse"])
def test_free_device_gives_up_the_device_side_alone(geometry: Geometry, form: Any) -> None:
    target = core_target(geometry)
    lent(target, ops.Alloc(1, 3))
    before = host(target)
    assert target.apply(ops.FreeDevice(1, 1, 3, form)) == Done()
    after = host(target)
    assert len(after.device_free) == len(before.device_free) + 2
    assert sorted(after.full_free) == sorted(before.full_free)
    assert sum(entry > 0 for entry in after.device_mapping) == geometry.device_page_size


@pytest.mark.parametrize("geometry", [SPARSE, COMPRESSED], ids=Geometry.describe)
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_buffer_is_answered_slot_by_slot_and_given_back(geometry: Geometry, pages: int) -> None:
    target = core_target(geometry)
    row = lent(target, ops.Alloc(1, 2))
    free = set(host(target).device_free)
    answer = lent(target, ops.DeviceBuffer(1, 5, pages))
    size = geometry.device_page_size
    own = [slot for slot in row.device if slot]
    assert len(answer.slots) == pages * size
    assert list(answer.slots[: 2 * size]) == own[: pages * size]
    shown = host(target)
    assert list(answer.slots) in shown.held.values()
    assert not any(shown.device_mapping[:-1])
    assert len(shown.device_free) == len(free) + 2 - pages
    assert target.apply(ops.FreeBuffer(5)) == Done()
    assert len(host(target).device_free) == geometry.device_pages


def test_a_buffer_for_which_there_is_no_room_is_refused() -> None:
    target = core_target(SPARSE)
    lent(target, ops.Alloc(1, 2))
    before = host(target)
    assert target.apply(ops.DeviceBuffer(1, 1, 5)) == Refused()
    assert host(target) == before
    assert len(lent(target, ops.DeviceBuffer(1, 1, 4)).slots) == 16


def test_device_pages_that_wait_in_the_group_are_in_the_view() -> None:
    for geometry in (SPARSE, COMPRESSED):
        target = core_target(geometry)
        lent(target, ops.Alloc(1, 1))
        taken = geometry.device_pages - len(host(target).device_free)
        target.apply(ops.GroupBegin())
        assert target.apply(ops.FreeDevice(1)) == Done()
        full, swa, device = host(target).pending
        assert (full, swa) == ([], [])
        assert len(device) == taken == 1
        assert target.view(stamps=False).host().pending == ()
        target.apply(ops.GroupEnd())
        assert host(target).pending[2] == []


@pytest.mark.parametrize("geometry", [Geometry(4, 8, 6), COMPRESSED], ids=Geometry.describe)
def test_what_waits_in_the_group_is_in_the_view_side_by_side(geometry: Geometry) -> None:
    run = Run(core_target(geometry))
    for op in (ops.Alloc(1, 2), ops.Alloc(2, 1), ops.Alloc(3, 1), ops.GroupBegin()):
        run.step(op)
    for op in (ops.FreeSwa(1, 1, 2), ops.Free(2), ops.Recover(1, 3, True, 1, 1, 0)):
        assert run.step(op) == Done()
        full, swa = run.target.view(stamps=True).host().pending[:2]
        assert sorted(full) == sorted(run.model.full.pending)
        assert sorted(swa) == sorted(run.model.swa.pending)


def test_a_clear_drops_buffers_and_device_slots() -> None:
    for geometry in (SPARSE, COMPRESSED):
        keeps_every_law(
            geometry, ops.Alloc(1, 2), ops.DeviceBuffer(1, 1, 2), ops.Alloc(2, 1), ops.Clear()
        )


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "unlocked"])
def test_a_recovery_keeps_the_device_side_in_order(locked: bool) -> None:
    keeps_every_law(
        COMPRESSED,
        *(ops.Alloc(1, 2), ops.Alloc(2, 2), ops.GroupBegin(), ops.FreeSwa(1)),
        *(ops.Recover(1, 2, locked, 1, 1, 0), ops.GroupEnd(), ops.Extend(((1, 3),))),
    )


def test_a_paused_pools_device_slots_come_back_zero_too() -> None:
    for geometry in (
        Geometry(4, 8, device_pages=4, saver=True),
        Geometry(16, 8, 6, device_pages=6, compress=4, saver=True),
    ):
        keeps_every_law(geometry, ops.Alloc(1, 1), ops.Pause("kv_cache"), ops.Resume("kv_cache"))


# What a core target is made of.


def test_device_entries_are_one_for_each_token_or_for_four() -> None:
    with pytest.raises(UnsupportedGeometry, match="1 or 4 tokens, got compress 2"):
        core_target(Geometry(4, 8, 6, device_pages=4, compress=2))


def test_each_kind_of_pools_is_built_from_its_own_part() -> None:
    class Pure(PureSWATokenToKVPoolAllocator):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            raise LookupError("pure")

    class Sparse(HiSparseTokenToKVPoolAllocator):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            raise LookupError("sparse")

    class Rows(ReqToTokenPool):
        def alloc(self, reqs: Any) -> list[int] | None:
            raise LookupError("rows")

    parts = CoreParts(pure=Pure, hisparse=Sparse, requests=Rows)
    for geometry, message in ((PURE, "pure"), (SPARSE, "sparse"), (REQUESTS, "rows")):
        answer = core_target(geometry, parts=parts).apply(ops.Alloc(1, 1))
        assert isinstance(answer, Raised)
        assert (answer.kind, answer.message) == ("LookupError", message)


@pytest.mark.parametrize(
    "dialect",
    [
        PureDialect(PureSWATokenToKVPoolAllocator(32, 4, torch.int64, "cpu", None, False), CPU),
        HiSparseDialect(
            HiSparseTokenToKVPoolAllocator(16, 4, torch.int64, "cpu", None, False, 2), CPU
        ),
    ],
    ids=["pure", "hisparse"],
)
def test_calls_that_join_two_sides_are_type_errors_on_one_pool(dialect: Any) -> None:
    slots = torch.tensor([4])
    calls = [
        lambda: dialect.swa_tail(0, 4, -1, 4),
        lambda: dialect.recover(slots, slots),
        lambda: dialect.alloc_full(4),
        lambda: dialect.alloc_swa(4),
        lambda: dialect.map(slots, slots),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="a single pool has no"):
            call()


class Calls:
    """An allocator that only notes what is called."""

    page_size = 4

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.names.append(name)


@pytest.mark.parametrize("dialect", [HybridDialect, PureDialect, CompressedDialect])
@pytest.mark.parametrize("kind", ["free", "free_swa", "free_full"])
def test_each_form_is_a_call_of_its_own(dialect: Any, kind: str) -> None:
    calls = Calls()
    free = getattr(dialect(calls, CPU), kind)
    for form in ("slots", "sparse", "segment", "segments"):
        free(torch.tensor([4, 5, 6, 7, 8]), form, 0)
    assert calls.names == [kind, kind, f"{kind}_segment", f"{kind}_segments"]


@pytest.mark.parametrize("form", ["slots", "segment", "segments"])
def test_pages_go_on_the_full_side_alone_by_every_form(form: Any) -> None:
    for geometry in (PURE, COMPRESSED):
        target = core_target(geometry)
        lent(target, ops.Alloc(1, 4))
        target.apply(ops.FreeSwa(1))
        assert target.apply(ops.FreeFull(1, form=form)) == Done()
        assert len(host(target).full_free) == geometry.full_pages


@pytest.mark.parametrize("form", ["slots", "sparse", "segment", "segments"])
@pytest.mark.parametrize("geometry", [SPARSE, COMPRESSED], ids=Geometry.describe)
def test_every_form_of_free_gives_up_both_sides(geometry: Geometry, form: Any) -> None:
    target = core_target(geometry)
    lent(target, ops.Alloc(1, 4))
    assert target.apply(ops.Free(1, form=form)) == Done()
    assert len(host(target).full_free) == geometry.full_pages
    assert len(host(target).device_free) == geometry.device_pages


# What is asked of every machine at its end.


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 8, device_pages=4),
        Geometry(1, 8, device_pages=8),
        Geometry(8, 8, 6, device_pages=3, compress=4),
        Geometry(8, 8, 12, device_pages=8, compress=4),
    ],
    ids=Geometry.describe,
)
def test_a_drain_lends_every_page_of_every_side_once(geometry: Geometry) -> None:
    class Watched:
        def __init__(self) -> None:
            self.inner = core_target(geometry)
            self.name, self.contract = self.inner.name, self.inner.contract
            self.geometry = geometry
            self.fullest = [0, 0, 0]

        def apply(self, op: Op) -> Outcome:
            outcome = self.inner.apply(op)
            host = self.inner.view(stamps=False).host()
            sides = (geometry.full_pages, geometry.swa_pages, geometry.device_pages)
            free = (host.full_free, host.swa_free, host.device_free)
            lent = [total - len(pages) for total, pages in zip(sides, free, strict=True)]
            self.fullest = [max(pair) for pair in zip(self.fullest, lent, strict=True)]
            return outcome

        def view(self, *, stamps: bool) -> View:
            return self.inner.view(stamps=stamps)

        def close(self) -> None:
            self.inner.close()

    watched = Watched()
    Run(watched).finish()
    swa = min(geometry.full_pages, geometry.swa_pages)
    assert watched.fullest == [geometry.full_pages, swa, geometry.device_pages]

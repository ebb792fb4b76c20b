"""Views of small pools are taken in lists and those of large ones in tensors: both show the same,
follow an owner that replaces its tensors, and stay as they were.
"""

import numpy as np
import pytest
import torch

from kvcore.errors import InvalidSlotError
from kvcore.models import Geometry, Lent, ops
from kvcore.models.ops import Op
from kvcore.targets import snapshots
from kvcore.targets.core import core_target
from kvcore.targets.core_dialects import HybridDialect
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.host_arrays import SharedArray, array_of, overwrite
from kvcore.targets.pool import StampedPool
from kvcore.targets.protocol import HostView, View

torch.set_num_threads(1)

HYBRID = Geometry(4, 8, 6)
KINDS = (
    HYBRID,
    Geometry(1, 8, 6, need_sort=True),
    Geometry(4, 8),
    Geometry(4, 8, pure_swa=True),
    Geometry(4, 8, device_pages=4),
    Geometry(16, 8, 6, device_pages=6, compress=4),
    Geometry(4, 8, 6, attention="dsa", requests=2, saver=True),
)
PROGRAM: tuple[Op, ...] = (
    ops.Alloc(1, 2),
    ops.Alloc(2, 1),
    ops.FreeSwa(1, 0, 1),
    ops.GroupBegin(),
    ops.Free(2),
    ops.Decode((1,)),
)


def driven(geometry: Geometry) -> AllocatorTarget:
    """A target with something free, lent, held and pending."""
    target = core_target(geometry)
    for op in PROGRAM:
        if op.kind in target.contract.ops:
            target.apply(op)
    return target


def same(one: HostView, other: HostView) -> bool:
    """Whether both show the same but for where the pools lie."""
    for view in (one, other):
        if view.memory is not None:
            assert view.memory.pool == view.memory.pool_before
            view.memory = None
    return one == other


@pytest.mark.parametrize("stamps", [False, True], ids=["state", "contents"])
@pytest.mark.parametrize("geometry", KINDS, ids=Geometry.describe)
def test_lists_and_tensors_show_the_same(
    geometry: Geometry, stamps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = driven(geometry).view(stamps=stamps)
    monkeypatch.setattr(snapshots, "LISTED_SLOTS", 0)
    packed = driven(geometry).view(stamps=stamps)
    assert type(packed) is View is not type(listed)
    for name in ("tensors", "stamp_tensors", "device_tensors", "request_tensors"):
        pairs = zip(getattr(listed, name)(), getattr(packed, name)(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name
    held, kept = listed.held_tensors(), packed.held_tensors()
    assert {n: slots.tolist() for n, slots in held.items()} == {
        n: slots.tolist() for n, slots in kept.items()
    }
    for name in ("holds_answers", "holds_stamps", "holds_memory"):
        assert getattr(listed, name) == getattr(packed, name), name
    assert same(listed.host(), packed.host())


GROUP: tuple[Op, ...] = (
    *(ops.Alloc(1, 3), ops.Alloc(2, 3), ops.FreeSwa(1, 0, 1), ops.GroupBegin()),
    *(ops.FreeSwa(1, 1, 2, form="segment"), ops.Free(2, 1, 3, form="sparse"), ops.Decode((1,))),
    *(ops.Free(1, 0, 3, form="segments"), ops.FreeSwa(2), ops.GroupEnd()),
)


@pytest.mark.parametrize("validate", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "geometry", [*KINDS[:3], Geometry(1, 8, 6), Geometry(1, 8)], ids=Geometry.describe
)
def test_lists_and_tensors_hold_back_the_same_at_every_step_of_a_group(
    geometry: Geometry, validate: bool
) -> None:
    target = core_target(geometry, validate=validate)
    held_back = []
    for op in GROUP:
        if op.kind in target.contract.ops:
            target.apply(op)
            pages = target.dialect.pending_lists()
            assert pages == tuple(side.tolist() for side in target.dialect.pending_pages())
            held_back.append(pages)
    assert held_back[-1] == held_back[0] == ([], [])
    most = max(held_back, key=lambda pages: len(pages[0]))
    # Three pages of row 1, of which one had lost its peer before the group, and two of row 2.
    assert list(map(len, most)) == [5, 4 if geometry.hybrid else 0]


def test_lists_stay_as_they_were_whatever_becomes_of_the_target() -> None:
    target = driven(HYBRID)
    shown = target.view(stamps=True)
    again = target.view(stamps=True).host()
    for op in (ops.GroupEnd(), ops.Alloc(3, 3), ops.Clear()):
        target.apply(op)
    assert shown.host() == again
    assert target.view(stamps=True).host() != again
    assert shown.tensors()[2].tolist() == again.mapping


def test_a_view_follows_an_allocator_that_was_resized() -> None:
    target = core_target(HYBRID)
    assert len(target.view(stamps=False).host().mapping) == 8 * 4 + 4 + 1
    assert isinstance(target.dialect, HybridDialect)
    target.dialect.allocator.resize(size=16, size_swa=8)
    answer = target.apply(ops.Alloc(1, 2))
    host = target.view(stamps=True).host()
    assert isinstance(answer, Lent)
    assert len(host.mapping) == 4 * 4 + 4 + 1
    assert [host.mapping[slot] for slot in answer.slots] == list(answer.peers)
    assert [host.stamps[2][peer] for peer in answer.peers] == list(range(1, 9))


def test_an_earlier_answer_is_read_from_the_very_tensor_that_was_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = core_target(HYBRID)
    lent: list[torch.Tensor] = []
    alloc = target.dialect.alloc

    def noting(need: int) -> torch.Tensor | None:
        slots = alloc(need)
        assert slots is not None
        lent.append(slots)
        return slots

    monkeypatch.setattr(target.dialect, "alloc", noting)
    answer = target.apply(ops.Alloc(1, 1))
    assert isinstance(answer, Lent)
    assert target.view(stamps=False).host().held == {1: list(answer.slots)}
    lent[0][2] = -7
    assert target.view(stamps=False).host().held[1][2] == -7


@pytest.mark.parametrize(("slot", "error"), [(100, InvalidSlotError), (-2, InvalidSlotError)])
def test_a_stamp_beyond_the_pool_is_refused_in_the_pools_words(
    slot: int, error: type[Exception]
) -> None:
    pool = core_target(HYBRID).pool
    with pytest.raises(error, match=r"translate_loc_from_full_to_swa: .*0\.\."):
        pool.stamp(np.array([4, slot]), np.array([1, 2]))
    assert not any(any(rows) for rows in pool.content_lists())


def test_a_stamp_beyond_the_only_pool_is_an_index_error() -> None:
    pool: StampedPool = core_target(Geometry(4, 8)).pool
    with pytest.raises(IndexError, match="out of bounds"):
        pool.stamp(np.array([4, 100]), np.array([1, 2]))


def test_an_array_shows_what_a_tensor_holds_always() -> None:
    tensor = torch.tensor([1, 2, 3])
    shared = SharedArray()
    array = shared.over(tensor)
    tensor[1] = 9
    assert array.tolist() == array_of(tensor).tolist() == [1, 9, 3]
    assert shared.over(tensor) is array
    overwrite(tensor, 0)
    assert array.tolist() == tensor.tolist() == [0, 0, 0]


def test_another_tensor_has_an_array_of_its_own() -> None:
    shared = SharedArray()
    shared.over(torch.tensor([1, 2, 3]))
    assert shared.over(torch.tensor([4])).tolist() == [4]

"""A moment is the target's state beside what the model knows of it, on every family of pools."""

from __future__ import annotations

import mmap

from kvcore.invariants import Tally, Verdict
from kvcore.models import Geometry, Lent, Served, ops, request_ops
from kvcore.models.memory import pattern
from kvcore.models.ops import Op
from kvcore.reports.moment import Idle, Moment, Owner, RequestRow
from kvcore.reports.playback import Playback, watch


def played(geometry: Geometry, *program: Op) -> Playback:
    """The program, watched around its last op."""
    return watch("kvcore", geometry, Verdict(program, None, Tally()), len(program) - 1)


def after(geometry: Geometry, *program: Op) -> Moment:
    moment = played(geometry, *program).after
    assert moment is not None
    return moment


def lent(playback: Playback, index: int) -> Lent:
    answer = playback.answers[index]
    assert isinstance(answer, Lent)
    return answer


def test_sides_that_are_not_there_are_empty() -> None:
    moment = after(Geometry(2, 4), ops.Alloc(1, 1))
    assert moment.device == moment.requests == Idle()
    assert (moment.buffers, moment.request_rows, moment.memory) == ({}, {}, {})


def test_a_page_that_the_window_left_is_nobodys() -> None:
    sliding = Geometry(2, 4, pure_swa=True)
    seen = played(sliding, ops.Alloc(1, 2), ops.FreeSwa(1, 0, 1))
    assert seen.after is not None
    first, second = (slot // 2 for slot in lent(seen, 0).slots[::2])
    assert seen.before.owners == {first: Owner(1, 0, 2), second: Owner(1, 1, 2)}
    assert seen.after.owners == {second: Owner(1, 1, 2)}
    assert seen.after.left_by == {first: [Owner(1, 0, 2)]}
    assert seen.after.full.free[first] == 1


def test_a_device_page_belongs_to_the_row_and_then_to_the_buffer() -> None:
    hisparse = Geometry(2, 4, device_pages=4)
    seen = played(hisparse, ops.Alloc(1, 2), ops.DeviceBuffer(1, 7, 1))
    assert seen.after is not None
    answer = lent(seen, 0)
    own = {slot // 2: device // 2 for slot, device in zip(answer.slots, answer.device, strict=True)}
    assert {full: owner.device for full, owner in seen.before.owners.items()} == own
    assert seen.before.device.free.keys() == {1, 2, 3, 4} - set(own.values())
    [kept] = {slot // 2 for slot in lent(seen, 1).slots}
    assert seen.after.buffers == {kept: 7}
    assert all(owner.device == 0 for owner in seen.after.owners.values())
    assert not any(seen.after.device_mapping[:-1])


def test_device_pages_wait_for_the_end_of_a_group() -> None:
    hisparse = Geometry(2, 4, device_pages=4)
    moment = after(hisparse, ops.Alloc(1, 1), ops.GroupBegin(), ops.FreeDevice(1))
    [(full, _)] = moment.owners.items()
    assert moment.device.pending == {moment.device_detached[full]}


def test_a_rejected_device_buffer_is_not_taken_for_full_pages() -> None:
    hisparse = Geometry(2, 4, device_pages=4)
    program: tuple[Op, ...] = (ops.Extend(((1, 1),)), ops.DeviceBuffer(1, 1, 1))
    verdict = Verdict(program, None, Tally())
    seen = watch("fault:device-buffer-loses-rest", hisparse, verdict, 1)
    assert seen.after is not None
    assert seen.after.full.unclaimed == frozenset()
    assert seen.after.device.unclaimed == {slot // 2 for slot in lent(seen, 1).slots}


def test_a_request_has_a_row_with_its_slots() -> None:
    geometry = Geometry(2, 4, requests=2)
    seen = played(geometry, ops.Extend(((1, 3),)), ops.Decode((1,)))
    assert seen.after is not None
    [row] = lent(seen, 0).requests
    slots = lent(seen, 0).slots + lent(seen, 1).slots
    assert seen.after.request_rows == {row: RequestRow(1, slots, slots)}
    assert seen.after.requests.free.keys() == {1, 2} - {row}


def test_pages_are_requests_own_or_the_caches_or_those_of_a_load() -> None:
    geometry = Geometry(2, 12, 12, requests=2, window=2)
    seen = played(
        geometry,
        request_ops.Admit(1, ((1, 4),), output=2),
        request_ops.Finish(1),
        request_ops.SavePrefix(1, ((1, 4),)),
        request_ops.Admit(2, ((1, 4), (3, 1)), output=4),
        request_ops.Abort(2),
        request_ops.Evict(4, 0),
        request_ops.Admit(3, ((1, 2), (5, 3)), output=6),
        request_ops.CacheUnfinished(3),
        request_ops.LoadPrefix(1, 7),
    )
    assert seen.after is not None
    cached, own, loaded = (Owner(0, 0, 2, noun="tree"), Owner(3, 2, 1, noun="request"), "load")
    owners = set(seen.after.owners.values())
    assert {cached, Owner(0, 1, 2, noun="tree"), own} < owners
    assert [it.words for it in owners if it.noun == loaded] == ["load 7 page 1"]
    assert own.words == "request 3 page 2"
    assert cached.words == "tree page 0"
    [row] = seen.after.request_rows.values()
    assert row.slots == row.due
    assert len(row.slots) == 5
    assert seen.after.tree is not None
    assert seen.after.tree.requests.keys() == {3}
    assert seen.before.tree != seen.after.tree


def test_pages_of_a_request_whose_answer_was_rejected_belong_to_nobody() -> None:
    geometry = Geometry(2, 8, 8, requests=2, window=3)
    program: tuple[Op, ...] = (
        request_ops.Admit(1, ((1, 6), (2, 1)), output=3),
        request_ops.Finish(1),
        request_ops.Evict(0, 4),
        request_ops.Admit(2, ((1, 6), (4, 1)), output=5),
    )
    seen = watch("fault:match-across-tombstone", geometry, Verdict(program, None, Tally()), 3)
    answer = seen.answers[3]
    assert isinstance(answer, Served)
    assert seen.after is not None
    if seen.after.full.unclaimed:
        assert seen.after.requests.unclaimed == {answer.request}


def test_memory_is_told_by_tag() -> None:
    geometry = Geometry(2, 4, saver=True)
    moment = after(
        geometry, ops.Reserve(1, "weights", 2), ops.Reserve(2, "kv_cache", 1), ops.Pause("kv_cache")
    )
    weights, cache = moment.memory["weights"], moment.memory["kv_cache"]
    assert weights.allocated == weights.resident == weights.said == weights.due
    assert weights.due == 2 * mmap.PAGESIZE
    assert weights.regions == {1: (pattern(1), pattern(1))}
    assert not weights.paused
    assert cache.paused
    assert cache.due == cache.resident == cache.said == 0
    assert cache.allocated > mmap.PAGESIZE
    assert cache.regions == {2: (0, None)}
    assert cache.buffers > 0
    assert cache.moved == 0


def test_what_a_faulty_saver_says_is_told_as_it_is() -> None:
    geometry = Geometry(2, 4, attention="dsa", saver=True)
    verdict = Verdict((ops.Extend(((1, 1),)),), None, Tally())
    seen = watch("fault:index-k-outside-saver", geometry, verdict, 0)
    assert seen.after is not None
    cache = seen.after.memory["kv_cache"]
    assert cache.said < cache.resident == cache.due

"""Room: what is free, then what can be evicted; and refusals that change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import GeometryError, serving


def test_free_room_costs_nothing(world: Any) -> None:
    world.serve(world.text((1, world.pages(4))))
    before = world.state()
    free = world.allocator.full_available_size(), world.allocator.swa_available_size()
    assert serving.make_room(world.cache, *free)
    assert serving.make_room(world.cache, 0, 0)
    assert world.state() == before


def test_exactly_what_is_missing_is_evicted(world: Any) -> None:
    for stream in range(1, 7):
        world.serve(world.text((stream, world.pages(2))))
    free = world.allocator.full_available_size(), world.allocator.swa_available_size()
    assert free[1] == 0

    assert serving.make_room(world.cache, free[0], world.pages(2))
    assert world.cache.counters.evicted_swa_tokens == world.pages(2)
    assert world.match(world.text((2, world.pages(2)))) == world.pages(2)
    assert world.match(world.text((1, world.pages(2)))) == 0, "least recently used"

    assert serving.make_room(world.cache, world.pages(16), world.pages(12))
    assert world.cache.total_size() == (0, 0)


def test_more_than_there_is_is_refused(world: Any) -> None:
    world.start(world.text((1, world.pages(3))))
    world.serve(world.text((2, world.pages(3))))
    before = world.state()
    assert not serving.make_room(world.cache, world.pages(14), 0)
    assert not serving.make_room(world.cache, 0, world.pages(10))
    assert not serving.make_room(world.cache, world.pages(13), world.pages(10))
    assert world.state() == before
    assert serving.make_room(world.cache, world.pages(13), world.pages(9))


def test_what_is_locked_is_no_room(world: Any) -> None:
    text = world.text((1, world.pages(6)))
    world.serve(text)
    world.start([*text, 1])
    before = world.state()
    assert not serving.make_room(world.cache, world.pages(10), 0)
    assert world.state() == before
    window = -(-world.window // world.page_size)
    assert serving.make_room(world.cache, 0, world.pages(11 - window))
    assert world.states(text) == "T" * (6 - window) + "L" * window


def test_in_a_group_only_what_is_free_is_room(world: Any) -> None:
    world.serve(world.text((1, world.pages(12))))
    world.cache.free_group_begin()
    before = world.state()
    request = world.request(world.text((2, world.pages(1))))
    assert world.admit(request) is None
    assert world.state(request) == before | {"requests": [world.attributes(request)]}
    world.cache.free_group_end()
    assert world.admit(request) is not None


def test_whole_pages_are_asked_for(world: Any) -> None:
    for need in (-world.page_size, 1.5, *([1] if world.page_size > 1 else [])):
        with pytest.raises(GeometryError, match="make_room: "):
            serving.make_room(world.cache, need, 0)
        with pytest.raises(GeometryError, match="make_room: "):
            serving.make_room(world.cache, 0, need)


# -- every call that takes, on pools that have nothing left ----------------------------------------


def crowd(world: Any) -> Any:
    """A request that others leave no SWA page."""
    request = world.start(world.text((1, world.pages(8))))
    world.start(world.text((2, world.pages(4))))
    assert world.allocator.swa_available_size() == 0
    return request


@pytest.mark.parametrize("call", ["admit", "prefill", "decode", "speculate"])
def test_a_refused_step_changes_nothing(world: Any, call: str) -> None:
    request = crowd(world)
    new = world.request(world.text((1, world.pages(3))))
    request.extend_tokens([1])
    before = world.state(new)
    steps = {
        "admit": lambda: world.admit(new),
        "prefill": lambda: world.prefill(request, 1),
        "decode": lambda: world.decode(*world.running),
        "speculate": lambda: world.speculate(request, 1),
    }
    if call == "decode":
        world.running[1].extend_tokens([2])
        before = world.state(new)
    assert steps[call]() is None
    assert world.state(new) == before


@pytest.mark.parametrize("backup", [True, False], ids=["loaded", "computed again"])
def test_a_refused_resume_changes_nothing_and_may_be_repeated(world: Any, backup: bool) -> None:
    request = world.start(world.text((1, world.pages(4))))
    world.retract(request, backup=backup)
    other = world.start(world.text((2, world.pages(12))))
    before = world.state(request)
    assert world.resume(request) is None
    assert world.state(request) == before

    world.abort(other)
    assert world.resume(request) is not None


def test_a_refused_load_changes_nothing(world: Any) -> None:
    text = world.text((1, world.pages(4)))
    world.serve(text)
    copy = world.save(text)
    world.evict(world.pages(4))
    world.start(world.text((2, world.pages(12))))
    before = world.state()
    assert world.begin_load(copy) is None
    assert world.state() == before


def test_without_a_request_row_nothing_begins(world: Any) -> None:
    held = [world.start([number]) for number in range(4)]
    retracted = held.pop()
    world.retract(retracted, backup=True)
    world.start([9])
    new = world.request([5])
    before = world.state(new, retracted)
    assert world.admit(new) is None
    assert world.resume(retracted) is None
    assert world.state(new, retracted) == before


def test_a_refused_request_does_not_change_what_is_evicted_next(world: Any) -> None:
    first, second = (world.text((stream, world.pages(3))) for stream in (1, 2))
    for text in (first, second):
        world.serve(text)
    request = world.start(world.text((3, world.pages(6))))
    assert world.admit(world.request([*first, *world.text((4, world.pages(8)))])) is None
    world.evict(1)
    assert world.states(first) != "LLL" == world.states(second)
    world.abort(request)


def test_an_admitted_request_counts_as_a_use_of_its_prefix(world: Any) -> None:
    first, second = (world.text((stream, world.pages(3))) for stream in (1, 2))
    for text in (first, second):
        world.serve(text)
    world.abort(world.start([*first, 5]))
    world.evict(1)
    assert (world.match(first), world.states(second)) == (world.pages(3), "")
    counters = world.cache.counters
    assert counters.matched_tokens == 2 * world.pages(3)

"""Requests leave and come back: their KV is what it was, whatever happened in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcore import RequestStateError, serving


@pytest.mark.parametrize("backup", [True, False], ids=["loaded", "computed again"])
def test_a_request_comes_back_into_other_slots(world: Any, backup: bool) -> None:
    request = world.start(world.text((1, world.pages(3) + 1)))
    for _ in range(world.pages(2)):
        world.decode(request)
    length, before = request.kv_len, world.row(request)

    world.retract(request, backup=backup)
    world.check()
    assert world.allocator.full_available_size() == world.allocator.size_full
    assert (request.req_pool_idx, request.last_node) == (None, None)
    assert request.kv_allocated_len == request.prefix_len == 0
    world.scramble()
    world.start(world.text((2, world.pages(1))))
    slots = world.resume(request)

    assert len(slots) == request.kv_len == length
    assert slots.tolist() == world.row(request).tolist() != before.tolist()
    assert request.retraction is None
    world.check()  # every token is the one that was computed
    world.decode(request)
    world.slide(request)


def test_a_backup_takes_no_swa_slots_before_the_window(world: Any) -> None:
    request = world.start(world.text((1, world.pages(6))))
    frontier = world.cache.window_frontier(world.pages(6))
    world.retract(request, backup=True)
    assert request.swa_evicted_seqlen == request.retraction.swa_evicted_seqlen == frontier

    free = world.allocator.full_available_size(), world.allocator.swa_available_size()
    world.resume(request)

    assert request.swa_evicted_seqlen == frontier
    assert free[0] - world.allocator.full_available_size() == world.pages(6)
    assert free[1] - world.allocator.swa_available_size() == world.pages(6) - frontier
    world.finish(request)
    bare = frontier // world.page_size
    assert world.states(request.token_ids) == "T" * bare + "L" * (6 - bare)


def test_what_is_computed_again_has_all_its_swa_slots(world: Any) -> None:
    request = world.start(world.text((1, world.pages(6))))
    world.slide(request)
    world.retract(request, backup=False)
    assert request.retraction is None
    world.resume(request)
    assert request.swa_evicted_seqlen == 0
    world.finish(request)
    assert world.states(request.token_ids) == "LLLLLL"


@pytest.mark.parametrize("backup", [True, False], ids=["loaded", "computed again"])
def test_what_the_cache_still_has_is_shared_again(world: Any, backup: bool) -> None:
    text = world.text((1, world.pages(3)))
    world.serve(text)
    request = world.start([*text, *world.text((2, world.pages(1) + 1))])
    world.retract(request, backup=backup)
    world.scramble()

    slots = world.resume(request)

    assert request.prefix_len == world.pages(3)
    assert len(slots) == world.pages(1) + 1
    world.check()


def test_a_backup_outlives_the_prefix_in_the_cache(world: Any) -> None:
    text = world.text((1, world.pages(3)))
    world.serve(text)
    request = world.start([*text, *world.text((2, world.pages(1) + 1))])
    world.retract(request, backup=True)
    world.evict(world.pages(3))
    world.scramble()

    slots = world.resume(request)

    assert request.prefix_len == 0
    assert len(slots) == request.kv_len == world.pages(4) + 1


def test_a_request_that_the_cache_has_whole_takes_nothing(world: Any) -> None:
    text = world.text((1, world.pages(3)))
    request = world.start(text)
    world.cache.cache_unfinished_req(request)
    world.retract(request, backup=True)
    assert world.resume(request).tolist() == []
    assert (request.prefix_len, request.kv_len) == (world.pages(3), world.pages(3))


def test_a_loaded_request_recovers_tombstones_in_its_window_only(world: Any) -> None:
    base, tail = world.text((1, world.pages(3))), world.text((2, world.pages(3)))
    request = world.start(base)
    world.retract(request, backup=True)
    world.tombstones(base, tail)
    world.resume(request)
    assert request.prefix_len == 0, "a match does not end in a tombstone"
    world.check()
    world.finish(request)
    bare = world.cache.window_frontier(world.pages(3)) // world.page_size
    assert world.states(base) == "T" * bare + "L" * (3 - bare)


def test_a_prompt_half_computed_goes_on_after_its_retraction(world: Any) -> None:
    for backup in (True, False):
        request = world.request(world.text((1, world.pages(4))))
        world.admit(request, world.pages(1) + 1)
        world.retract(request, backup=backup)
        world.resume(request)
        assert request.kv_len == world.pages(1) + 1
        world.prefill(request, 1000)
        world.check()
        world.abort(request)


def test_a_group_holds_back_what_a_retraction_frees(world: Any) -> None:
    request = world.start(world.text((1, world.pages(3))))
    world.cache.free_group_begin()
    world.retract(request, backup=True)
    world.check()
    assert world.allocator.full_available_size() == world.pages(13)
    assert world.resume(request) is not None
    world.cache.free_group_end()
    assert world.allocator.full_available_size() == world.pages(13)


def test_the_wrong_request_is_named(world: Any) -> None:
    request = world.start([1, 2])
    calls = {
        "admit: a request that runs in row": lambda: serving.admit(world.cache, request),
        "resume: a request that runs in row": lambda: serving.resume(world.cache, request),
    }
    waiting = world.start([3, 4])
    world.retract(waiting, backup=True)
    calls |= {
        "admit: a request that was retracted with 2": lambda: serving.admit(world.cache, waiting),
        "resume: a request that was never": lambda: serving.resume(world.cache, world.request([1])),
    }
    for name in ("finish", "abort", "retract", "prefill", "speculate", "trim", "decode", "slide"):
        options: dict[str, Any] = {"backup": False} if name == "retract" else {}
        full_name = "slide_windows" if name == "slide" else name
        function = getattr(serving, full_name)
        what = [waiting] if name in ("decode", "slide") else waiting
        count = (1,) if name in ("prefill", "speculate", "trim") else ()
        calls[f"{full_name}: a request without a row"] = (
            lambda f=function, w=what, c=count, o=options: f(world.cache, w, *c, **o)
        )
    before = world.state(waiting)
    for message, call in calls.items():
        with pytest.raises(RequestStateError, match=message):
            call()
    assert world.state(waiting) == before
    assert torch.is_tensor(world.resume(waiting))

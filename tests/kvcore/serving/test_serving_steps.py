"""A request from its arrival to its end: admission, chunks, decode steps, windows that slide, and
what the cache has of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# -- admission -------------------------------------------------------------------------------------


def test_a_new_request_gets_a_slot_for_every_token(world: Any) -> None:
    request = world.request(world.text((1, world.pages(2) + 1)))
    slots = world.admit(request)

    assert slots.dtype == torch.int64
    assert slots.tolist() == world.row(request).tolist()
    assert len(slots) == request.kv_len == request.kv_allocated_len == world.pages(2) + 1
    assert request.prefix_len == request.swa_evicted_seqlen == 0


def test_a_request_shares_what_the_cache_has_but_computes_its_last_token(world: Any) -> None:
    text = world.text((1, world.pages(3)))
    world.serve(text)
    cached = world.cache.match_prefix(world.params(text)).device_indices

    second = world.start(text)

    assert second.prefix_len == world.pages(2)
    assert world.row(second)[: world.pages(2)].tolist() == cached[: world.pages(2)].tolist()
    assert second.last_node.end == world.pages(2)
    world.check()


def test_requests_of_another_extra_key_share_nothing(world: Any) -> None:
    text = world.text((1, world.pages(3)))
    world.serve(text, "adapter")

    assert world.start(text).prefix_len == 0
    assert world.start(text, "adapter").prefix_len == world.pages(2)


def test_a_prompt_is_computed_in_chunks(world: Any) -> None:
    length = world.pages(4) + 1
    request = world.request(world.text((1, length)))
    chunks = [world.admit(request, 2), world.prefill(request, world.pages(1))]
    world.check()
    chunks.append(world.prefill(request, 1000))

    assert torch.cat(chunks).tolist() == world.row(request).tolist()
    assert [len(chunk) for chunk in chunks] == [2, world.pages(1), length - 2 - world.pages(1)]
    assert request.kv_len == length


def test_the_first_chunk_is_counted_behind_the_match_and_ends_with_the_tokens(world: Any) -> None:
    text = world.text((1, world.pages(2)))
    world.serve(text)
    long = world.request([*text, *world.text((2, world.pages(3)))])
    assert len(world.admit(long, 2)) == 2
    assert long.kv_len == world.pages(2) + 2
    assert len(world.admit(world.request([*text, 5]), 1000)) == 1


def test_chunks_handed_to_the_cache_are_there_for_others(world: Any) -> None:
    text = world.text((1, world.pages(4)))
    first = world.request([*text, 1])
    world.admit(first, world.pages(2))
    world.cache.cache_unfinished_req(first)
    assert first.prefix_len == world.pages(2)
    world.check()

    second = world.start([*text, 2])
    assert second.prefix_len == world.pages(2)

    world.prefill(first, 1000)
    world.cache.cache_unfinished_req(first)
    world.check()
    assert world.states(text) == "LLLL"


# -- decode ----------------------------------------------------------------------------------------


def test_a_batch_is_one_call_and_each_request_gets_its_slot(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [world.start(world.text((n, world.pages(1) + n - 1))) for n in (1, 2, 3)]
    calls = []
    alloc = world.allocator.alloc_decode
    monkeypatch.setattr(
        world.allocator, "alloc_decode", lambda *each: calls.append(each) or alloc(*each)
    )

    slots = world.decode(*requests)

    assert len(calls) == 1
    assert slots.tolist() == [world.row(request)[-1].item() for request in requests]
    assert [request.kv_len for request in requests] == [world.pages(1) + n for n in (1, 2, 3)]
    assert world.decode().tolist() == []


def test_a_page_begins_where_the_last_one_is_full(world: Any) -> None:
    request = world.start(world.text((1, world.pages(1))))
    free = world.allocator.full_available_size()
    for number in range(1, world.pages(2) + 1):
        world.decode(request)
        taken = free - world.allocator.full_available_size()
        assert taken == -(-number // world.page_size) * world.page_size


# -- windows ---------------------------------------------------------------------------------------


def test_windows_slide_and_one_stays_live_before_the_last_whole_page(world: Any) -> None:
    request = world.start(world.text((1, world.pages(2))))
    for _ in range(world.pages(5)):
        world.decode(request)
        free, evicted = world.allocator.swa_available_size(), request.swa_evicted_seqlen
        freed = world.slide(request)

        whole = request.kv_len // world.page_size * world.page_size
        behind = max(0, whole - world.window) // world.page_size * world.page_size
        assert request.swa_evicted_seqlen == behind
        assert freed == behind - evicted
        assert world.allocator.swa_available_size() == free + freed
        world.check()
    assert world.slide(request) == 0


def test_a_batch_slides_in_one_call(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [world.start(world.text((n, world.pages(5)))) for n in (1, 2)]
    calls = []
    free_swa = world.allocator.free_swa
    monkeypatch.setattr(
        world.allocator, "free_swa", lambda slots: calls.append(len(slots)) or free_swa(slots)
    )

    freed = world.slide(*requests)

    assert calls == [freed]
    assert freed == 2 * world.cache.window_frontier(world.pages(5))


def test_the_window_of_a_shared_prefix_is_the_trees(world: Any) -> None:
    text = world.text((1, world.pages(4)))
    world.serve(text)
    request = world.start([*text, *world.text((2, world.pages(4)))])

    freed = world.slide(request)

    frontier = world.cache.window_frontier(world.pages(8))
    assert request.swa_evicted_seqlen == frontier
    assert freed == frontier - world.pages(4)
    assert world.states(text) == "LLLL"


# -- the end ---------------------------------------------------------------------------------------


def test_a_finished_request_is_served_to_the_next_one(world: Any) -> None:
    first = world.start(world.text((1, world.pages(3))))
    for _ in range(world.pages(2) + 1):
        world.decode(first)
        world.slide(first)
    tokens, cursor = first.token_ids.tolist(), first.swa_evicted_seqlen
    world.finish(first)
    world.check()

    pages = len(tokens) // world.page_size
    whole, bare = world.pages(pages), cursor // world.page_size
    assert world.states(tokens) == "T" * bare + "L" * (pages - bare)
    assert world.cache.total_size() == (whole, whole - cursor)
    assert world.start([*tokens[:whole], 5]).prefix_len == whole
    assert (first.req_pool_idx, first.last_node, first.kv_len) == (None, None, 0)


def test_an_aborted_request_leaves_nothing(world: Any) -> None:
    world.serve(world.text((1, world.pages(2))))
    before = world.state()
    request = world.start(world.text((1, world.pages(2)), (2, world.pages(3))))
    world.decode(request)
    world.slide(request)
    world.abort(request)
    # What it had matched has been of use all the same.
    assert world.state() | {"used": before["used"]} == before
    assert world.admit(request) is not None, "as before it was admitted"


def test_what_two_requests_have_computed_is_kept_once(world: Any) -> None:
    text = world.text((1, world.pages(3)))
    twins = [world.start(text) for _ in range(2)]
    for twin in twins:
        world.finish(twin)
        world.check()
    assert world.cache.counters.duplicate_tokens == world.pages(3)
    assert world.cache.total_size() == (world.pages(3), world.pages(3))


# -- tombstones ------------------------------------------------------------------------------------


def base_and_tail(world: Any) -> tuple[list[int], list[int]]:
    """Three pages, and three more: the last window lies in the tail."""
    text = world.text((1, world.pages(3)), (2, world.pages(3)))
    return text[: world.pages(3)], text[world.pages(3) :]


def test_a_match_does_not_end_in_a_tombstone(world: Any) -> None:
    base, tail = base_and_tail(world)
    world.tombstones(base, tail)
    assert world.start([*base, 7]).prefix_len == 0
    assert world.start([*base, *tail, 7]).prefix_len == world.pages(6)


def test_finishing_recovers_tombstones_with_new_slots(world: Any) -> None:
    base, tail = base_and_tail(world)
    world.tombstones(base, tail)
    request = world.start([*base, 7])
    own = world.row(request)[: world.pages(3)].tolist()

    world.finish(request)

    assert world.states([*base, *tail]) == "LLLLLL"
    assert world.cache.counters.recovered_unlocked_pages == 3
    assert world.cache.match_prefix(world.params(base)).device_indices.tolist() == own


@pytest.mark.parametrize("unfinished", [False, True], ids=["finish", "cache_unfinished"])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
def test_under_a_lock_a_tombstone_keeps_its_full_slots(
    world: Any, unfinished: bool, grouped: bool
) -> None:
    base, tail = base_and_tail(world)
    world.serve(base)
    holder = world.start([*base, *tail])
    world.cache.cache_unfinished_req(holder)
    if grouped:
        world.cache.free_group_begin()
    world.evict(swa_tokens=len(base))
    assert world.states(base) == "TTT"
    kept = world.row(holder)[: world.pages(3)].tolist()

    request = world.start([*base, 7])
    if unfinished:
        world.cache.cache_unfinished_req(request)
        assert world.row(request)[: world.pages(3)].tolist() == kept
    else:
        world.finish(request)
    world.check()
    if grouped:
        world.cache.free_group_end()

    assert world.states(base) == "LLL"
    assert world.cache.counters.recovered_locked_pages == 3
    assert world.row(holder)[: world.pages(3)].tolist() == kept
    world.check()

"""Prefixes in host memory: saved, brought back, and what happens while they are on their way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcore import GeometryError, PausedPoolError, RadixKey, RequestStateError, serving


@pytest.fixture
def base(world: Any) -> list[int]:
    return world.text((1, world.pages(3)))


@pytest.fixture
def tail(world: Any) -> list[int]:
    return world.text((2, world.pages(3)))


def in_window(world: Any) -> int:
    """Pages of the last window of the base."""
    return 3 - world.cache.window_frontier(world.pages(3)) // world.page_size


def test_what_cannot_be_served_is_not_saved(world: Any, base: list[int], tail: list[int]) -> None:
    assert serving.save_prefix(world.cache, RadixKey(base)) is None
    world.tombstones(base, tail)
    assert serving.save_prefix(world.cache, RadixKey(base)) is None
    copy = world.save([*base, *tail, 9])
    assert copy.key.token_ids.tolist() == [*base, *tail]
    assert len(copy) == len(copy.copy) == world.pages(6)
    assert copy.swa_from == world.cache.window_frontier(world.pages(6))


def test_an_evicted_prefix_comes_back(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    world.evict(world.pages(3))
    world.scramble()

    load = world.begin_load(copy)
    assert (load.found, len(load.slots), len(load.reopened)) == (0, world.pages(3), 0)
    assert world.match(base) == 0
    world.check()
    world.end_load(load)

    bare = 3 - in_window(world)
    assert world.states(base) == "T" * bare + "L" * (3 - bare)
    assert world.start([*base, 9]).prefix_len == world.pages(3)


def test_what_comes_back_is_not_the_first_to_go_again(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.tombstones(base, tail)
    other = world.text((3, world.pages(3)))
    world.serve(other)
    load = world.begin_load(copy)
    assert (len(load.slots), len(load.reopened)) == (0, world.pages(in_window(world)))
    world.end_load(load)
    world.evict(swa_tokens=world.pages(6))
    assert world.match(base) == world.pages(3)
    assert world.match([*base, *tail]) == world.match(base)
    assert world.match(other) == 0


def test_a_copy_with_too_small_a_window_is_refused(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    world.evict(world.pages(3))
    late = replace(copy, swa_from=copy.swa_from + world.page_size)
    before = world.state()
    with pytest.raises(GeometryError, match="where the last window of"):
        serving.begin_load(world.cache, late)
    assert world.state() == before


def test_tombstones_in_the_last_window_come_back(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.tombstones(base, tail)
    world.scramble()
    free = world.allocator.swa_available_size()

    load = world.begin_load(copy)
    pages = in_window(world)
    assert (load.found, len(load.slots)) == (world.pages(3), 0)
    assert len(load.reopened) == world.pages(pages)
    assert free - world.allocator.swa_available_size() == world.pages(pages)
    assert world.states(base) == "T" * (3 - pages) + "<" * pages
    assert world.match(base) == 0
    world.check()
    world.end_load(load)

    assert world.states(base) == "T" * (3 - pages) + "L" * pages
    assert world.match(base) == world.pages(3)
    assert world.cache.counters.reloaded_pages == pages


def test_a_prefix_half_evicted_half_tombstone_comes_back(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    world.serve([*base, *tail[: world.pages(1)]])
    copy = world.save([*base, *tail[: world.pages(1)]])
    world.evict(world.pages(1))
    assert world.states([*base, *tail]) == "LLL"
    world.tombstones(base, world.text((3, world.pages(3))))
    world.scramble()

    load = world.begin_load(copy)
    assert (load.found, len(load.slots)) == (world.pages(3), world.pages(1))
    world.end_load(load)
    assert world.match([*base, *tail]) == world.pages(4)


def test_a_load_that_fails_changes_nothing(world: Any, base: list[int], tail: list[int]) -> None:
    world.serve(base)
    short = world.save(base)
    world.serve([*base, *tail])
    long = world.save([*base, *tail])
    world.evict(world.pages(6))
    world.tombstones(base, world.text((3, world.pages(3))))
    before = world.state()
    for copy in (short, long):
        world.end_load(world.begin_load(copy), failed=True)
        assert world.state() == before


def test_nothing_to_load_is_no_load(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    before = world.state()
    assert world.begin_load(copy) is None
    assert world.state() == before


def test_one_load_at_a_time_brings_a_tombstone_back(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.serve([*base, *tail[: world.pages(1)]])
    longer = world.save([*base, *tail[: world.pages(1)]])
    world.evict(world.pages(4))
    world.tombstones(base, world.text((3, world.pages(3))))
    first = world.begin_load(copy)
    before = world.state()
    assert world.begin_load(copy) is None
    needs_them = longer.swa_from < world.pages(3)
    other = world.begin_load(longer)
    assert (other is None) == needs_them, "its last window has loading tombstones in it"
    if needs_them:
        assert world.state() == before
    world.end_load(first)
    if needs_them:
        world.end_load(world.begin_load(longer))
        assert world.match([*base, *tail]) == world.pages(4)


def test_two_loads_of_an_evicted_prefix_are_cached_once(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    world.evict(world.pages(3))
    loads = [world.begin_load(copy), world.begin_load(copy)]
    for load in loads:
        world.check()
        world.end_load(load)
    assert world.cache.total_size()[0] == world.pages(3)


# -- what requests do meanwhile --------------------------------------------------------------------


@pytest.mark.parametrize("failed", [False, True], ids=["arrives", "fails"])
def test_a_request_does_not_recover_what_is_loading(
    world: Any, base: list[int], tail: list[int], failed: bool
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.tombstones(base, tail)
    load = world.begin_load(copy)
    pages = in_window(world)

    request = world.start(base)
    assert request.prefix_len == 0
    world.cache.cache_unfinished_req(request)
    assert request.prefix_len == 0, "what is loading cannot be read yet"
    world.check()
    world.finish(request)
    world.check()
    assert world.states(base).endswith("<" * pages)

    world.end_load(load, failed=failed)
    assert world.states(base).endswith(("T" if failed else "L") * pages)


def test_what_requests_cache_meanwhile_stays(world: Any, base: list[int], tail: list[int]) -> None:
    world.serve([*base, *tail])
    copy = world.save([*base, *tail])
    world.evict(world.pages(6))
    load = world.begin_load(copy)
    world.serve(base)
    own = world.cache.match_prefix(world.params(base)).device_indices.tolist()
    world.check()

    world.end_load(load)

    match = world.cache.match_prefix(world.params([*base, *tail]))
    assert match.prefix_len == world.pages(6)
    assert match.device_indices[: world.pages(3)].tolist() == own


def test_a_load_recovers_what_became_a_tombstone_meanwhile(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.evict(world.pages(3))
    load = world.begin_load(copy)
    world.tombstones(base, tail[: world.pages(1)])
    world.end_load(load)
    assert world.match(base) == world.pages(3)


def test_loading_nodes_are_split_and_still_end(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.tombstones(base, tail)
    load = world.begin_load(copy)
    for pages in (1, 2):
        world.serve([*base[: world.pages(pages)], *world.text((5 + pages, world.pages(1)))])
        world.check()
    world.end_load(load)
    assert world.match(base) == world.pages(3)


def test_memory_pressure_does_not_evict_what_a_load_builds_on(
    world: Any, base: list[int], tail: list[int]
) -> None:
    world.serve([*base, *tail])
    copy = world.save([*base, *tail])
    world.evict(world.pages(6))
    world.serve(base)
    load = world.begin_load(copy)
    world.evict(world.pages(16), world.pages(12))
    assert world.states(base).endswith("L" * (3 - load.host_prefix.swa_from // world.page_size))
    assert world.cache.total_size()[0] == world.pages(3)
    world.end_load(load)
    assert world.match([*base, *tail]) == world.pages(6)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_load_whose_copy_cannot_be_written_is_still_in_flight(
    world: Any, base: list[int], tail: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve(base)
    copy = world.save(base)
    world.tombstones(base, tail)
    load = world.begin_load(copy)
    before = world.state()

    def paused(*_: Any) -> None:
        raise PausedPoolError("the pool is asleep")

    with monkeypatch.context() as patch:
        patch.setattr(world.pool, "load_cpu_copy", paused)
        with pytest.raises(PausedPoolError):
            serving.finish_load(world.cache, load)
    assert world.state() == before
    world.end_load(load)
    assert world.match(base) == world.pages(3)


def test_a_load_ends_once(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    for failed in (False, True):
        world.evict(world.pages(3))
        load = world.begin_load(copy)
        world.end_load(load, failed=failed)
        before = world.state()
        for end in (serving.finish_load, serving.cancel_load):
            with pytest.raises(RequestStateError, match="load: a load that has ended"):
                end(world.cache, load)
        assert world.state() == before


def test_a_copy_from_a_cache_of_other_pages_is_refused(world: Any, base: list[int]) -> None:
    world.serve(base)
    copy = world.save(base)
    other = type(world)(2, world.window)
    with pytest.raises(GeometryError, match=r"begin_load: .*expected a chunk for each page of 2"):
        other.begin_load(copy)

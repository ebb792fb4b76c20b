"""Drafts: more slots than tokens, until it is known which of them are right."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import GeometryError, RequestStateError, serving


@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_accepted_drafts_stay_and_pages_of_the_others_go(world: Any, accepted: int) -> None:
    request = world.start(world.text((1, world.pages(2) + 1)))
    free = world.allocator.full_available_size()

    drafts = world.speculate(request, 5)
    assert len(drafts) == 5
    assert (request.kv_len, request.kv_allocated_len) == (
        world.pages(2) + 1,
        world.pages(2) + 6,
    )
    world.check()
    world.trim(request, accepted)

    assert request.kv_len == request.kv_allocated_len == world.pages(2) + 1 + accepted
    pages = -(-request.kv_len // world.page_size) - 3
    assert free - world.allocator.full_available_size() == world.pages(pages)
    world.check()
    world.decode(request)
    world.check()


@pytest.mark.parametrize("end", ["finish", "abort", "retract", "back up"])
def test_drafts_are_dropped_with_their_request(world: Any, end: str) -> None:
    text = world.text((1, world.pages(2)))
    request = world.start(text)
    world.speculate(request, 7)

    if end in ("finish", "abort"):
        getattr(world, end)(request)
        assert world.match([*text, 1]) == (world.pages(2) if end == "finish" else 0)
        return
    world.retract(request, backup=end == "back up")
    world.check()
    assert world.resume(request) is not None
    assert request.kv_len == request.kv_allocated_len == world.pages(2)


def test_with_drafts_nothing_else_is_allowed(world: Any) -> None:
    request = world.start([1, 2])
    other = world.start([3, 4])
    world.speculate(request, 2)
    for each in (request, other):
        each.extend_tokens([5, 6, 7])
    before = world.state()
    for call in (
        lambda: serving.prefill(world.cache, request, 1),
        lambda: serving.decode(world.cache, [other, request]),
        lambda: serving.slide_windows(world.cache, [other, request]),
        lambda: serving.speculate(world.cache, request, 1),
        lambda: serving.admit(world.cache, request),
        lambda: serving.resume(world.cache, request),
    ):
        with pytest.raises(RequestStateError, match=r"drafts|runs in row"):
            call()
    assert world.state() == before


def test_trim_wants_drafts_and_at_most_as_many(world: Any) -> None:
    request = world.start([1, 2])
    with pytest.raises(RequestStateError, match=r"trim: .* no drafts; expected speculate"):
        serving.trim(world.cache, request, 0)
    world.speculate(request, 2)
    before = world.state()
    for wrong in (-1, 3, 1.0):
        with pytest.raises(GeometryError, match=r"trim: expected .*num_accepted"):
            serving.trim(world.cache, request, wrong)
    with pytest.raises(GeometryError, match="trim: token 3 of a request of 2"):
        serving.trim(world.cache, request, 1)
    assert world.state() == before

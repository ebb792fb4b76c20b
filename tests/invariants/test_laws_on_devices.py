"""The laws of device slots (HiSparse): a state that breaks one is reported under that law with the
pages concerned, and a state that only looks odd is not.

Every test runs on both forms of the laws, over one logical pool and over a hybrid one with an entry
for every four logical slots. Leaves out what the laws ask of the other sides:
test_laws_on_views.py.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.models import Geometry, Refused, ops
from kvcore.targets.protocol import Stream

NEUTRAL = ops.GroupBegin()
"""An op that changes nothing that can be seen."""

GEOMETRIES = {
    "plain": Geometry(4, 16, device_pages=8),
    "vectorised": Geometry(16, 200, device_pages=100),
    "plain-compressed": Geometry(16, 12, 9, device_pages=8, compress=4),
    "vectorised-compressed": Geometry(16, 200, 100, device_pages=50, compress=4),
}


@pytest.fixture(params=GEOMETRIES.values(), ids=GEOMETRIES)
def scene(request: pytest.FixtureRequest, make_scene: Callable[..., Any]) -> Any:
    """Rows 1 (two pages), 2 and 3 (one page each) with device pages, row 5 without any; row 4 is
    freed, and what it had on the device is in buffer 1."""
    scene = make_scene(request.param)
    scene.do(ops.Alloc(1, 2), ops.Alloc(2, 1), ops.Alloc(4, 1), ops.Alloc(3, 1))
    scene.do(ops.DeviceBuffer(4, 1, 1), ops.Free(4), ops.ExtendLogical(((5, scene.size),)))
    return scene


def texts(violation: Any, law: str) -> str:
    """What the broken clauses of a law say."""
    clauses = [clause for clause in violation.clauses if clause.law == law]
    return "; ".join(f"expected {clause.expected}, saw {clause.seen}" for clause in clauses)


def entries(scene: Any, logical: int) -> range:
    """Places of a logical page in the device mapping."""
    size = scene.model.geometry.device_page_size
    return range(logical * size, (logical + 1) * size)


def remap(scene: Any, shown: Any, logical: int, device: int) -> None:
    """Map a whole logical page to a device page, 0 for none."""
    size = scene.model.geometry.device_page_size
    for offset, place in enumerate(entries(scene, logical)):
        shown.device_mapping[place] = device * size + offset if device else 0


def test_an_unspoiled_state_breaks_nothing(scene: Any) -> None:
    scene.do(NEUTRAL)
    scene.run.finish()
    assert scene.run.violation is None


# L1, L2 and L3: every device page is in exactly one place.


def test_a_lost_device_page_is_named(scene: Any) -> None:
    lost = min(scene.model.device.free)
    violation = scene.breaks(lambda shown: shown.device_free.remove(lost), NEUTRAL)
    assert violation.laws == {"L1", "L3"}
    assert f"device pages {lost} free" in texts(violation, "L1")
    assert f"device page {lost} in exactly one place, saw nowhere" in texts(violation, "L3")


def test_a_free_device_page_of_a_row_is_named(scene: Any) -> None:
    page = scene.device(2)
    violation = scene.breaks(lambda shown: shown.device_free.append(page), NEUTRAL)
    assert violation.laws == {"L1", "L3"}
    assert f"device pages {page} lent" in texts(violation, "L1")
    assert f"mapped by logical page {scene.full(2)} and free" in texts(violation, "L3")


def test_a_free_device_page_of_a_buffer_is_named(scene: Any) -> None:
    (page,) = scene.model.buffers[1]
    violation = scene.breaks(lambda shown: shown.device_free.append(page), NEUTRAL)
    assert violation.laws == {"L1", "L3"}
    assert "free and in buffer 1" in texts(violation, "L3")


def test_a_device_page_twice_in_a_free_container_is_named(scene: Any) -> None:
    page = min(scene.model.device.free)
    violation = scene.breaks(lambda shown: shown.device_free.append(page), NEUTRAL)
    assert violation.laws == {"L2", "L3"}
    assert f"{page} more than once" in texts(violation, "L2")


def test_a_free_device_padding_page_is_nowhere_else_either(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.device_free.append(0), NEUTRAL)
    assert violation.laws == {"L2", "L3"}
    assert "device page 0 nowhere" in texts(violation, "L3")


@pytest.mark.parametrize("beyond", [-1, 1], ids=["below", "above"])
def test_a_device_page_outside_the_pool_is_named(scene: Any, beyond: int) -> None:
    page = scene.model.device.total + 1 if beyond > 0 else -1
    violation = scene.breaks(lambda shown: shown.device_free.append(page), NEUTRAL)
    assert violation.laws == {"L2"}
    assert str(page) in texts(violation, "L2")


def test_a_device_page_that_two_rows_share_is_seen_though_another_is_lost(scene: Any) -> None:
    double, lost = scene.device(2), scene.device(3)
    violation = scene.breaks(lambda shown: remap(scene, shown, scene.full(3), double), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    shared = sorted((scene.full(2), scene.full(3)))
    places = " and ".join(f"mapped by logical page {full}" for full in shared)
    assert f"device page {double} in exactly one place, saw {places}" in texts(violation, "L3")
    assert f"device page {lost} in exactly one place, saw nowhere" in texts(violation, "L3")


def test_a_device_page_of_a_buffer_that_is_mapped_is_seen(scene: Any) -> None:
    (page,) = scene.model.buffers[1]
    violation = scene.breaks(lambda shown: remap(scene, shown, scene.full(5), page), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    assert f"mapped by logical page {scene.full(5)} and in buffer 1" in texts(violation, "L3")


def test_the_last_slot_of_all_is_looked_at_too(make_scene: Callable[..., Any]) -> None:
    scene = make_scene(Geometry(1, 4, device_pages=4))
    scene.do(ops.Alloc(1, 4))
    last = next(page for page in scene.model.rows[1].pages if page.full == 4)
    violation = scene.breaks(lambda shown: shown.device_free.append(last.device), NEUTRAL)
    assert "mapped by logical page 4 and free" in texts(violation, "L3")


@pytest.mark.parametrize("op", [ops.FreeDevice(2), ops.Free(2)], ids=lambda op: op.kind)
def test_until_the_end_of_the_group_the_old_entry_may_be_seen_or_not(scene: Any, op: Any) -> None:
    full, device = scene.full(2), scene.device(2)
    scene.do(ops.GroupBegin(), op)
    scene.target.spoil = lambda shown: remap(scene, shown, full, device)
    scene.do(ops.Decode((1,)))
    scene.target.spoil = lambda shown: remap(scene, shown, full, 0)
    scene.do(ops.Decode((3,)))


def test_a_detached_page_shows_its_old_entry_and_no_other(scene: Any) -> None:
    full, other = scene.full(2), min(scene.model.device.free)
    scene.do(ops.GroupBegin(), ops.FreeDevice(2))
    violation = scene.breaks(lambda shown: remap(scene, shown, full, other), ops.Decode((1,)))
    assert violation.laws == {"L3", "L4"}
    assert f"logical page {full} mapped to" in texts(violation, "L4")


def test_a_device_page_of_the_group_that_is_free_too_early_is_seen(scene: Any) -> None:
    page = scene.device(2)
    scene.do(ops.GroupBegin(), ops.FreeDevice(2))
    violation = scene.breaks(lambda shown: shown.device_free.append(page), ops.Decode((1,)))
    assert violation.laws == {"L1", "L3"}
    assert "pending" in texts(violation, "L1")
    assert "free and pending in the group" in texts(violation, "L3")


def test_l6_device_pages_that_a_group_end_did_not_release_are_named(scene: Any) -> None:
    page = scene.device(2)
    scene.do(ops.GroupBegin(), ops.FreeDevice(2))
    violation = scene.breaks(lambda shown: shown.device_free.remove(page), ops.GroupEnd())
    assert violation.laws == {"L1", "L3", "L6"}
    assert f"not released: {page}" in texts(violation, "L6")


# L4


def test_l4_one_entry_that_was_cleared_is_named(scene: Any) -> None:
    full = scene.full(2)
    violation = scene.breaks(
        lambda shown: shown.device_mapping.__setitem__(entries(scene, full)[1], 0), NEUTRAL
    )
    assert violation.laws == {"L4"}
    assert violation.clauses[0].full_pages == (full,)


def test_l4_entries_out_of_step_are_named(scene: Any) -> None:
    first, second, *_ = entries(scene, scene.full(2))

    def swap(shown: Any) -> None:
        table = shown.device_mapping
        table[first], table[second] = table[second], table[first]

    violation = scene.breaks(swap, NEUTRAL)
    assert violation.laws == {"L4"}
    assert violation.clauses[0].full_pages == (scene.full(2),)


@pytest.mark.parametrize("where", ["free", "last", "padding", "logical"])
def test_l4_an_entry_where_there_is_none_is_named(scene: Any, where: str) -> None:
    free = scene.model.full.free
    pages = {"free": min(free), "last": max(free), "padding": 0, "logical": scene.full(5)}
    assert pages["last"] == scene.model.full.total
    device = min(scene.model.device.free)
    violation = scene.breaks(lambda shown: remap(scene, shown, pages[where], device), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    found = [clause.full_pages for clause in violation.clauses if clause.law == "L4"]
    assert found == [(pages[where],)]


def test_l4_a_sentinel_that_was_overwritten_is_seen(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.device_mapping.__setitem__(-1, 7), NEUTRAL)
    assert violation.laws == {"L4"}
    assert "the device mapping's sentinel -1, saw 7" in texts(violation, "L4")


def test_l4_a_device_mapping_of_another_length_is_seen(scene: Any) -> None:
    size = scene.model.geometry.device_page_size
    length = (scene.model.full.total + 1) * size + 1
    violation = scene.breaks(lambda shown: shown.device_mapping.insert(0, 0), NEUTRAL)
    assert "L4" in violation.laws
    assert f"a device mapping of {length} entries" in texts(violation, "L4")


def test_l4_a_row_whose_entries_went_into_a_buffer_shows_none(scene: Any) -> None:
    full, device = scene.full(3), scene.device(3)
    scene.do(ops.DeviceBuffer(3, 2, 1))
    violation = scene.breaks(lambda shown: remap(scene, shown, full, device), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    assert f"logical page {full} mapped to device slots" in texts(violation, "L4")


# L5


def too_many(scene: Any) -> ops.Op:
    return ops.Alloc(9, scene.model.full.total + 1)


def test_l5_a_refusal_that_keeps_a_device_page_is_reported(scene: Any) -> None:
    page = min(scene.model.device.free)
    violation = scene.breaks(lambda shown: shown.device_free.remove(page), too_many(scene))
    assert violation.laws == {"L1", "L3", "L5"}
    assert "the free device pages as before the call" in texts(violation, "L5")


def test_l5_a_refusal_that_clears_an_entry_is_reported(scene: Any) -> None:
    place = entries(scene, scene.full(2))[0]
    violation = scene.breaks(
        lambda shown: shown.device_mapping.__setitem__(place, 0), too_many(scene)
    )
    assert violation.laws == {"L4", "L5"}
    assert f"other entries at {place}" in texts(violation, "L5")


def test_l5_a_refused_buffer_leaves_the_entries_of_the_row(scene: Any) -> None:
    full = scene.full(2)
    wanted = scene.model.device.total + 1
    violation = scene.breaks(
        lambda shown: remap(scene, shown, full, 0), ops.DeviceBuffer(2, 9, wanted)
    )
    assert {"L3", "L4", "L5"} == violation.laws


def test_l5_a_refusal_in_a_group_may_capture_what_the_group_detached(scene: Any) -> None:
    full, device = scene.full(2), scene.device(2)
    scene.do(ops.GroupBegin(), ops.FreeDevice(2))
    scene.target.spoil = lambda shown: remap(scene, shown, full, device)
    scene.do(ops.Decode((1,)))
    scene.target.spoil = lambda shown: remap(scene, shown, full, 0)
    assert isinstance(scene.do(too_many(scene)), Refused)


def test_l5_a_refusal_in_a_group_may_not_bring_a_detached_entry_back(scene: Any) -> None:
    full, device = scene.full(2), scene.device(2)
    scene.do(ops.GroupBegin(), ops.FreeDevice(2))
    scene.target.spoil = lambda shown: remap(scene, shown, full, 0)
    scene.do(ops.Decode((1,)))
    violation = scene.breaks(lambda shown: remap(scene, shown, full, device), too_many(scene))
    assert violation.laws == {"L5"}


# L7, L9 and L10


@pytest.mark.parametrize("drift", [-1, 1])
@pytest.mark.parametrize("query", ["available", "full_available", "device_available"])
def test_l7_a_counter_that_drifted_is_seen(scene: Any, query: str, drift: int) -> None:
    def move(shown: Any) -> None:
        wrong = getattr(shown.answers, query) + drift
        shown.answers = msgspec.structs.replace(shown.answers, **{query: wrong})

    violation = scene.breaks(move, NEUTRAL)
    assert violation.laws == {"L7"}
    assert "device slots" in texts(violation, "L7")


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_l9_a_wrapper_that_answers_otherwise_is_seen(scene: Any, named: bool) -> None:
    answers = scene.target.view(stamps=False).answers
    query = answers.asked[1] if named else "query 1"

    def differ(shown: Any) -> None:
        first, second, *rest = shown.answers.outer
        asked = shown.answers.asked if named else ()
        wrong = (first, second + 1, *rest)
        shown.answers = msgspec.structs.replace(shown.answers, outer=wrong, asked=asked)

    violation = scene.breaks(differ, NEUTRAL)
    assert violation.laws == {"L9"}
    assert violation.clauses[0].seen == f"{query} {answers.outer[1] + 1}"
    assert violation.clauses[0].expected.endswith(f", {query} {answers.inner[1]}")


def at_the_last_view(make_run: Callable[[], Any], spoil: Callable[[Any], None]) -> Any:
    """The violation at the end of a run whose very last view is spoiled."""
    dry = make_run()
    dry.run.finish()
    last = len(dry.target.views)
    scene = make_run()

    def spoil_last(shown: Any) -> None:
        if len(scene.target.views) == last:
            spoil(shown)

    return scene.breaks_at_the_end(spoil_last)


def test_l10_a_device_page_that_is_missing_when_all_is_given_back_is_named(
    scene: Any, make_scene: Callable[..., Any]
) -> None:
    violation = at_the_last_view(
        lambda: make_scene(scene.target.geometry), lambda shown: shown.device_free.remove(3)
    )
    assert violation.laws == {"L1", "L3", "L10"}
    total = scene.model.device.total
    assert f"all {total} device pages free, saw {total - 1} free" in texts(violation, "L10")


def test_l10_a_slot_that_is_still_mapped_is_named(
    scene: Any, make_scene: Callable[..., Any]
) -> None:
    place = entries(scene, 7)[1]
    violation = at_the_last_view(
        lambda: make_scene(scene.target.geometry),
        lambda shown: shown.device_mapping.__setitem__(place, 1),
    )
    assert {"L4", "L10"} <= violation.laws
    assert f"mapped to a device slot, saw {place}" in texts(violation, "L10")


# stamps


def device_streams(scene: Any) -> list[Stream]:
    streams = scene.target.inner.view(stamps=True).streams
    return [stream for stream in streams if stream.side == "device"]


def test_a_changed_device_stamp_is_named_by_its_stream(scene: Any) -> None:
    size = scene.model.geometry.device_page_size
    slot = scene.device(2) * size + size - 1
    names = [stream.name for stream in device_streams(scene)]
    assert names

    def overwrite(shown: Any) -> None:
        for name in names:
            shown.rows_of(name)[slot] += 1

    violation = scene.breaks(overwrite, NEUTRAL)
    assert violation.laws == {"stamps"}
    said = texts(violation, "stamps")
    assert all(name in said for name in names)
    assert {clause.full_pages for clause in violation.clauses} == {(scene.full(2),)}


def test_device_slots_that_hold_no_entry_may_hold_anything(scene: Any) -> None:
    size = scene.model.geometry.device_page_size
    scene.do(ops.Extend(((8, scene.size // 2),)))
    (buffer,) = scene.model.buffers[1]
    idle = [0, buffer * size, min(scene.model.device.free) * size, (scene.device(8) + 1) * size - 1]
    names = [stream.name for stream in device_streams(scene)]

    def scribble(shown: Any) -> None:
        for name in names:
            for slot in idle:
                shown.rows_of(name)[slot] = 77

    scene.target.spoil = scribble
    scene.do(NEUTRAL)

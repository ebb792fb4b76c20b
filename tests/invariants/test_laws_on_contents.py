"""The laws of what lies in the pools: streams of every kind of attention, the request pool's table,
memory under a saver, and the identity mapping of a pool in which every layer slides.

Leaves out device slots: test_laws_on_devices.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.invariants.run import PLAIN_SLOTS
from kvcore.models import Geometry, ops
from kvcore.models.memory import pattern
from kvcore.targets.memory import PAGE

NEUTRAL = ops.GroupBegin()
"""An op that changes nothing that can be seen."""

Make = Callable[..., Any]


def texts(violation: Any, law: str) -> str:
    """What the broken clauses of a law say."""
    clauses = [clause for clause in violation.clauses if clause.law == law]
    return "; ".join(f"expected {clause.expected}, saw {clause.seen}" for clause in clauses)


def test_a_mapping_of_another_length_is_seen(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.mapping.insert(1, 0), NEUTRAL)
    assert "L4" in violation.laws
    geometry = scene.target.geometry
    length = geometry.full_size + geometry.page_size + 1
    assert f"a mapping of {length} entries, saw {length + 1} entries" in texts(violation, "L4")


# Streams.


STREAMS = {
    ("mla", 9): ["full latent", "full rope", "SWA latent", "SWA rope"],
    ("mla", 0): ["full latent", "full rope"],
    ("dsa", 0): ["full latent", "full rope", "full index-K", "full index-K scale"],
    ("dsa", 9): [
        *("full latent", "full rope", "full index-K", "full index-K scale"),
        *("SWA latent", "SWA rope", "SWA index-K", "SWA index-K scale"),
    ],
}
CASES = [
    pytest.param(attention, swa, name, id=f"{attention}-{swa}-{name}".replace(" ", "-"))
    for (attention, swa), names in STREAMS.items()
    for name in names
]


@pytest.mark.parametrize("large", [False, True], ids=["plain", "vectorised"])
@pytest.mark.parametrize(("attention", "swa", "name"), CASES)
def test_a_changed_row_of_any_stream_is_named(
    attention: Any, swa: int, name: str, large: bool, make_scene: Make
) -> None:
    size, pages = (16, 300) if large else (4, 12)
    scene = make_scene(Geometry(size, pages, swa and pages * 3 // 4, attention=attention))
    assert (size * pages > PLAIN_SLOTS) is large
    scene.do(ops.Alloc(1, 1), ops.Extend(((2, 3),)))
    page = scene.swa(2) if name.startswith("SWA") else scene.full(2)

    def overwrite(shown: Any) -> None:
        assert [stream.name for stream in shown.streams] == STREAMS[attention, swa]
        shown.rows_of(name)[scene.slots(page)[2]] += 1

    violation = scene.breaks(overwrite, NEUTRAL)
    assert violation.laws == {"stamps"}
    assert f"page {page}, {name}" in texts(violation, "stamps")


# Every layer slides.


SLIDING = {
    "plain": Geometry(4, 12, pure_swa=True),
    "vectorised": Geometry(16, 300, pure_swa=True),
}


@pytest.fixture(params=SLIDING.values(), ids=SLIDING)
def sliding(request: pytest.FixtureRequest, make_scene: Make) -> Any:
    """Row 1 of three pages whose first went when the window moved on."""
    scene = make_scene(request.param)
    scene.do(ops.Alloc(1, 3), ops.FreeSwa(1, 0, 1))
    return scene


@pytest.mark.parametrize("place", [0, 5, -1], ids=["padding", "slot", "sentinel"])
def test_an_entry_of_the_identity_mapping_that_changed_is_named(sliding: Any, place: int) -> None:
    violation = sliding.breaks(lambda shown: shown.mapping.__setitem__(place, 3), NEUTRAL)
    assert violation.laws == {"L4"}
    at = place % len(sliding.target.inner.view(stamps=False).host().mapping)
    assert f"others at {at}" in texts(violation, "L4")


def test_an_identity_mapping_of_another_length_is_seen(sliding: Any) -> None:
    violation = sliding.breaks(lambda shown: shown.mapping.pop(), NEUTRAL)
    assert violation.laws == {"L4"}
    length = len(sliding.target.inner.view(stamps=False).host().mapping)
    assert f"{length - 1} entries" in texts(violation, "L4")


def test_a_page_that_went_is_free_and_holds_what_it_likes(sliding: Any) -> None:
    gone = sliding.full(1)
    assert gone in sliding.model.full.free
    sliding.target.spoil = lambda shown: [
        rows.__setitem__(sliding.slots(gone)[0], 77) for rows in shown.stamps
    ]
    sliding.do(NEUTRAL)


def test_a_page_that_went_and_is_not_free_is_lost(sliding: Any) -> None:
    gone = sliding.full(1)
    violation = sliding.breaks(lambda shown: shown.full_free.remove(gone), NEUTRAL)
    assert violation.laws == {"L1"}
    assert f"full pages {gone} free" in texts(violation, "L1")


def test_a_sliding_pool_answers_for_both_sides(sliding: Any) -> None:
    def move(shown: Any) -> None:
        wrong = shown.answers.swa_available - sliding.size
        shown.answers = msgspec.structs.replace(shown.answers, swa_available=wrong)

    assert sliding.breaks(move, NEUTRAL).laws == {"L7"}


def test_an_identity_mapping_is_as_it_was_at_the_end_too(sliding: Any) -> None:
    sliding.run.finish()
    assert sliding.run.violation is None


# Request rows.


@pytest.fixture(params=[12, 300], ids=["plain", "vectorised"])
def requests(request: pytest.FixtureRequest, make_scene: Make) -> Any:
    """Rows 1 (two pages, the second in part) and 2; row 3 has ended."""
    pages = request.param
    scene = make_scene(Geometry(16 if pages > 100 else 4, pages, pages * 3 // 4, requests=4))
    scene.do(ops.Extend(((1, scene.size + 1),)), ops.Alloc(2, 1), ops.Alloc(3, 1), ops.Free(3))
    return scene


def place_of(scene: Any, seq: int, token: int) -> int:
    """Where the table holds a token's slot."""
    place: int = scene.model.rows[seq].request * width_of(scene) + token
    return place


def width_of(scene: Any) -> int:
    """Places of each row of the table; row 0 is the padding row."""
    table = scene.target.inner.view(stamps=True).host().request_rows
    width, rest = divmod(len(table), scene.target.geometry.requests + 1)
    assert rest == 0
    return width


@pytest.mark.parametrize("token", [0, -1], ids=["first", "last"])
def test_a_wrong_slot_in_the_table_is_named_by_its_row(requests: Any, token: int) -> None:
    place = place_of(requests, 1, token % requests.model.rows[1].tokens)

    def move(shown: Any) -> None:
        shown.request_rows[place] += 1

    violation = requests.breaks(move, NEUTRAL)
    assert violation.laws == {"rows"}
    row = requests.model.rows[1].request
    assert f"row {row}, sequence 1: slots" in texts(violation, "rows")


def test_two_requests_whose_rows_were_swapped_are_both_named(requests: Any) -> None:
    one, other = place_of(requests, 1, 0), place_of(requests, 2, 0)

    def swap(shown: Any) -> None:
        table = shown.request_rows
        for token in range(requests.size + 1):
            table[one + token], table[other + token] = table[other + token], table[one + token]

    violation = requests.breaks(swap, NEUTRAL)
    assert violation.laws == {"rows"}
    assert all(f"sequence {seq}" in texts(violation, "rows") for seq in (1, 2))


def test_beyond_the_rows_of_live_requests_the_table_may_hold_anything(requests: Any) -> None:
    ended = min(requests.model.requests.free)
    idle = [0, ended * width_of(requests), place_of(requests, 1, requests.size + 1)]

    def scribble(shown: Any) -> None:
        for place in idle:
            shown.request_rows[place] = 77

    requests.target.spoil = scribble
    requests.do(NEUTRAL)


def test_the_table_is_looked_at_every_period_steps(make_scene: Make) -> None:
    scene = make_scene(Geometry(4, 8, 8, requests=1), period=3)

    def move(shown: Any) -> None:
        for place in range(len(shown.request_rows)):
            shown.request_rows[place] = 77

    scene.target.spoil = move
    scene.do(ops.Alloc(1, 1), NEUTRAL)
    violation = scene.breaks(move, ops.GroupEnd())
    assert violation.signature == ("rows", "group_end")
    assert scene.run.tally.checks["rows"] == 1


def test_what_a_window_left_behind_is_not_looked_up(make_scene: Make) -> None:
    scene = make_scene(Geometry(4, 8, pure_swa=True, requests=2))
    scene.do(ops.Alloc(1, 3), ops.FreeSwa(1, 0, 1))
    first, later = place_of(scene, 1, 0), place_of(scene, 1, 5)
    scene.target.spoil = lambda shown: shown.request_rows.__setitem__(first, 77)
    scene.do(NEUTRAL)
    violation = scene.breaks(
        lambda shown: shown.request_rows.__setitem__(later, 77), ops.GroupEnd()
    )
    assert violation.laws == {"rows"}


def test_a_lost_request_row_is_named(requests: Any) -> None:
    lost = min(requests.model.requests.free)
    violation = requests.breaks(lambda shown: shown.request_free.remove(lost), NEUTRAL)
    assert violation.laws == {"L1"}
    assert f"request pages {lost} free" in texts(violation, "L1")


def test_a_live_request_row_that_is_free_is_named(requests: Any) -> None:
    row = requests.model.rows[2].request
    violation = requests.breaks(lambda shown: shown.request_free.append(row), NEUTRAL)
    assert violation.laws == {"L1"}


@pytest.mark.parametrize("row", ["twice", "padding", "beyond"])
def test_a_request_row_twice_or_outside_the_pool_is_named(requests: Any, row: str) -> None:
    number = {"twice": min(requests.model.requests.free), "padding": 0, "beyond": 5}[row]
    violation = requests.breaks(lambda shown: shown.request_free.append(number), NEUTRAL)
    assert violation.laws == {"L2"}
    assert str(number) in texts(violation, "L2") or number == 0


def test_a_count_of_requests_that_drifted_is_seen(requests: Any) -> None:
    def move(shown: Any) -> None:
        shown.answers = msgspec.structs.replace(shown.answers, requests_available=1)

    violation = requests.breaks(move, NEUTRAL)
    assert violation.laws == {"L7"}
    assert "requests 1" in texts(violation, "L7")


def test_a_refusal_that_keeps_a_request_row_is_reported(requests: Any) -> None:
    lost = min(requests.model.requests.free)
    violation = requests.breaks(
        lambda shown: shown.request_free.remove(lost),
        ops.Alloc(9, requests.model.full.total + 1),
    )
    assert violation.laws == {"L1", "L5"}
    assert "the free request pages as before the call" in texts(violation, "L5")


def test_a_request_row_that_is_missing_at_the_end_is_named(make_scene: Make) -> None:
    dry = make_scene(Geometry(4, 8, 8, requests=2))
    dry.run.finish()
    last = len(dry.target.views)
    scene = make_scene(Geometry(4, 8, 8, requests=2))

    def lose(shown: Any) -> None:
        if len(scene.target.views) == last:
            shown.request_free.pop()

    violation = scene.breaks_at_the_end(lose)
    assert violation.laws == {"L1", "L10"}
    assert "all 2 request pages free, saw 1 free" in texts(violation, "L10")


# Memory under a saver.


@pytest.fixture
def saved(make_scene: Make) -> Any:
    """A hybrid pool under a saver, with row 1, a piece of the pool's tag (1) and two of another (2,
    3); looked at in full at calls on memory alone."""
    scene = make_scene(Geometry(4, 12, 9, saver=True), period=1000)
    scene.do(ops.Alloc(1, 1), ops.Reserve(1, "kv_cache", 2))
    scene.do(ops.Reserve(2, "weights", 3), ops.Reserve(3, "weights", 1))
    return scene


def spoiled(tag: str, **changes: Any) -> Callable[[Any], None]:
    """Shows other numbers of what is under a tag: a function of the right one for each."""

    def spoil(shown: Any) -> None:
        if shown.memory is None:
            return
        held = dict(shown.memory.held)
        right = held[tag]
        wrong = {name: change(getattr(right, name)) for name, change in changes.items()}
        held[tag] = dataclasses.replace(right, **wrong)
        shown.memory = dataclasses.replace(shown.memory, held=held)

    return spoil


def test_what_is_under_a_saver_is_counted_by_tag(saved: Any) -> None:
    held = saved.target.view(stamps=True).host().memory.held
    pool = sum(length for _, length in saved.target.view(stamps=True).host().memory.pool)
    assert held["kv_cache"].resident == held["kv_cache"].said == pool + 2 * PAGE
    assert held["weights"].resident == held["weights"].said == 4 * PAGE
    assert held["weights"].values == (pattern(2), pattern(3))


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
@pytest.mark.parametrize("op", [ops.Drop(3), ops.Pause("kv_cache"), ops.Pause("weights")], ids=str)
def test_a_page_too_few_under_a_tag_that_is_not_paused_is_seen(
    saved: Any, op: Any, tag: str
) -> None:
    paused = isinstance(op, ops.Pause) and op.memory == tag
    change = (lambda size: size + PAGE) if paused else (lambda size: size - PAGE)
    violation = saved.breaks(spoiled(tag, resident=change), op)
    assert violation.laws == {"saver"}
    state = "paused" if paused else "not paused"
    assert f"bytes of {tag} resident, which is {state}" in texts(violation, "saver")


def test_a_pause_that_gives_nothing_back_is_seen(saved: Any) -> None:
    live = saved.target.view(stamps=True).host().memory.held["kv_cache"].resident
    violation = saved.breaks(
        spoiled("kv_cache", resident=lambda size: live, said=lambda size: live),
        ops.Pause("kv_cache"),
    )
    assert violation.laws == {"saver"}
    assert f"expected 0 of {live} bytes of kv_cache resident" in texts(violation, "saver")
    assert len(violation.clauses) == 2


def test_a_resume_that_brings_nothing_back_is_seen(saved: Any) -> None:
    saved.do(ops.Pause("weights"))
    violation = saved.breaks(spoiled("weights", resident=lambda size: 0), ops.Resume("weights"))
    assert violation.laws == {"saver"}


@pytest.mark.parametrize(
    ("tag", "change"), [("kv_cache", 1), ("weights", -1)], ids=["paused", "not paused"]
)
def test_a_saver_that_miscounts_is_seen(saved: Any, tag: str, change: int) -> None:
    violation = saved.breaks(spoiled(tag, said=lambda size: size + change), ops.Pause("kv_cache"))
    assert violation.laws == {"saver"}
    assert f"bytes of {tag} are resident" in texts(violation, "saver")


def test_a_saver_may_keep_more_than_is_alive_for_the_next_one(saved: Any) -> None:
    saved.target.spoil = spoiled("weights", said=lambda size: size + PAGE)
    saved.do(ops.Drop(3))


def test_a_buffer_that_moved_is_seen(saved: Any) -> None:
    def move(shown: Any) -> None:
        first, (address, length), *others = shown.memory.pool
        moved = (first, (address + PAGE, length), *others)
        shown.memory = dataclasses.replace(shown.memory, pool=moved)

    saved.do(ops.Pause("kv_cache"))
    violation = saved.breaks(move, ops.Resume("kv_cache"))
    assert violation.laws == {"saver"}
    assert "expected the pool's buffers where they were, saw others: 1" in texts(violation, "saver")


def test_a_buffer_that_is_missing_is_seen(saved: Any) -> None:
    def shorten(shown: Any) -> None:
        shown.memory = dataclasses.replace(shown.memory, pool=shown.memory.pool[:-1])

    violation = saved.breaks(shorten, ops.Drop(3))
    assert "saver" in violation.laws
    assert "where they were" in texts(violation, "saver")


def test_what_a_pause_of_another_tag_overwrote_is_seen(saved: Any) -> None:
    violation = saved.breaks(
        spoiled("weights", values=lambda values: (values[0], 0)), ops.Pause("kv_cache")
    )
    assert violation.laws == {"saver"}
    assert "regions 2, 3 of weights hold" in texts(violation, "saver")


def test_what_came_back_with_its_old_value_is_seen(saved: Any) -> None:
    saved.do(ops.Pause("weights"))
    violation = saved.breaks(
        spoiled("weights", values=lambda values: (pattern(2), 0)), ops.Resume("weights")
    )
    assert violation.laws == {"saver"}
    assert "hold (0, 0)" in texts(violation, "saver")


def test_what_is_paused_is_not_read(saved: Any) -> None:
    saved.do(ops.Pause("weights"))
    saved.target.spoil = spoiled("weights", values=lambda values: (7, 7))
    saved.do(ops.Drop(1))


def test_a_tag_without_pieces_has_no_values(saved: Any) -> None:
    saved.do(ops.Drop(1))
    saved.target.spoil = spoiled("kv_cache", values=lambda values: (7,))
    saved.do(ops.Pause("weights"))


def idle_slot(scene: Any) -> int:
    """A slot of the full pool that nobody holds."""
    return scene.slots(min(scene.model.full.free))[0]


def test_memory_that_came_back_is_zero_everywhere(saved: Any) -> None:
    slot = idle_slot(saved)
    saved.do(ops.Pause("kv_cache"))
    violation = saved.breaks(
        lambda shown: shown.rows_of("full V").__setitem__(slot, 5), ops.Resume("kv_cache")
    )
    assert violation.laws == {"saver"}
    assert f"full V zero after the resume, saw not so in slots {slot}" in texts(violation, "saver")


def test_a_row_that_came_back_with_what_it_held_is_named(saved: Any) -> None:
    slot = saved.slots(saved.full(1))[1]
    saved.do(ops.Pause("kv_cache"))
    violation = saved.breaks(
        lambda shown: shown.rows_of("full K").__setitem__(slot, 2), ops.Resume("kv_cache")
    )
    assert violation.laws == {"saver", "stamps"}


@pytest.mark.parametrize(
    ("before", "op"),
    [
        ((ops.Pause("kv_cache"), ops.Resume("kv_cache")), ops.Drop(3)),
        ((ops.Pause("weights"),), ops.Resume("weights")),
        ((), ops.Resume("kv_cache")),
    ],
    ids=["later", "another tag", "not paused"],
)
def test_only_what_has_just_come_back_must_be_zero(saved: Any, before: Any, op: Any) -> None:
    slot = idle_slot(saved)
    saved.do(*before)
    saved.target.spoil = lambda shown: shown.rows_of("full V").__setitem__(slot, 5)
    saved.do(op)


@pytest.mark.parametrize(
    "op",
    [ops.Reserve(9, "weights", 1), ops.Drop(3), ops.Pause("weights"), ops.Resume("weights")],
    ids=lambda op: op.kind,
)
def test_memory_is_looked_at_after_every_call_on_it(saved: Any, op: Any) -> None:
    saved.do(NEUTRAL)
    assert saved.target.views[-1] is False
    saved.do(op)
    assert saved.target.views[-1] is True


def test_a_paused_pool_shows_no_contents(saved: Any) -> None:
    saved.do(ops.Pause("kv_cache"))
    view = saved.target.view(stamps=True)
    assert view.holds_memory
    assert not view.holds_stamps
    saved.run.finish()
    assert saved.run.violation is None

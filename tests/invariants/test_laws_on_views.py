"""Each law that looks at a target's state: a state that breaks it is reported under that law with
the pages concerned, and a state that only looks odd is not.

Every test runs on both forms of the laws. Leaves out laws that look at answers:
test_laws_on_answers.py.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.invariants import LAWS
from kvcore.models import ops
from kvcore.targets.protocol import MHA_STREAMS, Stream

NEUTRAL = ops.GroupBegin()
"""An op that changes nothing that can be seen."""


def blamed(violation: Any, law: str) -> tuple[set[int], set[int]]:
    """Full and SWA pages that the broken clauses of a law name."""
    clauses = [clause for clause in violation.clauses if clause.law == law]
    full = {page for clause in clauses for page in clause.full_pages}
    return full, {page for clause in clauses for page in clause.swa_pages}


def test_an_unspoiled_state_breaks_nothing(scene: Any) -> None:
    scene.do(NEUTRAL)
    scene.run.finish()
    assert scene.run.violation is None


# L1


def test_l1_a_lost_full_page_is_named(scene: Any) -> None:
    lost = min(scene.model.full.free)
    violation = scene.breaks(lambda shown: shown.full_free.remove(lost), NEUTRAL)
    assert violation.laws == {"L1"}
    assert blamed(violation, "L1") == ({lost}, set())


def test_l1_a_lost_swa_page_is_named_and_breaks_the_partition_too(scene: Any) -> None:
    lost = min(scene.model.swa.free)
    violation = scene.breaks(lambda shown: shown.swa_free.remove(lost), NEUTRAL)
    assert violation.laws == {"L1", "L3"}
    assert blamed(violation, "L1") == (set(), {lost})
    assert blamed(violation, "L3") == (set(), {lost})


def test_l1_a_lent_page_that_is_free_is_named(scene: Any) -> None:
    lent = scene.full(1)
    violation = scene.breaks(lambda shown: shown.full_free.append(lent), NEUTRAL)
    assert violation.laws == {"L1"}
    assert blamed(violation, "L1") == ({lent}, set())
    assert "lent" in violation.clauses[0].expected


def test_l1_a_pending_page_that_is_free_is_named(scene: Any) -> None:
    full, swa = scene.full(2), scene.swa(2)
    scene.do(ops.GroupBegin(), ops.Free(2))

    def release_early(shown: Any) -> None:
        shown.full_free.append(full)
        shown.swa_free.append(swa)

    violation = scene.breaks(release_early, ops.Decode((1,)))
    assert violation.laws == {"L1", "L3"}
    assert blamed(violation, "L1") == ({full}, {swa})
    expected = [clause.expected for clause in violation.clauses if clause.law == "L1"]
    assert all("pending" in text for text in expected)


def test_l1_a_page_swapped_for_another_is_seen_though_the_count_is_right(scene: Any) -> None:
    lost, lent = min(scene.model.full.free), scene.full(3)

    def swap(shown: Any) -> None:
        shown.full_free[shown.full_free.index(lost)] = lent

    violation = scene.breaks(swap, NEUTRAL)
    assert violation.laws == {"L1"}
    assert blamed(violation, "L1") == ({lost, lent}, set())


# L2


def test_l2_a_page_twice_in_a_free_container_is_named(scene: Any) -> None:
    full = min(scene.model.full.free)
    violation = scene.breaks(lambda shown: shown.full_free.append(full), NEUTRAL)
    assert violation.laws == {"L2"}
    assert blamed(violation, "L2") == ({full}, set())


def test_l2_an_swa_page_twice_breaks_the_partition_too(scene: Any) -> None:
    swa = max(scene.model.swa.free)
    violation = scene.breaks(lambda shown: shown.swa_free.append(swa), NEUTRAL)
    assert violation.laws == {"L2", "L3"}
    assert blamed(violation, "L2") == (set(), {swa})


def test_l2_a_free_padding_page_is_named(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.full_free.append(0), NEUTRAL)
    assert violation.laws == {"L2"}
    assert blamed(violation, "L2") == ({0}, set())


def test_l2_a_free_swa_padding_page_is_in_no_partition_either(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.swa_free.append(0), NEUTRAL)
    assert violation.laws == {"L2", "L3"}
    assert blamed(violation, "L2") == blamed(violation, "L3") == (set(), {0})


@pytest.mark.parametrize("beyond", [-1, 1], ids=["below", "above"])
def test_l2_a_page_outside_the_pool_is_named(scene: Any, beyond: int) -> None:
    page = scene.model.full.total + 1 if beyond > 0 else -1
    violation = scene.breaks(lambda shown: shown.full_free.append(page), NEUTRAL)
    assert violation.laws == {"L2"}
    assert blamed(violation, "L2") == ({page}, set())


# L3


def test_l3_a_page_mapped_twice_while_another_is_lost_is_seen_though_the_counts_agree(
    scene: Any,
) -> None:
    double, lost = scene.swa(2), scene.swa(3)
    owners = {scene.full(2), scene.full(3)}

    violation = scene.breaks(lambda shown: scene.remap(shown, scene.full(3), double), NEUTRAL)

    assert violation.laws == {"L3", "L4"}
    found = [clause for clause in violation.clauses if clause.law == "L3"]
    places = {clause.swa_pages: set(clause.full_pages) for clause in found}
    assert places == {(double,): owners, (lost,): set()}


def test_l3_a_page_mapped_twice_is_seen_though_the_sets_agree(scene: Any) -> None:
    double, lost = scene.swa(2), scene.swa(3)

    def share(shown: Any) -> None:
        scene.remap(shown, scene.full(3), double)
        shown.swa_free.append(lost)

    violation = scene.breaks(share, NEUTRAL)

    # Mapped pages and pages that are not free are the same set here; only counting tells.
    assert blamed(violation, "L3") == ({scene.full(2), scene.full(3)}, {double})


def test_l3_a_mapped_page_that_is_free_is_named_with_its_full_page(scene: Any) -> None:
    swa = scene.swa(3)
    violation = scene.breaks(lambda shown: shown.swa_free.append(swa), NEUTRAL)
    assert violation.laws == {"L1", "L3"}
    assert blamed(violation, "L3") == ({scene.full(3)}, {swa})


def test_l3_one_full_page_on_two_swa_pages_is_seen(scene: Any) -> None:
    first, second = scene.swa(2), scene.swa(3)
    slot = scene.slots(scene.full(2))[-1]

    def straddle(shown: Any) -> None:
        shown.mapping[slot] = scene.slots(second)[-1]

    violation = scene.breaks(straddle, NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    assert blamed(violation, "L3") == ({scene.full(2), scene.full(3)}, {second})
    assert first not in blamed(violation, "L3")[1]


def test_l3_a_pending_page_that_is_lost_from_the_mapping_is_not_missed(scene: Any) -> None:
    swa, full = scene.swa(2), scene.full(2)
    scene.do(ops.GroupBegin(), ops.FreeSwa(2))
    # Until the group's end the old entry may be seen or not: both states are right.
    scene.target.spoil = lambda shown: scene.remap(shown, full, swa)
    scene.do(ops.Decode((1,)))
    scene.target.spoil = lambda shown: scene.remap(shown, full, 0)
    scene.do(ops.Extend(((3, 1),)))


# L4


def test_l4_a_stale_entry_of_a_free_page_is_named(scene: Any) -> None:
    stale, peer = min(scene.model.full.free), min(scene.model.swa.free)
    violation = scene.breaks(lambda shown: scene.remap(shown, stale, peer), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    assert blamed(violation, "L4") == ({stale}, {peer})


def test_l4_an_entry_of_the_padding_page_is_named(scene: Any) -> None:
    peer = min(scene.model.swa.free)
    violation = scene.breaks(lambda shown: scene.remap(shown, 0, peer), NEUTRAL)
    assert "L4" in violation.laws
    assert blamed(violation, "L4") == ({0}, {peer})


def test_l4_one_entry_that_was_cleared_is_named(scene: Any) -> None:
    full = scene.full(2)

    def clear_one(shown: Any) -> None:
        shown.mapping[scene.slots(full)[1]] = 0

    violation = scene.breaks(clear_one, NEUTRAL)
    assert violation.laws == {"L4"}
    assert blamed(violation, "L4") == ({full}, {scene.swa(2)})


def test_l4_entries_out_of_step_are_named(scene: Any) -> None:
    full = scene.full(2)
    first, second = scene.slots(full)[:2]

    def swap(shown: Any) -> None:
        shown.mapping[first], shown.mapping[second] = shown.mapping[second], shown.mapping[first]

    violation = scene.breaks(swap, NEUTRAL)
    assert violation.laws == {"L4"}
    assert blamed(violation, "L4") == ({full}, {scene.swa(2)})


def test_l4_an_entry_of_a_tombstone_is_named(scene: Any) -> None:
    full, swa = scene.full(2), scene.swa(2)
    scene.do(ops.FreeSwa(2))
    violation = scene.breaks(lambda shown: scene.remap(shown, full, swa), NEUTRAL)
    assert violation.laws == {"L3", "L4"}
    assert blamed(violation, "L4") == ({full}, {swa})


def test_l4_a_sentinel_that_was_overwritten_is_seen(scene: Any) -> None:
    violation = scene.breaks(lambda shown: shown.mapping.__setitem__(-1, 0), NEUTRAL)
    assert violation.laws == {"L4"}
    assert violation.clauses[0].expected == "the sentinel entry -1"
    assert violation.clauses[0].seen == "0"


def test_l4_entries_beyond_the_rows_tokens_may_be_mapped_or_not(scene: Any) -> None:
    last = scene.slots(scene.full(1, 1))[-1]
    peer = scene.slots(scene.swa(1, 1))[-1]
    for entry in (0, peer):
        scene.target.spoil = lambda shown, entry=entry: shown.mapping.__setitem__(last, entry)
        scene.do(ops.Extend(((2 if entry else 3, 1),)))


def test_l4_an_entry_beyond_the_rows_tokens_names_no_other_slot(scene: Any) -> None:
    last = scene.slots(scene.full(1, 1))[-1]
    other = scene.slots(scene.swa(1, 1))[0]
    violation = scene.breaks(lambda shown: shown.mapping.__setitem__(last, other), NEUTRAL)
    assert violation.laws == {"L4"}
    assert blamed(violation, "L4") == ({scene.full(1, 1)}, {scene.swa(1, 1)})


def test_l4_a_page_that_is_mapped_in_part_shows_peers_there_alone(scene: Any) -> None:
    half = scene.size // 2
    scene.do(ops.Extend(((8, half),)), ops.SwaTail(8, scene.size - half, 0))
    full, swa = scene.full(8), scene.swa(8)
    violation = scene.breaks(lambda shown: scene.remap(shown, full, swa), NEUTRAL)
    assert violation.laws == {"L4"}
    assert blamed(violation, "L4") == ({full}, {swa})


def test_l4_a_detached_page_may_show_its_old_peer_and_no_other(scene: Any) -> None:
    full, swa, other = scene.full(2), scene.swa(2), min(scene.model.swa.free)
    scene.do(ops.GroupBegin(), ops.Free(2))
    scene.target.spoil = lambda shown: scene.remap(shown, full, swa)
    scene.do(ops.Decode((1,)))
    violation = scene.breaks(lambda shown: scene.remap(shown, full, other), ops.Decode((1,)))
    assert "L4" in violation.laws
    assert blamed(violation, "L4") == ({full}, {other})


def test_l4_a_page_recovered_in_the_group_shows_its_new_peer_alone(scene: Any) -> None:
    full, old = scene.full(2), scene.swa(2)
    scene.do(ops.GroupBegin(), ops.FreeSwa(2), ops.Recover(2, 3, locked=True))
    violation = scene.breaks(lambda shown: scene.remap(shown, full, old), ops.Decode((1,)))
    assert "L4" in violation.laws
    assert blamed(violation, "L4") == ({full}, {old})


# L7


@pytest.mark.parametrize("query", ["available", "full_available", "swa_available"])
@pytest.mark.parametrize("drift", [-1, 1])
def test_l7_a_counter_that_drifted_is_seen(scene: Any, query: str, drift: int) -> None:
    def move(shown: Any) -> None:
        wrong = getattr(shown.answers, query) + drift
        shown.answers = msgspec.structs.replace(shown.answers, **{query: wrong})

    violation = scene.breaks(move, NEUTRAL)
    assert violation.laws == {"L7"}


# L8


def test_l8_a_lent_tensor_that_changed_is_seen(scene: Any) -> None:
    number, slots = next(iter(scene.target.inner.view(stamps=False).host().held.items()))

    def overwrite(shown: Any) -> None:
        shown.held[number][0] = 0

    violation = scene.breaks(overwrite, NEUTRAL)
    assert violation.laws == {"L8"}
    assert blamed(violation, "L8") == ({slots[0] // scene.size}, set())
    assert f"answer {number} " in violation.clauses[0].expected


# L9


@pytest.mark.parametrize("side", ["outer", "inner"])
def test_l9_a_wrapper_that_answers_otherwise_is_seen(scene: Any, side: str) -> None:
    def differ(shown: Any) -> None:
        theirs = getattr(shown.answers, side)
        changed = (theirs[0] + 1, *theirs[1:])
        shown.answers = msgspec.structs.replace(shown.answers, **{side: changed})

    violation = scene.breaks(differ, NEUTRAL)
    assert violation.laws == {"L9"}


# L10


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


def test_l10_a_page_that_is_missing_when_all_is_given_back_is_named(
    scene: Any, make_scene: Callable[..., Any]
) -> None:
    violation = at_the_last_view(
        lambda: make_scene(scene.target.geometry), lambda shown: shown.full_free.remove(5)
    )
    assert violation.laws == {"L1", "L10"}
    assert blamed(violation, "L10") == ({5}, set())
    assert (violation.op_kind, violation.op_index) == ("drain", 0)


def test_l10_an_swa_page_that_is_missing_is_named(
    scene: Any, make_scene: Callable[..., Any]
) -> None:
    violation = at_the_last_view(
        lambda: make_scene(scene.target.geometry), lambda shown: shown.swa_free.remove(5)
    )
    assert violation.laws == {"L1", "L3", "L10"}
    assert blamed(violation, "L10") == (set(), {5})


def test_l10_a_slot_that_is_still_mapped_is_named(
    scene: Any, make_scene: Callable[..., Any]
) -> None:
    slot = scene.slots(7)[1]
    violation = at_the_last_view(
        lambda: make_scene(scene.target.geometry), lambda shown: shown.mapping.__setitem__(slot, 9)
    )
    assert {"L4", "L10"} <= violation.laws
    assert blamed(violation, "L10") == ({7}, set())


# stamps


@pytest.mark.parametrize("stream", MHA_STREAMS, ids=lambda stream: stream.name.replace(" ", "-"))
def test_a_changed_stamp_is_named_by_its_page(scene: Any, stream: Stream) -> None:
    full, swa = scene.full(2), scene.swa(2)
    slot = scene.slots(swa if stream.side == "SWA" else full)[-1]

    def overwrite(shown: Any) -> None:
        shown.rows_of(stream.name)[slot] += 1

    violation = scene.breaks(overwrite, NEUTRAL)
    assert violation.laws == {"stamps"}
    assert blamed(violation, "stamps") == ({full}, {swa} if stream.side == "SWA" else set())
    assert stream.name in violation.clauses[0].expected


def test_two_rows_whose_contents_were_swapped_are_both_named(scene: Any) -> None:
    first, second = scene.slots(scene.full(2)), scene.slots(scene.full(3))

    def swap(shown: Any) -> None:
        for one, other in zip(first, second, strict=True):
            for rows in shown.stamps[:2]:
                rows[one], rows[other] = rows[other], rows[one]

    violation = scene.breaks(swap, NEUTRAL)
    assert violation.laws == {"stamps"}
    assert blamed(violation, "stamps") == ({scene.full(2), scene.full(3)}, set())


def test_slots_that_hold_no_token_may_hold_anything(scene: Any) -> None:
    idle = scene.slots(min(scene.model.full.free))
    beyond = scene.slots(scene.full(1, 1))[-1]

    def scribble(shown: Any) -> None:
        for rows in shown.stamps[:2]:
            for slot in (*idle, beyond, 0):
                rows[slot] = 77

    scene.target.spoil = scribble
    scene.do(NEUTRAL)


def test_swa_slots_that_nothing_was_restored_into_may_hold_anything(scene: Any) -> None:
    scene.do(ops.FreeSwa(2), ops.Retract(2, 1), ops.Restore(1, 8))
    peers = scene.slots(scene.swa(8))

    def scribble(shown: Any) -> None:
        for rows in shown.stamps[2:]:
            rows[peers[0]] = 77

    scene.target.spoil = scribble
    scene.do(NEUTRAL)


# L6


def test_l6_pages_that_a_group_end_did_not_release_are_named(scene: Any) -> None:
    full, swa = scene.full(2), scene.swa(2)
    scene.do(ops.GroupBegin(), ops.Free(2))

    def hold_back(shown: Any) -> None:
        shown.full_free.remove(full)
        shown.swa_free.remove(swa)

    violation = scene.breaks(hold_back, ops.GroupEnd())
    assert violation.laws == {"L1", "L3", "L6"}
    assert blamed(violation, "L6") == ({full}, {swa})


def test_l6_a_page_released_in_place_of_another_is_named(scene: Any) -> None:
    swa, other = scene.swa(2), scene.swa(3)
    scene.do(ops.GroupBegin(), ops.FreeSwa(2))

    def release_another(shown: Any) -> None:
        shown.swa_free[shown.swa_free.index(swa)] = other

    violation = scene.breaks(release_another, ops.GroupEnd())
    assert "L6" in violation.laws
    assert blamed(violation, "L6") == (set(), {swa, other})
    text = next(clause.seen for clause in violation.clauses if clause.law == "L6")
    assert f"not released: {swa}; released in their place: {other}" in text


def test_l6_is_about_the_end_of_a_group_alone(scene: Any) -> None:
    lost = min(scene.model.full.free)
    violation = scene.breaks(lambda shown: shown.full_free.remove(lost), ops.Decode((1,)))
    assert "L6" not in violation.laws


# What is right though it looks odd.


def test_free_pages_may_be_in_any_order(scene: Any) -> None:
    def shuffle(shown: Any) -> None:
        shown.full_free.reverse()
        shown.swa_free.sort(reverse=len(scene.target.views) % 2 == 0)

    scene.target.spoil = shuffle
    too_many = scene.model.full.total + 1
    scene.do(ops.Alloc(8, too_many), ops.GroupBegin(), ops.Free(2), ops.GroupEnd())
    scene.run.finish()
    assert scene.run.violation is None


def test_all_broken_laws_are_collected_and_the_first_by_precedence_names_the_violation(
    scene: Any,
) -> None:
    def spoil_all(shown: Any) -> None:
        shown.full_free.append(0)
        shown.full_free.remove(min(scene.model.full.free))
        shown.mapping[-1] = 0
        shown.stamps[0][scene.slots(scene.full(2))[0]] += 1
        shown.answers = msgspec.structs.replace(shown.answers, available=1)

    violation = scene.breaks(spoil_all, NEUTRAL)
    assert violation.laws == {"L1", "L2", "L4", "L7", "stamps"}
    first = next(law.id for law in LAWS if law.id in violation.laws)
    assert violation.law == violation.clauses[0].law == first
    assert violation.signature == (first, "group_begin")
    assert violation.op_index == len(scene.run.program) - 1

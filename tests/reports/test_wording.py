"""Ops, answers and pages read as sentences."""

from __future__ import annotations

import pytest

from kvcore.models import Done, Geometry, Lent, Outcome, Raised, Refused, ops, request_ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import OP_KINDS, Op
from kvcore.models.outcomes import Served
from kvcore.models.request_ops import REQUEST_OP_KINDS
from kvcore.reports.wording import (
    MOST_RUNS,
    answer,
    arguments,
    count,
    in_order,
    pools,
    ranges,
    span,
)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4], "3, 4"),
        ([5, 4, 3], "3-5"),
        ([1, 2, 3, 5, 7, 8, 8, 9], "1-3, 5, 7-9"),
        ([0, -1], "-1, 0"),
    ],
)
def test_runs_of_three_or_more_are_drawn_together(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


def test_numbers_in_order_stay_in_order() -> None:
    assert in_order([8, 9, 10, 11, 4, 5, 4]) == "8-11, 4, 5, 4"
    assert in_order([]) == ""


def test_of_many_runs_the_first_ones_are_told() -> None:
    every_other = range(0, 2 * MOST_RUNS, 2)
    assert ranges(every_other) == ", ".join(map(str, every_other))
    assert ranges([*every_other, 1000]) == f"{ranges(every_other)} … ({MOST_RUNS + 1} in all)"
    assert ranges(range(10_000)) == "0-9999"


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 pages"), (1, "1 page"), (2, "2 pages"), (12345, "12,345 pages")]
)
def test_nouns_follow_their_number(number: int, words: str) -> None:
    assert count(number, "page") == words


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (0, None, "all pages"),
        (2, None, "pages 2 to the end"),
        (2, 3, "page 2"),
        (2, 5, "pages 2-4"),
    ],
)
def test_the_last_page_named_is_part_of_the_span(start: int, stop: int | None, words: str) -> None:
    assert span(start, stop) == words


EXAMPLES: list[tuple[Op, str]] = [
    (ops.Alloc(1, 2), "sequence 1: 2 pages"),
    (ops.Alloc(1, 1, overwrite=True), "sequence 1: 1 page; tensor then overwritten"),
    (ops.Extend(((1, 5), (2, 1))), "sequence 1 +5 tokens, sequence 2 +1 token"),
    (ops.Decode((1,)), "sequence 1 +1 token"),
    (ops.Decode((1, 2)), "sequences 1, 2 +1 token"),
    (ops.SwaTail(1, 8, 4), "sequence 1 +8 tokens, SWA for the last 4"),
    (ops.SwaTail(1, 8, 4, 2), "sequence 1 +8 tokens, SWA for the 4 before the last 2"),
    (ops.Free(1, 1, 2, "sparse"), "sequence 1, page 1, one slot a page"),
    (
        ops.Free(1, form="segments", overwrite=True),
        "sequence 1, all pages, as two segments; tensor then overwritten",
    ),
    (ops.FreeSwa(1, 0, 2, "segment"), "sequence 1, pages 0-1, as a segment"),
    (ops.FreeFull(1, 3), "sequence 1, pages 3 to the end"),
    (ops.GroupBegin(), ""),
    (ops.GroupEnd(), ""),
    (ops.Recover(1, 2, True, 1, 3, 0), "sequence 1 page 3 from sequence 2 page 0, locked"),
    (ops.Recover(1, 2, False, 2), "sequence 1 pages 0-1 from sequence 2 pages 0-1, unlocked"),
    (ops.LoadBack(1, 4, 2), "sequence 1: 4 pages, SWA for the last 2"),
    (ops.LoadBackSwa(1, 1, 3), "sequence 1, pages 1-2"),
    (ops.Retract(1, 7), "sequence 1 into backup 7"),
    (ops.Restore(7, 2), "backup 7 as sequence 2"),
    (ops.Restore(7, 2, 1), "backup 7 as sequence 2, SWA for the last 1 token"),
    (ops.Relocate(1), "sequence 1 into new slots"),
    (
        ops.ExtendLogical(((1, 5), (2, 1))),
        "sequence 1 +5 tokens, sequence 2 +1 token, no device slots",
    ),
    (ops.FreeDevice(1, 0, 2, "sparse"), "sequence 1, pages 0-1, one slot a page"),
    (ops.DeviceBuffer(1, 4, 2), "sequence 1 into buffer 4 of 2 device pages"),
    (ops.FreeBuffer(4), "buffer 4"),
    (ops.Reserve(3, "weights", 2), "region 3 under weights: 2 OS pages"),
    (ops.Drop(3), "region 3"),
    (ops.Pause("kv_cache"), "kv_cache"),
    (ops.Resume("weights"), "weights"),
    (ops.Clear(), ""),
    (ops.Hostile("free_padding"), HOSTILE_CALLS["free_padding"].what),
    (
        ops.Hostile("map_over_live", 1, 2),
        f"{HOSTILE_CALLS['map_over_live'].what} (sequence 1, sequence 2)",
    ),
    (ops.Hostile("restore_short", 7), f"{HOSTILE_CALLS['restore_short'].what} (backup 7)"),
    (
        request_ops.Admit(3, ((1, 4), (7, 2)), output=9),
        "request 3: 4 tokens of stream 1, 2 of 7; output of 9",
    ),
    (
        request_ops.Admit(3, ((1, 1),), output=9, tokens=5),
        "request 3: 1 token of stream 1; output of 9; chunk of 5",
    ),
    (request_ops.Prefill(3, 2), "request 3 +2 tokens"),
    (request_ops.CacheUnfinished(3), "request 3"),
    (request_ops.DecodeStep((3,)), "request 3 +1 token"),
    (request_ops.DecodeStep((3, 4)), "requests 3, 4 +1 token"),
    (request_ops.Slide((3, 4)), "requests 3, 4"),
    (request_ops.Speculate(3, 1), "request 3 +1 draft"),
    (request_ops.Trim(3, 0), "request 3 keeps 0 drafts"),
    (request_ops.Finish(3), "request 3"),
    (request_ops.Abort(3), "request 3"),
    (request_ops.RetractRequest(3, backup=True), "request 3, its KV copied to the host"),
    (request_ops.RetractRequest(3, backup=False), "request 3, its KV not copied"),
    (request_ops.ResumeRequest(3), "request 3"),
    (request_ops.SavePrefix(2, ((1, 8),)), "8 tokens of stream 1 as copy 2"),
    (request_ops.SavePrefix(2, ()), "no tokens as copy 2"),
    (request_ops.LoadPrefix(2, 5), "copy 2 as load 5"),
    (request_ops.EndLoad(5), "load 5"),
    (request_ops.EndLoad(5, failed=True), "load 5, which failed"),
    (request_ops.Evict(4, 1), "4 full and 1 SWA token"),
    (request_ops.Flush(), ""),
]


@pytest.mark.parametrize(("op", "words"), EXAMPLES)
def test_an_op_says_what_it_is_asked_to_do(op: Op, words: str) -> None:
    assert arguments(op) == words


def test_every_kind_of_op_has_an_example_here() -> None:
    assert {op.kind for op, _ in EXAMPLES} == {*OP_KINDS, *REQUEST_OP_KINDS}


HYBRID = Geometry(page_size=4, full_pages=4, swa_pages=4)
COMPRESSED = Geometry(page_size=4, full_pages=4, swa_pages=4, device_pages=4, compress=4)
HISPARSE = Geometry(page_size=4, full_pages=8, device_pages=4)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Lent((4, 5, 6, 7, 8), (12, 13, 14, 15, 4)), "full 1, 2; SWA 1, 3"),
        (Lent((4, 5), (0, 0)), "full 1"),
        (Lent((4, 5)), "full 1"),
        (Lent((4, 5), (8, 9), requests=(3, 1)), "full 1; SWA 2; request 1, 3"),
        (Refused(), "None: no room"),
        (Done(), "done"),
        (Raised("DoubleFreeError", "free of page 3"), "raised DoubleFreeError"),
        (None, "did not return"),
    ],
)
def test_an_answer_names_the_pages_that_were_lent(outcome: Outcome | None, words: str) -> None:
    assert answer(ops.Alloc(1, 2), outcome, HYBRID) == words


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (Served(), "done"),
        (
            Served(request=2, slots=(8, 9), peers=(4, 5), matched=4, prefix_slots=(4, 5, 6, 7)),
            "row 2; prefix of 4 tokens; full 2; SWA 1",
        ),
        (Served(slots=(8, 9), peers=(0, 0)), "full 2"),
        (
            Served(slots=(8,), peers=(4,), reloaded=(12, 13, 14, 15), matched=4),
            "prefix of 4 tokens; full 2; SWA 1; SWA 3 for tombstones",
        ),
        (Served(evicted=(3, 1), tombstoned=(2,)), "evicted full 1, 3; tombstoned full 2"),
    ],
)
def test_what_was_served_is_told_in_pages(served: Served, words: str) -> None:
    assert answer(request_ops.Finish(1), served, HYBRID) == words


def test_device_pages_are_told_in_their_own_size() -> None:
    # One entry for four slots, and one slot to a device page.
    compressed = Lent((4, 5, 6, 7), (8, 9, 10, 11), device=(0, 0, 0, 3))
    assert answer(ops.Extend(((1, 4),)), compressed, COMPRESSED) == "full 1; SWA 2; device 3"
    plain = Lent((4, 5), device=(12, 13))
    assert answer(ops.Extend(((1, 2),)), plain, HISPARSE) == "full 1; device 3"
    logical = Lent((4, 5), device=(0, 0))
    assert answer(ops.ExtendLogical(((1, 2),)), logical, HISPARSE) == "full 1"


def test_a_device_buffer_is_answered_with_device_pages() -> None:
    lent = Lent((12, 13, 14, 15, 4, 5, 6, 7))
    assert answer(ops.DeviceBuffer(1, 1, 2), lent, HISPARSE) == "device 1, 3"


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (Geometry(4, 16, 12), "16 full and 12 SWA pages of 4 slots"),
        (Geometry(1, 8, need_sort=True), "8 full pages of 1 slot, reused in order"),
        (Geometry(1, 1, 1), "1 full and 1 SWA page of 1 slot"),
        (Geometry(4, 8, pure_swa=True), "8 full pages of 4 slots, every layer sliding"),
        (
            Geometry(4, 16, device_pages=8),
            "16 full pages of 4 slots over 8 device pages of 4 slots",
        ),
        (
            Geometry(4, 16, 12, device_pages=8, compress=4),
            "16 full and 12 SWA pages of 4 slots over 8 device pages of 1 slot",
        ),
        (
            Geometry(4, 16, 12, True, attention="mla", requests=4, saver=True),
            "16 full and 12 SWA pages of 4 slots, MLA, 4 requests, memory saver, reused in order",
        ),
        (Geometry(1, 8, attention="dsa", requests=1), "8 full pages of 1 slot, DSA, 1 request"),
        (
            Geometry(4, 16, 12, requests=4, window=3),
            "16 full and 12 SWA pages of 4 slots, 4 requests, window 3",
        ),
        (
            Geometry(1, 8, 8, requests=4, window=1000, context=2000),
            "8 full and 8 SWA pages of 1 slot, 4 requests, window 1,000, context 2,000",
        ),
    ],
)
def test_pools_are_told_by_what_they_have(geometry: Geometry, words: str) -> None:
    assert pools(geometry) == words

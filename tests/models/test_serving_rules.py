"""When request-level ops are allowed, and when there is too little room for them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Contract, ops
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    SERVING_OP_KINDS,
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    Flush,
    LoadPrefix,
    Prefill,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
    Speculate,
    Trim,
)
from kvcore.models.serving_rules import MOST_EVICTED

# Pages of 4 tokens, a window of two pages; request 1 has a prompt of two pages and a token.
TEXT = ((1, 9),)
RUN = (Admit(1, TEXT, 5),)
CHUNK = (Admit(1, TEXT, 5, 4),)
DRAFTS = (*RUN, Speculate(1, 3))
CACHED = (*RUN, Finish(1))
COPIED = (*CACHED, SavePrefix(1, TEXT))
LOADING = (*COPIED, Evict(100, 0), LoadPrefix(1, 1))
ARRIVED = (*LOADING, EndLoad(1))
WAITING = (*RUN, RetractRequest(1, True))
GROUP = (ops.GroupBegin(),)

NOT_ALLOWED: list[tuple[tuple[Op, ...], Op, str]] = [
    (RUN, Admit(1, TEXT, 5), "request 1 is no new name"),
    ((*RUN, Abort(1)), Admit(1, TEXT, 5), "request 1 is no new name"),
    ((), Admit(0, TEXT, 5), "request 0 is no new name"),
    ((), Admit(1, (), 5), "a text has tokens"),
    ((), Admit(1, ((1, 4), (2, 0)), 5), "a text has tokens"),
    ((), Admit(1, TEXT, 5, 0), "a chunk has at least one token"),
    ((), Admit(1, ((1, 97),), 5), "a row holds 96 tokens"),
    ((), Prefill(1, 1), "there is no running request 1"),
    (WAITING, Prefill(1, 1), "there is no running request 1"),
    (RUN, Prefill(1, 1), "the prompt of request 1 is computed"),
    (CHUNK, Prefill(1, 0), "a chunk has at least one token"),
    ((), CacheUnfinished(1), "there is no running request 1"),
    (DRAFTS, CacheUnfinished(1), "request 1 has drafts"),
    (RUN, DecodeStep(()), "a batch names each request once"),
    (RUN, DecodeStep((1, 1)), "a batch names each request once"),
    (RUN, DecodeStep((1, 2)), "there is no running request 2"),
    (CHUNK, DecodeStep((1,)), "the prompt of request 1 is not computed"),
    (DRAFTS, DecodeStep((1,)), "request 1 has drafts"),
    (RUN, Slide(()), "a batch names each request once"),
    (RUN, Slide((1, 1)), "a batch names each request once"),
    (DRAFTS, Slide((1,)), "request 1 has drafts"),
    (RUN, Speculate(1, 0), "there is at least one draft"),
    (DRAFTS, Speculate(1, 1), "request 1 has drafts"),
    (CHUNK, Speculate(1, 1), "the prompt of request 1 is not computed"),
    (RUN, Speculate(1, 88), "the row of request 1 is full"),
    (RUN, Trim(1, 0), "there is no request 1 with drafts"),
    ((), Trim(1, 0), "there is no request 1 with drafts"),
    (DRAFTS, Trim(1, 4), "there are 3 drafts"),
    (DRAFTS, Trim(1, -1), "there are 3 drafts"),
    ((), Finish(1), "there is no running request 1"),
    (CHUNK, Finish(1), "the prompt of request 1 is not computed"),
    ((), Abort(1), "there is no running request 1"),
    (WAITING, Abort(1), "there is no running request 1"),
    (WAITING, RetractRequest(1, False), "there is no running request 1"),
    (RUN, ResumeRequest(1), "there is no retracted request 1"),
    ((*WAITING, ResumeRequest(1)), ResumeRequest(1), "there is no retracted request 1"),
    (RUN, SavePrefix(1, TEXT), "the cache can serve nothing of the text"),
    (CACHED, SavePrefix(1, ((2, 9),)), "the cache can serve nothing of the text"),
    (CACHED, SavePrefix(0, TEXT), "copy 0 is no new name"),
    (COPIED, SavePrefix(1, TEXT), "copy 1 is no new name"),
    (CACHED, SavePrefix(1, ()), "a text has tokens"),
    (CACHED, LoadPrefix(1, 1), "there is no copy 1"),
    (COPIED, LoadPrefix(1, 1), "all of copy 1 is cached"),
    (LOADING, LoadPrefix(1, 1), "load 1 is no new name"),
    ((*LOADING, EndLoad(1, True)), LoadPrefix(1, 1), "load 1 is no new name"),
    ((*COPIED, Evict(100, 0)), LoadPrefix(1, 0), "load 0 is no new name"),
    ((), EndLoad(1), "there is no load 1 in flight"),
    (ARRIVED, EndLoad(1), "there is no load 1 in flight"),
    ((), Evict(0, 0), f"an eviction asks for 1 to {MOST_EVICTED} tokens"),
    ((), Evict(MOST_EVICTED + 1, 0), f"an eviction asks for 1 to {MOST_EVICTED} tokens"),
    (RUN, Flush(), "a request runs or a load is in flight"),
    (LOADING, Flush(), "a request runs or a load is in flight"),
    (GROUP, Flush(), "a group is open"),
    (GROUP, ops.GroupBegin(), "a group is open"),
    ((), ops.GroupEnd(), "no group is open"),
    ((), ops.Extend(((1, 4),)), "this target's callers do not use extend"),
    ((), ops.Clear(), "this target's callers do not use clear"),
]

ALLOWED: list[tuple[tuple[Op, ...], Op]] = [
    ((), Admit(1, ((1, 96),), 5)),
    ((), Admit(7, ((1, 1),), 1, 9)),
    (CHUNK, Prefill(1, 99)),
    (CHUNK, CacheUnfinished(1)),
    (CHUNK, Slide((1,))),
    (CHUNK, Abort(1)),
    (CHUNK, RetractRequest(1, True)),
    (RUN, Speculate(1, 87)),
    (DRAFTS, Trim(1, 0)),
    (DRAFTS, Trim(1, 3)),
    (DRAFTS, Finish(1)),
    (DRAFTS, Abort(1)),
    (DRAFTS, RetractRequest(1, False)),
    (WAITING, ResumeRequest(1)),
    (WAITING, Flush()),
    (ARRIVED, SavePrefix(2, TEXT)),
    ((*COPIED, Evict(0, 4)), LoadPrefix(1, 1)),
    ((), Flush()),
    (GROUP, Evict(1, 0)),
    (GROUP, Admit(1, TEXT, 5)),
]


@pytest.mark.parametrize(("before", "op", "why"), NOT_ALLOWED, ids=str)
def test_an_op_is_not_allowed_for_the_reason_that_is_said(
    serve: Callable[..., Any], before: tuple[Op, ...], op: Op, why: str
) -> None:
    server = serve()
    server.do(*before)
    assert server.model.why_not(op) == why
    assert not server.model.allows(op)


@pytest.mark.parametrize(("before", "op"), ALLOWED, ids=str)
def test_an_op_is_allowed_as_far_as_its_names_and_sizes_go(
    serve: Callable[..., Any], before: tuple[Op, ...], op: Op
) -> None:
    server = serve()
    server.do(*before)
    assert server.model.why_not(op) is None


def test_a_load_waits_for_one_that_is_in_flight_to_the_same_tombstones(
    serve: Callable[..., Any],
) -> None:
    server = serve()
    server.do(*COPIED, Admit(2, ((1, 9), (2, 9)), 5), CacheUnfinished(2), Evict(0, 4))
    front = server.model.live[2].path[:2]
    assert sorted(node.state for node in front) == ["live", "tombstone"]
    server.do(LoadPrefix(1, 1))
    assert server.model.why_not(LoadPrefix(1, 2)) == "a load of the tokens of copy 1 is in flight"
    server.do(EndLoad(1, failed=True))
    assert server.model.allows(LoadPrefix(1, 2))


def test_a_contract_leaves_ops_out_or_keeps_callers_from_exhaustion(
    serve: Callable[..., Any],
) -> None:
    narrow = Contract(ops=frozenset(SERVING_OP_KINDS) - {"retract_request"}, exhaustion=False)
    server = serve(contract=narrow)
    server.do(*RUN)
    reason = "this target's callers do not use retract_request"
    assert server.model.why_not(RetractRequest(1, True)) == reason
    reason = "this target's callers check the capacity first"
    assert server.model.why_not(Admit(2, ((2, 37),), 5)) == reason
    assert server.model.allows(Admit(2, ((2, 36),), 5))


# Twelve pages a side, four request rows. A request of 9 tokens has three pages, of which two are
# cached when it ends.


@pytest.mark.parametrize(
    ("before", "op", "short"),
    [
        ((), Admit(1, ((1, 48),), 5), False),
        ((), Admit(1, ((1, 49),), 5), True),
        ((), Admit(1, ((1, 49),), 5, 48), False),
        (CACHED, Admit(2, ((2, 48),), 5), False),
        ((*CACHED, *GROUP), Admit(2, ((2, 40),), 5), False),
        ((*CACHED, *GROUP), Admit(2, ((2, 41),), 5), True),
        # What it matches cannot be evicted for it.
        (CACHED, Admit(2, ((1, 9), (2, 39)), 5), False),
        (CACHED, Admit(2, ((1, 9), (2, 40)), 5), True),
        (tuple(Admit(i, ((i, 1),), 5) for i in range(1, 5)), Admit(5, ((5, 1),), 5), True),
        ((*RUN, Admit(2, ((2, 36),), 5)), DecodeStep((1,)), False),
        ((*RUN, Admit(2, ((2, 36),), 5)), DecodeStep((2,)), True),
        ((*RUN, Admit(2, ((2, 36),), 5)), Speculate(1, 3), False),
        ((*RUN, Admit(2, ((2, 36),), 5)), Speculate(1, 4), True),
        ((*CHUNK, Admit(2, ((2, 44),), 5)), Prefill(1, 1), True),
        ((*CHUNK, Admit(2, ((2, 40),), 5)), Prefill(1, 4), False),
        ((*WAITING, Admit(2, ((2, 36),), 5)), ResumeRequest(1), False),
        ((*WAITING, Admit(2, ((2, 37),), 5)), ResumeRequest(1), True),
        ((*COPIED, Evict(100, 0), Admit(2, ((2, 40),), 5)), LoadPrefix(1, 1), False),
        ((*COPIED, Evict(100, 0), Admit(2, ((2, 41),), 5)), LoadPrefix(1, 1), True),
        ((), Evict(100, 100), False),
        ((), DecodeStep((9,)), False),
    ],
    ids=str,
)
def test_a_refusal_is_due_where_even_eviction_makes_too_little_room(
    serve: Callable[..., Any], before: tuple[Op, ...], op: Op, short: bool
) -> None:
    server = serve()
    server.do(*before)
    assert server.model.must_refuse(op) == short


def test_a_resumed_request_needs_swa_pages_for_its_last_window_alone(
    serve: Callable[..., Any],
) -> None:
    server = serve(full_pages=24, swa_pages=6)
    # Five pages and a token: the last window before the last whole page is two pages.
    server.do(Admit(1, ((1, 21),), 5), RetractRequest(1, True), Admit(2, ((2, 12),), 5))
    assert not server.model.must_refuse(ResumeRequest(1))
    server.do(DecodeStep((2,)))
    assert server.model.must_refuse(ResumeRequest(1))


@pytest.mark.parametrize("sides", [(12, 20), (20, 12)])
def test_what_an_op_matches_makes_no_room_for_it_on_either_side(
    serve: Callable[..., Any], sides: tuple[int, int]
) -> None:
    server = serve(full_pages=sides[0], swa_pages=sides[1])
    server.do(*CACHED)
    assert not server.model.must_refuse(Admit(2, ((1, 9), (2, 39)), 5))
    assert server.model.must_refuse(Admit(2, ((1, 9), (2, 40)), 5))


def test_a_resumed_request_needs_full_pages_for_what_is_not_cached_alone(
    serve: Callable[..., Any],
) -> None:
    server = serve(swa_pages=24)
    # Five pages and a token, of which two are cached, beside a request of seven pages.
    server.do(Admit(1, ((1, 21),), 5), RetractRequest(1, True), Admit(2, TEXT, 5), Finish(2))
    server.do(Admit(3, ((3, 24),), 5))
    assert not server.model.must_refuse(ResumeRequest(1))
    server.do(DecodeStep((3,)))
    assert server.model.must_refuse(ResumeRequest(1))


def test_room_is_what_is_free_and_outside_of_groups_what_can_be_evicted(
    serve: Callable[..., Any],
) -> None:
    server = serve()
    server.do(*CACHED)
    assert server.model.room() == (48, 48)
    server.do(ops.GroupBegin())
    assert server.model.room() == (40, 40)

"""Requests over a prefix cache as a target: what each op answers, what is written and read, what
the cache is seen to give up, and what the view shows.

Leaves out which allocators serve requests (test_serving_targets.py), and whether any of it is
right: that is the model's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcore import TreeNode, UnifiedRadixCache
from kvcore.models import Done, Geometry, Raised, Refused, ops, texts
from kvcore.models.ops import Op
from kvcore.models.outcomes import Served
from kvcore.models.request_ops import (
    REQUEST_OP_KINDS,
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
from kvcore.models.texts import Text
from kvcore.targets.core import CoreParts
from kvcore.targets.serving import ServingTarget
from kvcore.targets.serving_targets import serving_core_target
from kvcore.targets.tree_view import NodeView, TreeView

torch.set_num_threads(1)

P, W = 2, 3
SERVING = Geometry(P, 16, 10, requests=3, window=W, context=32)
PROMPT: Text = ((7, 8),)
LONGER: Text = ((7, 8), (9, 4))
OUTPUT = 5


CACHED_ON_TOP = (
    *(Admit(1, PROMPT, OUTPUT), Finish(1), SavePrefix(1, PROMPT)),
    *(Admit(2, LONGER, OUTPUT), Finish(2)),
)
"""A cached prefix, copied to the host, with another one on top of it."""


def target_of(geometry: Geometry = SERVING, **options: Any) -> ServingTarget:
    return serving_core_target(geometry, **options)


def served(target: ServingTarget, op: Op) -> Served:
    outcome = target.apply(op)
    assert isinstance(outcome, Served), outcome
    return outcome


def after(*program: Op, geometry: Geometry = SERVING) -> ServingTarget:
    target = target_of(geometry)
    for op in program:
        outcome = target.apply(op)
        assert isinstance(outcome, Served | Done), (op, outcome)
    return target


def tree(target: ServingTarget) -> TreeView:
    shown = target.view(stamps=False).tree
    assert shown is not None
    return shown


def pages_of(target: ServingTarget) -> list[int]:
    """Of a tree without branches, in row order."""
    return [page for node in tree(target).nodes for page in node.pages]


def full_k(target: ServingTarget) -> list[int]:
    return target.view(stamps=True).host().stamps[0]


def swa_k(target: ServingTarget) -> list[int]:
    return target.view(stamps=True).host().stamps[2]


def row(target: ServingTarget, request: int, length: int) -> list[int]:
    flat = target.view(stamps=True).host().request_rows
    width = target.geometry.context_len
    return flat[request * width :][:length]


def generated(text: Text, count: int) -> Text:
    """The text of a request after so many more tokens."""
    return (*text, (OUTPUT, count))


# --- what each op answers ------------------------------------------------------------------------


def test_an_admission_answers_its_row_and_the_slots_of_all_tokens_that_are_new() -> None:
    target = target_of()
    answer = served(target, Admit(1, PROMPT, OUTPUT))
    assert answer.request in (1, 2, 3)
    assert row(target, answer.request, 8) == list(answer.slots)
    mapping = target.view(stamps=False).host().mapping
    assert list(answer.peers) == [mapping[slot] for slot in answer.slots]
    assert answer.matched == 0
    assert answer.prefix_slots == ()


def test_what_an_admission_computed_is_in_the_pool_on_both_sides() -> None:
    target = target_of()
    answer = served(target, Admit(1, PROMPT, OUTPUT))
    computed = texts.stamps(PROMPT, 0, 8)
    assert [full_k(target)[slot] for slot in answer.slots] == computed
    assert [swa_k(target)[peer] for peer in answer.peers] == computed


def test_a_second_request_is_served_the_prefix_with_what_the_pool_holds_there() -> None:
    target = target_of()
    first = served(target, Admit(1, PROMPT, OUTPUT))
    served(target, Finish(1))
    answer = served(target, Admit(2, LONGER, OUTPUT))
    assert answer.matched == 8
    assert answer.prefix_slots == first.slots
    computed = tuple(texts.stamps(PROMPT, 0, 8))
    assert answer.prefix_peers == first.peers
    assert answer.prefix_stamps == (computed, computed)
    assert len(answer.slots) == 4
    assert [full_k(target)[slot] for slot in answer.slots] == texts.stamps(LONGER, 8, 12)


def test_tokens_without_a_peer_have_no_stamp_of_the_sliding_side() -> None:
    target = after(*CACHED_ON_TOP, Evict(0, P))
    answer = served(target, Admit(3, (*LONGER, (3, 1)), OUTPUT))
    gone = [peer == 0 for peer in answer.prefix_peers]
    assert gone[0]
    assert not any(gone[-W:])
    computed = texts.stamps(LONGER, 0, answer.matched)
    assert list(answer.prefix_stamps[0]) == computed
    assert [stamp == 0 for stamp in answer.prefix_stamps[1]] == gone


def test_a_chunk_answers_its_slots_and_is_written() -> None:
    target = target_of()
    first = served(target, Admit(1, LONGER, OUTPUT, 3))
    second = served(target, Prefill(1, 5))
    assert len(first.slots) == 3
    assert len(second.slots) == len(second.peers) == 5
    written = [full_k(target)[slot] for slot in (*first.slots, *second.slots)]
    assert written == texts.stamps(LONGER, 0, 8)


def test_a_cached_row_is_answered_whole() -> None:
    target = target_of()
    lent = served(target, Admit(1, ((7, 7),), OUTPUT))
    answer = served(target, CacheUnfinished(1))
    assert answer.matched == 6
    assert answer.prefix_slots == lent.slots[:6]
    assert answer.prefix_stamps[0] == tuple(texts.stamps(((7, 7),), 0, 6))
    assert answer.request == 0


def test_a_decode_writes_the_next_token_of_each_request() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Admit(2, ((8, 3),), OUTPUT))
    answers = [served(target, DecodeStep((2, 1))) for _ in range(3)]
    for step, answer in enumerate(answers):
        seen = [full_k(target)[slot] for slot in answer.slots]
        second = texts.stamps(generated(((8, 3),), 3), 3 + step, 4 + step)
        first = texts.stamps(generated(PROMPT, 3), 8 + step, 9 + step)
        assert seen == second + first
        assert [swa_k(target)[peer] for peer in answer.peers] == seen


def test_what_is_generated_is_cached_under_its_tokens() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), *[DecodeStep((1,))] * 4, Finish(1))
    tokens = [token for node in tree(target).nodes for token in node.tokens.tolist()]
    assert tokens == texts.token_ids(generated(PROMPT, 4), 0, 12)
    assert served(target, Admit(2, (*generated(PROMPT, 4), (1, 1)), 6)).matched == 12


def test_drafts_are_written_when_they_are_accepted_and_not_before() -> None:
    target = after(Admit(1, PROMPT, OUTPUT))
    lent = served(target, Speculate(1, 4))
    accepted = texts.stamps(generated(PROMPT, 4), 8, 12)
    assert not set(accepted) & {full_k(target)[slot] for slot in lent.slots}
    assert served(target, Trim(1, 2)) == Served()
    assert [full_k(target)[slot] for slot in lent.slots[:2]] == accepted[:2]
    assert full_k(target)[lent.slots[3]] != accepted[3]
    assert tree(target).requests[1].kv_len == 10


def test_a_request_comes_back_with_what_it_had_computed() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), DecodeStep((1,)), RetractRequest(1, backup=True))
    assert tree(target).requests == {}
    served(target, Admit(2, ((3, 6),), OUTPUT))
    answer = served(target, ResumeRequest(1))
    assert answer.request in (1, 2, 3)
    assert answer.matched == 0
    computed = texts.stamps(generated(PROMPT, 1), 0, 9)
    assert [full_k(target)[slot] for slot in answer.slots] == computed
    window = [(slot, peer) for slot, peer in zip(answer.slots, answer.peers, strict=True) if peer]
    assert 0 < len(window) < 9
    assert [full_k(target)[s] for s, _ in window] == [swa_k(target)[p] for _, p in window]


def test_a_request_without_a_backup_is_computed_again() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), DecodeStep((1,)), RetractRequest(1, backup=False))
    served(target, Admit(2, ((3, 6),), OUTPUT))
    answer = served(target, ResumeRequest(1))
    computed = texts.stamps(generated(PROMPT, 1), 0, 9)
    assert [full_k(target)[slot] for slot in answer.slots] == computed
    assert [swa_k(target)[peer] for peer in answer.peers] == computed


def test_a_load_answers_the_slots_of_what_was_gone() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1))
    assert served(target, SavePrefix(1, ((7, 9),))).matched == 8
    served(target, Evict(8, 0))
    answer = served(target, LoadPrefix(1, 1))
    assert answer.matched == 0
    assert len(answer.slots) == 8
    assert answer.reloaded == ()
    assert served(target, EndLoad(1)) == Served()
    assert [full_k(target)[slot] for slot in answer.slots] == texts.stamps(PROMPT, 0, 8)
    assert served(target, Admit(2, LONGER, OUTPUT)).matched == 8


def test_a_load_into_tombstones_answers_their_new_peers_in_row_order() -> None:
    target = after(*CACHED_ON_TOP, Evict(0, 8))
    pages = pages_of(target)
    mapping = target.view(stamps=False).host().mapping
    assert not any(mapping[page * P] for page in pages[:4])
    answer = served(target, LoadPrefix(1, 1))
    assert (answer.matched, answer.slots) == (8, ())
    mapping = target.view(stamps=False).host().mapping
    # The copy's last window begins with token 4, and its first pages stay tombstones.
    reopened = [page * P + at for page in pages[2:4] for at in range(P)]
    assert list(answer.reloaded) == [mapping[slot] for slot in reopened]
    assert all(answer.reloaded)
    assert {node.state for node in tree(target).nodes if 4 <= node.start < 8} == {"loading"}


def test_a_failed_load_leaves_nothing() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1), SavePrefix(1, PROMPT), Evict(8, 0))
    free = sorted(target.view(stamps=False).host().full_free)
    served(target, LoadPrefix(1, 1))
    assert served(target, EndLoad(1, failed=True)) == Served()
    assert sorted(target.view(stamps=False).host().full_free) == free
    assert tree(target).nodes == ()


def test_ops_that_only_give_back_answer_nothing() -> None:
    target = after(Admit(1, LONGER, OUTPUT), Admit(2, PROMPT, OUTPUT))
    for op in (Slide((1,)), Abort(1), Abort(2)):
        assert served(target, op) == Served()


def test_more_than_there_is_is_refused() -> None:
    target = after(Admit(1, PROMPT, OUTPUT))
    before = target.view(stamps=True).host()
    for op in (Admit(2, ((3, 25),), OUTPUT), Speculate(1, 20)):
        assert target.apply(op) == Refused()
    assert target.view(stamps=True).host() == before
    assert list(tree(target).requests) == [1]


def test_an_error_of_the_code_on_trial_is_an_outcome() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Speculate(1, 2))
    outcome = target.apply(DecodeStep((1,)))
    assert isinstance(outcome, Raised)
    assert "KVCacheError" in outcome.bases


def test_a_group_spans_requests() -> None:
    target = after(Admit(1, LONGER, OUTPUT), Admit(2, PROMPT, OUTPUT))
    free = len(target.view(stamps=False).host().full_free)
    assert target.apply(ops.GroupBegin()) == Done()
    served(target, Abort(1))
    served(target, Abort(2))
    assert len(target.view(stamps=False).host().full_free) == free
    assert target.apply(ops.GroupEnd()) == Done()
    assert len(target.view(stamps=False).host().full_free) == SERVING.full_pages


# --- what the cache is seen to give up -----------------------------------------------------------


def test_evictions_are_seen_by_page() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1))
    (node,) = tree(target).nodes
    answer = served(target, Evict(P, 0))
    assert sorted(answer.evicted) == sorted(node.pages)
    assert answer.tombstoned == ()
    assert tree(target).nodes == ()


def test_tombstones_are_seen_by_page() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1), Admit(2, LONGER, OUTPUT), Finish(2))
    inner = tree(target).nodes[0]
    answer = served(target, Evict(0, P))
    assert sorted(answer.tombstoned) == sorted(inner.pages)
    assert answer.evicted == ()
    assert tree(target).nodes[0].state == "tombstone"


def test_evictions_on_demand_belong_to_the_op_that_needed_the_room() -> None:
    target = after(Admit(1, ((1, 16),), OUTPUT), Finish(1))
    cached = [page for node in tree(target).nodes for page in node.pages]
    answer = served(target, Admit(2, ((2, 16),), OUTPUT))
    assert answer.evicted
    assert set(answer.evicted) <= set(cached)
    assert served(target, Slide((2,))).evicted == ()


class ForgetsToFree(UnifiedRadixCache):
    """Drops nodes and tells nobody."""

    def _drop_node(self, node: TreeNode) -> None:
        """Nothing."""


def test_a_cache_on_trial_is_watched_before_it_does_anything() -> None:
    target = target_of(parts=CoreParts(cache=ForgetsToFree))
    served(target, Admit(1, PROMPT, OUTPUT))
    served(target, Finish(1))
    assert type(target.cache).__name__ == "ForgetsToFree"
    (node,) = tree(target).nodes
    target.cache._drop_node(next(iter(target.cache.walk())))
    assert tree(target).nodes == (node,)


# --- what the view shows -------------------------------------------------------------------------


def spelled(nodes: Sequence[NodeView], place: int) -> list[int]:
    """The tokens from the root to the end of a node."""
    node = nodes[place]
    assert node.parent < place
    above = spelled(nodes, node.parent) if node.parent >= 0 else []
    assert node.start == len(above)
    return above + node.tokens.tolist()


def test_the_view_shows_nodes_parents_first_and_their_pages() -> None:
    branch: Text = ((7, 8), (4, 4))
    target = after(
        *(Admit(1, LONGER, OUTPUT), Finish(1)),
        *(Admit(2, branch, OUTPUT), Finish(2)),
    )
    nodes = tree(target).nodes
    assert all(node.aligned and node.state == "live" for node in nodes)
    prefixes = [spelled(nodes, place) for place in range(len(nodes))]
    assert [len(prefix) for prefix in prefixes] == [node.end for node in nodes]
    assert [prefix for prefix in prefixes if len(prefix) == 8] == [texts.token_ids(PROMPT, 0, 8)]
    ends = sorted(prefix for prefix in prefixes if len(prefix) == 12)
    assert ends == sorted(texts.token_ids(text, 0, 12) for text in (LONGER, branch))
    pages = [page for node in nodes for page in node.pages]
    free = target.view(stamps=False).host().full_free
    assert sorted(pages + free) == list(range(1, SERVING.full_pages + 1))


def test_the_view_shows_what_requests_and_the_cache_say_of_themselves() -> None:
    target = after(Admit(1, LONGER, OUTPUT), Finish(1), Admit(2, PROMPT, OUTPUT), Speculate(2, 3))
    shown = tree(target)
    (request,) = shown.requests.values()
    matched = request.prefix
    assert (request.kv_len, request.allocated, request.evicted) == (8, 11, 0)
    assert request.lock == matched
    assert all(node.full_locks == (node.end <= matched) for node in shown.nodes)
    assert matched == 6
    window_from = (matched - W) // P * P
    assert all(
        node.swa_locks == (window_from <= node.start and node.end <= matched)
        for node in shown.nodes
    )
    assert (shown.swa_protected, shown.total[1]) == (matched - window_from, 12)
    assert shown.total[0] == 12
    assert (shown.full_protected, shown.full_evictable) == (matched, 12 - matched)


def test_the_view_does_not_change_with_the_target() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1))
    shown = tree(target)
    served(target, Evict(8, 8))
    assert len(shown.nodes) == 1
    assert shown.nodes[0].tokens.tolist() == texts.token_ids(PROMPT, 0, 8)


def test_a_value_that_is_not_whole_pages_is_shown_as_such() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1))
    node = next(iter(target.cache.walk()))
    pages = tree(target).nodes[0].pages
    node.value[5] = node.value[2]
    (seen,) = tree(target).nodes
    assert not seen.aligned
    assert seen.pages == pages
    node.value = node.value[:3]
    (seen,) = tree(target).nodes
    assert not seen.aligned
    assert seen.pages == pages[:2]


def test_an_error_while_looking_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    target = after(Admit(1, PROMPT, OUTPUT))

    def broken() -> int:
        raise ArithmeticError("no such size")

    monkeypatch.setattr(target.cache, "full_evictable_size", broken)
    with pytest.raises(ArithmeticError, match="no such size"):
        target.view(stamps=False)


def test_a_flush_leaves_nothing_and_is_no_eviction_on_demand() -> None:
    target = after(Admit(1, PROMPT, OUTPUT), Finish(1), Flush())
    assert tree(target).nodes == ()
    host = target.view(stamps=False).host()
    assert len(host.full_free) == SERVING.full_pages
    assert len(host.swa_free) == SERVING.swa_pages


def test_the_contract_is_of_requests_and_groups() -> None:
    assert target_of().contract.ops == {*REQUEST_OP_KINDS, "group_begin", "group_end"}
    assert target_of().contract.hostile == frozenset()


def test_an_op_of_another_level_is_a_mistake_of_the_harness() -> None:
    with pytest.raises(RuntimeError, match="must not name"):
        target_of().apply(ops.Alloc(1, 1))

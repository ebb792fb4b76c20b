"""What the model remembers after right answers: the cache, rows, cursors, groups, host copies.

Expected values follow from the meaning of the op: pages of 4 tokens, and a window of 6, which whole
pages hold in two of them. Page numbers are read from the model, never typed.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.models import Contract, Served, ops
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
from kvcore.models.state import NO_PEER, UNKNOWN
from kvcore.models.texts import stamps

LONG = ((1, 21),)
"""Five pages and a token."""
BEGIN, END = ops.GroupBegin(), ops.GroupEnd()


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve(full_pages=24, swa_pages=24)


def states(server: Any, text: Any = LONG) -> str:
    """The cached pages of a text, a letter each: Live, Tombstone, or coming."""
    letters = {"live": "L", "tombstone": "T", "loading": "c"}
    model = server.model
    return "".join(letters[node.state] for node in model.tree.path(model.keys(text)))


def cached(server: Any, text: Any = LONG) -> list[int]:
    """The full pages of the cached front of a text."""
    model = server.model
    return [node.page.full for node in model.tree.path(model.keys(text))]


def full_row(server: Any, req: int) -> list[int]:
    return [page.full for page in server.model.rows[req].pages]


def swa_row(server: Any, req: int) -> list[int]:
    return [page.swa for page in server.model.rows[req].pages]


def tombstones(server: Any, count: int = 3) -> None:
    """Caches `LONG` with tombstones in front: a request of it slides before it finishes."""
    server.do(Admit(1, LONG, 5), Slide((1,)), Finish(1))
    assert states(server) == "T" * count + "L" * (5 - count)


# Requests that run.


def test_a_new_request_begins_with_the_pages_that_the_cache_serves(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Finish(1), Admit(2, ((1, 14), (2, 3)), 5))
    model = server.model
    assert model.live[2].prefix == 12
    assert full_row(server, 2)[:3] == cached(server)[:3]
    assert [node.full_locks for node in model.live[2].path] == [1, 1, 1]
    assert [node.swa_locks for node in model.live[2].path] == [0, 1, 1]
    own = model.rows[2].pages[3:]
    assert [stamp for page in own for stamp in page.full_stamps] == stamps(
        ((1, 14), (2, 3)), 12, 17
    )


def test_nothing_is_asked_of_contents_that_a_target_does_not_show(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Finish(1))
    op = Admit(2, LONG, 5)
    server.model.accept(op, msgspec.structs.replace(server.answer(op), prefix_stamps=((), ())))
    assert server.model.live[2].prefix == 20


def test_at_least_one_token_of_a_prompt_is_computed(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Finish(1), Admit(2, ((1, 20),), 5))
    assert server.model.live[2].prefix == 16


def test_what_a_request_is_known_to_be_is_its_prompt_and_what_it_generated(server: Any) -> None:
    server.do(Admit(1, LONG, 5, 4))
    assert server.model.live[1].known_text == LONG
    server.do(Prefill(1, 99))
    assert server.model.live[1].known_text == LONG
    server.do(DecodeStep((1,)), DecodeStep((1,)))
    assert server.model.live[1].known_text == (*LONG, (5, 2))


def test_a_chunk_ends_where_it_says_or_with_the_prompt(server: Any) -> None:
    server.do(Admit(1, LONG, 5, 6), Prefill(1, 3))
    assert server.model.live[1].kv_len == 9
    server.do(Prefill(1, 99))
    assert server.model.live[1].kv_len == 21


def test_a_decode_goes_on_in_the_last_page_or_begins_one(server: Any) -> None:
    server.do(Admit(1, ((1, 3),), 5), Admit(2, ((2, 4),), 5))
    server.do(DecodeStep((2, 1)))
    assert [page.tokens for page in server.model.rows[1].pages] == [4]
    assert [page.tokens for page in server.model.rows[2].pages] == [4, 1]
    text = ((2, 4), (5, 1))
    assert server.model.rows[2].pages[1].full_stamps == stamps(text, 4, 5)
    assert server.model.live[2].known_text == text


@pytest.mark.parametrize(
    ("window", "cursor"), [(1, 16), (4, 16), (5, 12), (6, 12), (8, 12), (9, 8), (20, 0), (99, 0)]
)
def test_a_slide_leaves_one_window_before_the_last_whole_page(
    serve: Callable[..., Any], window: int, cursor: int
) -> None:
    server = serve(window=window)
    server.do(Admit(1, ((1, 22),), 5), Slide((1,)))
    assert server.model.live[1].cursor == cursor
    assert [swa > 0 for swa in swa_row(server, 1)] == [n * 4 >= cursor for n in range(6)]


def test_a_slide_leaves_what_the_cache_owns_alone(server: Any) -> None:
    server.do(Admit(1, LONG, 5), CacheUnfinished(1), Slide((1,)))
    assert states(server) == "LLLLL"
    assert server.model.live[1].cursor == 12


def test_drafts_have_slots_and_no_contents_yet(server: Any) -> None:
    server.do(Admit(1, ((1, 3),), 5), Speculate(1, 3))
    pages = server.model.rows[1].pages
    assert [page.tokens for page in pages] == [4, 2]
    assert pages[1].full_stamps == pages[1].swa_stamps == [UNKNOWN] * 2
    assert (server.model.live[1].kv_len, server.model.live[1].allocated) == (3, 6)


@pytest.mark.parametrize(("accepted", "tokens"), [(0, [3]), (1, [4]), (2, [4, 1]), (6, [4, 4, 1])])
def test_a_trim_keeps_what_was_accepted_and_frees_the_pages_of_the_rest(
    server: Any, accepted: int, tokens: list[int]
) -> None:
    server.do(Admit(1, ((1, 3),), 5), Speculate(1, 6), Trim(1, accepted))
    pages = server.model.rows[1].pages
    assert [page.tokens for page in pages] == tokens
    wanted = stamps(((1, 3), (5, 9)), 0, 3 + accepted)
    assert [stamp for page in pages for stamp in page.full_stamps] == wanted
    assert [stamp for page in pages for stamp in page.swa_stamps] == wanted
    assert len(server.model.full.free) == 24 - len(tokens)


# Pages that go to the cache.


def test_a_request_goes_on_over_what_it_has_cached(server: Any) -> None:
    server.do(Admit(1, LONG, 5), CacheUnfinished(1))
    model = server.model
    assert states(server) == "LLLLL"
    assert full_row(server, 1)[:5] == cached(server)
    assert (model.live[1].prefix, model.live[1].lock) == (20, 20)
    assert [node.swa_locks for node in model.live[1].path] == [0, 0, 0, 1, 1]


def test_nothing_happens_when_no_page_was_completed_since(server: Any) -> None:
    server.do(Admit(1, LONG, 5), CacheUnfinished(1))
    before = server.snapshot()
    assert server.do(CacheUnfinished(1)).matched == 20
    assert server.snapshot() == before


def test_duplicates_are_freed_and_the_row_goes_on_over_the_others(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Admit(2, LONG, 5), CacheUnfinished(1))
    own = full_row(server, 2)
    server.do(CacheUnfinished(2))
    assert full_row(server, 2) == [*full_row(server, 1)[:5], own[5]]
    assert server.model.rows[2].pages[0] is server.model.rows[1].pages[0]
    assert set(own[:5]) <= server.model.full.free


def test_what_slid_away_is_cached_as_tombstones(server: Any) -> None:
    tombstones(server)
    assert server.model.tree.swa_evictable == 2


def test_a_finish_frees_the_last_page_and_drafts(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Speculate(1, 9), Finish(1))
    assert len(server.model.full.free) == 24 - 5
    assert len(server.model.requests.free) == 4


def test_an_abort_leaves_nothing(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Slide((1,)), Abort(1))
    assert len(server.model.full.free) == len(server.model.swa.free) == 24
    assert states(server) == ""


def test_an_unlocked_tombstone_is_replaced_by_the_page_that_was_computed_again(
    server: Any,
) -> None:
    tombstones(server)
    old = cached(server)
    # Too short to be served from what is cached, so all of it is computed again.
    server.do(Admit(2, ((1, 13),), 5))
    own = full_row(server, 2)
    server.do(Finish(2))
    assert states(server) == "LLLLL"
    assert cached(server) == own[:3] + old[3:]
    assert set(old[:3]) <= server.model.full.free


def test_a_locked_tombstone_keeps_its_page_and_takes_the_peer(server: Any) -> None:
    tombstones(server)
    server.do(Admit(2, LONG, 5, 1), Admit(3, ((1, 13),), 5))
    assert server.model.live[2].prefix == 20
    old, own, peers = cached(server), full_row(server, 3), swa_row(server, 3)
    server.do(Finish(3))
    assert cached(server) == old
    assert states(server) == "LLLLL"
    # The request that holds it has the peers in its row from then on.
    assert swa_row(server, 2)[:3] == peers[:3]
    assert set(own) <= server.model.full.free


def test_only_what_still_has_its_peers_recovers_tombstones(server: Any) -> None:
    tombstones(server, 3)
    server.do(Admit(2, ((1, 17),), 5), Slide((2,)), Finish(2))
    assert states(server) == "TTLLL"


def test_a_page_longer_than_the_window_is_never_left_as_a_bare_tombstone(
    serve: Callable[..., Any],
) -> None:
    server = serve(window=2)
    server.do(Admit(1, ((1, 4),), 5), Slide((1,)), Finish(1))
    assert states(server) == "L"


# What the cache gives up.


def test_a_branch_goes_from_its_end_and_bare_tombstones_with_it(server: Any) -> None:
    tombstones(server)
    answer = server.do(Evict(8, 0))
    assert len(answer.evicted) == 5
    assert states(server) == ""
    assert len(server.model.full.free) == 24


def test_a_page_may_lose_its_peer_and_go_in_the_same_eviction(server: Any) -> None:
    server.do(Admit(1, ((1, 9),), 5), Finish(1))
    first, last = cached(server)
    answer = Served(evicted=(last, first), tombstoned=(first,))
    server.model.accept(Evict(0, 8), answer)
    assert states(server) == ""
    assert len(server.model.swa.free) == 24


def test_an_admission_evicts_what_it_lacks(serve: Callable[..., Any]) -> None:
    server = serve(seed=3)
    server.do(Admit(1, LONG, 5), Finish(1), Admit(2, ((2, 40),), 5))
    assert len(cached(server)) == 2


def test_a_flush_gives_up_everything(server: Any) -> None:
    tombstones(server)
    server.do(Flush())
    assert states(server) == ""
    assert server.model.room() == (96, 96)


# Groups.


def test_what_goes_inside_a_group_waits_for_its_end(server: Any) -> None:
    tombstones(server)
    server.do(BEGIN, Evict(100, 0))
    assert server.model.room() == (76, 88)
    assert len(server.model.full.pending) == 5
    server.do(END)
    assert server.model.room() == (96, 96)


@pytest.mark.parametrize("joins", [True, False])
def test_swa_slots_that_go_alone_wait_if_the_contract_says_so(
    serve: Callable[..., Any], joins: bool
) -> None:
    contract = Contract(ops=frozenset(SERVING_OP_KINDS), free_swa_joins_group=joins)
    server = serve(contract=contract)
    server.do(Admit(1, LONG, 5), BEGIN, Slide((1,)))
    assert len(server.model.swa.pending) == (3 if joins else 0)
    assert len(server.model.swa.free) == (6 if joins else 9)
    assert len(server.model.detached) == (3 if joins else 0)


@pytest.mark.parametrize("joins", [True, False])
def test_full_slots_of_a_locked_recovery_wait_if_the_contract_says_so(
    serve: Callable[..., Any], joins: bool
) -> None:
    contract = Contract(ops=frozenset(SERVING_OP_KINDS), full_side_joins_group=joins)
    server = serve(full_pages=24, swa_pages=24, contract=contract)
    tombstones(server)
    server.do(Admit(2, LONG, 5, 1), Admit(3, ((1, 13),), 5))
    own = set(full_row(server, 3)[:3])
    server.do(BEGIN, Finish(3))
    model = server.model
    assert own <= (model.full.pending if joins else model.full.free)
    server.do(END)
    assert own <= model.full.free


@pytest.mark.parametrize("seen", ["old", "none", "some"])
def test_a_peer_given_up_in_the_open_group_may_still_be_seen(server: Any, seen: str) -> None:
    server.do(Admit(1, LONG, 5), Finish(1), Admit(2, LONG, 5, 1))
    first = server.model.live[2].path[0]
    swa, peers = first.page.swa, swa_row(server, 2)[:5]
    server.do(BEGIN)
    server.model.accept(Evict(0, 4), Served(tombstoned=(first.page.full,)))
    op = CacheUnfinished(2)
    slots = [page * 4 + at for page in peers for at in range(4)]
    left = {"old": [swa * 4 + at for at in range(4)], "none": [0] * 4}
    slots[:4] = left.get(seen, [swa * 4, 0, 0, 0])
    right = server.answer(op)
    server.model.accept(op, msgspec.structs.replace(right, prefix_peers=tuple(slots)))
    assert first.page.swa == 0


# Requests that wait.


@pytest.mark.parametrize("backup", [True, False])
def test_a_retracted_request_holds_nothing_and_comes_back_as_far_as_it_was(
    server: Any, backup: bool
) -> None:
    server.do(Admit(1, LONG, 5), DecodeStep((1,)), RetractRequest(1, backup))
    model = server.model
    assert model.room() == (96, 96)
    assert len(model.requests.free) == 4
    server.do(ResumeRequest(1))
    running = model.live[1]
    assert (running.kv_len, running.prefix) == (22, 0)
    assert running.known_text == ((1, 21), (5, 1))
    # From a backup, peers come back for the last window alone.
    assert running.cursor == (12 if backup else 0)
    bare = 3 if backup else 0
    assert [swa > 0 for swa in swa_row(server, 1)] == [False] * bare + [True] * (6 - bare)
    for number, page in enumerate(model.rows[1].pages):
        wanted = stamps(((1, 21), (5, 1)), number * 4, min(22, number * 4 + 4))
        assert page.full_stamps == wanted
        assert page.swa_stamps == (wanted if page.swa else [NO_PEER] * 4)


def test_a_request_comes_back_onto_what_the_cache_has_meanwhile(server: Any) -> None:
    server.do(Admit(1, LONG, 5), RetractRequest(1, True), Admit(2, LONG, 5), Finish(2))
    server.do(ResumeRequest(1))
    assert server.model.live[1].prefix == 20
    assert full_row(server, 1)[:5] == cached(server)


def test_without_a_backup_the_last_token_is_computed_again(server: Any) -> None:
    text = ((1, 20),)
    server.do(Admit(1, text, 5), RetractRequest(1, False), Admit(2, LONG, 5), Finish(2))
    server.do(ResumeRequest(1))
    assert server.model.live[1].prefix == 16


def test_with_a_backup_all_of_a_request_may_be_cached(server: Any) -> None:
    text = ((1, 20),)
    server.do(Admit(1, text, 5), RetractRequest(1, True), Admit(2, LONG, 5), Finish(2))
    answer = server.do(ResumeRequest(1))
    assert (answer.matched, answer.slots) == (20, ())


# Host copies.


def copy_of_long(server: Any) -> None:
    """Copies `LONG`, whose last window begins with token 12, and empties the cache."""
    server.do(Admit(1, LONG, 5), Finish(1), SavePrefix(1, LONG), Evict(100, 0))


def test_a_load_holds_pages_that_nobody_may_read_yet(server: Any) -> None:
    copy_of_long(server)
    server.do(LoadPrefix(1, 1))
    pages = server.model.loads[1].pages
    assert [page.swa > 0 for page in pages] == [False] * 3 + [True] * 2
    assert pages[3].full_stamps == pages[3].swa_stamps == [UNKNOWN] * 4
    assert states(server) == ""
    assert dict(server.model.lent_pages()).keys() == {-1}


def test_a_load_that_arrives_is_cached_with_its_last_window_live(server: Any) -> None:
    copy_of_long(server)
    server.do(LoadPrefix(1, 1), EndLoad(1))
    assert states(server) == "TTTLL"
    nodes = server.model.tree.path(server.model.keys(LONG))
    assert [stamp for node in nodes for stamp in node.page.full_stamps] == stamps(LONG, 0, 20)
    assert nodes[4].page.swa_stamps == stamps(LONG, 16, 20)
    assert [node.full_locks for node in nodes] == [0] * 5


def test_a_load_that_fails_gives_everything_back(server: Any) -> None:
    copy_of_long(server)
    server.do(LoadPrefix(1, 1), EndLoad(1, failed=True))
    assert server.model.room() == (96, 96)
    assert states(server) == ""


def reopened(server: Any) -> None:
    """`LONG` is cached as two live pages and three tombstones, held by request 2 at its very end,
    and a load of the first four pages is on its way to the tombstones among them."""
    server.do(Admit(1, LONG, 5), Finish(1), SavePrefix(1, ((1, 16),)), Admit(2, LONG, 5, 1))
    path = server.model.live[2].path
    bare = tuple(node.page.full for node in path[:3])
    server.model.accept(Evict(0, 12), Served(tombstoned=bare))
    assert states(server) == "TTTLL"
    server.do(LoadPrefix(1, 1))
    assert states(server) == "TTcLL"


def test_tombstones_in_the_last_window_of_a_copy_get_new_peers(server: Any) -> None:
    reopened(server)
    node = server.model.loads[1].loading[0]
    assert node.page.swa_stamps == [UNKNOWN] * 4
    server.do(EndLoad(1))
    assert states(server) == "TTLLL"
    assert node.page.swa_stamps == node.page.full_stamps


def test_tombstones_are_tombstones_again_if_a_load_fails(server: Any) -> None:
    reopened(server)
    server.do(EndLoad(1, failed=True))
    assert states(server) == "TTTLL"


def test_a_request_does_not_recover_what_is_loading(server: Any) -> None:
    reopened(server)
    server.do(Admit(3, ((1, 13),), 5))
    own = full_row(server, 3)
    server.do(Finish(3))
    assert states(server) == "LLcLL"
    assert own[2] in server.model.full.free


def test_a_request_keeps_its_pages_while_its_last_window_is_loading(server: Any) -> None:
    reopened(server)
    server.do(Admit(3, ((1, 13),), 5))
    before = server.snapshot()
    assert server.do(CacheUnfinished(3)).matched == 0
    assert server.snapshot() == before
    server.do(EndLoad(1), CacheUnfinished(3))
    assert server.model.live[3].prefix == 12


def test_what_others_cached_meanwhile_stays_and_the_loads_pages_go(server: Any) -> None:
    copy_of_long(server)
    server.do(LoadPrefix(1, 1), Admit(2, LONG, 5), Finish(2))
    theirs = cached(server)
    server.do(EndLoad(1))
    assert cached(server) == theirs
    assert states(server) == "LLLLL"
    assert len(server.model.full.free) == 24 - 5


def test_a_tombstone_that_only_a_failed_load_held_goes_with_it(server: Any) -> None:
    server.do(Admit(1, LONG, 5), Finish(1), SavePrefix(1, ((1, 16),)), SavePrefix(2, LONG))
    nodes = server.model.tree.path(server.model.keys(LONG))
    bare = tuple(node.page.full for node in nodes[2:4])
    server.model.accept(Evict(0, 8), Served(tombstoned=bare))
    server.do(LoadPrefix(1, 1))
    # What lay behind the tombstones is evicted while the load is on its way to them.
    server.model.accept(Evict(4, 0), Served(evicted=(nodes[4].page.full,)))
    assert states(server) == "LLcc"
    server.do(EndLoad(1, failed=True))
    assert states(server) == "LL"

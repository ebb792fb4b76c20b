"""Properties over whole request-level programs: the model stays a partition, its counters equal a
recount, any part of a program is a program, and a meaningless op is just not allowed.

Answers come from the server of conftest.py, with random free pages and random legal evictions.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.models import Geometry, Refused, ServingModel, model_of, ops
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
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
from kvcore.models.texts import Text, cut, length, stamps

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**32)


def drawn_geometry(rng: random.Random) -> Geometry:
    """Small pools; windows of less than a page, of whole pages, and of neither."""
    size, full = rng.choice((1, 2, 4)), rng.randint(4, 16)
    window = rng.choice((1, size, size + 1, 2 * size, 3 * size - 1))
    swa = rng.randint(3, full)
    return Geometry(size, full, swa, requests=rng.randint(1, 4), window=window)


def drawn_text(rng: random.Random, model: ServingModel) -> Text:
    """One or two pieces of few streams, or the front of what is known and a piece."""
    known = [it.known_text for it in (*model.live.values(), *model.waiting.values())]
    known += model.tree.texts()
    most = 3 * model.geometry.page_size + model.geometry.window
    text: Text = ((rng.randrange(2), rng.randint(1, most)),)
    if known and rng.random() < 0.8:
        front = rng.choice(known)
        text = cut(front, rng.randint(1, length(front)))
        text = (*text, (rng.randrange(2), rng.randint(1, most))) if rng.random() < 0.5 else text
    return cut(text, min(length(text), model.geometry.context_len))


def drawn(rng: random.Random, model: ServingModel) -> Op:
    """Any op, about what there is, allowed or not."""
    few = rng.choice((1, 2, model.geometry.page_size, 2 * model.geometry.page_size))
    req = rng.choice([*model.live, *model.waiting, 0])
    some = tuple(name for name in model.live if rng.random() < 0.6)
    copy, load = rng.choice([*model.copies, 0]), rng.choice([*model.loads, 0])
    text = drawn_text(rng, model)
    admit = Admit(model.last_name + 1, text, 5 + rng.randrange(2), rng.choice((None, few)))
    return rng.choice(
        (
            *(admit, admit, admit, Prefill(req, few), CacheUnfinished(req), CacheUnfinished(req)),
            *(DecodeStep(some), DecodeStep(some), Slide(some), Slide((req,))),
            *(Speculate(req, few), Trim(req, rng.randint(0, few))),
            *(Finish(req), Finish(req), Abort(req)),
            *(RetractRequest(req, rng.random() < 0.5), ResumeRequest(req), ResumeRequest(req)),
            *(SavePrefix(model.last_copy + 1, text), LoadPrefix(copy, model.last_load + 1)),
            *(EndLoad(load, failed=rng.random() < 0.5), Evict(few, 0), Evict(0, few)),
            *(ops.GroupBegin(), ops.GroupEnd(), ops.GroupEnd(), Flush()),
        )
    )


def walk(server: Any, seed: int, steps: int, check: Callable[[Any], None]) -> list[Op]:
    """A random program, answered by the server; checks the model after each op."""
    rng = random.Random(seed)
    program: list[Op] = []
    for _ in range(steps):
        op = drawn(rng, server.model)
        if server.model.allows(op):
            server.do(op)
            program.append(op)
            check(server)
    return program


def check_pages(server: Any) -> None:
    """Every page and every request row is in exactly one place, and rows begin with the cache's
    own pages."""
    model = server.model
    pages = [page for _, page in model.lent_pages()]
    held = {
        "full": [page.full for page in pages],
        "swa": [page.swa for page in pages if page.swa],
        "requests": [row.request for row in model.rows.values()],
    }
    for name, lent in held.items():
        side = getattr(model, name)
        assert sorted([*side.free, *side.pending, *lent]) == list(range(1, side.total + 1)), name
        assert model.group_open or not side.pending, name
    for name, running in model.live.items():
        front = model.rows[name].pages[: len(running.path)]
        assert all(mine is node.page for mine, node in zip(front, running.path, strict=True))
        assert model.rows[name].tokens == running.allocated


def check_counters(server: Any) -> None:
    """Lock counts and sizes equal a recount over requests, loads and pages."""
    model = server.model
    size, window = model.geometry.page_size, model.geometry.window
    full: Counter[int] = Counter()
    swa: Counter[int] = Counter()
    for holder in (*model.live.values(), *model.loads.values()):
        end = len(holder.path) * size
        begin = max(0, (end - window) // size * size)
        full.update(id(node) for node in holder.path)
        swa.update(id(node) for node in holder.path if (node.depth - 1) * size >= begin)
    nodes = list(model.tree.pages.values())
    assert all(node.full_locks == full[id(node)] for node in nodes)
    assert all(node.swa_locks == swa[id(node)] for node in nodes)
    live = [node for node in nodes if node.state == "live"]
    assert model.tree.live == len(live)
    assert model.tree.full_evictable == sum(node.full_locks == 0 for node in nodes)
    assert model.tree.swa_evictable == sum(node.swa_locks == 0 for node in live)


def check_cache(server: Any) -> None:
    """Each cached page has its peer or not as its state says, what it holds is what its tokens
    are, and no bare tombstone is left at the end of a branch."""
    model = server.model
    size = model.geometry.page_size
    loading = {id(node) for load in model.loads.values() for node in load.loading}
    for full, node in model.tree.pages.items():
        assert node.page.full == full
        assert (node.page.swa > 0) == (node.state != "tombstone")
        assert (node.state == "loading") == (id(node) in loading)
        assert node.children or node.full_locks or node.state == "live"
        if node.state == "live":
            assert node.page.swa_stamps == node.page.full_stamps
    for text in model.tree.texts():
        keys = model.keys(text)
        whole = [stamp for node in model.tree.path(keys) for stamp in node.page.full_stamps]
        assert whole == stamps(text, 0, len(keys) * size)


def check_requests(server: Any) -> None:
    """Cursors and lengths of running requests are in order, and their own pages have a peer from
    the cursor on."""
    model = server.model
    size = model.geometry.page_size
    for name, it in model.live.items():
        assert it.prefix % size == it.cursor % size == 0
        assert it.prefix <= it.kv_len <= it.allocated
        assert it.cursor <= it.kv_len
        for number, page in enumerate(model.rows[name].pages[len(it.path) :], len(it.path)):
            assert (page.swa > 0) == (number * size >= it.cursor)
            start = number * size
            known = it.tokens.stamps(start, min(start + size, it.kv_len))
            assert page.full_stamps[: len(known)] == known


def check_all(server: Any) -> None:
    check_pages(server)
    check_counters(server)
    check_cache(server)
    check_requests(server)


@settings(QUICK, max_examples=25)
@given(seeds)
def test_the_model_is_sound_after_every_op(serve: Callable[..., Any], seed: int) -> None:
    geometry = drawn_geometry(random.Random(seed))
    walk(serve(geometry, seed=seed), seed, 120, check_all)


@settings(QUICK, max_examples=25)
@given(seeds, st.randoms(use_true_random=False))
def test_any_part_of_a_program_is_a_program(
    serve: Callable[..., Any], seed: int, rng: random.Random
) -> None:
    geometry = drawn_geometry(random.Random(seed))
    program = walk(serve(geometry, seed=seed), seed, 80, check_pages)
    server = serve(geometry, seed=seed + 1)
    for op in program:
        if rng.random() < 0.6 and server.model.allows(op):
            server.do(op)
            check_all(server)


@settings(QUICK, max_examples=25)
@given(seeds)
def test_a_program_ends_with_everything_free_and_all_of_it_can_be_lent(
    serve: Callable[..., Any], seed: int
) -> None:
    geometry = drawn_geometry(random.Random(seed))
    server = serve(geometry, seed=seed)
    walk(server, seed, 40, check_pages)
    model = server.model
    for op in model.closing_ops():
        server.do(op)
    assert not model.rows
    assert not model.tree.pages
    assert model.room() == (geometry.full_size, geometry.swa_size)
    outcomes = [server.do(op) for op in model.probing_ops() if model.allows(op)]
    left = min(len(model.full.free), len(model.swa.free))
    assert left == 0 or not model.requests.free
    assert left > 0 or isinstance(outcomes[-1], Refused)
    for op in model.closing_ops():
        server.do(op)
    assert model.room() == (geometry.full_size, geometry.swa_size)


small = st.integers(-2, 4)
texts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=3).map(tuple)
names = st.lists(small, max_size=3).map(tuple)
any_op: st.SearchStrategy[Op] = st.one_of(
    st.builds(Admit, small, texts, small, st.none() | small),
    st.builds(Prefill, small, small),
    st.builds(CacheUnfinished, small),
    st.builds(DecodeStep, names),
    st.builds(Slide, names),
    st.builds(Speculate, small, small),
    st.builds(Trim, small, small),
    st.builds(Finish, small),
    st.builds(Abort, small),
    st.builds(RetractRequest, small, st.booleans()),
    st.builds(ResumeRequest, small),
    st.builds(SavePrefix, small, texts),
    st.builds(LoadPrefix, small, small),
    st.builds(EndLoad, small, st.booleans()),
    st.builds(Evict, small, small),
    st.builds(Flush),
    st.builds(ops.GroupBegin),
    st.builds(ops.GroupEnd),
    st.builds(ops.Clear),
    st.builds(ops.Free, small),
)


@settings(QUICK, max_examples=60)
@given(seeds, st.lists(any_op, max_size=25))
def test_an_op_that_means_nothing_is_just_not_allowed(
    serve: Callable[..., Any], seed: int, program: list[Op]
) -> None:
    server = serve(drawn_geometry(random.Random(seed)), seed=seed)
    for op in program:
        server.model.must_refuse(op)
        if server.model.allows(op):
            server.do(op)
            check_all(server)


@pytest.mark.parametrize("window", [0, 6])
def test_a_geometry_with_a_window_has_a_model_of_whole_requests(window: int) -> None:
    model = model_of(Geometry(4, 8, 8, requests=2, window=window))
    assert isinstance(model, ServingModel) == (window > 0)

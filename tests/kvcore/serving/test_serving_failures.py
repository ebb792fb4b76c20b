"""Whatever fails inside a call, nothing changed (law L5): every inner call is made to fail in turn,
by saying that there is nothing, and by raising."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import GeometryError, serving


class Sabotage(Exception):
    """An inner call that was made to fail."""


class Saboteur:
    """Lets one of the inner calls of an operation fail: the one whose turn it is."""

    def __init__(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        allocator = world.allocator
        self.lending = [
            (world.table, "alloc"),
            (allocator, "alloc_extend"),
            (allocator, "alloc_decode"),
            (allocator.full_attn_allocator, "alloc"),
            (allocator.swa_attn_allocator, "alloc"),
        ]
        self.others = [
            (world.cache, "match_prefix"),
            (world.cache, "find_path"),
            (world.cache, "inc_lock_ref"),
            (world.cache, "evict"),
            (world.cache, "insert"),
            (world.cache, "begin_swa_load"),
            (world.table, "row"),
            (world.table, "write"),
            (allocator, "set_full_to_swa_mapping"),
            (world.pool, "get_cpu_copy"),
            (world.pool, "load_cpu_copy"),
        ]

    def failures(self, call: Callable[[], object], state: Callable[[], Any]) -> list[str]:
        """Which inner calls were made to fail, until the operation met none that does."""
        failed: list[str] = []
        for turn in range(100):
            before = state()
            with self.monkeypatch.context() as patch:
                told = self._patch(patch, turn)
                try:
                    answer = call()
                except Sabotage:
                    answer = None
            if not told:
                assert answer is not None, "nothing failed, and the operation did"
                return failed
            assert answer is None, f"{told}: failed unnoticed"
            assert state() == before, f"{told}: something changed"
            failed += told
        raise AssertionError("an operation of a hundred inner calls")

    def _patch(self, patch: pytest.MonkeyPatch, turn: int) -> list[str]:
        told: list[str] = []
        calls = 0

        def sabotaged(owner: Any, name: str, *, lends: bool) -> Callable[..., Any]:
            real = getattr(owner, name)

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                mine, calls = calls, calls + 1 + lends
                if mine == turn:
                    told.append(f"{name} raised")
                    raise Sabotage(name)
                if lends and mine + 1 == turn:
                    told.append(f"{name} had nothing")
                    return None
                return real(*args, **kwargs)

            return wrapper

        for lends, group in ((True, self.lending), (False, self.others)):
            for owner, name in group:
                patch.setattr(owner, name, sabotaged(owner, name, lends=lends))
        return told


@pytest.fixture
def saboteur(world: Any, monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    return Saboteur(world, monkeypatch)


LENDS = ["alloc raised", "alloc had nothing"]
MATCHES = ["match_prefix raised", "inc_lock_ref raised"]


def test_an_admission_that_fails_changes_nothing(world: Any, saboteur: Saboteur) -> None:
    text = world.text((1, world.pages(2)))
    world.serve(text)
    new = world.request([*text, 1, 2])
    failed = saboteur.failures(lambda: world.admit(new), lambda: world.state(new))
    extends = ["alloc_extend raised", "alloc_extend had nothing"]
    assert failed == [*MATCHES, *LENDS, *extends, "write raised"]


def test_a_step_that_fails_changes_nothing(world: Any, saboteur: Saboteur) -> None:
    text = world.text((1, world.pages(3)))
    request = world.request(text)
    world.admit(request, world.pages(1) + 1)
    other = world.start([5])
    extends = ["row raised", "alloc_extend raised", "alloc_extend had nothing", "write raised"]

    prefill = saboteur.failures(lambda: world.prefill(request, 1000), world.state)
    assert prefill == extends
    for each in (request, other):
        each.extend_tokens([6])
    decode = saboteur.failures(lambda: world.decode(request, other), world.state)
    assert decode == ["alloc_decode raised", "alloc_decode had nothing", "write raised"]
    speculate = saboteur.failures(lambda: world.speculate(request, 6), world.state)
    assert speculate == extends


def test_a_retraction_that_fails_changes_nothing(world: Any, saboteur: Saboteur) -> None:
    request = world.start(world.text((1, world.pages(2) + 1)))
    chunks = -(-request.kv_len // world.page_size)
    failed = saboteur.failures(
        lambda: (world.retract(request, backup=True), "done"), lambda: world.state(request)
    )
    assert failed[: 1 + chunks] == ["row raised", *["get_cpu_copy raised"] * chunks]


def test_a_resumption_that_fails_changes_nothing(world: Any, saboteur: Saboteur) -> None:
    text = world.text((1, world.pages(2)))
    world.serve(text)
    request = world.start([*text, *world.text((2, world.pages(1) + 1))])
    world.retract(request, backup=True)
    failed = saboteur.failures(lambda: world.resume(request), lambda: world.state(request))
    chunks = ["load_cpu_copy raised"] * 2
    taken = [*LENDS, *LENDS, "set_full_to_swa_mapping raised"]
    assert failed == [*MATCHES, *LENDS, *taken, *chunks, "write raised"]

    world.retract(request, backup=False)
    failed = saboteur.failures(lambda: world.resume(request), lambda: world.state(request))
    assert failed[-1] == "write raised"


def test_a_load_that_does_not_begin_changes_nothing(world: Any, saboteur: Saboteur) -> None:
    base, tail = world.text((1, world.pages(3))), world.text((2, world.pages(1)))
    world.serve([*base, *tail])
    copy = world.save([*base, *tail])
    world.evict(world.pages(4))
    world.tombstones(base, world.text((3, world.pages(3))))
    failed = saboteur.failures(lambda: world.begin_load(copy), world.state)
    taken = [*LENDS, *LENDS, "set_full_to_swa_mapping raised"]
    reopened = [] if world.window <= world.page_size else ["begin_swa_load raised"]
    assert failed == ["find_path raised", "inc_lock_ref raised", *taken, *reopened]


def test_a_load_that_does_not_end_is_still_in_flight(world: Any, saboteur: Saboteur) -> None:
    text = world.text((1, world.pages(3)))
    world.serve(text)
    copy = world.save(text)
    world.evict(world.pages(3))
    load = world.begin_load(copy)
    failed = saboteur.failures(lambda: (world.end_load(load), "done"), world.state)
    assert failed == [*["load_cpu_copy raised"] * 3, "insert raised"]
    assert world.match(text) == world.pages(3)


def test_under_pressure_an_eviction_that_fails_changes_nothing(
    world: Any, saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in range(1, 5):
        world.serve(world.text((stream, world.pages(3))))
    new = world.request(world.text((9, world.pages(2))))
    failed: list[str] = []

    def only_eviction(patch: pytest.MonkeyPatch, turn: int) -> list[str]:
        told: list[str] = []
        if turn == 0:

            def evict(*_: Any) -> None:
                told.append("evict raised")
                raise Sabotage

            patch.setattr(world.cache, "evict", evict)
        return told

    monkeypatch.setattr(saboteur, "_patch", only_eviction)
    failed = saboteur.failures(lambda: world.admit(new), lambda: world.state(new))
    assert failed == ["evict raised"]


# -- bad input -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named_and_changes_nothing(world: Any) -> None:
    longest = world.table.max_context_len
    running = world.start(world.text((1, 3)))
    long, empty = world.request([1] * (longest + 1)), world.request([])
    before = world.state(long, empty)
    calls: dict[str, Callable[[], object]] = {
        "admit: a request without tokens": lambda: world.admit(empty),
        f"admit: {longest + 1} tokens; expected at most {longest}": lambda: world.admit(long),
        "admit: expected num_tokens >= 1, got 0": lambda: world.admit(world.request([1]), 0),
        "admit: expected num_tokens >= 1, got -1": lambda: world.admit(world.request([1]), -1),
        "admit: expected an integer num_tokens": lambda: world.admit(world.request([1]), 1.5),
        "prefill: all 3 known tokens": lambda: world.prefill(running, 1),
        "prefill: expected num_tokens >= 1": lambda: world.prefill(running, 0),
        "decode: token 4 of a request of 3": lambda: serving.decode(world.cache, [running]),
        "speculate: expected num_tokens >= 1": lambda: world.speculate(running, 0),
        f"speculate: {longest + 1} tokens": lambda: world.speculate(running, longest - 2),
    }
    for message, call in calls.items():
        with pytest.raises(GeometryError, match=message):
            call()
    assert world.state(long, empty) == before


def test_a_row_that_is_full_takes_no_token_more(world: Any) -> None:
    world.table.max_context_len = 5
    request = world.start([1, 2, 3, 4, 5])
    request.extend_tokens([6])
    with pytest.raises(GeometryError, match="decode: 6 tokens; expected at most 5"):
        serving.decode(world.cache, [request])
    with pytest.raises(GeometryError, match="prefill: 6 tokens; expected at most 5"):
        serving.prefill(world.cache, request, 1)


def test_a_request_twice_in_a_batch_is_refused(world: Any) -> None:
    request = world.start([1])
    request.extend_tokens([2])
    before = world.state()
    for call in (serving.decode, serving.slide_windows):
        with pytest.raises(Exception, match=f"{call.__name__}: a request named twice"):
            call(world.cache, [request, request])
    assert world.state() == before

"""Which allocators serve requests: kvcore's own, faulty ones, releases where they are unpacked, and
anybody's; each runs the same day of requests, and its own laws are the machine's business.

Leaves out what the ops answer: test_serving.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.models import Contract, Done, Geometry, Refused, ops
from kvcore.models.ops import Op
from kvcore.models.outcomes import Outcome, Served
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
from kvcore.models.texts import Text
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.faults import FAULTS
from kvcore.targets.field import ALL_CALLS, field_target
from kvcore.targets.pool import build_pool
from kvcore.targets.protocol import Target, UnsupportedGeometry
from kvcore.targets.registry import MACHINES, machines, open_target, ways
from kvcore.targets.serving import ServingTarget
from kvcore.targets.serving_allocator import DialectAllocator
from kvcore.targets.serving_targets import (
    pools_of,
    serving_core_target,
    serving_release_target,
)
from kvcore.targets.sglang.release import Release, load_release

torch.set_num_threads(1)

SIZES = (1, 2, 4)
FIRST: Text = ((7, 8),)
SECOND: Text = ((7, 8), (9, 5))

DAY: tuple[Op, ...] = (
    *(Admit(1, SECOND, 3), Finish(1), SavePrefix(1, SECOND), Evict(0, 8)),
    *(Admit(2, (*SECOND, (2, 3)), 4, 6), Prefill(2, 1), CacheUnfinished(2)),
    *(Admit(3, FIRST, 5), DecodeStep((3,)), DecodeStep((3,)), Slide((3,))),
    *(Speculate(3, 4), Trim(3, 1), RetractRequest(3, backup=True), ResumeRequest(3)),
    *(ops.GroupBegin(), Finish(3), Abort(2), ops.GroupEnd()),
    *(Admit(4, (*FIRST, (1, 1)), 6), RetractRequest(4, backup=False), ResumeRequest(4)),
    *(Finish(4), Evict(64, 0), LoadPrefix(1, 1), EndLoad(1), Flush()),
)
"""A program with every op."""


def serving(page_size: int, *, attention: str = "mha") -> Geometry:
    chosen = {"attention": attention} if attention != "mha" else {}
    return Geometry(page_size, 48 // page_size, 36 // page_size, requests=3, window=3, **chosen)


def run(target: Target, program: tuple[Op, ...] = DAY) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for op in program:
        outcome = target.apply(op)
        assert isinstance(outcome, Served | Done), (op, outcome)
        outcomes.append(outcome)
    return outcomes


def is_drained(target: Target) -> bool:
    """Whether every page and every row is free and nothing is cached."""
    view = target.view(stamps=False)
    assert view.tree is not None
    host, geometry = view.host(), target.geometry
    return (
        sorted(host.full_free) == list(range(1, geometry.full_pages + 1))
        and sorted(host.swa_free) == list(range(1, geometry.swa_pages + 1))
        and len(host.request_free) == geometry.requests
        and view.tree.nodes == ()
    )


# --- kvcore's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize("name", ["kvcore", "kvcore#unchecked", "kvcore#torch"])
def test_kvcore_serves_every_op_and_drains(name: str, page_size: int) -> None:
    target = open_target(name)(serving(page_size))
    assert target.name == name
    run(target)
    assert is_drained(target)
    target.close()


@pytest.mark.parametrize("attention", ["mla", "dsa"])
def test_every_kind_of_attention_serves(attention: str) -> None:
    target = open_target("kvcore")(serving(2, attention=attention))
    run(target)
    assert is_drained(target)


def through_a_dialect(geometry: Geometry) -> ServingTarget:
    """kvcore's allocator, called as a foreign one is."""
    built = core_target(pools_of(geometry))
    own = built.dialect

    class Unknown:
        """The same calls of an unknown family."""

        def __getattr__(self, name: str) -> object:
            return own.__getattribute__(name)

    inner = AllocatorTarget("foreign", built.geometry, built.contract, Unknown(), built.pool)
    return ServingTarget(inner, geometry, name="foreign")


@pytest.mark.parametrize("page_size", SIZES)
def test_a_dialect_serves_as_the_allocator_itself_does(page_size: int) -> None:
    geometry = serving(page_size)
    assert run(through_a_dialect(geometry)) == run(serving_core_target(geometry))


def test_each_side_lends_and_takes_back_alone() -> None:
    inner = core_target(pools_of(serving(2)))
    allocator = DialectAllocator(
        inner.dialect,
        inner.contract,
        page_size=2,
        device=inner.pool.device,
        kvcache=inner.pool.kvcache,
    )
    for side, room in (
        (allocator.full_attn_allocator, allocator.full_available_size),
        (allocator.swa_attn_allocator, allocator.swa_available_size),
    ):
        before = room()
        slots = side.alloc(4)
        assert slots is not None
        assert len(slots) == 4
        assert room() == before - 4
        side.free(slots)
        assert room() == before
        assert side.alloc(before + 2) is None


def test_an_allocator_that_lacks_a_call_serves_nobody() -> None:
    inner = core_target(pools_of(serving(2)))
    for contract in (Contract(ops=frozenset(("extend", "free"))), Contract(locked_recovery=False)):
        with pytest.raises(UnsupportedGeometry, match=r"has no (decode, .*recover|recovery of)"):
            DialectAllocator(
                inner.dialect,
                contract,
                page_size=2,
                device=inner.pool.device,
                kvcache=inner.pool.kvcache,
            )


def test_calls_of_allocators_and_requests_over_a_cache_are_two_levels() -> None:
    with pytest.raises(UnsupportedGeometry, match="window 3"):
        core_target(serving(2))
    with pytest.raises(UnsupportedGeometry):
        open_target("kvcore#wrapped")(serving(4))


# --- known faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [f.id for f in FAULTS.values() if f.machine == "hybrid"])
def test_a_faulty_allocator_or_pool_serves_requests_too(fault: str) -> None:
    target = open_target(f"fault:{fault}")(serving(2))
    assert isinstance(target, ServingTarget)
    assert target.name == f"fault:{fault}"
    served = target.apply(Admit(1, FIRST, 3))
    assert isinstance(served, Served)


LEAK: tuple[Op, ...] = (
    *(Admit(1, SECOND, 3), Admit(2, SECOND, 4), CacheUnfinished(1)),
    *(ops.GroupBegin(), Evict(0, 8), Finish(2), ops.GroupEnd()),
)
"""sglang#36081 as requests reach it: in one group the cache gives up peers of a prefix that is in
use, and another request that has computed the same tokens brings them back."""


def lost_pages(target: Target) -> set[int]:
    """SWA pages that are neither free nor mapped."""
    host = target.view(stamps=False).host()
    mapped = {slot // target.geometry.page_size for slot in host.mapping if slot > 0}
    return set(range(1, target.geometry.swa_pages + 1)) - mapped - set(host.swa_free)


@pytest.mark.parametrize("page_size", SIZES)
def test_the_leak_of_a_release_is_reached_by_requests(page_size: int) -> None:
    faulty, sound = (
        open_target(name)(serving(page_size)) for name in ("fault:deferred-peer-lookup", "kvcore")
    )
    run(faulty, LEAK)
    run(sound, LEAK)
    assert lost_pages(faulty)
    assert not lost_pages(sound)


# --- releases ------------------------------------------------------------------------------------


UNPACKED = [Path(d) for d in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if d]


def release_at_least(version: str, *, beyond: str = "99") -> Path:
    for directory in UNPACKED:
        release = load_release(directory)
        if release.version_at_least(version) and not release.version_at_least(beyond):
            return directory
    pytest.skip(f"KVCORE_SGLANG_DIRS names no unpacked sglang from {version} to {beyond}")


@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize("mode", ["", "#exhaustion"])
def test_a_release_serves_every_op(mode: str, page_size: int) -> None:
    target = open_target(f"sglang:{release_at_least('0.5.19')}{mode}")(serving(page_size))
    run(target)
    assert is_drained(target)


@pytest.mark.parametrize("page_size", SIZES)
def test_the_oldest_release_that_serves_runs_every_op_and_leaks(page_size: int) -> None:
    name = f"sglang:{release_at_least('0.5.18', beyond='0.5.19')}"
    run(open_target(name)(serving(page_size)))
    leaking = open_target(name)(serving(page_size))
    run(leaking, LEAK)
    assert lost_pages(leaking)


def test_an_older_release_says_in_one_sentence_that_it_cannot() -> None:
    release = Release(Path(), "0.5.17", object, object, object, object)
    with pytest.raises(UnsupportedGeometry, match=r"from 0\.5\.18 on.*got sglang 0\.5\.17"):
        serving_release_target(release, serving(2), name="old", exhaustion=False)


# --- anybody's -----------------------------------------------------------------------------------


def own_target(geometry: Geometry) -> AllocatorTarget:
    """A hybrid allocator of somebody's own, by the names of the field."""
    pool = build_pool(geometry)
    allocator = SWATokenToKVPoolAllocator(
        geometry.full_size,
        geometry.swa_size,
        geometry.page_size,
        torch.int64,
        "cpu",
        pool,
        geometry.need_sort,
        validate=True,
    )
    return field_target(geometry, allocator, ALL_CALLS, pool=pool)


@pytest.fixture
def own_module() -> Iterator[ModuleType]:
    module = ModuleType("allocators_of_their_own")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("page_size", SIZES)
def test_an_allocator_of_ones_own_serves_requests(own_module: ModuleType, page_size: int) -> None:
    vars(own_module)["build"] = own_target
    name = f"python:{own_module.__name__}:build"
    target = open_target(name)(serving(page_size))
    assert target.name == name
    run(target)
    assert is_drained(target)
    assert isinstance(open_target(name)(pools_of(serving(page_size))), AllocatorTarget)


def test_a_target_without_calls_of_an_allocator_says_so(own_module: ModuleType) -> None:
    vars(own_module)["build"] = lambda geometry: serving_core_target(serving(2))
    with pytest.raises(UnsupportedGeometry, match="got a ServingTarget of python:"):
        open_target(f"python:{own_module.__name__}:build")(serving(2))


# --- machines ------------------------------------------------------------------------------------


def test_requests_are_a_machine_of_kvcore_and_not_of_foreign_allocators_unasked() -> None:
    assert "requests" in MACHINES
    assert ways("kvcore", "requests") == ["kvcore", "kvcore#unchecked", "kvcore#torch"]
    assert machines("sglang:anywhere") == ("hybrid",)


def test_a_fault_of_the_cache_replaces_the_cache() -> None:
    parts = CoreParts()
    target = serving_core_target(serving(2), parts=parts)
    assert isinstance(target.cache, parts.cache)


def test_nothing_is_refused_on_that_day() -> None:
    assert Refused() not in run(serving_core_target(serving(2)))

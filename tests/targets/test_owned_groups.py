"""Groups that own what callers free in them: driven as such, and judged like all others.

Leaves out what they cost (`tests/benchmarks`) and which tensors they keep (`tests/kvcore`).
"""

from __future__ import annotations

import random

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.invariants import Run, Verdict, drive
from kvcore.models import Geometry, ops
from kvcore.strategies.walker import Walker
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.core_dialects import HybridDialect
from kvcore.targets.protocol import TargetFactory
from kvcore.targets.registry import BUILDS, machines, open_target, variants

torch.set_num_threads(1)

HYBRID = Geometry(4, 10, 8)

OWNED = [name for name, build in BUILDS.items() if build.owned]


class Watched(SWATokenToKVPoolAllocator):
    """Remembers how its groups were begun."""

    begun: tuple[bool, ...] = ()

    def free_group_begin(self, *, owned: bool = False) -> None:
        self.begun += (owned,)
        super().free_group_begin(owned=owned)


class Forgetful(SWATokenToKVPoolAllocator):
    """Loses what an owned group holds back."""

    def free_group_end(self) -> None:
        if self._group_owned:
            self.full_attn_allocator.pending.clear()
        super().free_group_end()


def walks(make: TargetFactory, geometry: Geometry, programs: int) -> list[Verdict]:
    rng = random.Random(0)
    return [drive(Run(make(geometry), period=5), Walker(rng, 60)) for _ in range(programs)]


@pytest.mark.parametrize("owned", [False, True])
def test_groups_are_begun_as_the_target_says(owned: bool) -> None:
    target = core_target(HYBRID, owned=owned, parts=CoreParts(hybrid=Watched))
    run = Run(target)
    for op in (ops.Alloc(1, 2), ops.GroupBegin(), ops.Free(1), ops.GroupEnd()):
        run.step(op)
    dialect = target.dialect
    assert isinstance(dialect, HybridDialect)
    assert isinstance(dialect.allocator, Watched)
    assert dialect.allocator.begun == (owned,)


@pytest.mark.parametrize("name", OWNED)
def test_callers_of_an_owned_group_leave_alone_what_they_free(name: str) -> None:
    run = Run(open_target(name)(HYBRID))
    run.step(ops.Alloc(1, 2))
    assert run.model.why_not(ops.Free(1, overwrite=True)) is not None
    assert run.model.why_not(ops.Free(1)) is None


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, 12, 10),
        HYBRID,
        Geometry(4, 10, 8, need_sort=True),
        Geometry(1, 10),
        Geometry(4, 10),
        Geometry(1, 10, pure_swa=True),
        Geometry(4, 8, device_pages=4),
        Geometry(16, 8, 6, device_pages=6, compress=4),
    ],
    ids=Geometry.describe,
)
@pytest.mark.parametrize("name", OWNED)
def test_they_keep_every_law_on_every_kind_of_pools(name: str, geometry: Geometry) -> None:
    verdicts = walks(open_target(name), geometry, 4)
    assert [verdict.violation for verdict in verdicts] == [None] * 4
    assert sum(verdict.tally.ops["group_end"] for verdict in verdicts) > 4


@pytest.mark.parametrize("validate", [True, False])
def test_one_that_loses_what_it_holds_back_is_found(validate: bool) -> None:
    def make(geometry: Geometry, *, owned: bool) -> TargetFactory:
        parts = CoreParts(hybrid=Forgetful)
        return lambda _: core_target(geometry, validate=validate, owned=owned, parts=parts)

    safe, found = (walks(make(HYBRID, owned=owned), HYBRID, 6) for owned in (False, True))
    assert all(verdict.violation is None for verdict in safe)
    assert any(verdict.violation is not None for verdict in found)


@pytest.mark.parametrize("name", OWNED)
def test_a_verification_covers_them_where_allocators_are_called(name: str) -> None:
    assert name in variants("kvcore")
    assert "hybrid" in machines(name)
    assert "requests" not in machines(name)

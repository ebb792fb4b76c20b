"""Which known faults resemble a finding, also on pools that a fault has not."""

from __future__ import annotations

import random

import pytest

from kvcore.models import Geometry, ops
from kvcore.strategies.machines import MACHINES
from kvcore.strategies.replay import replay
from kvcore.strategies.resemblance import resembling_faults
from kvcore.strategies.walker import WalkPlan
from kvcore.targets.registry import open_target


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_finding_on_any_pools_can_be_compared(machine: str, page_size: int) -> None:
    geometry, _ = WalkPlan((page_size,), machine).draw(random.Random(0))
    found = replay(open_target("fault:counter-drift"), Geometry(1, 2, 2), [ops.Alloc(1, 3)])
    assert found.violation is not None
    program = [ops.Alloc(1, geometry.full_pages + 1)]
    for fault in resembling_faults(geometry, program, found.violation):
        assert found.violation.law in fault.laws or found.violation.law == "L5"


def test_a_program_resembles_the_fault_that_it_was_found_on() -> None:
    geometry = Geometry(4, 2, 2)
    program = [ops.Alloc(1, 1), ops.FreeSwa(1, form="sparse")]
    found = replay(open_target("fault:page-clears-one-slot"), geometry, program).violation
    assert found is not None
    alike = {fault.id for fault in resembling_faults(geometry, program, found)}
    assert "page-clears-one-slot" in alike

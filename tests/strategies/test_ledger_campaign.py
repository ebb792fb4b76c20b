"""The harness's power, in full: `pytest -m campaign -k ledger`.

Every fault, both sources, five seeds: the median within the limits, shrunk programs short. The
default suite holds each fault to one seed of the walker (`tests/targets/test_faults.py`).
"""

from __future__ import annotations

import pytest

from kvcore.strategies.hunt import hunt
from kvcore.strategies.sources import SourceName
from kvcore.targets.faults import FAULTS

pytestmark = pytest.mark.campaign

AT_EXHAUSTION = frozenset(
    ("decode-half-failure", "kernel-before-check", "counter-drift", "lent-view-overwritten")
)
"""Faults that show when a free list runs dry or starts over, so that a program must fill pools."""


@pytest.mark.parametrize(("source", "limit"), [("walker", 100), ("machine", 400)])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_ledger(fault: str, source: SourceName, limit: int) -> None:
    found = hunt(fault, source, range(5), limit)
    assert found.median is not None
    assert found.median <= limit
    assert found.shrunk_length is not None
    assert found.shrunk_length <= (15 if fault in AT_EXHAUSTION else 8)
    assert not FAULTS[fault].laws.isdisjoint(found.laws)

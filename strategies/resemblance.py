"""Which known faults behave like a finding: a hint for people, never a judgement.

The failing program is played on kvcore with each known fault put in; those that break the same law
at the same op resemble it. Leaves out the faults themselves (`kvcore.targets.faults`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.replay import replay
from kvcore.targets.faults import FAULTS, Fault
from kvcore.targets.protocol import UnsupportedGeometry
from kvcore.targets.registry import open_target


def resembling_faults(
    geometry: Geometry, program: Sequence[Op], violation: Violation
) -> list[Fault]:
    """Known faults under which ``program`` breaks the same law at the same op."""
    return [fault for fault in FAULTS.values() if _resembles(fault, geometry, program, violation)]


def _resembles(
    fault: Fault, geometry: Geometry, program: Sequence[Op], violation: Violation
) -> bool:
    try:
        found = replay(open_target(f"fault:{fault.id}"), geometry, program).violation
    except UnsupportedGeometry:
        return False
    if found is None or found.op_index != violation.op_index:
        return False
    return violation.law in found.laws and fault.is_shown_by(found)

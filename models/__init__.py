"""The vocabulary (ops, outcomes, geometry), the accepting reference model and the trace format.

Imports neither torch nor the allocator core: it shares no code with what it judges.
"""

from kvcore.models.contract import Contract
from kvcore.models.geometry import Geometry
from kvcore.models.mismatch import Mismatch
from kvcore.models.outcomes import Done, Lent, Outcome, Raised, Refused, Served
from kvcore.models.reference import Model
from kvcore.models.serving import ServingModel
from kvcore.models.violation import Clause, Violation

__all__ = [
    "Clause",
    "Contract",
    "Done",
    "Geometry",
    "Lent",
    "Mismatch",
    "Model",
    "Outcome",
    "Raised",
    "Refused",
    "Served",
    "ServingModel",
    "Violation",
    "model_of",
]


def model_of(geometry: Geometry, contract: Contract | None = None) -> Model:
    """The model of what such pools serve: whole requests or the calls of an allocator."""
    return (ServingModel if geometry.serves else Model)(geometry, contract)

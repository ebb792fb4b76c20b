"""Where programs come from: machines, walkers, replay, shrinking; and `check_target`, which puts a
target on trial with all of them by one call.

Names are imported when they are first asked for, since Hypothesis comes with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.strategies.conformance import (
        Breach,
        Conformance,
        ConformanceError,
        check_target,
    )

__all__ = ["Breach", "Conformance", "ConformanceError", "check_target"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcore.strategies' has no attribute {name!r}")
    return getattr(import_module("kvcore.strategies.conformance"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

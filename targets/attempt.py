"""Calls into the code on trial: whatever they raise becomes an outcome.

Leaves out which calls are made (`kvcore.targets.driver`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvcore.models import Raised

P = ParamSpec("P")
T = TypeVar("T")


class CallRaised(Exception):
    """The allocator or pool raised; carries the outcome."""

    def __init__(self, outcome: Raised) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def raised_by(error: Exception) -> Raised:
    """What the code on trial raised, as an outcome; of a `CallRaised` the one that it carries."""
    if isinstance(error, CallRaised):
        return error.outcome
    bases = tuple(base.__name__ for base in type(error).__mro__)
    try:
        text = str(error).splitlines()
    except Exception:
        text = ["a message that cannot be read"]
    return Raised(type(error).__name__, text[0] if text else "", bases)


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call into the code on trial; whatever it raises becomes `CallRaised`."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise CallRaised(raised_by(error)) from error

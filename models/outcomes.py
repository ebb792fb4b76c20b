"""What a target answers to an op: one frozen struct an answer.

Leaves out the state after the op: that is the target's view (`kvcore.targets.protocol`).
"""

from __future__ import annotations

import msgspec


class Lent(msgspec.Struct, frozen=True, tag="lent", omit_defaults=True):
    """Slots were lent: ``slots`` in the order of the answer, ``peers`` the SWA slot of each (0
    where it has none), read right after the call; empty for a pool in which nothing slides.

    ``device``: the same for device slots, where there are any; 0 also for a token that has no entry
    of its own. ``requests``: request rows that were taken, one a new sequence, in order. The answer
    to a `DeviceBuffer` has the buffer's device slots as ``slots``."""

    slots: tuple[int, ...]
    peers: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The allocator answered ``None``: not enough room."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call returned without lending anything."""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The call raised: the exception's class name, its base class names, and its message."""

    kind: str
    message: str
    bases: tuple[str, ...] = ()


Outcome = Lent | Refused | Done | Raised

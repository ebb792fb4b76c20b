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


class Served(msgspec.Struct, frozen=True, tag="served", omit_defaults=True):
    """A request-level op was done (`kvcore.models.request_ops`).

    ``request``: the row of the request pool that was taken, 0 if none. ``slots``, ``peers``: the
    slots that were lent, in token order (of a batch, request by request), and the SWA slot of each,
    0 where it has none, read right after. ``reloaded``: SWA slots taken for the tombstones of a
    load, one for each token of those pages, in row order. ``matched``: tokens at the front of the
    row, or of the text, that the cache holds from now on; ``prefix_slots``, ``prefix_peers``: their
    slots; ``prefix_stamps``: what the pool holds there, full K, and for the tokens with a peer SWA
    K (0 elsewhere), both empty where a target shows no contents. ``evicted``: full pages that the
    cache gave up on both sides meanwhile; ``tombstoned``: full pages whose peers it gave up first,
    whether they stayed or went later in the same call."""

    request: int = 0
    slots: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    reloaded: tuple[int, ...] = ()
    matched: int = 0
    prefix_slots: tuple[int, ...] = ()
    prefix_peers: tuple[int, ...] = ()
    prefix_stamps: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    evicted: tuple[int, ...] = ()
    tombstoned: tuple[int, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The allocator answered ``None``: not enough room."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call returned without lending anything."""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The call raised: the exception's class name, its base class names, and its message."""

    kind: str
    message: str
    bases: tuple[str, ...] = ()


Outcome = Lent | Served | Refused | Done | Raised

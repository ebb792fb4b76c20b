"""Smaller and plainer pools for a shrink: the geometries that say less.

Leaves out the ops (`kvcore.strategies.simpler`) and whether a program still fails
(`kvcore.strategies.shrink`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore.models import Geometry

PLAINER: tuple[dict[str, Any], ...] = (
    {"need_sort": False},
    {"saver": False},
    {"requests": 0},
    {"context": 0},
    {"attention": "mha"},
    {"attention": "mla"},
)
"""Changes after which a geometry has less to it."""

KINDS = ("mha", "mla", "dsa")
"""Kinds of attention, the plainest first."""

SIDES = ("device_pages", "full_pages", "swa_pages", "requests", "window")
FEW = (1, 2, 3, 4, 6, 8, 12, 16)
"""Sizes worth trying for a side, smallest first."""


def resized(geometry: Geometry, **changes: Any) -> Geometry | None:
    """The geometry with these changes; None where there is no such geometry, where nothing changes,
    where a side grows, where the attention gets less plain, or where programs would no longer be of
    whole requests."""
    now = msgspec.structs.asdict(geometry)
    if all(now[name] == value for name, value in changes.items()):
        return None
    if any(changes[side] > now[side] for side in SIDES if side in changes):
        return None
    if KINDS.index(changes.get("attention", "mha")) > KINDS.index(geometry.attention):
        return None
    if geometry.sparse and geometry.compress == 1 and "device_pages" in changes:
        ratio = geometry.full_pages // geometry.device_pages
        changes = {**changes, "full_pages": changes["device_pages"] * ratio}
    try:
        other = msgspec.structs.replace(geometry, **changes)
    except ValueError:
        return None
    return other if other.serves == geometry.serves else None


def less(geometry: Geometry, full: int, swa: int) -> Geometry | None:
    """The geometry with so many pages fewer on each side, if any page is left."""
    changes = {"full_pages": geometry.full_pages - full}
    if geometry.hybrid:
        changes["swa_pages"] = geometry.swa_pages - swa
    if geometry.sparse:
        changes["device_pages"] = geometry.device_pages - full
    if any(number < 1 for number in changes.values()):
        return None
    return resized(geometry, **changes)

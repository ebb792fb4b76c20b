"""What kind of allocator is to be recorded: its geometry, its sides, and what its trace says of it.

Knows kvcore's allocators by their classes and those of SGLang by their names. Leaves out what is
recorded of them (`kvcore.targets.recorder`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcore import (
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcore.models import Geometry
from kvcore.targets.recording_raw import RawHeader, Side
from kvcore.targets.recording_tape import RecordingError

HYBRID, PURE, SINGLE = "hybrid", "pure", "single"

OURS: tuple[tuple[type, str], ...] = (
    (SWATokenToKVPoolAllocator, HYBRID),
    (PureSWATokenToKVPoolAllocator, PURE),
    (TokenToKVPoolAllocator, SINGLE),
    (PagedTokenToKVPoolAllocator, SINGLE),
)

THEIRS = {known.__name__: kind for known, kind in OURS}
"""The field's names of the same. Their subclasses are other allocators: some lend virtual slots."""

RELEASE_PACKAGE = "sglang"


def describe(allocator: Any, target: str | None) -> tuple[RawHeader, str]:
    """The header of a recording, and the kind of the allocator.

    Raises:
        RecordingError: an unknown kind, or pools larger than a trace can name.
    """
    name = type(allocator).__name__
    kind = _kind(allocator)
    foreign = kind is not None and not isinstance(allocator, tuple(known for known, _ in OURS))
    if kind is None or (foreign and _rings(allocator)):
        known = ", ".join(THEIRS)
        raise RecordingError(f"{name} cannot be recorded; expected one of {known}")
    geometry = _geometry(allocator, kind)
    free = allocator.full_available_size() if kind == HYBRID else allocator.available_size()
    header = RawHeader(
        target=target if target is not None else _target(allocator, foreign=foreign),
        geometry=geometry,
        allocator=name,
        lent_before=geometry.full_size - int(free),
        # 0.5.19 was the first to have `free_full`, and its groups hold back the full side too.
        full_side_joins_group=not foreign or "free_full" in dir(type(allocator)),
        free_swa_joins_group=not foreign or _defers_free_swa(allocator, kind),
        frees_full="free_full" in dir(type(allocator)),
        errors_change_nothing=not foreign,
    )
    return header, kind


def _defers_free_swa(allocator: Any, kind: str) -> bool:
    """Whether a release's `free_swa` waits for the end of an open group, as from 0.5.18 on."""
    if kind == PURE:
        # It has one queue for all; what 0.5.18 brought is the copy of what waits there.
        return "_copy_for_free_group" in dir(type(allocator))
    return "swa_free_group" in vars(allocator)


def sides_of(allocator: Any, kind: str) -> list[tuple[Side, Any]]:
    """The sides that an engine may go to directly, each once."""
    if kind == SINGLE:
        return []
    if kind == PURE:
        return [(Side.SWA, allocator.swa_attn_allocator)]
    return [(Side.FULL, allocator.full_attn_allocator), (Side.SWA, allocator.swa_attn_allocator)]


def _kind(allocator: Any) -> str | None:
    for known, kind in OURS:
        if isinstance(allocator, known):
            return kind
    cls = type(allocator)
    inside = cls.__module__.partition(".")[0] == RELEASE_PACKAGE
    return THEIRS.get(cls.__name__) if inside else None


def _rings(allocator: Any) -> bool:
    """Whether the SWA slots of a release's allocator are rings of the request rows, which have no
    pages of their own."""
    return "_swa_req_ring" in vars(allocator) and bool(allocator._swa_req_ring)


def _geometry(allocator: Any, kind: str) -> Geometry:
    size = int(allocator.page_size)
    full = int(allocator.size_full if kind == HYBRID else allocator.size)
    swa = int(allocator.size_swa) if kind == HYBRID else 0
    try:
        return Geometry(
            page_size=size,
            full_pages=full // size,
            swa_pages=swa // size,
            need_sort=bool(allocator.need_sort),
            pure_swa=kind == PURE,
        )
    except ValueError as error:
        raise RecordingError(f"{type(allocator).__name__} cannot be recorded: {error}") from None


def _target(allocator: Any, *, foreign: bool) -> str:
    """The target's name. Of a release it holds the directory that its package lies in."""
    if not foreign:
        return "kvcore" if allocator.validate else "kvcore#unchecked"
    path = Path(type(allocator).free.__code__.co_filename)
    package = next(p for p in path.parents if p.name == RELEASE_PACKAGE)
    return f"sglang:{package.parent}"

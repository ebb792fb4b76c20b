"""The contract-breaking calls: what each does, when it can be made, which errors are documented.

A hostile op must raise one of its documented errors and change nothing. Each entry says in terms of
the model when the call really is wrong, so that it never asks for something legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.models.ops import Hostile
    from kvcore.models.reference import Model

Possible = Callable[["Model", "Hostile"], bool]


@dataclass(frozen=True, slots=True)
class HostileCall:
    """``errors``: class names of the documented errors; any one of them is right when a call
    breaks several rules at once. ``possible``: whether the call is wrong in this state.
    ``values``: whether only value checks (``validate=True``) can see it. ``grouped``: whether the
    call exists inside a group only."""

    what: str
    errors: frozenset[str]
    possible: Possible
    values: bool = True
    grouped: bool = False


def _always(model: Model, op: Hostile) -> bool:
    return True


def _hybrid(model: Model, op: Hostile) -> bool:
    return model.geometry.hybrid


def _paged(model: Model, op: Hostile) -> bool:
    return model.geometry.page_size > 1


def _hybrid_paged(model: Model, op: Hostile) -> bool:
    return _hybrid(model, op) and _paged(model, op)


def _live(model: Model, op: Hostile) -> bool:
    return op.seq in model.rows


def _first_page_live_peer(model: Model, op: Hostile) -> bool:
    row = model.rows.get(op.seq)
    return row is not None and row.pages[0].swa != 0 and row.pages[0].fully_mapped


def _ghost_free(model: Model, op: Hostile) -> bool:
    ghost = model.ghosts.get(op.seq)
    return bool(ghost) and not model.full.free.isdisjoint(ghost or ())


def _ghost_pending(model: Model, op: Hostile) -> bool:
    ghost = model.ghosts.get(op.seq)
    if model.geometry.pure_swa:
        # What a window left behind in this group may be named again, as by a request that ends.
        return not (model.full.pending - model.detached.keys()).isdisjoint(ghost or ())
    return bool(ghost) and not model.full.pending.isdisjoint(ghost or ())


def _slot_named_twice(model: Model, op: Hostile) -> bool:
    return model.geometry.page_size == 1 and op.seq in model.rows


def _two_live_peers(model: Model, op: Hostile) -> bool:
    return (
        op.seq != op.other
        and _first_page_live_peer(model, op)
        and op.other in model.rows
        and model.rows[op.other].pages[0].swa != 0
    )


def _pending_and_live_peer(model: Model, op: Hostile) -> bool:
    ghost = model.ghosts.get(op.seq)
    row = model.rows.get(op.other)
    return (
        model.geometry.hybrid
        and bool(ghost)
        and set(ghost or ()) <= model.full.pending
        and row is not None
        and row.pages[0].swa != 0
    )


def _dead_incoming(model: Model, op: Hostile) -> bool:
    kept, incoming = model.rows.get(op.seq), model.rows.get(op.other)
    return (
        model.geometry.hybrid
        and op.seq != op.other
        and kept is not None
        and incoming is not None
        and kept.pages[0].swa == 0
        and incoming.pages[0].swa == 0
    )


def _open(model: Model, op: Hostile) -> bool:
    return model.group_open


def _closed(model: Model, op: Hostile) -> bool:
    return not model.group_open


def _continues_dead_page(model: Model, op: Hostile) -> bool:
    row = model.rows.get(op.seq)
    return (
        model.geometry.hybrid
        and row is not None
        and row.tokens % model.geometry.page_size != 0
        and row.pages[-1].swa == 0
    )


def _has_backup(model: Model, op: Hostile) -> bool:
    # With a request pool a backup belongs to a request, and only a restore of that brings it back.
    known = op.seq in model.backups and not model.geometry.requests
    return known and not _paused(model, op)


def _paused(model: Model, op: Hostile) -> bool:
    return "kv_cache" in model.memory.paused


def _call(
    what: str,
    errors: str,
    possible: Possible = _always,
    *,
    values: bool = True,
    grouped: bool = False,
) -> HostileCall:
    return HostileCall(what, frozenset(errors.split()), possible, values, grouped)


_SLOT = "InvalidSlotError"
_TWICE = "DoubleFreeError PendingFreeError"

HOSTILE_CALLS: dict[str, HostileCall] = {
    "free_again": _call("free a row that was freed before", _TWICE, _ghost_free),
    "free_pending": _call(
        "free a row that waits in the open group", _TWICE, _ghost_pending, grouped=True
    ),
    "free_slot_twice": _call("name a slot twice in one free", _TWICE, _slot_named_twice),
    "free_padding": _call("free the padding slot", _SLOT),
    "free_negative": _call("free slot -1", _SLOT),
    "free_beyond": _call("free a slot beyond the pool", _SLOT),
    "free_swa_padding": _call("free_swa of the padding slot", _SLOT, _hybrid),
    "free_swa_negative": _call("free_swa of slot -1", _SLOT, _hybrid),
    "free_full_live": _call(
        "free_full of slots whose peers are live", "LivePeerError", _first_page_live_peer
    ),
    "map_over_live": _call(
        "map a full slot with a live peer to another row's SWA slot",
        "LivePeerError MappingError",
        _two_live_peers,
    ),
    "map_negative": _call(
        "map full slot -1", f"{_SLOT} LivePeerError MappingError", _first_page_live_peer
    ),
    "clear_negative": _call("clear the mapping of slot -1", _SLOT, _hybrid),
    "map_pending": _call(
        "map a full slot that waits in the open group",
        f"{_TWICE} LivePeerError MappingError",
        _pending_and_live_peer,
        grouped=True,
    ),
    "recover_live": _call(
        "recover onto a slot that has a live peer",
        "LivePeerError",
        _two_live_peers,
    ),
    "recover_dead": _call(
        "recover from a slot whose peer is gone", "DeadPeerError", _dead_incoming
    ),
    "decode_dead_page": _call(
        "decode into a page whose peer is gone", "DeadPeerError", _continues_dead_page
    ),
    "begin_nested": _call(
        "open a group inside a group", "FreeGroupError", _open, values=False, grouped=True
    ),
    "end_unopened": _call(
        "close a group that is not open", "FreeGroupError", _closed, values=False
    ),
    "alloc_unaligned": _call(
        "alloc a number of slots that is no multiple of the page size",
        "GeometryError",
        _paged,
        values=False,
    ),
    "alloc_negative": _call("alloc a negative number of slots", "GeometryError", values=False),
    "free_float": _call("free a floating-point tensor", "IndexTensorError", _live, values=False),
    "free_two_dims": _call("free a 2-D tensor", "IndexTensorError", _live, values=False),
    "free_other_device": _call(
        "free a tensor on another device", "IndexTensorError", _live, values=False
    ),
    "extend_short_batch": _call(
        "extend with batch vectors of different lengths", "GeometryError", values=False
    ),
    "extend_wrong_total": _call(
        "extend with a total that is not the sum of the batch", "GeometryError", values=False
    ),
    "tail_misaligned": _call(
        "an SWA tail that starts inside a page", "GeometryError", _hybrid_paged, values=False
    ),
    "segment_misaligned": _call(
        "a segment that starts inside a page",
        "GeometryError",
        lambda model, op: _paged(model, op) and _live(model, op),
        values=False,
    ),
    "resize_negative": _call("resize to a negative size", "GeometryError", values=False),
    "read_paused": _call("read a paused pool", "PausedPoolError", _paused, values=False),
    "write_paused": _call("write to a paused pool", "PausedPoolError", _paused, values=False),
    "copy_paused": _call("copy rows of a paused pool", "PausedPoolError", _paused, values=False),
    "move_paused": _call("move rows of a paused pool", "PausedPoolError", _paused, values=False),
    "reserve_paused": _call(
        "allocate memory under a paused tag", "PausedPoolError", _paused, values=False
    ),
    "restore_short": _call(
        "load a host copy into too few slots",
        "GeometryError IndexTensorError",
        _has_backup,
        values=False,
    ),
}
"""Every hostile call by name."""

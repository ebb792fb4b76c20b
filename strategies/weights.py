"""How often each kind is asked for, inside a free group and outside.

Recoveries inside groups are what most faults need and what uniform weights almost never produce, so
inside a group the ops that detach and recover peers outweigh the rest. Measured, not derived: see
`kvcore faults`. Leaves out the kinds of request-level programs
(`kvcore.strategies.weights_requests`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from kvcore.models import Contract
from kvcore.strategies.weights_requests import (
    REQUEST_BASES,
    REQUESTS_INSIDE,
    REQUESTS_OUTSIDE,
)

OUTSIDE: dict[str, int] = {
    "alloc": 5,
    "extend_new": 5,
    "extend_more": 4,
    "extend_batch": 3,
    "decode": 4,
    "decode_batch": 4,
    "swa_tail": 4,
    "free": 4,
    "free_part": 4,
    "free_swa": 5,
    "free_swa_front": 3,
    "free_full": 4,
    "group_begin": 10,
    "recover_locked": 4,
    "recover_unlocked": 3,
    "load_back": 3,
    "load_back_swa": 3,
    "retract": 3,
    "restore": 5,
    "relocate": 2,
    "extend_logical": 4,
    "free_device": 3,
    "device_buffer": 6,
    "free_buffer": 4,
    "reserve": 6,
    "drop": 5,
    "pause": 4,
    "resume": 7,
    "clear": 1,
    "hostile": 5,
}

INSIDE: dict[str, int] = {
    "alloc": 5,
    "extend_new": 3,
    "extend_more": 2,
    "extend_batch": 1,
    "decode": 2,
    "decode_batch": 2,
    "swa_tail": 2,
    "free": 4,
    "free_part": 3,
    "free_swa": 10,
    "free_swa_front": 3,
    "free_full": 4,
    "group_end": 7,
    "recover_locked": 9,
    "recover_unlocked": 4,
    "load_back": 2,
    "load_back_swa": 4,
    "retract": 2,
    "restore": 2,
    "relocate": 1,
    "extend_logical": 2,
    "free_device": 6,
    "device_buffer": 5,
    "free_buffer": 4,
    "reserve": 2,
    "drop": 2,
    "pause": 2,
    "resume": 3,
    "clear": 1,
    "hostile": 5,
}


BASES: dict[str, str] = {
    "extend_new": "extend",
    "extend_more": "extend",
    "extend_batch": "extend",
    "decode_batch": "decode",
    "free_part": "free",
    "free_swa_front": "free_swa",
    "recover_locked": "recover",
    "recover_unlocked": "recover",
}
"""The op kind behind a kind that is not one itself."""


def weights_for(contract: Contract, *, inside: bool) -> Mapping[str, int]:
    """The kinds that make sense under a contract and the weight of each, in a fixed order."""
    return _weights_of(contract.ops, bool(contract.hostile), inside)


@cache
def _weights_of(known: frozenset[str], hostile: bool, inside: bool) -> Mapping[str, int]:
    if "admit" in known:
        table = REQUESTS_INSIDE if inside else REQUESTS_OUTSIDE
    else:
        table = INSIDE if inside else OUTSIDE
    able = known if hostile else known - {"hostile"}
    return {kind: weight for kind, weight in table.items() if op_kind_of(kind) in able}


@cache
def _weighted_kinds(known: frozenset[str], hostile: bool, inside: bool) -> tuple[str, ...]:
    weights = _weights_of(known, hostile, inside)
    return tuple(kind for kind, weight in weights.items() for _ in range(weight))


def weighted_kinds(contract: Contract, *, inside: bool) -> Sequence[str]:
    """The kinds that make sense under a contract, each as often as its weight says."""
    return _weighted_kinds(contract.ops, bool(contract.hostile), inside)


def kinds_for(contract: Contract, *, inside: bool) -> list[str]:
    """The kinds that make sense under a contract, in a fixed order."""
    return list(weights_for(contract, inside=inside))


def op_kind_of(kind: str) -> str:
    """The op kind behind a kind that sources ask for."""
    return BASES.get(kind) or REQUEST_BASES.get(kind, kind)

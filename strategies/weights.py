"""How often each kind is asked for, inside a free group and outside.

Recoveries inside groups are what most faults need and what uniform weights almost never produce, so
inside a group the ops that detach and recover peers outweigh the rest. Measured, not derived: see
`kvcore faults`.
"""

from __future__ import annotations

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
    "clear": 1,
    "hostile": 5,
}


def kinds_for(allowed: frozenset[str], *, hybrid: bool, hostile: bool, inside: bool) -> list[str]:
    """The kinds that make sense under a contract, in a fixed order."""
    table = INSIDE if inside else OUTSIDE
    return [kind for kind in table if _makes_sense(kind, allowed, hybrid, hostile)]


def _makes_sense(kind: str, allowed: frozenset[str], hybrid: bool, hostile: bool) -> bool:
    if kind == "hostile":
        return hostile
    base = op_kind_of(kind)
    if base == "free_full" and not hybrid:
        return False
    return base in allowed


def op_kind_of(kind: str) -> str:
    """The op kind behind a kind that sources ask for."""
    for base in ("extend", "decode", "free_swa", "free_full", "recover", "load_back_swa"):
        if kind.startswith(base):
            return base
    return "free" if kind in ("free", "free_part") else kind

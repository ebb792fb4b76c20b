"""Which rules the Hypothesis machine has, and what each asks for.

Hypothesis picks rules evenly, and switches some off in each example. So kinds that faults need
together (detaching and recovering peers inside a group) have several rules. A rule that has nothing
to ask for asks for another kind. Request-level kinds are many, and few are possible at a time:
those that would crowd the others out share a rule. Leaves out the machine
(`kvcore.strategies.machine`) and the weights of the other sources (`kvcore.strategies.weights`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.models import Contract, Model, ServingModel
from kvcore.models.ops import Op
from kvcore.strategies.choices import Choices
from kvcore.strategies.propose import propose
from kvcore.strategies.weights import kinds_for, weighted_kinds, weights_for

RULES_INSIDE: dict[str, int] = {
    "free": 2,
    "free_swa": 5,
    "recover_locked": 5,
    "load_back_swa": 3,
    "free_device": 3,
    "device_buffer": 2,
    "hostile": 4,
    "group_end": 3,
}
"""Rules a kind inside a group, where not one."""

RULES_OUTSIDE: dict[str, int] = {
    "hostile": 3,
    "group_begin": 6,
    "alloc": 2,
    "extend_new": 2,
    "free_swa": 2,
    "device_buffer": 3,
    "reserve": 3,
    "drop": 2,
    "resume": 2,
}
"""Rules a kind outside groups, where not one."""


REQUEST_RULES: dict[tuple[str, ...], int] = {
    ("admit_new", "admit_new", "admit_new", "admit_large"): 4,
    ("admit_branch", "admit_branch", "admit_front", "admit_same"): 6,
    ("admit_over",): 4,
    ("prefill",): 3,
    ("cache_unfinished",): 5,
    ("decode_all", "decode_step", "speculate"): 2,
    ("slide", "slide", "slide_all"): 3,
    ("trim",): 2,
    ("finish",): 4,
    ("retract_backup", "retract_plain", "abort"): 1,
    ("resume_request",): 2,
    ("save_prefix",): 2,
    ("load_prefix",): 4,
    ("end_load",): 3,
    ("evict_swa",): 3,
    ("evict_full", "evict_both", "evict_all_swa", "evict_all", "flush"): 1,
    ("group_begin", "group_end"): 1,
}
"""The kinds that a rule of a machine of whole requests asks for, and how many rules do."""


def rules_for(contract: Contract, *, inside: bool) -> list[str]:
    """The kind that each rule of a machine of allocator calls asks for, under a contract."""
    copies = RULES_INSIDE if inside else RULES_OUTSIDE
    known = kinds_for(contract, inside=inside)
    return [kind for kind in known for _ in range(copies.get(kind, 1))]


def pick_kind(kinds: Sequence[str], model: ServingModel, choices: Choices) -> str | None:
    """One of these kinds that is possible now; if none is, any other, by weight."""
    weights = weights_for(model.contract, inside=model.group_open)
    able = [kind for kind in kinds if kind in weights and is_possible(kind, model)]
    if not able:
        others = weighted_kinds(model.contract, inside=model.group_open)
        able = [kind for kind in others if is_possible(kind, model)]
    return able[choices.below(len(able))] if able else None


OTHERS_TRIED = 4
"""How many other kinds a rule of a machine of allocator calls asks for in place of its own."""


def propose_or_other(kind: str, model: Model, choices: Choices) -> Op | None:
    """An op of this kind that is allowed now; if there is none, of any other, by weight. A step in
    which nothing happens costs Hypothesis as much as any."""
    op = propose(kind, model, choices)
    if op is not None:
        return op
    others = weighted_kinds(model.contract, inside=model.group_open)
    for _ in range(OTHERS_TRIED):
        op = propose(others[choices.below(len(others))], model, choices)
        if op is not None:
            return op
    return None


def is_possible(kind: str, model: ServingModel) -> bool:
    """Whether there is anything that a request-level op of this kind could be about, as far as is
    soon told."""
    running, cached = model.live.values(), model.tree.pages
    has_room = bool(model.requests.free) and min(model.room()) > 0
    match kind:
        case "group_begin" | "group_end":
            return True
        case "admit_new":
            return has_room
        case "admit_large":
            return bool(running or cached)
        case "admit_same" | "admit_front" | "admit_branch":
            return has_room and bool(running or model.waiting or cached)
        case "admit_over":
            return has_room and any(node.state == "tombstone" for node in cached.values())
        case "prefill":
            return any(one.kv_len < one.prompt_len for one in running)
        case "trim":
            return any(one.drafts for one in running)
        case "cache_unfinished":
            size = model.geometry.page_size
            return any(one.kv_len >= one.prefix + size for one in running)
        case "resume_request":
            return bool(model.waiting)
        case "save_prefix":
            return bool(cached)
        case "load_prefix":
            return bool(model.copies)
        case "end_load":
            return bool(model.loads)
        case "flush":
            return bool(cached) and not (running or model.loads)
        case "evict_full" | "evict_both" | "evict_all":
            return model.tree.full_evictable > 0
        case "evict_swa" | "evict_all_swa":
            return model.tree.swa_evictable > 0
        case _:
            return bool(running)

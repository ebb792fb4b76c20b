"""The table of hostile calls: when each really is wrong, and that it is not asked for when legal.

Leaves out how a target answers: tests/targets/test_core_target.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore.models import Contract, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op

PAIR = (ops.Alloc(1, 1), ops.Alloc(2, 1))
DEAD = (*PAIR, ops.FreeSwa(1))
IN_GROUP = (*PAIR, ops.GroupBegin(), ops.Free(1))
INSIDE = (ops.Extend(((1, 2),)), ops.Alloc(2, 1))
SINGLE: dict[str, Any] = {"swa_pages": 0}
SLOTS: dict[str, Any] = {"page_size": 1}
PURE: dict[str, Any] = {"swa_pages": 0, "pure_swa": True}
SAVER: dict[str, Any] = {"saver": True}
REQUESTS: dict[str, Any] = {"requests": 4}
PAUSED = (ops.Pause("kv_cache"),)
MOVED_ON = (ops.Alloc(1, 2), ops.Alloc(2, 1), ops.GroupBegin(), ops.FreeSwa(1, 0, 1))
"""In a pool whose layers all slide: the window of row 1 moves on in the open group."""


@dataclass(frozen=True)
class Scene:
    """What came before, and what sequences the call names."""

    before: tuple[Op, ...] = ()
    seq: int = -1
    other: int = -1
    geometry: dict[str, Any] = field(default_factory=dict)


WRONG: dict[str, list[Scene]] = {
    "free_again": [
        Scene((*PAIR, ops.Free(1)), 1),
        Scene((*DEAD, ops.FreeFull(1)), 1),
        Scene((*PAIR, ops.Retract(1, 1)), 1),
        Scene((*PAIR, ops.Clear()), 1),
        Scene((ops.Alloc(1, 3), ops.Free(1), ops.Alloc(2, 1)), 1),
    ],
    "free_pending": [
        Scene(IN_GROUP, 1),
        Scene((ops.GroupBegin(), *PAIR, ops.Retract(2, 1)), 2),
        Scene((*MOVED_ON, ops.Free(1)), 1, geometry=PURE),
    ],
    "free_slot_twice": [Scene(PAIR, 1, geometry=SLOTS)],
    "free_padding": [Scene(), Scene(geometry=SINGLE)],
    "free_negative": [Scene(), Scene(geometry=SINGLE)],
    "free_beyond": [Scene(), Scene(geometry=SINGLE)],
    "free_swa_padding": [Scene()],
    "free_swa_negative": [Scene()],
    "free_full_live": [Scene(PAIR, 1)],
    "map_over_live": [Scene(PAIR, 1, 2)],
    "map_negative": [Scene(PAIR, 1)],
    "clear_negative": [Scene()],
    "map_pending": [Scene(IN_GROUP, 1, 2)],
    "recover_live": [Scene(PAIR, 1, 2)],
    "recover_dead": [Scene((*DEAD, ops.FreeSwa(2)), 1, 2)],
    "decode_dead_page": [Scene((*INSIDE, ops.FreeSwa(1)), 1), Scene((ops.SwaTail(1, 6, 0),), 1)],
    "begin_nested": [Scene((ops.GroupBegin(),))],
    "end_unopened": [Scene(), Scene((ops.GroupBegin(), ops.Clear()))],
    "alloc_unaligned": [Scene(), Scene(geometry=SINGLE)],
    "alloc_negative": [Scene(), Scene(geometry=SLOTS)],
    "free_float": [Scene(PAIR, 1)],
    "free_two_dims": [Scene(PAIR, 1)],
    "free_other_device": [Scene(PAIR, 1)],
    "extend_short_batch": [Scene()],
    "extend_wrong_total": [Scene()],
    "tail_misaligned": [Scene()],
    "segment_misaligned": [Scene(PAIR, 1)],
    "resize_negative": [Scene(), Scene(geometry=SINGLE)],
    "restore_short": [Scene((*PAIR, ops.Retract(1, 1)), 1)],
    "read_paused": [Scene(PAUSED, geometry=SAVER), Scene((*PAUSED, *PAIR), geometry=SAVER)],
    "write_paused": [Scene(PAUSED, geometry=SAVER)],
    "copy_paused": [Scene(PAUSED, geometry=SAVER)],
    "move_paused": [Scene(PAUSED, geometry=SAVER)],
    "reserve_paused": [Scene(PAUSED, geometry=SAVER)],
}

LEGAL: dict[str, list[Scene]] = {
    "free_again": [
        Scene(PAIR, 1),
        Scene(IN_GROUP, 1),
        Scene((ops.Alloc(1, 2), ops.Free(1), ops.Alloc(2, 8)), 1),
    ],
    "free_pending": [
        Scene((*PAIR, ops.Free(1)), 1),
        Scene((*IN_GROUP, ops.GroupEnd()), 1),
        Scene((*MOVED_ON, ops.FreeFull(1, 0, 1)), 1, geometry=PURE),
    ],
    "free_slot_twice": [Scene(PAIR, 1), Scene(PAIR, 3, geometry=SLOTS)],
    "free_swa_padding": [Scene(geometry=SINGLE)],
    "free_swa_negative": [Scene(geometry=SINGLE)],
    "free_full_live": [
        Scene(DEAD, 1),
        Scene(PAIR, 3),
        Scene((ops.Extend(((1, 1),)), ops.SwaTail(1, 1, 0)), 1),
        Scene(PAIR, 1, geometry=SINGLE),
    ],
    "map_over_live": [
        Scene(PAIR, 1, 1),
        Scene(DEAD, 1, 2),
        Scene(DEAD, 2, 1),
        Scene(PAIR, 1, 3),
    ],
    "map_negative": [Scene(DEAD, 1), Scene(PAIR, 3)],
    "clear_negative": [Scene(geometry=SINGLE)],
    "map_pending": [
        Scene((*PAIR, ops.Free(1)), 1, 2),
        Scene((*PAIR, ops.GroupBegin(), ops.FreeSwa(2), ops.Free(1)), 1, 2),
        Scene(IN_GROUP, 1, 3),
        Scene(IN_GROUP, 3, 2),
        Scene(IN_GROUP, 1, 2, SINGLE),
    ],
    "recover_live": [Scene(DEAD, 1, 2), Scene(DEAD, 2, 1), Scene(PAIR, 2, 2)],
    "recover_dead": [
        Scene(DEAD, 1, 2),
        Scene(DEAD, 1, 1),
        Scene(DEAD, 1, 3),
        Scene(DEAD, 3, 1),
        Scene(PAIR, 1, 2, SINGLE),
    ],
    "decode_dead_page": [
        Scene(DEAD, 1),
        Scene(INSIDE, 1),
        Scene(INSIDE, 3),
        Scene(INSIDE, 1, geometry=SINGLE),
    ],
    "begin_nested": [Scene(), Scene((ops.GroupBegin(), ops.GroupEnd()))],
    "end_unopened": [Scene((ops.GroupBegin(),))],
    "alloc_unaligned": [Scene(geometry=SLOTS)],
    "free_float": [Scene(PAIR, 3)],
    "free_two_dims": [Scene(PAIR, 3)],
    "free_other_device": [Scene(PAIR, 3)],
    "tail_misaligned": [Scene(geometry=SLOTS), Scene(geometry=SINGLE)],
    "segment_misaligned": [Scene(PAIR, 1, geometry=SLOTS), Scene(PAIR, 3)],
    "restore_short": [
        Scene(PAIR, 1),
        Scene((*PAIR, ops.Retract(1, 1), ops.Restore(1, 3)), 1),
        Scene((*PAIR, ops.Retract(1, 1)), 1, geometry=REQUESTS),
        Scene((*PAIR, ops.Retract(1, 1), *PAUSED), 1, geometry=SAVER),
    ],
    **{
        call: [
            Scene(),
            Scene(geometry=SAVER),
            Scene((ops.Pause("weights"),), geometry=SAVER),
            Scene((*PAUSED, ops.Resume("kv_cache")), geometry=SAVER),
        ]
        for call in ("read_paused", "write_paused", "copy_paused", "move_paused", "reserve_paused")
    },
}

ALWAYS_WRONG = {
    "free_padding",
    "free_negative",
    "free_beyond",
    "alloc_negative",
    "extend_short_batch",
    "extend_wrong_total",
    "resize_negative",
}


def scenes(table: dict[str, list[Scene]]) -> list[Any]:
    return [
        pytest.param(call, scene, id=f"{call}-{number}")
        for call, those in table.items()
        for number, scene in enumerate(those)
    ]


def is_allowed(call: str, scene: Scene, keep: Callable[..., Any]) -> bool:
    books = keep(**scene.geometry, contract=Contract(hostile=frozenset((call,))))
    books.do(*scene.before)
    answer: bool = books.model.allows(ops.Hostile(call, scene.seq, scene.other))
    return answer


def test_every_hostile_call_has_a_scene_on_each_side() -> None:
    assert set(WRONG) == set(HOSTILE_CALLS)
    assert set(LEGAL) == set(HOSTILE_CALLS) - ALWAYS_WRONG


@pytest.mark.parametrize(("call", "scene"), scenes(WRONG))
def test_a_hostile_call_is_made_where_it_is_wrong(
    call: str, scene: Scene, keep: Callable[..., Any]
) -> None:
    assert is_allowed(call, scene, keep)


@pytest.mark.parametrize(("call", "scene"), scenes(LEGAL))
def test_a_hostile_call_is_not_made_where_it_would_be_legal(
    call: str, scene: Scene, keep: Callable[..., Any]
) -> None:
    assert not is_allowed(call, scene, keep)


def test_calls_that_only_a_look_at_values_can_tell_name_slots() -> None:
    blind = {name for name, call in HOSTILE_CALLS.items() if not call.values}
    shapes = {"free_float", "free_two_dims", "free_other_device", "restore_short"}
    groups = {"begin_nested", "end_unopened"}
    paused = {"read_paused", "write_paused", "copy_paused", "move_paused", "reserve_paused"}
    sizes = {
        "alloc_unaligned",
        "alloc_negative",
        "extend_short_batch",
        "extend_wrong_total",
        "tail_misaligned",
        "segment_misaligned",
        "resize_negative",
    }
    assert blind == shapes | groups | sizes | paused


@pytest.mark.parametrize("call", HOSTILE_CALLS)
def test_a_call_is_marked_grouped_if_it_is_wrong_inside_a_group_alone(
    call: str, keep: Callable[..., Any]
) -> None:
    inside = []
    for scene in WRONG[call]:
        books = keep(**scene.geometry)
        books.do(*scene.before)
        inside.append(books.model.group_open)
    assert all(inside) is HOSTILE_CALLS[call].grouped


def test_every_documented_error_has_the_name_of_one_of_the_core() -> None:
    import kvcore.errors

    documented = {error for call in HOSTILE_CALLS.values() for error in call.errors}
    assert documented <= set(vars(kvcore.errors))

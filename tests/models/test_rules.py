"""When an op is allowed: every rule with a case on each side of it, and every narrowing.

A case says which ops came before, which op is asked about, and a part of the reason why not (none:
it is allowed). Leaves out the hostile calls, how much an op needs, and what only some kinds of
pools have: test_hostile_calls.py, test_demand.py, test_sliding_pool.py, test_device_slots.py,
test_request_rows.py, test_memory_books.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore.models import Contract, Model, Raised, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import OP_KINDS, Op

PAIR = (ops.Alloc(1, 2), ops.Alloc(2, 2))
DEAD = (*PAIR, ops.FreeSwa(1))
SINGLE = {"swa_pages": 0}


@dataclass(frozen=True)
class Case:
    what: str
    before: tuple[Op, ...]
    op: Op
    why: str | None = None
    geometry: dict[str, Any] = field(default_factory=dict)
    contract: Contract = field(default_factory=Contract)


CASES = [
    Case("a new row", (), ops.Alloc(1, 1)),
    Case("a row of no pages", (), ops.Alloc(1, 0), "no pages"),
    Case("a row of fewer than no pages", (), ops.Alloc(1, -1), "no pages"),
    Case("a live name again", PAIR, ops.Alloc(1, 1), "was used before"),
    Case("a retired name", (*PAIR, ops.Free(1)), ops.Alloc(1, 1), "was used before"),
    Case("more than there is", (), ops.Alloc(1, 99)),
    Case("one batch of new rows", (), ops.Extend(((1, 3), (2, 5)))),
    Case("an empty batch", (), ops.Extend(()), "each sequence once"),
    Case("a name twice in a batch", (), ops.Extend(((1, 3), (1, 5))), "each sequence once"),
    Case("an extend by nothing", (), ops.Extend(((1, 3), (2, 0))), "at least one token"),
    Case("an extend of a retired name", (*PAIR, ops.Free(1)), ops.Extend(((1, 1),)), "was used"),
    Case("an extend inside a live page", (ops.Extend(((1, 3),)),), ops.Extend(((1, 3),))),
    Case(
        "an extend inside a dead page",
        (ops.Extend(((1, 3),)), ops.FreeSwa(1)),
        ops.Extend(((1, 1),)),
        "no live peer",
    ),
    Case("an extend after a full dead page", DEAD, ops.Extend(((1, 1),))),
    Case(
        "an extend inside a page whose last token has no peer",
        (ops.Extend(((1, 1),)), ops.SwaTail(1, 1, 0)),
        ops.Extend(((1, 1),)),
        "no live peer",
    ),
    Case(
        "an extend inside a page of one pool",
        (ops.Extend(((1, 3),)),),
        ops.Extend(((1, 3),)),
        geometry=SINGLE,
    ),
    Case("a decode of two rows", PAIR, ops.Decode((1, 2))),
    Case("a decode of nothing", PAIR, ops.Decode(()), "each sequence once"),
    Case("a decode of one row twice", PAIR, ops.Decode((1, 1)), "each sequence once"),
    Case("a decode of no row", PAIR, ops.Decode((1, 3)), "no sequence 3"),
    Case(
        "a decode inside a dead page",
        (ops.Extend(((1, 3),)), ops.FreeSwa(1)),
        ops.Decode((1,)),
        "no live peer",
    ),
    Case("a decode after a full dead page", DEAD, ops.Decode((1,))),
    Case("a tail on a page boundary", (), ops.SwaTail(1, 10, 2)),
    Case("a tail inside a page", (), ops.SwaTail(1, 10, 3), "page boundary"),
    Case("no tail at all", (), ops.SwaTail(1, 10, 0)),
    Case("a tail that is all", (), ops.SwaTail(1, 10, 10)),
    Case("a tail longer than the extend", (), ops.SwaTail(1, 4, 8), "part of the extend"),
    Case("a negative tail", (), ops.SwaTail(1, 4, -4), "part of the extend"),
    Case("a tail extend by nothing", (), ops.SwaTail(1, 0, 0), "part of the extend"),
    Case("a tail extend of a retired name", (*PAIR, ops.Free(1)), ops.SwaTail(1, 4, 4), "was used"),
    Case("a tail counted from the row's start", (ops.Extend(((1, 3),)),), ops.SwaTail(1, 5, 4)),
    Case(
        "a tail off the row's pages",
        (ops.Extend(((1, 3),)),),
        ops.SwaTail(1, 4, 4),
        "page boundary",
    ),
    Case("a tail that ends before its row", (), ops.SwaTail(1, 10, 3, 3)),
    Case("a tail that is all but what lies beyond", (), ops.SwaTail(1, 10, 7, 3)),
    Case("a tail that reaches beyond itself", (), ops.SwaTail(1, 10, 8, 3), "part of the extend"),
    Case("a tail that ends after its row", (), ops.SwaTail(1, 4, 8, -4), "part of the extend"),
    Case("no tail, and a part beyond it", (), ops.SwaTail(1, 10, 0, 3), "end with the row"),
    Case("an early end that moves the start", (), ops.SwaTail(1, 10, 2, 1), "page boundary"),
    Case(
        "a tail that ends early where tails do not",
        (),
        ops.SwaTail(1, 10, 3, 3),
        "end with the row",
        contract=Contract(tail_ends_early=False),
    ),
    Case(
        "a tail to the end where no other is known",
        (),
        ops.SwaTail(1, 10, 2),
        contract=Contract(tail_ends_early=False),
    ),
    Case(
        "an extend inside a page whose tail ended early",
        (ops.SwaTail(1, 3, 2, 1),),
        ops.Extend(((1, 1),)),
        "no live peer",
    ),
    Case("a tail without an SWA pool", (), ops.SwaTail(1, 4, 4), "no SWA pool", SINGLE),
    Case("a free of a row", PAIR, ops.Free(1)),
    Case("a free of a part", PAIR, ops.Free(1, 1, 2)),
    Case("a free of no row", PAIR, ops.Free(3), "no sequence 3"),
    Case("a free of no pages", PAIR, ops.Free(1, 1, 1), "has no pages"),
    Case("a free beyond the row", PAIR, ops.Free(1, 1, 3), "has no pages"),
    Case("a free from before the row", PAIR, ops.Free(1, -1, 1), "has no pages"),
    Case("a free of tombstones", DEAD, ops.Free(1)),
    Case("a free_swa of a row", PAIR, ops.FreeSwa(1)),
    Case("a free_swa of tombstones", DEAD, ops.FreeSwa(1)),
    Case("a free_swa of no row", PAIR, ops.FreeSwa(3), "no sequence 3"),
    Case("a free_swa without an SWA pool", PAIR, ops.FreeSwa(1), "no SWA pool", SINGLE),
    Case("a free_swa by segments", PAIR, ops.FreeSwa(1, form="segments")),
    Case("a free_full of tombstones", DEAD, ops.FreeFull(1)),
    Case("a free_full of live pages", PAIR, ops.FreeFull(1), "still has its peer"),
    Case("a free_full of no row", DEAD, ops.FreeFull(3), "no sequence 3"),
    Case("a free_full by one slot a page", DEAD, ops.FreeFull(1, form="sparse"), "by sparse"),
    Case("a free_full in one pool", PAIR, ops.FreeFull(1), geometry=SINGLE),
    Case("a group", (), ops.GroupBegin()),
    Case("a group in a group", (ops.GroupBegin(),), ops.GroupBegin(), "a group is open"),
    Case("the end of a group", (ops.GroupBegin(),), ops.GroupEnd()),
    Case("the end of no group", (), ops.GroupEnd(), "no group is open"),
    Case("a locked recovery", DEAD, ops.Recover(1, 2, True)),
    Case("an unlocked recovery of two pages", DEAD, ops.Recover(1, 2, False, pages=2)),
    Case("a recovery without an SWA pool", PAIR, ops.Recover(1, 2, True), "no SWA pool", SINGLE),
    Case("a recovery of a row from itself", DEAD, ops.Recover(1, 1, True), "joins two sequences"),
    Case("a recovery of no pages", DEAD, ops.Recover(1, 2, True, 0), "joins two sequences"),
    Case("a recovery of no row", DEAD, ops.Recover(3, 2, True), "no sequence 3"),
    Case("a recovery from no row", DEAD, ops.Recover(1, 3, True), "no sequence 3"),
    Case("a recovery beyond the row", DEAD, ops.Recover(1, 2, True, 2, 1, 0), "has no pages"),
    Case("a recovery of a live page", PAIR, ops.Recover(1, 2, True), "no tombstone"),
    Case(
        "a recovery from a tombstone",
        (*DEAD, ops.FreeSwa(2)),
        ops.Recover(1, 2, True),
        "no live peer",
    ),
    Case(
        "a recovery of a page in part",
        (ops.Extend(((1, 3),)), ops.FreeSwa(1), ops.Alloc(2, 1)),
        ops.Recover(1, 2, True),
        "whole pages",
    ),
    Case(
        "a recovery from a page mapped in part",
        (*DEAD, ops.Extend(((3, 2),)), ops.SwaTail(3, 2, 0)),
        ops.Recover(1, 3, True),
        "no live peer",
    ),
    Case("a load-back", (), ops.LoadBack(1, 3, 2)),
    Case("a load-back without SWA pages", (), ops.LoadBack(1, 3, 0)),
    Case("a load-back of nothing", (), ops.LoadBack(1, 0, 0), "part of the row"),
    Case("a load-back with more SWA pages", (), ops.LoadBack(1, 2, 3), "part of the row"),
    Case("a load-back under a used name", PAIR, ops.LoadBack(1, 1, 1), "was used before"),
    Case("a load-back without an SWA pool", (), ops.LoadBack(1, 1, 1), "no SWA pool", SINGLE),
    Case("an SWA load-back of tombstones", DEAD, ops.LoadBackSwa(1)),
    Case("an SWA load-back of live pages", PAIR, ops.LoadBackSwa(1), "still has its peer"),
    Case("an SWA load-back of no row", DEAD, ops.LoadBackSwa(3), "no sequence 3"),
    Case("an SWA load-back in one pool", PAIR, ops.LoadBackSwa(1), "no SWA pool", SINGLE),
    Case(
        "an SWA load-back of a page in part",
        (ops.SwaTail(1, 3, 0),),
        ops.LoadBackSwa(1),
        "whole pages",
    ),
    Case("a retraction", PAIR, ops.Retract(1, 1)),
    Case("a retraction of no row", PAIR, ops.Retract(3, 1), "no sequence 3"),
    Case("a used backup", (*PAIR, ops.Retract(1, 1)), ops.Retract(2, 1), "was used before"),
    Case(
        "a used-up backup",
        (*PAIR, ops.Retract(1, 1), ops.Restore(1, 3)),
        ops.Retract(2, 1),
        "was used before",
    ),
    Case("a restore", (*PAIR, ops.Retract(1, 1)), ops.Restore(1, 3)),
    Case("a restore of no backup", PAIR, ops.Restore(1, 3), "no backup 1"),
    Case(
        "a second restore",
        (*PAIR, ops.Retract(1, 1), ops.Restore(1, 3)),
        ops.Restore(1, 4),
        "no backup 1",
    ),
    Case("a restore under a used name", (*PAIR, ops.Retract(1, 1)), ops.Restore(1, 1), "was used"),
    Case("a restore with a tail", (*PAIR, ops.Retract(1, 1)), ops.Restore(1, 3, 4)),
    Case("a restore without a tail", (*PAIR, ops.Retract(1, 1)), ops.Restore(1, 3, 0)),
    Case(
        "a restore with a tail inside a page",
        (*PAIR, ops.Retract(1, 1)),
        ops.Restore(1, 3, 3),
        "page boundary",
    ),
    Case(
        "a restore with a tail longer than the row",
        (*PAIR, ops.Retract(1, 1)),
        ops.Restore(1, 3, 12),
        "page boundary",
    ),
    Case(
        "a restore with a tail in one pool",
        (*PAIR, ops.Retract(1, 1)),
        ops.Restore(1, 3, 4),
        "whole rows",
        SINGLE,
    ),
    Case("a relocation", PAIR, ops.Relocate(1)),
    Case("a relocation of tombstones", DEAD, ops.Relocate(1)),
    Case("a relocation of no row", PAIR, ops.Relocate(3), "no sequence 3"),
    Case("a relocation in one pool", PAIR, ops.Relocate(1), geometry=SINGLE),
    Case("a clear", PAIR, ops.Clear()),
    Case("a clear of nothing", (), ops.Clear()),
    # What a target's contract takes away.
    Case(
        "a tensor scribbled over where callers do not",
        (),
        ops.Alloc(1, 1, overwrite=True),
        "do not overwrite",
        contract=Contract(overwrite_lent=False),
    ),
    Case(
        "an extended one scribbled over where callers do not",
        (),
        ops.Extend(((1, 1),), overwrite=True),
        "do not overwrite",
        contract=Contract(overwrite_lent=False),
    ),
    Case(
        "a decoded one scribbled over where callers do not",
        PAIR,
        ops.Decode((1,), overwrite=True),
        "do not overwrite",
        contract=Contract(overwrite_lent=False),
    ),
    Case(
        "a freed tensor scribbled over where callers do not",
        PAIR,
        ops.Free(1, overwrite=True),
        "keep the tensors",
        contract=Contract(overwrite_deferred=False),
    ),
    Case(
        "an SWA-freed tensor scribbled over where callers do not",
        PAIR,
        ops.FreeSwa(1, overwrite=True),
        "keep the tensors",
        contract=Contract(overwrite_deferred=False),
    ),
    Case(
        "a full-freed tensor scribbled over where callers do not",
        DEAD,
        ops.FreeFull(1, overwrite=True),
        "keep the tensors",
        contract=Contract(overwrite_deferred=False),
    ),
    Case(
        "a form of free that callers do not use",
        PAIR,
        ops.Free(1, form="segments"),
        "by segments",
        contract=Contract(free_forms=frozenset(("slots",))),
    ),
    Case(
        "a form of free_full that callers do not use",
        DEAD,
        ops.FreeFull(1, form="segments"),
        "by segments",
        contract=Contract(free_forms=frozenset(("slots",))),
    ),
    Case(
        "a form of free_swa that callers do not use",
        PAIR,
        ops.FreeSwa(1, form="sparse"),
        "by sparse",
        contract=Contract(free_swa_forms=frozenset(("slots",))),
    ),
    Case(
        "a free of a tombstone where callers free_full it",
        DEAD,
        ops.Free(1),
        "with a live peer only",
        contract=Contract(live_frees=frozenset(("slots",))),
    ),
    Case(
        "a free of a tombstone by another form",
        DEAD,
        ops.Free(1, form="segment"),
        contract=Contract(live_frees=frozenset(("slots",))),
    ),
    Case(
        "a free_swa of a tombstone where callers do not",
        DEAD,
        ops.FreeSwa(1),
        "live peer only",
        contract=Contract(live_swa_frees=frozenset(("slots",))),
    ),
    Case(
        "more than there is where callers look first",
        (),
        ops.Alloc(1, 9),
        "check the capacity",
        contract=Contract(exhaustion=False),
    ),
    Case(
        "all that there is where callers look first",
        (),
        ops.Alloc(1, 8),
        contract=Contract(exhaustion=False),
    ),
    Case(
        "a restore with a tail where callers have no tails",
        (*PAIR, ops.Retract(1, 1)),
        ops.Restore(1, 3, 4),
        "whole rows",
        contract=Contract(ops=frozenset(OP_KINDS) - {"swa_tail"}),
    ),
    Case(
        "a locked recovery where callers have none",
        DEAD,
        ops.Recover(1, 2, True),
        "do not recover locked",
        contract=Contract(locked_recovery=False),
    ),
    Case(
        "an unlocked recovery where callers have no locked ones",
        DEAD,
        ops.Recover(1, 2, False),
        contract=Contract(locked_recovery=False),
    ),
    Case("a hostile call that is not on trial", (), ops.Hostile("free_padding"), "not on trial"),
    Case(
        "a hostile call that is on trial",
        (),
        ops.Hostile("free_padding"),
        contract=Contract(hostile=frozenset(("free_padding",))),
    ),
    Case(
        "a hostile call that would be legal",
        (),
        ops.Hostile("begin_nested"),
        "would be legal",
        contract=Contract(hostile=frozenset(("begin_nested",))),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace(" ", "-"))
def test_an_op_is_allowed_exactly_when_its_rule_says_so(
    case: Case, keep: Callable[..., Any]
) -> None:
    books = keep(**case.geometry, contract=case.contract)
    books.do(*case.before)

    why = books.model.why_not(case.op)

    assert books.model.allows(case.op) is (case.why is None)
    assert why is None if case.why is None else case.why in str(why)


SPARSE: dict[str, Any] = {"swa_pages": 0, "device_pages": 4}
SAVER: dict[str, Any] = {"saver": True}
BACKUP = (*PAIR, ops.Retract(1, 1))
BUFFER = (*PAIR, ops.DeviceBuffer(1, 1, 2))
RESERVED = (ops.Reserve(1, "weights", 2),)
EXAMPLES: dict[str, tuple[dict[str, Any], tuple[Op, ...], Op]] = {
    "alloc": ({}, (), ops.Alloc(9, 1)),
    "extend": ({}, (), ops.Extend(((9, 1),))),
    "decode": ({}, PAIR, ops.Decode((1,))),
    "swa_tail": ({}, (), ops.SwaTail(9, 4, 4)),
    "free": ({}, PAIR, ops.Free(1)),
    "free_swa": ({}, PAIR, ops.FreeSwa(1)),
    "free_full": ({}, DEAD, ops.FreeFull(1)),
    "group_begin": ({}, (), ops.GroupBegin()),
    "group_end": ({}, (ops.GroupBegin(),), ops.GroupEnd()),
    "recover": ({}, DEAD, ops.Recover(1, 2, True)),
    "load_back": ({}, (), ops.LoadBack(9, 1, 1)),
    "load_back_swa": ({}, DEAD, ops.LoadBackSwa(1)),
    "retract": ({}, PAIR, ops.Retract(1, 1)),
    "restore": ({}, BACKUP, ops.Restore(1, 9)),
    "relocate": ({}, PAIR, ops.Relocate(1)),
    "extend_logical": (SPARSE, (), ops.ExtendLogical(((9, 1),))),
    "free_device": (SPARSE, PAIR, ops.FreeDevice(1)),
    "device_buffer": (SPARSE, PAIR, ops.DeviceBuffer(1, 1, 1)),
    "free_buffer": (SPARSE, BUFFER, ops.FreeBuffer(1)),
    "reserve": (SAVER, (), ops.Reserve(1, "kv_cache", 1)),
    "drop": (SAVER, RESERVED, ops.Drop(1)),
    "pause": (SAVER, (), ops.Pause("kv_cache")),
    "resume": (SAVER, (), ops.Resume("kv_cache")),
    "clear": ({}, (), ops.Clear()),
    "hostile": ({}, (), ops.Hostile("free_padding")),
}


@pytest.mark.parametrize("kind", OP_KINDS)
def test_a_kind_of_op_that_callers_do_not_use_is_out(kind: str, keep: Callable[..., Any]) -> None:
    geometry, before, op = EXAMPLES[kind]
    books = keep(**geometry, contract=Contract(hostile=frozenset(HOSTILE_CALLS)))
    books.do(*before)
    assert books.model.allows(op)

    books.model.contract = Contract(
        ops=frozenset(OP_KINDS) - {kind}, hostile=frozenset(HOSTILE_CALLS)
    )

    assert f"do not use {kind}" in str(books.model.why_not(op))


def test_every_kind_of_op_has_an_example_and_bears_its_name() -> None:
    assert set(EXAMPLES) == set(OP_KINDS)
    assert all(op.kind == kind for kind, (_, _, op) in EXAMPLES.items())
    assert [kind for kind, (_, _, op) in EXAMPLES.items() if op.hostile] == ["hostile"]


def test_a_model_without_a_contract_has_the_widest_one(keep: Callable[..., Any]) -> None:
    model: Model = keep().model
    assert model.contract == Contract()
    assert model.contract.ops == frozenset(OP_KINDS)


def test_whether_an_op_is_allowed_does_not_depend_on_what_was_only_asked(
    keep: Callable[..., Any],
) -> None:
    books = keep()
    books.do(*DEAD)
    before = books.snapshot()
    for case in CASES:
        books.model.why_not(case.op)
        books.model.must_refuse(case.op)
    assert books.snapshot() == before
    assert isinstance(books.answer(ops.Hostile("free_padding")), Raised)

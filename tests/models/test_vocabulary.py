"""Ops, answers, violations and the promise that the models stand on their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcore.models
from kvcore.models import (
    Clause,
    Contract,
    Done,
    Lent,
    Raised,
    Refused,
    Violation,
    ops,
)
from kvcore.models.contract import ALL_FORMS
from kvcore.models.ops import OP_KINDS, AnyOp
from kvcore.models.state import NO_PEER, Page, Row, Side
from kvcore.models.violation import some

ALONE = """
import importlib, sys
sys.modules["torch"] = sys.modules["numpy"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sorted(n for n in sys.modules if n.startswith("kvcore.") and ".models" not in n))
"""
"""Imports the modules named where torch and numpy cannot be, and says what else of kvcore came."""


def test_models_load_where_torch_and_numpy_are_missing_and_without_the_core() -> None:
    folder = Path(kvcore.models.__file__).parent
    names = [f"kvcore.models.{path.stem}" for path in folder.glob("[a-z]*.py")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALONE, *names], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['kvcore._layout']", done.stderr
    assert len(names) > 9


def test_the_widest_contract_leaves_out_hostile_calls_alone() -> None:
    contract = Contract()
    assert contract.ops == set(OP_KINDS)
    assert (contract.free_forms, contract.free_swa_forms) == (ALL_FORMS, ALL_FORMS)
    assert not contract.live_frees
    assert not contract.live_swa_frees
    assert contract.overwrite_lent
    assert contract.overwrite_deferred
    assert contract.exhaustion
    assert contract.full_side_joins_group
    assert contract.free_swa_joins_group
    assert contract.locked_recovery
    assert contract.tail_ends_early
    assert not contract.hostile


def test_every_kind_of_op_can_be_in_a_trace() -> None:
    assert {kind.kind for kind in AnyOp.__args__} == set(OP_KINDS)


def test_two_violations_are_the_same_when_law_and_op_kind_agree() -> None:
    first = Violation("L3", 7, "free", (Clause("L3", "a", "b", (1,)), Clause("L1", "c", "d")))
    second = Violation("L3", 2, "free", (Clause("L3", "x", "y", (), (5,)),))
    assert first.signature == second.signature == ("L3", "free")
    assert first.signature != Violation("L3", 7, "drain", first.clauses).signature
    assert first.signature != Violation("L1", 7, "free", first.clauses).signature
    assert first.laws == {"L3", "L1"}


def test_some_pages_are_named_in_order_and_the_rest_counted() -> None:
    assert some([]) == "none"
    assert some({3, 1, 2}) == "1, 2, 3"
    assert some(set(range(1, 9))) == "1, 2, 3, 4, 5, 6, 7, 8"
    assert some(list(range(9, 0, -1))) == "1, 2, 3, 4, 5, 6, 7, 8 … (9 in all)"
    assert some((5, 4, 6), limit=1) == "4 … (3 in all)"


def test_a_page_knows_its_tokens_and_whether_all_have_peers() -> None:
    assert Page(1, 2, [7, 8], [7, 8]).fully_mapped
    assert not Page(1, 2, [7, 8], [7, NO_PEER]).fully_mapped
    assert Page(1, 2, [7, 8], [7, NO_PEER]).tokens == 2


@pytest.mark.parametrize("group", [0, 1])
def test_a_page_is_gone_once_it_went_in_a_group_or_outside(group: int) -> None:
    assert not Page(1, 0).gone
    assert Page(1, 0, gone_in=group).gone


@pytest.mark.parametrize(
    ("peers", "evicted"),
    [
        ([[0, 0], [0, 0], [5]], 4),
        ([[0, 0], [3, 4], [0]], 2),
        ([[1, 2], [0, 0], [5]], 0),
        ([[0, 0], [0, 0], [0]], 4),
    ],
    ids=str,
)
def test_a_row_counts_the_tokens_of_whole_pages_at_its_front_without_a_peer(
    peers: list[list[int]], evicted: int
) -> None:
    pages = [Page(i, 1 if any(own) else 0, own, own) for i, own in enumerate(peers, 1)]
    assert Row(pages).evicted(2) == evicted
    for page in pages:
        page.gone_in = None if page.swa else 0
    assert Row(pages).evicted(2, pure_swa=True) == evicted


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [(0, None, [1, 2, 3]), (1, 2, [2]), (2, 4, []), (1, 1, []), (-1, 2, []), (3, None, [])],
)
def test_a_span_is_within_the_row_or_empty(start: int, stop: int | None, found: list[int]) -> None:
    row = Row([Page(1, 0, [1]), Page(2, 0, [2]), Page(3, 0, [3])])
    assert [page.full for page in row.span(start, stop)] == found
    assert row.tokens == 3


def test_what_waits_is_free_once_the_group_has_ended() -> None:
    side = Side(3)
    assert side.free == {1, 2, 3}
    side.free = set()
    side.release(1, deferred=False)
    side.release(2, deferred=True)
    assert (side.free, side.pending) == ({1}, {2})
    side.settle()
    assert (side.free, side.pending) == ({1, 2}, set())
    side.reset()
    assert (side.free, side.pending) == ({1, 2, 3}, set())


@pytest.mark.parametrize(
    "value",
    [
        ops.Clear(),
        ops.Alloc(1, 1),
        ops.Pause("kv_cache"),
        ops.DeviceBuffer(1, 1, 1),
        Lent((1,)),
        Refused(),
        Done(),
        Raised("a", "b"),
    ],
    ids=str,
)
def test_ops_and_answers_are_immutable_and_compare_by_value(value: Any) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        value.kind = "other"
    assert value == msgspec.structs.replace(value)
    assert hash(value) == hash(msgspec.structs.replace(value))


def test_an_answer_says_of_other_sides_only_what_there_is() -> None:
    assert Lent((1,)) == Lent((1,), (), (), ())
    assert msgspec.json.encode(Lent((1,))) == b'{"type":"lent","slots":[1]}'


def test_what_an_op_does_not_say_is_the_plain_case() -> None:
    assert ops.Free(1) == ops.Free(1, 0, None, "slots", False)
    assert ops.FreeSwa(1) == ops.FreeSwa(1, 0, None, "slots", False)
    assert ops.FreeFull(1) == ops.FreeFull(1, 0, None, "slots", False)
    assert ops.FreeDevice(1) == ops.FreeDevice(1, 0, None, "slots", False)
    assert ops.SwaTail(1, 4, 4) == ops.SwaTail(1, 4, 4, 0)
    assert ops.Recover(1, 2, True) == ops.Recover(1, 2, True, 1, 0, 0)
    assert ops.LoadBackSwa(1) == ops.LoadBackSwa(1, 0, None)
    assert ops.Restore(1, 2) == ops.Restore(1, 2, None)
    assert ops.Hostile("free_padding") == ops.Hostile("free_padding", -1, -1)
    assert not ops.Alloc(1, 1).overwrite
    assert not ops.Extend(((1, 1),)).overwrite
    assert not ops.Decode((1,)).overwrite


def test_an_op_is_called_by_its_kind_and_a_hostile_one_by_its_call_too() -> None:
    assert ops.FreeSwa(1).label == ops.FreeSwa(2, 1).label == "free_swa"
    assert ops.Hostile("free_padding").label == "hostile free_padding"

"""Geometry, violations and the promise that the models stand on their own."""

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
    Geometry,
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


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        ((0, 1, 0), "page_size is 0, expected at least 1"),
        ((4, 0, 0), "full_pages is 0, expected at least 1"),
        ((4, 1, -1), "swa_pages is -1, expected 0 or more"),
    ],
)
def test_a_geometry_without_room_is_rejected(arguments: tuple[int, int, int], say: str) -> None:
    with pytest.raises(ValueError, match=say):
        Geometry(*arguments)


def test_a_geometry_counts_slots_without_the_padding_page() -> None:
    geometry = Geometry(page_size=4, full_pages=8, swa_pages=6)
    assert (geometry.full_size, geometry.swa_size) == (32, 24)
    assert geometry.hybrid
    assert not Geometry(4, 8).hybrid


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert Geometry(4, 8).pages_for(tokens) == pages


def test_a_geometry_describes_itself() -> None:
    assert Geometry(4, 8, 6).describe() == "8+6 pages of 4"
    assert Geometry(1, 8, need_sort=True).describe() == "8 pages of 1, sorted"


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
    [ops.Clear(), ops.Alloc(1, 1), Lent((1,)), Refused(), Done(), Raised("a", "b")],
    ids=str,
)
def test_ops_and_answers_are_immutable_and_compare_by_value(value: Any) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        value.kind = "other"
    assert value == msgspec.structs.replace(value)
    assert hash(value) == hash(msgspec.structs.replace(value))


def test_what_an_op_does_not_say_is_the_plain_case() -> None:
    assert ops.Free(1) == ops.Free(1, 0, None, "slots", False)
    assert ops.FreeSwa(1) == ops.FreeSwa(1, 0, None, "slots", False)
    assert ops.FreeFull(1) == ops.FreeFull(1, 0, None, "slots", False)
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

"""With `validate=True`, an insert refuses slots that cannot be what its caller says; nothing has
changed then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcore import InsertParams, RadixKey, UnifiedRadixCache
from kvcore.errors import (
    DeadPeerError,
    DoubleFreeError,
    GeometryError,
    InvalidSlotError,
    LivePeerError,
)

Make = Callable[..., Any]
Unchanged = Callable[..., str]
A = list(range(100, 132))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda slots: slots * 0, InvalidSlotError, "slots never lent"),
        (lambda slots: -slots, InvalidSlotError, "slots never lent"),
        (lambda slots: slots + 4000, InvalidSlotError, "slots outside the full pool"),
        (lambda slots: slots + 16, DeadPeerError, "slots without a peer"),
        (lambda slots: slots.roll(1), GeometryError, "do not run through in order"),
        (lambda slots: slots.flip(0), GeometryError, "do not run through in order"),
        (lambda slots: slots[:4].repeat(3), DoubleFreeError, "named more than once"),
    ],
    ids=["padding", "negative", "beyond", "not-lent", "shifted", "reversed", "repeated"],
)
def test_slots_that_are_no_pages_on_loan_are_refused(
    bench: Make,
    unchanged: Unchanged,
    spoil: Callable[[torch.Tensor], torch.Tensor],
    error: type[Exception],
    message: str,
) -> None:
    cached = bench(4, 8)
    params = InsertParams(RadixKey(A[:12]), spoil(cached.compute(12)))
    assert message in unchanged(cached, error, cached.cache.insert, params)


@pytest.mark.parametrize("evicted", [0, 8], ids=["live", "tombstone"])
def test_the_tree_s_own_slots_are_no_duplicates(
    bench: Make, unchanged: Unchanged, evicted: int
) -> None:
    cached = bench(4, 4)
    cached.put(A[:12], evicted=evicted)
    own = torch.cat((cached.slots(A[:12]), cached.compute(4)))
    again = InsertParams(RadixKey(A[:16]), own, 4, evicted)
    assert "the tree holds" in unchanged(cached, DoubleFreeError, cached.cache.insert, again)
    cached.cache.insert(InsertParams(RadixKey(A[:16]), own, 12, evicted))
    cached.check()


def test_the_cursor_is_where_the_peers_begin(bench: Make, unchanged: Unchanged) -> None:
    cached = bench(4, 4)
    slots, key = cached.compute(16, evicted=8), RadixKey(A[:16])
    for cursor, error in ((4, DeadPeerError), (12, LivePeerError)):
        params = InsertParams(key, slots, 0, cursor)
        unchanged(cached, error, cached.cache.insert, params)
    cached.cache.insert(InsertParams(key, slots, 0, 8))
    cached.check()


def test_peers_freed_in_the_caller_s_group_may_still_be_mapped(bench: Make) -> None:
    cached = bench(4, 4)
    slots = cached.compute(16)
    cached.allocator.free_group_begin()
    cached.allocator.free_swa(slots[:8])
    cached.cache.insert(InsertParams(RadixKey(A[:16]), slots, 0, 8))
    cached.allocator.free_group_end()
    cached.check()


def test_values_are_checked_where_the_environment_says_so(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = bench(4, 4)
    parts = cached.rows, cached.allocator, 4, 4
    for setting, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("KVCORE_VALIDATE", setting)
        assert UnifiedRadixCache(*parts).validate is expected
        assert UnifiedRadixCache(*parts, validate=not expected).validate is not expected

"""How the slots of one lending call fall to rows, while a recording is translated.

A batch names each row by the slot of its last token. A row goes on if that token is its last one;
where the new tokens begin a page anyway, as behind a prefix that several requests share, they may
as well be a new row, which is what they become if somebody else went on there. Leaves out the ops
themselves (`kvcore.targets.recording_calls`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from kvcore.targets.recording_raw import Call, RawCall, Recorded, Side
from kvcore.targets.recording_rows import Rows, Stop


@dataclass(slots=True)
class Batch:
    """``parts``: (row, new tokens); ``slots`` and ``peers`` what they got; ``new``: rows that start
    with it; ``again``: slots inside a page that were lent before, as after drafts that were not
    accepted."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    new: set[int] = field(default_factory=set)
    again: int = 0


def batch_of(
    rows: Rows,
    call: RawCall,
    rows_before_and_after: tuple[list[int], list[int], list[int]],
    cuts: Collection[int],
) -> Batch:
    """The rows of a batch: their lengths in tokens before and after, and the slot of each one's
    last token. ``cuts``: places in the answer where a row ends and another begins. Raises
    `Stop`."""
    before, after, last = rows_before_and_after
    if not len(before) == len(after) == len(last):
        raise Stop(f"{len(before)}, {len(after)} and {len(last)} rows in one batch")
    batch, at = Batch(), 0
    for prefix, length, slot in zip(before, after, last, strict=True):
        tokens = length - prefix
        if tokens < 0:
            raise Stop(f"a row shrinks from {prefix} to {length} tokens")
        taken = {seq for seq, _ in batch.parts}
        seq, again = _row_behind(rows, prefix, slot, taken)
        if at in cuts and again == 0 and prefix % rows.geometry.page_size == 0:
            seq = rows.new_name()
        skipped = min(again, tokens)
        batch.again += skipped
        if tokens > skipped:
            ends = [*(cut for cut in sorted(cuts) if at + skipped < cut < at + tokens), at + tokens]
            batch.parts.append((seq, ends[0] - at - skipped))
            batch.parts += [(rows.new_name(), stop - start) for start, stop in pairwise(ends)]
            batch.slots += call.slots[at + skipped : at + tokens]
            batch.peers += call.peers[at + skipped : at + tokens]
        at += tokens
    if call.ending == "lent" and len(call.slots) != at:
        raise Stop(f"{len(call.slots)} slots were lent for {at} tokens")
    batch.new = {seq for seq, _ in batch.parts if seq not in rows.model.rows}
    return batch


def _row_behind(rows: Rows, prefix: int, slot: int, taken: set[int]) -> tuple[int, int]:
    """The row that goes on behind ``slot``, or a new one, and how many of the tokens to come have
    a slot already."""
    size = rows.geometry.page_size
    if prefix <= 0 or slot < 0:
        return rows.new_name(), 0
    page = slot // size
    seq = rows.holder(page)
    if prefix % size == 0:
        goes_on = seq is not None and seq not in taken and rows.last_slot(seq) == slot
        return (seq if seq is not None and goes_on else rows.new_name()), 0
    if seq is None:
        raise Stop(f"slot {slot}, which it continues, is on loan by no call of this recording")
    beyond = rows.last_slot(seq) - slot
    if seq in taken or not 0 <= beyond < size:
        raise Stop(f"it goes on behind slot {slot}, which is not at the end of its row")
    return seq, beyond


Splits = dict[int, set[int]]
"""By call, the places in its answer at which its slots must fall to several rows."""


def splits_of(recorded: Recorded) -> Splits:
    """Where an `alloc` lends to several rows, as far as the mapping writes show by themselves.

    At page size 1 one call lends the slots of a whole batch. Where a later recovery moves peers
    between two requests of one batch, they must not be one row.
    """
    size = recorded.header.geometry.page_size
    lender: dict[int, tuple[int, int]] = {}
    full_of: dict[int, int] = {}
    splits: Splits = {}
    for call in recorded.calls:
        if call.side is Side.SWA:
            continue
        if call.ending == "lent":
            for at, slot in enumerate(call.slots):
                if slot % size == 0:
                    lender[slot // size] = (call.number, at)
            for slot, peer in zip(call.slots, call.peers, strict=False):
                full_of[peer // size] = slot // size
        if call.call in (Call.MAP, Call.RECOVER) and call.readable and len(call.vectors) == 2:
            _split(call, size, lender, full_of, splits)
    return splits


def _split(
    call: RawCall,
    size: int,
    lender: dict[int, tuple[int, int]],
    full_of: dict[int, int],
    splits: Splits,
) -> None:
    """Note where rows must end for one mapping write or recovery."""
    kept_slots, others = call.vectors[0] or [], call.vectors[1] or []
    run = (0, 0, 0)
    for slot, other in zip(kept_slots[::size], others[::size], strict=False):
        kept, given = slot // size, other // size
        incoming = given if call.call is Call.RECOVER else full_of.get(given)
        if call.call is Call.MAP:
            full_of[given] = kept
        if incoming is None or kept not in lender or incoming not in lender:
            continue
        (first, at), (second, place) = lender[kept], lender[incoming]
        if first == second and run != (first, at - size, place - size):
            splits.setdefault(first, set()).add(max(at, place))
        run = (first, at, place) if first == second else (0, 0, 0)

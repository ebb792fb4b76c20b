"""The catalogue of laws: id, sentence, cost and public source of each.

A law is checked in a plain form (lists, readable differences) and, where pools can be large, in a
vectorised form (tensors); `kvcore.invariants.plain` and `kvcore.invariants.vectorised` hold the
forms under the same ids. The sentences are those of the project's semantics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cost(Enum):
    """When a law is due."""

    EACH_ANSWER = "in every answer"
    EACH_STEP = "after every step"
    PERIODIC = "every few steps"
    AT_END = "after the last step"


@dataclass(frozen=True, slots=True)
class Law:
    """One law. ``source`` names a public report of its being broken."""

    id: str
    title: str
    sentence: str
    cost: Cost
    source: str


LAWS: tuple[Law, ...] = (
    Law(
        "L5",
        "failure changes nothing",
        "After a refusal or a rejected argument the state equals the state before.",
        Cost.EACH_ANSWER,
        "sglang#34399",
    ),
    Law(
        "L3",
        "mapped = allocated",
        "Every SWA page is exactly once in one of: the mapping, the free list, the open group. "
        "Each SWA page has exactly one full page. The same of device pages, which may also be in a "
        "buffer.",
        Cost.EACH_STEP,
        "sglang#36081",
    ),
    Law(
        "L2",
        "no page twice",
        "No page is twice in a free container, every id is in 1..N, the padding page is nowhere.",
        Cost.EACH_STEP,
        "sglang#40305",
    ),
    Law(
        "L4",
        "no stale mapping",
        "A free full slot maps to 0. A newly lent one maps to an SWA slot lent by the same call, "
        "or to 0. A lent one keeps its peer. The sentinel stays -1. The same of device slots.",
        Cost.EACH_STEP,
        "sglang#25805",
    ),
    Law(
        "L6",
        "group law",
        "Pages freed in a group are lent to nobody before its end, and its end releases exactly "
        "the pages that were owned when each call was made.",
        Cost.EACH_ANSWER,
        "sglang#36135",
    ),
    Law(
        "L1",
        "conservation",
        "Free, lent and pending pages are disjoint sets, and together all pages 1..N.",
        Cost.EACH_STEP,
        "sglang#36081",
    ),
    Law(
        "tree",
        "what the cache holds",
        "The cache holds each prefix once, page by page: keys, slots, tombstones and cursors are "
        "what was computed, a match ends where one live window lies before it, and no unlocked "
        "leaf is a bare tombstone.",
        Cost.EACH_STEP,
        "sglang#29860",
    ),
    Law(
        "locks",
        "locks are counted",
        "Every lock count and every size counter of the cache equals a recount over the requests "
        "and loads that hold locks.",
        Cost.EACH_STEP,
        "bytedance/sglang#748",
    ),
    Law(
        "L7",
        "capacity is a promise",
        "The capacity queries say how much can be lent: that much is lent, and no page more.",
        Cost.EACH_STEP,
        "vllm#52707",
    ),
    Law(
        "L8",
        "tensors are owned",
        "Tensors that were handed out keep their values, and tensors that were handed in may be "
        "overwritten.",
        Cost.EACH_STEP,
        "sglang#28494",
    ),
    Law(
        "L9",
        "wrapper equivalence",
        "An allocator that wraps others answers every operation and every query as they do.",
        Cost.EACH_STEP,
        "sglang#24039",
    ),
    Law(
        "L10",
        "drain",
        "When everything is freed, every pool is back to its full size and every mapping entry but "
        "the sentinel is 0.",
        Cost.AT_END,
        "sglang#36081",
    ),
    Law(
        "stamps",
        "stamps",
        "Every lent token's rows, K and V of every kind of layer, hold what was written for it.",
        Cost.PERIODIC,
        "sglang#35957",
    ),
    Law(
        "rows",
        "request rows",
        "The request pool's table holds the slots of every live request, in token order.",
        Cost.PERIODIC,
        "-",
    ),
    Law(
        "saver",
        "memory saver",
        "Pausing a tag gives back all bytes that were allocated under it and no others; resuming "
        "brings them back at the same addresses, filled with zeros.",
        Cost.PERIODIC,
        "sglang#22807",
    ),
    Law(
        "layout",
        "slots in row order",
        "An answer holds the slots that were asked for: the rest of the row's last page, then "
        "whole new pages.",
        Cost.EACH_ANSWER,
        "sglang#34399",
    ),
    Law(
        "bounds",
        "within the buffers",
        "No call reads or writes beyond a buffer, kills the process, or lends a page that is not "
        "there.",
        Cost.EACH_ANSWER,
        "sglang#34399",
    ),
    Law(
        "raises",
        "legal calls do not raise",
        "A call that keeps the contract does not raise, nor does a query.",
        Cost.EACH_ANSWER,
        "sglang#36739",
    ),
    Law(
        "hostile",
        "illegal calls raise",
        "A call that breaks the contract raises the documented error and changes nothing.",
        Cost.EACH_ANSWER,
        "sglang#36739",
    ),
)
"""All laws. The order is that of precedence: a violation is named after its first broken law."""

BY_ID: dict[str, Law] = {law.id: law for law in LAWS}

PRECEDENCE: dict[str, int] = {law.id: index for index, law in enumerate(LAWS)}

"""The ledger of known faults: deliberately wrong variants of the core, one for each reported fault.

Each variant re-creates the mechanism of a public report in a few overridden lines, so that the
difference from the right code is visible at a glance. Models, laws and sources know nothing of this
package: a fault that is not found is a gap in them. Leaves out the hunt for them
(`kvcore.strategies`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcore.models import Geometry, Violation
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.faults import (
    cache,
    capacity,
    free_lists,
    groups,
    hisparse,
    mappings,
    pools,
    saver,
)
from kvcore.targets.pool import PoolParts
from kvcore.targets.protocol import Target
from kvcore.targets.serving_targets import serving_core_target
from kvcore.targets.twin import forwarding_twin

ANY_PAGE_SIZE = (1, 2, 4, 16)
SINGLE_SLOTS = (1,)
LARGER_PAGES = (2, 4, 16)
COMPRESSED_PAGES = (4, 16)


@dataclass(frozen=True, slots=True)
class Fault:
    """One known fault.

    Attributes:
        id: how it is named on the command line, after `fault:`.
        source: the public report or releases; - where there is none.
        layer: A for the allocator, P for the pool, C for the prefix cache, M for the memory saver,
            H for HiSparse.
        what: what goes wrong, in one sentence.
        laws: laws of which at least one must break; which one depends on the program.
        parts: the classes of the core that are replaced.
        validate: whether the core's value checks are on; off where they would stop the fault's
            consequences before a law sees them.
        page_sizes: where the fault can show.
        programs: what the walker needs to find it, about the median over seeds (`kvcore faults`); a
            test fails where it takes ten times as many.
        machine: the machine that shows it, see `kvcore.strategies.machines`.
    """

    id: str
    source: str
    layer: Literal["A", "P", "C", "M", "H"]
    what: str
    laws: frozenset[str]
    parts: CoreParts
    validate: bool = True
    page_sizes: tuple[int, ...] = ANY_PAGE_SIZE
    programs: int = 1
    machine: str = "hybrid"

    def is_shown_by(self, violation: Violation) -> bool:
        """Whether one of its laws is among the broken ones: a violation is named after the first
        in order of precedence, and a fault often breaks several at once."""
        return not self.laws.isdisjoint(violation.laws)


def _laws(ids: str) -> frozenset[str]:
    return frozenset(ids.split())


_LEDGER = (
    Fault(
        "deferred-peer-lookup",
        "sglang#36081, sglang#36135",
        "A",
        "free_swa in a group looks the peers up at the end, when a recovery may have changed them.",
        _laws("L3 L6"),
        CoreParts(hybrid=groups.DeferredPeerLookup),
    ),
    Fault(
        "deferred-free-lookup",
        "sglang#36646",
        "A",
        "free in a group looks the peers up at the end, after the slot may have been remapped.",
        _laws("L3 L6"),
        CoreParts(hybrid=groups.DeferredFreeLookup),
        programs=20,
    ),
    Fault(
        "page-clears-one-slot",
        "sglang#27779",
        "A",
        "free_swa releases a whole SWA page and unmaps only the slots that were named.",
        _laws("L3 L4"),
        CoreParts(hybrid=mappings.PageClearsOneSlot),
        page_sizes=LARGER_PAGES,
    ),
    Fault(
        "tail-keeps-stale-peer",
        "sglang#25805",
        "A",
        "A tail-only extend leaves old peers on the new full slots before its tail.",
        _laws("L4"),
        CoreParts(hybrid=mappings.TailKeepsStalePeer),
        page_sizes=LARGER_PAGES,
        programs=2,
    ),
    Fault(
        "segment-frees-padding",
        "sglang#38519",
        "A",
        "The segment form does not filter unmapped entries: page 0 enters the SWA free list.",
        _laws("L1 L2"),
        CoreParts(hybrid=free_lists.SegmentFreesPadding),
    ),
    Fault(
        "two-owners-one-peer",
        "sglang#35501",
        "A",
        "A recovery leaves the incoming slots mapped: two full slots own one SWA slot.",
        _laws("L3"),
        CoreParts(hybrid=mappings.TwoOwnersOnePeer),
    ),
    Fault(
        "nested-group-drops-queue",
        "sglang#36739",
        "A",
        "free_group_begin inside a group throws away what was freed so far.",
        _laws("L1 L6"),
        CoreParts(hybrid=groups.NestedGroupDropsQueue),
        programs=2,
    ),
    Fault(
        "group-end-twice",
        "sglang#36739",
        "A",
        "A second free_group_end releases the same pages again.",
        _laws("L2 L6"),
        CoreParts(hybrid=groups.GroupEndTwice),
        programs=8,
    ),
    Fault(
        "decode-half-failure",
        "sglang 0.5.22, 0.5.23",
        "A",
        "A decode fails for want of SWA pages and keeps the full pages that it took.",
        _laws("L5"),
        CoreParts(hybrid=capacity.DecodeHalfFailure),
        programs=3,
    ),
    Fault(
        "kernel-before-check",
        "sglang#34399",
        "A",
        "The slots are computed from the free list before its length is checked.",
        _laws("L5 bounds"),
        CoreParts(hybrid=capacity.KernelBeforeCheck),
    ),
    Fault(
        "deferred-view",
        "sglang#28494",
        "A",
        "A grouped free keeps a view of a tensor that the caller overwrites before the end.",
        _laws("L6 L8"),
        CoreParts(hybrid=groups.DeferredView),
    ),
    Fault(
        "lent-view-overwritten",
        "-",
        "A",
        "alloc answers with a view of the free list, which a later free rewrites.",
        _laws("L8"),
        CoreParts(hybrid=free_lists.LentViewOverwritten),
        page_sizes=SINGLE_SLOTS,
    ),
    Fault(
        "double-free-silent",
        "sglang#40305",
        "A",
        "With page size 1 no check sees that a slot is free already.",
        _laws("L2 hostile"),
        CoreParts(hybrid=free_lists.DoubleFreeSilent),
        page_sizes=SINGLE_SLOTS,
    ),
    Fault(
        "one-page-named-twice",
        "vllm#42571",
        "A",
        "A page that one free names twice enters the free list twice.",
        _laws("L2"),
        CoreParts(hybrid=free_lists.OnePageNamedTwice),
    ),
    Fault(
        "counter-drift",
        "vllm#52707",
        "A",
        "A refused or negative alloc moves the counter of free slots and not the list.",
        _laws("L7"),
        CoreParts(hybrid=capacity.CounterDrift),
    ),
    Fault(
        "sentinel-overwritten",
        "sglang#36880",
        "A",
        "A mapping write at index -1 hits the sentinel in the mapping's last entry.",
        _laws("L4 hostile"),
        CoreParts(hybrid=mappings.SentinelOverwritten),
    ),
    Fault(
        "recovery-frees-stale-peer",
        "sglang#27586",
        "A",
        "A recovery releases the kept slots' old peer by an entry that a tombstone left behind.",
        _laws("L3 L4"),
        CoreParts(hybrid=mappings.RecoveryFreesStalePeer),
        validate=False,
    ),
    Fault(
        "backup-misses-a-buffer",
        "sglang#35957, sglang#23346",
        "P",
        "The SWA rows of a retracted request are not in its host copy.",
        _laws("stamps"),
        CoreParts(pools=PoolParts(hybrid=pools.BackupMissesABuffer)),
    ),
    Fault(
        "backup-misses-index-k",
        "sglang#35957",
        "P",
        "The index-K rows and scales of a retracted request are not in its host copy.",
        _laws("stamps"),
        CoreParts(pools=PoolParts(dsa=pools.BackupMissesIndexK)),
        machine="MLA and DSA pools",
    ),
    Fault(
        "restore-shifts-mask",
        "-",
        "P",
        "The saved SWA rows are restored by the new slots' mask alone and land on other tokens.",
        _laws("stamps"),
        CoreParts(pools=PoolParts(hybrid=pools.RestoreShiftsMask)),
        programs=3,
    ),
    Fault(
        "pool-without-host-copy",
        "sglang#33385",
        "P",
        "A pool kind lacks the host-copy calls that retraction makes.",
        _laws("L9 raises"),
        CoreParts(pools=PoolParts(hybrid=pools.PoolWithoutHostCopy)),
    ),
    Fault(
        "swa-pool-outside-saver",
        "sglang#22807",
        "M",
        "The hybrid pool builds its sub-pools with the memory saver off.",
        _laws("saver"),
        CoreParts(pools=PoolParts(hybrid=saver.SwaPoolOutsideSaver)),
        machine="memory saver",
    ),
    Fault(
        "explicit-kwargs-bypass-saver",
        "sglang#22807",
        "M",
        "Sub-pools with arguments of their own are not told of the memory saver.",
        _laws("saver"),
        CoreParts(pools=PoolParts(hybrid=saver.ExplicitKwargsBypassSaver)),
        machine="memory saver",
    ),
    Fault(
        "index-k-outside-saver",
        "sglang#22807",
        "M",
        "The index-K cache is allocated outside the region of the memory saver.",
        _laws("saver"),
        CoreParts(pools=PoolParts(dsa=saver.IndexKOutsideSaver)),
        machine="memory saver",
    ),
    Fault(
        "pause-frees-other-tag",
        "torch_memory_saver#85",
        "M",
        "A freed segment is used again under another tag and paused with its first one.",
        _laws("saver"),
        CoreParts(pools=PoolParts(saver=saver.SegmentReusedUnderAnotherTag)),
        machine="memory saver",
    ),
    Fault(
        "hisparse-not-forwarded",
        "sglang#24039",
        "H",
        "The wrapper reports the page size of its own device side.",
        _laws("L9"),
        CoreParts(compressed=hisparse.HisparseNotForwarded),
        validate=False,
        page_sizes=COMPRESSED_PAGES,
        machine="compressed HiSparse",
    ),
    Fault(
        "hisparse-drops-free-swa",
        "sglang#24039",
        "H",
        "The wrapper does not forward free_swa to the allocator that it wraps.",
        _laws("L9"),
        CoreParts(compressed=hisparse.HisparseDropsFreeSwa),
        page_sizes=COMPRESSED_PAGES,
        machine="wrapper beside inner",
    ),
    Fault(
        "device-buffer-lost",
        "-",
        "H",
        "Device pages beyond the size of a device buffer are unmapped and never returned.",
        _laws("L1"),
        CoreParts(hisparse=hisparse.DeviceBufferLost),
        machine="HiSparse",
    ),
    Fault(
        "device-buffer-loses-rest",
        "-",
        "H",
        "A partly used page is unmapped and not claimed by the device buffer.",
        _laws("L1 layout"),
        CoreParts(hisparse=hisparse.DeviceBufferLosesRest),
        page_sizes=LARGER_PAGES,
        machine="HiSparse",
    ),
    Fault(
        "hisparse-without-groups",
        "sglang 0.5.23",
        "H",
        "Free groups do nothing: what is freed inside one can be lent at once.",
        _laws("L1 L6 hostile"),
        CoreParts(hisparse=hisparse.HisparseWithoutGroups),
        machine="HiSparse",
    ),
    Fault(
        "pure-group-frees-twice",
        "sglang 0.5.23",
        "A",
        "A page of sliding layers that free_swa and free name in one group goes back twice.",
        _laws("L2 L6"),
        CoreParts(pure=groups.PureGroupFreesTwice),
        validate=False,
        page_sizes=SINGLE_SLOTS,
        programs=10,
        machine="pure SWA",
    ),
    Fault(
        "tombstone-leaf",
        "sglang#29860",
        "C",
        "The last whole page of a request loses its SWA slots and is cached as a tombstone.",
        _laws("L4 tree"),
        CoreParts(cache=cache.TombstoneLeaf),
        page_sizes=LARGER_PAGES,
        programs=2,
        machine="requests",
    ),
    Fault(
        "cursor-in-other-unit",
        "sglang#34823, sglang#34870",
        "C",
        "The eviction cursor counts one token more than the key: less than a window stays live.",
        _laws("tree"),
        CoreParts(cache=cache.CursorInOtherUnit),
        programs=2,
        machine="requests",
    ),
    Fault(
        "forgotten-cursor",
        "sglang#30845, sglang#36909",
        "C",
        "What a request caches forgets how far SWA was evicted: freed slots are cached as live.",
        _laws("L1 tree"),
        CoreParts(cache=cache.ForgottenCursor),
        validate=False,
        programs=2,
        machine="requests",
    ),
    Fault(
        "match-across-tombstone",
        "sglang#29352",
        "C",
        "The running length of a match's window is not restarted at a tombstone.",
        _laws("tree"),
        CoreParts(cache=cache.MatchAcrossTombstone),
        machine="requests",
    ),
    Fault(
        "recover-under-lock",
        "sglang#29351",
        "C",
        "A recovery replaces and frees full slots that running requests have in their rows.",
        _laws("L1 tree"),
        CoreParts(cache=cache.RecoverUnderLock),
        programs=3,
        machine="requests",
    ),
    Fault(
        "split-shares-page",
        "sglang#36457",
        "C",
        "An insert splits a node inside a page: two nodes own it.",
        _laws("L1 tree"),
        CoreParts(cache=cache.SplitSharesPage),
        page_sizes=LARGER_PAGES,
        programs=20,
        machine="requests",
    ),
    Fault(
        "lock-not-paired",
        "bytedance/sglang#748",
        "C",
        "A lock skips tombstones that its release counts down.",
        _laws("locks"),
        CoreParts(cache=cache.LockNotPaired),
        programs=9,
        machine="requests",
    ),
)

FAULTS: dict[str, Fault] = {fault.id: fault for fault in _LEDGER}
"""Every known fault by id."""


def fault_target(fault_id: str, geometry: Geometry) -> Target:
    """The core of ``geometry`` with one known fault, empty. Where the fault cannot show (see
    `Fault.page_sizes`) this is a right allocator.

    Raises:
        KeyError: there is no such fault.
    """
    fault = FAULTS[fault_id]
    if geometry.serves:
        build: Callable[..., Target] = serving_core_target
    else:
        build = forwarding_twin if fault.machine == "wrapper beside inner" else core_target
    return build(geometry, name=f"fault:{fault.id}", validate=fault.validate, parts=fault.parts)

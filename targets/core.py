"""kvcore's own allocators as targets, under the widest contract: which one a geometry asks for.

Leaves out how each is called (`kvcore.targets.core_dialects`, `kvcore.targets.core_sparse`), and
faulty variants (`kvcore.targets.faults`), which pass their own classes in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    CompressedHiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
    MemorySaver,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    Retraction,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    UnifiedRadixCache,
)
from kvcore.allocator.hisparse import COMPRESS_RATIO
from kvcore.models import Contract, Geometry
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import OP_KINDS
from kvcore.targets.core_dialects import HybridDialect, PureDialect, SingleDialect
from kvcore.targets.core_sparse import CompressedDialect, HiSparseDialect
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.hostile import CoreHostility
from kvcore.targets.memory import SaverProbe
from kvcore.targets.pool import Pool, PoolParts, StampedPool, build_device_pool, build_pool
from kvcore.targets.protocol import UnsupportedGeometry
from kvcore.targets.requests import RequestRows

CHUNK_TOKENS = 3
"""Tokens that a retraction copies at once: few, so that rows of a few pages take several pieces."""

HYBRID_OPS = frozenset(
    ("swa_tail", "free_swa", "free_full", "recover", "load_back", "load_back_swa")
)
"""Ops that need an SWA side."""

SPARSE_OPS = frozenset(("extend_logical", "free_device", "device_buffer", "free_buffer"))
"""Ops that need device slots."""

SAVER_OPS = frozenset(("reserve", "drop", "pause", "resume"))
"""Ops that need a memory saver."""

RETRACTION_OPS = frozenset(("retract", "restore", "relocate"))
"""Ops on the contents of logical slots, of which HiSparse pools hold few."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """The classes that a core target is built from; a faulty variant replaces one or two."""

    hybrid: Callable[..., SWATokenToKVPoolAllocator] = SWATokenToKVPoolAllocator
    token: Callable[..., TokenToKVPoolAllocator] = TokenToKVPoolAllocator
    paged: Callable[..., PagedTokenToKVPoolAllocator] = PagedTokenToKVPoolAllocator
    pure: Callable[..., PureSWATokenToKVPoolAllocator] = PureSWATokenToKVPoolAllocator
    hisparse: Callable[..., HiSparseTokenToKVPoolAllocator] = HiSparseTokenToKVPoolAllocator
    compressed: Callable[..., CompressedHiSparseTokenToKVPoolAllocator] = (
        CompressedHiSparseTokenToKVPoolAllocator
    )
    requests: Callable[..., ReqToTokenPool] = ReqToTokenPool
    cache: type[UnifiedRadixCache] = UnifiedRadixCache
    pools: PoolParts = field(default_factory=PoolParts)


@lru_cache(maxsize=64)
def core_contract(geometry: Geometry, *, validate: bool, owned: bool = False) -> Contract:
    """The widest contract: every op, every form, every hostile call that the build can see.
    ``owned``: callers leave alone what they free in a group."""
    out: frozenset[str] = frozenset()
    if geometry.pure_swa:
        out |= HYBRID_OPS - {"free_swa", "free_full"}
    elif not geometry.hybrid:
        out |= HYBRID_OPS
    out |= RETRACTION_OPS if geometry.sparse else SPARSE_OPS
    out |= frozenset() if geometry.saver else SAVER_OPS
    hostile = {name for name, call in HOSTILE_CALLS.items() if validate or not call.values}
    return Contract(
        ops=frozenset(OP_KINDS) - out, hostile=frozenset(hostile), overwrite_deferred=not owned
    )


def core_target(
    geometry: Geometry,
    *,
    name: str = "kvcore",
    validate: bool = True,
    owned: bool = False,
    parts: CoreParts | None = None,
    device: str = "cpu",
) -> AllocatorTarget:
    """kvcore's allocator of ``geometry`` with a pool, empty; ``owned``: so are its groups."""
    if geometry.serves:
        raise UnsupportedGeometry(
            "an allocator's programs are of calls, not of requests over a prefix cache; got "
            f"{geometry.describe()}"
        )
    if geometry.sparse and geometry.compress not in (1, COMPRESS_RATIO):
        raise UnsupportedGeometry(
            f"kvcore has one device entry for 1 or {COMPRESS_RATIO} tokens, got compress "
            f"{geometry.compress}"
        )
    parts = parts or CoreParts()
    saver = parts.pools.saver() if geometry.saver else None
    pool = build_pool(geometry, parts.pools, device, saver=saver)
    allocator, dialect, stamped = _allocator(geometry, parts, pool, saver, validate, device)
    sparse = dialect if isinstance(dialect, HiSparseDialect | CompressedDialect) else None
    requests = _requests(geometry, parts, allocator, device) if geometry.requests else None
    probe = SaverProbe(saver, *stamped.ranges()) if saver is not None else None
    hostile = CoreHostility(allocator, pool, geometry, stamped.device, probe)
    contract = core_contract(geometry, validate=validate, owned=owned)
    dialect.owns_tensors = owned
    return AllocatorTarget(
        name,
        geometry,
        contract,
        dialect,
        stamped,
        hostile,
        sparse=sparse,
        requests=requests,
        memory=probe,
    )


def _requests(
    geometry: Geometry, parts: CoreParts, allocator: BaseTokenToKVPoolAllocator, device: str
) -> RequestRows:
    pool = parts.requests(geometry.requests, geometry.context_len, device, False)
    # Retraction is for pools that hold a row for every slot.
    retraction = None if geometry.sparse else Retraction(allocator, pool, chunk_tokens=CHUNK_TOKENS)
    return RequestRows(pool, retraction)


OurDialect = SingleDialect | HybridDialect | PureDialect | HiSparseDialect | CompressedDialect

Built = tuple[BaseTokenToKVPoolAllocator, OurDialect, StampedPool]
"""An allocator, how it is called, and its pool with the stamps."""


def _allocator(
    geometry: Geometry,
    parts: CoreParts,
    pool: Pool,
    saver: MemorySaver | None,
    validate: bool,
    device: str,
) -> Built:
    size, page, sort = geometry.full_size, geometry.page_size, geometry.need_sort
    kind = torch.int64
    stamped = StampedPool(pool)
    if geometry.hybrid:
        swa = geometry.swa_size
        hybrid = parts.hybrid(size, swa, page, kind, device, pool, sort, validate=validate)
        if not geometry.sparse:
            return hybrid, HybridDialect(hybrid, stamped.device), stamped
        entries = build_device_pool(geometry, device, saver=saver)
        outer = parts.compressed(hybrid, entries, validate=validate)
        dialect = CompressedDialect(outer, stamped.device)
        return outer, dialect, StampedPool(pool, entries)
    if geometry.pure_swa:
        pure = parts.pure(size, page, kind, device, pool, sort, validate=validate)
        return pure, PureDialect(pure, stamped.device), stamped
    if geometry.sparse:
        few = geometry.device_size
        ratio = size // few
        sparse = parts.hisparse(few, page, kind, device, pool, sort, ratio, validate=validate)
        return sparse, HiSparseDialect(sparse, stamped.device), stamped
    single = (
        parts.token(size, kind, device, pool, sort, validate=validate)
        if page == 1
        else parts.paged(size, page, kind, device, pool, sort, validate=validate)
    )
    return single, SingleDialect(single, stamped.device), stamped

"""Two allocators in lockstep: one that wraps another must answer every op as that one does (L9).

The inner allocator is the one that the model follows; the outer one is given the same ops, and what
both say is compared: the kind of each answer, how many slots it lends and how many of them with a
peer, the type of an error, and the answers to all queries. Ready pairs are the compressed HiSparse
wrapper beside the hybrid allocator (sglang#24039), and a hybrid allocator beside a single pool.
Leaves out which slots are lent, which no law prescribes, and what only the outer allocator has.
"""

from __future__ import annotations

import msgspec
import torch

from kvcore import CompressedHiSparseTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcore.allocator.hisparse import COMPRESS_RATIO
from kvcore.models import Contract, Geometry, Outcome
from kvcore.models.ops import Op
from kvcore.models.outcomes import Done, Lent, Raised
from kvcore.targets.core import CoreParts, core_contract, core_target
from kvcore.targets.core_dialects import (
    HYBRID_QUERIES,
    PairedDialect,
    Unpaired,
    all_free,
    pending_of,
)
from kvcore.targets.dialect import Slots, as_tensor, extend_vectors
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.hostile import CoreHostility
from kvcore.targets.pool import Pool, StampedPool, build_device_pool, build_pool
from kvcore.targets.protocol import (
    Answers,
    Target,
    TargetFactory,
    UnsupportedGeometry,
    View,
)


class TwinTarget:
    """An allocator and what it wraps, given the same ops.

    Both are targets of one geometry. The contract is what the callers of both may do. Outcomes,
    state and slots are those of the inner target; what the outer one says otherwise breaks law L9.

    Raises:
        ValueError: the geometries differ, or the targets do not ask their allocators the same
            queries (`Answers.outer`), so that the answers cannot be compared.
    """

    def __init__(self, outer: Target, inner: Target, *, name: str | None = None) -> None:
        if outer.geometry != inner.geometry:
            raise ValueError(
                f"{outer.name} has {outer.geometry.describe()}, expected the geometry of "
                f"{inner.name}: {inner.geometry.describe()}"
            )
        self.name = name if name is not None else f"{outer.name} beside {inner.name}"
        self.geometry = inner.geometry
        self.contract = common_contract(outer.contract, inner.contract)
        self._outer, self._inner = outer, inner
        self._said = self._meant = "nothing yet"
        asked, others = (one.view(stamps=False).answers for one in (outer, inner))
        if (asked.asked, len(asked.outer)) != (others.asked, len(others.outer)):
            raise ValueError(
                f"{outer.name} answers {len(asked.outer)} queries about itself and {inner.name} "
                f"{len(others.outer)}, expected the same ones: make both targets in one way"
            )

    def apply(self, op: Op) -> Outcome:
        """Apply ``op`` to both; the inner target's answer."""
        meant = self._inner.apply(op)
        said = self._outer.apply(op)
        self._said, self._meant = in_words(op, said), in_words(op, meant)
        return meant

    def view(self, *, stamps: bool) -> View:
        """The inner target's state, and what both said to the last op and say to the queries."""
        view = self._inner.view(stamps=stamps)
        outer = self._outer.view(stamps=False)
        view.twins = (
            (self._said, *queries_in_words(outer.answers)),
            (self._meant, *queries_in_words(view.answers)),
        )
        return view

    def close(self) -> None:
        """Close both."""
        self._outer.close()
        self._inner.close()


def twin_factory(outer: TargetFactory, inner: TargetFactory) -> TargetFactory:
    """A factory of twins: both targets of the geometry that is asked for."""
    return lambda geometry: TwinTarget(outer(geometry), inner(geometry))


def common_contract(outer: Contract, inner: Contract) -> Contract:
    """What callers of both allocators may do. When freed slots may be lent again is as in the
    inner one: a wrapper that differs in it breaks law L9."""
    return msgspec.structs.replace(
        inner,
        ops=outer.ops & inner.ops,
        free_forms=outer.free_forms & inner.free_forms,
        free_swa_forms=outer.free_swa_forms & inner.free_swa_forms,
        live_frees=outer.live_frees | inner.live_frees,
        live_swa_frees=outer.live_swa_frees | inner.live_swa_frees,
        overwrite_lent=outer.overwrite_lent and inner.overwrite_lent,
        overwrite_deferred=outer.overwrite_deferred and inner.overwrite_deferred,
        exhaustion=outer.exhaustion and inner.exhaustion,
        locked_recovery=outer.locked_recovery and inner.locked_recovery,
        tail_ends_early=outer.tail_ends_early and inner.tail_ends_early,
        hostile=outer.hostile & inner.hostile,
    )


def in_words(op: Op, outcome: Outcome) -> str:
    """What both targets must agree on in an answer: "alloc: 8 slots, 8 with a peer"."""
    match outcome:
        case Lent():
            mapped = sum(peer != 0 for peer in outcome.peers)
            rows = f", {len(outcome.requests)} request rows" if outcome.requests else ""
            return f"{op.label}: {len(outcome.slots)} slots, {mapped} with a peer{rows}"
        case Raised():
            return f"{op.label}: raised {outcome.kind}"
        case Done():
            return f"{op.label}: done"
        case _:
            return f"{op.label}: None"


def queries_in_words(answers: Answers) -> tuple[str, ...]:
    """The answers to the queries, one piece each: capacity in slots, and what the allocator says of
    itself."""
    names = answers.asked or tuple(f"query {number}" for number in range(len(answers.outer)))
    return (
        f"available {answers.available}",
        f"full side {answers.full_available}",
        f"SWA side {answers.swa_available}",
        f"requests {answers.requests_available}",
        *(f"{name} {said}" for name, said in zip(names, answers.outer, strict=True)),
    )


class ForwardedDialect(PairedDialect[CompressedHiSparseTokenToKVPoolAllocator]):
    """The compressed HiSparse allocator called as the hybrid one that it wraps."""

    def extend(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`alloc_extend`; `alloc_logical_only` for a batch with a row that goes on behind a token
        without its device slot, which no caller continues on the device."""
        if self._on_device(before, last):
            return super().extend(before, after, last)
        vectors = extend_vectors(before, after, last, self.device)
        return self.allocator.alloc_logical_only(*vectors, sum(after) - sum(before))

    def _on_device(self, before: list[int], last: list[int]) -> bool:
        """Whether every page that goes on and has entries has a device slot for the last one."""
        size = self.allocator.page_size
        rows = zip(before, last, strict=True)
        begun = [slot for length, slot in rows if length % size >= COMPRESS_RATIO]
        entries = self.allocator.get_last_loc_hisparse_device(as_tensor(begun, self.device))
        return bool((entries > 0).all())

    def answers(self) -> Answers:
        """As `HybridDialect.answers`, of the wrapper alone."""
        whole = self.allocator
        full, swa = whole.full_available_size(), whole.swa_available_size()
        pages = (full // whole.page_size, swa // whole.page_size)
        said = (
            *(whole.page_size, whole.page_size, whole.size, whole.size_full, whole.size_swa),
            *(full, swa, int(whole.new_pages_available(*pages))),
            int(whole.new_pages_available(pages[0] + 1, 0)),
            int(whole.new_pages_available(0, pages[1] + 1)),
        )
        room = whole.available_size()
        return Answers(room, full, swa, outer=said, inner=said, asked=HYBRID_QUERIES)


def forwarded_target(
    geometry: Geometry,
    *,
    name: str = "compressed HiSparse as hybrid",
    validate: bool = True,
    parts: CoreParts | None = None,
) -> AllocatorTarget:
    """kvcore's compressed HiSparse allocator of a hybrid ``geometry``, taken for the hybrid
    allocator that it wraps: with as many device pages as full ones, so that the device side never
    refuses first.

    Raises:
        UnsupportedGeometry: the geometry is not a plain hybrid one in pages of a multiple of 4.
    """
    parts = parts or CoreParts()
    plain = geometry.hybrid and not (geometry.sparse or geometry.requests or geometry.saver)
    if not plain or geometry.page_size % COMPRESS_RATIO:
        raise UnsupportedGeometry(
            f"what is wrapped is a hybrid geometry in pages of a multiple of {COMPRESS_RATIO}, "
            f"without requests or memory saver; got {geometry.describe()}"
        )
    sparse = msgspec.structs.replace(
        geometry, device_pages=geometry.full_pages, compress=COMPRESS_RATIO
    )
    pool = build_pool(geometry, parts.pools)
    stamped = StampedPool(pool)
    hybrid = _hybrid(parts, geometry, geometry.swa_size, pool, validate=validate)
    wrapper = parts.compressed(hybrid, build_device_pool(sparse), validate=validate)
    return AllocatorTarget(
        name,
        geometry,
        core_contract(geometry, validate=validate),
        ForwardedDialect(wrapper, stamped.device),
        stamped,
        CoreHostility(wrapper, pool, geometry, stamped.device),
    )


def _hybrid(
    parts: CoreParts, geometry: Geometry, swa_size: int, pool: Pool, *, validate: bool
) -> SWATokenToKVPoolAllocator:
    """A hybrid allocator with an SWA side of so many slots."""
    size, page, sort = geometry.full_size, geometry.page_size, geometry.need_sort
    return parts.hybrid(size, swa_size, page, torch.int64, "cpu", pool, sort, validate=validate)


def forwarding_twin(
    geometry: Geometry,
    *,
    name: str = "compressed HiSparse beside hybrid",
    validate: bool = True,
    parts: CoreParts | None = None,
) -> TwinTarget:
    """The wrapper of `forwarded_target` beside kvcore's own hybrid allocator: law L9 on every op
    that both have. ``parts`` are the wrapper's: a faulty one breaks the law."""
    outer = forwarded_target(geometry, validate=validate, parts=parts)
    return TwinTarget(outer, core_target(geometry, validate=validate), name=name)


class AsSingleDialect(Unpaired[SWATokenToKVPoolAllocator]):
    """A hybrid allocator called as if it were a single pool."""

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Free list and release list of the full side."""
        free = all_free(self.allocator.full_attn_allocator)
        return free, free[:0]

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self.allocator.full_attn_allocator.free_page_list(), []

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Pages queued on the full side."""
        return pending_of(self.allocator.full_attn_allocator, self.nothing), self.nothing

    def answers(self) -> Answers:
        """As `SingleDialect.answers`."""
        return Answers(self.allocator.available_size(), self.allocator.full_available_size(), 0)


def as_single_target(
    geometry: Geometry,
    *,
    name: str = "hybrid as single pool",
    validate: bool = True,
    parts: CoreParts | None = None,
) -> AllocatorTarget:
    """kvcore's hybrid allocator, its SWA side as large as the full one, for the single-pool
    ``geometry``: while nobody gives a peer up alone, it is a single pool."""
    parts = parts or CoreParts()
    pool = build_pool(msgspec.structs.replace(geometry, swa_pages=geometry.full_pages), parts.pools)
    stamped = StampedPool(pool)
    hybrid = _hybrid(parts, geometry, geometry.full_size, pool, validate=validate)
    return AllocatorTarget(
        name,
        geometry,
        core_contract(geometry, validate=validate),
        AsSingleDialect(hybrid, stamped.device),
        stamped,
        CoreHostility(hybrid, pool, geometry, stamped.device),
    )


def single_twin(
    geometry: Geometry, *, validate: bool = True, parts: CoreParts | None = None
) -> TwinTarget:
    """The hybrid allocator of `as_single_target` beside kvcore's own single pool."""
    outer = as_single_target(geometry, validate=validate, parts=parts)
    return TwinTarget(outer, core_target(geometry, validate=validate))

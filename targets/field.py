"""Anybody's allocator as a target, if it has the names of the field.

`field_target` takes an allocator object and the names of the calls that it has beside the three
that every one has; nothing is looked for that was not named. It takes allocators of one pool and
hybrid ones (full and SWA side). Leaves out pools, stamps are written into kvcore's own, and calls
of other names (`kvcore.targets.dialect`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch

from kvcore.models import Contract, Geometry
from kvcore.models.ops import Form
from kvcore.targets.core_dialects import CoreDialect, PairedDialect, Unpaired
from kvcore.targets.dialect import Slots, as_tensor, extend_vectors
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.pool import Pool, StampedPool, build_pool
from kvcore.targets.protocol import Answers, UnsupportedGeometry


class FieldAllocator(Protocol):
    """What every allocator has. ``size`` is in slots, page 0 not counted: it is padding and never
    lent, so that slots run from ``page_size`` to ``size + page_size - 1``."""

    @property
    def size(self) -> int:
        """Slots that can be lent."""
        ...

    @property
    def page_size(self) -> int:
        """Slots a page."""
        ...

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` slots in whole pages, page by page, int64; None if there are too few."""
        ...

    def free(self, free_index: torch.Tensor) -> None:
        """Any set of slots; every page touched is free whole, once."""
        ...

    def available_size(self) -> int:
        """Slots that one `alloc` could get."""
        ...


class ListsFreePages(Protocol):
    """An allocator that shows its free pages: their ids, once each, 1 to ``size // page_size``."""

    @property
    def free_pages(self) -> torch.Tensor | Iterable[int]:
        """Pages that `alloc` can lend now; not those that wait for the end of a free group."""
        ...


class ListsReleasedPages(ListsFreePages, Protocol):
    """An allocator that keeps freed pages aside and merges them into the others when needed."""

    @property
    def release_pages(self) -> torch.Tensor | Iterable[int]:
        """The pages that are kept aside."""
        ...


Listing = Callable[[Any], torch.Tensor | Iterable[int]]
"""How the free pages of an allocator, or of one side of a hybrid one, are read."""


def free_list(allocator: ListsFreePages) -> torch.Tensor | Iterable[int]:
    """``free_pages``."""
    return allocator.free_pages


def free_and_released(allocator: ListsReleasedPages) -> Iterable[int]:
    """``free_pages`` and ``release_pages``."""
    return [*map(int, allocator.free_pages), *map(int, allocator.release_pages)]


ALWAYS = frozenset(("alloc", "free", "available_size"))
"""Calls that every allocator has."""

OPS: dict[str, frozenset[str]] = {
    "alloc_extend": frozenset(("extend",)),
    "alloc_decode": frozenset(("decode",)),
    "free_group_begin": frozenset(("group_begin",)),
    "free_group_end": frozenset(("group_end",)),
    "clear": frozenset(("clear",)),
    "free_swa": frozenset(("free_swa",)),
    "free_full": frozenset(("free_full", "recover")),
    "alloc_extend_swa_tail": frozenset(("swa_tail",)),
    "recover_tombstone": frozenset(),
    "set_full_to_swa_mapping": frozenset(("load_back", "load_back_swa")),
}
"""The ops that each further call makes possible; a recovery of a locked value is a variant of the
one that needs `free_full` only."""

FORMS: dict[str, tuple[str, Form]] = {
    "free_segment": ("free", "segment"),
    "free_segments": ("free", "segments"),
    "free_swa_segment": ("free_swa", "segment"),
    "free_swa_segments": ("free_swa", "segments"),
}
"""Calls that name the pages of a free in another form."""

HYBRID_CALLS = frozenset(
    (
        *("free_swa", "free_swa_segment", "free_swa_segments", "free_full"),
        *("alloc_extend_swa_tail", "recover_tombstone", "set_full_to_swa_mapping"),
    )
)
"""Calls of hybrid allocators only."""

SINGLE_CALLS = frozenset((*OPS, *FORMS)) - HYBRID_CALLS
"""Every further call of an allocator of one pool."""

ALL_CALLS = SINGLE_CALLS | HYBRID_CALLS
"""Every further call of a hybrid allocator."""


def field_contract(geometry: Geometry, calls: Collection[str] = ()) -> Contract:
    """What callers of an allocator may do that has ``calls`` beside those that all have.

    At page size 1 rows grow by `alloc` where there is no `alloc_extend` and no `alloc_decode`, as
    engines do; larger pages are then lent whole only. Full pages are freed with their peers or,
    where there is `free_full`, after them.

    Raises:
        ValueError: a call that is not known, or not of such an allocator; one half of a group.
    """
    named = frozenset(calls) - ALWAYS
    possible = ALL_CALLS if geometry.hybrid else SINGLE_CALLS
    if unknown := sorted(named - possible):
        kind = "a hybrid allocator" if geometry.hybrid else "an allocator of one pool"
        known = ", ".join(sorted(possible))
        raise ValueError(f"calls names {', '.join(unknown)}; known of {kind}: {known}")
    if len(named & {"free_group_begin", "free_group_end"}) == 1:
        raise ValueError("calls names one of free_group_begin and free_group_end, expected both")
    ops = {"alloc", "free"}.union(*(OPS[call] for call in named if call in OPS))
    if geometry.page_size == 1:
        ops |= {"extend", "decode"}
    free: set[Form] = {"slots", "sparse"}
    forms = {"free": free, "free_swa": set(free)}
    for call in named & FORMS.keys():
        op, form = FORMS[call]
        forms[op].add(form)
    return Contract(
        ops=frozenset(ops),
        free_forms=frozenset(forms["free"]),
        free_swa_forms=frozenset(forms["free_swa"]),
        locked_recovery="recover_tombstone" in named,
        tail_ends_early=False,
    )


QUERIES = ("page_size", "size")
"""What an allocator is asked about itself, both in slots."""


class FieldCalls(CoreDialect[Any]):
    """What is the same for one pool and for two: how rows grow, and what is not told."""

    def __init__(
        self, allocator: FieldAllocator, device: torch.device, calls: Collection[str], free: Listing
    ) -> None:
        super().__init__(allocator, device)
        self._listing = free
        self._calls = frozenset(calls)

    def extend(self, before: list[int], after: list[int], last: list[int]) -> Slots | None:
        """`alloc_extend`, or at page size 1 `alloc` for the whole batch."""
        if "alloc_extend" in self._calls:
            return super().extend(before, after, last)
        return self.alloc(sum(after) - sum(before))

    def decode(self, after: list[int], last: list[int]) -> Slots | None:
        """`alloc_decode`, or at page size 1 `alloc` for the whole batch."""
        if "alloc_decode" in self._calls:
            return super().decode(after, last)
        return self.alloc(len(after))

    def pending_pages(self) -> tuple[torch.Tensor, ...]:
        """Not told."""
        return ()

    def pending_lists(self) -> tuple[list[int], ...]:
        """Not told either."""
        return ()

    def listed(self, side: Any) -> torch.Tensor:
        """The free pages of a side, as a new int64 tensor."""
        pages = self._listing(side)
        if isinstance(pages, torch.Tensor):
            return pages.to(self.device, torch.int64, copy=True)
        return as_tensor(list(pages), self.device)

    def numbers(self, side: Any) -> list[int]:
        """The free pages of a side, in a new list."""
        pages = self._listing(side)
        if isinstance(pages, torch.Tensor):
            found: list[int] = pages.to(torch.int64).tolist()
            return found
        return list(map(int, pages))


class FieldDialect(FieldCalls, Unpaired[Any]):
    """Calls on an allocator of one pool."""

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the listing shows."""
        free = self.listed(self.allocator)
        return free, free[:0]

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        return self.numbers(self.allocator), []

    def answers(self) -> Answers:
        """Capacity in slots; what the allocator says of its geometry, for a twin."""
        room = int(self.allocator.available_size())
        said = (int(self.allocator.page_size), int(self.allocator.size))
        return Answers(room, room, 0, outer=said, inner=said, asked=QUERIES)


class FieldPairedDialect(FieldCalls, PairedDialect[Any]):
    """Calls on a hybrid allocator; its sides have ``alloc`` and show their free pages."""

    def swa_tail(
        self, before: int, after: int, last: int, tail: int, beyond: int = 0
    ) -> Slots | None:
        """`alloc_extend_swa_tail`; the tail always ends with the row."""
        vectors = extend_vectors([before], [after], [last], self.device)
        slots: Slots | None = self.allocator.alloc_extend_swa_tail(*vectors, after - before, tail)
        return slots

    def free_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the listing shows of each side."""
        whole = self.allocator
        return self.listed(whole.full_attn_allocator), self.listed(whole.swa_attn_allocator)

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The same as numbers."""
        whole = self.allocator
        return self.numbers(whole.full_attn_allocator), self.numbers(whole.swa_attn_allocator)

    def answers(self) -> Answers:
        """Capacity in slots; what the allocator says of its geometry, for a twin."""
        whole = self.allocator
        full, swa = int(whole.full_available_size()), int(whole.swa_available_size())
        room, said = int(whole.available_size()), (int(whole.page_size), int(whole.size))
        return Answers(room, full, swa, outer=said, inner=said, asked=QUERIES)


def field_target(
    geometry: Geometry,
    allocator: FieldAllocator,
    calls: Collection[str] = (),
    *,
    free_pages: Listing = free_list,
    pool: Pool | None = None,
    name: str | None = None,
    contract: Contract | None = None,
) -> AllocatorTarget:
    """A target that drives ``allocator``, which is new and has the sizes of ``geometry``.

    Args:
        geometry: what the allocator was built for.
        allocator: the allocator on trial.
        calls: the calls of the field that it has beside alloc, free and available_size: some of
            `SINGLE_CALLS`, or for a hybrid allocator of `ALL_CALLS`.
        free_pages: how its free pages are read, of a hybrid allocator those of each side.
        pool: for a hybrid allocator the pool that it was given as ``kvcache`` and has registered
            its mapping with; see `kvcore.targets.pool.build_pool`.
        name: what the target is called; the class of the allocator where nothing is said.
        contract: what its callers may do, where that is less than ``calls`` make possible.

    Raises:
        ValueError: the geometry has parts that this is not for, ``calls`` names what there is not,
            or a hybrid allocator comes without its pool.
    """
    if geometry.sparse or geometry.pure_swa or geometry.requests or geometry.saver:
        raise UnsupportedGeometry(
            f"expected a single or a hybrid pool of the allocator's own, got {geometry.describe()}"
        )
    if geometry.hybrid and pool is None:
        raise UnsupportedGeometry(
            f"{geometry.describe()} is a hybrid geometry: expected the pool that the allocator "
            'has registered its mapping with; or machines=("single pool",) for one without'
        )
    wide = field_contract(geometry, calls)
    stamped = StampedPool(pool if pool is not None else build_pool(geometry))
    build = FieldPairedDialect if geometry.hybrid else FieldDialect
    return AllocatorTarget(
        name if name is not None else type(allocator).__name__,
        geometry,
        contract if contract is not None else wide,
        build(allocator, stamped.device, frozenset(calls), free_pages),
        stamped,
    )

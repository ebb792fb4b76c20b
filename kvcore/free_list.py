"""The free pages of one pool, in one tensor whose ends are known to the host.

Two lists, by the order in which pages are used again. Both take pages from the front:

    SlotLog     pages come back at the end, so every one rests as long as possible. What was taken
                is never written again: a caller may get a view. When the log reaches the end of its
                storage, what is free moves to a new one, and views keep the old one alive; there is
                room for as many pages as there are, so this costs less than one write a page.
    PageStack   pages come back at the front: recently used pages are used again, and their places
                too, so what is lent must be computed or copied from them.

Every counter lives on the host, so capacity is known without a device synchronisation and is
checked before anything is read (sglang#34399). Taking or giving n pages costs O(n), whatever the
size of the pool and the number of free pages. A giver writes the pages itself, into the view that
`place` hands out, so that nothing has to be built first and copied.

With `need_sort`, pages given back wait in a second tensor, are sorted when a taker needs them, and
merged into the free ones, which are ascending already and are not sorted again.

A caller that does not know on the host how many pages it returns gives them with gaps. They are
counted when a number is asked for that the others do not decide, and lent after them.

Left out: who owns a page that is not free, and free groups (`kvcore.allocator`).
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import DoubleFreeError, GeometryError

Ids: TypeAlias = npt.NDArray[np.int64]
"""Entries on the host, `[n]`."""


class Position(NamedTuple):
    """Where a free list stood."""

    store: torch.Tensor
    head: int
    end: int
    num_released: int
    with_gaps: tuple[tuple[torch.Tensor, bool], ...]
    gaps_closed: int


class FreeList(ABC):
    """The free pages out of pages 1..num_pages, int64 on one device.

    Pages are kept as *entries*: the id, or with `unit` the id times `unit`, which is the first slot
    of a page of `unit` slots. `front` and `place` deal in entries, everything else in ids.

    Args:
        num_pages: pages of the pool; ids run from 1, page 0 is padding and never enters.
        device: device of all ids.
        need_sort: keep returned pages aside, merge them in ascending order on demand.
        unit: what ids are multiplied with.
    """

    def __init__(
        self, num_pages: int, device: torch.device, *, need_sort: bool, unit: int = 1
    ) -> None:
        self.unit = unit
        self._capacity = num_pages
        self._device = device
        self._need_sort = need_sort
        self._released = torch.empty(
            num_pages if need_sort else 0, dtype=torch.int64, device=device
        )
        self._store_size = 2 * num_pages
        self._on_cpu = device.type == "cpu"
        self._host_store: Ids
        self._host_released: Ids
        self._address: int
        self._with_gaps: list[tuple[torch.Tensor, bool]]
        self._gaps_closed: int
        self.reset()

    @abstractmethod
    def _new_store(self) -> torch.Tensor:
        """Storage for a whole list, not filled."""

    @abstractmethod
    def _start(self, num_pages: int) -> int:
        """Where the first of `num_pages` goes in a new store."""

    @abstractmethod
    def _place(self, num_pages: int) -> int:
        """Where in the store the next pages go, without `need_sort`."""

    @abstractmethod
    def _commit(self, num_pages: int) -> None:
        """`commit` without `need_sort`."""

    def num_free(self) -> int:
        """Pages that can be taken now, those waiting to be merged included."""
        if self._with_gaps:
            self.close_gaps()
        return self._end - self._head + self._num_released

    @property
    def free_pages(self) -> torch.Tensor:
        """Copy of the free pages in the order of taking, int64 `[n]`."""
        self.close_gaps()
        return self._ids(self._store[self._head : self._end])

    @property
    def release_pages(self) -> torch.Tensor:
        """Copy of the pages waiting to be merged, int64 `[n]`; empty without `need_sort`."""
        self.close_gaps()
        return self._ids(self._released[: self._num_released])

    def take_gaps_closed(self) -> int:
        """Gaps found since this was last asked in what was given with gaps and `counted`."""
        found, self._gaps_closed = self._gaps_closed, 0
        return found

    def listed(self) -> list[int]:
        """`free_pages` and `release_pages` as numbers; on a CPU no tensor is made."""
        if self._with_gaps:
            self.close_gaps()
        if not self._on_cpu:
            found: list[int] = torch.cat((self.free_pages, self.release_pages)).tolist()
            return found
        entries: list[int] = self._host_store[self._head : self._end].tolist()
        if self._num_released:
            entries += self._host_released[: self._num_released].tolist()
        unit = self.unit
        return entries if unit == 1 else [entry // unit for entry in entries]

    def reset(self) -> None:
        """Make every page free again, in ascending order."""
        store, start = self._new_store(), self._start(self._capacity)
        pages = store[start : start + self._capacity]
        torch.arange(
            self.unit, (self._capacity + 1) * self.unit, self.unit, dtype=torch.int64, out=pages
        )
        self._use(store, start, self._capacity)
        self._num_released = 0
        self._with_gaps = []
        self._gaps_closed = 0

    def _use(self, store: torch.Tensor, start: int, num_pages: int) -> None:
        """Go on with a store that holds so many free pages."""
        end = start + num_pages
        if not self._on_cpu:
            self._store, self._head, self._end = store, start, end
            return
        memory, released, address = store.numpy(), self._released.numpy(), store.data_ptr()
        # Compiled code writes to the address (`_native.c`): so no call is in between that could be
        # interrupted, and the array keeps alive what is there.
        self._host_store, self._host_released, self._address = memory, released, address
        self._store, self._head, self._end = store, start, end

    def __getstate__(self) -> dict[str, Any]:
        views = ("_host_released", "_host_store", "_address")
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A copy has tensors of its own.
        self._use(self._store, self._head, self._end - self._head)

    # -- taking --------------------------------------------------------------------------------

    def has_room(self, num_pages: int) -> bool:
        """Whether `take(num_pages)` would succeed; counts gaps only if the rest is too little."""
        if num_pages <= self._end - self._head + self._num_released:
            return True
        return bool(self._with_gaps) and num_pages <= self.num_free()

    def front(self, num_pages: int) -> torch.Tensor:
        """The entries that would be taken next: int64 `[num_pages]`, a view.

        They stay free until `advance`. Of a `SlotLog` the view stays as it is for ever, of a
        `PageStack` until the next page is given.

        Raises:
            GeometryError: there are not that many; ask `has_room` first.
        """
        if num_pages > self._end - self._head:
            self._bring_forward(num_pages)
        return self._store[self._head : self._head + num_pages]

    def host_front(self, num_pages: int) -> Ids:
        """`front` of a list on a CPU, as numpy."""
        if num_pages > self._end - self._head:
            self._bring_forward(num_pages)
        return self._host_store[self._head : self._head + num_pages]

    def _bring_forward(self, num_pages: int) -> None:
        """Have so many pages in the store."""
        if not self.has_room(num_pages):
            raise GeometryError(f"take of {num_pages} pages, but only {self.num_free()} are free")
        self.merge_and_sort()

    def advance(self, num_pages: int) -> None:
        """Take what `front(num_pages)` showed."""
        self._head += num_pages

    def take(self, num_pages: int) -> torch.Tensor:
        """Remove pages from the front; int64 `[num_pages]` in storage of its own.

        Raises:
            GeometryError: there are not that many; ask `has_room` first.
        """
        pages = self._ids(self.front(num_pages))
        self.advance(num_pages)
        return pages

    def position(self) -> Position:
        """Where `rewind` returns to."""
        return Position(
            self._store,
            self._head,
            self._end,
            self._num_released,
            tuple(self._with_gaps),
            self._gaps_closed,
        )

    def rewind(self, position: Position) -> None:
        """Undo every `take` since `position`, in the order of pages too; nothing was given since.

        A take writes nothing but a new store where it merges, and places that are not free where it
        closes gaps; so only the old numbers and the old store count again.
        """
        self._num_released, self._gaps_closed = position.num_released, position.gaps_closed
        self._with_gaps = list(position.with_gaps)
        self._use(position.store, position.head, position.end - position.head)

    # -- giving --------------------------------------------------------------------------------

    def place(self, num_pages: int) -> torch.Tensor:
        """Where the entries of the next pages go, to be written by the caller: a view.

        Nothing is free before `commit(num_pages)`.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        self.require_place_for(num_pages)
        if self._need_sort:
            return self._released[self._num_released : self._num_released + num_pages]
        start = self._place(num_pages)
        return self._store[start : start + num_pages]

    def host_place(self, num_pages: int) -> Ids:
        """`place` of a list on a CPU, as numpy."""
        self.require_place_for(num_pages)
        if self._need_sort:
            return self._host_released[self._num_released : self._num_released + num_pages]
        start = self._place(num_pages)
        return self._host_store[start : start + num_pages]

    def reserve(self, num_pages: int) -> None:
        """Make sure that so many pages can be given without anything that may fail.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        if self._end - self._head + self._num_released + num_pages > self._capacity:
            self.require_place_for(num_pages)
        if not self._need_sort:
            self._place(num_pages)

    @property
    def has_gaps(self) -> bool:
        """Whether pages given with gaps wait to be counted."""
        return bool(self._with_gaps)

    def host_give(self, entries: Ids) -> None:
        """Put pages back, on a CPU: int64 `[n]`, copied, each page once.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        self.host_place(entries.size)[:] = entries
        self.commit(entries.size)

    def host_give_both(self, entries: Ids, other: "FreeList", others: Ids) -> None:
        """`host_give` to this list and to another one, or to neither.

        Raises:
            DoubleFreeError: in either more pages would be free than exist.
        """
        self.reserve(entries.size)
        other.reserve(others.size)
        self.host_give(entries)
        other.host_give(others)

    def commit(self, num_pages: int) -> None:
        """What was written into `place(num_pages)` is free."""
        if self._need_sort:
            self._num_released += num_pages
        else:
            self._commit(num_pages)

    def give(self, pages: torch.Tensor) -> None:
        """Put pages back; `pages` is int64 `[n]`, copied, each page once.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        place = self.place(pages.numel())
        if self.unit == 1:
            place.copy_(pages)
        else:
            torch.mul(pages, self.unit, out=place)
        self.commit(pages.numel())

    def give_with_gaps(self, entries: torch.Tensor, *, counted: bool = True) -> None:
        """Put pages back; int64 `[n]` and kept, each page once, 0 standing for none.

        Reads no value and waits for no device: see `close_gaps`. `counted`: whether the gaps are to
        be told by `take_gaps_closed`.
        """
        self._with_gaps.append((entries, counted))

    def host_give_with_gaps(self, entries: Ids, *, counted: bool = True) -> None:
        """`give_with_gaps` by numpy, on a CPU, where nothing has to wait.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        found = entries[entries > 0]
        self.host_give(found)
        if counted:
            self._gaps_closed += entries.size - found.size

    def close_gaps(self) -> None:
        """Give what `give_with_gaps` took, in that order, without the gaps; every exact count does.

        Waits for the device once, for the numbers.

        Raises:
            DoubleFreeError: more pages would be free than exist; they stay aside.
        """
        if not self._with_gaps:
            return
        numbers = torch.stack([torch.count_nonzero(given) for given, _ in self._with_gaps]).tolist()
        self.require_place_for(sum(numbers))
        for number in numbers:
            entries, counted = self._with_gaps[0]
            # Page 0 must never enter (sglang#38519): what is left goes to the front, in order.
            order = torch.argsort(entries == 0, stable=True)
            torch.index_select(entries, 0, order[:number], out=self.place(number))
            # One at a time: whatever fails, each is either free or still aside.
            self.commit(number)
            del self._with_gaps[0]
            if counted:
                self._gaps_closed += entries.numel() - number

    def merge_and_sort(self) -> None:
        """Merge the waiting pages into the free ones, which stay ascending; no-op if none wait."""
        self.close_gaps()
        if self._num_released == 0:
            return
        queued = self._store[self._head : self._end]
        waiting, _ = torch.sort(self._released[: self._num_released])
        num_pages = queued.numel() + waiting.numel()
        store, start = self._new_store(), self._start(num_pages)
        merged = store[start : start + num_pages]
        # Where each goes: behind those of its own list before it, and the smaller ones of the other
        # list. Of equals, which only an illegal free can bring, the waiting one comes first.
        for entries, others, right in ((queued, waiting, True), (waiting, queued, False)):
            rank = torch.arange(entries.numel(), device=self._device)
            merged[rank + torch.searchsorted(others, entries, right=right)] = entries
        self._use(store, start, num_pages)
        self._num_released = 0

    def require_place_for(self, count: int) -> None:
        """Raise DoubleFreeError if `count` more free pages would be more than exist.

        The one double free that the host sees without reading the device; it also keeps pages from
        being written over free ones. Pages given with gaps are not counted.
        """
        num_free = self._end - self._head + self._num_released
        if num_free + count > self._capacity:
            raise DoubleFreeError(
                f"give of {count} pages to {num_free} free ones: expected at most "
                f"{self._capacity} in all"
            )

    def _ids(self, entries: torch.Tensor) -> torch.Tensor:
        """The pages of entries, in storage that no later call writes."""
        return entries.clone() if self.unit == 1 else entries // self.unit


class SlotLog(FreeList):
    """Pages come back at the end; a view of what was taken stays as it is. See the module."""

    def _new_store(self) -> torch.Tensor:
        return torch.empty(2 * self._capacity, dtype=torch.int64, device=self._device)

    def _start(self, num_pages: int) -> int:
        return 0

    def _place(self, num_pages: int) -> int:
        if self._end + num_pages > self._store_size:
            self._move()
        return self._end

    def _commit(self, num_pages: int) -> None:
        self._end += num_pages

    def host_give(self, entries: Ids) -> None:
        """See the base class; written out, as this is all that a free is about."""
        end = self._end + entries.size
        if self._need_sort or end > self._store_size or end - self._head > self._capacity:
            super().host_give(entries)
            return
        self._host_store[self._end : end] = entries
        self._end = end

    def host_give_both(self, entries: Ids, other: FreeList, others: Ids) -> None:
        """See the base class; written out for two logs that have room, as a pair of pools has."""
        if type(other) is SlotLog and not (self._need_sort or other._need_sort):
            end, other_end = self._end + entries.size, other._end + others.size
            if (
                end <= self._store_size
                and end - self._head <= self._capacity
                and other_end <= other._store_size
                and other_end - other._head <= other._capacity
            ):
                self._host_store[self._end : end] = entries
                other._host_store[other._end : other_end] = others
                self._end, other._end = end, other_end
                return
        super().host_give_both(entries, other, others)

    def _move(self) -> None:
        """Go on in new storage; what was lent as a view of the old one keeps it alive."""
        queued = self._store[self._head : self._end]
        store = self._new_store()
        store[: queued.numel()] = queued
        self._use(store, 0, queued.numel())


class PageStack(FreeList):
    """Pages come back at the front, and their places are written again. See the module."""

    def _new_store(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int64, device=self._device)

    def _start(self, num_pages: int) -> int:
        return self._capacity - num_pages

    def _place(self, num_pages: int) -> int:
        return self._head - num_pages

    def _commit(self, num_pages: int) -> None:
        self._head -= num_pages

    def host_give(self, entries: Ids) -> None:
        """See the base class; written out, as this is all that a free is about."""
        head = self._head - entries.size
        if self._need_sort or head < 0:
            super().host_give(entries)
            return
        self._host_store[head : self._head] = entries
        self._head = head

    def host_give_both(self, entries: Ids, other: FreeList, others: Ids) -> None:
        """See the base class; written out for two stacks that have room, as a pair of pools has."""
        if type(other) is PageStack and not (self._need_sort or other._need_sort):
            head, other_head = self._head - entries.size, other._head - others.size
            if head >= 0 and other_head >= 0:
                self._host_store[head : self._head] = entries
                other._host_store[other_head : other._head] = others
                self._head, other._head = head, other_head
                return
        super().host_give_both(entries, other, others)

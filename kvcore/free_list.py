"""The free pages of one pool: a double-ended queue of page ids in one preallocated ring buffer.

Pages are taken from the front. They come back at the end (`newest_first=False`: every slot rests
as long as possible) or at the front (`newest_first=True`: recently used pages are used again).
Every counter lives on the host, so capacity is known without a device synchronisation and is
checked before anything is read (sglang#34399). Taking or giving n pages costs O(n), whatever the
size of the pool and the number of free pages.

With `need_sort`, pages given back wait in a second buffer and are merged and sorted into the queue
only when a `take` needs them.

A caller that does not know on the host how many pages it returns gives them with gaps; they are
counted when a capacity is next asked for, so that the free itself waits for no device value.

Left out: who owns a page that is not free, and free groups (`kvcore.allocator`).
"""

from typing import NamedTuple

import torch

from kvcore.errors import DoubleFreeError, GeometryError


class Position(NamedTuple):
    """Where a free list stood."""

    head: int
    num_queued: int
    num_released: int


class FreeList:
    """Queue of the free pages out of pages 1..num_pages, as int64 ids on one device.

    Args:
        num_pages: pages of the pool; ids run from 1, page 0 is padding and never enters.
        device: device of all ids.
        need_sort: keep returned pages aside, merge them in ascending order on demand.
        newest_first: returned pages go to the front of the queue instead of its end.
    """

    def __init__(
        self, num_pages: int, device: torch.device, *, need_sort: bool, newest_first: bool
    ) -> None:
        self._capacity = num_pages
        self._need_sort = need_sort
        self._newest_first = newest_first
        self._ring = torch.arange(1, num_pages + 1, dtype=torch.int64, device=device)
        self._released = torch.empty(
            num_pages if need_sort else 0, dtype=torch.int64, device=device
        )
        self._head = 0
        self._num_queued = num_pages
        self._num_released = 0
        self._with_gaps: list[torch.Tensor] = []
        # The last position asked for, and what was queued there if a merge has overwritten it.
        self._position = Position(self._head, self._num_queued, self._num_released)
        self._before_merge: torch.Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Pages that can be taken now, those waiting to be merged included."""
        self.close_gaps()
        return self._num_queued + self._num_released

    @property
    def free_pages(self) -> torch.Tensor:
        """Copy of the queue in the order of taking, int64 `[n]`."""
        self.close_gaps()
        return self._owned(self._read_front(self._num_queued))

    @property
    def release_pages(self) -> torch.Tensor:
        """Copy of the pages waiting to be merged, int64 `[n]`; empty without `need_sort`."""
        self.close_gaps()
        return self._owned(self._released[: self._num_released])

    def reset(self) -> None:
        """Make every page free again, in ascending order."""
        torch.arange(1, self._capacity + 1, out=self._ring)
        self._head = 0
        self._num_queued = self._capacity
        self._num_released = 0
        self._with_gaps = []

    def has_room(self, num_pages: int) -> bool:
        """Whether `take(num_pages)` would succeed."""
        return num_pages <= self.num_pages

    def take(self, num_pages: int) -> torch.Tensor:
        """Remove pages from the front; int64 `[num_pages]` in storage of its own.

        Raises:
            GeometryError: there are not that many; ask `has_room` first.
        """
        if not self.has_room(num_pages):
            raise GeometryError(f"take of {num_pages} pages, but only {self.num_pages} are free")
        if num_pages > self._num_queued:
            self.merge_and_sort()
        pages = self._owned(self._read_front(num_pages))
        self._drop_front(num_pages)
        return pages

    def position(self) -> Position:
        """Where `rewind` returns to; the last one asked for counts."""
        self.close_gaps()
        self._before_merge = None
        self._position = Position(self._head, self._num_queued, self._num_released)
        return self._position

    def rewind(self, position: Position) -> None:
        """Undo every `take` since `position`, in the order of pages too; nothing was given since.

        A take writes into no buffer but where it merges, which happens once at most; otherwise only
        the counters go back.
        """
        self._head, self._num_queued, self._num_released = position
        if self._before_merge is not None:
            self._write(self._head, self._before_merge)
            self._before_merge = None

    def give(self, pages: torch.Tensor) -> None:
        """Put pages back; `pages` is int64 `[n]`, copied, each page once.

        Raises:
            DoubleFreeError: more pages would be free than exist.
        """
        self.require_place_for(pages.numel())
        if self._need_sort:
            self._append_released(pages)
        elif self._newest_first:
            self._push_front(pages)
        else:
            self._push_back(pages)

    def give_with_gaps(self, pages: torch.Tensor) -> None:
        """Put pages back; `pages` is int64 `[n]` and kept, each page once, 0 standing for none.

        Reads no value and waits for no device: see `close_gaps`.
        """
        self._with_gaps.append(pages)

    def close_gaps(self) -> None:
        """Give what `give_with_gaps` took, without the gaps; every capacity query does.

        Raises:
            DoubleFreeError: more pages would be free than exist; they stay aside.
        """
        if not self._with_gaps:
            return
        pages = torch.cat(self._with_gaps)
        # Page 0 must never enter (sglang#38519). How many are left only the device knows.
        pages = pages[pages > 0]
        self.require_place_for(pages.numel())
        waiting, self._with_gaps = self._with_gaps, []
        try:
            self.give(pages)
        except BaseException:
            self._with_gaps = waiting
            raise

    def merge_and_sort(self) -> None:
        """Merge the waiting pages into the queue, which is then ascending; no-op if none wait."""
        self.close_gaps()
        if self._num_released == 0:
            return
        waiting = self._released[: self._num_released]
        merged, _ = torch.sort(torch.cat((self._read_front(self._num_queued), waiting)))
        head, num_queued, _ = self._position
        self._before_merge = self._read(head, num_queued).clone()
        self._ring[: merged.numel()] = merged
        self._head = 0
        self._num_queued = merged.numel()
        self._num_released = 0

    def require_place_for(self, count: int) -> None:
        """Raise DoubleFreeError if `count` more free pages would be more than exist.

        The one double free that the host sees without reading the device; it also keeps the ring
        from overwriting its own front. Pages given with gaps are not counted.
        """
        num_free = self._num_queued + self._num_released
        if num_free + count > self._capacity:
            raise DoubleFreeError(
                f"give of {count} pages to {num_free} free ones: expected at most "
                f"{self._capacity} in all"
            )

    @staticmethod
    def _owned(pages: torch.Tensor) -> torch.Tensor:
        """Storage that no later `give` rewrites."""
        return pages.clone()

    def _read_front(self, count: int) -> torch.Tensor:
        """The first `count` queued pages; may be a view of the ring."""
        return self._read(self._head, count)

    def _read(self, start: int, count: int) -> torch.Tensor:
        """`count` pages of the ring from `start` on; may be a view of it."""
        to_end = self._capacity - start
        if count <= to_end:
            return self._ring[start : start + count]
        return torch.cat((self._ring[start:], self._ring[: count - to_end]))

    def _drop_front(self, count: int) -> None:
        self._head = (self._head + count) % self._capacity
        self._num_queued -= count

    def _push_back(self, pages: torch.Tensor) -> None:
        self._write((self._head + self._num_queued) % self._capacity, pages)
        self._num_queued += pages.numel()

    def _push_front(self, pages: torch.Tensor) -> None:
        head = (self._head - pages.numel()) % self._capacity
        self._write(head, pages)
        self._head = head
        self._num_queued += pages.numel()

    def _append_released(self, pages: torch.Tensor) -> None:
        end = self._num_released + pages.numel()
        self._released[self._num_released : end] = pages
        self._num_released = end

    def _write(self, start: int, pages: torch.Tensor) -> None:
        to_end = self._capacity - start
        if pages.numel() <= to_end:
            self._ring[start : start + pages.numel()] = pages
            return
        self._ring[start:] = pages[:to_end]
        self._ring[: pages.numel() - to_end] = pages[to_end:]

"""What an open free group holds back, until its pages are written into a free list at one go.

Four kinds, by what the host knows about them:

    pages     ids, each page once; at page size 1 slots are pages. On a CPU they may be bytes, the
              cheapest copy of few numbers
    rows      page-aligned pieces of rows, one id for each page begun: tensors of a caller who
              promised not to touch them
    sets      slots in any number a page, so that the device alone knows how many pages they are
    entries   what a free list keeps of each page, 0 where there is none: the device alone knows how
              many are left

Left out: when the group ends (`kvcore.allocator.page_pool`, `kvcore.allocator.peers`).
"""

from collections.abc import Callable

import numpy as np
import torch

from kvcore.allocator.arguments import INT64, is_start, plain_vector
from kvcore.allocator.ownership import Ids, distinct_ids, on_host


class PendingFrees:
    """Tensors queued in one group of one pool; every tensor is int64 `[n]` and kept.

    Args:
        page_size: slots a page.
        device: where the tensors are.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._pages: list[torch.Tensor] = []
        self._host_pages: list[bytes] = []
        self._rows: list[torch.Tensor] = []
        self._sets: list[torch.Tensor] = []
        self._entries: list[torch.Tensor] = []
        self._num_in_rows = 0
        self.gaps_are_counted = True
        """Whether every gap is to be counted, see `FreeList.give_with_gaps`."""

    def __bool__(self) -> bool:
        return bool(self._host_pages or self._pages or self._rows or self._sets or self._entries)

    @property
    def num_pages(self) -> int:
        """Pages in `pages` and `rows`."""
        on_host = sum(map(len, self._host_pages)) // INT64.itemsize
        return on_host + sum(pages.numel() for pages in self._pages) + self._num_in_rows

    @property
    def is_counted(self) -> bool:
        """Whether the host knows how many pages these are."""
        return not (self._sets or self._entries)

    @property
    def add_pages(self) -> Callable[[torch.Tensor], None]:
        """Queues page ids: an append to a list that stays the same as long as this queue."""
        return self._pages.append

    @property
    def add_host_pages(self) -> Callable[[bytes], None]:
        """`add_pages` on a CPU: the bytes of ids, int64."""
        return self._host_pages.append

    def _joined(self) -> Ids:
        """`host_pages` in one, in memory of its own."""
        return np.frombuffer(bytearray().join(self._host_pages), dtype=INT64)

    def counted_on_host(self) -> Ids:
        """`counted_pages` of a queue on a CPU."""
        if not (self._pages or self._rows):
            return self._joined()
        if not (self._rows or self._host_pages):
            return on_host(self._pages[0] if len(self._pages) == 1 else torch.cat(self._pages))
        if self._rows and not (self._pages or self._host_pages):
            return on_host(self._one_slot_a_page()) // self._page_size
        return on_host(self.counted_pages())

    def _all_pages(self) -> list[torch.Tensor]:
        """`pages` as tensors."""
        if self._host_pages:
            self._pages.append(torch.from_numpy(self._joined()))
            self._host_pages.clear()
        return self._pages

    def add_row(self, row: torch.Tensor) -> None:
        """Queue a piece of a row that begins on a page boundary."""
        self._rows.append(row)
        self._num_in_rows += -(-row.numel() // self._page_size)

    def add_set(self, slots: torch.Tensor) -> None:
        """Queue slots in any number a page."""
        self._sets.append(slots)
        self.gaps_are_counted = False

    def add_entries(self, entries: torch.Tensor, *, counted: bool) -> None:
        """Queue entries, 0 for none."""
        self._entries.append(entries)
        self.gaps_are_counted &= counted

    def clear(self) -> None:
        """Hold nothing back."""
        for queued in (self._pages, self._host_pages, self._rows, self._sets, self._entries):
            queued.clear()
        self._num_in_rows = 0
        self.gaps_are_counted = True

    def absorb(self, later: "PendingFrees") -> None:
        """Queue what another one of the same pool holds, behind what is here."""
        self._all_pages().extend(later._all_pages())
        self._rows += later._rows
        self._sets += later._sets
        self._entries += later._entries
        self._num_in_rows += later._num_in_rows
        self.gaps_are_counted &= later.gaps_are_counted

    def write(self, place: torch.Tensor) -> None:
        """Write the ids of pages and rows into `place`, int64 `[num_pages]`."""
        if not self._rows:
            torch.cat(self._all_pages(), out=place)
            return
        if self._all_pages():
            in_rows = self._num_in_rows
            ids, place = place.split((place.numel() - in_rows, in_rows))
            torch.cat(self._pages, out=ids)
        torch.floor_divide(self._one_slot_a_page(), self._page_size, out=place)

    def _one_slot_a_page(self) -> torch.Tensor:
        """A slot of each page of `rows`, in order."""
        size = self._page_size
        if len(self._rows) == 1:
            return self._rows[0][::size]
        if all(row.numel() % size == 0 for row in self._rows[:-1]):
            # One pass over all, which begins every page at a multiple: no view a row.
            return torch.cat(self._rows)[::size]
        return torch.cat([row[::size] for row in self._rows])

    def firsts(self) -> torch.Tensor | None:
        """A slot of each of the pages, int64 `[num_pages]`; None where not all are in one kind."""
        pages = self._all_pages()
        if self._page_size == 1 and not self._rows:
            return pages[0] if len(pages) == 1 else torch.cat(pages)
        return None if pages else self._one_slot_a_page()

    def counted_pages(self) -> torch.Tensor:
        """The ids of pages and rows: int64 `[num_pages]`."""
        if not self._rows and len(self._all_pages()) == 1:
            return self._pages[0]
        pages = torch.empty(self.num_pages, dtype=torch.int64, device=self._device)
        if self.num_pages:
            self.write(pages)
        return pages

    def set_pages(self) -> torch.Tensor:
        """The pages that `sets` touch, each once and 0 in between: int64 `[n]`."""
        return distinct_pages(torch.cat(self._sets), self._page_size)

    def uncounted_entries(self, unit: int) -> torch.Tensor:
        """What a free list of this unit keeps of `sets` and `entries`: int64 `[n]`, with gaps."""
        entries = list(self._entries)
        if self._sets:
            entries.append(self.set_pages() * unit)
        return entries[0] if len(entries) == 1 else torch.cat(entries)

    def touched_pages(self) -> torch.Tensor:
        """The pages of `pages`, `rows` and `sets`, 0 for repetitions in sets: int64 `[n]`."""
        if not self._sets:
            return self.counted_pages()
        pages = self.set_pages()
        return torch.cat((self.counted_pages(), pages)) if self.num_pages else pages

    def touched_on_host(self) -> Ids:
        """`touched_pages` of a queue on a CPU, without the zeros."""
        pages = self.counted_on_host() if self._pages or self._rows or self._host_pages else None
        if not self._sets:
            return np.empty(0, dtype=np.int64) if pages is None else pages
        in_sets = pages_on_host(torch.cat(self._sets), self._page_size)
        return in_sets if pages is None else np.concatenate((pages, in_sets))

    def merged(self) -> "PendingFrees":
        """The same pages, each once, whichever kinds and how often they are queued."""
        found = [self.counted_pages()]
        if self._sets:
            found.append(torch.cat(self._sets) // self._page_size)
        found += self._entries
        once = PendingFrees(self._page_size, self._device)
        once.add_entries(without_repetitions(torch.cat(found)), counted=False)
        return once

    def all_pages(self, unit: int) -> torch.Tensor:
        """Every page queued, ascending, each once: int64 `[n]`; waits for the device."""
        size = self._page_size
        found = [on_host(pages) for pages in self._pages]
        if self._host_pages:
            found.append(self._joined())
        found += [on_host(row)[::size] // size for row in self._rows]
        found += [on_host(slots) // size for slots in self._sets]
        found += [on_host(entries) // unit for entries in self._entries]
        if not found:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        pages = distinct_ids(np.concatenate(found))
        return torch.from_numpy(pages[pages > 0]).to(self._device)

    def page_set(self, unit: int) -> set[int]:
        """`all_pages` as numbers, in any order; changes nothing here."""
        size = self._page_size
        found: set[int] = set()
        if not self:
            return found
        if self._host_pages:
            found.update(self._joined().tolist())
        for ids in self._pages:
            found.update(ids.tolist())
        for row in self._rows:
            found.update(slot // size for slot in row[::size].tolist())
        for slots in self._sets:
            found.update(slot // size for slot in slots.tolist())
        for entries in self._entries:
            found.update(entry // unit for entry in entries.tolist())
        return found if min(found, default=1) > 0 else {page for page in found if page > 0}


def distinct_pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The pages that slots touch, ascending, each once and 0 for every repetition: int64 `[n]`.

    `torch.unique` would wait for the device to learn how many there are.
    """
    return without_repetitions(torch.floor_divide(slots, page_size))


def copied_pages(index: torch.Tensor, page_size: int = 1, start_pos: int = 0) -> bytes | None:
    """The pages of a page-aligned piece of a row on a CPU, int64, in bytes; at page size 1 of any
    slots. None if anything about the arguments is unusual: a tensor of another kind, dtype, rank or
    device, or a start that no piece has."""
    slots = plain_vector(index)
    if slots is None or not is_start(start_pos, page_size):
        return None
    return slots.tobytes() if page_size == 1 else (slots[::page_size] // page_size).tobytes()


def pages_on_host(slots: torch.Tensor, page_size: int) -> Ids:
    """The pages that slots on a CPU touch, ascending, each once: int64 `[n]`.

    At page size 1 the slots themselves, in their order, since a free names each once.
    """
    numbers: Ids = slots.numpy()
    if page_size == 1:
        return numbers
    return distinct_ids(numbers // page_size)


def without_repetitions(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers, ascending, each once and 0 for every repetition: int64 `[n]`."""
    ascending, _ = torch.sort(numbers)
    ascending[1:].masked_fill_(ascending[1:] == ascending[:-1], 0)
    return ascending

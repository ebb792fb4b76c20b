"""The mapping of a hybrid allocator on a CPU, by numpy on the memory of the tensor.

On short vectors torch spends its time on finding out what to do: a dispatch costs several times
what numpy takes for the same work. Nothing waits for a device: here the memory is the host's.

Left out: the same in torch and by kernels (`kvcore.allocator.hybrid`).
"""

import numpy as np
import torch

from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.allocator.ownership import Ids


class HostRows:
    """Entries of a mapping, a row a page.

    Args:
        mapping: int64 `[num_rows * page_size + rest]` on the CPU; written in place.
        num_rows: pages, the padding page included.
        page_size: slots a page.
    """

    def __init__(self, mapping: torch.Tensor, num_rows: int, page_size: int) -> None:
        self._page_size = page_size
        self.mapping: Ids = mapping.numpy()
        self._entries: Ids = self.mapping[: num_rows * page_size]
        self._rows = self._entries.reshape(num_rows, page_size)
        self.firsts: Ids = self._rows[:, 0]
        """The first entry of each page, 0 for none; a view."""
        self.by_page: Ids = self._entries if page_size == 1 else self._rows
        """What is written of each page: one entry, or its row; a view."""
        self._offsets = np.arange(page_size, dtype=np.int64)

    def translated(self, locations: torch.Tensor) -> torch.Tensor:
        """The entries at locations, int64 of the same shape; -1 names the last one.

        Raises:
            IndexError: a location beyond the mapping.
        """
        return torch.from_numpy(self.mapping[locations.numpy()])

    def pages_of(self, firsts: torch.Tensor) -> Ids:
        """The pages of these slots, int64 `[n]`."""
        slots: Ids = firsts.numpy()
        return slots if self._page_size == 1 else slots // self._page_size

    def pages_of_segments(self, indices: list[torch.Tensor]) -> Ids:
        """The pages of page-aligned pieces of a row: int64 `[n]`."""
        size = self._page_size
        if len(indices) == 1:
            slots: Ids = indices[0].numpy()[::size]
        else:
            slots = np.concatenate([index.numpy()[::size] for index in indices])
        return slots if size == 1 else slots // size

    def unmap(self, pages: Ids) -> None:
        """Clear every entry of the pages."""
        self.by_page[pages] = 0

    def unmap_slots(self, slots: Ids) -> None:
        """Clear the entries of single slots, int64 `[n]`."""
        self._entries[slots] = 0

    def unmap_behind(self, pages: Ids, offset: int) -> None:
        """Clear the entries of the pages from `offset` on."""
        self._rows[pages, offset:] = 0

    def pair(self, pages: Ids, swa_firsts: Ids) -> None:
        """Map every slot of the pages to the slot of its SWA page as far in; see `_map_pages`."""
        if self._page_size == 1:
            self._entries[pages] = swa_firsts
        else:
            self._rows[pages] = swa_firsts[:, None] + self._offsets

    def pair_slots(self, slots: torch.Tensor, swa_slots: torch.Tensor) -> None:
        """`pair` the pages of slots with those of SWA slots at equal offsets, both int64 `[n]`."""
        size = self._page_size
        pages, peers = _without_runs(slots.numpy() // size, swa_slots.numpy() // size)
        self.pair(pages, peers * size)

    def move(self, kept: Ids, incoming: Ids) -> None:
        """Give the rows of the incoming pages to the kept ones, int64 `[n]`; 0 stays behind."""
        kept, incoming = _without_runs(kept, incoming)
        rows = self._rows[incoming]
        self._rows[incoming] = 0
        self._rows[kept] = rows

    def slots_of_batch(self, batch: ExtendBatch | DecodeBatch, pages: Ids) -> torch.Tensor:
        """`batch.slots` of these new pages: int64 `[num_tokens]`."""
        size, offsets = self._page_size, self._offsets
        if isinstance(batch, DecodeBatch):
            continued: Ids = batch.last_loc.numpy() + 1
            begun = [row for row, n in enumerate(batch.host_seq_lens) if n % size == 1]
            continued[begun] = pages * size
            return torch.from_numpy(continued)
        fresh = (pages[:, None] * size + offsets).reshape(-1)
        lengths, prefixes = batch.host_seq_lens, batch.host_prefix_lens
        slots = np.empty(sum(lengths) - sum(prefixes), dtype=np.int64)
        at = taken = 0
        for prefix, length, last in zip(prefixes, lengths, batch.last_loc.tolist(), strict=True):
            tokens = length - prefix
            # First the rest of the page that the row has begun, then new pages.
            onto_last = min(-prefix % size, tokens)
            if onto_last:
                np.add(offsets[:onto_last], last + 1, out=slots[at : at + onto_last])
            if rest := tokens - onto_last:
                slots[at + onto_last : at + tokens] = fresh[taken : taken + rest]
                taken += -(-rest // size) * size
            at += tokens
        return torch.from_numpy(slots)

    def slots_of(self, pages: Ids) -> torch.Tensor:
        """All slots of the pages, page by page: int64 `[n * page_size]`."""
        return torch.from_numpy((pages[:, None] * self._page_size + self._offsets).reshape(-1))


def _without_runs(pages: Ids, partners: Ids) -> tuple[Ids, Ids]:
    """Pairs of pages as they follow from slots in order, each run of equal pairs once."""
    if pages.size < 2:
        return pages, partners
    first = np.empty(pages.size, dtype=np.bool_)
    first[0] = True
    np.not_equal(pages[1:], pages[:-1], out=first[1:])
    first[1:] |= partners[1:] != partners[:-1]
    return pages[first], partners[first]

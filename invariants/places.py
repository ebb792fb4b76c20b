"""In how many places the model's books have each page: an owner table that is kept along.

Only what changed since the last look is looked at, so a pool of a million pages costs no more than
one of ten. Leaves out the target's state, and what is counted afresh: those are the laws
(`kvcore.invariants.plain`), which are asked in full every so many checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvcore.models import Model
from kvcore.models.state import Page, Side


class Places:
    """One side whose pages are joined to full pages: where its books have each of them. ``odd``:
    pages that are not in exactly one place of rows, buffers, free pages and open group."""

    def __init__(self, side: Side, full_pages: int, *, on_device: bool) -> None:
        self.odd: set[int] = set()
        self._side = side
        self._on_device = on_device
        self._joined = [0] * (full_pages + 1)
        self._rows = [0] * (side.total + 1)

    def follow(
        self, changed: Iterable[int], owners: Mapping[int, Page], buffers: Sequence[int]
    ) -> None:
        """The ``changed`` full pages may be joined to other pages now; every page that moved is
        counted again. ``buffers``: pages in device buffers."""
        side, rows, joined, on_device = self._side, self._rows, self._joined, self._on_device
        moved, free, pending, odd = side.moved, side.free, side.pending, self.odd
        for full in changed:
            owner = owners.get(full)
            page = 0
            if owner is not None:
                page = owner.device if on_device else owner.swa
            old = joined[full]
            if old != page:
                joined[full] = page
                # Row 0 counts the full pages without one, and is never looked at.
                rows[old] -= 1
                rows[page] += 1
                moved.add(old)
                moved.add(page)
        moved.discard(0)
        for page in moved:
            places = rows[page] + (page in free) + (page in pending)
            if buffers:
                places += buffers.count(page)
            if places != 1:
                odd.add(page)
            elif odd:
                odd.discard(page)
        moved.clear()


class BookPlaces:
    """The owner tables of a model's SWA and device pages. ``each_once``: whether every page was in
    exactly one place at the last look."""

    def __init__(self, model: Model) -> None:
        self.each_once = True
        self._model = model
        pages = model.full.total
        self._swa = Places(model.swa, pages, on_device=False)
        self._device = Places(model.device, pages, on_device=True)

    def follow(self) -> set[int]:
        """The full pages whose owner or entries became others since the last call."""
        model = self._model
        changed, owners = model.changed, model.owners
        if changed:
            model.changed = set()
        if model.hybrid and (changed or model.swa.moved):
            self._swa.follow(changed, owners, ())
            self.each_once = not self._swa.odd
        if model.sparse:
            buffers = [page for lent in model.buffers.values() for page in lent]
            self._device.follow(changed, owners, buffers)
            self.each_once = not (self._swa.odd or self._device.odd)
        return changed

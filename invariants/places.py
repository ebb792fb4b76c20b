"""In how many places the model's books have each page: an owner table that is kept along.

Only what changed since the last look is looked at, so a pool of a million pages costs no more than
one of ten. Leaves out the target's state, and what is counted afresh: those are the laws
(`kvcore.invariants.plain`), which are asked in full every so many checks.
"""

from __future__ import annotations

from kvcore.models import Model
from kvcore.models.state import Side


class Places:
    """One side whose pages are joined to full pages: where its books have each of them. ``odd``:
    pages that are not in exactly one place of rows, buffers, free pages and open group."""

    def __init__(self, side: Side) -> None:
        self.odd: set[int] = set()
        self._side = side
        self._joined: dict[int, int] = {}
        self._rows = [0] * (side.total + 1)

    def join(self, full: int, page: int) -> None:
        """A full page is joined to ``page`` now, 0 for none."""
        before = self._joined.get(full, 0)
        if before == page:
            return
        if before:
            self._rows[before] -= 1
            self._side.moved.add(before)
        if page:
            self._joined[full] = page
            self._rows[page] += 1
            self._side.moved.add(page)
        else:
            del self._joined[full]

    def count(self, buffers: list[int]) -> None:
        """Count the places of every page that moved; ``buffers``: pages in device buffers."""
        side, rows, odd = self._side, self._rows, self.odd
        for page in side.moved:
            places = rows[page] + (page in side.free) + (page in side.pending)
            if places + buffers.count(page) == 1:
                odd.discard(page)
            else:
                odd.add(page)
        side.moved.clear()


class BookPlaces:
    """The owner tables of a model's SWA and device pages."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._swa = Places(model.swa)
        self._device = Places(model.device)

    def follow(self) -> set[int]:
        """The full pages whose owner or entries became others since the last call."""
        model = self._model
        changed, model.changed = model.changed, set()
        owners = model.owners
        if model.swa.total:
            for full in changed:
                page = owners.get(full)
                self._swa.join(full, page.swa if page else 0)
            self._swa.count([])
        if model.device.total:
            for full in changed:
                page = owners.get(full)
                self._device.join(full, page.device if page else 0)
            self._device.count([page for lent in model.buffers.values() for page in lent])
        return changed

    @property
    def each_once(self) -> bool:
        """Whether every page is in exactly one place."""
        return not (self._swa.odd or self._device.odd)

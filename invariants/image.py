"""What the view of a small pool must show, kept from check to check: lists to compare at once.

A law that looks at every page finds nothing at most steps, and most pages are as they were. So the
mapping that was last found right is remembered; pages that changed since are judged one by one, and
all others must be as they were. Where anything differs the laws themselves are asked, and say what
is wrong or that all is right. Leaves out large pools (`kvcore.invariants.tensor_image`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Protocol

from kvcore.invariants.check import Check
from kvcore.invariants.devices import device_entries_right
from kvcore.invariants.places import BookPlaces
from kvcore.invariants.plain import entries_right, pending_kept
from kvcore.models import Model
from kvcore.models.state import NO_PEER
from kvcore.targets.protocol import HostView

SHOWN = frozenset(("L1", "L2", "L3", "L4", "L6"))
"""Laws of which none is broken where an image is shown."""


class Image(Protocol):
    """What a view must show. Follows one model, by every check of it in turn."""

    def shows(self, check: Check) -> bool:
        """Whether the view after the op is that image; then none of the laws `SHOWN` is broken.
        If not, one may be or not."""
        ...

    def adopt(self, check: Check) -> None:
        """The view after the op was found right, law by law."""
        ...


class ListImage:
    """The image in plain lists."""

    def __init__(self, model: Model) -> None:
        geometry = model.geometry
        self._model = model
        self._places = BookPlaces(model)
        self._hybrid, self._slides = geometry.hybrid, geometry.slides
        self._sparse, self._requests = geometry.sparse, geometry.requests > 0
        self._plain = not (self._sparse or self._requests)
        self._size, self._device_size = geometry.page_size, geometry.device_page_size
        self._wholes = _whole_pages(geometry.swa_pages, geometry.page_size)
        slots = range(geometry.full_size + geometry.page_size)
        self._mapping = [*(slots if geometry.pure_swa else [0] * len(slots)), -1]
        self._device_mapping = [0] * ((geometry.full_pages + 1) * self._device_size) + [-1]

    def shows(self, check: Check) -> bool:
        """See `Image`. Every clause of the laws is in here: the free pages are those of the books,
        each once; the entries of the mapping are what the books say; and the books have each page
        in one place."""
        places, model, host = self._places, self._model, check.after.listed or check.host
        changed = places.follow()
        seen, free = host.full_free, model.full.free
        if len(seen) != len(free) or set(seen) != free:
            return False
        if self._hybrid:
            seen, free = host.swa_free, model.swa.free
            if len(seen) != len(free) or set(seen) != free or not places.each_once:
                return False
        if check.op.hostile and pending_kept(check):
            return False
        # Without a change the mapping is as it was, in the usual case.
        same = not changed and host.mapping == self._mapping
        if self._slides and not same and not self._is_mapped(host.mapping, changed):
            return False
        return self._plain or self._shows_more(host, changed)

    def _shows_more(self, host: HostView, changed: set[int]) -> bool:
        """The same of device slots and request rows, where there are any."""
        model = self._model
        if self._sparse and not (
            self._places.each_once
            and _each_once(host.device_free, model.device.free)
            and self._is_on_device(host.device_mapping, changed)
        ):
            return False
        return not self._requests or _each_once(host.request_free, model.requests.free)

    def adopt(self, check: Check) -> None:
        """See `Image`."""
        if self._hybrid:
            self._mapping = list(check.host.mapping)
        if self._sparse:
            self._device_mapping = list(check.host.device_mapping)

    def _is_mapped(self, mapping: list[int], changed: set[int]) -> bool:
        if len(mapping) != len(self._mapping):
            return False
        if not self._hybrid:
            return mapping == self._mapping
        if changed and not self._accepts(mapping, changed):
            return False
        if mapping == self._mapping:
            return True
        # What was given up in the open group may turn 0 at any time.
        detached = self._model.detached
        return bool(detached) and self._accepts(mapping, detached) and mapping == self._mapping

    def _accepts(self, mapping: list[int], pages: Iterable[int]) -> bool:
        """Whether these full pages' entries are right; they are part of the image from now on."""
        model, size, owners, image = self._model, self._size, self._model.owners, self._mapping
        wholes = self._wholes
        for full in pages:
            page, own = owners.get(full), slice(full * size, (full + 1) * size)
            entries = mapping[own]
            swa = page.swa if page is not None else 0
            # At first sight: all its entries name its peer, or it has none and they are 0.
            if (
                entries != wholes[swa] or (page is not None and swa and NO_PEER in page.swa_stamps)
            ) and not entries_right(model, full, page, entries):
                return False
            image[own] = entries
        return True

    def _is_on_device(self, mapping: list[int], changed: set[int]) -> bool:
        if len(mapping) != len(self._device_mapping):
            return False
        for pages in (changed, self._model.device_detached):
            if not self._accepts_on_device(mapping, pages):
                return False
        return mapping == self._device_mapping

    def _accepts_on_device(self, mapping: list[int], pages: Iterable[int]) -> bool:
        """`_accepts` of the device mapping."""
        model, size = self._model, self._device_size
        for full in pages:
            own = slice(full * size, (full + 1) * size)
            entries = mapping[own]
            if not device_entries_right(model, full, model.owners.get(full), entries):
                return False
            self._device_mapping[own] = entries
        return True


@cache
def _whole_pages(pages: int, size: int) -> tuple[list[int], ...]:
    """The slots of each SWA page, and zeros in the place of the padding page. Not to be changed."""
    return ([0] * size, *(list(range(p * size, (p + 1) * size)) for p in range(1, pages + 1)))


def _each_once(seen: list[int], free: set[int]) -> bool:
    """Whether a free container has these pages, each once."""
    return len(seen) == len(free) and set(seen) == free

"""What the view of a large pool must show, kept from check to check: tensors to compare at once.

The image of `kvcore.invariants.image` where views are tensors: free pages are counted in one pass,
mappings compared in another, and only the entries of pages that changed come to the host, with the
answers to both in one copy. Leaves out what is wrong where a view shows something else: that say
the laws (`kvcore.invariants.vectorised`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvcore.invariants.check import Check
from kvcore.invariants.devices import device_entries_right
from kvcore.invariants.places import BookPlaces
from kvcore.invariants.plain import entries_right, pending_kept
from kvcore.invariants.vectorised import free_tensors
from kvcore.models import Model
from kvcore.models.state import Page, Side

MOST_JUDGED = 1024
"""Pages that are judged one by one; where more changed, the laws take less time."""

Judge = Callable[[Model, int, Page | None, list[int]], bool]
"""Whether a full page's entries are right."""


class TensorImage:
    """The image in tensors on the device of the views."""

    def __init__(self, model: Model) -> None:
        geometry = model.geometry
        self._model = model
        self._places = BookPlaces(model)
        self._free: dict[str, torch.Tensor] = {}
        self._swa = MappingImage(geometry.page_size, entries_right)
        self._device = MappingImage(geometry.device_page_size, device_entries_right)

    def shows(self, check: Check) -> bool:
        """See `kvcore.invariants.image.Image`; the same clauses as in `ListImage`."""
        model, geometry = self._model, self._model.geometry
        answers = [self._frees(*it) for it in free_tensors(check)]
        changed = self._places.follow()
        if len(changed) > MOST_JUDGED or len(model.detached) > MOST_JUDGED:
            return False
        if not self._places.each_once or (check.op.hostile and pending_kept(check)):
            return False
        entries: list[torch.Tensor] = []
        mappings: list[tuple[MappingImage, list[int]]] = []
        if geometry.slides:
            pages = [] if geometry.pure_swa else [*changed, *model.detached]
            mappings.append((self._swa, pages))
            self._swa.compare(check.after.tensors()[2], pages, answers, entries)
        if geometry.sparse:
            pages = [*changed, *model.device_detached]
            mappings.append((self._device, pages))
            self._device.compare(check.after.device_tensors()[1], pages, answers, entries)
        said = torch.cat([torch.stack(answers).to(torch.int64), *entries]).tolist()
        at = len(answers)
        right = all(said[:at])
        for image, pages in mappings:
            right = right and image.judge(model, pages, said[at:])
            at += len(pages) * image.size
        return right

    def adopt(self, check: Check) -> None:
        """See `kvcore.invariants.image.Image`."""
        if self._model.geometry.slides:
            self._swa.mapping = check.after.tensors()[2].clone()
        if self._model.geometry.sparse:
            self._device.mapping = check.after.device_tensors()[1].clone()

    def _frees(self, name: str, side: Side, free: torch.Tensor) -> torch.Tensor:
        """Whether ``free`` are the pages that the books say, each once."""
        flags = self._free.get(name)
        if flags is None:
            # A side begins with every page free; what became of them since is in ``moved``.
            flags = torch.ones(side.total + 1, dtype=torch.bool, device=free.device)
            flags[0] = False
            self._free[name] = flags
        if side.moved:
            at = torch.tensor(list(side.moved), device=free.device)
            now = [page in side.free for page in side.moved]
            flags[at] = torch.tensor(now, device=free.device)
        if name in ("full", "request"):
            # Nobody else looks at what moved there.
            side.moved.clear()
        if free.numel() != len(side.free):
            return torch.zeros((), dtype=torch.bool, device=free.device)
        return _each_once(free, flags)


class MappingImage:
    """One mapping, in pages of ``size`` entries and a sentinel; ``right`` judges those of a page.
    ``mapping``: as it was last found right, None before that."""

    def __init__(self, size: int, right: Judge) -> None:
        self.size = size
        self.mapping: torch.Tensor | None = None
        self._right = right

    def compare(
        self,
        seen: torch.Tensor,
        pages: list[int],
        answers: list[torch.Tensor],
        entries: list[torch.Tensor],
    ) -> None:
        """Whether all is as it was but for these pages joins ``answers``, and what is seen of these
        pages ``entries``. The image is what is seen of them from now on: whoever finds them wrong
        later has to end the run, or to say that all is right."""
        image = self.mapping
        if image is None or seen.numel() != image.numel():
            answers.append(torch.zeros((), dtype=torch.bool, device=seen.device))
            entries.append(seen.new_zeros(len(pages) * self.size))
            return
        if pages:
            at = torch.tensor(pages, device=seen.device)
            own = seen[:-1].view(-1, self.size)[at]
            image[:-1].view(-1, self.size)[at] = own
            entries.append(own.flatten())
        answers.append(_same(seen, image))

    def judge(self, model: Model, pages: list[int], entries: list[int]) -> bool:
        """Whether the entries of these pages are right."""
        size, owners = self.size, model.owners
        for place, full in enumerate(pages):
            own = entries[place * size : (place + 1) * size]
            if not self._right(model, full, owners.get(full), own):
                return False
        return True


def _same(seen: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Whether two mappings are equal. On a CPU numpy takes half the time."""
    if seen.is_cpu:
        return torch.tensor(np.array_equal(seen.numpy(), image.numpy()))
    return (seen == image).all()


def _each_once(pages: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Whether ``pages``, as many as there are ``flags`` set, are those, each once: one pass that
    marks them, and one that compares. On a CPU numpy takes a third of the time."""
    last = flags.numel() - 1
    if not pages.is_cpu:
        inside = pages.clamp(0, last)
        seen = torch.zeros_like(flags).index_fill_(0, inside, True)
        return (seen == flags).all() & (inside == pages).all()
    numbers = pages.numpy()
    right = True
    if len(numbers):
        right = bool(numbers.min() >= 1 and numbers.max() <= last)
    if right:
        marks = np.zeros(last + 1, dtype=np.bool_)
        marks[numbers] = True
        right = np.array_equal(marks, flags.numpy())
    return torch.tensor(right)

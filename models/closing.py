"""Ops at a program's end: those that give everything back, and those that then ask for all of it.

Both are generators over the model as it is now: whoever applies an op lets the model follow it
before taking the next one. Leaves out request-level programs: `kvcore.models.serving_closing`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.models import ops
from kvcore.models.books import Books
from kvcore.models.ops import Form, Op
from kvcore.models.state import Page


def closing_ops(model: Books) -> Iterator[Op]:
    """Ops that end the group and every pause and give everything back, as the target's callers
    would."""
    if model.group_open:
        yield ops.GroupEnd()
    for memory in sorted(model.memory.paused):
        yield ops.Resume(memory)
    for region in list(model.memory.pieces):
        yield ops.Drop(region)
    for buffer in list(model.buffers):
        yield ops.FreeBuffer(buffer)
    contract = model.contract
    form: Form = "slots" if "slots" in contract.free_forms else min(contract.free_forms)
    apart = form in contract.live_frees and model.geometry.hybrid
    while model.rows:
        seq, row = next(iter(model.rows.items()))
        alone = _full_alone(row.pages[0], apart=apart)
        run = (i for i, page in enumerate(row.pages) if _full_alone(page, apart=apart) != alone)
        stop = next(run, None)
        yield ops.FreeFull(seq, 0, stop) if alone else ops.Free(seq, 0, stop, form)


def probing_ops(model: Books) -> Iterator[Op]:
    """Law L7 by deed: all that is said to be free can be lent, and then no page more; where the
    logical or the full pool is the larger one, all of it too."""
    geometry, seq = model.geometry, model.last_name + 1
    logical = min(geometry.full_pages, geometry.swa_pages or geometry.full_pages)
    pages = min(logical, geometry.device_pages or logical)
    yield ops.Extend(((seq, pages * geometry.page_size),))
    yield ops.Extend(((seq + 1, 1 if pages == logical else geometry.page_size),))
    yield from closing_ops(model)
    if logical > pages:
        yield ops.ExtendLogical(((seq + 2, logical * geometry.page_size),))
        yield from closing_ops(model)
    if geometry.full_pages > logical:
        yield ops.LoadBack(seq + 3, geometry.full_pages, logical)


def _full_alone(page: Page, *, apart: bool) -> bool:
    """Whether callers give the page up on the full side alone: its window moved on, or with
    ``apart`` its peer is gone."""
    return page.gone or (apart and page.swa == 0)

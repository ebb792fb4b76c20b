"""Ops at the end of a request-level program: those that give everything back, and those that then
ask for all of it.

Generators over the model as it is now, as in `kvcore.models.closing`. Host copies and retracted
requests hold no slot and are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcore.models.ops import GroupEnd, Op
from kvcore.models.request_ops import Abort, Admit, DecodeStep, EndLoad, Flush
from kvcore.models.texts import STREAM_BITS, Text

if TYPE_CHECKING:
    from kvcore.models.serving import ServingModel

LONGEST_PIECE = 2**STREAM_BITS - 1


def closing_ops(model: ServingModel) -> Iterator[Op]:
    """Every load fails, every running request is aborted, the group ends, the cache is flushed."""
    for load in list(model.loads):
        yield EndLoad(load, failed=True)
    for name in list(model.live):
        yield Abort(name)
    if model.group_open:
        yield GroupEnd()
    yield Flush()


def probing_ops(model: ServingModel) -> Iterator[Op]:
    """Law L7 by deed: requests take all pages that both sides have, as long as there are request
    rows and a request may be so long; then there is no page for one token more."""
    geometry = model.geometry
    pages = min(geometry.full_pages, geometry.swa_pages)
    name = model.last_name
    for _ in range(geometry.requests):
        name += 1
        tokens = min(pages * geometry.page_size, geometry.context_len)
        if pages == 0:
            # There is a request row left.
            yield Admit(name, _text(name, 1), output=name)
            return
        yield Admit(name, _text(name, tokens), output=name)
        pages -= geometry.pages_for(tokens)
    yield DecodeStep((name,))


def _text(stream: int, tokens: int) -> Text:
    """A text of its own stream, in pieces of a length that there may be."""
    whole, rest = divmod(tokens, LONGEST_PIECE)
    return tuple((stream, count) for count in [LONGEST_PIECE] * whole + [rest] * (rest > 0))

"""Token texts by name: what a request's tokens are, without listing them.

A text is a sequence of pieces `(stream, length)`: the first ``length`` tokens of a stream. Two
texts share a prefix as far as their pieces agree, and within the first pair that does not, if it is
the same stream. So a text of 100,000 tokens is a line in a trace, and texts with common prefixes
are easy to draw. Leaves out who computed the tokens and where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated
from zlib import crc32

import msgspec

STREAM_BITS = 20
"""A piece is shorter than 2^20 tokens, so that a token's id names stream and place."""

Piece = tuple[
    Annotated[int, msgspec.Meta(ge=0, lt=2**40)],
    Annotated[int, msgspec.Meta(ge=1, lt=2**STREAM_BITS)],
]
Text = tuple[Piece, ...]
Run = tuple[int, int, int]
"""``(stream, first, count)``: consecutive tokens of a stream."""
PageKey = tuple[Run, ...]
"""The tokens of a page, as runs; equal for equal tokens."""


def length(text: Text) -> int:
    """Tokens in a text."""
    return sum(count for _, count in text)


def runs(text: Text, start: int, stop: int) -> Iterator[Run]:
    """The tokens ``[start, stop)`` of a text as runs; `stop` may not be beyond its end."""
    at = 0
    for stream, count in text:
        first, last = max(start - at, 0), min(stop - at, count)
        if first < last:
            yield stream, first, last - first
        at += count
        if at >= stop:
            return


def cut(text: Text, stop: int) -> Text:
    """The first ``stop`` tokens of a text."""
    return tuple((stream, count) for stream, _, count in runs(text, 0, stop))


def page_keys(text: Text, page_size: int, stop: int) -> list[PageKey]:
    """The keys of the whole pages among the first ``stop`` tokens."""
    keys: list[PageKey] = []
    page: list[Run] = []
    room = page_size
    for stream, count in text:
        first, left = 0, min(count, stop)
        stop -= left
        while left:
            taken = min(left, room)
            page.append((stream, first, taken))
            first, left, room = first + taken, left - taken, room - taken
            if room == 0:
                keys.append(tuple(page))
                page, room = [], page_size
        if stop == 0:
            break
    return keys


def joined(keys: Iterable[PageKey]) -> Text:
    """The text that these pages hold, one after the other."""
    pieces: list[Piece] = []
    for stream, first, count in (run for key in keys for run in key):
        # A piece begins with the first token of its stream, so any other run goes on.
        before = pieces.pop()[1] if first else 0
        pieces.append((stream, before + count))
    return tuple(pieces)


def token_ids(text: Text, start: int, stop: int) -> list[int]:
    """The ids of tokens ``[start, stop)``, below 2^60."""
    ids: list[int] = []
    for stream, first, count in runs(text, start, stop):
        ids += range((stream << STREAM_BITS) + first, (stream << STREAM_BITS) + first + count)
    return ids


def stamp_runs(text: Text, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """`stamps` as ``(first stamp, count)``, for who fills tensors."""
    at, prefix = 0, 0
    for stream, count in text:
        first, last = max(start - at, 0), min(stop - at, count)
        prefix = crc32(b"%d,%d" % (prefix, stream))
        if first < last:
            # 31 bits in all: index-K rows hold four bytes of a stamp.
            yield 1 + (prefix >> 2) + (first & (2**STREAM_BITS - 1)), last - first
        prefix = crc32(b"%d" % count, prefix)
        at += count
        if at >= stop:
            return


def stamps(text: Text, start: int, stop: int) -> list[int]:
    """What the KV of tokens ``[start, stop)`` is: a number that depends on the token and on all
    tokens before it, as the KV of a model does. Equal for equal prefixes, whoever computed them."""
    found: list[int] = []
    for first, count in stamp_runs(text, start, stop):
        found += range(first, first + count)
    return found

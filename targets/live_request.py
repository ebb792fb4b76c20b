"""A request on trial: its text, what the cache and the serving functions know of it, and what a
model's forward would write for it.

Leaves out the calls (`kvcore.targets.serving`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.models import texts
from kvcore.models.texts import STREAM_BITS, Text
from kvcore.serving import ServingRequest

ENDLESS = 2**STREAM_BITS - 1
"""Tokens of the longest piece."""

AHEAD = 31
"""Tokens that are known before their time, so that a batch of decodes does not add them singly."""


def joined(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The pieces in a row; none of them is none."""
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def token_ids(text: Text, start: int, stop: int) -> NDArray[np.int64]:
    """`texts.token_ids` as an array."""
    runs = texts.runs(text, start, stop)
    firsts = (((stream << STREAM_BITS) + first, count) for stream, first, count in runs)
    return joined([np.arange(at, at + count, dtype=np.int64) for at, count in firsts])


def stamps(text: Text, start: int, stop: int) -> NDArray[np.int64]:
    """`texts.stamps` as an array."""
    runs = texts.stamp_runs(text, start, stop)
    return joined([np.arange(at, at + count, dtype=np.int64) for at, count in runs])


class LiveRequest:
    """A request of tokens ``text`` that goes on with the tokens of stream ``output``."""

    def __init__(self, text: Text, output: int) -> None:
        self._text: Text = (*text, (output, ENDLESS))
        self._prompt = texts.length(text)
        self._output_id = output << STREAM_BITS
        # A token's stamp depends on all before it; within one stream they follow each other.
        ((self._output_stamp, _),) = texts.stamp_runs(self._text, self._prompt, self._prompt + 1)
        self.request = ServingRequest(token_ids(text, 0, self._prompt))

    def know(self, count: int) -> None:
        """The first ``count`` tokens are known, and some after them, which nobody may look at."""
        known = self.request.num_tokens
        if count > known:
            first = self._output_id + known - self._prompt
            after = first + count - known + AHEAD
            self.request.extend_tokens(np.arange(first, after, dtype=np.int64))

    def generated_stamp(self, place: int) -> int:
        """What a forward writes for the generated token at ``place``."""
        return self._output_stamp + place - self._prompt

    def stamps(self, start: int, stop: int) -> NDArray[np.int64]:
        """What a forward writes for tokens ``[start, stop)``."""
        if start >= self._prompt:
            first = self.generated_stamp(start)
            return np.arange(first, first + stop - start, dtype=np.int64)
        return stamps(self._text, start, stop)

"""What the model remembers of requests, host copies of prefixes, and loads in flight.

Leaves out the pages of the cache (`kvcore.models.prefix_tree`) and what an op does to any of them
(`kvcore.models.serving_books`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.models import texts
from kvcore.models.prefix_tree import TreePage
from kvcore.models.state import Page
from kvcore.models.texts import STREAM_BITS, PageKey, Text


class RequestTokens:
    """The tokens of one request: its prompt, and what it generates after it.

    Keys and stamps are worked out once, or in constant time a page or token of the output: a
    request has them asked for at every step.
    """

    def __init__(self, text: Text, output: int, page_size: int) -> None:
        self.text = text
        self.output = output
        self.prompt_len = texts.length(text)
        self._page_size = page_size
        self._keys = texts.page_keys(text, page_size, self.prompt_len)
        self._endless: Text = (*text, (output, 2**STREAM_BITS - 1))
        ((self._first_stamp, _),) = texts.stamp_runs(
            self._endless, self.prompt_len, self.prompt_len + 1
        )

    def keys(self, tokens: int) -> list[PageKey]:
        """The keys of the whole pages among the first ``tokens``."""
        size = self._page_size
        while len(self._keys) < tokens // size:
            start = len(self._keys) * size
            if start < self.prompt_len:
                key = tuple(texts.runs(self._endless, start, start + size))
            else:
                key = ((self.output, start - self.prompt_len, size),)
            self._keys.append(key)
        return self._keys[: tokens // size]

    def stamps(self, start: int, stop: int) -> list[int]:
        """What the KV of tokens ``[start, stop)`` is."""
        if start < self.prompt_len:
            return texts.stamps(self._endless, start, stop)
        first = self._first_stamp - self.prompt_len
        return list(range(first + start, first + stop))

    def known(self, tokens: int) -> Text:
        """The prompt, and as much after it as makes ``tokens`` in all."""
        more = tokens - self.prompt_len
        return (*self.text, (self.output, more)) if more > 0 else self.text


@dataclass(slots=True)
class Request:
    """A request that runs or waits. ``kv_len``: tokens of it that are computed."""

    tokens: RequestTokens
    kv_len: int

    @property
    def text(self) -> Text:
        """Its prompt."""
        return self.tokens.text

    @property
    def output(self) -> int:
        """The stream of what it generates."""
        return self.tokens.output

    @property
    def prompt_len(self) -> int:
        """Tokens of its prompt."""
        return self.tokens.prompt_len

    @property
    def known_text(self) -> Text:
        """Its prompt and what it has generated."""
        return self.tokens.known(self.kv_len)


@dataclass(slots=True)
class Running(Request):
    """A running request; all lengths in tokens. ``path``: the cached pages that its row begins
    with, which it locks; ``prefix``: their tokens. ``allocated``: tokens with slots. ``cursor``:
    its own SWA slots before here are freed (`swa_evicted_seqlen`)."""

    path: list[TreePage]
    prefix: int
    allocated: int
    cursor: int = 0

    @property
    def lock(self) -> int:
        """How far its lock reaches: it ends where the prefix ends."""
        return self.prefix

    @property
    def drafts(self) -> int:
        """Tokens with slots that are not computed."""
        return self.allocated - self.kv_len


@dataclass(slots=True)
class Waiting(Request):
    """A retracted request. ``backup``: whether its KV is in host memory."""

    backup: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """A host copy of the front of a text, whole pages. ``swa_from``: tokens before the last
    window, of which it has no SWA part."""

    text: Text
    keys: list[PageKey]
    tokens: int
    swa_from: int


@dataclass(slots=True)
class Load:
    """A host copy on its way back. ``path``: the cached pages that it begins with and locks;
    ``loading``: those that get a peer again; ``pages``: its own, for what was not cached."""

    copy: Copy
    path: list[TreePage]
    loading: list[TreePage] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)

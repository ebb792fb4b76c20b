"""What the reference model remembers: pages, rows, host backups and the two sides' free sets.

Plain lists, dicts and sets, on purpose dumber than any allocator. Leaves out every decision: what
is allowed is `kvcore.models.rules`, what follows from an answer is `kvcore.models.reference`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

NO_PEER = 0
"""SWA or device stamp of a token without such a slot."""
UNKNOWN = -1
"""Stamp of a token whose slot holds nothing that the laws speak of."""
ERASED = 0
"""Full stamp of a token whose slot holds zeros: its memory was paused."""


class Page(msgspec.Struct):
    """One full page of a row, its SWA and device pages (0 if none) and a stamp a token and side.

    ``full_stamps`` has one entry for each token in the page; ``swa_stamps`` and ``device_stamps``
    run beside it, with `NO_PEER` where that token is not mapped. ``gone_in``: in a pool whose
    layers all slide, the window moved on; the row remembers the page, which is nobody's. The number
    is that of the free group in which it went, 0 outside of groups.
    """

    full: int
    swa: int
    full_stamps: list[int] = []
    swa_stamps: list[int] = []
    device: int = 0
    device_stamps: list[int] = []
    gone_in: int | None = None

    @property
    def gone(self) -> bool:
        """Whether the window moved on."""
        return self.gone_in is not None

    @property
    def tokens(self) -> int:
        """Tokens in the page."""
        return len(self.full_stamps)

    @property
    def fully_mapped(self) -> bool:
        """Whether every token of the page has a peer."""
        return NO_PEER not in self.swa_stamps


class Row(msgspec.Struct):
    """The pages of one sequence in token order; only the last page may be partly used. ``request``
    is its row of the request pool, 0 without one."""

    pages: list[Page] = []
    request: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        pages = self.pages
        if not pages:
            return 0
        # All pages but the last have as many tokens as the first.
        return (len(pages) - 1) * len(pages[0].full_stamps) + len(pages[-1].full_stamps)

    def evicted(self, page_size: int, *, pure_swa: bool = False) -> int:
        """Tokens in the whole pages at the front that have no peer, or with ``pure_swa`` are
        gone."""
        count = 0
        for page in self.pages:
            held = not page.gone if pure_swa else page.swa != 0
            if held or page.tokens < page_size:
                break
            count += page_size
        return count

    def span(self, start: int, stop: int | None) -> list[Page]:
        """Pages ``[start, stop)``; empty if the range is not within the row."""
        pages = self.pages
        end = len(pages) if stop is None else stop
        return pages[start:end] if 0 <= start < end <= len(pages) else []


class Backup(msgspec.Struct):
    """A retracted row in host memory: its stamps, token by token. ``evicted``: tokens in whole
    pages at the front whose SWA part was gone."""

    full_stamps: list[int]
    swa_stamps: list[int]
    evicted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in the backup."""
        return len(self.full_stamps)


@dataclass(slots=True)
class Side:
    """One pool: which pages are free and which wait for the end of the group. ``moved``: pages that
    were taken or came back since somebody who keeps account looked."""

    total: int
    free: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = set(range(1, self.total + 1))

    def reset(self) -> None:
        """Every page is free."""
        every = set(range(1, self.total + 1))
        self.moved |= every - self.free
        self.free = every
        self.pending = set()

    def take(self, page: int) -> None:
        """The page is lent."""
        self.free.discard(page)
        self.moved.add(page)

    def release(self, page: int, *, deferred: bool) -> None:
        """The page is free, or with ``deferred`` waits for the end of the group."""
        (self.pending if deferred else self.free).add(page)
        self.moved.add(page)

    def take_all(self, pages: Collection[int]) -> None:
        """These pages are lent."""
        self.free.difference_update(pages)
        self.moved.update(pages)

    def release_all(self, pages: Collection[int], *, deferred: bool) -> None:
        """`release` of each of these pages."""
        (self.pending if deferred else self.free).update(pages)
        self.moved.update(pages)

    def settle(self) -> None:
        """The group ended: what waited is free."""
        if self.pending:
            self.free |= self.pending
            self.moved |= self.pending
            self.pending = set()

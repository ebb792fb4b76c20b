"""The tables of the prefix cache: what it holds of each prefix, and what its requests say of
themselves, before and after an op.

Where nodes are split does not matter here: pages one behind the other with the same state and locks
make one row, rows of longer prefixes stand below their beginning. Leaves out who holds which page
beside (`kvcore.reports.page_tables`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvcore.models import Clause
from kvcore.models.texts import STREAM_BITS
from kvcore.reports.layout import new_table
from kvcore.reports.lines import MOST_ROWS, NOTHING, heads, row
from kvcore.reports.moment import Moment
from kvcore.reports.wording import count, in_order, ranges
from kvcore.targets.tree_view import RequestView, TreeView

LAWS = frozenset(("tree", "locks", "L5"))
"""Laws whose full pages are concerned in what the cache says of them."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A full page in the cache, and what its node says."""

    page: int
    words: str


@dataclass(slots=True)
class Prefix:
    """A page of tokens behind other ones. ``cached``: where the cache has it, at each moment; more
    than one place is wrong."""

    tokens: NDArray[np.int64]
    start: int
    cached: list[list[Cached]]
    below: dict[bytes, Prefix] = field(default_factory=dict)

    def goes_on(self) -> Prefix | None:
        """The only page behind this one, if the cache says the same of it at every moment."""
        if len(self.below) != 1:
            return None
        [after] = self.below.values()
        said = [[at.words for at in places] for places in self.cached]
        return after if said == [[at.words for at in places] for places in after.cached] else None


def cache_tables(moments: Sequence[Moment], clauses: Sequence[Clause] = ()) -> list[Table]:
    """The table of cached prefixes and that of running requests, at one moment or two; none without
    a prefix cache."""
    trees = [moment.tree for moment in moments if moment.tree is not None]
    if len(trees) < len(moments):
        return []
    pages = {page for c in clauses if c.law in LAWS for page in c.full_pages}
    size = moments[0].geometry.page_size
    return [
        _prefix_table(heads(moments, "now"), _prefixes(trees, size), pages),
        _request_table(heads(moments, "now"), [tree.requests for tree in trees]),
    ]


# Prefixes.


def _prefixes(trees: Sequence[TreeView], size: int) -> Prefix:
    """All cached pages of all moments below a root without tokens."""
    root = Prefix(np.empty(0, dtype=np.int64), -size, [[] for _ in trees])
    for moment, tree in enumerate(trees):
        ends: list[Prefix] = []
        for node in tree.nodes:
            here = ends[node.parent] if 0 <= node.parent < len(ends) else root
            words = f"{node.state} {node.full_locks}/{node.swa_locks}"
            for number, page in enumerate(node.pages):
                tokens = node.tokens[number * size : (number + 1) * size]
                fresh = Prefix(tokens, here.start + size, [[] for _ in trees])
                here = here.below.setdefault(tokens.tobytes(), fresh)
                here.cached[moment].append(Cached(page, words))
            ends.append(here)
    return root


def _prefix_table(names: list[str], root: Prefix, concerned: set[int]) -> Table:
    rows = list(_stretches(root, 0))
    shown = rows
    if len(rows) > MOST_ROWS:
        shown = [it for it in rows if it.changed or it.pages & concerned][:MOST_ROWS]
    left_out = len(rows) - len(shown)
    caption = f"{count(left_out, 'prefix') if left_out == 1 else f'{left_out} prefixes'} not shown"
    table = new_table(caption=caption if left_out else "")
    table.add_column("prefix", no_wrap=True)
    table.add_column("stream: tokens", overflow="fold")
    for name in names:
        table.add_column(name, overflow="fold")
    for it in shown:
        cells = [(cell,) for cell in it.cells]
        table.add_row(it.label, it.tokens, *row(cells, (bool(it.pages & concerned),)))
    if not rows:
        table.add_row(NOTHING, NOTHING, *[NOTHING for _ in names])
    return table


@dataclass(frozen=True, slots=True)
class Stretch:
    """One row to be: pages one behind the other. ``cells``: what the cache says at each moment."""

    label: str
    tokens: str
    cells: tuple[str, ...]
    pages: set[int]

    @property
    def changed(self) -> bool:
        """Whether the op changed anything here."""
        return len(set(self.cells)) > 1


def _stretches(above: Prefix, level: int) -> Iterator[Stretch]:
    """The rows below a page, longer prefixes after their beginning."""
    waiting = [(page, level) for page in reversed(above.below.values())]
    while waiting:
        first, depth = waiting.pop()
        pages = [first]
        while (after := pages[-1].goes_on()) is not None:
            pages.append(after)
        yield _stretch(pages, depth)
        waiting += [(page, depth + 1) for page in reversed(pages[-1].below.values())]


def _stretch(pages: Sequence[Prefix], depth: int) -> Stretch:
    start, end = pages[0].start, pages[-1].start + len(pages[-1].tokens)
    moments = range(len(pages[0].cached))
    return Stretch(
        label="  " * depth + (f"{start}-{end - 1}" if end - start > 1 else f"{start}"),
        tokens=token_words(np.concatenate([page.tokens for page in pages])),
        cells=tuple(_cell(pages, moment) for moment in moments),
        pages={at.page for page in pages for places in page.cached for at in places},
    )


def _cell(pages: Sequence[Prefix], moment: int) -> str:
    """What the cache says of these pages; of a prefix that it holds twice both."""
    said: list[str] = []
    for place, first in enumerate(pages[0].cached[moment]):
        full = in_order(page.cached[moment][place].page for page in pages)
        said.append(f"full {full} {first.words}")
    return " + ".join(said) or NOTHING


def token_words(tokens: NDArray[np.int64]) -> str:
    """Tokens by stream and place: "1: 0-7, 4: 0-1"."""
    breaks = [0, *(np.flatnonzero(np.diff(tokens) != 1) + 1).tolist(), len(tokens)]
    parts: list[str] = []
    for start, end in pairwise(breaks) if len(tokens) else ():
        stream, place = divmod(int(tokens[start]), 2**STREAM_BITS)
        parts.append(f"{stream}: {ranges(range(place, place + end - start))}")
    return ", ".join(parts)


# Requests.


def _request_table(names: list[str], moments: Sequence[dict[int, RequestView]]) -> Table:
    table = new_table()
    table.add_column("request", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    running = sorted(set[int]().union(*moments))
    for request in running:
        cells = [(_request(requests.get(request)),) for requests in moments]
        table.add_row(str(request), *row(cells, (False,)))
    if not running:
        table.add_row(NOTHING, *[NOTHING for _ in names])
    return table


def _request(said: RequestView | None) -> str:
    if said is None:
        return NOTHING
    lengths = f"{said.kv_len}/{said.allocated} prefix {said.prefix}"
    return f"{lengths} freed {said.evicted} lock {said.lock}"

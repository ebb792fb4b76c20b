"""Judges what an answer says of the cached front of a row: its slots, their peers, their contents.

Collects every broken clause and changes nothing. Leaves out where a match must end: what the cache
holds is `kvcore.models.serving_books`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.models.lending import LendingJudge
from kvcore.models.outcomes import Served


class Cached(NamedTuple):
    """A page at the front of a row as the cache must hold it: its full page, its peer (0 if it has
    none), and the stamps of its tokens. ``gone``: the peer that it gave up inside the open group,
    which may still be seen. ``swa_known``: whether the peer holds the stamps too, and is not just
    being loaded."""

    full: int
    swa: int
    gone: int
    stamps: list[int]
    swa_known: bool


def judge_prefix(
    served: Served, cached: Sequence[Cached], judge: LendingJudge, page_size: int
) -> None:
    """The front of a row, as long as the answer says, is the pages ``cached``."""
    tokens = len(cached) * page_size
    slots: list[int] = []
    for one in cached:
        slots += range(one.full * page_size, (one.full + 1) * page_size)
    if served.matched != tokens:
        judge.blame("tree", f"{tokens} tokens of the row cached", f"{served.matched}")
    elif list(served.prefix_slots) != slots:
        pages = tuple(one.full for one in cached)
        expected, seen = f"the slots of full pages {pages}", f"slots {served.prefix_slots}"
        judge.blame("tree", expected, seen, full=pages)
    elif len(served.prefix_peers) != tokens:
        judge.blame("layout", f"{tokens} peers", f"{len(served.prefix_peers)}")
    else:
        for number, one in enumerate(cached):
            own = slice(number * page_size, (number + 1) * page_size)
            _judge_peers(one, list(served.prefix_peers[own]), judge)
        _judge_contents(served, cached, judge, page_size)


def _judge_peers(cached: Cached, seen: list[int], judge: LendingJudge) -> None:
    size = len(seen)
    wanted = _slots(cached.swa, size) if cached.swa else [0] * size
    if seen == wanted:
        return
    left = _slots(cached.gone, size)
    if cached.gone and all(peer in (0, old) for peer, old in zip(seen, left, strict=True)):
        return
    swa = (cached.swa,) if cached.swa else ()
    expected = f"cached full page {cached.full} mapped to {wanted}"
    judge.blame("L4", expected, str(seen), full=(cached.full,), swa=swa)


def _slots(page: int, size: int) -> list[int]:
    return list(range(page * size, (page + 1) * size))


def _judge_contents(
    served: Served, cached: Sequence[Cached], judge: LendingJudge, page_size: int
) -> None:
    """Nothing is known of contents that a target does not show."""
    full, swa = served.prefix_stamps
    if not full and not swa:
        return
    tokens = len(cached) * page_size
    if not len(full) == len(swa) == tokens:
        judge.blame("layout", f"contents of {tokens} tokens", f"{len(full)} and {len(swa)}")
        return
    for number, one in enumerate(cached):
        own = slice(number * page_size, (number + 1) * page_size)
        if list(full[own]) != one.stamps:
            expected = f"a match on full page {one.full}, K: {one.stamps}"
            judge.blame("stamps", expected, str(full[own]), full=(one.full,))
        if one.swa_known and list(swa[own]) != one.stamps:
            expected = f"a match on SWA page {one.swa}, K: {one.stamps}"
            judge.blame("stamps", expected, str(swa[own]), full=(one.full,), swa=(one.swa,))

"""The usual answer that lends slots, judged and followed in one go.

Nearly every answer is right in every slot, and to see that takes less than to say what is wrong.
So this looks at pools of full and SWA slots alone, and at answers in which every page has peers for
all of its new tokens or for none. Leaves out everything else, and all that is wrong: that is for
the judge who goes slot by slot (`kvcore.models.lending`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvcore.models.books import Books
from kvcore.models.outcomes import Lent
from kvcore.models.state import NO_PEER, Page, Row


class Part(msgspec.Struct, frozen=True):
    """What one sequence gains: ``tokens``, of which ``tail`` get a peer, the last ones but for
    ``beyond``; ``on_device`` whether the tokens get device entries."""

    seq: int
    tokens: int
    tail: int
    beyond: int = 0
    on_device: bool = False

    def mapped(self, hybrid: bool) -> list[bool]:
        """For each token whether the call owes it a peer."""
        if not hybrid:
            return [False] * self.tokens
        before = self.tokens - self.beyond - self.tail
        return [False] * before + [True] * self.tail + [False] * self.beyond


class Gain(msgspec.Struct):
    """What one sequence gains, as read from an answer: new pages side by side, ``fulls``, ``swas``
    (0 for none) and the tokens in each. ``last``: the page that its first ``onto_last`` tokens
    continue, with peers if ``last_mapped``."""

    seq: int
    last: Page | None
    onto_last: int = 0
    last_mapped: bool = False
    fulls: Sequence[int] = ()
    swas: Sequence[int] = ()
    tokens: Sequence[int] = ()


def follow_usual(books: Books, parts: Sequence[Part], answer: Lent) -> bool:
    """Follow ``answer`` in ``usual`` books if it is right and usual itself. False, and nothing has
    changed, if it may be wrong or is not for this module to judge.

    Whether there was room needs no look: pages that were free, each lent once and as many as the
    tokens fill, are what the op needs."""
    slots, peers = answer.slots, answer.peers
    if not books.hybrid:
        peers = (0,) * len(slots)
    elif len(peers) != len(slots):
        return False
    read = _read_slots if books.page_size == 1 else _read_pages
    gains: list[Gain] = []
    fulls: list[int] = []
    swas: list[int] = []
    at = 0
    for part in parts:
        stop = at + part.tokens
        gain = read(books, part, slots[at:stop], peers[at:stop])
        if gain is None:
            return False
        gains.append(gain)
        fulls += gain.fulls
        swas += gain.swas
        at = stop
    if at != len(slots):
        return False
    if 0 in swas:
        swas = [swa for swa in swas if swa]
    full_side, swa_side = books.full, books.swa
    if not (len(set(fulls)) == len(fulls) and full_side.free.issuperset(fulls)):
        return False
    if not (len(set(swas)) == len(swas) and swa_side.free.issuperset(swas)):
        return False
    full_side.take_all(fulls)
    swa_side.take_all(swas)
    books.changed.update(fulls)
    for gain in gains:
        _commit(books, gain)
    return True


def _mapped_range(books: Books, part: Part) -> tuple[int, int]:
    """The new tokens that must have a peer, ``[first, last)``."""
    last = part.tokens - part.beyond
    return (last - part.tail, last) if books.hybrid else (last, last)


def _read_slots(
    books: Books, part: Part, slots: tuple[int, ...], peers: tuple[int, ...]
) -> Gain | None:
    """What a part gains in pages of one slot; None if it is not right at first sight."""
    tokens = part.tokens
    if len(slots) != tokens:
        return None
    if part.tail == tokens and books.hybrid:
        # Every token has a peer, as nearly always; and see below.
        if 0 in peers:
            return None
        return Gain(part.seq, None, 0, False, slots, peers, (1,) * tokens)
    first, last = _mapped_range(books, part)
    if last - first != tokens and (any(peers[:first]) or any(peers[last:])):
        return None
    if 0 in peers[first:last]:
        return None
    return Gain(part.seq, None, 0, False, slots, peers, (1,) * tokens)


def _read_pages(
    books: Books, part: Part, slots: tuple[int, ...], peers: tuple[int, ...]
) -> Gain | None:
    """What a part gains in larger pages; None if it is not right at first sight."""
    size, tokens = books.page_size, part.tokens
    if len(slots) != tokens:
        return None
    first, last = _mapped_range(books, part)
    fulls: list[int] = []
    swas: list[int] = []
    counts: list[int] = []
    gain = Gain(part.seq, None, 0, False, fulls, swas, counts)
    row = books.rows.get(part.seq)
    at = 0
    used = row.tokens % size if row is not None else 0
    if row is not None and used:
        page = gain.last = row.pages[-1]
        at = gain.onto_last = min(size - used, tokens)
        gain.last_mapped = first == 0 and at <= last
        swa = page.swa if gain.last_mapped else 0
        if (at > first and not gain.last_mapped) or (gain.last_mapped and not swa):
            return None
        if not _in_order(slots[:at], page.full, used, size):
            return None
        if not _in_order(peers[:at], swa, used, size):
            return None
    while at < tokens:
        stop = min(at + size, tokens)
        mapped = first <= at and stop <= last
        if not mapped and at < last and stop > first:
            return None
        full, swa = slots[at] // size, peers[at] // size if mapped else 0
        if mapped and not swa:
            return None
        if not (_in_order(slots[at:stop], full, 0, size)):
            return None
        if not (_in_order(peers[at:stop], swa, 0, size)):
            return None
        fulls.append(full)
        swas.append(swa)
        counts.append(stop - at)
        at = stop
    return gain


def _in_order(slots: tuple[int, ...], page: int, used: int, size: int) -> bool:
    """Whether these are the slots of ``page`` from the offset ``used`` on; zeros of no page."""
    if page == 0:
        return not any(slots)
    base = page * size + used
    return slots == tuple(range(base, base + len(slots)))


def _commit(books: Books, gain: Gain) -> None:
    """Follow what one sequence gains; the sides have lent the pages already."""
    seq, owners, stamp = gain.seq, books.owners, books.stamps + 1
    books.used.add(seq)
    if seq > books.last_name:
        books.last_name = seq
    row = books.rows.get(seq)
    if row is None:
        row = books.rows[seq] = Row()
    last, count = gain.last, gain.onto_last
    if last is not None:
        new = range(stamp, stamp + count)
        last.full_stamps += new
        last.swa_stamps += new if gain.last_mapped else [NO_PEER] * count
        last.device_stamps += [NO_PEER] * count
        books.changed.add(last.full)
        stamp += count
    pages = row.pages
    for full, swa, count in zip(gain.fulls, gain.swas, gain.tokens, strict=True):
        stamps = list(range(stamp, stamp + count))
        none = [NO_PEER] * count
        page = Page(full, swa, stamps, stamps[:] if swa else none[:], 0, none)
        pages.append(page)
        owners[full] = page
        stamp += count
    books.stamps = stamp - 1

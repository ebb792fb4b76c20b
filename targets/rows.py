"""Which slots each sequence holds, by its name: what a caller of an allocator keeps account of.

Leaves out the calls by which slots come and go (`kvcore.targets.driver`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCRIBBLE = 0
"""What a caller leaves where a slot was: the padding slot, in range on every side."""


NO_SLOTS: list[int] = []
"""A row that has not begun; never written to."""


@dataclass(slots=True)
class RowBook:
    """Slots of live rows in token order. ``gone``: pages of a row that its window left behind,
    where the slots went with it. ``ghosts``: the slots that a name gave up last. ``changed``: rows
    that changed since somebody last looked."""

    page_size: int
    slots: dict[int, list[int]] = field(default_factory=dict)
    gone: dict[int, set[int]] = field(default_factory=dict)
    ghosts: dict[int, list[int]] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)

    def last(self, seq: int) -> int:
        """The last slot of a row, -1 of none."""
        row = self.slots.get(seq)
        return row[-1] if row else -1

    def length(self, seq: int) -> int:
        """Tokens in a row."""
        return len(self.slots.get(seq, ()))

    def pages(self, seq: int) -> int:
        """Pages of a row."""
        return -(-self.length(seq) // self.page_size)

    def span(self, seq: int, start: int, stop: int | None) -> list[int]:
        """The slots of pages ``[start, stop)``."""
        size = self.page_size
        return self.slots[seq][start * size : None if stop is None else stop * size]

    def batch(self, parts: tuple[tuple[int, int], ...]) -> tuple[list[int], list[int], list[int]]:
        """Row lengths before and after so many new tokens each, and the last slot of each row."""
        before: list[int] = []
        after: list[int] = []
        last: list[int] = []
        for seq, tokens in parts:
            row = self.slots.get(seq, NO_SLOTS)
            before.append(len(row))
            after.append(len(row) + tokens)
            last.append(row[-1] if row else -1)
        return before, after, last

    def grow(self, seq: int, slots: list[int]) -> None:
        """New tokens at the end of a row."""
        self.slots.setdefault(seq, []).extend(slots)
        self.changed.add(seq)

    def put_before(self, seq: int, pages: int) -> None:
        """The row begins with tokens of so many pages that have no slots any more."""
        self.slots[seq][:0] = [SCRIBBLE] * (pages * self.page_size)
        if pages:
            self.gone[seq] = set(range(pages))

    def leave_behind(self, seq: int, start: int, stop: int | None) -> None:
        """The window left pages ``[start, stop)`` behind, and their slots went with it."""
        end = self.pages(seq) if stop is None else stop
        self.gone.setdefault(seq, set()).update(range(start, end))

    def left_behind(self, seq: int) -> set[int]:
        """The pages that are gone."""
        return self.gone.get(seq, set())

    def leave(self, seq: int, start: int, stop: int | None) -> None:
        """Pages ``[start, stop)`` leave the row, which closes up."""
        size = self.page_size
        end = self.pages(seq) if stop is None else stop
        self.ghosts[seq] = self._held(seq, start, end)
        if gone := self.gone.pop(seq, set()):
            before = {page for page in gone if page < start}
            self.gone[seq] = before | {page - end + start for page in gone if page >= end}
        self._cut(seq, start * size, end * size)

    def _held(self, seq: int, start: int, end: int) -> list[int]:
        """The slots of pages ``[start, end)``, without those that are gone."""
        size, gone = self.page_size, self.left_behind(seq)
        slots = self.span(seq, start, end)
        if not gone:
            return slots
        return [slot for at, slot in enumerate(slots, start * size) if at // size not in gone]

    def take_over(self, seq: int, start: int, slots: list[int]) -> None:
        """The row's slots from page ``start`` on are others now."""
        at = start * self.page_size
        self.slots[seq][at : at + len(slots)] = slots
        self.changed.add(seq)

    def give_away(self, seq: int, start: int, stop: int) -> None:
        """Pages ``[start, stop)`` leave the row for another one."""
        self._cut(seq, start * self.page_size, stop * self.page_size)

    def _cut(self, seq: int, start: int, stop: int) -> None:
        self.changed.add(seq)
        row = self.slots[seq]
        del row[start:stop]
        if not row:
            del self.slots[seq]
            self.gone.pop(seq, None)

    def clear(self) -> None:
        """Every row was dropped."""
        self.ghosts.update({seq: self._held(seq, 0, self.pages(seq)) for seq in self.slots})
        self.slots, self.gone = {}, {}


def some_of_each_page(slots: list[int], size: int, start: int) -> list[int]:
    """One slot of each page, two of every other one, last page first; which ones varies."""
    named: list[int] = []
    for number, at in enumerate(range(0, len(slots), size)):
        page = slots[at : at + size]
        named.append(page[(start + number) % len(page)])
        if number % 2 and len(page) > 1:
            named.append(page[(start + number + 1) % len(page)])
    return named[::-1]

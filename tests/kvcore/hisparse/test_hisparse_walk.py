"""A seeded walk through the calls of HiSparse allocators, followed by plain sets.

After every call: each device page is in exactly one place (free, pending, mapped, in a buffer), the
mapping is what the rows say entry by entry, and a call succeeded exactly where there was room.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvcore import HiSparseTokenToKVPoolAllocator


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def pages(slots: list[int], page_size: int) -> list[int]:
    """The pages of the slots, each where it first appears."""
    return list(dict.fromkeys(slot // page_size for slot in slots))


@dataclass
class Row:
    slots: torch.Tensor = field(default_factory=tensor)
    on_device: dict[int, int] = field(default_factory=dict)
    """Entry number in the row to device slot."""


class Walk:
    """Random calls on one allocator, and plain sets that follow what it answers."""

    def __init__(self, bench: Any, seed: int) -> None:
        self.bench, self.kind, self.allocator = bench, bench.kind, bench.allocator
        self.random = random.Random(seed)
        self.rows: list[Row] = []
        self.buffers: list[list[int]] = []
        self.free_device = set(range(1, self.bench.device_pages + 1))
        self.free_logical = set(range(1, self.bench.logical_pages + 1))
        self.pending_device: set[int] = set()
        self.pending_logical: set[int] = set()
        self.group_open = False
        self.refused = 0

    def step(self) -> None:
        """One random call, and all laws after it."""
        self.random.choice(
            [
                self.alloc,
                self.extend,
                self.extend,
                self.decode,
                self.decode,
                self.free_row,
                self.free_row,
                self.free_device_pages,
                self.take_buffer,
                self.take_buffer,
                self.return_buffer,
                self.toggle_group,
            ]
        )()
        self.check()

    def check(self) -> None:
        """Both partitions, and the mapping entry by entry."""
        device = self.bench.device
        per_page = self.kind.device_page_size
        mapped = {
            page for row in self.rows for page in pages(list(row.on_device.values()), per_page)
        }
        lent = [page for buffer in self.buffers for page in buffer]
        assert Counter(
            [*self.bench.free_ids(device), *device.pending_pages.tolist(), *mapped, *lent]
        ) == (Counter(range(1, self.bench.device_pages + 1)))
        assert set(self.bench.free_ids(device)) == self.free_device
        assert set(device.pending_pages.tolist()) == self.pending_device
        logical = self.bench.slot_side
        assert Counter(self.bench.free_ids(logical)) == Counter(self.free_logical)
        assert set(logical.pending_pages.tolist()) == self.pending_logical
        expected = [0] * ((self.bench.logical_pages + 1) * per_page) + [-1]
        for row in self.rows:
            locations = self.bench.entries(row.slots).tolist()
            for number, slot in row.on_device.items():
                expected[locations[number]] = slot
        assert self.bench.mapping == expected
        page = self.kind.page_size
        room = min(len(self.free_device), len(self.free_logical), self.swa_room())
        assert self.allocator.available_size() == room * page

    def swa_room(self) -> int:
        """Free SWA pages, counted by their own law elsewhere."""
        if not self.kind.compressed:
            return self.bench.logical_pages
        return int(self.allocator.swa_available_size()) // self.kind.page_size

    def alloc(self) -> None:
        number = self.random.randint(0, 3)
        room = min(len(self.free_device), len(self.free_logical), self.swa_room())
        slots = self.allocator.alloc(number * self.kind.page_size)
        if self.refused_for_want(slots, number <= room):
            return
        row = Row()
        self.grew(row, slots)
        self.mapped(row, 0)
        self.rows.append(row)

    def extend(self) -> None:
        logically = self.random.random() < 0.3
        able = [row for row in self.rows if logically or self.can_continue(row)]
        rows = self.random.sample(able, min(len(able), self.random.randint(0, 2)))
        rows.append(Row())
        lengths = [len(row.slots) + self.random.randint(0, 2 * self.kind.page_size) for row in rows]
        before = [len(row.slots) for row in rows]
        logical = self.pages_needed(before, lengths, self.kind.page_size)
        ratio, per_page = self.kind.ratio, self.kind.device_page_size
        device = self.pages_needed(
            [count // ratio for count in before], [count // ratio for count in lengths], per_page
        )
        fits = logical <= min(len(self.free_logical), self.swa_room())
        name = "alloc_logical_only" if logically else "alloc_extend"
        slots = getattr(self.allocator, name)(
            *self.bench.batch([row.slots for row in rows], lengths)
        )
        fits &= logically or device <= len(self.free_device)
        if self.refused_for_want(slots, fits):
            return
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            old = len(row.slots)
            self.grew(row, slots[start : start + length - old])
            start += length - old
            if not logically:
                self.mapped(row, old)
        self.rows += [row for row in rows[-1:] if len(row.slots)]

    def decode(self) -> None:
        able = [row for row in self.rows if len(row.slots)]
        rows = self.random.sample(able, min(len(able), self.random.randint(0, 3)))
        lengths = tensor(*(len(row.slots) + 1 for row in rows))
        last = tensor(*(int(row.slots[-1]) for row in rows))
        need = self.pages_needed(
            [len(row.slots) for row in rows], lengths.tolist(), self.kind.page_size
        )
        fits = need <= min(len(self.free_logical), self.swa_room())
        slots = self.allocator.alloc_decode(lengths, lengths.clone(), last)
        if self.refused_for_want(slots, fits):
            return
        for row, slot in zip(rows, slots, strict=True):
            self.grew(row, slot.reshape(1))

    def free_row(self) -> None:
        if not self.rows:
            return
        row = self.rows.pop(self.random.randrange(len(self.rows)))
        page = self.kind.page_size
        if self.random.random() < 0.4:
            cut = self.random.randrange(0, len(row.slots) + 1, page)
            segments = [(row.slots[:cut], 0), (row.slots[cut:], cut)]
            self.allocator.free_segments(iter(segments))
        else:
            named = row.slots[self.random.randrange(page) :: page] if page > 1 else row.slots
            covers = len(named) == len(pages(row.slots.tolist(), page))
            self.allocator.free(named if covers else row.slots)
        self.give_logical(pages(row.slots.tolist(), page))
        self.give_device(pages(list(row.on_device.values()), self.kind.device_page_size))

    def free_device_pages(self) -> None:
        if not self.rows:
            return
        row = self.random.choice(self.rows)
        page, per_page = self.kind.page_size, self.kind.device_page_size
        named = [slot for slot in row.slots.tolist() if self.random.random() < 0.5]
        touched = {slot // page for slot in named}
        if self.random.random() < 0.5:
            self.allocator.free_hisparse(tensor(*named))
        else:
            listed = {slot // self.kind.ratio for slot in named}
            self.allocator.free_compressed(tensor(*listed))
        self.give_device(pages(self.unmap(row, touched), per_page))

    def take_buffer(self) -> None:
        if not self.rows:
            return
        row = self.random.choice(self.rows)
        per_page = self.kind.device_page_size
        named = [entry for entry in self.bench.entries(row.slots).tolist() if self.coin()]
        if self.coin():
            self.random.shuffle(named)
        touched = pages(named, per_page)
        at = {
            self.bench.entries(row.slots).tolist()[number] // per_page: slot // per_page
            for number, slot in row.on_device.items()
        }
        own = [at[page] for page in touched if page in at]
        need = self.random.randint(0, 4)
        buffer = self.allocator.alloc_device_buffer(tensor(*named), need * per_page)
        if self.refused_for_want(buffer, need - len(own) <= len(self.free_device)):
            return
        got = pages(buffer.tolist(), per_page)
        assert buffer.tolist() == [page * per_page + i for page in got for i in range(per_page)]
        assert len(got) == need
        assert got[: len(own)] == own[:need]
        fresh = set(got[len(own) :])
        assert fresh <= self.free_device
        self.free_device -= fresh
        self.unmap(row, set(touched))
        self.give_device(own[need:])
        self.buffers.append(got)

    def return_buffer(self) -> None:
        if not self.buffers:
            return
        buffer = self.buffers.pop(self.random.randrange(len(self.buffers)))
        kept = [page for page in buffer if self.random.random() < 0.3]
        given = [page for page in buffer if page not in kept]
        per_page = self.kind.device_page_size
        self.allocator.free_hisparse_indices(
            tensor(*(page * per_page + self.random.randrange(per_page) for page in given))
        )
        self.buffers += [kept] if kept else []
        self.give_device(given)

    def toggle_group(self) -> None:
        if self.group_open:
            self.allocator.free_group_end()
            self.free_device |= self.pending_device
            self.free_logical |= self.pending_logical
            self.pending_device, self.pending_logical = set(), set()
        else:
            self.allocator.free_group_begin()
        self.group_open = not self.group_open

    def drain(self) -> None:
        """Everything goes back: L10."""
        if self.group_open:
            self.toggle_group()
        while self.rows:
            self.free_row()
        while self.buffers:
            self.return_buffer()
        self.check()
        assert len(self.free_device) == self.bench.device_pages
        assert len(self.free_logical) == self.bench.logical_pages

    def coin(self) -> bool:
        return self.random.random() < 0.7

    def refused_for_want(self, answer: torch.Tensor | None, fits: bool) -> bool:
        """L7: the call succeeds exactly if there is room; whether it was refused."""
        assert (answer is not None) == fits
        self.refused += answer is None
        return answer is None

    def pages_needed(self, before: list[int], after: list[int], page_size: int) -> int:
        return sum(
            -(-new // page_size) - -(-old // page_size)
            for old, new in zip(before, after, strict=True)
        )

    def can_continue(self, row: Row) -> bool:
        number = len(row.slots) // self.kind.ratio
        return number % self.kind.device_page_size == 0 or number - 1 in row.on_device

    def grew(self, row: Row, slots: torch.Tensor) -> None:
        page = self.kind.page_size
        old = {slot // page for slot in row.slots.tolist()}
        fresh = set(pages(slots.tolist(), page)) - old
        assert fresh <= self.free_logical
        self.free_logical -= fresh
        row.slots = torch.cat((row.slots, slots))

    def mapped(self, row: Row, old_length: int) -> None:
        """The entries behind `old_length` tokens: on the page of the last one, or on free ones."""
        per_page = self.kind.device_page_size
        locations = self.bench.entries(row.slots).tolist()
        for number in range(old_length // self.kind.ratio, len(locations)):
            slot = self.bench.mapping[locations[number]]
            assert slot % per_page == number % per_page
            if number % per_page == 0:
                assert slot // per_page in self.free_device
                self.free_device.remove(slot // per_page)
            else:
                assert slot == row.on_device[number - 1] + 1
            row.on_device[number] = slot

    def unmap(self, row: Row, touched: set[int]) -> list[int]:
        """Forget the device slots of whole logical pages, and list them in row order."""
        locations = self.bench.entries(row.slots).tolist()
        per_page = self.kind.device_page_size
        numbers = [n for n in row.on_device if locations[n] // per_page in touched]
        return [row.on_device.pop(number) for number in numbers]

    def give_device(self, given: list[int]) -> None:
        target = self.pending_device if self.group_open else self.free_device
        target.update(given)

    def give_logical(self, given: list[int]) -> None:
        target = self.pending_logical if self.group_open else self.free_logical
        target.update(given)


def walk_far(walk: Walk) -> None:
    for _ in range(250):
        walk.step()


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_keeps_every_law(bench: Any, seed: int) -> None:
    walk = Walk(bench, seed)
    walk_far(walk)
    assert walk.refused > 0, "a walk that never exhausts a side proves little"
    walk.drain()


def test_a_walk_needs_no_value_checks(bench: Any) -> None:
    walk = Walk(bench.remade(validate=False), seed=9)
    walk_far(walk)
    walk.drain()


class LosesSurplus(HiSparseTokenToKVPoolAllocator):
    def _return_surplus(self, device_pages: torch.Tensor) -> None:
        pass


class LosesPartlyUsedPage(HiSparseTokenToKVPoolAllocator):
    def _claimed_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self._device_pages(pages[self._rows[pages][:, -1] > 0])


class IgnoresGroups(HiSparseTokenToKVPoolAllocator):
    def _give_device_pages(self, device_pages: torch.Tensor) -> None:
        self.hisparse_attn_allocator.drop_group()
        super()._give_device_pages(device_pages)
        if self.free_group_is_open:
            self.hisparse_attn_allocator.free_group_begin()


@pytest.mark.parametrize("faulty", [LosesSurplus, LosesPartlyUsedPage, IgnoresGroups])
def test_the_walk_finds_lost_pages_and_ignored_groups(page4: Any, faulty: type[Any]) -> None:
    with pytest.raises(AssertionError):
        walk_far(Walk(page4.remade(faulty=faulty), seed=1))

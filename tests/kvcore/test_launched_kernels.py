"""An allocator does the same by numpy, by torch and by kernels, which it launches as it should.

The kernels are stand-ins in plain Python that answer as the protocol says and note each launch, so
that every way through the allocator is tried without Triton; the real ones: test_kernels.
"""

import random
from typing import Any

import pytest
import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.kernels import SlotKernels


class PlainKernels:
    """`SlotKernels`, entry by entry."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def extend_slots(
        self, prefix_lens: Any, seq_lens: Any, last_loc: Any, new_pages: Any, **sizes: Any
    ) -> torch.Tensor:
        self.launched.append("extend_slots")
        return self._slots(prefix_lens, seq_lens, last_loc, new_pages, sizes["page_size"])

    def decode_slots(
        self, seq_lens: Any, last_loc: Any, new_pages: Any, *, page_size: int
    ) -> torch.Tensor:
        self.launched.append("decode_slots")
        return self._slots(seq_lens - 1, seq_lens, last_loc, new_pages, page_size)

    @staticmethod
    def _slots(
        prefix_lens: Any, seq_lens: Any, last_loc: Any, new_pages: Any, page_size: int
    ) -> torch.Tensor:
        pages, placed = iter(new_pages.tolist()), []
        rows = zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True)
        for prefix, length, last in rows:
            slot = last
            for position in range(prefix, length):
                slot = next(pages) * page_size if position % page_size == 0 else slot + 1
                placed.append(slot)
        return torch.tensor(placed, dtype=torch.int64)

    def decode_paired(
        self, seq_lens: Any, last_loc: Any, full_pages: Any, swa_firsts: Any, **mapped: Any
    ) -> torch.Tensor:
        self.launched.append("decode_paired")
        self._map(full_pages, swa_firsts, **mapped)
        return self._slots(seq_lens - 1, seq_lens, last_loc, full_pages, mapped["page_size"])

    def lend(self, full_pages: Any, swa_firsts: Any, **mapped: Any) -> torch.Tensor:
        self.launched.append("lend")
        self._map(full_pages, swa_firsts, **mapped)
        size = mapped["page_size"]
        slots = [page * size + offset for page in full_pages.tolist() for offset in range(size)]
        return torch.tensor(slots, dtype=torch.int64)

    def map_pages(self, full_pages: Any, swa_firsts: Any, **mapped: Any) -> None:
        self.launched.append("map_pages")
        self._map(full_pages, swa_firsts, **mapped)

    @staticmethod
    def _map(full_pages: Any, swa_firsts: Any, *, mapping: Any, page_size: int) -> None:
        for page, first in zip(full_pages.tolist(), swa_firsts.tolist(), strict=True):
            for offset in range(page_size):
                mapping[page * page_size + offset] = first + offset

    def release(
        self, slots: Any, mapping: Any, *, page_size: int, full_pages: Any, swa_firsts: Any
    ) -> None:
        self.launched.append("release")
        full_pages.copy_(slots // page_size)
        self._unmap(slots, mapping, page_size, swa_firsts)

    def release_peers(self, slots: Any, mapping: Any, *, page_size: int, swa_firsts: Any) -> None:
        self.launched.append("release_peers")
        self._unmap(slots, mapping, page_size, swa_firsts)

    @staticmethod
    def _unmap(slots: Any, mapping: Any, page_size: int, swa_firsts: Any) -> None:
        assert swa_firsts.is_contiguous()
        for at, slot in enumerate(slots.tolist()):
            start = slot // page_size * page_size
            swa_firsts[at] = mapping[start].item()
            mapping[start : start + page_size] = 0


def launching(laws: Any, page_size: int, **options: Any) -> tuple[Any, PlainKernels]:
    allocator, kernels = laws.make_hybrid(page_size, **options), PlainKernels()
    checked: SlotKernels = kernels
    for each in (allocator, allocator.full_attn_allocator, allocator.swa_attn_allocator):
        each._kernels, each._by_host = checked, False
    allocator._host = None
    allocator._release = allocator._make_release()
    return allocator, kernels


def launches(kernels: PlainKernels) -> list[str]:
    seen, kernels.launched = kernels.launched, []
    return seen


def test_every_call_is_one_launch(laws: Any) -> None:
    allocator, kernels = launching(laws, 4, validate=False)
    first, second = allocator.alloc(8), allocator.alloc(8)
    assert launches(kernels) == ["lend", "lend"]
    allocator.free_swa_segment(first, start_pos=0)
    assert launches(kernels) == ["release_peers"]
    allocator.free_segment(second, start_pos=0)
    assert launches(kernels) == ["release"]
    lengths = torch.tensor([9])
    allocator.alloc_decode(lengths, lengths, first[-1:])
    assert launches(kernels) == ["decode_paired"]
    lengths = torch.tensor([7])
    allocator.alloc_decode(lengths, lengths, first[5:6])
    assert launches(kernels) == ["decode_slots"]


@pytest.mark.parametrize("owned", [False, True])
def test_a_group_ends_with_one_launch(page_size: int, owned: bool, laws: Any) -> None:
    allocator, kernels = launching(laws, page_size, validate=False)
    rows = [allocator.alloc(2 * page_size) for _ in range(3)]
    launches(kernels)
    allocator.free_group_begin(owned=owned)
    for row in rows:
        allocator.free_segment(row, start_pos=0)
    allocator.free_group_end()
    assert launches(kernels) == ["release"]
    laws.check_hybrid(allocator, [])


class Four:
    """The same calls on an allocator by compiled code where there is any, on one by numpy, on one
    by torch, and on one with kernels."""

    def __init__(self, page_size: int, laws: Any, seed: int, **options: Any) -> None:
        self.page_size = page_size
        self.choose = random.Random(seed)
        self.all: list[SWATokenToKVPoolAllocator] = []
        for kernels in ("", "numpy", "torch"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVCORE_KERNELS", kernels)
                self.all.append(laws.make_hybrid(page_size, **options))
        launched, self.kernels = launching(laws, page_size, **options)
        self.all.append(launched)
        self.rows: list[torch.Tensor] = []
        self.dead: list[torch.Tensor] = []

    def every(self, name: str, *arguments: Any, **named: Any) -> torch.Tensor | None:
        answers = [getattr(allocator, name)(*arguments, **named) for allocator in self.all]
        if answers[0] is None:
            assert answers == [None] * len(self.all)
            return None
        found: torch.Tensor = answers[0].clone()
        assert all(answer.tolist() == found.tolist() for answer in answers)
        return found

    def lend(self) -> None:
        size = self.page_size
        if self.rows and self.choose.random() < 0.6:
            at = self.choose.randrange(len(self.rows))
            row = self.rows[at]
            if self.choose.random() < 0.6:
                lengths = torch.tensor([row.numel() + 1])
                more = self.every("alloc_decode", lengths, lengths, row[-1:])
            else:
                more = self.extend(row, self.choose.randint(1, 2 * size))
            if more is not None:
                self.rows[at] = torch.cat((row, more))
        elif self.choose.random() < 0.5:
            slots = self.every("alloc", size)
            self.rows += [] if slots is None else [slots]
        else:
            slots = self.extend(torch.tensor([-1]), self.choose.randint(1, 2 * size), rows=0)
            self.rows += [] if slots is None else [slots]

    def extend(self, row: torch.Tensor, tokens: int, rows: int | None = None) -> Any:
        before = torch.tensor([row.numel() if rows is None else rows])
        after = before + tokens
        return self.every("alloc_extend", before, before, after, after, row[-1:], tokens)

    def give(self) -> None:
        if self.dead and self.choose.random() < 0.3:
            self.free_segment("free_full_segment", self.dead.pop())
        elif self.rows:
            row = self.rows.pop(self.choose.randrange(len(self.rows)))
            if self.choose.random() < 0.3:
                if self.page_size > 1 or self.all[0].free_group_is_open:
                    self.free_segment("free_swa_segment", row)
                else:
                    for allocator in self.all:
                        allocator.free_swa(row)
                        # What a device has not counted yet is lent later than what the host has.
                        allocator.available_size()
                self.dead.append(row)
            elif self.choose.random() < 0.5:
                self.free_segment("free_segment", row)
            else:
                for allocator in self.all:
                    allocator.free(row)

    def free_segment(self, name: str, row: torch.Tensor) -> None:
        for allocator in self.all:
            getattr(allocator, name)(row, start_pos=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("validate", [False, True])
def test_all_is_the_same_whatever_computes_it(
    page_size: int, validate: bool, seed: int, laws: Any
) -> None:
    four = Four(page_size, laws, seed, validate=validate, need_sort=seed % 2 == 1)
    for step in range(200):
        if step % 10 == 0:
            for allocator in four.all:
                if allocator.free_group_is_open:
                    allocator.free_group_end()
                else:
                    allocator.free_group_begin(owned=step % 20 == 0)
                # What a device has not counted yet is lent later than what the host has.
                allocator.available_size()
        four.lend() if four.choose.random() < 0.55 else four.give()
        seen = [
            (
                allocator.full_to_swa_index_mapping.tolist(),
                *(side.pending_pages.tolist() for side in sides_of(allocator)),
                *(side.free_page_list() for side in sides_of(allocator)),
            )
            for allocator in four.all
        ]
        assert all(one == seen[0] for one in seen)
    assert four.kernels.launched


def sides_of(allocator: SWATokenToKVPoolAllocator) -> tuple[Any, Any]:
    return allocator.full_attn_allocator, allocator.swa_attn_allocator

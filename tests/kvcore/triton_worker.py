"""Holds the Triton kernels against torch under Triton's interpreter; run by test_kernels in a
process of its own, since Triton reads TRITON_INTERPRET when it is imported.

Usage: python triton_worker.py SEED BATCHES. Prints, as JSON, how many batches of each kind were
compared; a difference is an AssertionError. What a kernel reads ends where readable memory ends, so
that one entry more kills the process; what it writes lies between guards, which are looked at.
"""

import ctypes
import json
import mmap
import os
import random
import sys
from collections import Counter

import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.kernels.triton_slots import TritonSlots

CPU = torch.device("cpu")
GUARD = 320
"""Guard entries on each side of an answer: more than a kernel's block, so a missing mask shows."""
POISON = -(10**12)


class Edge:
    """Entries in front of memory that must not be touched; one vector at a time."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        forbidden = ctypes.c_void_p(start + mmap.PAGESIZE)
        no_access = 0
        assert ctypes.CDLL(None).mprotect(forbidden, mmap.PAGESIZE, no_access) == 0
        self._entries = torch.frombuffer(
            self._memory, dtype=torch.int64, count=mmap.PAGESIZE // torch.int64.itemsize
        )

    def vector(self, values: list[int], stride: int) -> torch.Tensor:
        """The values as a view, `stride` apart, up to the edge; poison before and between."""
        self._entries.fill_(POISON)
        first = self._entries.numel() - stride * (len(values) - 1) - 1
        view = self._entries[first if values else self._entries.numel() :: stride]
        view.copy_(torch.tensor(values, dtype=torch.int64))
        return view


class GuardedSlots(TritonSlots):
    """The kernels, writing between guards."""

    written = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def _answer(count: int, device: torch.device) -> torch.Tensor:
        GuardedSlots.written = torch.full((2 * GUARD + count,), POISON, dtype=torch.int64)
        return GuardedSlots.written[GUARD : GUARD + count]


def assert_guards_stand() -> None:
    whole = GuardedSlots.written
    assert (whole[:GUARD] == POISON).all()
    assert (whole[whole.numel() - GUARD :] == POISON).all()


class Batches:
    """Random rows: lengths of every kind, pages and last slots that fit them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._edges = {name: Edge() for name in ("prefix", "seq", "last", "pages")}

    def length(self, page_size: int) -> int:
        """Of a row before the batch: nothing, whole pages, or up to the middle of one."""
        pages, kind = self.choose.randint(0, 3) * page_size, self.choose.random()
        if kind < 0.3:
            return 0
        return pages if kind < 0.6 else pages + self.choose.randint(0, page_size - 1)

    def growth(self, page_size: int) -> int:
        kind = self.choose.random()
        if kind < 0.25:
            return 0
        return self.choose.randint(1, page_size if kind < 0.9 else 3 * page_size)

    def vector(self, name: str, values: list[int]) -> torch.Tensor:
        return self._edges[name].vector(values, self.choose.choice((1, 1, 3)))

    def last_slots(self, prefixes: list[int], page_size: int) -> list[int]:
        """A page of its own for each begun row, at the offset of its last token."""
        pages = self.choose.sample(range(1000, 2000), len(prefixes))
        return [
            page * page_size + (prefix - 1) % page_size if prefix else -1
            for page, prefix in zip(pages, prefixes, strict=True)
        ]

    def new_pages(self, count: int) -> torch.Tensor:
        return self.vector("pages", self.choose.sample(range(1, 1000), count))

    def extend(self, page_size: int) -> ExtendBatch:
        rows = range(self.choose.randint(1, 9))
        prefixes = [self.length(page_size) for _ in rows]
        lengths = [prefix + self.growth(page_size) for prefix in prefixes]
        self.note(page_size, prefixes, lengths)
        return ExtendBatch(
            "alloc_extend",
            self.vector("prefix", prefixes),
            torch.tensor(prefixes),
            self.vector("seq", lengths),
            torch.tensor(lengths),
            self.vector("last", self.last_slots(prefixes, page_size)),
            sum(lengths) - sum(prefixes),
        )

    def decode(self, page_size: int) -> DecodeBatch:
        prefixes = [self.length(page_size) for _ in range(self.choose.randint(1, 9))]
        lengths = [prefix + 1 for prefix in prefixes]
        self.note(page_size, prefixes, lengths)
        return DecodeBatch(
            "alloc_decode",
            self.vector("seq", lengths),
            torch.tensor(lengths),
            self.vector("last", self.last_slots(prefixes, page_size)),
        )

    def note(self, page_size: int, prefixes: list[int], lengths: list[int]) -> None:
        self.seen["empty prefix"] += 0 in prefixes
        self.seen["prefix within a page"] += any(prefix % page_size for prefix in prefixes)
        self.seen["prefix of whole pages"] += any(
            prefix and prefix % page_size == 0 for prefix in prefixes
        )
        self.seen["row that does not grow"] += any(
            prefix == length for prefix, length in zip(prefixes, lengths, strict=True)
        )


def compare(batches: Batches, kind: str, page_size: int) -> None:
    """One batch by torch and by the kernels, in blocks of a random size."""
    if kind == "extend":
        batch: ExtendBatch | DecodeBatch = batches.extend(page_size)
    else:
        batch = batches.decode(page_size)
    pages = batches.new_pages(batch.num_new_pages(page_size))
    # As built, and now and then in blocks so small that a batch takes several.
    kernels = GuardedSlots()
    if batches.choose.random() < 0.15:
        kernels = GuardedSlots(row_block=4, token_block=max(8, page_size), decode_block=4)
        batches.seen[f"{kind} in small blocks"] += batch.seq_lens_cpu.numel() > 4
    slots = batch.slots(pages, page_size, kernels)
    assert torch.equal(slots, batch.slots(pages, page_size)), (page_size, batch, pages)
    assert_guards_stand()
    batches.seen[kind] += 1
    batches.seen[f"page size {page_size}"] += 1


def mislead(batches: Batches, page_size: int) -> None:
    """Too few pages, and an answer too short for the rows: wrong slots, nothing outside."""
    batch = batches.extend(page_size)
    pages = batches.new_pages(batch.num_new_pages(page_size) // 2)
    kernels = GuardedSlots(row_block=4, token_block=16, decode_block=4)
    given = (batch.prefix_lens, batch.seq_lens, batch.last_loc, pages)
    for num_tokens in (batch.num_tokens, batch.num_tokens // 2, batch.num_tokens + 20):
        slots = kernels.extend_slots(*given, num_tokens=num_tokens, page_size=page_size)
        assert (slots > POISON // 2).all(), "poison was read"
        assert_guards_stand()
    slots = kernels.decode_slots(batch.seq_lens, batch.last_loc, pages[:1], page_size=page_size)
    assert (slots > POISON // 2).all(), "poison was read"
    assert_guards_stand()
    batches.seen["misled"] += 1


def serve(batches: Batches) -> None:
    """Allocators built for Triton (KVCORE_KERNELS) answer as allocators built for torch do."""
    rest = (torch.float16, "cpu", None, False)
    built: list[SWATokenToKVPoolAllocator] = []
    for kernels in ("triton", "torch"):
        os.environ["KVCORE_KERNELS"] = kernels
        built.append(SWATokenToKVPoolAllocator(256, 128, 4, *rest, validate=True))
    empty, length = torch.tensor([0, 0]), torch.tensor([5, 8])
    last = torch.tensor([-1, -1])
    for _ in range(2):
        grown = [a.alloc_extend(empty, empty, length, length, last, 13) for a in built]
        assert grown[0] is not None
        assert grown[1] is not None
        assert torch.equal(grown[0], grown[1])
        ends = grown[0][[4, 12]]
        more = [a.alloc_decode(length + 1, length + 1, ends) for a in built]
        assert more[0] is not None
        assert more[1] is not None
        assert torch.equal(more[0], more[1])
    row, total = torch.tensor([0]), torch.tensor([11])
    tails = [
        a.alloc_extend_swa_tail(row, row, total, total, last[:1], 11, 6, swa_tail_end=10)
        for a in built
    ]
    assert tails[0] is not None
    assert tails[1] is not None
    assert torch.equal(tails[0], tails[1])
    sides = [a.full_to_swa_index_mapping for a in built]
    assert torch.equal(sides[0], sides[1])
    batches.seen["served"] += 1


def main(seed: int, count: int) -> None:
    """Compare `count` batches, half of them extends."""
    torch.set_num_threads(1)
    batches = Batches(seed)
    for number in range(count):
        kind = "decode" if number % 2 else "extend"
        compare(batches, kind, (1, 4, 16, 64)[number // 2 % 4])
    for number in range(16):
        mislead(batches, (1, 4, 16, 64)[number % 4])
    serve(batches)
    print(json.dumps(batches.seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

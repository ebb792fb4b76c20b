"""Holds the Triton kernels against torch and against plain loops under Triton's interpreter; run by
test_kernels in a process of its own, since Triton reads TRITON_INTERPRET when it is imported.

Prints, as JSON, how many cases of each kind were compared; a difference is an AssertionError. What
a kernel reads ends where readable memory ends, so that one entry more kills the process; what it
writes lies between guards, which are looked at.

Left out: that the compiler takes the kernels too (triton_compiler).
"""

import ctypes
import json
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

import torch

from kvcore import SWATokenToKVPoolAllocator
from kvcore.allocator.batch import DecodeBatch, ExtendBatch
from kvcore.kernels.triton_slots import TritonSlots

GUARD = 1100
"""Guard entries on each side of what is written: more than a kernel's block, so a missing mask
shows."""
POISON = -(10**12)
STRIDES = (1, 3)
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


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

    def vector(self, values: Iterable[int], stride: int) -> torch.Tensor:
        """The values as a view, `stride` apart, up to the edge; poison before and between."""
        given = torch.tensor(list(values), dtype=torch.int64)
        self._entries.fill_(POISON)
        end = self._entries.numel()
        view = self._entries[
            end - stride * (given.numel() - 1) - 1 if given.numel() else end :: stride
        ]
        view.copy_(given)
        return view


class Fence:
    """Entries between guards."""

    def __init__(self, values: Iterable[int]) -> None:
        given = torch.tensor(list(values), dtype=torch.int64)
        self._whole = torch.full((2 * GUARD + given.numel(),), POISON, dtype=torch.int64)
        self.entries = self._whole[GUARD : GUARD + given.numel()]
        self.entries.copy_(given)

    def assert_stands(self) -> None:
        assert (self._whole[:GUARD] == POISON).all()
        assert (self._whole[self._whole.numel() - GUARD :] == POISON).all()


class GuardedSlots(TritonSlots):
    """The kernels, answering between guards."""

    fence = Fence(())

    @staticmethod
    def _answer(count: int, device: torch.device) -> torch.Tensor:
        GuardedSlots.fence = Fence([POISON] * count)
        return GuardedSlots.fence.entries


EDGES = {name: Edge() for name in ("prefix", "seq", "last", "pages", "slots", "firsts")}
SEEN: Counter[str] = Counter()


# -- the slots of batches, against torch ----------------------------------------------------------


def rows_of_every_kind(page_size: int) -> list[tuple[int, int]]:
    """Prefix and growth of a row: none, up to a page's end, to both sides of it, whole pages."""
    around = {0, 1, page_size - 1, page_size, page_size + 1}
    return list(product(sorted(around | {2 * page_size}), sorted(around | {3 * page_size})))


def random_rows(choose: random.Random, page_size: int) -> list[tuple[int, int]]:
    return [
        (choose.randint(0, 3 * page_size), choose.randint(0, 2 * page_size))
        for _ in range(choose.randint(1, 9))
    ]


def last_slots(prefixes: list[int], page_size: int) -> list[int]:
    """A page of its own for each begun row, at the offset of its last token."""
    return [
        (1000 + row) * page_size + (prefix - 1) % page_size if prefix else -1
        for row, prefix in enumerate(prefixes)
    ]


def new_pages(count: int, stride: int) -> torch.Tensor:
    return EDGES["pages"].vector((1 + 7 * rank % 1000 for rank in range(count)), stride)


def extend_of(rows: list[tuple[int, int]], page_size: int, stride: int) -> ExtendBatch:
    prefixes, lengths = [row[0] for row in rows], [sum(row) for row in rows]
    return ExtendBatch(
        "alloc_extend",
        EDGES["prefix"].vector(prefixes, stride),
        torch.tensor(prefixes),
        EDGES["seq"].vector(lengths, stride),
        torch.tensor(lengths),
        EDGES["last"].vector(last_slots(prefixes, page_size), stride),
        sum(lengths) - sum(prefixes),
    )


def decode_of(rows: list[tuple[int, int]], page_size: int, stride: int) -> DecodeBatch:
    prefixes = [prefix for prefix, _ in rows]
    lengths = [prefix + 1 for prefix in prefixes]
    return DecodeBatch(
        "alloc_decode",
        EDGES["seq"].vector(lengths, stride),
        torch.tensor(lengths),
        EDGES["last"].vector(last_slots(prefixes, page_size), stride),
    )


def compare_slots(
    batch: ExtendBatch | DecodeBatch, page_size: int, stride: int, kernels: GuardedSlots
) -> None:
    """One batch by torch and by the kernels."""
    pages = new_pages(batch.num_new_pages(page_size), stride)
    slots = batch.slots(pages, page_size, kernels)
    assert torch.equal(slots, batch.slots(pages, page_size)), (page_size, batch, pages)
    GuardedSlots.fence.assert_stands()
    SEEN[f"{batch.operation}, page size {page_size}"] += 1


def check_batches(page_size: int) -> None:
    """Rows of every kind and random ones, in blocks as built and in several small ones."""
    rows = rows_of_every_kind(page_size)
    small = GuardedSlots(row_block=4, token_block=max(8, page_size), decode_block=4)
    for order, stride, kernels in (
        (rows[::2], 1, GuardedSlots()),
        (rows[1::2], 3, GuardedSlots()),
        (rows[1::4], 3, small),
    ):
        compare_slots(extend_of(order, page_size, stride), page_size, stride, kernels)
        compare_slots(decode_of(order, page_size, stride), page_size, stride, kernels)
    choose = random.Random(page_size)
    for number in range(4):
        stride = STRIDES[number % 2]
        some = random_rows(choose, page_size)
        compare_slots(extend_of(some, page_size, stride), page_size, stride, GuardedSlots())
        compare_slots(decode_of(some, page_size, stride), page_size, stride, small)


def mislead(page_size: int) -> None:
    """Too few pages, and an answer too short for the rows: wrong slots, nothing outside."""
    batch = extend_of(rows_of_every_kind(page_size)[1::3], page_size, 3)
    pages = new_pages(batch.num_new_pages(page_size) // 2, 3)
    kernels = GuardedSlots(row_block=4, token_block=max(16, page_size), decode_block=4)
    given = (batch.prefix_lens, batch.seq_lens, batch.last_loc, pages)
    for num_tokens in (batch.num_tokens, batch.num_tokens // 2, batch.num_tokens + 20):
        slots = kernels.extend_slots(*given, num_tokens=num_tokens, page_size=page_size)
        assert (slots > POISON // 2).all(), "poison was read"
        GuardedSlots.fence.assert_stands()
    slots = kernels.decode_slots(batch.seq_lens, batch.last_loc, pages[:1], page_size=page_size)
    assert (slots > POISON // 2).all(), "poison was read"
    GuardedSlots.fence.assert_stands()
    SEEN[f"misled, page size {page_size}"] += 1


# -- pages with peers, against plain loops --------------------------------------------------------

NUM_PAGES = 6
BEHIND = 7
"""What the entries between the mapping's last row and its sentinel hold; they are no page's."""


def mapping_of(page_size: int) -> list[int]:
    """Page by page: no peer, a whole one, one at the page's front, one at its first slot alone."""
    mapping = [0] * page_size
    for page in range(1, NUM_PAGES + 1):
        length = (0, page_size, max(1, page_size // 2), 1)[page % 4]
        first = (100 + page) * page_size
        mapping += [first + offset if offset < length else 0 for offset in range(page_size)]
    return [*mapping, *[BEHIND] * (page_size - 1), -1]


def is_page(page: int, mapping: list[int], page_size: int) -> bool:
    return 0 <= page < (len(mapping) - 1) // page_size


def release_by_hand(
    slots: Iterable[int], mapping: list[int], page_size: int
) -> tuple[list[int], list[int]]:
    """Pages and peers of the slots; clears the pages' rows."""
    pages = [slot // page_size for slot in slots]
    peers = []
    for page in pages:
        peers.append(0)
        if is_page(page, mapping, page_size):
            peers[-1] = mapping[page * page_size]
            for offset in range(page_size):
                mapping[page * page_size + offset] = 0
    return pages, peers


def map_by_hand(
    pages: Iterable[int], peers: Iterable[int], mapping: list[int], page_size: int
) -> None:
    for page, first in zip(pages, peers, strict=False):
        if page != 0 and is_page(page, mapping, page_size):
            for offset in range(page_size):
                mapping[page * page_size + offset] = first + offset


def in_64_bits(slot: int) -> int:
    return (slot - SMALLEST) % 2**64 + SMALLEST


def slots_by_hand(pages: Iterable[int], page_size: int) -> list[int]:
    return [in_64_bits(page * page_size + offset) for page in pages for offset in range(page_size)]


def decode_by_hand(
    lengths: list[int], last: list[int], pages: Iterable[int], page_size: int
) -> list[int]:
    begun = iter(pages)
    return [
        in_64_bits(next(begun, 0) * page_size) if (length - 1) % page_size == 0 else slot + 1
        for length, slot in zip(lengths, last, strict=True)
    ]


def ways(page_size: int) -> tuple[tuple[GuardedSlots, int], ...]:
    """Kernels and a stride: blocks as built, and so small that a call takes several programs, and a
    row several tiles."""
    small = GuardedSlots(decode_block=4, entry_block=max(4, page_size // 2))
    return (GuardedSlots(), 1), (small, 3)


def shuffled(page_size: int) -> list[int]:
    pages = list(range(1, NUM_PAGES + 1))
    random.Random(page_size).shuffle(pages)
    return pages


def strange_pages(page_size: int) -> list[int]:
    """Padding, what lies behind the last row, far out on both sides; pages among them."""
    rows = NUM_PAGES + 1
    return [0, 1, rows, rows + 1, -1, -2, 5, LARGEST, LARGEST // page_size, SMALLEST, rows - 1]


def strange_slots(page_size: int) -> list[int]:
    end = len(mapping_of(page_size))
    near = (0, page_size, -1, -page_size, -page_size - 1, end - 1, end, end - page_size)
    return [*near, LARGEST, SMALLEST, SMALLEST + 1, 5 * page_size]


def slots_to_free(page_size: int) -> Iterator[list[int]]:
    """No page, one, all of them, and strange slots; first, last and middle slots of their pages."""
    offsets = (0, page_size - 1, page_size // 2)
    slots = [
        page * page_size + offsets[number % 3] for number, page in enumerate(shuffled(page_size))
    ]
    yield from ([], slots[:1], slots, strange_slots(page_size))


def check_release(page_size: int) -> None:
    for (kernels, stride), slots in product(ways(page_size), slots_to_free(page_size)):
        given = EDGES["slots"].vector(slots, stride)
        expected = mapping_of(page_size)
        pages, peers = release_by_hand(slots, expected, page_size)
        fences = [Fence(mapping_of(page_size)), *(Fence([POISON] * len(slots)) for _ in range(2))]
        mapping, full_pages, swa_firsts = (fence.entries for fence in fences)
        kernels.release(
            given, mapping, page_size=page_size, full_pages=full_pages, swa_firsts=swa_firsts
        )
        seen = (full_pages.tolist(), swa_firsts.tolist(), mapping.tolist())
        assert seen == (pages, peers, expected), (page_size, slots, seen)
        mapping.copy_(torch.tensor(mapping_of(page_size)))
        swa_firsts.fill_(POISON)
        kernels.release_peers(given, mapping, page_size=page_size, swa_firsts=swa_firsts)
        alone = (swa_firsts.tolist(), mapping.tolist())
        assert alone == (peers, expected), (page_size, slots, alone)
        for fence in fences:
            fence.assert_stands()
        SEEN[f"release, page size {page_size}"] += 1


def check_release_of_one_page_twice(page_size: int) -> None:
    """Broken promises: one of the two gets the peer; what has no place to go stays as it is."""
    for kernels, stride in ways(page_size):
        mapping, full_pages, swa_firsts = (
            Fence(mapping_of(page_size)),
            Fence([0] * 4),
            Fence([0] * 4),
        )
        slots = EDGES["slots"].vector((page * page_size for page in (1, 5, 1, 1, 6)), stride)
        kernels.release(
            slots,
            mapping.entries,
            page_size=page_size,
            full_pages=full_pages.entries,
            swa_firsts=swa_firsts.entries,
        )
        assert full_pages.entries.tolist() == [1, 5, 1, 1]
        assert sorted(swa_firsts.entries.tolist()) == [0, 0, 101 * page_size, 105 * page_size]
        assert mapping.entries[6 * page_size] == 106 * page_size
        for fence in (mapping, full_pages, swa_firsts):
            fence.assert_stands()
        SEEN[f"twice, page size {page_size}"] += 1


def pages_to_lend(page_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """No page, one, all of them, strange ones, and more of one side than of the other."""
    pages, strange = shuffled(page_size), strange_pages(page_size)
    peers = [(200 + page) * page_size for page in range(len(strange))]
    yield from (([], []), (pages[:1], peers[:1]), (pages, peers[:NUM_PAGES]), (strange, peers))
    yield from ((pages, peers[:4]), (pages[:4], peers))


def check_lend(page_size: int) -> None:
    for (kernels, stride), (pages, peers) in product(ways(page_size), pages_to_lend(page_size)):
        given = EDGES["pages"].vector(pages, stride), EDGES["firsts"].vector(peers, stride)
        count = min(len(pages), len(peers))
        expected = mapping_of(page_size)
        map_by_hand(pages, peers, expected, page_size)
        lent, mapped = Fence(mapping_of(page_size)), Fence(mapping_of(page_size))
        slots = kernels.lend(*given, lent.entries, page_size=page_size)
        assert slots.tolist() == slots_by_hand(pages[:count], page_size), (page_size, pages)
        GuardedSlots.fence.assert_stands()
        kernels.map_pages(*given, mapped.entries, page_size=page_size)
        for fence in (lent, mapped):
            assert fence.entries.tolist() == expected, (page_size, pages, peers)
            fence.assert_stands()
        SEEN[f"lend, page size {page_size}"] += 1


def rows_to_decode(page_size: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Lengths, pages and how many peers: rows that all begin a page, that do so in turn, that all
    go on, no rows; as many pages as they begin, strange ones, fewer, more; peers likewise."""
    begins = [1 + page_size * row for row in range(NUM_PAGES)]
    in_turn = [length + row % 2 for row, length in enumerate(begins)]
    pages, strange = shuffled(page_size), strange_pages(page_size)
    begun = NUM_PAGES if page_size == 1 else NUM_PAGES // 2
    yield begins, pages, NUM_PAGES
    yield begins, strange, len(strange)
    yield begins, pages, 2
    yield in_turn, pages[:begun], begun
    yield in_turn, pages[:2], NUM_PAGES
    yield [length + 1 for length in begins], pages if page_size == 1 else [], NUM_PAGES
    yield [], [], 0
    yield [], pages[:3], 3


def check_decode_paired(page_size: int) -> None:
    for (kernels, stride), (lengths, pages, num_peers) in product(
        ways(page_size), rows_to_decode(page_size)
    ):
        last = [5000 + row for row in range(len(lengths))]
        peers = [(200 + page) * page_size for page in range(num_peers)]
        mapping, expected = Fence(mapping_of(page_size)), mapping_of(page_size)
        map_by_hand(pages, peers, expected, page_size)
        slots = kernels.decode_paired(
            EDGES["seq"].vector(lengths, stride),
            EDGES["last"].vector(last, stride),
            EDGES["pages"].vector(pages, stride),
            EDGES["firsts"].vector(peers, stride),
            mapping.entries,
            page_size=page_size,
        )
        placed = decode_by_hand(lengths, last, pages, page_size)
        assert slots.tolist() == placed, (page_size, lengths, pages)
        assert mapping.entries.tolist() == expected, (page_size, lengths, pages)
        for fence in (mapping, GuardedSlots.fence):
            fence.assert_stands()
        SEEN[f"decode paired, page size {page_size}"] += 1


# -- in an allocator ------------------------------------------------------------------------------


def serve() -> None:
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
    SEEN["served"] += 1


def main() -> None:
    torch.set_num_threads(1)
    for page_size in (1, 3, 16, 64):
        check_batches(page_size)
    for page_size in (1, 16):
        mislead(page_size)
    for page_size in (1, 2, 3, 16, 64, 256):
        check_release(page_size)
        check_release_of_one_page_twice(page_size)
        check_lend(page_size)
        check_decode_paired(page_size)
    serve()
    print(json.dumps(SEEN))


if __name__ == "__main__":
    main()

"""Does a retracted request come back bit for bit? One line a kind of pool and storage: what
`Retraction` brings back at each page size, of whole rows and of rows whose window has moved, after
others took the old slots and overwrote them, into slots scattered over the pool.

`python benchmarks/retraction_table.py [DEVICE]` prints the table of docs/retraction.md, and fails
if a cell is not bit-equal. Left out: time; only contents are compared.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from kvcore import (
    BaseTokenToKVPoolAllocator,
    DSALayers,
    DSATokenToKVPool,
    KVPoolSpec,
    MHALayers,
    MHATokenToKVPool,
    MLALayers,
    MLATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    Retraction,
    RetractionBackup,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    build_kv_pool,
)
from kvcore.pools import SlotPool
from kvcore.pools.packing import packed_width

Layers = MHALayers | MLALayers | DSALayers
Pool = SlotPool | SWAKVPool
Parts = dict[str, torch.Tensor]
"""What tokens hold, by name: bytes `[tokens, width]`."""
Slots = dict[str, torch.Tensor]
"""Rows in each sub-pool."""

PAGE_SIZES = (1, 16, 64)
FULL_PAGES, SWA_PAGES = 40, 24
ROW_PAGES, EVICTED_PAGES, CHUNK_PAGES = 6, 3, 2

# Full layers and sliding layers of each kind, of different sizes. One DSA layer of two keeps no
# index keys.
MHA = (MHALayers(2, 8, 4), MHALayers(3, 4))
MLA = (MLALayers(128, 16), MLALayers(64, 8))
DSA = (
    DSALayers(128, 16, 128, skip_topk_layers=(False, True)),
    DSALayers(64, 8, 256, skip_topk_layers=(True, False)),
)
PACKED = (
    DSALayers(256, 16, 128, kv_cache_dim=packed_width(256, 16)),
    DSALayers(128, 8, 128, kv_cache_dim=packed_width(128, 8)),
)


@dataclass(frozen=True)
class Line:
    """A line of the table: the layers, where they stand, and the type that is stored."""

    kind: str
    layers: tuple[Layers, Layers]
    dtype: torch.dtype
    storage: str
    family: str
    """`one`: a pool of one kind; `hybrid`: full and sliding layers; `pure`: sliding layers only."""


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    line: Line
    page_size: int
    window: bool

    def __str__(self) -> str:
        kept = "window" if self.window else "whole row"
        return f"{self.line.kind}, {self.line.storage}, page size {self.page_size}, {kept}"

    @property
    def num_tokens(self) -> int:
        """Whole pages but for half of the last one."""
        return ROW_PAGES * self.page_size - self.page_size // 2

    @property
    def evicted(self) -> int:
        """Tokens whose SWA part was freed; the border lies within a chunk."""
        return EVICTED_PAGES * self.page_size if self.window else 0


def lines() -> Iterator[Line]:
    storages: dict[str, list[tuple[str, tuple[Layers, Layers], torch.dtype]]] = {
        "MHA": [("bf16", MHA, torch.bfloat16), ("fp8", MHA, torch.float8_e4m3fn)],
        "MLA": [("bf16", MLA, torch.bfloat16), ("fp8", MLA, torch.float8_e4m3fn)],
        "DSA": [
            ("bf16", DSA, torch.bfloat16),
            ("fp8", DSA, torch.float8_e4m3fn),
            ("fp8, packed", PACKED, torch.float8_e4m3fn),
        ],
    }
    names = {"one": "{}", "hybrid": "SWA over {}", "pure": "SWA alone over {}"}
    for family, name in names.items():
        for kind, variants in storages.items():
            for storage, layers, dtype in variants:
                yield Line(name.format(kind), layers, dtype, storage, family)


def cases() -> list[Case]:
    """Every cell. Where nothing slides, there is no window."""
    every = (Case(*cell) for cell in product(lines(), PAGE_SIZES, (False, True)))
    return [case for case in every if case.line.family != "one" or not case.window]


# -- pools, and what tokens hold in them ---------------------------------------------------------


def build(case: Case, device: str) -> tuple[BaseTokenToKVPoolAllocator, Pool]:
    """An allocator that reads values, and its pool."""
    line, page_size = case.line, case.page_size
    size, size_swa = FULL_PAGES * page_size, SWA_PAGES * page_size
    full, sliding = line.layers
    shared: dict[str, Any] = {"page_size": page_size, "dtype": line.dtype, "device": device}
    options = {"kvcache": None, "need_sort": False, "validate": True, **shared}
    if line.family == "one":
        one = KVPoolSpec(full_layers=full, full_layer_ids=[0, 1], size=size, **shared)
        options["kvcache"] = build_kv_pool(one)
        if page_size > 1:
            return PagedTokenToKVPoolAllocator(size, **options), options["kvcache"]
        del options["page_size"]
        return TokenToKVPoolAllocator(size, **options), options["kvcache"]
    spec = KVPoolSpec(
        # A pool without full layers still has a kind for them.
        full_layers=full if line.family == "hybrid" else MHALayers(1, 1),
        full_layer_ids=[0, 2] if line.family == "hybrid" else [],
        size=size,
        swa_layers=sliding,
        swa_layer_ids=[1, 3],
        size_swa=size_swa,
        **shared,
    )
    options["kvcache"] = build_kv_pool(spec)
    if line.family == "pure":
        return PureSWATokenToKVPoolAllocator(size_swa, **options), options["kvcache"]
    return SWATokenToKVPoolAllocator(size, size_swa, **options), options["kvcache"]


def sides_of(pool: Pool) -> dict[str, SlotPool]:
    if isinstance(pool, SWAKVPool):
        return {"full ": pool.full_kv_pool, "SWA ": pool.swa_kv_pool}
    return {"": pool}


def buffers_of(pool: SlotPool) -> dict[str, list[torch.Tensor]]:
    """Every buffer by its public name, not by what a host copy says that there is."""
    if isinstance(pool, MHATokenToKVPool):
        return {"K": pool.k_buffer, "V": pool.v_buffer}
    assert isinstance(pool, MLATokenToKVPool)
    buffers = {"latent": pool.kv_buffer}
    if isinstance(pool, DSATokenToKVPool):
        buffers["index"] = pool.index_k_with_scale_buffer
    return buffers


def rows_of(pool: SlotPool, slots: torch.Tensor) -> Parts:
    """The bytes of `slots` in every buffer."""
    parts: Parts = {}
    for name, buffers in buffers_of(pool).items():
        for layer, buffer in enumerate(buffers):
            if name == "index" and isinstance(pool, DSATokenToKVPool):
                parts |= index_of(pool, layer, buffer, slots)
            else:
                rows = buffer[slots].reshape(len(slots), -1)
                parts[f"{name} {layer}"] = rows.contiguous().view(torch.uint8)
    return parts


def index_of(
    pool: DSATokenToKVPool, layer: int, buffer: torch.Tensor, slots: torch.Tensor
) -> Parts:
    """Index keys and scales: in a page row all keys come first, then all scales."""
    if not len(buffer):
        return {}
    key, scale = pool.index_head_dim, pool.index_head_dim // 128 * 4
    page, token = slots[:, None] // pool.page_size, slots[:, None] % pool.page_size
    columns = torch.arange(key, device=slots.device)
    keys, scales = token * key + columns, token * scale + columns[:scale]
    return {
        f"index K {layer}": buffer[page, keys],
        f"scales {layer}": buffer[page, pool.page_size * key + scales],
    }


def overwrite(pool: Pool) -> None:
    """Random bytes everywhere: every bit pattern, also those that are no number."""
    for side in sides_of(pool).values():
        for buffers in buffers_of(side).values():
            for buffer in buffers:
                as_bytes = buffer.view(torch.uint8)
                as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, dtype=torch.uint8))


# -- a request is retracted and restored ---------------------------------------------------------


@dataclass
class Request:
    kv_len: int
    swa_evicted_seqlen: int = 0
    req_pool_idx: int | None = None
    retraction: RetractionBackup[Any] | None = None


@dataclass
class Result:
    """What a cell showed."""

    tokens: list[int]
    """Tokens compared, in each sub-pool."""
    parts: list[str]
    """What was compared of them, layer by layer."""
    broken: list[str] = field(default_factory=list)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.broken.append(problem)

    def __str__(self) -> str:
        if self.broken:
            return "BROKEN: " + "; ".join(self.broken)
        return f"equal ({' + '.join(map(str, self.tokens))})"


class Trial:
    """One cell: an allocator, its pool, and others that lend what is free."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self._random = random.Random(0)
        self.case = case
        self.device = device
        self.allocator, self.pool = build(case, device)
        self.sides = {name: side for name, side in sides_of(self.pool).items() if side.layer_num}
        self.rows = ReqToTokenPool(2, ROW_PAGES * case.page_size, device, False)
        self.retraction = Retraction(
            self.allocator, self.rows, chunk_tokens=CHUNK_PAGES * case.page_size
        )

    def run(self) -> Result:
        """Retract a request, let others overwrite its slots, restore it, compare."""
        others, bare = self.take_everything()
        self.free_some(others, ROW_PAGES + 4)
        request = self.start()
        overwrite(self.pool)
        held, expected = self.retract(request)
        result = Result(
            [len(held[name]) for name in self.sides],
            [name + part for name in expected for part in expected[name]],
        )
        self.take_everything()
        result.require(not any(self.room()), "slots that were not returned")
        overwrite(self.pool)

        # What is free now are others' slots; for a window, SWA slots for the window only.
        lost = EVICTED_PAGES if self.case.window else 0
        self.free_some(others, ROW_PAGES - lost)
        self.free_some(bare, lost)
        before = self.everything()
        result.require(self.retraction.restore(request), "no room")
        if result.broken:
            return result
        found = self.held(request)
        self.compare(result, held, found, expected)
        after = self.everything()
        for name, slots in found.items():
            for part, rows in before[name].items():
                rows[slots] = after[name][part][slots]
                result.require(torch.equal(rows, after[name][part]), f"others' {name}{part}")
        return result

    def compare(
        self, result: Result, held: Slots, found: Slots, expected: dict[str, Parts]
    ) -> None:
        """Require the same bytes in other slots, scattered ones."""
        seen = self.contents(found)
        for name in self.sides:
            old, new = held[name].tolist(), found[name].tolist()
            result.require(len(old) == len(new), f"another number of {name}slots")
            result.require(not set(old) & set(new), f"old {name}slots")
            pages = found[name][:: self.case.page_size] // self.case.page_size
            result.require(bool((pages.diff() != 1).any()), f"{name}slots in one piece")
            for part, rows in expected[name].items():
                result.require(torch.equal(seen[name][part], rows), name + part)

    # What the request does

    def start(self) -> Request:
        """A running request in scattered slots."""
        request = Request(self.case.num_tokens)
        rows, slots = self.rows.alloc([request]), self.extend(request.kv_len)
        assert rows is not None
        assert slots is not None
        self.rows.write((rows[0], slice(0, request.kv_len)), slots)
        return request

    def retract(self, request: Request) -> tuple[Slots, dict[str, Parts]]:
        """Retract it; the slots that it held, and what was in them.

        A window moves twice: before, and in the free group in which the request is retracted, when
        peers of what has left it are still there to be copied.
        """
        for num_tokens in (self.case.evicted - self.case.page_size, self.case.evicted):
            if self.case.window:
                self.slide(request, num_tokens)
            if not self.allocator.free_group_is_open:
                self.allocator.free_group_begin()
        held = self.held(request)
        expected = self.contents(held)
        self.retraction.retract(request)
        self.allocator.free_group_end()
        return held, expected

    def slide(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` leave the window."""
        allocator = self.allocator
        assert isinstance(allocator, SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator)
        assert request.req_pool_idx is not None
        row = self.rows.row(request.req_pool_idx, num_tokens)
        allocator.free_swa(row[request.swa_evicted_seqlen :])
        request.swa_evicted_seqlen = num_tokens

    def held(self, request: Request) -> Slots:
        """The rows of its tokens in each sub-pool; in that of sliding layers, of those in the
        window."""
        assert request.req_pool_idx is not None
        row = self.rows.row(request.req_pool_idx, request.kv_len)
        if not isinstance(self.pool, SWAKVPool):
            return {"": row}
        peers = self.pool.translate_loc_from_full_to_swa(row[request.swa_evicted_seqlen :])
        return {name: peers if name == "SWA " else row for name in self.sides}

    # What others do

    def take_everything(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Others lend page by page until nothing is left: with peers, then without."""
        page_size = self.case.page_size
        paired, bare = [], []
        while (page := self.allocator.alloc(page_size)) is not None:
            paired.append(page)
        if isinstance(self.allocator, SWATokenToKVPoolAllocator):
            while (page := self.extend(page_size, swa_tail_len=0)) is not None:
                bare.append(page)
        self._random.shuffle(paired)
        self._random.shuffle(bare)
        return paired, bare

    def free_some(self, pages: list[torch.Tensor], count: int) -> None:
        """Others return `count` of their pages, as far as they have any."""
        for _ in range(min(count, len(pages))):
            self.allocator.free(pages.pop())

    def extend(self, num_tokens: int, swa_tail_len: int | None = None) -> torch.Tensor | None:
        """Slots of a new row; with a tail, SWA slots for that only."""
        none, length = torch.tensor([0]), torch.tensor([num_tokens])
        lengths = none.to(self.device), none, length.to(self.device), length
        batch = (*lengths, torch.tensor([-1], device=self.device), num_tokens)
        if swa_tail_len is None:
            return self.allocator.alloc_extend(*batch)
        assert isinstance(self.allocator, SWATokenToKVPoolAllocator)
        return self.allocator.alloc_extend_swa_tail(*batch, swa_tail_len)

    def room(self) -> list[int]:
        if isinstance(self.allocator, SWATokenToKVPoolAllocator):
            return [self.allocator.full_available_size(), self.allocator.swa_available_size()]
        return [self.allocator.available_size()]

    # What is in the pool

    def contents(self, slots: Slots) -> dict[str, Parts]:
        """What the rows of each sub-pool hold."""
        return {name: rows_of(side, slots[name]) for name, side in self.sides.items()}

    def everything(self) -> dict[str, Parts]:
        """What all rows hold, the padding page included."""
        return self.contents(
            {name: torch.arange(side.rows, device=self.device) for name, side in self.sides.items()}
        )


# -- the table -----------------------------------------------------------------------------------


def compared(result: Result) -> str:
    """What was compared, without the numbers of layers."""
    names = (part.rsplit(" ", 1)[0].removeprefix("full ") for part in result.parts)
    return ", ".join(dict.fromkeys(names))


def table(device: str = "cpu") -> str:
    """Markdown, a line for each pool."""
    columns = list(product((False, True), PAGE_SIZES))
    titles = [
        f"{'window' if window else 'whole row'}, page size {size}" for window, size in columns
    ]
    text = [
        " | ".join(["| pool", "storage", "compared", *titles]) + " |",
        "|" + " --- |" * (3 + len(titles)),
    ]
    results = {case: Trial(case, device).run() for case in cases()}
    for line in lines():
        cells = [results.get(Case(line, size, window), "-") for window, size in columns]
        parts = compared(results[Case(line, 1, False)])
        text.append(" | ".join([f"| {line.kind}", line.storage, parts, *map(str, cells)]) + " |")
    return "\n".join(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    printed = table(*sys.argv[1:])
    print(printed)
    sys.exit("BROKEN" in printed)

"""Kernels and waits of every hot path without value checks, counted on a device without values.

A hot path is what an engine does in each step of serving. Beside them stand questions that make due
what a free has put off, and may wait. Leaves out HiSparse, whose device slots are another matter,
and the Triton kernels, which do more a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvcore import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcore.benchmarks.contest import Call
from kvcore.benchmarks.counter import DEVICE, Count, count
from kvcore.benchmarks.engines import OURS, Engine, Slots, our_engine
from kvcore.benchmarks.groups import OWNED
from kvcore.benchmarks.operations import DECODED_ROWS, POOLS, SLOTS
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Grid, Metric, Section, as_key

GROUPS = ((1, 1), (8, 1), (8, 16), (64, 1))
"""Groups that are counted: calls, and pages a call, or at page size 1 so many times 16 slots."""

Path = Callable[[Engine], Call]
"""Makes the state that a call needs, and returns the call."""


def _row(engine: Engine) -> Slots:
    return engine.alloc(SLOTS[engine.page_size])()


def alloc(engine: Engine) -> Call:
    """A new row."""
    return engine.alloc(SLOTS[engine.page_size])


def alloc_pages(engine: Engine) -> Call:
    """A page that belongs to no row yet."""
    return partial(engine.alloc_pages, engine.page_size)


def alloc_after_free_swa(engine: Engine) -> Call:
    """A new row, while peers that were freed are yet to be counted and there are enough others."""
    engine.free_swa(_row(engine))
    return engine.alloc(SLOTS[engine.page_size])


def free(engine: Engine) -> Call:
    """A row, peers and all."""
    return partial(engine.free, _row(engine))


def free_tombstone(engine: Engine) -> Call:
    """A row whose peers are gone."""
    row = _row(engine)
    engine.free_swa(row)
    return partial(engine.free, row)


def free_swa(engine: Engine) -> Call:
    """The peers of a row."""
    return partial(engine.free_swa, _row(engine))


def free_full(engine: Engine) -> Call:
    """The full side of a row whose peers are gone."""
    row = _row(engine)
    engine.free_swa(row)
    return partial(engine.free_full, row)


def recover(engine: Engine) -> Call:
    """Peers move to a tombstone."""
    kept = _row(engine)
    engine.free_swa(kept)
    return partial(engine.recover, kept, _row(engine))


def load_back(engine: Engine) -> Call:
    """A full and an SWA row are lent each for itself and paired."""
    full, swa = engine.allocator.full_attn_allocator, engine.allocator.swa_attn_allocator

    def call() -> None:
        slots = SLOTS[engine.page_size]
        engine.allocator.set_full_to_swa_mapping(full.alloc(slots), swa.alloc(slots))

    return call


def decode(engine: Engine) -> Call:
    """A token for each of a few rows within their last page."""
    length = engine.page_size // 2
    rows = [_row(engine) for _ in range(DECODED_ROWS)]
    return engine.decode(length, torch.stack([row[length - 1] for row in rows]))


def decode_new_page(engine: Engine) -> Call:
    """A token for each of a few rows, each in a new page."""
    rows = [_row(engine) for _ in range(DECODED_ROWS)]
    return engine.decode(engine.page_size, torch.stack([row[-1] for row in rows]))


def group(engine: Engine, *, calls: int, pages: int) -> Call:
    """Begin, frees, end."""
    rows = [engine.alloc(SLOTS[engine.page_size] * pages)() for _ in range(calls)]

    def call() -> None:
        engine.begin()
        for row in rows:
            engine.free(row)
        engine.end()

    return call


def group_recovery(engine: Engine) -> Call:
    """A group of two frees with a recovery between them."""
    kept = _row(engine)
    engine.free_swa(kept)
    first, second, incoming = _row(engine), _row(engine), _row(engine)

    def call() -> None:
        engine.begin()
        engine.free(first)
        engine.recover(kept, incoming)
        engine.free(second)
        engine.end()

    return call


def free_set(engine: Engine) -> Call:
    """Slots of which nobody says that they are a row's; one of each page."""
    return partial(engine.free_set, _row(engine)[:: engine.page_size])


def ask_after_free_swa(engine: Engine) -> Call:
    """How much room there is, after peers were freed."""
    engine.free_swa(_row(engine))
    available: Call = engine.allocator.available_size
    return available


def ask_after_tombstone(engine: Engine) -> Call:
    """How much room there is, after a free that may or may not have brought peers back."""
    free_tombstone(engine)()
    available: Call = engine.allocator.available_size
    return available


@dataclass(frozen=True, slots=True)
class HotPath:
    """A path at one page size; ``ours``: releases have no such call."""

    page_size: int
    name: str
    label: str
    path: Path
    ours: bool = False


def hot_paths() -> Iterator[HotPath]:
    """Every hot path of the hybrid allocator outside groups."""
    for page_size, extent in ((1, "16"), (256, "1")):
        what = "16 slots" if page_size == 1 else "a page"
        for name, label, path in (
            ("alloc", f"alloc of {what}", alloc if page_size == 1 else alloc_pages),
            ("alloc_after_free_swa", f"alloc of {what} after free_swa", alloc_after_free_swa),
            ("free", f"free of {what}", free),
            ("free_tombstone", f"free of {what} without peers", free_tombstone),
            ("free_swa", f"free_swa of {what}", free_swa),
            ("free_full", f"free_full of {what}", free_full),
            ("recover", f"recovery of {what}", recover),
            ("load_back", f"load-back of {what}", load_back),
        ):
            ours = path in (free_tombstone, load_back)
            yield HotPath(page_size, f"{name}_{extent}", label, path, ours)
    yield HotPath(256, "extend_1", "alloc_extend by a page", alloc)
    yield HotPath(256, "decode", f"alloc_decode of {DECODED_ROWS} rows, no new page", decode)
    yield HotPath(256, "decode_new", f"alloc_decode of {DECODED_ROWS}, new pages", decode_new_page)
    yield HotPath(256, "free_set", "free of any slots of a page", free_set)
    for page_size in (1, 256):
        yield HotPath(page_size, "group_recovery", "group of 2 with a recovery", group_recovery)


def elsewhere() -> Iterator[HotPath]:
    """Questions that make due what a free has put off."""
    for page_size in (1, 256):
        for name, label, path in (
            ("ask_after_free_swa", "available_size after free_swa", ask_after_free_swa),
            (
                "ask_after_tombstone",
                "available_size after a free without peers",
                ask_after_tombstone,
            ),
        ):
            yield HotPath(page_size, name, label, path, ours=path is ask_after_tombstone)


def count_path(engine: Engine, path: Path) -> Count:
    """What a path asks of the device; the engine is new. Where the state cannot be made without
    waiting, that is what is counted: what follows would rest on made-up shapes."""
    made: list[Call] = []
    state = count(lambda: made.append(path(engine)))
    return replace(state, complete=False) if state.waits else count(made[0])


def _metrics(key: str, row: str, name: str, counted: Count) -> Iterator[Metric]:
    """Kernels, if all of them could be counted, and waits."""
    place = as_key(name)
    if counted.complete:
        yield Metric(f"counts.kernels.{key}.{place}", row, name, counted.kernels, "kernels")
    waits = counted.synchronisations
    yield Metric(f"counts.waits.{key}.{place}", row, name, waits, "waits")


def _engines(plan: BenchPlan, page_size: int, *, ours: bool) -> list[Engine]:
    size = POOLS[page_size]
    engines = [our_engine(page_size, size, device=DEVICE)]
    if not ours:
        engines += [rival.engine(page_size, size, DEVICE) for rival in plan.rivals]
    return engines


def _paths_grid(title: str, place: str, paths: Iterator[HotPath], plan: BenchPlan) -> Grid:
    metrics: list[Metric] = []
    for one in paths:
        row = f"page size {one.page_size}: {one.label}"
        key = f"{place}page{one.page_size}.{one.name}"
        for engine in _engines(plan, one.page_size, ours=one.ours):
            metrics += _metrics(key, row, engine.name, count_path(engine, one.path))
    return Grid(title, tuple(metrics))


def groups_grid(plan: BenchPlan) -> Grid:
    """Groups, and for safe ones of ours how many kernels there are beyond one a call."""
    metrics: list[Metric] = []
    for page_size in (1, 256):
        for calls, pages in GROUPS:
            path = partial(group, calls=calls, pages=pages)
            row = f"page size {page_size}: group of {calls} x {pages * SLOTS[page_size]} slots"
            key = f"page{page_size}.group_{calls}x{pages}"
            for engine in _engines(plan, page_size, ours=False):
                counted = count_path(engine, path)
                metrics += _metrics(key, row, engine.name, counted)
                if engine.name == OURS and counted.complete:
                    beyond = counted.kernels - calls
                    place = f"counts.beyond_calls.{key}.{OURS}"
                    metrics.append(Metric(place, row, "beyond one a call", beyond, "kernels"))
            owned = our_engine(page_size, POOLS[page_size], device=DEVICE, owned=True)
            metrics += _metrics(f"{key}_owned", row, OWNED, count_path(owned, path))
    return Grid("Groups of frees", tuple(metrics))


def single_pools_grid() -> Grid:
    """Allocators of one pool."""
    metrics: list[Metric] = []
    arguments = (torch.int64, DEVICE, None, False)
    for page_size in (1, 256):
        for name in ("alloc", "free"):
            single = (
                TokenToKVPoolAllocator(POOLS[1], *arguments, validate=False)
                if page_size == 1
                else PagedTokenToKVPoolAllocator(POOLS[256], 256, *arguments, validate=False)
            )
            slots = SLOTS[page_size]
            row = single.alloc(slots)
            if row is None:
                raise RuntimeError("a new pool has no room")
            frees = partial(single.free_segment, row, start_pos=0)
            counted = count(frees if name == "free" else partial(single.alloc, slots))
            what = f"page size {page_size}: {name} of {slots} slots"
            metrics += _metrics(f"single.page{page_size}.{name}", what, "kvcore", counted)
    return Grid("Allocators of one pool", tuple(metrics))


def run(plan: BenchPlan) -> Section:
    """Count every path."""
    section = Section("counts", "Kernels and forced synchronisations (waits) without value checks")
    with torch.inference_mode(False), torch.no_grad():
        hot = _paths_grid("Hot paths", "", hot_paths(), plan)
        may_wait = _paths_grid("Questions that may wait", "elsewhere.", elsewhere(), plan)
        section.grids.extend((hot, groups_grid(plan), single_pools_grid(), may_wait))
    section.notes.append(
        "Counted are dispatched operations that are neither views nor memory without a fill; "
        "a release's page kernel counts as one."
    )
    return section

"""The machines: families of allocators and pools, each with the geometries that it is tried on.

A machine is the same vocabulary, model and laws on pools of one kind. Leaves out the sources that
drive it (`kvcore.strategies.sources`) and which machines a target has (`kvcore.targets.registry`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvcore.models import Geometry

FULL_PAGES = (8, 8, 16, 16, 16, 64)
SMALL_PAGES = (4, 8, 8, 16)
"""For machines whose every step looks at more than free lists."""
COMPRESS = 4
"""Logical tokens for each entry of the compressed HiSparse allocator."""

Draw = Callable[[random.Random, int, bool], Geometry]


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. ``draw`` makes a geometry of a page size, with sorted reuse or not;
    ``page_unit`` is what its page sizes are multiples of; ``share`` how many turns it has in a
    round of a campaign."""

    name: str
    draw: Draw
    share: int = 1
    page_unit: int = 1

    def page_sizes(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the wanted page sizes that the machine has, or the smallest that it has."""
        fitting = tuple(size for size in wanted if size % self.page_unit == 0)
        return fitting or (self.page_unit,)


def _hybrid(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    full = rng.choice(FULL_PAGES)
    # Smaller than, equal to, and larger than the full pool.
    swa = rng.choice((full * 3 // 4, full // 2, full, full + full // 4))
    return Geometry(page_size, full, max(2, swa), sort)


def _single(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    return Geometry(page_size, rng.choice(FULL_PAGES), need_sort=sort)


def _pure(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    return Geometry(page_size, rng.choice(FULL_PAGES), need_sort=sort, pure_swa=True)


def _hisparse(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    device = rng.choice((4, 8, 8, 16))
    ratio = rng.choice((1, 2, 2, 4))
    return Geometry(page_size, device * ratio, need_sort=sort, device_pages=device)


def _compressed(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    hybrid = _hybrid(rng, page_size, sort)
    full = hybrid.full_pages
    device = rng.choice((full // 2, full // 2, full * 3 // 4, full))
    return msgspec.structs.replace(hybrid, device_pages=device, compress=COMPRESS)


def _pools(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    geometry = _small(rng, page_size, sort)
    return msgspec.structs.replace(geometry, attention=rng.choice(("mla", "dsa", "dsa")))


def _small(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    full = rng.choice(SMALL_PAGES)
    swa = rng.choice((0, full // 2, full * 3 // 4, full))
    return Geometry(page_size, full, swa, sort)


def _requests(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    geometry = _small(rng, page_size, sort)
    pure = not geometry.hybrid and rng.random() < 0.5
    return msgspec.structs.replace(geometry, pure_swa=pure, requests=rng.choice((2, 4, 8)))


def _saver(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    if rng.random() < 0.2:
        return msgspec.structs.replace(_hisparse(rng, page_size, sort), saver=True)
    geometry = _small(rng, page_size, sort)
    attention = rng.choice(("mha", "mla", "dsa"))
    return msgspec.structs.replace(geometry, attention=attention, saver=True)


def _composed(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    full = rng.choice(SMALL_PAGES)
    return Geometry(
        page_size,
        full,
        rng.choice((full // 2, full * 3 // 4, full)),
        sort,
        attention=rng.choice(("mha", "mla", "dsa")),
        requests=rng.choice((2, 4, 8)),
        saver=True,
    )


SERVING_PAGES = (8, 12, 12, 16, 16, 24, 32, 64)
"""For whole requests: few, so that caches are evicted and requests retracted."""


def _serving(rng: random.Random, page_size: int, sort: bool) -> Geometry:
    full = rng.choice(SERVING_PAGES)
    swa = rng.choice((full // 2, full * 3 // 4, full, full))
    # Less than a page, whole pages, and what is neither; several windows fit into the pool.
    half = max(1, page_size // 2)
    pages = (page_size, 2 * page_size, 3 * page_size)
    windows = (half, *pages, page_size + 1, page_size + half, 3 * page_size - 1)
    return Geometry(
        page_size,
        full,
        swa,
        sort,
        requests=rng.choice((2, 3, 4, 6)),
        window=rng.choice([window for window in windows if 4 * window <= swa * page_size]),
        context=rng.choice((0, full * page_size)),
    )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("hybrid", _hybrid, share=4),
        Machine("single pool", _single),
        Machine("pure SWA", _pure),
        Machine("HiSparse", _hisparse),
        Machine("compressed HiSparse", _compressed, page_unit=COMPRESS),
        Machine("MLA and DSA pools", _pools),
        Machine("request pool", _requests),
        Machine("memory saver", _saver),
        Machine("composed", _composed),
        Machine("requests", _serving, share=10),
        Machine("wrapper beside inner", _hybrid, page_unit=COMPRESS),
    )
}
"""Every machine by name. "composed" runs allocator, request pool, retraction and memory saver
together, on every kind of attention; "requests" is whole requests with a prefix cache; "wrapper
beside inner" two allocators in lockstep (law L9)."""

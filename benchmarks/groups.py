"""Free groups: begin, n frees, end, timed as one; safe, owned, and of released engines.

With a recovery, a tombstone gets the peers of other slots in the middle of the group: the mapping
write before which the peers of everything freed so far must be known. Leaves out groups without a
free, and slots freed twice in a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcore.benchmarks.contest import Call, Contestant, hold_contest
from kvcore.benchmarks.engines import Engine, Slots, engines_by_numpy, our_engine
from kvcore.benchmarks.operations import POOLS
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Section

OWNED = "kvcore owned"


@dataclass(frozen=True, slots=True)
class Shape:
    """A group: ``calls`` frees of ``pages`` pages each."""

    page_size: int
    calls: int
    pages: int
    recovery: bool = False
    settled: bool = False

    @property
    def name(self) -> str:
        """Its key, and how the tables write it."""
        extra = "_recovery" if self.recovery else "_settled" if self.settled else ""
        return f"{self.calls}x{self.pages}{extra}"

    @property
    def label(self) -> str:
        """Its words."""
        what = "slots" if self.page_size == 1 else "pages"
        extra = ", a recovery" if self.recovery else ", available_size" if self.settled else ""
        return f"page size {self.page_size}: {self.calls} x {self.pages} {what}{extra}"


def shapes() -> Iterator[Shape]:
    """Every group that is timed."""
    plain = (
        *((1, calls, 16) for calls in (1, 8, 64)),
        *((256, calls, pages) for calls, pages in ((1, 1), (8, 1), (8, 16), (64, 1))),
    )
    for page_size, calls, pages in plain:
        yield Shape(page_size, calls, pages)
        yield Shape(page_size, calls, pages, recovery=True)
    yield Shape(1, 64, 16, settled=True)
    yield Shape(256, 64, 1, settled=True)


def contestant(engine: Engine, shape: Shape) -> Contestant:
    """The group on one engine."""
    ask = engine.alloc(shape.pages * engine.page_size)
    lend = engine.alloc(engine.page_size)
    kept: list[Slots] = []

    def plain(freed: list[Slots]) -> None:
        engine.begin()
        for slots in freed:
            engine.free(slots)
        engine.end()
        if shape.settled:
            engine.allocator.available_size()

    def recovering(freed: list[Slots], incoming: Slots) -> None:
        engine.begin()
        half = len(freed) // 2
        for slots in freed[:half]:
            engine.free(slots)
        engine.recover(kept[0], incoming)
        for slots in freed[half:]:
            engine.free(slots)
        engine.end()

    def prepare() -> Call:
        freed = [ask() for _ in range(shape.calls)]
        if not shape.recovery:
            return lambda: plain(freed)
        kept.append(lend())
        engine.free_swa(kept[0])
        incoming = lend()
        return lambda: recovering(freed, incoming)

    def restore(answer: object) -> None:
        if kept:
            engine.free(kept.pop())

    return Contestant(engine.name, prepare, restore)


def run(plan: BenchPlan) -> Section:
    """Time every group."""
    section = Section("groups", "Free groups")
    for shape in shapes():
        size = POOLS[shape.page_size]
        engines = [
            our_engine(shape.page_size, size),
            our_engine(shape.page_size, size, owned=True, name=OWNED),
            *engines_by_numpy(shape.page_size, size),
            *(rival.engine(shape.page_size, size) for rival in plan.rivals),
        ]
        section.contests.append(
            hold_contest(
                f"groups.page{shape.page_size}.{shape.name}",
                shape.label,
                [contestant(engine, shape) for engine in engines],
                plan.sampling,
            )
        )
    return section

"""What recording a live allocator adds to its calls.

Recorded and not recorded, side by side, ours and released engines. Leaves out translating a
recording, which happens after the engine has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvcore.benchmarks import groups
from kvcore.benchmarks.contest import Call, Contestant, hold_contest
from kvcore.benchmarks.engines import OURS, Engine, our_engine
from kvcore.benchmarks.groups import Shape
from kvcore.benchmarks.operations import POOLS, SLOTS, nothing
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Section, as_key
from kvcore.targets import record

FREES = 8

Maker = Callable[..., Engine]


def free_group(engine: Engine) -> Contestant:
    """A group of frees."""
    pages = SLOTS[engine.page_size] // engine.page_size
    return groups.contestant(engine, Shape(engine.page_size, FREES, pages))


def lend_and_free(engine: Engine) -> Contestant:
    """As many allocations, whose answers are recorded too, and the group."""
    ask = engine.alloc(SLOTS[engine.page_size])

    def call() -> None:
        rows = [ask() for _ in range(FREES)]
        engine.begin()
        for row in rows:
            engine.free(row)
        engine.end()

    def prepare() -> Call:
        return call

    return Contestant(engine.name, prepare, nothing)


def _makers(plan: BenchPlan, page_size: int) -> Iterator[tuple[str, Maker]]:
    size = POOLS[page_size]
    yield OURS, partial(our_engine, page_size, size)
    for rival in plan.rivals:
        yield rival.name, partial(rival.engine, page_size, size)


def run(plan: BenchPlan) -> Section:
    """Time each engine recorded and not recorded."""
    section = Section("recorder", "Recording a live allocator")
    cases = (
        ("group_8", f"a group of {FREES} frees", free_group),
        ("cycle_8", f"{FREES} allocs and a group of {FREES} frees", lend_and_free),
    )
    for page_size in (1, 256):
        for key, label, make in cases:
            for name, maker in _makers(plan, page_size):
                with ExitStack() as recordings:
                    path = plan.scratch / f"{as_key(name)}-{page_size}-{key}.jsonl"

                    def recorded(
                        allocator: Any, path: Any = path, stack: ExitStack = recordings
                    ) -> None:
                        stack.callback(record(allocator, path).detach)

                    plain = make(maker(name=name))
                    other = make(maker(name=f"{name} recorded", ready=recorded))
                    section.contests.append(
                        hold_contest(
                            f"recorder.page{page_size}.{key}.{as_key(name)}",
                            f"page size {page_size}: {label}",
                            [plain, other],
                            plan.sampling,
                        )
                    )
    return section

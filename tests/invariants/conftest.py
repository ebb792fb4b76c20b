"""Shared by the law tests: a real run on the core whose state is spoiled before the laws see it.

A test makes ops that must go right, then spoils what the target shows (a page dropped, an entry
moved, a stamp changed), makes one op more and looks at the violation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from kvcore.invariants import LawBroken, Run, Skipped
from kvcore.models import Geometry, Outcome, Violation, ops
from kvcore.models.ops import Op
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.protocol import Answers, MemoryView, Stream, Target, View
from kvcore.targets.serving_targets import serving_core_target
from kvcore.targets.tree_view import TreeView

torch.set_num_threads(1)

SMALL = Geometry(page_size=4, full_pages=12, swa_pages=9)
LARGE = Geometry(page_size=16, full_pages=200, swa_pages=150)
"""More slots than are checked in plain form."""


@dataclass
class Shown:
    """What a view shows, for changing in place."""

    full_free: list[int]
    swa_free: list[int]
    mapping: list[int]
    stamps: list[list[int]]
    pending: list[list[int]]
    held: dict[int, list[int]]
    answers: Answers
    device_free: list[int]
    device_mapping: list[int]
    request_free: list[int]
    request_rows: list[int]
    memory: MemoryView | None
    streams: tuple[Stream, ...]
    tree: TreeView | None

    @classmethod
    def of(cls, view: View) -> "Shown":
        host = view.host()
        full, swa, mapping = (part.tolist() for part in view.tensors())
        return cls(
            full_free=full,
            swa_free=swa,
            mapping=mapping,
            stamps=[rows.tolist() for rows in view.stamp_tensors()],
            pending=[list(pages) for pages in host.pending],
            held={number: list(slots) for number, slots in host.held.items()},
            answers=view.answers,
            device_free=list(host.device_free),
            device_mapping=list(host.device_mapping),
            request_free=list(host.request_free),
            request_rows=list(host.request_rows),
            memory=host.memory,
            streams=view.streams,
            tree=view.tree,
        )

    def view(self) -> View:
        def ids(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64)

        view = View(
            full_free=ids(self.full_free),
            swa_free=ids(self.swa_free),
            mapping=ids(self.mapping),
            stamps=tuple(ids(rows) for rows in self.stamps),
            pending=tuple(ids(pages) for pages in self.pending),
            held={number: ids(slots) for number, slots in self.held.items()},
            answers=self.answers,
            streams=self.streams,
            device=(ids(self.device_free), ids(self.device_mapping))
            if self.device_mapping
            else None,
            requests=(ids(self.request_free), ids(self.request_rows)),
            memory=self.memory,
        )
        view.tree = self.tree
        return view

    def rows_of(self, stream: str) -> list[int]:
        """The rows of a stream, by its name."""
        return self.stamps[[known.name for known in self.streams].index(stream)]


Spoil = Callable[[Shown], None]


class SpoiledTarget:
    """A target whose views go through ``spoil``, and a record of what it was asked."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.name = inner.name
        self.geometry = inner.geometry
        self.contract = inner.contract
        self.spoil: Spoil | None = None
        self.calls: list[Any] = []
        self.views: list[bool] = []
        self.closed = False

    def apply(self, op: Op) -> Outcome:
        self.calls.append(op)
        return self.inner.apply(op)

    def view(self, *, stamps: bool) -> View:
        self.views.append(stamps)
        view = self.inner.view(stamps=stamps)
        if self.spoil is None:
            return view
        shown = Shown.of(view)
        self.spoil(shown)
        return shown.view()

    def close(self) -> None:
        self.closed = True
        self.inner.close()


class Scene:
    """A run on a target that can be spoiled."""

    def __init__(
        self,
        geometry: Geometry = SMALL,
        parts: CoreParts | None = None,
        contract: dict[str, Any] | None = None,
        **cadence: Any,
    ) -> None:
        make = serving_core_target if geometry.serves else core_target
        self.target = SpoiledTarget(make(geometry, parts=parts))
        changes: dict[str, Any] = contract or {}
        self.target.contract = msgspec.structs.replace(self.target.contract, **changes)
        self.run = Run(self.target, **cadence)
        self.model = self.run.model
        self.size = geometry.page_size

    def do(self, *program: Op) -> Outcome | Skipped | None:
        """Make ops that must be allowed and break nothing; returns the last answer."""
        outcome: Outcome | Skipped | None = None
        for op in program:
            outcome = self.run.step(op)
            assert not isinstance(outcome, Skipped), outcome
        return outcome

    def breaks(self, spoil: Spoil | None, op: Op) -> Violation:
        """The violation that ``op`` meets, its state spoiled."""
        self.target.spoil = spoil
        with pytest.raises(LawBroken) as caught:
            self.run.step(op)
        return caught.value.violation

    def breaks_at_the_end(self, spoil: Spoil | None = None) -> Violation:
        self.target.spoil = spoil
        with pytest.raises(LawBroken) as caught:
            self.run.finish()
        return caught.value.violation

    def full(self, seq: int, page: int = 0) -> int:
        return self.model.rows[seq].pages[page].full

    def swa(self, seq: int, page: int = 0) -> int:
        return self.model.rows[seq].pages[page].swa

    def device(self, seq: int, page: int = 0) -> int:
        return self.model.rows[seq].pages[page].device

    def slots(self, page: int) -> range:
        return range(page * self.size, (page + 1) * self.size)

    def remap(self, shown: Shown, full: int, swa: int) -> None:
        """Map a whole full page to an SWA page, 0 for none."""
        for offset, slot in enumerate(self.slots(full)):
            shown.mapping[slot] = swa * self.size + offset if swa else 0


@pytest.fixture(params=[SMALL, LARGE], ids=["plain", "vectorised"])
def scene(request: pytest.FixtureRequest) -> Scene:
    """Rows 1 (two pages, the second in part), 2 and 3 (one page each), on either form of the laws;
    row 4 is freed, so that free pages are not all at the end."""
    scene = Scene(request.param)
    size = scene.size
    scene.do(ops.Extend(((1, 2 * size - 1),)), ops.Alloc(2, 1), ops.Alloc(4, 1), ops.Alloc(3, 1))
    scene.do(ops.Free(4))
    return scene


@pytest.fixture
def make_scene() -> Callable[..., Scene]:
    """Makes an empty scene: geometry, core parts, changes of the contract, period and every."""
    return Scene


@pytest.fixture
def shown_of() -> Callable[[View], Shown]:
    """Takes what a view shows apart, for changing and putting together again."""
    return Shown.of

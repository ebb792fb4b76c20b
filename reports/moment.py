"""A target's state between two ops, beside what the model knows of it: the ground of every table.

Covers pages of every side, the rows of the request pool and the memory under a saver. Leaves out
how a program gets there (`kvcore.reports.playback`) and how any of it looks.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvcore.invariants import Run
from kvcore.models import Geometry, Model, Outcome
from kvcore.models.ops import DeviceBuffer, Op
from kvcore.models.outcomes import Lent, Served
from kvcore.models.serving import ServingModel
from kvcore.models.state import Row
from kvcore.models.state import Side as ModelSide
from kvcore.targets.protocol import HostView, View
from kvcore.targets.tree_view import TreeView


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a full page: the ``page``-th page of ``sequence``, ``tokens`` of it in use.
    ``device``: the device page that belongs to it, 0 for none. ``noun``: what ``sequence`` is the
    name of; the cache, "tree", has no name, and its pages are counted from the root."""

    sequence: int
    page: int
    tokens: int
    device: int = 0
    noun: Literal["seq", "request", "load", "tree"] = "seq"

    @property
    def words(self) -> str:
        """Owner and page, as they stand in a table."""
        name = "" if self.noun == "tree" else f" {self.sequence}"
        return f"{self.noun}{name} page {self.page}"


@dataclass(frozen=True, slots=True)
class Idle:
    """Pages or rows of one side that nobody uses. ``free``: how often each is in the free
    containers; ``pending``: those that wait in the open group; ``unclaimed``: those of an answer
    that the model rejected."""

    free: Counter[int] = field(default_factory=Counter)
    pending: frozenset[int] = frozenset()
    unclaimed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A live request: whose it is, the slots that its row of the table holds, and those that it
    should hold, in token order."""

    sequence: int
    slots: tuple[int, ...]
    due: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """What lies under one tag of the memory saver, in bytes: all that was allocated for it, how
    much of that the operating system holds resident, and how much the saver says it does.
    ``paused``: whether the program paused the tag. ``regions``: for each piece that the program
    reserved what it must hold and what it holds, None for that of a paused tag. ``moved``: buffers
    of the pool that are not where they were, of ``buffers``."""

    paused: bool
    allocated: int
    resident: int
    said: int
    regions: dict[int, tuple[int, int | None]]
    buffers: int = 0
    moved: int = 0

    @property
    def due(self) -> int:
        """Bytes that must be resident."""
        return 0 if self.paused else self.allocated

    @property
    def miscounted(self) -> bool:
        """Whether the saver says what cannot be: less than is alive, or anything of a paused tag.
        More than is alive it may keep for the next one."""
        return self.said < self.due or (self.paused and self.said > 0)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at one time. ``mapping``, ``device_mapping``: the whole mapping tensors. By full
    page: ``owners``; ``left_by``, the rows whose window moved on from it; ``device_detached``, the
    device page that it gave up in the open group and whose entries it may still show. ``buffers``:
    the device buffer that holds each device page. ``request_rows``: live ones by row. ``memory``:
    by tag, empty without a memory saver. ``tree``: the prefix cache and its requests, where there
    are any."""

    geometry: Geometry
    full: Idle
    swa: Idle
    mapping: list[int]
    owners: dict[int, Owner]
    group_open: bool
    left_by: dict[int, list[Owner]] = field(default_factory=dict)
    device: Idle = field(default_factory=Idle)
    device_mapping: list[int] = field(default_factory=list)
    device_detached: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)
    requests: Idle = field(default_factory=Idle)
    request_rows: dict[int, RequestRow] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    tree: TreeView | None = None


def look(run: Run, view: View, op: Op | None, answer: Outcome | None) -> Moment:
    """The state of ``run`` now, of which ``view`` is the target's side, taken with stamps; ``op``
    is the last one that was applied and ``answer`` what it was answered."""
    host, model = view.host(), run.model
    rejected = answer if run.violation is not None and isinstance(answer, Lent | Served) else None
    lent = _lent(rejected, op, model.geometry)
    owners, left_by = _served(model) if isinstance(model, ServingModel) else _holders(model)
    swa_held = {page.swa for _, page in model.lent_pages()}
    buffers = {page: name for name, pages in model.buffers.items() for page in pages}
    device_held = {page.device for _, page in model.lent_pages()} | buffers.keys()
    rows = {row.request: (seq, row) for seq, row in model.rows.items() if row.request}
    return Moment(
        geometry=model.geometry,
        full=_idle(host.full_free, model.full, lent.full - owners.keys()),
        swa=_idle(host.swa_free, model.swa, lent.swa - swa_held),
        mapping=host.mapping,
        owners=owners,
        group_open=model.group_open,
        left_by=left_by,
        device=_idle(host.device_free, model.device, lent.device - device_held),
        device_mapping=host.device_mapping,
        device_detached=dict(model.device_detached),
        buffers=buffers,
        requests=_idle(host.request_free, model.requests, lent.requests - rows.keys()),
        request_rows={
            row: _request_row(seq, held, row, host, model.geometry)
            for row, (seq, held) in rows.items()
        },
        memory=_memory(model, host),
        tree=view.tree,
    )


@dataclass(frozen=True, slots=True)
class _Answered:
    """Pages and rows of an answer, by side; 0 is none."""

    full: frozenset[int] = frozenset()
    swa: frozenset[int] = frozenset()
    device: frozenset[int] = frozenset()
    requests: frozenset[int] = frozenset()


def _lent(answer: Lent | Served | None, op: Op | None, geometry: Geometry) -> _Answered:
    if answer is None:
        return _Answered()
    if isinstance(answer, Served):
        return _Answered(
            full=_pages(answer.slots, geometry.page_size),
            swa=_pages((*answer.peers, *answer.reloaded), geometry.page_size),
            requests=frozenset((answer.request,)) - {0},
        )
    if isinstance(op, DeviceBuffer):
        return _Answered(device=_pages(answer.slots, geometry.device_page_size))
    return _Answered(
        full=_pages(answer.slots, geometry.page_size),
        swa=_pages(answer.peers, geometry.page_size),
        device=_pages(answer.device, geometry.device_page_size),
        requests=frozenset(answer.requests),
    )


def _pages(slots: Iterable[int], size: int) -> frozenset[int]:
    return frozenset(slot // size for slot in slots if slot)


def _idle(free: list[int], side: ModelSide, unclaimed: frozenset[int]) -> Idle:
    return Idle(Counter(free), frozenset(side.pending), unclaimed)


def _holders(model: Model) -> tuple[dict[int, Owner], dict[int, list[Owner]]]:
    """By full page: who holds it, and whose window moved on from it."""
    owners: dict[int, Owner] = {}
    left_by: dict[int, list[Owner]] = {}
    for seq, row in model.rows.items():
        for number, page in enumerate(row.pages):
            owner = Owner(seq, number, page.tokens, page.device)
            if page.gone:
                left_by.setdefault(page.full, []).append(owner)
            else:
                owners[page.full] = owner
    return owners, left_by


def _served(model: ServingModel) -> tuple[dict[int, Owner], dict[int, list[Owner]]]:
    """The same where pages are requests' own, the cache's, or those of loads in flight."""
    owners: dict[int, Owner] = {}
    for node in model.tree.pages.values():
        page = node.page
        owners[page.full] = Owner(0, node.depth - 1, page.tokens, noun="tree")
    for name, row in model.rows.items():
        for number, page in enumerate(row.pages):
            own = Owner(name, number, page.tokens, noun="request")
            owners.setdefault(page.full, own)
    for name, load in model.loads.items():
        for number, page in enumerate(load.pages, len(load.path)):
            owners[page.full] = Owner(name, number, page.tokens, noun="load")
    return owners, {}


def _request_row(seq: int, row: Row, number: int, host: HostView, geometry: Geometry) -> RequestRow:
    size, width = geometry.page_size, len(host.request_rows) // (geometry.requests + 1)
    due = tuple(page.full * size + i for page in row.pages for i in range(page.tokens))
    start = number * width
    return RequestRow(seq, tuple(host.request_rows[start : start + len(due)]), due)


def _memory(model: Model, host: HostView) -> dict[str, Memory]:
    view, books = host.memory, model.memory
    if view is None:
        return {}
    found: dict[str, Memory] = {}
    for tag, held in view.held.items():
        names = [name for name, piece in sorted(books.pieces.items()) if piece.memory == tag]
        seen = held.values or (None,) * len(names)
        pool = view.pool if tag == "kv_cache" else ()
        own = sum(books.pieces[name].size for name in names) * mmap.PAGESIZE
        found[tag] = Memory(
            paused=tag in books.paused,
            allocated=own + sum(length for _, length in pool),
            resident=held.resident,
            said=held.said,
            regions={
                name: (books.pieces[name].value, value)
                for name, value in zip(names, seen, strict=False)
            },
            buffers=len(pool),
            moved=len(set(pool) - set(view.pool_before)),
        )
    return found

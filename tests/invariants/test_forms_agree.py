"""The plain and the vectorised form of each law held against each other, on the states of random
programs with random spoiling: the same laws are broken, on the same pages.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvcore.invariants import Run, drive
from kvcore.invariants.check import Check, LawForm
from kvcore.invariants.plain import PLAIN
from kvcore.invariants.run import Applied, Event
from kvcore.invariants.vectorised import VECTORISED
from kvcore.models import Done, Geometry, Refused, ops
from kvcore.strategies.walker import Walker
from kvcore.targets.core import core_target
from kvcore.targets.serving_targets import serving_core_target

Pages = tuple[set[int], set[int]]


def pages_of(form: LawForm, check: Check) -> Pages | None:
    """Full and SWA pages that broken clauses name, None if the law holds."""
    clauses = form(check)
    if not clauses:
        return None
    full = {page for clause in clauses for page in clause.full_pages}
    return full, {page for clause in clauses for page in clause.swa_pages}


class Comparer:
    """Listens to a run, spoils copies of its states, and asks both forms."""

    def __init__(self, run: Run, rng: random.Random, shown_of: Callable[..., Any]) -> None:
        self.run = run
        self.rng = rng
        self.shown_of = shown_of
        self.broken: Counter[str] = Counter()
        self.held: Counter[str] = Counter()

    def compare(self, op: ops.Op, outcome: Any, *, drained: bool) -> None:
        right = self.run.target.view(stamps=self.rng.random() < 0.9)
        shown = self.shown_of(right)
        held = {number: list(slots) for number, slots in shown.held.items()}
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            self.spoil(shown)
        check = Check(
            model=self.run.model,
            op=op,
            outcome=outcome,
            before=None,
            after=shown.view(),
            held=held,
            drained=drained,
        )
        failed = msgspec.structs.replace(check, outcome=Refused(), before=right)
        for law, form in VECTORISED.items():
            case = failed if law == "L5" else check
            plain, vectorised = pages_of(PLAIN[law], case), pages_of(form, case)
            assert plain == vectorised, f"{law} after {op}: {PLAIN[law](case)} {form(case)}"
            (self.held if plain is None else self.broken)[law] += 1

    def spoil(self, shown: Any) -> None:
        rng, geometry = self.rng, self.run.model.geometry
        kinds = [self.spoil_free] * 2 + [self.spoil_stamps]
        kinds += [self.spoil_held] * (shown.held != {})
        kinds += [self.spoil_request_row] * (shown.request_rows != [])
        kinds += [self.spoil_tree] * 2 * geometry.serves
        kinds += [self.spoil_entry, self.spoil_page] * geometry.slides
        kinds += [self.spoil_device_entry] * geometry.sparse
        rng.choice(kinds)(shown)

    def spoil_free(self, shown: Any) -> None:
        geometry = self.run.model.geometry
        sides = [shown.full_free]
        sides += [shown.swa_free] * geometry.hybrid + [shown.device_free] * geometry.sparse
        sides += [shown.request_free] * (geometry.requests > 0)
        free = self.rng.choice(sides)
        kind = self.rng.randrange(3)
        if kind == 0 and free:
            free.pop(self.rng.randrange(len(free)))
        elif kind == 1 and free:
            free.append(self.rng.choice(free))
        else:
            free.append(self.rng.randrange(-2, self.run.model.geometry.full_pages + 4))

    def spoil_entry(self, shown: Any) -> None:
        at = self.rng.randrange(len(shown.mapping))
        most = self.run.model.geometry.swa_size + self.run.model.geometry.page_size
        entry = self.rng.choice((0, self.rng.choice(shown.mapping), self.rng.randrange(-9, most)))
        shown.mapping[at] = entry

    def spoil_device_entry(self, shown: Any) -> None:
        table = shown.device_mapping
        most = self.run.model.geometry.device_size + self.run.model.geometry.device_page_size
        entry = self.rng.choice((0, self.rng.choice(table), self.rng.randrange(-9, most)))
        table[self.rng.randrange(len(table))] = entry

    def spoil_page(self, shown: Any) -> None:
        """One full page shows the entries of another, or none."""
        size, pages = self.run.model.geometry.page_size, self.run.model.geometry.full_pages
        to, source = (self.rng.randrange(pages + 1) * size for _ in range(2))
        entries = shown.mapping[source : source + size] if self.rng.randrange(3) else [0] * size
        shown.mapping[to : to + size] = entries

    def spoil_stamps(self, shown: Any) -> None:
        rows = self.rng.choice(shown.stamps or [[0]])
        rows[self.rng.randrange(len(rows))] = self.rng.randrange(-20, 20)

    def spoil_held(self, shown: Any) -> None:
        """The tensor of an earlier answer changed under its caller."""
        slots = self.rng.choice(list(shown.held.values()))
        if slots:
            slots[self.rng.randrange(len(slots))] += 1

    def spoil_request_row(self, shown: Any) -> None:
        table, model = shown.request_rows, self.run.model
        width = len(table) // (model.geometry.requests + 1)
        starts = [row.request * width for row in model.rows.values()]
        at = self.rng.choice([0, *starts]) + self.rng.randrange(4)
        table[at] = self.rng.choice((0, table[at] + 1))

    def spoil_tree(self, shown: Any) -> None:
        """One thing that the cache shows is another one."""
        rng, tree, size = self.rng, shown.tree, self.run.model.geometry.page_size
        sizes = ("full_evictable", "swa_evictable", "full_protected", "swa_protected")
        if not tree.nodes or rng.randrange(6) == 0:
            field = rng.choice(sizes)
            shown.tree = replace(tree, **{field: getattr(tree, field) + size})
            return
        nodes = list(tree.nodes)
        at = rng.randrange(len(nodes))
        node = nodes[at]
        tokens = node.tokens.copy()
        tokens[rng.randrange(len(tokens))] += 1
        pages = rng.sample(range(1, self.run.model.geometry.full_pages + 1), len(node.pages))
        nodes[at] = rng.choice(
            (
                replace(node, full_locks=rng.randrange(3)),
                replace(node, swa_locks=rng.randrange(3)),
                replace(node, state=rng.choice(("live", "tombstone", "loading"))),
                replace(node, tokens=tokens),
                replace(node, pages=pages),
                replace(node, aligned=False),
                replace(node, parent=rng.randrange(-1, len(nodes))),
                rng.choice(nodes),
            )
        )
        shown.tree = replace(tree, nodes=tuple(nodes[: rng.choice((len(nodes), at + 1))]))


def walk(geometry: Geometry, rng: random.Random, shown_of: Callable[..., Any]) -> Comparer:
    comparers: list[Comparer] = []

    def listen(event: Event) -> None:
        if isinstance(event, Applied):
            comparers[0].compare(event.op, event.outcome, drained=False)

    make = serving_core_target if geometry.serves else core_target
    run = Run(make(geometry), period=8, listeners=[listen])
    comparers.append(Comparer(run, rng, shown_of))
    assert drive(run, Walker(rng, 25)).violation is None
    for _ in range(5):
        comparers[0].compare(ops.GroupEnd(), Done(), drained=False)
        comparers[0].compare(ops.Clear(), Done(), drained=True)
    return comparers[0]


GEOMETRIES = {
    **{f"single-{size}": Geometry(size, 8) for size in (1, 2, 4)},
    **{f"small-swa-{size}": Geometry(size, 8, 6) for size in (1, 2, 4)},
    **{f"large-swa-{size}": Geometry(size, 8, 10) for size in (1, 2, 4)},
    "pure-swa": Geometry(2, 8, pure_swa=True),
    "hisparse": Geometry(2, 8, device_pages=4),
    "compressed-hisparse": Geometry(8, 8, 6, device_pages=6, compress=4),
    "dsa-requests": Geometry(4, 8, 6, attention="dsa", requests=4),
    "mla-saver": Geometry(2, 8, attention="mla", saver=True),
    "prefix-cache": Geometry(2, 12, 9, requests=3, window=3, context=16),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_both_forms_find_the_same_laws_broken_on_the_same_pages(
    name: str, shown_of: Callable[..., Any]
) -> None:
    geometry = GEOMETRIES[name]
    rng = random.Random(name)
    broken: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for _ in range(6):
        comparer = walk(geometry, rng, shown_of)
        broken += comparer.broken
        held += comparer.held

    # The comparison had something to compare on both sides.
    absent = set() if geometry.hybrid or geometry.sparse else {"L3"}
    absent |= set() if geometry.slides or geometry.sparse else {"L4"}
    absent |= set() if geometry.requests else {"rows"}
    absent |= {"L8"} if geometry.serves else {"tree", "locks"}
    assert set(broken) == set(VECTORISED) - absent
    assert set(held) == set(VECTORISED)


def test_every_vectorised_law_has_a_plain_form() -> None:
    assert set(VECTORISED) <= set(PLAIN)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(16, 130, 130),
        Geometry(4, 800, device_pages=400),
        Geometry(16, 100, 100, device_pages=250, compress=4),
    ],
    ids=Geometry.describe,
)
def test_slots_of_all_sides_together_make_a_pool_large(
    geometry: Geometry, make_scene: Callable[..., Any]
) -> None:
    scene = make_scene(geometry)
    violation = scene.breaks(lambda shown: shown.full_free.remove(7), ops.GroupBegin())
    plain = Check(
        model=scene.model,
        op=ops.GroupBegin(),
        outcome=Done(),
        before=None,
        after=scene.target.view(stamps=False),
        held={},
    )
    assert violation.clauses == tuple(VECTORISED["L1"](plain))
    assert violation.clauses != tuple(PLAIN["L1"](plain))

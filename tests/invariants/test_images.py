"""The images that a run keeps along, held against the laws in plain form: what an image calls
right is right, and what is right it calls so. On the states of random programs, spoiled at random,
and on one state spoiled in every way that there is a name for.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.invariants import LawBroken
from kvcore.invariants.catalogue import PRECEDENCE
from kvcore.invariants.check import Check
from kvcore.invariants.image import SHOWN, Image, ListImage
from kvcore.invariants.plain import PLAIN
from kvcore.invariants.schedule import FULL_EVERY, FULL_EVERY_LARGE
from kvcore.invariants.tensor_image import TensorImage
from kvcore.models import Geometry, Lent, Model, model_of, ops
from kvcore.models.ops import Op
from kvcore.strategies.walker import Walker
from kvcore.targets.core import core_target
from kvcore.targets.serving_targets import serving_core_target

GEOMETRIES = {
    "single": Geometry(2, 8),
    "slots": Geometry(1, 9, 6),
    "pages": Geometry(4, 8, 6),
    "large-swa": Geometry(2, 6, 9),
    "pure-swa": Geometry(2, 8, pure_swa=True),
    "hisparse": Geometry(2, 8, device_pages=4),
    "compressed-hisparse": Geometry(8, 8, 6, device_pages=6, compress=4),
    "requests": Geometry(4, 8, 6, requests=4),
    "prefix-cache": Geometry(2, 12, 9, requests=3, window=3, context=16),
}
IMAGES: dict[str, Callable[[Model], Image]] = {"lists": ListImage, "tensors": TensorImage}


def broken_laws(check: Check) -> set[str]:
    """The laws of an image that are broken, by their plain forms."""
    return {law for law in SHOWN if PLAIN[law](check)}


def spoil(shown: Any, geometry: Geometry, rng: random.Random) -> None:
    """One thing is shown otherwise: an entry of a mapping, or a page of a free container."""
    mappings = [shown.mapping] * geometry.slides + [shown.device_mapping] * geometry.sparse
    containers = [shown.full_free, *[shown.swa_free] * geometry.hybrid]
    containers += [shown.device_free] * geometry.sparse + [shown.request_free] * geometry.serves
    if mappings and rng.randrange(2):
        table = rng.choice(mappings)
        at = rng.randrange(len(table))
        table[at] = rng.choice((0, table[at] + 1, rng.choice(table), rng.choice(range(-2, 30))))
        return
    free = rng.choice(containers)
    kind = rng.randrange(4)
    if kind == 0 and free:
        free.pop(rng.randrange(len(free)))
    elif kind == 1 and len(free) > 1:
        free[0] = free[-1]
    elif kind == 2:
        free.append(rng.randrange(-1, geometry.full_pages + 2))
    else:
        free.reverse()


class Walk:
    """A random program on a right target, whose every state an image is shown."""

    def __init__(
        self, geometry: Geometry, make_image: Callable[[Model], Image], rng: random.Random
    ) -> None:
        make = serving_core_target if geometry.serves else core_target
        self.target = make(geometry)
        self.model = model_of(geometry, self.target.contract)
        self.image = make_image(self.model)
        self.rng = rng
        self.seen: Counter[str] = Counter()

    def steps(self, count: int, shown_of: Callable[..., Any]) -> None:
        walker = Walker(self.rng, count)
        while (op := walker.next_op(self.model)) is not None:
            assert self.model.why_not(op) is None
            outcome = self.target.apply(op)
            self.model.accept(op, outcome)
            right = self.target.view(stamps=False)
            for _ in range(3):
                shown = shown_of(right)
                spoil(shown, self.model.geometry, self.rng)
                self.judge_spoiled(op, outcome, shown.view())
            self.judge_right(Check(self.model, op, outcome, None, right, {}))

    def judge_spoiled(self, op: Op, outcome: Any, view: Any) -> None:
        """A copy of image and model sees it, so that the walk goes on as if nobody had."""
        image, model = copy.deepcopy((self.image, self.model))
        check = Check(model, op, outcome, None, view, {})
        shows, broken = image.shows(check), broken_laws(check)
        assert not (shows and broken), f"{broken} broken after {op}, and the image is shown"
        self.seen["broken" if broken else "still right"] += 1
        self.seen["shown"] += shows

    def judge_right(self, check: Check) -> None:
        shows = self.image.shows(check)
        assert not broken_laws(check)
        self.seen["as the image" if shows else "asked"] += 1
        if not shows:
            self.image.adopt(check)
        assert not self.model.changed


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_an_image_calls_right_is_right_by_the_plain_laws(
    name: str, image: str, shown_of: Callable[..., Any]
) -> None:
    rng = random.Random(f"{name} {image}")
    seen: Counter[str] = Counter()
    for _ in range(2):
        walk = Walk(GEOMETRIES[name], IMAGES[image], rng)
        walk.steps(15, shown_of)
        seen += walk.seen

    assert seen["broken"] > 30
    assert seen["shown"] > 5
    # Laws are asked where an open group leaves the target a choice, and by tensors at first.
    assert seen["as the image"] > 4 * seen["asked"]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_owner_table_says_what_the_rows_say_and_every_change_is_noted(name: str) -> None:
    rng = random.Random(name)
    geometry = GEOMETRIES[name]
    for _ in range(3):
        make = serving_core_target if geometry.serves else core_target
        target = make(geometry)
        model, walker = model_of(geometry, target.contract), Walker(rng, 40)
        before = entries_of(model)
        while (op := walker.next_op(model)) is not None:
            model.changed.clear()
            model.swa.moved.clear()
            free, pending = set(model.swa.free), set(model.swa.pending)
            model.accept(op, target.apply(op))
            now = entries_of(model)

            assert model.owners == {page.full: page for _, page in model.lent_pages()}
            changed = {full for full in before | now if before.get(full) != now.get(full)}
            assert changed <= model.changed, op
            moved = (free ^ model.swa.free) | (pending ^ model.swa.pending)
            assert moved <= model.swa.moved, op
            before = now


def entries_of(model: Model) -> dict[int, Any]:
    """All that decides what a full page's entries may be, by page."""
    found: dict[int, Any] = {
        full: ("gone", model.detached.get(full), model.device_detached.get(full))
        for full in model.detached.keys() | model.device_detached.keys()
    }
    for _, page in model.lent_pages():
        mapped = [stamp != 0 for stamp in page.swa_stamps]
        on_device = [stamp != 0 for stamp in page.device_stamps]
        gone = found.get(page.full)
        found[page.full] = (gone, page.swa, page.device, mapped, on_device, page.tokens)
    return found


def lose(free: str) -> Callable[[Any, Any], None]:
    return lambda scene, shown: getattr(shown, free).pop()


def double(free: str) -> Callable[[Any, Any], None]:
    return lambda scene, shown: getattr(shown, free).append(getattr(shown, free)[0])


def lend(free: str, page: Callable[[Any], int]) -> Callable[[Any, Any], None]:
    return lambda scene, shown: getattr(shown, free).append(page(scene))


def swap(free: str, page: Callable[[Any], int]) -> Callable[[Any, Any], None]:
    def spoiled(scene: Any, shown: Any) -> None:
        getattr(shown, free)[0] = page(scene)

    return spoiled


def point(slot: Callable[[Any], int], entry: Callable[[Any], int]) -> Callable[[Any, Any], None]:
    def spoiled(scene: Any, shown: Any) -> None:
        shown.mapping[slot(scene)] = entry(scene)

    return spoiled


def free_page(scene: Any) -> int:
    """A page that is free on both sides."""
    return int(max(scene.model.full.free & scene.model.swa.free))


def answer(field: str) -> Callable[[Any, Any], None]:
    def spoiled(scene: Any, shown: Any) -> None:
        said = copy.copy(shown.answers)
        setattr(said, field, getattr(said, field) + scene.size)
        shown.answers = said

    return spoiled


def repeat(scene: Any, shown: Any) -> None:
    shown.full_free[0] = shown.full_free[-1]


def scribble(scene: Any, shown: Any) -> None:
    next(slots for slots in shown.held.values() if slots)[0] += 1


SPOILS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "a full page lost": (lose("full_free"), "L1"),
    "an SWA page lost": (lose("swa_free"), "L3"),
    "a full page free twice": (double("full_free"), "L2"),
    "an SWA page free twice": (double("swa_free"), "L3"),
    "the padding page free": (lend("full_free", lambda scene: 0), "L2"),
    "the SWA padding page free": (lend("swa_free", lambda scene: 0), "L3"),
    "a page beyond the pool free": (lend("full_free", lambda scene: 10**6), "L2"),
    "a page below the pool free": (lend("full_free", lambda scene: -3), "L2"),
    "a lent full page free": (lend("full_free", lambda scene: scene.full(1)), "L1"),
    "a lent SWA page free": (lend("swa_free", lambda scene: scene.swa(1)), "L3"),
    "a lent SWA page free for a free one": (swap("swa_free", lambda scene: scene.swa(1)), "L3"),
    "a free full page twice for another": (repeat, "L2"),
    "a waiting full page free": (lend("full_free", lambda scene: scene.waiting), "L1"),
    "a waiting SWA page free": (lend("swa_free", lambda scene: scene.waiting_swa), "L3"),
    "a free slot mapped": (
        point(
            lambda scene: free_page(scene) * scene.size,
            lambda scene: free_page(scene) * scene.size,
        ),
        "L3",
    ),
    "a lent slot unmapped": (
        point(lambda scene: scene.full(2) * scene.size + 1, lambda scene: 0),
        "L4",
    ),
    "a lent slot's peer another slot": (
        point(
            lambda scene: scene.full(2) * scene.size,
            lambda scene: scene.swa(2) * scene.size + 1,
        ),
        "L4",
    ),
    "two owners of an SWA page": (
        point(
            lambda scene: scene.full(3) * scene.size + 1,
            lambda scene: scene.swa(2) * scene.size + 1,
        ),
        "L3",
    ),
    "the padding slot mapped": (
        point(lambda scene: 0, lambda scene: scene.swa(2) * scene.size),
        "L3",
    ),
    "another sentinel": (point(lambda scene: -1, lambda scene: 0), "L4"),
    "a shorter mapping": (lambda scene, shown: shown.mapping.pop(-2), "L4"),
    "more room than there is": (answer("available"), "L7"),
    "more full room than there is": (answer("full_available"), "L7"),
    "more SWA room than there is": (answer("swa_available"), "L7"),
    "an answer that changed": (scribble, "L8"),
}
"""How a state can be spoiled, and the law that it breaks first."""


@pytest.mark.parametrize("what", SPOILS)
@pytest.mark.parametrize("geometry", [Geometry(4, 12, 9), Geometry(16, 200, 150)], ids=["s", "l"])
def test_a_spoiled_state_breaks_the_law_that_the_plain_forms_name(
    geometry: Geometry, what: str, make_scene: Callable[..., Any]
) -> None:
    spoiled, law = SPOILS[what]
    scene = make_scene(geometry, period=1000)
    scene.do(*(ops.Alloc(seq, 1) for seq in (1, 2, 3, 4, 5)), ops.Free(4))
    scene.waiting, scene.waiting_swa = scene.full(5), scene.swa(5)
    scene.do(ops.GroupBegin(), ops.Free(5))
    found: dict[str, Check] = {}

    def shown_spoiled(shown: Any) -> None:
        spoiled(scene, shown)
        held = scene.run._held
        found["check"] = Check(scene.model, op, Lent(()), None, shown.view(), held)

    op = ops.Decode((2,))
    violation = scene.breaks(shown_spoiled, op)

    by_plain = {name for name, form in PLAIN.items() if name != "L5" and form(found["check"])}
    assert violation.law == law == min(by_plain, key=PRECEDENCE.__getitem__)
    assert violation.laws == by_plain


@pytest.mark.parametrize(
    ("geometry", "every"),
    [(Geometry(4, 12, 9), FULL_EVERY), (Geometry(16, 200, 150), FULL_EVERY_LARGE)],
    ids=["lists", "tensors"],
)
def test_what_a_drifted_image_hides_is_found_at_the_next_full_check(
    geometry: Geometry, every: int, make_scene: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(geometry, period=10**6)
    monkeypatch.setattr(scene.run._image, "shows", lambda check: True)
    scene.target.spoil = lambda shown: shown.full_free.pop()

    with pytest.raises(LawBroken) as caught:
        scene.do(*[ops.GroupBegin(), ops.GroupEnd()] * every)

    assert caught.value.violation.op_index == every - 1
    assert "L1" in caught.value.violation.laws

"""Law L5, failure changes nothing: the state before a refusal or an error against the state after.

Tensors are compared where they are, and only what differs comes to the host; of small pools, whose
views are lists already, lists are compared before. Leaves out whether the call should have failed
(`kvcore.models.reference`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from kvcore.invariants.check import Check
from kvcore.invariants.clauses import pages_clause
from kvcore.models import Clause, Geometry
from kvcore.models.outcomes import Raised, Refused
from kvcore.models.violation import some
from kvcore.targets.protocol import Answers, View
from kvcore.targets.tree_view import TreeView

FAILURES = (Refused, Raised)
"""Outcomes after which nothing may have changed."""


def failure_changes_nothing(check: Check) -> list[Clause]:
    """L5: after a refusal or an error the state is as before, up to the order of free pages, and
    of a prefix cache up to where its nodes are split."""
    if not isinstance(check.outcome, FAILURES) or check.before is None:
        return []
    before, after = check.before, check.after
    clauses = [*_free_pages(before, after), *_mappings(check, before, after)]
    if before.answers != after.answers:
        geometry = check.model.geometry
        expected = f"as before, {_room(before.answers, geometry)}"
        clauses.append(Clause("L5", expected, _room(after.answers, geometry)))
    if before.tree is not None and after.tree is not None:
        clauses += _cache(before.tree, after.tree)
    return clauses


def failure_changes_no_list(check: Check) -> list[Clause]:
    """L5 of a small pool: nothing differs at first sight, or the same as for every pool."""
    before = check.before
    if before is None or not isinstance(check.outcome, FAILURES):
        return []
    return [] if _same_lists(before, check.after) else failure_changes_nothing(check)


def _same_lists(before: View, after: View) -> bool:
    """Whether two views without a cache are equal, up to the order of free pages."""
    if before.tree is not None or after.tree is not None or before.answers != after.answers:
        return False
    old, new = before.host(), after.host()
    return (
        old.mapping == new.mapping
        and old.device_mapping == new.device_mapping
        and _same_pages(old.full_free, new.full_free)
        and _same_pages(old.swa_free, new.swa_free)
        and _same_pages(old.device_free, new.device_free)
        and _same_pages(old.request_free, new.request_free)
    )


def _same_pages(old: list[int], new: list[int]) -> bool:
    return old == new or sorted(old) == sorted(new)


def _free_pages(before: View, after: View) -> Iterator[Clause]:
    names = ("full", "swa", "device", "request")
    for name, old, new in zip(names, _containers(before), _containers(after), strict=True):
        if not torch.equal(old, new) and not torch.equal(old.sort().values, new.sort().values):
            was, now = set(old.tolist()), set(new.tolist())
            expected = f"the free {name} pages as before the call: {some(was)}"
            change = {page for page in was ^ now if page > 0}
            yield pages_clause("L5", expected, some(now), name, change)


def _containers(view: View) -> tuple[torch.Tensor, ...]:
    full, swa, _ = view.tensors()
    return full, swa, view.device_tensors()[0], view.request_tensors()[0]


def _mappings(check: Check, before: View, after: View) -> Iterator[Clause]:
    model, geometry = check.model, check.model.geometry
    old, new = before.tensors()[2], after.tensors()[2]
    changed = _changed(old, new, geometry.page_size, model.detached)
    if changed or old.numel() != new.numel():
        pages = {slot // geometry.page_size for slot in changed}
        yield pages_clause("L5", "the mapping as before the call", "it changed", "full", pages)
    old, new = before.device_tensors()[1], after.device_tensors()[1]
    if changed := _changed(old, new, geometry.device_page_size, model.device_detached):
        seen = f"other entries at {some(changed)}"
        yield Clause("L5", "the device mapping as before the call", seen)


def _changed(
    old: torch.Tensor, new: torch.Tensor, size: int, detached: Collection[int]
) -> list[int]:
    """Entries that are others now, but for those of pages given up in the open group, which may
    turn 0 at any time."""
    if torch.equal(old, new):
        return []
    both = min(old.numel(), new.numel())
    at = (old[:both] != new[:both]).nonzero().flatten().tolist()
    return [i for i in at if not (i // size in detached and int(new[i]) == 0)]


def _room(answers: Answers, geometry: Geometry) -> str:
    """What the capacity queries said, and the wrapper's other answers, for a message."""
    return f"{capacities(answers, geometry)}; the wrapper's answers {answers.outer}"


def capacities(answers: Answers, geometry: Geometry) -> str:
    """The room that the capacity queries named."""
    rooms = (answers.available, answers.full_available, answers.swa_available)
    said = f"available, full, SWA slots {rooms}"
    said += f", device slots {answers.device_available}" if geometry.sparse else ""
    return said + (f", requests {answers.requests_available}" if geometry.requests else "")


def _cache(before: TreeView, after: TreeView) -> Iterator[Clause]:
    """A failed call may split nodes, and nothing else: every page is cached as it was."""
    was, now = _cached(before), _cached(after)
    if changed := {page for page in was.keys() | now.keys() if was.get(page) != now.get(page)}:
        first = min(changed)
        expected = f"the cache as before the call: full page {first} {was.get(first, 'not in it')}"
        seen = f"{now.get(first, 'not in it')}"
        yield pages_clause("L5", expected, seen, "full", changed)
    if before.requests != after.requests:
        names = before.requests.keys() | after.requests.keys()
        name = min(n for n in names if before.requests.get(n) != after.requests.get(n))
        expected = f"request {name} as before the call: {before.requests.get(name, 'not running')}"
        yield Clause("L5", expected, str(after.requests.get(name, "not running")))
    if (old := _sizes(before)) != (new := _sizes(after)):
        yield Clause("L5", f"the cache's sizes as before the call: {old}", str(new))


def _cached(tree: TreeView) -> dict[int, str]:
    """State and locks of every cached page, in words."""
    found: dict[int, str] = {}
    for node in tree.nodes:
        words = f"{node.state}, locks {node.full_locks} full and {node.swa_locks} SWA"
        found.update(dict.fromkeys(node.pages, words))
    return found


def _sizes(tree: TreeView) -> str:
    return (
        f"evictable {tree.full_evictable} full and {tree.swa_evictable} SWA tokens, protected "
        f"{tree.full_protected} and {tree.swa_protected}, in all {tree.total}"
    )

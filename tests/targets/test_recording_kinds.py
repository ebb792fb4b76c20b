"""What is told of an allocator by looking at it, before it is recorded."""

from __future__ import annotations

import pytest

from kvcore.targets.recording_kinds import HYBRID, PURE, _defers_free_swa


class Pure:
    """The one queue that every release has."""

    def __init__(self) -> None:
        self.free_group: list[object] = []


class CopyingPure(Pure):
    """The same from 0.5.18 on, whose `free_swa` waits in it."""

    def _copy_for_free_group(self, free_index: object) -> object:
        return free_index


class Hybrid(CopyingPure):
    """A queue of its own for `free_swa`."""

    def __init__(self) -> None:
        super().__init__()
        self.swa_free_group: list[object] = []


@pytest.mark.parametrize(
    ("allocator", "kind", "deferred"),
    [
        (Pure(), PURE, False),
        (CopyingPure(), PURE, True),
        (Pure(), HYBRID, False),
        (CopyingPure(), HYBRID, False),
        (Hybrid(), HYBRID, True),
    ],
)
def test_it_is_told_whether_a_releases_free_swa_waits_for_the_end_of_a_group(
    allocator: Pure, kind: str, deferred: bool
) -> None:
    assert _defers_free_swa(allocator, kind) is deferred

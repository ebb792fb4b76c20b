"""Targets say in one sentence which pools they have, instead of being blamed for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.models import Geometry
from kvcore.models.trace import Trace, encode_trace, new_header
from kvcore.reports.cli import main
from kvcore.strategies.isolation import replay_isolated
from kvcore.targets.core import core_target
from kvcore.targets.protocol import UnsupportedGeometry
from kvcore.targets.registry import open_target
from kvcore.targets.twin import forwarded_target

REFUSED = [
    ("kvcore", Geometry(4, 4, 4, device_pages=2, compress=2)),
    ("kvcore#unchecked", Geometry(8, 4, 4, device_pages=2, compress=8)),
    ("kvcore#wrapped", Geometry(4, 4)),
    ("kvcore#wrapped", Geometry(1, 4, 4)),
    ("kvcore#wrapped", Geometry(4, 4, 4, saver=True)),
    ("fault:hisparse-drops-free-swa", Geometry(1, 4, 4)),
]


@pytest.mark.parametrize(("name", "geometry"), REFUSED, ids=str)
def test_pools_that_a_target_has_not_are_refused(name: str, geometry: Geometry) -> None:
    with pytest.raises(UnsupportedGeometry, match="got "):
        open_target(name)(geometry)


@pytest.mark.parametrize(("name", "geometry"), REFUSED, ids=str)
def test_a_replay_of_such_a_trace_is_bad_input(
    name: str,
    geometry: Geometry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "it.jsonl"
    path.write_bytes(encode_trace(Trace(new_header(name, geometry), ())))
    assert main(["replay", str(path)]) == 2
    assert "harness failed" not in capsys.readouterr().err


def test_a_child_tells_its_parent_that_pools_are_refused() -> None:
    with pytest.raises(UnsupportedGeometry, match="compress 2"):
        replay_isolated("kvcore", Geometry(4, 4, 4, device_pages=2, compress=2), ())


def test_what_is_supported_is_built() -> None:
    core_target(Geometry(4, 4, 4, device_pages=2, compress=4)).close()
    forwarded_target(Geometry(8, 4, 4)).close()

"""What tests of the recorder share: where a recording goes, in each way of writing calls down."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.targets import recording_methods


@pytest.fixture(params=["usual", "python"])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a recording goes, which is made in either way."""
    if request.param == "python":
        monkeypatch.setattr(recording_methods, "COMPILED", None)
    return tmp_path / "live.jsonl"

"""A harness package that cannot be found is explained in one sentence."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore._layout import HARNESS_PACKAGES, MissingHarness, explain, guard

CORE = Path(kvcore.__file__).parent


@pytest.mark.parametrize("fullname", sorted(HARNESS_PACKAGES))
def test_harness_packages_are_found_where_the_project_is_installed(fullname: str) -> None:
    assert importlib.util.find_spec(fullname) is not None


def test_a_bare_checkout_is_told_how_to_install_itself(tmp_path: Path) -> None:
    (tmp_path / "kvcore").mkdir()
    (tmp_path / "models").mkdir()
    sentence = explain("kvcore.models", tmp_path / "kvcore")
    assert f"pip install -e .` in {tmp_path}" in sentence


def test_a_core_without_neighbours_is_told_to_install_the_project(tmp_path: Path) -> None:
    assert "pip install 'kvcore[harness]'" in explain("kvcore.models", tmp_path / "kvcore")


def test_the_last_finder_asked_explains_instead_of_finding() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'kvcore\.models'") as caught:
        MissingHarness().find_spec("kvcore.models")
    assert caught.value.name == "kvcore.models"


def test_other_missing_modules_stay_the_business_of_other_finders() -> None:
    assert MissingHarness().find_spec("kvcore.no_such_module") is None


def test_the_guard_stands_once_and_behind_the_other_finders() -> None:
    guard()
    guard()
    guards = [finder for finder in sys.meta_path if isinstance(finder, MissingHarness)]
    assert len(guards) == 1


def test_importing_the_bare_folder_from_the_root_fails_with_advice(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "kvcore").mkdir()
    for name in ("__init__.py", "_layout.py"):
        text = "from kvcore import _layout\n\n_layout.guard()\n"
        source = text if name == "__init__.py" else (CORE / name).read_text()
        (tmp_path / "kvcore" / name).write_text(source)
    # -S: without site-packages, so without the finder of an editable install.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import kvcore.models"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "run `pip install -e .`" in done.stderr.splitlines()[-1]

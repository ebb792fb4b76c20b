"""The entry of the command line works as a module, and says what is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvcore.reports.__main__ import NEEDED

# In a process of its own: modules that were imported before would hide what is missing.
WITHOUT = """
import sys
from kvcore.reports.__main__ import NEEDED, main

for package in [*sorted(NEEDED), "kvcore.reports.edge"]:
    sys.modules[package] = None  # what the import of a missing package looks like
    try:
        print(package, main())
    except ModuleNotFoundError as error:
        print(package, "raised for", error.name)
    del sys.modules[package]
"""


def python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, capture_output=True, text=True, check=False
    )


def test_a_missing_package_is_one_sentence_and_any_other_missing_module_is_not(
    tmp_path: Path,
) -> None:
    done = python(tmp_path, "-c", WITHOUT)
    assert done.stdout.splitlines() == [
        *(f"{package} 2" for package in sorted(NEEDED)),
        "kvcore.reports.edge raised for kvcore.reports.edge",
    ]
    assert done.stderr.splitlines() == [
        f"kvcore: the command line needs {package}: pip install 'kvcore[harness]'"
        for package in sorted(NEEDED)
    ]


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "kvcore.reports", "replay", "missing")
    assert done.returncode == 2
    assert done.stderr == "kvcore: missing: cannot be read: No such file or directory\n"

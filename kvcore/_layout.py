"""Where the harness packages are: says what to do when `kvcore.models` and its like are missing.

In the repository those folders stand beside `kvcore/`, and only an installation puts them under it.
A repository root first on `sys.path` therefore hides an ordinary installed package behind the bare
folder, and the plain "No module named 'kvcore.models'" would not say why.

Not here: missing third-party packages of the harness extra; the command line reports those.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HARNESS_PACKAGES = {
    "kvcore.models": "models",
    "kvcore.targets": "targets",
    "kvcore.invariants": "invariants",
    "kvcore.strategies": "strategies",
    "kvcore.reports": "reports",
}


class MissingHarness:
    """The last finder asked: explains why a harness package was not found by any other."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find nothing; raise ModuleNotFoundError with advice for a harness package."""
        if fullname not in HARNESS_PACKAGES:
            return None
        raise ModuleNotFoundError(explain(fullname, Path(__file__).parent), name=fullname)


def explain(fullname: str, core: Path) -> str:
    """One sentence: why `fullname` is missing beside the core at folder `core`, and what to do."""
    if (core.parent / HARNESS_PACKAGES[fullname]).is_dir():
        return (
            f"No module named {fullname!r}: the bare folder {core} of the repository was imported "
            f"instead of the installed package; run `pip install -e .` in {core.parent}, or use "
            "the console scripts `kvcore` and `pytest`, or start Python in another directory."
        )
    return (
        f"No module named {fullname!r}: {core} holds the core alone; install the whole project "
        "with `pip install 'kvcore[harness]'`."
    )


def guard() -> None:
    """Put the explaining finder behind all others, once."""
    if not any(isinstance(finder, MissingHarness) for finder in sys.meta_path):
        sys.meta_path.append(MissingHarness())

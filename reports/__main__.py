"""The entry of the command line, also as `python -m kvcore.reports`.

Covers the one thing that the command line itself cannot say: that packages it is built on are not
installed.
"""

from __future__ import annotations

import sys

NEEDED = frozenset(("hypothesis", "msgspec", "rich", "typer"))
"""What the `harness` extra installs."""


def main() -> int:
    """Run the command line; the exit status."""
    try:
        from kvcore.reports.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        sentence = f"the command line needs {package}: pip install 'kvcore[harness]'"
        print(f"kvcore: {sentence}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())

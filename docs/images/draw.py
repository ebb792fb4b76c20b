"""Draws a picture of `kvcore replay`: `python docs/images/draw.py TRACE OUT.svg`.

Runs the command itself and exports what it prints; the picture loads nothing from elsewhere. Leaves
out the text that README.md shows beside it, which is the command's output as it is.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.terminal_theme import MONOKAI

from kvcore.reports import replaying
from kvcore.reports.trace_files import read_trace

WIDTH = 80


def draw(trace: Path) -> str:
    """What `kvcore replay` prints about ``trace``, as SVG."""
    paper = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    with patch.object(replaying, "output", lambda: paper):
        replaying.replay(read_trace(trace), trace, None, None)
    picture = paper.export_svg(
        title=f"kvcore replay {trace.name}", theme=MONOKAI, unique_id="kvcore"
    )
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    # Some viewers drop the blanks at the start of a text otherwise.
    return picture.replace("<svg ", '<svg xml:space="preserve" ', 1)


if __name__ == "__main__":
    trace, out = map(Path, sys.argv[1:])
    out.write_text(draw(trace), encoding="utf-8")

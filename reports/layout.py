"""How every page is laid out: tables, headings, and where they are printed.

Leaves out what stands in them.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Where reports go."""
    return Console(highlight=False)


def messages() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False)


def new_table(*, footer: bool = False, caption: str = "") -> Table:
    """A table with a line under its head and none around it."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_footer=footer,
        caption=Text(caption, style="dim") if caption else None,
        caption_justify="left",
    )


def heading(text: str) -> Text:
    """A line above what belongs to it."""
    return Text(f"\n{text}", style="bold")

"""Pool geometry: how many pages of which size a run works with.

Covers the full pool and, where there is one, the sliding-window (SWA) pool. Leaves out everything
about tensors (dtype, heads, layers): those are the target's business.
"""

from __future__ import annotations

import msgspec

MOST_SLOTS = 2**26
"""More slots than a run on one machine can be meant to have; a typing error in a trace."""


class Geometry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sizes of the pools on trial.

    ``page_size`` is in slots, ``full_pages`` and ``swa_pages`` are in pages and do not count the
    padding page 0. ``swa_pages == 0`` means a single pool without a sliding-window side.
    ``need_sort`` asks for sorted reuse of freed pages.
    """

    page_size: int
    full_pages: int
    swa_pages: int = 0
    need_sort: bool = False

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}, expected at least 1")
        if self.full_pages < 1:
            raise ValueError(f"full_pages is {self.full_pages}, expected at least 1")
        if self.swa_pages < 0:
            raise ValueError(f"swa_pages is {self.swa_pages}, expected 0 or more")
        if (slots := (self.full_pages + self.swa_pages) * self.page_size) > MOST_SLOTS:
            raise ValueError(f"pools of {slots} slots, expected at most {MOST_SLOTS} in all")

    @property
    def hybrid(self) -> bool:
        """Whether there is an SWA pool beside the full one."""
        return self.swa_pages > 0

    @property
    def full_size(self) -> int:
        """Slots of the full pool, the padding page not counted."""
        return self.full_pages * self.page_size

    @property
    def swa_size(self) -> int:
        """Slots of the SWA pool, the padding page not counted."""
        return self.swa_pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` slots."""
        return -(-tokens // self.page_size)

    def describe(self) -> str:
        """One short phrase, for tables and messages."""
        sides = f"{self.full_pages}+{self.swa_pages}" if self.hybrid else f"{self.full_pages}"
        return f"{sides} pages of {self.page_size}{', sorted' if self.need_sort else ''}"

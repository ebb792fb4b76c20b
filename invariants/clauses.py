"""How laws word what they found: clauses about pages of one side.

Leaves out when a clause is broken: that is each law's own business.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.models import Clause, Geometry


def pages_clause(law: str, expected: str, seen: str, side: str, pages: Iterable[int]) -> Clause:
    """A clause about pages of one side, "full", "swa" or one that clauses do not name pages of."""
    ids = tuple(sorted(pages))
    return Clause(
        law,
        expected,
        seen,
        full_pages=ids if side == "full" else (),
        swa_pages=ids if side == "swa" else (),
    )


def holder(geometry: Geometry, owner: int) -> str:
    """Who holds a page, as the model names owners: a sequence; or where whole requests run, a
    request, the cache (0), or a load in flight (below 0)."""
    if not geometry.serves:
        return f"sequence {owner}"
    if owner == 0:
        return "the cache"
    return f"request {owner}" if owner > 0 else f"load {-owner}"

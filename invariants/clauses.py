"""How laws word what they found: clauses about pages of one side.

Leaves out when a clause is broken: that is each law's own business.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.models import Clause, Geometry
from kvcore.models.reference import OUT_OF_BOUNDS
from kvcore.targets.attempt import raised_by


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


def query_clause(error: Exception) -> Clause:
    """A clause about a query, or whatever else a view asks for, that raised."""
    raised = raised_by(error)
    out = OUT_OF_BOUNDS.intersection((raised.kind, *raised.bases))
    law = "bounds" if out else "raises"
    return Clause(
        law, "capacity, free pages and mapping can be asked for", f"{raised.kind}: {raised.message}"
    )


def holder(geometry: Geometry, owner: int) -> str:
    """Who holds a page, as the model names owners: a sequence; or where whole requests run, a
    request, the cache (0), or a load in flight (below 0)."""
    if not geometry.serves:
        return f"sequence {owner}"
    if owner == 0:
        return "the cache"
    return f"request {owner}" if owner > 0 else f"load {-owner}"

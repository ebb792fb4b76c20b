"""A broken law as data: which law, at which op, which pages, what was expected and what was seen.

The laws themselves are in `kvcore.invariants`; this is only the form in which a violation travels
through traces, the shrinker and the reports.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Side = Literal["full", "swa"]


class Clause(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One broken clause of one law. ``full_pages`` and ``swa_pages`` are the pages concerned."""

    law: str
    expected: str
    seen: str
    full_pages: tuple[int, ...] = ()
    swa_pages: tuple[int, ...] = ()


class Violation(
    msgspec.Struct, frozen=True, tag="violation", tag_field="op", forbid_unknown_fields=True
):
    """Every clause that broke at one op. ``op_index`` counts the ops of the program from 0 and
    ``op_kind`` is that op's kind, or "drain" for the check after the last op."""

    law: str
    op_index: Annotated[int, msgspec.Meta(ge=0)]
    op_kind: str
    clauses: tuple[Clause, ...]

    @property
    def signature(self) -> tuple[str, str]:
        """Two violations are the same when these agree."""
        return (self.law, self.op_kind)

    @property
    def laws(self) -> frozenset[str]:
        """Ids of all laws with a broken clause."""
        return frozenset(clause.law for clause in self.clauses)


def some(pages: list[int] | set[int] | frozenset[int] | tuple[int, ...], limit: int = 8) -> str:
    """The first few of ``pages`` in order, and how many there are if more."""
    ordered = sorted(pages)
    shown = ", ".join(str(page) for page in ordered[:limit])
    return f"{shown} … ({len(ordered)} in all)" if len(ordered) > limit else shown or "none"

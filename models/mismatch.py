"""The exception by which the reference model rejects an answer."""

from __future__ import annotations

from kvcore.models.violation import Clause


class Mismatch(Exception):
    """An outcome that the model cannot follow; carries every broken clause."""

    def __init__(self, clauses: list[Clause]) -> None:
        super().__init__(
            "; ".join(f"{c.law}: expected {c.expected}, saw {c.seen}" for c in clauses)
        )
        self.clauses = tuple(clauses)

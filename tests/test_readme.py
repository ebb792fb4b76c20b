"""The README says what the code says."""

from __future__ import annotations

from pathlib import Path

from kvcore.invariants import LAWS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_law_is_in_the_table_with_its_sentence() -> None:
    words = " ".join(README.split())
    for law in LAWS:
        assert " ".join(law.sentence.split()) in words

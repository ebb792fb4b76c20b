"""The laws, the one interpreter that checks them, and what a broken law looks like."""

from kvcore.invariants.catalogue import BY_ID, LAWS, Cost, Law
from kvcore.invariants.run import DRAIN, LawBroken, Run, Skipped, Source, Verdict, drive
from kvcore.invariants.tally import Tally

__all__ = [
    "BY_ID",
    "DRAIN",
    "LAWS",
    "Cost",
    "Law",
    "LawBroken",
    "Run",
    "Skipped",
    "Source",
    "Tally",
    "Verdict",
    "drive",
]

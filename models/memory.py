"""What the reference model remembers of the memory saver: pieces of memory by tag, and pauses.

Leaves out what lies in the memory: the stamps of the rows do that (`kvcore.models.reference`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.models import ops


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of memory of ``size`` operating-system pages under the tag ``memory``. ``value`` is
    what every byte of it holds: 0 once its tag was paused."""

    memory: ops.Memory
    size: int
    value: int


@dataclass(slots=True)
class MemoryBooks:
    """Live pieces by name, names used so far, and the tags that are paused now. ``fresh``: the
    pool's memory has just come back, and nothing was written since."""

    pieces: dict[int, Piece] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    paused: set[ops.Memory] = field(default_factory=set)
    fresh: bool = False

    def reserve(self, op: ops.Reserve) -> None:
        """A new piece, written full of a value of its own."""
        self.used.add(op.region)
        self.pieces[op.region] = Piece(op.memory, op.size, pattern(op.region))

    def drop(self, region: int) -> None:
        """The piece is no longer there."""
        del self.pieces[region]

    def pause(self, memory: ops.Memory) -> bool:
        """Pause a tag; whether it was not paused before. What lay in it is lost."""
        if memory in self.paused:
            return False
        self.paused.add(memory)
        for name, piece in self.pieces.items():
            if piece.memory == memory:
                self.pieces[name] = Piece(memory, piece.size, 0)
        return True

    def resume(self, memory: ops.Memory) -> None:
        """The tag's memory is back; a tag that is not paused stays as it is."""
        self.fresh = memory == "kv_cache" and memory in self.paused
        self.paused.discard(memory)

    def size(self, memory: ops.Memory) -> int:
        """Operating-system pages of all pieces of a tag."""
        return sum(piece.size for piece in self.pieces.values() if piece.memory == memory)


def pattern(region: int) -> int:
    """What a caller writes into every byte of a new piece: never 0."""
    return 1 + region % 251

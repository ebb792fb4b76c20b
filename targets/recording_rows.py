"""Which row holds which page, while a recording is translated: the model, and who owns what in it.

The reference model follows every op with the answer that was recorded, so that an op which is not
legal, or an answer which no right allocator gives, ends the translation there. Leaves out which
call becomes which op (`kvcore.targets.recording_calls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.models import Contract, Done, Geometry, Lent, Mismatch, Model, Outcome, ops
from kvcore.models.ops import Op
from kvcore.models.state import Page
from kvcore.models.violation import some

LENDING = (ops.Alloc, ops.Extend, ops.Decode, ops.SwaTail, ops.LoadBack)


class Stop(Exception):
    """The translation ends: what came up and why, in words. ``keep``: how many ops stay, all if
    None."""

    def __init__(self, why: str, keep: int | None = None) -> None:
        super().__init__(why)
        self.keep = keep


class SameRow(Stop):
    """Two pages of one row should be in two. ``page``: where the second one would begin."""

    def __init__(self, page: int) -> None:
        super().__init__("peers move within one row")
        self.page = page


@dataclass(frozen=True, slots=True)
class Run:
    """Pages ``[start, stop)`` of a row; ``whole_end``: up to its end."""

    seq: int
    start: int
    stop: int
    pages: tuple[int, ...]
    whole_end: bool

    @property
    def end(self) -> int | None:
        """``stop`` as ops have it."""
        return None if self.whole_end else self.stop


class Rows:
    """The rows as they are after the ops so far."""

    def __init__(self, geometry: Geometry, contract: Contract) -> None:
        self.geometry = geometry
        self.model = Model(geometry, contract)
        self.ops: list[Op] = []
        self._holder: dict[int, int] = {}
        self._mates: dict[int, Page] = {}
        self._leaving: list[int] = []
        self._freed_in_group: set[int] = set()
        self._names = 0

    def new_name(self) -> int:
        """A name that was not used before."""
        self._names += 1
        return self._names

    def do(self, op: Op, outcome: Outcome) -> None:
        """Append an op and follow its answer; raises `Stop`."""
        self.require_legal(op)
        self.ops.append(op)
        try:
            self.model.accept(op, outcome)
        except Mismatch as mismatch:
            clause = mismatch.clauses[0]
            raise Stop(
                f"the answer breaks law {clause.law}: expected {clause.expected}; saw {clause.seen}"
            ) from None
        if isinstance(op, LENDING) and isinstance(outcome, Lent):
            self._note_lent(op)
        if isinstance(op, ops.GroupBegin | ops.GroupEnd):
            self._freed_in_group = set()
            for page in self._leaving:
                self._holder.pop(page, None)
            self._leaving = []

    def require_legal(self, op: Op) -> None:
        """Raise `Stop` if the rules of the model do not allow ``op`` now."""
        why = self.model.why_not(op)
        if why is not None:
            raise Stop(f"{op.kind} would be no legal op here: {why}")

    def free(self, op: ops.PagesOp, run: Run) -> None:
        """A free of a run: who held its pages does not any more, but for a `FreeSwa`."""
        self.do(op, Done())
        if not isinstance(op, ops.FreeSwa):
            self._drop(run.pages)
        elif self.geometry.pure_swa and self.model.group_open:
            self._leaving += run.pages
        elif self.geometry.pure_swa:
            self._drop(run.pages)

    def recover(self, kept: int, at: int, incoming: int, start: int, given: list[int]) -> None:
        """The pages ``given`` of row ``incoming``, from ``start`` on, leave their peers to as many
        of row ``kept``, from ``at`` on."""
        op = ops.Recover(kept, incoming, True, len(given), at, start)
        pages = self.model.rows[kept].pages[at : at + len(given)]
        self.do(op, Done())
        self._drop(given)
        self._mates |= {page.swa: page for page in pages}

    def load_back_swa(self, run: Run, swa: list[int]) -> None:
        """Pages of a run get fresh peers; right after the row was loaded without, it is one op."""
        size = self.geometry.page_size
        slots = [page * size + i for page in run.pages for i in range(size)]
        peers = [page * size + i for page in swa for i in range(size)]
        before = self.ops[-1] if self.ops else None
        pages = self.model.rows[run.seq].pages[run.start : run.stop]
        self.do(ops.LoadBackSwa(run.seq, run.start, run.end), Lent(tuple(slots), tuple(peers)))
        self._mates |= {page.swa: page for page in pages}
        if (
            isinstance(before, ops.LoadBack)
            and run.whole_end
            and (before.seq, before.swa_pages) == (run.seq, 0)
        ):
            self.ops[-2:] = [ops.LoadBack(run.seq, before.pages, len(swa))]

    def clear(self) -> None:
        """Everything was dropped."""
        self.do(ops.Clear(), Done())
        self._holder, self._mates, self._leaving = {}, {}, []
        self._freed_in_group = set()

    def holder(self, page: int) -> int | None:
        """The sequence that holds a full page."""
        return self._holder.get(page)

    def page(self, page: int) -> Page | None:
        """What the model knows of a full page on loan."""
        seq = self._holder.get(page)
        if seq is None:
            return None
        return next(held for held in self.model.rows[seq].pages if held.full == page)

    def owner_of_peer(self, swa: int) -> int | None:
        """The full page whose peer an SWA page is."""
        mate = self._mates.get(swa)
        return mate.full if mate is not None and mate.swa == swa else None

    def named_again(self, page: int) -> bool:
        """Whether a page was freed in the open group already, of which another slot may be named
        again where a page has several."""
        freed = page in self._freed_in_group and page not in self._holder
        return freed and self.geometry.page_size > 1

    def last_slot(self, seq: int) -> int:
        """The slot of a row's last token."""
        last = self.model.rows[seq].pages[-1]
        return last.full * self.geometry.page_size + last.tokens - 1

    def tokens(self, run: Run) -> int:
        """Tokens in the pages of a run."""
        pages = self.model.rows[run.seq].pages[run.start : run.stop]
        return sum(page.tokens for page in pages)

    def runs(self, pages: Iterable[int]) -> list[Run]:
        """The rows and ranges that hold ``pages``, row by row as they are named, the last range of
        a row first, so that the ranges stay right while pages leave. Raises `Stop`."""
        by_row: dict[int, set[int]] = {}
        unknown = []
        for page in pages:
            seq = self._holder.get(page)
            if seq is None:
                unknown.append(page)
            else:
                by_row.setdefault(seq, set()).add(page)
        if unknown:
            raise Stop(
                f"it names slots of full pages {some(unknown)}, which no call of this recording "
                "has on loan: they were lent before it began, or are freed twice"
            )
        return [run for seq, named in by_row.items() for run in self._runs_of(seq, named)]

    def _runs_of(self, seq: int, named: set[int]) -> list[Run]:
        row = self.model.rows[seq].pages
        here = self.model.groups if self.model.group_open else None
        places = [
            at
            for at, page in enumerate(row)
            if page.full in named and (not page.gone or page.gone_in == here)
        ]
        runs: list[Run] = []
        for at in places:
            if runs and runs[-1].stop == at:
                start, pages = runs[-1].start, runs[-1].pages
                runs.pop()
            else:
                start, pages = at, ()
            runs.append(Run(seq, start, at + 1, (*pages, row[at].full), at + 1 == len(row)))
        return runs[::-1]

    def _note_lent(self, op: Op) -> None:
        for seq in named_by(op):
            for page in reversed(self.model.rows[seq].pages):
                if self._holder.get(page.full) == seq:
                    break
                self._holder[page.full] = seq
                if page.swa:
                    self._mates[page.swa] = page

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holder.pop(page, None)
            if self.model.group_open:
                self._freed_in_group.add(page)


def named_by(op: Op) -> list[int]:
    """The rows that grow by an op that lends."""
    match op:
        case ops.Alloc() | ops.SwaTail() | ops.LoadBack():
            return [op.seq]
        case ops.Extend():
            return [seq for seq, _ in op.parts]
        case ops.Decode():
            return list(op.seqs)
        case _:
            return []

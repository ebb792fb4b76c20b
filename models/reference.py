"""The accepting reference model of the hybrid allocator, in plain Python sets and dicts.

It says whether an op is allowed, judges the outcome that it is shown, and follows it. It never
predicts which free page a target picks, so that first-in-first-out, last-in-first-out and sorted
free lists all pass. Leaves out the comparison with a target's state: that is the laws' business
(`kvcore.invariants`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.models import ops
from kvcore.models.contract import Contract
from kvcore.models.geometry import Geometry
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.lending import LendingJudge, Share
from kvcore.models.mismatch import Mismatch
from kvcore.models.outcomes import Done, Lent, Outcome, Raised, Refused
from kvcore.models.rules import demand, lacks_room, why_not
from kvcore.models.state import NO_PEER, UNKNOWN, Backup, Page, Row, Side
from kvcore.models.violation import Clause

OUT_OF_BOUNDS = frozenset(("IndexError", "ProcessDied"))
"""Errors that mean: the target read or wrote beyond a buffer."""


class Model:
    """The state that every right allocator agrees on, up to the choice of free pages.

    ``rows``: live sequences. ``full`` and ``swa``: the two sides. ``detached``: for each full page
    whose peer was given up inside the open group, that SWA page; until the group's end a target may
    still show the old entry, or already 0. ``ghosts``: the full pages that a name gave up last.
    ``last_name``: the highest sequence name used so far.
    """

    def __init__(self, geometry: Geometry, contract: Contract | None = None) -> None:
        self.geometry = geometry
        self.contract = contract if contract is not None else Contract()
        self.full = Side(geometry.full_pages)
        self.swa = Side(geometry.swa_pages)
        self.rows: dict[int, Row] = {}
        self.backups: dict[int, Backup] = {}
        self.used: set[int] = set()
        self.last_name = 0
        self.used_backups: set[int] = set()
        self.ghosts: dict[int, tuple[int, ...]] = {}
        self.group_open = False
        self.detached: dict[int, int] = {}
        self.stamps = 0

    def why_not(self, op: ops.Op) -> str | None:
        """The reason why ``op`` is not allowed now, or None."""
        return why_not(self, op)

    def allows(self, op: ops.Op) -> bool:
        """Whether the contract lets a caller make this call now."""
        return why_not(self, op) is None

    def must_refuse(self, op: ops.Op) -> bool:
        """Whether there is too little room for ``op``."""
        return lacks_room(self, op)

    def accept(self, op: ops.Op, outcome: Outcome) -> None:
        """Follow ``outcome``; raises `Mismatch` if no right allocator answers so."""
        if isinstance(op, ops.Hostile):
            self._accept_hostile(op, outcome)
            return
        if isinstance(outcome, Raised):
            out = OUT_OF_BOUNDS.intersection((outcome.kind, *outcome.bases))
            seen = f"{outcome.kind}: {outcome.message}"
            if out:
                self._reject("bounds", f"{op.kind} reads and writes within its buffers", seen)
            self._reject("raises", f"{op.kind}, a legal call here, does not raise", seen)
        match op:
            case (
                ops.Alloc()
                | ops.Extend()
                | ops.Decode()
                | ops.SwaTail()
                | ops.Restore()
                | ops.LoadBack()
            ):
                self._accept_lent(op, outcome)
            case ops.LoadBackSwa():
                self._accept_load_back_swa(op, outcome)
            case _:
                if not isinstance(outcome, Done):
                    self._reject("layout", f"{op.kind} answers nothing", str(outcome))
                self._follow(op)

    # Answers that lend slots.

    def _accept_lent(self, op: ops.Op, outcome: Outcome) -> None:
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        parts = self._parts(op)
        tokens = sum(n for _, n, _ in parts)
        slots = list(outcome.slots)
        peers = list(outcome.peers) if self.geometry.hybrid else [0] * len(slots)
        if len(slots) != tokens or len(peers) != tokens:
            self._reject("layout", f"{tokens} slots", f"{len(slots)} slots, {len(peers)} peers")
        judge = LendingJudge(self.geometry, self.full, self.swa)
        shares: list[tuple[int, Share]] = []
        at = 0
        for seq, count, tail in parts:
            mapped = [self.geometry.hybrid and i >= count - tail for i in range(count)]
            chunk = slice(at, at + count)
            row = self.rows.get(seq, Row())
            shares.append((seq, judge.share(row, slots[chunk], peers[chunk], mapped)))
            at += count
        if judge.clauses:
            raise Mismatch(judge.clauses)
        for seq, share in shares:
            self._commit(seq, share)
        if isinstance(op, ops.Restore):
            self._fill_from_backup(op)

    def _parts(self, op: ops.Op) -> list[tuple[int, int, int]]:
        """(sequence, tokens, tokens from the end that get a peer) in the order of the answer."""
        size = self.geometry.page_size
        match op:
            case ops.Alloc():
                return [(op.seq, op.pages * size, op.pages * size)]
            case ops.Extend():
                return [(seq, tokens, tokens) for seq, tokens in op.parts]
            case ops.Decode():
                return [(seq, 1, 1) for seq in op.seqs]
            case ops.SwaTail():
                return [(op.seq, op.tokens, op.tail)]
            case ops.LoadBack():
                return [(op.seq, op.pages * size, op.swa_pages * size)]
            case ops.Restore():
                tokens = len(self.backups[op.backup].full_stamps)
                return [(op.seq, tokens, tokens if op.tail is None else op.tail)]
            case _:
                return []

    def _judge_room(self, op: ops.Op, outcome: Outcome) -> bool:
        """Whether slots were lent, and rightly so (law L7)."""
        full, swa = demand(self, op)
        room = f"{len(self.full.free)} full and {len(self.swa.free)} SWA pages are free"
        short = lacks_room(self, op)
        if isinstance(outcome, Refused):
            if not short:
                self._reject("L7", f"{full} full and {swa} SWA pages lent, since {room}", "None")
            return False
        if short:
            self._reject("L7", f"None: {full} full and {swa} SWA pages wanted, {room}", "slots")
        if not isinstance(outcome, Lent):
            self._reject("layout", f"{op.kind} answers slots", str(outcome))
        return True

    def _commit(self, seq: int, share: Share) -> None:
        self.used.add(seq)
        self.last_name = max(self.last_name, seq)
        row = self.rows.setdefault(seq, Row())
        for mapped in share.onto_last:
            self._stamp(row.pages[-1], mapped)
        for full, swa, mapped_tokens in share.pages:
            page = Page(full, swa)
            self.full.free.discard(full)
            if swa:
                self.swa.free.discard(swa)
            for mapped in mapped_tokens:
                self._stamp(page, mapped)
            row.pages.append(page)

    def _stamp(self, page: Page, mapped: bool) -> None:
        self.stamps += 1
        page.full_stamps.append(self.stamps)
        page.swa_stamps.append(self.stamps if mapped else NO_PEER)

    def _fill_from_backup(self, op: ops.Restore) -> None:
        """The restored row holds what the backup held; a slot whose old or new side has no peer
        holds nothing known."""
        backup = self.backups.pop(op.backup)
        row = self.rows[op.seq]
        self.stamps -= row.tokens
        at = 0
        for page in row.pages:
            for offset in range(page.tokens):
                page.full_stamps[offset] = backup.full_stamps[at]
                if page.swa_stamps[offset] != NO_PEER:
                    old = backup.swa_stamps[at]
                    page.swa_stamps[offset] = old if old != NO_PEER else UNKNOWN
                at += 1

    def _accept_load_back_swa(self, op: ops.LoadBackSwa, outcome: Outcome) -> None:
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        size = self.geometry.page_size
        pages = self.rows[op.seq].span(op.start, op.stop)
        judge = LendingJudge(self.geometry, self.full, self.swa)
        slots, peers = list(outcome.slots), list(outcome.peers)
        wanted = [page.full * size + offset for page in pages for offset in range(size)]
        if slots != wanted or len(peers) != len(wanted):
            self._reject("layout", f"peers of slots {wanted[:8]}", f"of {slots[:8]}")
        found = [
            judge.peer_of(page.full, peers[i * size : (i + 1) * size])
            for i, page in enumerate(pages)
        ]
        if judge.clauses:
            raise Mismatch(judge.clauses)
        for page, swa in zip(pages, found, strict=True):
            self.swa.free.discard(swa)
            page.swa = swa
            for offset in range(page.tokens):
                self.stamps += 1
                page.swa_stamps[offset] = self.stamps

    # Answers without slots.

    def _follow(self, op: ops.Op) -> None:
        match op:
            case ops.Free():
                self._give_up(op.seq, op.start, op.stop)
            case ops.FreeSwa():
                deferred = self.group_open and self.contract.free_swa_joins_group
                for page in self.rows[op.seq].span(op.start, op.stop):
                    self._detach(page, deferred=deferred)
            case ops.FreeFull():
                self._give_up(op.seq, op.start, op.stop)
            case ops.GroupBegin():
                self.group_open = True
            case ops.GroupEnd():
                self._close_group()
            case ops.Recover():
                self._recover(op)
            case ops.Retract():
                self._retract(op)
            case ops.Clear():
                self._clear()

    def _give_up(self, seq: int, start: int, stop: int | None) -> None:
        row = self.rows[seq]
        pages = row.span(start, stop)
        for page in pages:
            self._detach(page, deferred=self.group_open)
            self.full.release(page.full, deferred=self.group_open)
        self.ghosts[seq] = tuple(page.full for page in pages)
        row.pages[start : start + len(pages)] = []
        if not row.pages:
            del self.rows[seq]

    def _detach(self, page: Page, *, deferred: bool) -> None:
        if page.swa == 0:
            return
        self.swa.release(page.swa, deferred=deferred)
        if deferred:
            self.detached[page.full] = page.swa
        page.swa = 0
        page.swa_stamps = [NO_PEER] * page.tokens

    def _close_group(self) -> None:
        self.full.settle()
        self.swa.settle()
        self.detached = {}
        self.group_open = False

    def _recover(self, op: ops.Recover) -> None:
        kept = self.rows[op.kept].span(op.kept_start, op.kept_start + op.pages)
        row = self.rows[op.incoming]
        incoming = row.span(op.incoming_start, op.incoming_start + op.pages)
        deferred = self.group_open and self.contract.full_side_joins_group
        given_up = incoming if op.locked else kept
        self.ghosts[op.incoming if op.locked else op.kept] = tuple(page.full for page in given_up)
        for old, new in zip(kept, incoming, strict=True):
            if op.locked:
                self.full.release(new.full, deferred=deferred)
            else:
                self.full.release(old.full, deferred=self.group_open)
                old.full, old.full_stamps = new.full, new.full_stamps
            old.swa, old.swa_stamps = new.swa, new.swa_stamps
        row.pages[op.incoming_start : op.incoming_start + op.pages] = []
        if not row.pages:
            del self.rows[op.incoming]

    def _retract(self, op: ops.Retract) -> None:
        row = self.rows[op.seq]
        full = [stamp for page in row.pages for stamp in page.full_stamps]
        swa: list[int] = []
        for page in row.pages:
            # Given up inside this group, the old entry may still be seen and copied, or not.
            gone = UNKNOWN if page.full in self.detached else NO_PEER
            swa += [stamp if stamp != NO_PEER else gone for stamp in page.swa_stamps]
        self.backups[op.backup] = Backup(full, swa)
        self.used_backups.add(op.backup)
        self._give_up(op.seq, 0, None)

    def _clear(self) -> None:
        for seq, row in self.rows.items():
            self.ghosts[seq] = tuple(page.full for page in row.pages)
        self.rows = {}
        self._close_group()
        self.full.reset()
        self.swa.reset()

    def _accept_hostile(self, op: ops.Hostile, outcome: Outcome) -> None:
        call = HOSTILE_CALLS[op.call]
        wanted = " or ".join(sorted(call.errors))
        if not isinstance(outcome, Raised):
            self._reject("hostile", f"{wanted}, since callers must not {call.what}", "no error")
        elif outcome.kind not in call.errors:
            seen = f"{outcome.kind}: {outcome.message}"
            self._reject("hostile", f"{wanted}, since callers must not {call.what}", seen)

    def _reject(self, law: str, expected: str, seen: str) -> None:
        raise Mismatch([Clause(law, expected, seen)])

    # What the laws compare a target's state with.

    def lent_pages(self) -> Iterable[tuple[int, Page]]:
        """(sequence, page) for every page of every live row."""
        for seq, row in self.rows.items():
            for page in row.pages:
                yield seq, page

"""The accepting reference model of every kind of allocator, in plain Python sets and dicts.

It says whether an op is allowed, judges the outcome that it is shown, and follows it. It never
predicts which free page a target picks, so that first-in-first-out, last-in-first-out and sorted
free lists all pass. Leaves out the comparison with a target's state: that is the laws' business
(`kvcore.invariants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvcore.models import ops
from kvcore.models.books import EFFECTS, Books
from kvcore.models.closing import closing_ops, probing_ops
from kvcore.models.contract import Contract
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.lending import LendingJudge, Share
from kvcore.models.mismatch import Mismatch
from kvcore.models.outcomes import Done, Lent, Outcome, Raised, Refused
from kvcore.models.rules import demand, lacks_room, restored_tail, restored_tokens, why_not
from kvcore.models.state import NO_PEER, UNKNOWN, Page, Row
from kvcore.models.usual import Part, follow_usual
from kvcore.models.violation import Clause

OUT_OF_BOUNDS = frozenset(("IndexError", "ProcessDied"))
"""Errors that mean: the target read or wrote beyond a buffer."""


class Model(Books):
    """The judge: which ops are allowed, and which answers a right allocator may give. The state is
    that of `Books`: what all right allocators agree on, up to the choice of free pages."""

    _allowed: tuple[ops.Op, Contract] | None = None
    """What was last found to be allowed in this state, and by which contract: a source asks, and
    then the run."""

    def why_not(self, op: ops.Op) -> str | None:
        """The reason why ``op`` is not allowed now, or None."""
        known = self._allowed
        if known is not None and known[0] is op and known[1] is self.contract:
            return None
        reason = why_not(self, op)
        if reason is None:
            self._allowed = (op, self.contract)
        return reason

    def allows(self, op: ops.Op) -> bool:
        """Whether the contract lets a caller make this call now."""
        return self.why_not(op) is None

    def must_refuse(self, op: ops.Op) -> bool:
        """Whether there is too little room for ``op``."""
        return lacks_room(self, op)

    def closing_ops(self) -> Iterator[ops.Op]:
        """Ops that give everything back; follow each one before taking the next."""
        return closing_ops(self)

    def probing_ops(self) -> Iterator[ops.Op]:
        """Ops that lend all that there is, once everything was given back; those that are not
        allowed are to be left out, and each other one to be followed before taking the next."""
        return probing_ops(self)

    def accept(self, op: ops.Op, outcome: Outcome) -> None:
        """Follow ``outcome``; raises `Mismatch` if no right allocator answers so."""
        self._allowed = None
        self.memory.fresh = False
        kind, answer = type(op), type(outcome)
        # Most answers are one of these three, and right.
        if answer is Done:
            if (effect := EFFECTS.get(kind)) is not None:
                effect(self, op)
                return
        elif isinstance(outcome, Lent) and self.usual:
            parts_of = _PARTS.get(kind)
            if parts_of is not None and follow_usual(self, parts_of(self, op), outcome):
                if isinstance(op, ops.Restore):
                    self._fill_from_backup(op)
                return
        elif answer is Refused and kind in _LENDING and lacks_room(self, op):
            return
        self._accept_unusual(op, outcome)

    def _accept_unusual(self, op: ops.Op, outcome: Outcome) -> None:
        """`accept`, with a look at everything and words for what is wrong."""
        if isinstance(op, ops.Hostile):
            self._accept_hostile(op, outcome)
            return
        self._judge_error(op, outcome)
        judge = _LENDING.get(type(op))
        if judge is not None:
            judge(self, op, outcome)
        else:
            # What answers nothing was followed above.
            self._reject("layout", f"{op.kind} answers nothing", str(outcome))

    def _judge_error(self, op: ops.Op, outcome: Outcome) -> None:
        if isinstance(outcome, Raised):
            out = OUT_OF_BOUNDS.intersection((outcome.kind, *outcome.bases))
            seen = f"{outcome.kind}: {outcome.message}"
            if out:
                self._reject("bounds", f"{op.kind} reads and writes within its buffers", seen)
            self._reject("raises", f"{op.kind}, a legal call here, does not raise", seen)

    # Answers that lend slots.

    def _accept_lent(self, op: ops.Op, outcome: Outcome) -> None:
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        parts = _PARTS[type(op)](self, op)
        tokens = parts[0].tokens if len(parts) == 1 else sum(part.tokens for part in parts)
        hybrid, sparse = self.geometry.hybrid, self.geometry.sparse
        slots = list(outcome.slots)
        peers = list(outcome.peers) if hybrid else [0] * len(slots)
        device = list(outcome.device) if sparse else []
        if self.geometry.pure_swa and outcome.peers and list(outcome.peers) != slots:
            self._reject("L4", f"every slot its own peer: {slots[:8]}", f"{outcome.peers[:8]}")
        if len(slots) != tokens or len(peers) != tokens or len(device) != tokens * sparse:
            seen = f"{len(slots)} slots, {len(peers)} peers, {len(device)} device slots"
            self._reject("layout", f"{tokens} slots", seen)
        judge = LendingJudge(self.geometry, self.full, self.swa, self.device)
        shares: list[tuple[int, Share]] = []
        at = 0
        for part in parts:
            chunk = slice(at, at + part.tokens)
            row = self.rows.get(part.seq) or Row()
            share = judge.share(row, slots[chunk], peers[chunk], part.mapped(hybrid))
            if sparse:
                judge.entries(row, device[chunk], owed=part.on_device, share=share)
            shares.append((part.seq, share))
            at += part.tokens
        taken = self._judge_requests([part.seq for part in parts], outcome)
        if judge.clauses:
            raise Mismatch(judge.clauses)
        for seq, share in shares:
            self._commit(seq, share)
        for seq, request in taken:
            self.requests.take(request)
            self.rows[seq].request = request
        if isinstance(op, ops.Restore):
            self._fill_from_backup(op)

    def _judge_requests(self, seqs: list[int], outcome: Lent) -> list[tuple[int, int]]:
        """(sequence, row of the request pool) of every new sequence."""
        if not self.geometry.requests:
            return []
        new = [seq for seq in seqs if seq not in self.rows]
        taken = list(outcome.requests)
        if len(taken) != len(new) or len(set(taken)) != len(taken):
            self._reject("L2", f"{len(new)} rows of the request pool", str(taken))
        for request in taken:
            if request not in self.requests.free:
                self._reject("L1", "a free row of the request pool", f"row {request}")
        return list(zip(new, taken, strict=True))

    def _judge_room(self, op: ops.Op, outcome: Outcome) -> bool:
        """Whether slots were lent, and rightly so (law L7)."""
        short = lacks_room(self, op)
        if isinstance(outcome, Refused):
            if not short:
                self._reject("L7", f"{self._wanted(op)} lent, since {self._room()}", "None")
            return False
        if short:
            self._reject("L7", f"None: {self._wanted(op)} wanted, {self._room()}", "slots")
        if not isinstance(outcome, Lent):
            self._reject("layout", f"{op.kind} answers slots", str(outcome))
        return True

    def _wanted(self, op: ops.Op) -> str:
        need = demand(self, op)
        said = f"{need.full} full and {need.swa} SWA pages"
        said += f", {need.device} device pages" if self.geometry.sparse else ""
        return said + (f", {need.requests} requests" if self.geometry.requests else "")

    def _room(self) -> str:
        said = f"{len(self.full.free)} full and {len(self.swa.free)} SWA pages are free"
        said += f", {len(self.device.free)} device pages" if self.geometry.sparse else ""
        return said + (f", {len(self.requests.free)} requests" if self.geometry.requests else "")

    def _accept_load_back_swa(self, op: ops.LoadBackSwa, outcome: Outcome) -> None:
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        size = self.geometry.page_size
        pages = self.rows[op.seq].span(op.start, op.stop)
        judge = LendingJudge(self.geometry, self.full, self.swa, self.device)
        slots, peers = list(outcome.slots), list(outcome.peers)
        wanted = [page.full * size + offset for page in pages for offset in range(size)]
        if slots != wanted or len(peers) != len(wanted):
            self._reject("layout", f"peers of slots {wanted[:8]}", f"of {slots[:8]}")
        found = [
            judge.peer_of(page.full, peers[i * size : (i + 1) * size], [True] * size)
            for i, page in enumerate(pages)
        ]
        if judge.clauses:
            raise Mismatch(judge.clauses)
        for page, swa in zip(pages, found, strict=True):
            self.swa.take(swa)
            page.swa = swa
            self._own(page)
            for offset in range(page.tokens):
                self.stamps += 1
                page.swa_stamps[offset] = self.stamps

    def _accept_device_buffer(self, op: ops.DeviceBuffer, outcome: Outcome) -> None:
        """The row's device pages come first, in row order; then new ones."""
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        size, row = self.geometry.device_page_size, self.rows[op.seq]
        own = [page.device for page in row.pages if page.device]
        slots = list(outcome.slots)
        got = [slot // size for slot in slots[::size]]
        if slots != [page * size + i for page in got for i in range(size)] or len(got) != op.pages:
            self._reject(
                "layout", f"the slots of {op.pages} device pages, page by page", f"{slots}"
            )
        if got[: len(own)] != own[: op.pages]:
            self._reject("layout", f"the row's device pages {own[: op.pages]} first", f"{got}")
        judge = LendingJudge(self.geometry, self.full, self.swa, self.device)
        for page in got[len(own) :]:
            judge.take(page, "device")
        if judge.clauses:
            raise Mismatch(judge.clauses)
        for surplus in set(own) - set(got):
            self.device.release(surplus, deferred=self.group_open)
        for held in row.pages:
            held.device, held.device_stamps = 0, [NO_PEER] * held.tokens
            if not held.gone:
                self._own(held)
        for page in got:
            self.device.take(page)
        self.buffers[op.buffer] = tuple(got)
        self.used_buffers.add(op.buffer)

    def _accept_relocate(self, op: ops.Relocate, outcome: Outcome) -> None:
        """New pages take over the contents; a token without a peer before holds nothing known in
        its new one."""
        if not self._judge_room(op, outcome):
            return
        assert isinstance(outcome, Lent)
        row, hybrid = self.rows[op.seq], self.geometry.hybrid
        peers = list(outcome.peers) if hybrid else [0] * len(outcome.slots)
        if not len(outcome.slots) == len(peers) == row.tokens:
            self._reject(
                "layout", f"{row.tokens} slots", f"{len(outcome.slots)}, {len(peers)} peers"
            )
        judge = LendingJudge(self.geometry, self.full, self.swa, self.device)
        share = judge.share(Row(), list(outcome.slots), peers, [hybrid] * row.tokens)
        if judge.clauses:
            raise Mismatch(judge.clauses)
        old = row.pages
        row.pages = []
        for page, (full, swa, _) in zip(old, share.pages, strict=True):
            seen = [stamp if stamp != NO_PEER else UNKNOWN for stamp in page.swa_stamps]
            stamps = seen if hybrid else [NO_PEER] * page.tokens
            new = Page(full, swa, page.full_stamps, stamps, 0, [NO_PEER] * page.tokens)
            self.full.take(full)
            if swa:
                self.swa.take(swa)
            row.pages.append(new)
            self._own(new)
        self._release(old, deferred=self.group_open)
        self.ghosts[op.seq] = tuple(page.full for page in old)

    def _accept_hostile(self, op: ops.Hostile, outcome: Outcome) -> None:
        call = HOSTILE_CALLS[op.call]
        if isinstance(outcome, Raised) and outcome.kind in call.errors:
            return
        wanted = " or ".join(sorted(call.errors))
        if not isinstance(outcome, Raised):
            self._reject("hostile", f"{wanted}, since callers must not {call.what}", "no error")
        else:
            seen = f"{outcome.kind}: {outcome.message}"
            self._reject("hostile", f"{wanted}, since callers must not {call.what}", seen)

    def _reject(self, law: str, expected: str, seen: str) -> None:
        raise Mismatch([Clause(law, expected, seen)])


_LENDING: dict[type[ops.Op], Callable[[Model, Any, Outcome], None]] = {
    ops.Alloc: Model._accept_lent,
    ops.Extend: Model._accept_lent,
    ops.ExtendLogical: Model._accept_lent,
    ops.Decode: Model._accept_lent,
    ops.SwaTail: Model._accept_lent,
    ops.Restore: Model._accept_lent,
    ops.LoadBack: Model._accept_lent,
    ops.LoadBackSwa: Model._accept_load_back_swa,
    ops.DeviceBuffer: Model._accept_device_buffer,
    ops.Relocate: Model._accept_relocate,
}
"""Who judges the answers of the ops that lend; all others answer nothing."""


def _of_alloc(model: Model, op: ops.Alloc) -> list[Part]:
    tokens = op.pages * model.geometry.page_size
    return [Part(op.seq, tokens, tokens, on_device=True)]


def _of_extend(model: Model, op: ops.Extend) -> list[Part]:
    return [Part(seq, tokens, tokens, on_device=True) for seq, tokens in op.parts]


def _of_extend_logical(model: Model, op: ops.ExtendLogical) -> list[Part]:
    return [Part(seq, tokens, tokens) for seq, tokens in op.parts]


def _of_decode(model: Model, op: ops.Decode) -> list[Part]:
    return [Part(seq, 1, 1) for seq in op.seqs]


def _of_swa_tail(model: Model, op: ops.SwaTail) -> list[Part]:
    return [Part(op.seq, op.tokens, op.tail, op.beyond)]


def _of_load_back(model: Model, op: ops.LoadBack) -> list[Part]:
    size = model.geometry.page_size
    return [Part(op.seq, op.pages * size, op.swa_pages * size)]


def _of_restore(model: Model, op: ops.Restore) -> list[Part]:
    return [Part(op.seq, restored_tokens(model, op), restored_tail(model, op))]


_PARTS: dict[type[ops.Op], Callable[[Model, Any], list[Part]]] = {
    ops.Alloc: _of_alloc,
    ops.Extend: _of_extend,
    ops.ExtendLogical: _of_extend_logical,
    ops.Decode: _of_decode,
    ops.SwaTail: _of_swa_tail,
    ops.LoadBack: _of_load_back,
    ops.Restore: _of_restore,
}
"""What each sequence gains, in the order of the answer."""

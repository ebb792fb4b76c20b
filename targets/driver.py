"""Drives an allocator and its KV pool by logical ops, for every dialect.

Resolves names to physical slots, makes the calls, stamps what was lent into the pool, and takes the
view. Keeps a tensor or two of earlier answers untouched and scribbles over others, as callers do
(law L8). Leaves out every judgement: an exception of the allocator becomes an outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from kvcore.models import Contract, Done, Geometry, Lent, Outcome, Raised, Refused, ops
from kvcore.models.ops import Form, Op
from kvcore.targets.dialect import Dialect, Slots, as_tensor
from kvcore.targets.hostile import HostileCaller
from kvcore.targets.pool import StampedPool
from kvcore.targets.protocol import View

HELD_ANSWERS = 4
"""How many answers a caller keeps untouched, to see whether they change under it."""

SCRIBBLE = 0
"""What a caller leaves in a tensor that it overwrites: the padding slot, in range on every side."""

P = ParamSpec("P")
T = TypeVar("T")


class CallRaised(Exception):
    """The allocator or pool raised; carries the outcome."""

    def __init__(self, outcome: Raised) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call into the code on trial; whatever it raises becomes `CallRaised`."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        text = str(error).splitlines()
        raised = Raised(type(error).__name__, text[0] if text else "", bases)
        raise CallRaised(raised) from error


def _some_of_each_page(slots: list[int], size: int, start: int) -> list[int]:
    """One slot of each page, two of every other one, last page first; which ones varies."""
    named: list[int] = []
    for number, at in enumerate(range(0, len(slots), size)):
        page = slots[at : at + size]
        named.append(page[(start + number) % len(page)])
        if number % 2 and len(page) > 1:
            named.append(page[(start + number + 1) % len(page)])
    return named[::-1]


class AllocatorTarget:
    """One allocator under one contract, with the pool that holds the stamps."""

    def __init__(
        self,
        name: str,
        geometry: Geometry,
        contract: Contract,
        dialect: Dialect,
        pool: StampedPool,
        hostile: HostileCaller | None = None,
    ) -> None:
        self.name = name
        self.geometry = geometry
        self.contract = contract
        self._dialect = dialect
        self._pool = pool
        self._hostile = hostile
        self._rows: dict[int, list[int]] = {}
        self._ghosts: dict[int, list[int]] = {}
        self._backups: dict[int, tuple[int, Any]] = {}
        self._stamps = 0
        self._answers = 0
        self._held: deque[tuple[int, torch.Tensor]] = deque(maxlen=HELD_ANSWERS)

    def apply(self, op: Op) -> Outcome:
        """Make the calls of ``op``."""
        try:
            return self._apply(op)
        except CallRaised as caught:
            return caught.outcome

    def view(self, *, stamps: bool) -> View:
        """A frozen copy of free lists, mapping, counters and, if asked, the pools' contents."""
        full, swa = self._dialect.free_pages()
        return View(
            full_free=full,
            swa_free=swa,
            mapping=self._dialect.mapping(),
            stamps=self._pool.contents() if stamps else (),
            pending=self._dialect.pending_pages() if stamps else (),
            held=dict(self._held),
            answers=self._dialect.answers(),
        )

    def close(self) -> None:
        """Drop rows, backups and held tensors."""
        self._rows, self._backups = {}, {}
        self._held.clear()

    def _apply(self, op: Op) -> Outcome:
        match op:
            case ops.Alloc():
                slots = attempt(self._dialect.alloc, op.pages * self.geometry.page_size)
                return self._lend(slots, [(op.seq, op.pages * self.geometry.page_size)], op)
            case ops.Extend():
                return self._extend(op)
            case ops.Decode():
                return self._decode(op)
            case ops.SwaTail():
                return self._swa_tail(op)
            case ops.LoadBack():
                return self._load_back(op)
            case ops.LoadBackSwa():
                return self._load_back_swa(op)
            case ops.Restore():
                return self._restore(op)
            case ops.Hostile():
                return self._be_hostile(op)
            case _:
                self._give_back(op)
                return Done()

    # Ops that lend.

    def _tensor(self, slots: list[int]) -> Slots:
        return as_tensor(slots, self._pool.device)

    def _last(self, seq: int) -> int:
        row = self._rows.get(seq)
        return row[-1] if row else -1

    def _length(self, seq: int) -> int:
        return len(self._rows.get(seq, ()))

    def _extend(self, op: ops.Extend) -> Outcome:
        before = [self._length(seq) for seq, _ in op.parts]
        after = [n + tokens for n, (_, tokens) in zip(before, op.parts, strict=True)]
        last = [self._last(seq) for seq, _ in op.parts]
        slots = attempt(self._dialect.extend, before, after, last)
        return self._lend(slots, list(op.parts), op)

    def _decode(self, op: ops.Decode) -> Outcome:
        after = [self._length(seq) + 1 for seq in op.seqs]
        last = [self._last(seq) for seq in op.seqs]
        slots = attempt(self._dialect.decode, after, last)
        return self._lend(slots, [(seq, 1) for seq in op.seqs], op)

    def _swa_tail(self, op: ops.SwaTail) -> Outcome:
        before = self._length(op.seq)
        slots = attempt(
            self._dialect.swa_tail, before, before + op.tokens, self._last(op.seq), op.tail
        )
        return self._lend(slots, [(op.seq, op.tokens)], op)

    def _load_back(self, op: ops.LoadBack) -> Outcome:
        full_need = op.pages * self.geometry.page_size
        swa_need = op.swa_pages * self.geometry.page_size
        room = attempt(self._dialect.answers)
        if full_need > room.full_available or swa_need > room.swa_available:
            return Refused()
        full = attempt(self._dialect.alloc_full, full_need)
        swa = attempt(self._dialect.alloc_swa, swa_need) if swa_need else None
        if full is None or (swa_need and swa is None):
            return Refused()
        if swa is not None:
            attempt(self._dialect.map, full[full_need - swa_need :], swa)
        return self._lend(full, [(op.seq, full_need)], op)

    def _load_back_swa(self, op: ops.LoadBackSwa) -> Outcome:
        slots = self._span(op.seq, op.start, op.stop)
        swa = attempt(self._dialect.alloc_swa, len(slots))
        if swa is None:
            return Refused()
        full = self._tensor(slots)
        attempt(self._dialect.map, full, swa)
        outcome = Lent(tuple(slots), tuple(self._peers(full)))
        attempt(self._pool.stamp_swa, full, self._next_stamps(len(slots)))
        return outcome

    def _restore(self, op: ops.Restore) -> Outcome:
        tokens, copy = self._backups[op.backup]
        if op.tail is None:
            slots = attempt(self._dialect.extend, [0], [tokens], [-1])
        else:
            slots = attempt(self._dialect.swa_tail, 0, tokens, -1, op.tail)
        outcome = self._lend(slots, [(op.seq, tokens)], op)
        if slots is not None:
            attempt(self._pool.restore, copy, self._tensor(self._rows[op.seq]))
            del self._backups[op.backup]
        return outcome

    def _lend(self, slots: Slots | None, parts: list[tuple[int, int]], op: Op) -> Outcome:
        """Record an answer: rows grow by their parts in order, and the new tokens are stamped."""
        if slots is None:
            return Refused()
        lent = slots.tolist()
        outcome = Lent(tuple(lent), tuple(self._peers(slots)))
        at = 0
        for seq, count in parts:
            self._rows.setdefault(seq, []).extend(lent[at : at + count])
            at += count
        if not isinstance(op, ops.Restore):
            attempt(self._pool.stamp, slots, self._next_stamps(len(lent)))
        self._answers += 1
        if isinstance(op, ops.Alloc | ops.Extend | ops.Decode) and op.overwrite:
            slots.fill_(SCRIBBLE)
        else:
            self._held.append((self._answers, slots))
        return outcome

    def _peers(self, slots: Slots) -> list[int]:
        if not self.geometry.hybrid:
            return []
        peers: list[int] = attempt(self._dialect.peers, slots).tolist()
        return peers

    def _next_stamps(self, count: int) -> torch.Tensor:
        first = self._stamps + 1
        self._stamps += count
        return torch.arange(first, first + count, dtype=torch.int64, device=self._pool.device)

    # Ops that give back.

    def _span(self, seq: int, start: int, stop: int | None) -> list[int]:
        size = self.geometry.page_size
        return self._rows[seq][start * size : None if stop is None else stop * size]

    def _leave(self, seq: int, start: int, stop: int | None) -> None:
        """Pages ``[start, stop)`` leave the row, which closes up."""
        size = self.geometry.page_size
        self._ghosts[seq] = self._span(seq, start, stop)
        row = self._rows[seq]
        del row[start * size : None if stop is None else stop * size]
        if not row:
            del self._rows[seq]

    def _give_back(self, op: Op) -> None:
        match op:
            case ops.Free():
                self._free(self._dialect.free, op)
                self._leave(op.seq, op.start, op.stop)
            case ops.FreeSwa():
                self._free(self._dialect.free_swa, op)
            case ops.FreeFull():
                self._free(self._dialect.free_full, op)
                self._leave(op.seq, op.start, op.stop)
            case ops.GroupBegin():
                attempt(self._dialect.group_begin)
            case ops.GroupEnd():
                attempt(self._dialect.group_end)
            case ops.Recover():
                self._recover(op)
            case ops.Retract():
                self._retract(op)
            case ops.Clear():
                attempt(self._dialect.clear)
                self._ghosts.update(self._rows)
                self._rows = {}
                self._held.clear()

    def _free(
        self, call: Callable[[Slots, Form, int], None], op: ops.Free | ops.FreeSwa | ops.FreeFull
    ) -> None:
        size = self.geometry.page_size
        slots = self._span(op.seq, op.start, op.stop)
        if op.form == "sparse":
            slots = _some_of_each_page(slots, size, op.seq)
        tensor = self._tensor(slots)
        attempt(call, tensor, op.form, op.start * size)
        if op.overwrite:
            tensor.fill_(SCRIBBLE)

    def _recover(self, op: ops.Recover) -> None:
        size = self.geometry.page_size
        kept = self._span(op.kept, op.kept_start, op.kept_start + op.pages)
        incoming = self._span(op.incoming, op.incoming_start, op.incoming_start + op.pages)
        if op.locked:
            attempt(self._dialect.recover, self._tensor(kept), self._tensor(incoming))
            self._ghosts[op.incoming] = incoming
        else:
            attempt(self._dialect.replace, self._tensor(kept))
            self._ghosts[op.kept] = kept
            at = op.kept_start * size
            self._rows[op.kept][at : at + len(kept)] = incoming
        row = self._rows[op.incoming]
        del row[op.incoming_start * size : (op.incoming_start + op.pages) * size]
        if not row:
            del self._rows[op.incoming]

    def _retract(self, op: ops.Retract) -> None:
        """The copy is taken first; then live pages go with their peers, tombstones alone."""
        row = self._rows[op.seq]
        slots = self._tensor(row)
        copy = attempt(self._pool.backup, slots)
        self._backups[op.backup] = (len(row), copy)
        for start, stop, live in self._runs(row):
            call = self._dialect.free if live else self._dialect.free_full
            attempt(call, self._tensor(row[start:stop]), "slots", start)
        self._leave(op.seq, 0, None)

    def _runs(self, row: list[int]) -> list[tuple[int, int, bool]]:
        """The row cut into runs of pages with and without a peer, if callers must tell them
        apart; otherwise the row whole."""
        if "slots" not in self.contract.live_frees or not self.geometry.hybrid:
            return [(0, len(row), True)]
        size = self.geometry.page_size
        live = [peer != 0 for peer in self._peers(self._tensor(row[::size]))]
        runs: list[tuple[int, int, bool]] = []
        for page, alive in enumerate(live):
            start, stop = page * size, min((page + 1) * size, len(row))
            if runs and runs[-1][2] == alive:
                runs[-1] = (runs[-1][0], stop, alive)
            else:
                runs.append((start, stop, alive))
        return runs

    def _be_hostile(self, op: ops.Hostile) -> Outcome:
        if self._hostile is None:
            raise RuntimeError(
                f"{self.name} takes no hostile calls; its contract must not name any"
            )
        call = self._hostile.prepare(
            op.call,
            rows=self._rows,
            ghost=self._ghosts.get(op.seq, []),
            backup=self._backups.get(op.seq),
            seq=op.seq,
            other=op.other,
        )
        attempt(call)
        return Done()

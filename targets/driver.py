"""Drives an allocator and its KV pool by logical ops, for every dialect.

Resolves names to physical slots, makes the calls, and stamps what was lent into the pool. Keeps a
tensor or two of earlier answers untouched and scribbles over others, as callers do (law L8). Leaves
out every judgement, an exception of the allocator becomes an outcome, and how a view is taken
(`kvcore.targets.snapshots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from kvcore.models import Contract, Done, Geometry, Lent, Outcome, Raised, Refused, ops
from kvcore.models.ops import Form, Op
from kvcore.targets.attempt import CallRaised, attempt
from kvcore.targets.dialect import Dialect, Slots, SparseDialect, as_tensor
from kvcore.targets.held import HeldAnswers
from kvcore.targets.host_arrays import Numbers, array_of, overwrite
from kvcore.targets.hostile import HostileCaller
from kvcore.targets.memory import SaverProbe
from kvcore.targets.pool import StampedPool
from kvcore.targets.protocol import View
from kvcore.targets.requests import RequestRows
from kvcore.targets.rows import SCRIBBLE, RowBook, some_of_each_page
from kvcore.targets.snapshots import Snapshots

KEEPS_STAMPS = (ops.Restore, ops.Relocate)
"""Ops that lend slots to tokens that are there already, with their stamps."""

OVERWRITABLE = (ops.Alloc, ops.Extend, ops.Decode)
"""Ops whose caller may scribble over the answer."""


def _named(op: Op) -> list[int]:
    """Sequences that grow by ``op``; a restored one is not among them, since its request row is
    part of the restore."""
    match op:
        case ops.Alloc() | ops.SwaTail() | ops.LoadBack():
            return [op.seq]
        case ops.Extend() | ops.ExtendLogical():
            return [seq for seq, _ in op.parts]
        case _:
            return []


class AllocatorTarget:
    """One allocator under one contract, with the pool that holds the stamps, and where there are
    the device slots under it, the request pool and the memory saver."""

    def __init__(
        self,
        name: str,
        geometry: Geometry,
        contract: Contract,
        dialect: Dialect,
        pool: StampedPool,
        hostile: HostileCaller | None = None,
        *,
        sparse: SparseDialect | None = None,
        requests: RequestRows | None = None,
        memory: SaverProbe | None = None,
    ) -> None:
        self.name = name
        self.geometry = geometry
        self.contract = contract
        self._dialect = dialect
        self._pool = pool
        self._hostile = hostile
        self._sparse = sparse
        self._requests = requests
        self._memory = memory
        self._rows = RowBook(geometry.page_size)
        self._backups: dict[int, tuple[int, Any]] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._stamps = 0
        self._held = HeldAnswers()
        self._snapshots = Snapshots(geometry, dialect, pool, self._held, sparse, requests, memory)

    @property
    def dialect(self) -> Dialect:
        """How the allocator is called."""
        return self._dialect

    @property
    def pool(self) -> StampedPool:
        """The pool that holds the stamps."""
        return self._pool

    def apply(self, op: Op) -> Outcome:
        """Make the calls of ``op``."""
        try:
            if self._requests is None:
                return self._apply(op)
            return self._apply_with_rows(op, self._requests)
        except CallRaised as caught:
            return caught.outcome

    def view(self, *, stamps: bool) -> View:
        """A frozen copy of free lists, mapping, counters and, if asked, the pools' contents."""
        return self._snapshots.take(stamps=stamps)

    def close(self) -> None:
        """Drop rows, backups, buffers, held tensors and reserved memory."""
        self._backups, self._buffers = {}, {}
        self._held.clear()
        if self._memory is not None:
            self._memory.close()

    def _apply_with_rows(self, op: Op, requests: RequestRows) -> Outcome:
        """Take a request row for each new sequence, make the calls, and write down in the request
        pool what the rows hold then."""
        new = [seq for seq in _named(op) if seq not in self._rows.slots]
        if new and not attempt(requests.begin, new):
            return Refused()
        outcome: Outcome | None = None
        try:
            outcome = self._apply(op)
        finally:
            if not isinstance(outcome, Lent):
                for seq in new:
                    attempt(requests.end, seq)
        for seq in self._rows.changed:
            if seq in self._rows.slots:
                attempt(requests.write, seq, self._tensor(self._rows.slots[seq]))
            else:
                attempt(requests.end, seq)
        self._rows.changed.clear()
        if isinstance(op, ops.Restore):
            new = [op.seq]
        if isinstance(outcome, Lent) and new:
            return msgspec.structs.replace(outcome, requests=requests.rows_of(new))
        return outcome

    def _apply(self, op: Op) -> Outcome:
        match op:
            case ops.Alloc():
                slots = attempt(self._dialect.alloc, op.pages * self.geometry.page_size)
                return self._lend(slots, [(op.seq, op.pages * self.geometry.page_size)], op)
            case ops.Extend():
                return self._extend(op)
            case ops.Decode():
                return self._decode(op)
            case ops.Free() | ops.FreeSwa() | ops.FreeFull() | ops.GroupBegin() | ops.GroupEnd():
                self._give_back(op)
                return Done()
            case ops.SwaTail():
                return self._swa_tail(op)
            case ops.LoadBack():
                return self._load_back(op)
            case ops.LoadBackSwa():
                return self._load_back_swa(op)
            case ops.Restore():
                return self._restore(op)
            case ops.Relocate():
                return self._relocate(op)
            case ops.Hostile():
                return self._be_hostile(op)
            case ops.ExtendLogical() | ops.DeviceBuffer() | ops.FreeDevice() | ops.FreeBuffer():
                return self._apply_sparse(op)
            case ops.Reserve() | ops.Drop() | ops.Pause() | ops.Resume():
                self._apply_memory(op)
                return Done()
            case _:
                self._give_back(op)
                return Done()

    def _apply_memory(self, op: ops.Reserve | ops.Drop | ops.Pause | ops.Resume) -> None:
        memory = self._memory
        if memory is None:
            raise RuntimeError(f"{self.name} has no memory saver; its contract must not name one")
        match op:
            case ops.Reserve():
                attempt(memory.reserve, op.region, op.memory, op.size)
            case ops.Drop():
                attempt(memory.drop, op.region)
            case ops.Pause():
                attempt(memory.pause, op.memory)
            case ops.Resume():
                attempt(memory.resume, op.memory)

    def _apply_sparse(
        self, op: ops.ExtendLogical | ops.DeviceBuffer | ops.FreeDevice | ops.FreeBuffer
    ) -> Outcome:
        sparse = self._sparse
        if sparse is None:
            raise RuntimeError(f"{self.name} has no device slots; its contract must not name them")
        match op:
            case ops.ExtendLogical():
                slots = attempt(sparse.extend_logical, *self._rows.batch(op.parts))
                return self._lend(slots, list(op.parts), op)
            case ops.DeviceBuffer():
                need = op.pages * self.geometry.device_page_size
                row = self._tensor(self._rows.slots[op.seq])
                buffer = attempt(sparse.device_buffer, row, need)
                if buffer is None:
                    return Refused()
                self._buffers[op.buffer] = buffer
                numbers = array_of(buffer)
                self._held.keep(buffer, numbers)
                return Lent(tuple(numbers.tolist()))
            case ops.FreeDevice():
                self._free(lambda slots, form, start: sparse.free_device(slots), op)
            case ops.FreeBuffer():
                attempt(sparse.free_buffer, self._buffers.pop(op.buffer))
        return Done()

    # Ops that lend.

    def _tensor(self, slots: list[int]) -> Slots:
        return as_tensor(slots, self._pool.device)

    def _extend(self, op: ops.Extend) -> Outcome:
        slots = attempt(self._dialect.extend, *self._rows.batch(op.parts))
        return self._lend(slots, list(op.parts), op)

    def _decode(self, op: ops.Decode) -> Outcome:
        after = [self._rows.length(seq) + 1 for seq in op.seqs]
        last = [self._rows.last(seq) for seq in op.seqs]
        slots = attempt(self._dialect.decode, after, last)
        return self._lend(slots, [(seq, 1) for seq in op.seqs], op)

    def _swa_tail(self, op: ops.SwaTail) -> Outcome:
        before = self._rows.length(op.seq)
        row = (before, before + op.tokens, self._rows.last(op.seq))
        slots = attempt(self._dialect.swa_tail, *row, op.tail, op.beyond)
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
        slots = self._rows.span(op.seq, op.start, op.stop)
        swa = attempt(self._dialect.alloc_swa, len(slots))
        if swa is None:
            return Refused()
        full = self._tensor(slots)
        attempt(self._dialect.map, full, swa)
        outcome = Lent(tuple(slots), tuple(self._peers(full)))
        named = np.array(slots, dtype=np.int64)
        attempt(self._pool.stamp_swa, named, self._next_stamps(len(slots)))
        return outcome

    def _restore(self, op: ops.Restore) -> Outcome:
        tokens, copy = self._backups[op.backup]
        if self._requests is not None:
            evicted: int = copy.swa_evicted_seqlen
            slots = attempt(self._requests.restore, copy, op.seq, evicted=evicted)
            if slots is None:
                return Refused()
            del self._backups[op.backup]
            return self._restored(op, slots, evicted if self.geometry.pure_swa else 0)
        if op.tail is None:
            slots = attempt(self._dialect.extend, [0], [tokens], [-1])
        else:
            slots = attempt(self._dialect.swa_tail, 0, tokens, -1, op.tail)
        outcome = self._lend(slots, [(op.seq, tokens)], op)
        if slots is not None:
            attempt(self._pool.restore, copy, self._tensor(self._rows.slots[op.seq]))
            del self._backups[op.backup]
        return outcome

    def _restored(self, op: ops.Restore, slots: Slots, missing: int) -> Outcome:
        """A request that came back; its first ``missing`` tokens name no slot."""
        outcome = self._lend(slots[missing:].clone(), [(op.seq, len(slots) - missing)], op)
        self._rows.put_before(op.seq, missing // self.geometry.page_size)
        return outcome

    def _relocate(self, op: ops.Relocate) -> Outcome:
        """New slots, the move, and the old slots go, those without a peer alone."""
        tokens = self._rows.length(op.seq)
        slots = attempt(self._dialect.extend, [0], [tokens], [-1])
        if slots is None:
            return Refused()
        attempt(self._pool.move, slots, self._tensor(self._rows.slots[op.seq]))
        self._free_row(op.seq)
        self._rows.leave(op.seq, 0, None)
        return self._lend(slots, [(op.seq, tokens)], op)

    def _lend(self, slots: Slots | None, parts: list[tuple[int, int]], op: Op) -> Outcome:
        """Record an answer: rows grow by their parts in order, and the new tokens are stamped."""
        if slots is None:
            return Refused()
        if not isinstance(slots, torch.Tensor) or slots.is_floating_point() or slots.dim() != 1:
            said = f"answered {slots!r:.60}; expected a vector of integer slots, or None"
            raise CallRaised(Raised("TypeError", said))
        numbers = array_of(slots)
        lent: list[int] = numbers.tolist()
        outcome = Lent(tuple(lent), tuple(self._peers(slots)), self._device_slots(slots))
        at = 0
        for seq, count in parts:
            self._rows.grow(seq, lent[at : at + count])
            at += count
        if not isinstance(op, KEEPS_STAMPS):
            stamps = self._next_stamps(len(lent))
            if not self._snapshots.paused():
                attempt(self._pool.stamp, numbers, stamps)
        if isinstance(op, OVERWRITABLE) and op.overwrite:
            self._held.skip()
            overwrite(slots, SCRIBBLE)
        else:
            self._held.keep(slots, numbers)
        return outcome

    def _peers(self, slots: Slots) -> list[int]:
        if not self.geometry.slides:
            return []
        peers: list[int] = attempt(self._dialect.peers, slots).tolist()
        return peers

    def _device_slots(self, slots: Slots) -> tuple[int, ...]:
        if self._sparse is None:
            return ()
        return tuple(attempt(self._sparse.device_slots, slots).tolist())

    def _next_stamps(self, count: int) -> Numbers:
        first = self._stamps + 1
        self._stamps += count
        return np.arange(first, first + count, dtype=np.int64)

    # Ops that give back.

    def _give_back(self, op: Op) -> None:
        match op:
            case ops.Free():
                self._free(self._dialect.free, op)
                self._rows.leave(op.seq, op.start, op.stop)
            case ops.FreeSwa():
                self._free(self._dialect.free_swa, op)
                if self.geometry.pure_swa:
                    self._rows.leave_behind(op.seq, op.start, op.stop)
            case ops.FreeFull():
                self._free(self._dialect.free_full, op)
                self._rows.leave(op.seq, op.start, op.stop)
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
                if self._requests is not None:
                    attempt(self._requests.clear)
                self._rows.clear()
                self._buffers = {}
                self._held.clear()

    def _free(self, call: Callable[[Slots, Form, int], None], op: ops.PagesOp) -> None:
        size = self.geometry.page_size
        slots = self._rows.span(op.seq, op.start, op.stop)
        if op.form == "sparse":
            slots = some_of_each_page(slots, size, op.seq)
        # A restored request names the padding page for what its window had left behind, at the
        # front of its row; there is nothing to give back, and nobody does.
        missing = sum(slot < size for slot in slots) if self.geometry.pure_swa else 0
        if missing == len(slots):
            return
        tensor = self._tensor(slots[missing:])
        attempt(call, tensor, op.form, op.start * size + missing)
        if op.overwrite:
            overwrite(tensor, SCRIBBLE)

    def _recover(self, op: ops.Recover) -> None:
        rows = self._rows
        kept = rows.span(op.kept, op.kept_start, op.kept_start + op.pages)
        incoming = rows.span(op.incoming, op.incoming_start, op.incoming_start + op.pages)
        if op.locked:
            attempt(self._dialect.recover, self._tensor(kept), self._tensor(incoming))
            rows.ghosts[op.incoming] = incoming
        else:
            attempt(self._dialect.replace, self._tensor(kept))
            rows.ghosts[op.kept] = kept
            rows.take_over(op.kept, op.kept_start, incoming)
        rows.give_away(op.incoming, op.incoming_start, op.incoming_start + op.pages)

    def _retract(self, op: ops.Retract) -> None:
        """The copy is taken first; then live pages go with their peers, tombstones alone."""
        row = self._rows.slots[op.seq]
        if self._requests is not None:
            kept = attempt(self._requests.retract, op.seq, evicted=self._evicted(op.seq))
            self._backups[op.backup] = (len(row), kept)
            self._rows.leave(op.seq, 0, None)
            return
        slots = self._tensor(row)
        copy = attempt(self._pool.backup, slots)
        self._backups[op.backup] = (len(row), copy)
        self._free_row(op.seq)
        self._rows.leave(op.seq, 0, None)

    def _free_row(self, seq: int) -> None:
        """Live pages go with their peers, tombstones alone where callers tell them apart."""
        row = self._rows.slots[seq]
        for start, stop, live in self._runs(seq):
            call = self._dialect.free if live else self._dialect.free_full
            attempt(call, self._tensor(row[start:stop]), "slots", start)

    def _evicted(self, seq: int) -> int:
        """Tokens in the whole pages at the front that have no peer, or are gone."""
        size = self.geometry.page_size
        whole = self._rows.length(seq) // size
        if self.geometry.pure_swa:
            gone = self._rows.left_behind(seq)
            return next((page for page in range(whole) if page not in gone), whole) * size
        if not self.geometry.hybrid:
            return 0
        row = self._rows.slots[seq]
        first = [row[page * size : (page + 1) * size] for page in range(whole)]
        live = [any(self._peers(self._tensor(slots))) for slots in first]
        return (live.index(True) if True in live else whole) * size

    def _runs(self, seq: int) -> list[tuple[int, int, bool]]:
        """The row cut into runs of pages with and without a peer, if callers must tell them
        apart; otherwise the row whole."""
        row, size = self._rows.slots[seq], self.geometry.page_size
        if self.geometry.pure_swa:
            gone = self._rows.left_behind(seq)
            live = [page not in gone for page in range(self._rows.pages(seq))]
        elif "slots" in self.contract.live_frees and self.geometry.hybrid:
            live = [peer != 0 for peer in self._peers(self._tensor(row[::size]))]
        else:
            return [(0, len(row), True)]
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
            rows=self._rows.slots,
            ghost=self._rows.ghosts.get(op.seq, []),
            backup=self._backups.get(op.seq),
            seq=op.seq,
            other=op.other,
        )
        attempt(call)
        return Done()

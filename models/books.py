"""The books of the reference model: what every right allocator's state is after each op.

Follows ops whose answers have been judged; changes nothing by itself and judges nothing: that is
`kvcore.models.reference`. Plain sets, dicts and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvcore.models import ops
from kvcore.models.contract import Contract
from kvcore.models.geometry import Geometry
from kvcore.models.lending import Share
from kvcore.models.memory import MemoryBooks
from kvcore.models.state import ERASED, NO_PEER, UNKNOWN, Backup, Page, Row, Side


class Books:
    """The state that every right allocator agrees on, up to the choice of free pages.

    ``rows``: live sequences. ``full``, ``swa``, ``device``, ``requests``: the sides. ``detached``:
    for each full page whose peer was given up inside the open group, that SWA page (its own where
    every layer slides); until the group's end a target may still show the old entry, or already 0.
    ``device_detached``: the same of device pages. ``ghosts``: the full pages that a name gave up
    last. ``groups``: how many were begun so far. ``buffers``: device pages of each buffer on loan.
    ``last_name``: the highest sequence name used so far.

    ``owners``: the page of a row for each full page that is lent, and ``changed``: full pages whose
    owner or entries became others since somebody who keeps account looked. Both say nothing that
    the rows do not; who looks at few pages of many need not go through them all. ``usual``: there
    are full slots and perhaps SWA slots, and nothing else.
    """

    def __init__(self, geometry: Geometry, contract: Contract | None = None) -> None:
        self.geometry = geometry
        # What is asked all the time, without the way through the geometry's properties.
        self.page_size = geometry.page_size
        self.hybrid, self.sparse = geometry.hybrid, geometry.sparse
        self.usual = not (
            geometry.sparse or geometry.requests or geometry.saver or geometry.pure_swa
        )
        self.contract = contract if contract is not None else Contract()
        self.full = Side(geometry.full_pages)
        self.swa = Side(geometry.swa_pages)
        self.device = Side(geometry.device_pages)
        self.requests = Side(geometry.requests)
        self.rows: dict[int, Row] = {}
        self.backups: dict[int, Backup] = {}
        self.used: set[int] = set()
        self.last_name = 0
        self.used_backups: set[int] = set()
        self.ghosts: dict[int, tuple[int, ...]] = {}
        self.group_open = False
        self.groups = 0
        self.detached: dict[int, int] = {}
        self.device_detached: dict[int, int] = {}
        self.buffers: dict[int, tuple[int, ...]] = {}
        self.used_buffers: set[int] = set()
        self.memory = MemoryBooks()
        self.stamps = 0
        self.owners: dict[int, Page] = {}
        self.changed: set[int] = set()

    def lent_pages(self) -> Iterable[tuple[int, Page]]:
        """(sequence, page) for every page that a live row holds."""
        for seq, row in self.rows.items():
            for page in row.pages:
                if page.gone_in is None:
                    yield seq, page

    def _own(self, page: Page) -> None:
        """A row holds the page from now on, or its entries became others."""
        self.owners[page.full] = page
        self.changed.add(page.full)

    def _disown(self, full: int) -> None:
        """No row holds the full page any more."""
        self.owners.pop(full, None)
        self.changed.add(full)

    def _commit(self, seq: int, share: Share) -> None:
        self.used.add(seq)
        self.last_name = max(self.last_name, seq)
        row = self.rows.get(seq)
        if row is None:
            row = self.rows[seq] = Row()
        entries = iter(share.entries)
        if share.onto_last:
            last = row.pages[-1]
            self._stamp(last, share.onto_last, entries)
            self._own(last)
        for full, swa, mapped in share.pages:
            page = Page(full, swa)
            self.full.take(full)
            if swa:
                self.swa.take(swa)
            self._stamp(page, mapped, entries)
            row.pages.append(page)
            self._own(page)
        for number, device in share.device.items():
            self.device.take(device)
            row.pages[number].device = device
            self._own(row.pages[number])

    def _stamp(self, page: Page, mapped: list[bool], entries: Iterator[bool]) -> None:
        """New tokens in a page, one for each of ``mapped``; what is lent while the pool is paused
        holds zeros."""
        first = self.stamps + 1
        self.stamps += len(mapped)
        new: Sequence[int] = range(first, first + len(mapped))
        page.full_stamps += new
        if "kv_cache" in self.memory.paused:
            page.full_stamps[-len(mapped) :] = [ERASED] * len(mapped)
            new = [UNKNOWN] * len(mapped)
        page.swa_stamps += _where(mapped, new)
        if self.sparse:
            page.device_stamps += _where([next(entries, False) for _ in mapped], new)
        else:
            page.device_stamps += [NO_PEER] * len(mapped)

    def _fill_from_backup(self, op: ops.Restore) -> None:
        """The restored row holds what the backup held; a slot whose old or new side has no peer
        holds nothing known."""
        backup = self.backups.pop(op.backup)
        row = self.rows[op.seq]
        self.stamps -= row.tokens
        size = self.geometry.page_size
        for _ in range(0, backup.tokens - row.tokens, size):
            # Left behind before the retraction: the row remembers the tokens, and no page.
            row.pages.insert(0, Page(0, 0, [UNKNOWN] * size, [NO_PEER] * size, gone_in=0))
        at = 0
        for page in row.pages:
            for offset in range(page.tokens):
                page.full_stamps[offset] = backup.full_stamps[at]
                if page.swa_stamps[offset] != NO_PEER:
                    old = backup.swa_stamps[at]
                    page.swa_stamps[offset] = old if old != NO_PEER else UNKNOWN
                at += 1

    def _follow(self, op: ops.Op) -> None:
        EFFECTS[type(op)](self, op)

    def _give_up_named(self, op: ops.Free | ops.FreeFull) -> None:
        self._give_up(op.seq, op.start, op.stop)

    def _begin_group(self, op: ops.GroupBegin) -> None:
        self.group_open = True
        self.groups += 1

    def _end_group(self, op: ops.GroupEnd) -> None:
        self._close_group()

    def _free_device(self, op: ops.FreeDevice) -> None:
        for page in self.rows[op.seq].span(op.start, op.stop):
            self._detach_device(page, deferred=self.group_open)

    def _free_buffer(self, op: ops.FreeBuffer) -> None:
        for device in self.buffers.pop(op.buffer):
            self.device.release(device, deferred=self.group_open)

    def _reserve(self, op: ops.Reserve) -> None:
        self.memory.reserve(op)

    def _drop_region(self, op: ops.Drop) -> None:
        self.memory.drop(op.region)

    def _pause(self, op: ops.Pause) -> None:
        if self.memory.pause(op.memory) and op.memory == "kv_cache":
            self._erase()

    def _resume(self, op: ops.Resume) -> None:
        self.memory.resume(op.memory)

    def _erase(self) -> None:
        """Every row of the pool holds zeros from now on."""
        for _, page in self.lent_pages():
            page.full_stamps = [ERASED] * page.tokens
            page.swa_stamps = [UNKNOWN if s != NO_PEER else s for s in page.swa_stamps]
            page.device_stamps = [UNKNOWN if s != NO_PEER else s for s in page.device_stamps]

    def _free_swa(self, op: ops.FreeSwa) -> None:
        deferred = self.group_open and self.contract.free_swa_joins_group
        pages = self.rows[op.seq].span(op.start, op.stop)
        if not self.geometry.pure_swa:
            self._detach_all(pages, deferred=deferred)
            return
        for page in pages:
            page.gone_in = self.groups if deferred else 0
            self.full.release(page.full, deferred=deferred)
            self._disown(page.full)
            if deferred:
                self.detached[page.full] = page.full

    def _give_up(self, seq: int, start: int, stop: int | None) -> None:
        row = self.rows[seq]
        pages = row.span(start, stop)
        held = [page for page in pages if page.gone_in is None]
        self._release(held, deferred=self.group_open)
        self.ghosts[seq] = tuple([page.full for page in held])
        row.pages[start : start + len(pages)] = []
        self._close_empty(seq)

    def _close_empty(self, seq: int) -> None:
        """A row without pages is no row; its request ends."""
        row = self.rows[seq]
        if not row.pages:
            del self.rows[seq]
            if row.request:
                self.requests.release(row.request, deferred=False)

    def _detach(self, page: Page, *, deferred: bool) -> None:
        if page.swa == 0:
            return
        self.swa.release(page.swa, deferred=deferred)
        if deferred:
            self.detached[page.full] = page.swa
        page.swa = 0
        page.swa_stamps = [NO_PEER] * page.tokens
        self.changed.add(page.full)

    def _detach_device(self, page: Page, *, deferred: bool) -> None:
        if page.device == 0:
            return
        self.device.release(page.device, deferred=deferred)
        if deferred:
            self.device_detached[page.full] = page.device
        page.device = 0
        page.device_stamps = [NO_PEER] * page.tokens
        self.changed.add(page.full)

    def _release(self, pages: Sequence[Page], *, deferred: bool) -> None:
        """No row holds these pages any more, nor what they had on the other sides."""
        self._detach_all(pages, deferred=deferred)
        if self.sparse:
            for page in pages:
                self._detach_device(page, deferred=deferred)
        owners, fulls = self.owners, [page.full for page in pages]
        for full in fulls:
            owners.pop(full, None)
        self.full.release_all(fulls, deferred=deferred)
        self.changed.update(fulls)

    def _detach_all(self, pages: Sequence[Page], *, deferred: bool) -> None:
        """`_detach` of each of these pages."""
        peers: list[int] = []
        for page in pages:
            if page.swa:
                peers.append(page.swa)
                self.changed.add(page.full)
                if deferred:
                    self.detached[page.full] = page.swa
                page.swa = 0
                page.swa_stamps = [NO_PEER] * len(page.swa_stamps)
        if peers:
            self.swa.release_all(peers, deferred=deferred)

    def _close_group(self) -> None:
        self.full.settle()
        self.swa.settle()
        self.device.settle()
        self.changed.update(self.detached, self.device_detached)
        self.detached = {}
        self.device_detached = {}
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
                self._detach_device(new, deferred=deferred)
                self.full.release(new.full, deferred=deferred)
                self._disown(new.full)
            else:
                self._detach_device(old, deferred=self.group_open)
                self.full.release(old.full, deferred=self.group_open)
                self._disown(old.full)
                old.full, old.full_stamps = new.full, new.full_stamps
                old.device, old.device_stamps = new.device, new.device_stamps
            old.swa, old.swa_stamps = new.swa, new.swa_stamps
            self._own(old)
        row.pages[op.incoming_start : op.incoming_start + op.pages] = []
        self._close_empty(op.incoming)

    def _retract(self, op: ops.Retract) -> None:
        row = self.rows[op.seq]
        full: list[int] = []
        for page in row.pages:
            full += [UNKNOWN] * page.tokens if page.gone else page.full_stamps
        swa: list[int] = []
        for page in row.pages:
            # Given up inside this group, the old entry may still be seen and copied, or not.
            gone = UNKNOWN if page.full in self.detached else NO_PEER
            swa += [stamp if stamp != NO_PEER else gone for stamp in page.swa_stamps]
        evicted = 0
        if self.geometry.slides:
            evicted = row.evicted(self.geometry.page_size, pure_swa=self.geometry.pure_swa)
        self.backups[op.backup] = Backup(full, swa, evicted)
        self.used_backups.add(op.backup)
        self._give_up(op.seq, 0, None)

    def _clear(self, op: ops.Clear) -> None:
        for seq, row in self.rows.items():
            self.ghosts[seq] = tuple(page.full for page in row.pages if not page.gone)
        self.rows = {}
        self.changed.update(self.owners)
        self.owners.clear()
        self._close_group()
        self.buffers = {}
        for side in (self.full, self.swa, self.device, self.requests):
            side.reset()


def _where(mapped: Sequence[bool], stamps: Sequence[int]) -> Iterable[int]:
    """The stamps of the tokens that are mapped, `NO_PEER` for the others."""
    if all(mapped):
        return stamps
    return [stamp if there else NO_PEER for there, stamp in zip(mapped, stamps, strict=True)]


EFFECTS: dict[type[ops.Op], Callable[[Books, Any], None]] = {
    ops.Free: Books._give_up_named,
    ops.FreeSwa: Books._free_swa,
    ops.FreeFull: Books._give_up_named,
    ops.GroupBegin: Books._begin_group,
    ops.GroupEnd: Books._end_group,
    ops.Recover: Books._recover,
    ops.Retract: Books._retract,
    ops.Clear: Books._clear,
    ops.FreeDevice: Books._free_device,
    ops.FreeBuffer: Books._free_buffer,
    ops.Reserve: Books._reserve,
    ops.Drop: Books._drop_region,
    ops.Pause: Books._pause,
    ops.Resume: Books._resume,
}
"""What follows from each op whose answer says nothing."""

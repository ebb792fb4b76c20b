"""Judges the slots of one answer, row by row, against the layout that semantics.md promises.

First the rest of the row's last page, then whole new pages, each from its first slot; every new
page free until now; peers on an SWA page lent by the same call, or none; the same for device
entries. Changes nothing: the reference model commits what comes out of here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvcore.models.geometry import Geometry
from kvcore.models.state import Page, Row, Side
from kvcore.models.violation import Clause, some


class Share(msgspec.Struct):
    """What one row gains: ``onto_last`` tokens into its last page (with or without peer each), then
    ``pages`` as (full page, SWA page or 0, for each token whether it is mapped). ``device``: the
    device page of each page of the row that gains one, by its place in the row; ``entries``: for
    each new token whether it has a device entry."""

    onto_last: list[bool] = []
    pages: list[tuple[int, int, list[bool]]] = []
    device: dict[int, int] = {}
    entries: list[bool] = []


class LendingJudge:
    """Follows the slots of one answer and collects every broken clause. ``evicted``: full and SWA
    pages that the call itself made free before it lent any."""

    def __init__(
        self,
        geometry: Geometry,
        full: Side,
        swa: Side,
        device: Side,
        *,
        evicted: tuple[Collection[int], Collection[int]] = ((), ()),
    ) -> None:
        self.geometry = geometry
        self.sides = {"full": full, "swa": swa, "device": device}
        self.clauses: list[Clause] = []
        self._evicted = {"full": evicted[0], "swa": evicted[1], "device": ()}
        self._taken: dict[str, set[int]] = {"full": set(), "swa": set(), "device": set()}

    def blame(
        self,
        law: str,
        expected: str,
        seen: str,
        *,
        full: tuple[int, ...] = (),
        swa: tuple[int, ...] = (),
    ) -> None:
        """Note a broken clause."""
        self.clauses.append(Clause(law, expected, seen, full, swa))

    def share(self, row: Row, slots: list[int], peers: list[int], mapped: list[bool]) -> Share:
        """Judge the slots of one row. ``peers`` and ``mapped`` run beside ``slots``: the SWA slot
        seen for each (0 if none), and whether the call owes it one."""
        size = self.geometry.page_size
        got = Share()
        room = -row.tokens % size
        if room:
            got.onto_last = mapped[:room]
            for offset, owed in enumerate(got.onto_last, size - room):
                at = offset - size + room
                self._continue_page(row.pages[-1], offset, slots[at], peers[at], owed)
        for start in range(room, len(slots), size):
            chunk = slice(start, start + size)
            got.pages.append(self._new_page(slots[chunk], peers[chunk], mapped[chunk]))
        return got

    def _continue_page(self, last: Page, offset: int, slot: int, peer: int, mapped: bool) -> None:
        wanted = last.full * self.geometry.page_size + offset
        if slot != wanted:
            self.blame(
                "layout",
                f"slot {wanted}, the next one of full page {last.full}",
                f"slot {slot}",
                full=(last.full,),
            )
        wanted_peer = last.swa * self.geometry.page_size + offset if mapped else 0
        if peer != wanted_peer:
            self.blame(
                "L4",
                f"slot {slot} mapped to {wanted_peer}",
                f"mapped to {peer}",
                full=(last.full,),
                swa=(last.swa,) if last.swa else (),
            )

    def _new_page(
        self, slots: list[int], peers: list[int], mapped: list[bool]
    ) -> tuple[int, int, list[bool]]:
        size = self.geometry.page_size
        full = slots[0] // size
        if slots != list(range(full * size, full * size + len(slots))):
            self.blame(
                "layout", f"the slots of full page {full} in order", str(slots), full=(full,)
            )
        self.take(full, "full")
        if not any(mapped):
            if any(peers):
                swa = tuple({peer // size for peer in peers if peer})
                self.blame(
                    "L4",
                    f"full page {full} lent without peers",
                    f"peers {peers}",
                    full=(full,),
                    swa=swa,
                )
            return full, 0, mapped
        return full, self.peer_of(full, peers, mapped), mapped

    def peer_of(self, full: int, peers: list[int], mapped: list[bool]) -> int:
        """The SWA page that full page ``full`` was joined to, judged slot by slot from the page's
        first slot on; slots that are not ``mapped`` have no peer."""
        size = self.geometry.page_size
        swa = peers[0] // size
        wanted = [swa * size + i if owed else 0 for i, owed in enumerate(mapped)]
        if peers != wanted:
            self.blame(
                "L4",
                f"full page {full} mapped onto one SWA page, slot by slot: {wanted}",
                str(peers),
                full=(full,),
                swa=(swa,),
            )
        self.take(swa, "swa")
        return swa

    def entries(self, row: Row, seen: list[int], *, owed: bool, share: Share) -> None:
        """Judge the device slots ``seen`` of the new tokens of one row into ``share``; with
        ``owed`` every token that completes an entry has one."""
        size, each = self.geometry.page_size, self.geometry.compress
        entries = self.geometry.device_page_size
        before = row.tokens
        for index, slot in enumerate(seen):
            number, offset = divmod(before + index, size)
            has_entry = owed and (offset + 1) % each == 0
            share.entries.append(has_entry)
            wanted = 0
            if has_entry:
                page = row.pages[number].device if number < len(row.pages) else 0
                page = page or share.device.get(number, 0)
                if page == 0:
                    page = share.device[number] = slot // entries
                    self.take(page, "device")
                wanted = page * entries + offset // each
            if slot != wanted:
                self.blame(
                    "L4", f"token {before + index} mapped to device slot {wanted}", f"{slot}"
                )

    def take(self, page: int, name: str) -> None:
        """Note that the call lent this page of a side, and blame it if it could not."""
        side, taken = self.sides[name], self._taken[name]
        full = (page,) if name == "full" else ()
        swa = (page,) if name == "swa" else ()
        if not 1 <= page <= side.total:
            law = "bounds" if name == "full" or page else "L4"
            expected = f"a {name} page of 1..{side.total}"
            self.blame(law, expected, f"page {page} was lent", full=full, swa=swa)
        elif page in taken:
            expected = f"every {name} page lent once"
            self.blame("L2", expected, f"{page} twice in one call", full=full, swa=swa)
        elif page in side.pending:
            expected = f"{name} pages of an open group wait for its end"
            self.blame("L6", expected, f"page {page} was lent", full=full, swa=swa)
        elif page not in side.free and page not in self._evicted[name]:
            law = "L1" if name == "full" else "L4"
            expected = f"a free {name} page (free: {some(side.free)})"
            self.blame(law, expected, f"page {page}, which is in use", full=full, swa=swa)
        taken.add(page)

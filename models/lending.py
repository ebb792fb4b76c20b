"""Judges the slots of one answer, row by row, against the layout that semantics.md promises.

First the rest of the row's last page, then whole new pages, each from its first slot; every new
page free until now; peers on an SWA page lent by the same call, or none. Changes nothing: the
reference model commits what comes out of here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.models.geometry import Geometry
from kvcore.models.state import Row, Side
from kvcore.models.violation import Clause, some


@dataclass(slots=True)
class Share:
    """What one row gains: ``onto_last`` tokens into its last page (with or without peer each), then
    ``pages`` as (full page, SWA page or 0, tokens, mapped tokens from the end)."""

    onto_last: list[bool] = field(default_factory=list)
    pages: list[tuple[int, int, list[bool]]] = field(default_factory=list)


class LendingJudge:
    """Follows the slots of one answer and collects every broken clause."""

    def __init__(self, geometry: Geometry, full: Side, swa: Side) -> None:
        self.geometry = geometry
        self.full = full
        self.swa = swa
        self.clauses: list[Clause] = []
        self._taken_full: set[int] = set()
        self._taken_swa: set[int] = set()

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
        for index, slot in enumerate(slots[:room]):
            self._continue_page(row, row.tokens + index, slot, peers[index], mapped[index])
            got.onto_last.append(mapped[index])
        for start in range(room, len(slots), size):
            chunk = slice(start, start + size)
            got.pages.append(self._new_page(slots[chunk], peers[chunk], mapped[chunk]))
        return got

    def _continue_page(self, row: Row, position: int, slot: int, peer: int, mapped: bool) -> None:
        last = row.pages[-1]
        offset = position % self.geometry.page_size
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
        self._take(full, self.full, self._taken_full, "full")
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
        return full, self.peer_of(full, peers), mapped

    def peer_of(self, full: int, peers: list[int]) -> int:
        """The SWA page that full page ``full`` was joined to, judged slot by slot from the page's
        first slot on."""
        size = self.geometry.page_size
        swa = peers[0] // size
        wanted = list(range(swa * size, swa * size + len(peers)))
        if peers != wanted:
            self.blame(
                "L4",
                f"full page {full} mapped onto one SWA page, slot by slot: {wanted}",
                str(peers),
                full=(full,),
                swa=(swa,),
            )
        self._take(swa, self.swa, self._taken_swa, "swa")
        return swa

    def _take(self, page: int, side: Side, taken: set[int], name: str) -> None:
        pages = {"full": (page,)} if name == "full" else {"swa": (page,)}
        if not 1 <= page <= side.total:
            law = "L4" if name == "swa" and page == 0 else "bounds"
            self.blame(law, f"a {name} page of 1..{side.total}", f"page {page} was lent", **pages)
        elif page in taken:
            self.blame("L2", f"every {name} page lent once", f"{page} twice in one call", **pages)
        elif page in side.pending:
            self.blame(
                "L6",
                f"{name} pages of an open group wait for its end",
                f"page {page} was lent",
                **pages,
            )
        elif page not in side.free:
            law = "L4" if name == "swa" else "L1"
            self.blame(
                law,
                f"a free {name} page (free: {some(side.free)})",
                f"page {page}, which is in use",
                **pages,
            )
        taken.add(page)

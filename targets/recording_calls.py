"""What the calls of a recording mean: calls on slots become ops on named rows.

`alloc` starts a row; a batch continues the row whose last token it names, or starts one; frees of
any slots become ops on rows and ranges of pages, several if the slots lie apart. The writes by
which prefix caches recover a tombstone, and the allocations and writes of a load-back, become the
ops of that name. What has no op is never dropped in silence: it gets a note, and where what follows
would not be what happened, the trace ends. Leaves out which page is chosen, which is the target's
business, and whether the caller overwrites its tensors later (law L8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from kvcore import errors
from kvcore.models import Contract, Done, Lent, Outcome, Refused, ops
from kvcore.models.ops import OP_KINDS, Form, Op
from kvcore.models.violation import some
from kvcore.targets.recording_batches import Batch, Splits, batch_of
from kvcore.targets.recording_raw import Call, Ending, RawCall, RawHeader, Side
from kvcore.targets.recording_rows import Rows, SameRow, Stop

OUR_ERRORS = frozenset(vars(errors))
"""Names of the errors with which kvcore refuses a call; nothing changed then."""


UNANSWERED: dict[Ending, str] = {
    "interrupted": "it was interrupted, and its answer is not on file",
    "unreadable": "its answer, or the mapping of it, could not be written down",
}
"""Endings after which nobody knows who holds what."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the trace does not say. ``call`` counts from 1, 0 is the beginning."""

    call: int
    text: str


class Translator:
    """Takes the calls in order.

    ``loose``: SWA pages that were lent alone, with the call. ``unpaired``: SWA pages whose mapping
    was cleared, with the full page, the call, and how many ops there were then. ``awaited``: full
    pages that a recovery gave up and whose free is yet to come.
    """

    def __init__(self, header: RawHeader, splits: Splits) -> None:
        contract = Contract(
            ops=frozenset(OP_KINDS),
            full_side_joins_group=header.full_side_joins_group,
            free_swa_joins_group=header.free_swa_joins_group,
        )
        self.header = header
        self.rows = Rows(header.geometry, contract)
        self.notes: list[Note] = []
        self.wanted_split: tuple[int, int] | None = None
        self._splits = splits
        self._lenders: dict[int, tuple[int, int]] = {}
        self._loose: dict[int, int] = {}
        self._unpaired: dict[int, tuple[int, int, int]] = {}
        self._awaited: dict[int, int] = {}
        self._early = 0
        self._size = header.geometry.page_size

    def note(self, call: int, text: str) -> None:
        """Tell something that the trace does not say."""
        self.notes.append(Note(call, text))

    def take(self, call: RawCall, *, last: bool) -> bool:
        """Translate one call; False if the trace ends there."""
        before = len(self.rows.ops)
        # One of its own: the calls may be translated again.
        call = replace(call)
        try:
            if call.ending == "raised":
                return self._raised(call)
            if not call.readable:
                raise Stop("an argument was no integer, nor a tensor of such")
            unanswered = UNANSWERED.get(call.ending)
            if unanswered is not None:
                call.ending, call.slots, call.peers = "unknown", [], []
                self._dispatch(call)
                raise Stop(unanswered)
            self._dispatch(call)
            if last and call.ending == "unknown" and len(self.rows.ops) > before:
                self.note(call.number, f"the process ended in {self._said(call)} or right after it")
        except Stop as stop:
            if isinstance(stop, SameRow):
                lender, place = self._lenders[stop.page]
                if place not in self._splits.get(lender, ()):
                    self.wanted_split = (lender, place)
            if stop.keep is not None:
                del self.rows.ops[stop.keep :]
            kept = "with" if len(self.rows.ops) > before else "before"
            self.note(call.number, f"{self._said(call)}: {stop}; the trace ends {kept} it")
            return False
        return True

    def finish(self) -> None:
        """The recording ended: tell what is open."""
        for page, call in self._awaited.items():
            self.note(
                call, f"a recovery whose incoming full page {page} was not freed; the op does"
            )
        for swa, (page, call, _) in self._unpaired.items():
            self.note(call, f"no op: full page {page} lost its peer, SWA page {swa}, to nobody")
        for swa, call in self._loose.items():
            self.note(call, f"no op: SWA page {swa} was lent alone, and not mapped")

    def _said(self, call: RawCall) -> str:
        side = "" if call.side is Side.WHOLE else f" on the {call.side.name} side"
        return f"{call.call.name.lower()}{side}"

    def _raised(self, call: RawCall) -> bool:
        """A call that raised: the last op if it was legal. Otherwise it changed nothing, which is
        to be trusted of kvcore only; so did every call that kvcore refused with an error of its
        own."""
        goes_on = self.header.errors_change_nothing
        text = f"{self._said(call)} raised {call.error}"
        before, legal = len(self.rows.ops), False
        if call.readable and not (goes_on and call.error.partition(":")[0] in OUR_ERRORS):
            call.ending = "unknown"
            try:
                self._dispatch(call)
                legal = len(self.rows.ops) > before
            except Stop:
                goes_on = goes_on and len(self.rows.ops) == before
        if legal:
            self.note(call.number, f"{text}; the trace ends with it")
            return False
        self.note(call.number, f"{text}; no op" + ("" if goes_on else ", and the trace ends there"))
        return goes_on

    def _dispatch(self, call: RawCall) -> None:
        if call.side is Side.WHOLE:
            _ON_THE_WHOLE[call.call](self, call)
        elif call.side is Side.FULL:
            self._on_the_full_side(call)
        else:
            self._on_the_swa_side(call)

    # Calls that lend.

    def _lend(self, call: RawCall, op: Op, slots: list[int], peers: list[int]) -> None:
        """An op that lends, with its answer; without one the process died in it."""
        if self._early and self.rows.model.group_open:
            raise Stop(
                f"it lends inside a group in which call {self._early} gave full slots back at "
                "once, for which there is no op"
            )
        if call.ending == "unknown":
            self.rows.require_legal(op)
            self.rows.ops.append(op)
            return
        outcome: Outcome = Refused()
        if call.ending == "lent":
            for at, slot in enumerate(call.slots):
                if slot % self._size == 0:
                    self._lenders[slot // self._size] = (call.number, at)
            outcome = Lent(tuple(slots), tuple(peers) if self.header.geometry.hybrid else ())
        elif self._held_aside() and not self.rows.model.must_refuse(op):
            self.note(
                call.number,
                f"{self._said(call)} was refused while slots without an op were on loan: no op",
            )
            return
        self.rows.do(op, outcome)

    def _cuts(self, call: RawCall) -> set[int]:
        return self._splits.get(call.number, set())

    def _held_aside(self) -> bool:
        return bool(self._loose or self._unpaired or self._awaited)

    def _alloc(self, call: RawCall) -> None:
        pages, rest = divmod(call.scalar, self._size)
        if rest:
            raise Stop(f"{call.scalar} slots are no whole pages")
        if pages == 0:
            return
        cuts = [0, *sorted(at // self._size for at in self._cuts(call)), pages]
        counts = [stop - start for start, stop in pairwise(cuts) if stop > start]
        op: Op = ops.Alloc(self.rows.new_name(), pages)
        if len(counts) > 1:
            parts = [(self.rows.new_name(), count * self._size) for count in counts]
            op = ops.Extend(tuple(parts))
        self._lend(call, op, call.slots, call.peers)

    def _extend(self, call: RawCall) -> None:
        before, after, last = (vector or [] for vector in call.vectors)
        batch = self._batch(call, before, after, last)
        if batch.parts:
            self._lend(call, ops.Extend(tuple(batch.parts)), batch.slots, batch.peers)

    def _decode(self, call: RawCall) -> None:
        after, last = (vector or [] for vector in call.vectors)
        batch = self._batch(call, [length - 1 for length in after], after, last)
        if not batch.parts:
            return
        op: Op = ops.Decode(tuple(seq for seq, _ in batch.parts))
        if batch.new:
            op = ops.Extend(tuple(batch.parts))
        self._lend(call, op, batch.slots, batch.peers)

    def _batch(self, call: RawCall, before: list[int], after: list[int], last: list[int]) -> Batch:
        batch = batch_of(self.rows, call, (before, after, last), self._cuts(call))
        if batch.again:
            self.note(
                call.number,
                f"{self._said(call)} lent {batch.again} slots again inside pages that their rows "
                "hold; the op has the others only",
            )
        return batch

    def _swa_tail(self, call: RawCall) -> None:
        before, after, last, tail_end = (vector or [] for vector in call.vectors)
        batch = batch_of(self.rows, call, (before, after, last), ())
        if len(after) != 1 or batch.again:
            raise Stop("a tail of one row that lends no slot again is what there is an op for")
        if not batch.parts:
            return
        beyond = 0 if tail_end == [-1] else after[0] - tail_end[0]
        (seq, tokens), *_ = batch.parts
        op = ops.SwaTail(seq, tokens, call.scalar, beyond)
        self._lend(call, op, batch.slots, batch.peers)

    # Calls that give back.

    def _free(self, call: RawCall) -> None:
        self._give_back(call, ops.Free, "slots")

    def _free_swa(self, call: RawCall) -> None:
        self._give_back(call, ops.FreeSwa, "slots")

    def _free_full(self, call: RawCall) -> None:
        # Where every layer slides it releases nothing.
        if not self.header.geometry.pure_swa:
            self._give_back(call, self._full_alone(), "slots")

    def _full_alone(self) -> type[ops.PagesOp]:
        """How the full side alone is freed: a single pool has nothing else."""
        return ops.FreeFull if self.header.geometry.hybrid else ops.Free

    def _free_segment(self, call: RawCall) -> None:
        self._give_back(call, ops.Free, "segment")

    def _free_swa_segment(self, call: RawCall) -> None:
        self._give_back(call, ops.FreeSwa, "segment")

    def _free_full_segment(self, call: RawCall) -> None:
        if not self.header.geometry.pure_swa:
            self._give_back(call, self._full_alone(), "segment")

    def _free_segments(self, call: RawCall) -> None:
        self._give_back(call, ops.Free, "segments")

    def _free_swa_segments(self, call: RawCall) -> None:
        self._give_back(call, ops.FreeSwa, "segments")

    def _free_full_segments(self, call: RawCall) -> None:
        if not self.header.geometry.pure_swa:
            self._give_back(call, self._full_alone(), "segments")

    def _free_pages(self, call: RawCall) -> None:
        call.vectors = [[page * self._size for page in vector or []] for vector in call.vectors]
        self._give_back(call, ops.Free, "slots")

    def _give_back(self, call: RawCall, kind: type[ops.PagesOp], form: Form) -> None:
        """A free of any slots: an op for each run of pages."""
        slots = [slot for vector in call.vectors for slot in vector or []]
        if self.header.geometry.pure_swa:
            # What a window left behind is named by padding.
            slots = [slot for slot in slots if slot >= self._size]
        pages = self._pages_to_free(call, slots, kind)
        runs = self.rows.runs(pages)
        form = "segment" if form == "segments" and len(runs) > 1 else form
        named = Counter(slot // self._size for slot in set(slots))
        for run in runs:
            tokens = self.rows.tokens(run)
            some_only = sum(named[page] for page in run.pages) < tokens
            # Of a page of which any slot is named all goes; there is no such form of `free_full`.
            sparse = some_only and form == "slots" and kind is not ops.FreeFull
            op = kind(run.seq, run.start, run.end, "sparse" if sparse else form)
            self.rows.free(op, run)

    def _pages_to_free(self, call: RawCall, slots: list[int], kind: type[ops.PagesOp]) -> list[int]:
        """The pages that a free names, each once, without those of which it is no news."""
        pages = list(dict.fromkeys(slot // self._size for slot in slots))
        if kind is ops.FreeFull or call.side is Side.FULL:
            pages = [page for page in pages if self._awaited.pop(page, None) is None]
        again = [page for page in pages if self.rows.named_again(page)]
        if again:
            self.note(
                call.number,
                f"{self._said(call)} names full pages {some(again)} again in one group; no op",
            )
            pages = [page for page in pages if page not in again]
        for page, cleared, kept in self._unpaired.values():
            if page in pages:
                raise Stop(
                    f"call {cleared} took the peer of full page {page} away, to nobody", kept
                )
        return pages

    # Groups, and the pool as a whole.

    def _group_begin(self, call: RawCall) -> None:
        self.rows.do(ops.GroupBegin(), Done())

    def _group_end(self, call: RawCall) -> None:
        self.rows.do(ops.GroupEnd(), Done())
        self._early = 0

    def _clear(self, call: RawCall) -> None:
        self.rows.clear()
        self._loose, self._unpaired, self._awaited, self._early = {}, {}, {}, 0

    def _resize(self, call: RawCall) -> None:
        raise Stop("a trace has one geometry")

    def _restore(self, call: RawCall) -> None:
        raise Stop("an allocation was rolled back, for which there is no op")

    # The mapping.

    def _map(self, call: RawCall) -> None:
        """Fresh SWA pages are a load-back; those of another full page a recovery."""
        loads: dict[int, int] = {}
        moves: list[tuple[int, int]] = []
        for full, swa in self._page_pairs(call):
            source = self._unpaired[swa][0] if swa in self._unpaired else None
            if source is None:
                source = self.rows.owner_of_peer(swa)
            if swa in self._loose:
                loads[full] = swa
            elif source is None:
                raise Stop(f"SWA page {swa} is on loan by no call of this recording")
            elif source != full:
                moves.append((full, source))
            self._unpaired.pop(swa, None)
        for run in self.rows.runs(loads):
            self.rows.load_back_swa(run, [loads[page] for page in run.pages])
        for swa in loads.values():
            del self._loose[swa]
        self._move(moves)
        self._awaited |= {incoming: call.number for _, incoming in moves}

    def _unmap(self, call: RawCall) -> None:
        """Cleared entries are for somebody else to take over."""
        for full in dict.fromkeys(slot // self._size for slot in call.vectors[0] or []):
            page = self.rows.page(full)
            if full in self._awaited:
                continue
            if page is None:
                raise Stop(f"full page {full} is on loan by no call of this recording")
            if page.swa:
                self._unpaired[page.swa] = (full, call.number, len(self.rows.ops))

    def _recover(self, call: RawCall) -> None:
        self._move(self._page_pairs(call))

    def _page_pairs(self, call: RawCall) -> list[tuple[int, int]]:
        first, second = (vector or [] for vector in call.vectors)
        if len(first) != len(second):
            raise Stop(f"{len(first)} slots beside {len(second)}")
        size = self._size
        pairs = [(a // size, b // size) for a, b in zip(first, second, strict=True)]
        return list(dict.fromkeys(pairs))

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Peers move: (kept, incoming) full pages, run by run."""
        places = {page: run for run in self.rows.runs(sum(moves, ())) for page in run.pages}

        def place(page: int) -> tuple[int, int]:
            run = places[page]
            return run.seq, run.start + run.pages.index(page)

        joined: list[tuple[tuple[int, int], tuple[int, int], list[int]]] = []
        for kept, incoming in sorted(moves, key=lambda move: place(move[1])):
            (seq, at), (other, start) = place(kept), place(incoming)
            if seq == other:
                raise SameRow(kept if at > start else incoming)
            if joined:
                (row, first), (source, begin), pages = joined[-1]
                n = len(pages)
                if (row, first + n, source, begin + n) == (seq, at, other, start):
                    pages.append(incoming)
                    continue
            joined.append(((seq, at), (other, start), [incoming]))
        # The last run of a row first, so that the others stay where they are.
        for (seq, at), (other, start), pages in reversed(joined):
            self.rows.recover(seq, at, other, start, pages)

    # Calls on a side.

    def _on_the_full_side(self, call: RawCall) -> None:
        """A load-back's full slots, and frees of full slots alone."""
        if call.call is Call.ALLOC:
            self._load_back(call)
        elif call.call in FULL_FREES:
            kind = ops.FreeFull if self.header.frees_full else ops.Free
            form: Form = "segment" if call.call is Call.FREE_SEGMENT else "slots"
            if call.call is Call.FREE_PAGES:
                call.vectors = [[p * self._size for p in vector or []] for vector in call.vectors]
            self._require_tombstones(call)
            before = len(self.rows.ops)
            self._give_back(call, kind, form)
            at_once = len(self.rows.ops) > before and not self.header.full_side_joins_group
            if at_once and self.rows.model.group_open:
                self._early = self._early or call.number
        else:
            raise Stop("there is no op for it")

    def _load_back(self, call: RawCall, *, swa: bool = False) -> None:
        pages, rest = divmod(call.scalar, self._size)
        if rest:
            raise Stop(f"{call.scalar} slots are no whole pages")
        if pages:
            op = ops.LoadBack(self.rows.new_name(), pages, pages if swa else 0)
            self._lend(call, op, call.slots, [0] * len(call.slots))

    def _require_tombstones(self, call: RawCall) -> None:
        for slot in call.vectors[0] or []:
            page = self.rows.page(slot // self._size)
            if page is not None and page.swa and slot // self._size not in self._awaited:
                raise Stop(f"full page {page.full} was freed while it had a peer")

    def _on_the_swa_side(self, call: RawCall) -> None:
        """SWA slots of a load-back: an op once they are mapped, or if they were refused."""
        if self.header.geometry.pure_swa:
            raise Stop("there is no op for it where every layer slides")
        if call.call is Call.ALLOC:
            if call.ending == "refused":
                self._load_back(call, swa=True)
            pages = dict.fromkeys(slot // self._size for slot in call.slots)
            self._loose |= dict.fromkeys(pages, call.number)
        elif call.call in FULL_FREES:
            self._return_loose(call)
        else:
            raise Stop("there is no op for it")

    def _return_loose(self, call: RawCall) -> None:
        unit = 1 if call.call is Call.FREE_PAGES else self._size
        pages = list(dict.fromkeys(slot // unit for slot in call.vectors[0] or []))
        if unknown := [page for page in pages if page not in self._loose]:
            raise Stop(f"SWA pages {some(unknown)} were freed that were not lent alone")
        for page in pages:
            del self._loose[page]
        self.note(call.number, f"{self._said(call)}: SWA slots were lent alone and returned; no op")


FULL_FREES = (Call.FREE, Call.FREE_FULL, Call.FREE_SEGMENT, Call.FREE_PAGES)
"""Frees on a side that have a meaning of their own."""

_ON_THE_WHOLE: dict[Call, Callable[[Translator, RawCall], None]] = {
    Call.ALLOC: Translator._alloc,
    Call.EXTEND: Translator._extend,
    Call.DECODE: Translator._decode,
    Call.SWA_TAIL: Translator._swa_tail,
    Call.FREE: Translator._free,
    Call.FREE_SWA: Translator._free_swa,
    Call.FREE_FULL: Translator._free_full,
    Call.FREE_SEGMENT: Translator._free_segment,
    Call.FREE_SWA_SEGMENT: Translator._free_swa_segment,
    Call.FREE_FULL_SEGMENT: Translator._free_full_segment,
    Call.FREE_SEGMENTS: Translator._free_segments,
    Call.FREE_SWA_SEGMENTS: Translator._free_swa_segments,
    Call.FREE_FULL_SEGMENTS: Translator._free_full_segments,
    Call.FREE_PAGES: Translator._free_pages,
    Call.GROUP_BEGIN: Translator._group_begin,
    Call.GROUP_END: Translator._group_end,
    Call.MAP: Translator._map,
    Call.UNMAP: Translator._unmap,
    Call.RECOVER: Translator._recover,
    Call.CLEAR: Translator._clear,
    Call.RESIZE: Translator._resize,
    Call.RESTORE: Translator._restore,
}

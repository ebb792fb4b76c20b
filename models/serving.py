"""The accepting reference model of a scheduler over a prefix cache and a hybrid allocator.

It foretells everything but two choices: which free page is lent, and which evictable page is
evicted; these it judges and follows. Pages are those of the allocators' model, so the laws of the
pools hold it against a target unchanged. Leaves out the comparison with the target's tree and
counters: that is the laws' business (`kvcore.invariants`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcore.models import ops, request_ops, serving_closing
from kvcore.models.evictions import EvictionJudge
from kvcore.models.lending import LendingJudge, Share
from kvcore.models.mismatch import Mismatch
from kvcore.models.outcomes import Done, Outcome, Refused, Served
from kvcore.models.prefix_answers import Cached, judge_prefix
from kvcore.models.prefix_tree import TreePage
from kvcore.models.request_state import Copy, RequestTokens, Running
from kvcore.models.serving_books import Evictions, ServingBooks
from kvcore.models.serving_rules import Demand, demand, lacks, prefilled, why_not
from kvcore.models.state import NO_PEER, UNKNOWN, Page, Row
from kvcore.models.texts import cut
from kvcore.models.violation import Clause

LENDING = (
    request_ops.Admit
    | request_ops.Prefill
    | request_ops.DecodeStep
    | request_ops.Speculate
    | request_ops.ResumeRequest
    | request_ops.LoadPrefix
)
"""Ops that lend slots, or are refused."""


@dataclass(slots=True)
class Growth:
    """Tokens ``[start, stop)`` that join ``pages``: those from ``mapped_from`` on have a peer.
    ``tokens``: whose they are, None if their KV is still to come."""

    pages: list[Page]
    start: int
    stop: int
    mapped_from: int = 0
    tokens: RequestTokens | None = None


class ServingModel(ServingBooks):
    """The judge of request-level programs. Its state is that of `ServingBooks`."""

    def why_not(self, op: ops.Op) -> str | None:
        """The reason why ``op`` is not allowed now, or None."""
        return why_not(self, op)

    def allows(self, op: ops.Op) -> bool:
        """Whether the contract lets a caller make this call now."""
        return why_not(self, op) is None

    def must_refuse(self, op: ops.Op) -> bool:
        """Whether there is too little room for ``op``, all that can be evicted counted."""
        return lacks(self, demand(self, op))

    def closing_ops(self) -> Iterator[ops.Op]:
        """Ops that give everything back; follow each one before taking the next."""
        return serving_closing.closing_ops(self)

    def probing_ops(self) -> Iterator[ops.Op]:
        """Ops that lend all that there is, once everything was given back; those that are not
        allowed are to be left out, and each other one to be followed before taking the next."""
        return serving_closing.probing_ops(self)

    def accept(self, op: ops.Op, outcome: Outcome) -> None:
        """Follow ``outcome``; raises `Mismatch` if no right target answers so."""
        self._judge_error(op, outcome)
        if isinstance(op, ops.GroupBegin | ops.GroupEnd):
            if not isinstance(outcome, Done):
                self._reject("layout", f"{op.kind} answers nothing", str(outcome))
            self._follow(op)
        elif isinstance(op, LENDING):
            self._accept_lending(op, outcome)
        elif not isinstance(outcome, Served):
            self._reject("layout", f"{op.kind} done", str(outcome))
        else:
            self._accept_done(op, outcome)

    # Ops that lend slots.

    def _accept_lending(self, op: ops.Op, outcome: Outcome) -> None:
        need = demand(self, op)
        if not self._judge_fit(op, outcome, need):
            return
        assert isinstance(outcome, Served)
        evicting = EvictionJudge(self, outcome)
        evictions = evicting.forced(
            max(0, need.full - len(self.full.free)),
            max(0, need.swa - len(self.swa.free)),
            need.path,
        )
        judge = LendingJudge(
            self.geometry,
            self.full,
            self.swa,
            self.device,
            evicted=(evictions.full, evictions.swa),
        )
        judge.clauses += evicting.clauses
        match op:
            case request_ops.Admit() | request_ops.ResumeRequest():
                self._accept_start(op, outcome, need, judge, evictions)
            case request_ops.LoadPrefix():
                self._accept_load(op, outcome, judge, evictions)
            case _:
                self._accept_growth(op, outcome, judge, evictions)

    def _judge_fit(self, op: ops.Op, outcome: Outcome, need: Demand) -> bool:
        """Whether slots were lent, and rightly so (law L7)."""
        short = lacks(self, need)
        if isinstance(outcome, Refused):
            if not short:
                self._reject("L7", f"{_said(need)} lent, since {self._space(need)}", "None")
            return False
        if short:
            self._reject("L7", f"None: {_said(need)} wanted, {self._space(need)}", "slots")
        if not isinstance(outcome, Served):
            self._reject("layout", f"{op.kind} answers slots", str(outcome))
        return True

    def _space(self, need: Demand) -> str:
        full, swa = self.room_beside(need.path)
        said = f"{full} full and {swa} SWA pages are free"
        said += "" if self.group_open else " or evictable"
        return said + f", {len(self.requests.free)} request rows"

    def _accept_start(
        self,
        op: request_ops.Admit | request_ops.ResumeRequest,
        served: Served,
        need: Demand,
        judge: LendingJudge,
        evictions: Evictions,
    ) -> None:
        tokens = self.newcomer(op) if isinstance(op, request_ops.Admit) else None
        tokens = tokens or self.waiting[op.req].tokens
        path, stop, cursor = list(need.path), need.stop, need.cursor
        if served.request not in self.requests.free:
            judge.blame("L1", "a free row of the request pool", f"row {served.request}")
        # What the call itself evicted is gone when the answer is read.
        bare = {id(node) for node in evictions.stripped}
        cached = [self._cached(node.page, node, bare=id(node) in bare) for node in path]
        judge_prefix(served, cached, judge, self.geometry.page_size)
        start = len(path) * self.geometry.page_size
        growth = Growth([], start, stop, max(start, cursor), tokens)
        shares = self._judge_slots(op, served, [growth], judge)
        self._evict(evictions)
        running = Running(tokens, stop, path, start, stop, cursor)
        self._start(op.req, running, served.request)
        self.waiting.pop(op.req, None)
        growth.pages = self.rows[op.req].pages
        self._gain(growth, shares[0])

    def _cached(self, page: Page, node: TreePage | None, *, bare: bool = False) -> Cached:
        """A page as an answer must show it; ``node`` as long as it was cached before the call, and
        with ``bare`` the call gave up its peer."""
        swa = 0 if bare else page.swa
        # Given up inside the open group, the old peer may still be seen, or not.
        gone = 0 if swa else self.detached.get(page.full, 0)
        known = swa != 0 and (node is None or node.state == "live")
        return Cached(page.full, swa, gone, page.full_stamps, known)

    def _accept_growth(
        self, op: ops.Op, served: Served, judge: LendingJudge, evictions: Evictions
    ) -> None:
        growths: list[tuple[Running, Growth]] = []
        match op:
            case request_ops.Prefill():
                growths = [self._growth(op.req, prefilled(self, op))]
            case request_ops.DecodeStep():
                growths = [self._growth(name, 1) for name in op.reqs]
            case request_ops.Speculate():
                growths = [self._growth(op.req, op.tokens)]
        drafts = isinstance(op, request_ops.Speculate)
        shares = self._judge_slots(op, served, [growth for _, growth in growths], judge)
        self._evict(evictions)
        for (running, growth), share in zip(growths, shares, strict=True):
            running.allocated = growth.stop
            if drafts:
                growth.tokens = None
            else:
                running.kv_len = growth.stop
            self._gain(growth, share)

    def _growth(self, name: int, tokens: int) -> tuple[Running, Growth]:
        running = self.live[name]
        start = running.kv_len
        growth = Growth(self.rows[name].pages, start, start + tokens, tokens=running.tokens)
        return running, growth

    def _accept_load(
        self,
        op: request_ops.LoadPrefix,
        served: Served,
        judge: LendingJudge,
        evictions: Evictions,
    ) -> None:
        load, size = self.missing(op), self.geometry.page_size
        start = len(load.path) * size
        if served.matched != start:
            judge.blame("tree", f"{start} tokens of the copy cached", f"{served.matched}")
        peers = list(served.reloaded)
        if len(peers) != len(load.loading) * size:
            expected = f"SWA slots for {len(load.loading)} tombstones"
            self._reject("layout", expected, f"{len(peers)} slots")
        chunks = (peers[at : at + size] for at in range(0, len(peers), size))
        back = [
            judge.peer_of(node.page.full, chunk, [True] * size)
            for node, chunk in zip(load.loading, chunks, strict=True)
        ]
        growth = Growth(load.pages, start, load.copy.tokens, load.copy.swa_from)
        shares = self._judge_slots(op, served, [growth], judge)
        self._evict(evictions)
        self._begin_load(op.load, load, back)
        self._gain(growth, shares[0])

    def _judge_slots(
        self, op: ops.Op, served: Served, growths: Sequence[Growth], judge: LendingJudge
    ) -> list[Share]:
        """Judge the slots of all rows that grow; raises if anything of the answer is wrong."""
        tokens = sum(growth.stop - growth.start for growth in growths)
        slots, peers = list(served.slots), list(served.peers)
        if not len(slots) == len(peers) == tokens:
            expected = f"{tokens} slots and as many peers from {op.kind}"
            judge.blame("layout", expected, f"{len(slots)} slots, {len(peers)} peers")
            raise Mismatch(judge.clauses)
        shares: list[Share] = []
        at = 0
        for growth in growths:
            count = growth.stop - growth.start
            # The judge looks at the last page alone, and only if it goes on.
            last = growth.pages[-1:] if growth.start % self.geometry.page_size else []
            mapped = [
                position >= growth.mapped_from for position in range(growth.start, growth.stop)
            ]
            chunk = slice(at, at + count)
            shares.append(judge.share(Row(last), slots[chunk], peers[chunk], mapped))
            at += count
        if judge.clauses:
            raise Mismatch(judge.clauses)
        return shares

    def _gain(self, growth: Growth, share: Share) -> None:
        """The slots join a row, with the stamps of their tokens."""
        stamps = [UNKNOWN] * (growth.stop - growth.start)
        if growth.tokens is not None:
            stamps = growth.tokens.stamps(growth.start, growth.stop)
        at = len(share.onto_last)
        if at:
            last = growth.pages[-1]
            last.full_stamps += stamps[:at]
            last.swa_stamps += stamps[:at]
            self._own(last)
        for full, swa, mapped in share.pages:
            self.full.take(full)
            if swa:
                self.swa.take(swa)
            own = stamps[at : at + len(mapped)]
            peers = list(own) if swa else [NO_PEER] * len(own)
            page = Page(full, swa, own, peers)
            growth.pages.append(page)
            self._own(page)
            at += len(mapped)

    # Ops that lend nothing.

    def _accept_done(self, op: ops.Op, served: Served) -> None:
        if served.slots or served.peers or served.reloaded or served.request:
            self._reject("layout", f"{op.kind} lends nothing", str(served))
        judge = EvictionJudge(self, served)
        match op:
            case request_ops.CacheUnfinished():
                self._accept_cached(op, served, judge)
            case request_ops.SavePrefix():
                self._accept_copy(op, served, judge)
            case request_ops.Evict():
                pages = self.geometry.pages_for
                full = min(pages(op.full_tokens), self.tree.full_evictable)
                swa = min(pages(op.swa_tokens), self.tree.swa_evictable)
                self._evict_judged(judge.forced(full, swa, ()), judge)
            case request_ops.Flush():
                # Everything goes, whether the answer lists it or not.
                self._evict_judged(Evictions(gone=list(self.tree.pages.values())), judge)
            case request_ops.EndLoad() if op.failed:
                evictions = judge.cancelled(self.loads[op.load])
                self._settle(judge.clauses)
                self._follow(op)
                self._evict(evictions)
            case _:
                judge.nothing()
                self._settle(judge.clauses)
                self._follow(op)

    def _accept_cached(
        self, op: request_ops.CacheUnfinished, served: Served, judge: EvictionJudge
    ) -> None:
        """The row goes on over the cache's own pages; nothing happens if it could not read them."""
        judge.nothing()
        running, handovers = self.live[op.req], self.computed(op.req)
        if self.waits_for_load(handovers):
            handovers = []
        lending = LendingJudge(self.geometry, self.full, self.swa, self.device)
        cached = [self._cached(node.page, node) for node in running.path]
        cached += [
            self._cached(one.cached, one.node if one.fate == "duplicate" else None)
            for one in handovers
        ]
        judge_prefix(served, cached, lending, self.geometry.page_size)
        self._settle(judge.clauses + lending.clauses)
        self._cache_unfinished(op.req, handovers)

    def _accept_copy(
        self, op: request_ops.SavePrefix, served: Served, judge: EvictionJudge
    ) -> None:
        judge.nothing()
        path = self.match(self.keys(op.text))
        tokens = len(path) * self.geometry.page_size
        if served.matched != tokens:
            judge.blame(f"{tokens} tokens served to the copy", f"{served.matched}")
        self._settle(judge.clauses)
        self.tree.use(path)
        text = cut(op.text, tokens)
        keys = [node.key for node in path]
        self.copies[op.copy] = Copy(text, keys, tokens, self.frontier(tokens))
        self.last_copy = max(self.last_copy, op.copy)

    def _evict_judged(self, evictions: Evictions, judge: EvictionJudge) -> None:
        self._settle(judge.clauses)
        self._evict(evictions)

    def _settle(self, clauses: list[Clause]) -> None:
        if clauses:
            raise Mismatch(clauses)


def _said(need: Demand) -> str:
    return f"{need.full} full and {need.swa} SWA pages" + (", a request row" if need.row else "")

"""The books of the request-level model: the state that every right cache and scheduler agree on.

Follows ops whose answers have been judged, and foretells what handing pages to the cache comes to;
judges nothing: that is `kvcore.models.serving`. Which free page is lent and which unlocked page is
evicted it learns from the answers. Everything else follows from the requests alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvcore.models import ops, request_ops, texts
from kvcore.models.contract import Contract
from kvcore.models.geometry import Geometry
from kvcore.models.prefix_tree import PrefixTree, TreePage
from kvcore.models.reference import Model
from kvcore.models.request_ops import SERVING_OP_KINDS
from kvcore.models.request_state import Copy, Load, RequestTokens, Running, Waiting
from kvcore.models.state import NO_PEER, UNKNOWN, Page, Row
from kvcore.models.texts import PageKey, Text

Fate = Literal["new", "duplicate", "kept", "replaced"]


class Handover(NamedTuple):
    """What becomes of a page that is handed to the cache: it is ``new`` there, or the tree page
    ``node`` has its tokens already. Then it is a ``duplicate``; or it gives its peer to the tree
    page, which is locked and is ``kept``; or it takes the place of the other one, which is
    ``replaced``."""

    page: Page
    fate: Fate
    node: TreePage | None = None

    @property
    def cached(self) -> Page:
        """The page as the cache holds it afterwards."""
        if self.node is None or self.fate == "replaced":
            return self.page
        kept = self.node.page
        if self.fate == "duplicate":
            return kept
        return Page(kept.full, self.page.swa, kept.full_stamps, self.page.swa_stamps)


@dataclass(slots=True)
class Evictions:
    """Cached pages that go on both sides, those of which the peer goes first, and full pages and
    SWA pages that are free by that."""

    gone: list[TreePage] = field(default_factory=list)
    stripped: list[TreePage] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    swa: list[int] = field(default_factory=list)


class ServingBooks(Model):
    """The state of `Books`, with ``rows`` those of the running requests, and beside it the cache
    (``tree``), the running and the retracted requests (``live``, ``waiting``), the host copies and
    the loads in flight, by name.

    A row's front part is the `Page` objects of the cache. ``window_pages``: whole pages that hold
    one window.
    """

    def __init__(self, geometry: Geometry, contract: Contract | None = None) -> None:
        super().__init__(geometry, contract or Contract(ops=frozenset(SERVING_OP_KINDS)))
        self.window_pages = geometry.pages_for(geometry.window)
        self.tree = PrefixTree(self.window_pages)
        self.live: dict[int, Running] = {}
        self.waiting: dict[int, Waiting] = {}
        self.copies: dict[int, Copy] = {}
        self.loads: dict[int, Load] = {}
        self.last_copy = 0
        self.last_load = 0
        self.used_loads: set[int] = set()
        self._known: tuple[Text, list[PageKey]] = ((), [])
        self._newcomer: tuple[request_ops.Admit, RequestTokens] | None = None

    # What there is.

    def lent_pages(self) -> Iterable[tuple[int, Page]]:
        """(owner, page) for every page that is neither free nor pending, once: the request's name,
        0 for the cache, a load's name with a minus sign."""
        for node in self.tree.pages.values():
            yield 0, node.page
        size = self.geometry.page_size
        for name, running in self.live.items():
            for page in self.rows[name].pages[running.prefix // size :]:
                yield name, page
        for name, load in self.loads.items():
            for page in load.pages:
                yield -name, page

    def room(self) -> tuple[int, int]:
        """Tokens of the full and the SWA side that are free or, while no group is open, can be made
        so by eviction."""
        full, swa = self.room_beside(())
        return full * self.geometry.page_size, swa * self.geometry.page_size

    def room_beside(self, path: Sequence[TreePage]) -> tuple[int, int]:
        """`room` in pages, if an op that locks ``path`` asks."""
        full, swa = len(self.full.free), len(self.swa.free)
        if self.group_open:
            return full, swa
        full += self.tree.full_evictable - sum(node.full_locks == 0 for node in path)
        swa += self.tree.swa_evictable - sum(node.swa_evictable for node in self.tree.window(path))
        return full, swa

    def newcomer(self, op: request_ops.Admit) -> RequestTokens:
        """The tokens of a request that is to be admitted."""
        if self._newcomer is None or self._newcomer[0] is not op:
            tokens = RequestTokens(op.text, op.output, self.geometry.page_size)
            self._newcomer = (op, tokens)
        return self._newcomer[1]

    def keys(self, text: Text) -> list[PageKey]:
        """The keys of all whole pages of a text."""
        if self._known[0] is not text:
            found = texts.page_keys(text, self.geometry.page_size, texts.length(text))
            self._known = (text, found)
        return self._known[1]

    def match(self, keys: Sequence[PageKey]) -> list[TreePage]:
        """The cached pages that can be served for these keys."""
        path = self.tree.path(keys)
        return path[: self.tree.servable(path)]

    def frontier(self, tokens: int) -> int:
        """Tokens before the last whole window of so many: their SWA slots are not needed again."""
        size = self.geometry.page_size
        return max(0, tokens // size - self.window_pages) * size

    # Pages that change hands.

    @property
    def _joins_swa(self) -> bool:
        """Whether SWA slots that go alone wait for the end of a group."""
        return self.group_open and self.contract.free_swa_joins_group

    def _drop(self, pages: Iterable[Page]) -> None:
        """The pages are given up on both sides."""
        for page in pages:
            self._detach(page, deferred=self.group_open)
            self.full.release(page.full, deferred=self.group_open)
            self._disown(page.full)

    def _strip(self, pages: Iterable[Page]) -> None:
        """The pages' peers are given up."""
        for page in pages:
            self._detach(page, deferred=self._joins_swa)

    def handovers(
        self, keys: Sequence[PageKey], path: Sequence[TreePage], pages: Sequence[Page], cursor: int
    ) -> list[Handover]:
        """What becomes of ``pages``, which come after ``path`` and make up all of ``keys`` with it.
        Those before token ``cursor`` have no peer."""
        found: list[Handover] = []
        node: TreePage | None = path[-1] if path else self.tree.root
        for depth, page in enumerate(pages, len(path)):
            node = node.children.get(keys[depth]) if node else None
            if node is None:
                found.append(Handover(page, "new"))
            elif node.state != "tombstone" or depth * self.geometry.page_size < cursor:
                found.append(Handover(page, "duplicate", node))
            else:
                found.append(Handover(page, "kept" if node.full_locks else "replaced", node))
        return found

    def _hand_over(
        self, keys: Sequence[PageKey], path: Sequence[TreePage], handovers: Sequence[Handover]
    ) -> list[TreePage]:
        """The pages go to the cache, which now has all of ``keys``; answers the whole path."""
        whole = list(path)
        for page, fate, node in handovers:
            if node is None:
                parent = whole[-1] if whole else self.tree.root
                state: Literal["live", "tombstone"] = "live" if page.swa else "tombstone"
                node = self.tree.add(parent, keys[len(whole)], page, state)
            elif fate == "duplicate":
                self._drop((page,))
            elif fate == "kept":
                joins = self.group_open and self.contract.full_side_joins_group
                node.page.swa, node.page.swa_stamps = page.swa, page.swa_stamps
                self.full.release(page.full, deferred=joins)
                self._disown(page.full)
                self._own(node.page)
                self.tree.turn(node, "live")
            else:
                self._drop((node.page,))
                self.tree.replace(node, page)
                self.tree.turn(node, "live")
            whole.append(node)
        return whole

    def _evict(self, evictions: Evictions) -> None:
        """Peers first, then whole pages, those below others first."""
        for node in evictions.stripped:
            self._strip((node.page,))
            self.tree.turn(node, "tombstone")
        for node in sorted(evictions.gone, key=lambda node: -node.depth):
            self._drop((node.page,))
            self.tree.remove(node)

    # Requests.

    def _start(self, name: int, running: Running, request: int) -> None:
        """A request runs from now on; its row is the cached pages, and more to come."""
        self.tree.lock(running.path)
        self.tree.use(running.path)
        self.live[name] = running
        self.rows[name] = Row([node.page for node in running.path], request)
        self.requests.take(request)
        self.used.add(name)
        self.last_name = max(self.last_name, name)

    def _end(self, name: int) -> Running:
        """The request's own pages have found another owner; it holds nothing any more."""
        running, row = self.live.pop(name), self.rows.pop(name)
        self.tree.unlock(running.path)
        self.requests.release(row.request, deferred=False)
        return running

    def private(self, name: int) -> list[Page]:
        """The pages of a row that are the request's own."""
        return self.rows[name].pages[len(self.live[name].path) :]

    def computed(self, name: int) -> list[Handover]:
        """What becomes of the whole pages that a request has computed, if the cache gets them."""
        running = self.live[name]
        whole = running.kv_len // self.geometry.page_size
        pages = self.rows[name].pages[len(running.path) : whole]
        return self.handovers(
            running.tokens.keys(running.kv_len), running.path, pages, running.cursor
        )

    def waits_for_load(self, handovers: Sequence[Handover]) -> bool:
        """Whether a request that goes on over pages that it hands over would have to read some that
        are still to come: the last window of its row is loading."""
        window = handovers[max(0, len(handovers) - self.window_pages) :]
        return any(one.node is not None and one.node.state == "loading" for one in window)

    def _cache_unfinished(self, name: int, handovers: list[Handover]) -> None:
        """The row goes on over the cache's pages up to the end of ``handovers``."""
        running, row = self.live[name], self.rows[name]
        held = len(running.path)
        running.path = self._hand_over(running.tokens.keys(running.kv_len), running.path, handovers)
        if handovers:
            self.tree.use(running.path)
        self.tree.extend_lock(running.path, held)
        running.prefix = len(running.path) * self.geometry.page_size
        row.pages[held : len(running.path)] = [node.page for node in running.path[held:]]

    def _finish(self, name: int) -> None:
        running = self.live[name]
        rest = self.rows[name].pages[running.kv_len // self.geometry.page_size :]
        keys = running.tokens.keys(running.kv_len)
        self.tree.use(self._hand_over(keys, running.path, self.computed(name)))
        self._drop(rest)
        self._end(name)

    def _abort(self, name: int) -> Running:
        self._drop(self.private(name))
        return self._end(name)

    def _slide(self, name: int) -> None:
        running, size = self.live[name], self.geometry.page_size
        cursor = max(running.cursor, self.frontier(running.kv_len))
        first = max(running.cursor, running.prefix)
        self._strip(self.rows[name].pages[first // size : cursor // size])
        running.cursor = cursor

    def _trim(self, name: int, accepted: int) -> None:
        running, pages = self.live[name], self.rows[name].pages
        size, before = self.geometry.page_size, running.kv_len
        running.kv_len = running.allocated = after = before + accepted
        kept = self.geometry.pages_for(after)
        self._drop(pages[kept:])
        del pages[kept:]
        if after % size:
            del pages[-1].full_stamps[after % size :]
            del pages[-1].swa_stamps[after % size :]
            self._own(pages[-1])
        for at, stamp in enumerate(running.tokens.stamps(before, after), before):
            page, offset = pages[at // size], at % size
            page.full_stamps[offset] = page.swa_stamps[offset] = stamp

    # Loads.

    def missing(self, load: request_ops.LoadPrefix) -> Load:
        """What a load would hold: the cached path of its copy, and the tombstones on it that are in
        the last window of the copy."""
        copy = self.copies[load.copy]
        path = self.tree.path(copy.keys)
        late = path[copy.swa_from // self.geometry.page_size :]
        return Load(copy, path, [node for node in late if node.state != "live"])

    def _arrive(self, load: Load) -> None:
        """What was loaded is cached."""
        size, copy = self.geometry.page_size, load.copy
        for node in load.loading:
            node.page.swa_stamps = list(node.page.full_stamps)
            self.tree.turn(node, "live")
        start = len(load.path) * size
        stamps = texts.stamps(copy.text, start, copy.tokens)
        for number, page in enumerate(load.pages):
            page.full_stamps = stamps[number * size : (number + 1) * size]
            page.swa_stamps = list(page.full_stamps) if page.swa else [NO_PEER] * size
        handovers = self.handovers(copy.keys, load.path, load.pages, copy.swa_from)
        self.tree.use(self._hand_over(copy.keys, load.path, handovers))
        self.tree.unlock(load.path)

    def _cancel(self, load: Load) -> None:
        """What was taken for a load is given up."""
        for node in load.loading:
            self._strip((node.page,))
            self.tree.turn(node, "tombstone")
        self._drop(load.pages)
        self.tree.unlock(load.path)

    def _begin_load(self, name: int, load: Load, peers: Sequence[int]) -> None:
        """``peers``: the SWA page of each page that is loading."""
        self.tree.lock(load.path)
        for node, swa in zip(load.loading, peers, strict=True):
            node.page.swa = swa
            node.page.swa_stamps = [UNKNOWN] * self.geometry.page_size
            self.swa.take(swa)
            self._own(node.page)
            self.tree.turn(node, "loading")
        self.loads[name] = load
        self.used_loads.add(name)
        self.last_load = max(self.last_load, name)

    # Ops whose answers say nothing but what was evicted.

    def _follow(self, op: ops.Op) -> None:
        match op:
            case request_ops.Slide():
                for name in op.reqs:
                    self._slide(name)
            case request_ops.Trim():
                self._trim(op.req, op.accepted)
            case request_ops.Finish():
                self._finish(op.req)
            case request_ops.Abort():
                self._abort(op.req)
            case request_ops.RetractRequest():
                self._slide(op.req)
                running = self._abort(op.req)
                self.waiting[op.req] = Waiting(running.tokens, running.kv_len, op.backup)
            case request_ops.EndLoad():
                load = self.loads.pop(op.load)
                (self._cancel if op.failed else self._arrive)(load)
            case _:
                super()._follow(op)

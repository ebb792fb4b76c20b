"""A continuous-batching scheduler that turns a workload into request-level ops, deterministically.

It does what an engine's scheduler does between two forward passes, in the same order and in the
same free groups: prefill in batches and chunks, the results of a prefill batch cached in one group,
decode batches, requests that end together freed in one group, windows that slide, retraction of the
latest request when a pool runs dry, and resumption before new admissions. It decides by the model's
state alone, so what it makes is a plain program. Leaves out the running (`kvcore.strategies.soak`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcore.models import Geometry, Model, ServingModel
from kvcore.models.ops import GroupBegin, GroupEnd, Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    Finish,
    Prefill,
    ResumeRequest,
    RetractRequest,
    Slide,
)
from kvcore.strategies.workload import Arrival

Arrivals = Literal["asap", "timestamps"]
"""Whether all requests are there from the start, or each waits for its time of arrival."""

PREFILL_MILLISECONDS = 0.02
"""What a prefilled token costs on the virtual clock."""

CHUNK_TOKENS = 7168
"""Tokens of one request in a prefill batch, where nothing else is asked for."""

CHUNKS_A_BATCH = 4
"""A prefill batch has the tokens of so many chunks."""

DECODE_MILLISECONDS = 15.0
"""What a decode step costs, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests are scheduled.

    ``chunk_tokens``: how many tokens of a prompt join one prefill batch. ``reserve``: of the tokens
    that are yet to come, prompt or output, of running requests and a new one, the share for which
    there must be room when it is admitted; the smaller, the more retractions. ``backup_share``: of
    the retractions, how many copy their KV to the host. ``slide_every``: decode steps between two
    looks at windows that moved on. ``seed`` decides who is retracted with a backup, and who comes
    first of those that arrive at the same time: with 0 who comes first in the file."""

    arrivals: Arrivals = "asap"
    seed: int = 0
    chunk_tokens: int = CHUNK_TOKENS
    reserve: float = 0.0
    backup_share: float = 0.5
    slide_every: int = 16


@dataclass(frozen=True, slots=True)
class Passed:
    """A request that was not served, and why."""

    number: int
    why: str


def least_swa_pages(geometry: Geometry) -> int:
    """SWA pages with which any request can go on alone: the window that its prefix locks, one of
    its own, and the pages at their ends."""
    return 2 * geometry.pages_for(geometry.window) + 3


class Scheduler:
    """A source that serves ``arrivals`` to the end. What it did so far is public.

    ``served``, ``retracted``: numbers of the arrivals that ended, and that were retracted at least
    once. ``passed``: those that pools of this size cannot serve. ``clock``: virtual milliseconds.
    """

    def __init__(self, arrivals: Sequence[Arrival], geometry: Geometry, policy: Policy) -> None:
        self.served: list[int] = []
        self.retracted: set[int] = set()
        self.passed: list[Passed] = []
        self.clock = 0.0
        self._geometry, self._policy = geometry, policy
        self._rng = random.Random(policy.seed)
        self._coming = deque(self._in_order(arrivals))
        self._queue: deque[Arrival] = deque()
        self._waiting: deque[int] = deque()
        self._jobs: dict[int, Arrival] = {}
        # In the order of their latest admission; unready ones are in the middle of their prompt.
        self._running: list[int] = []
        self._unready: list[int] = []
        self._until_slide = policy.slide_every
        # The room in which the first in line did not fit, since asking again costs a match.
        self._too_small: tuple[int, int] | None = None
        self._program = self._serve()

    def _in_order(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """By time of arrival; of the same time as the seed decides."""
        order = list(arrivals)
        if self._policy.seed and all(arrival.at is not None for arrival in order):
            self._rng.shuffle(order)
        return sorted(order, key=lambda arrival: arrival.at or 0.0)

    def next_op(self, model: Model) -> Op | None:
        """The next op; None when every request was served."""
        assert isinstance(model, ServingModel)
        self._model = model
        return next(self._program, None)

    # The loop: an iteration is a prefill batch, or else a decode step.

    def _serve(self) -> Iterator[Op]:
        while self._take_arrivals():
            batch = yield from self._prefill_batch()
            if batch:
                yield from self._cache_results(batch)
            elif self._running:
                yield from self._decode_batch()
            else:
                self._pass_first()

    def _take_arrivals(self) -> bool:
        """Those whose time has come join the queue; whether there is anything left to do."""
        timed = self._policy.arrivals == "timestamps"
        if timed and self._coming and not (self._running or self._waiting or self._queue):
            self.clock = max(self.clock, self._coming[0].at or 0.0)
        while self._coming and (not timed or (self._coming[0].at or 0.0) <= self.clock):
            arrival = self._coming.popleft()
            if why := self._never_fits(arrival):
                self.passed.append(Passed(arrival.number, why))
            else:
                self._queue.append(arrival)
        return bool(self._running or self._waiting or self._queue or self._coming)

    def _never_fits(self, arrival: Arrival) -> str:
        """Why these pools can never serve it; empty if they can."""
        geometry = self._geometry
        if arrival.tokens > geometry.context_len:
            return f"{arrival.tokens:,} tokens, more than the context"
        if geometry.pages_for(arrival.tokens) > geometry.full_pages:
            return f"{arrival.tokens:,} tokens, more than the full pool"
        return ""

    def _pass_first(self) -> None:
        """Nothing runs, and yet the first in line found no room: it never will."""
        if self._waiting:
            self._pass(self._jobs.pop(self._waiting.popleft()))
        elif self._queue:
            self._pass(self._queue.popleft())
        self._too_small = None

    def _pass(self, arrival: Arrival) -> None:
        self.passed.append(Passed(arrival.number, "found no room, with the pools to itself"))

    # Prefill.

    def _prefill_batch(self) -> Generator[Op, None, list[int]]:
        """Requests in the middle of their prompt, then retracted ones, then new ones, as far as the
        batch and the room go. Returns those that gained tokens."""
        batch: list[int] = []
        whole = left = CHUNKS_A_BATCH * self._policy.chunk_tokens
        unready = list(self._unready)
        for name in unready:
            op = self._next_chunk(name, left)
            if op is None:
                break
            yield op
            self._note_prompt(name)
            left -= op.tokens
            batch.append(name)
        # Room that those do not find is theirs before it is anybody else's.
        blocked = len(batch) < len(unready)
        while left > 0 and not blocked and (start := self._next_in_line(left)) is not None:
            yield start
            name = start.req
            if isinstance(start, Admit):
                self._jobs[name] = self._queue.popleft()
            else:
                self._waiting.popleft()
            self._running.append(name)
            self._note_prompt(name)
            one = self._model.live[name]
            left -= one.kv_len - one.prefix
            batch.append(name)
        self.clock += (whole - left) * PREFILL_MILLISECONDS
        return batch

    def _next_chunk(self, name: int, left: int) -> Prefill | None:
        """The next chunk of a prompt if there is room for it; with nothing else running perhaps a
        smaller one."""
        one = self._model.live[name]
        tokens = min(left, self._policy.chunk_tokens, one.prompt_len - one.kv_len)
        while tokens > 0:
            op = Prefill(name, tokens)
            if not self._model.must_refuse(op):
                return op
            tokens = tokens // 2 if len(self._running) == 1 else 0
        return None

    def _note_prompt(self, name: int) -> None:
        """Whether a request that gained tokens is in the middle of its prompt."""
        one = self._model.live[name]
        unready = one.kv_len < one.prompt_len
        if unready and name not in self._unready:
            self._unready.append(name)
        elif not unready and name in self._unready:
            self._unready.remove(name)

    def _next_in_line(self, left: int) -> Admit | ResumeRequest | None:
        """The first of those that wait, if it may start now: retracted ones come before new."""
        if len(self._running) == self._geometry.requests or not (self._waiting or self._queue):
            return None
        room = self._model.room()
        if self._too_small is not None and not _larger(room, self._too_small):
            return None
        op = self._resumption() if self._waiting else self._admission(left)
        self._too_small = room if op is None else None
        return op

    def _resumption(self) -> ResumeRequest | None:
        """All of its prompt must fit, so that it is not retracted for the same reason again."""
        op = ResumeRequest(self._waiting[0])
        waiting = self._model.waiting[op.req]
        fits = self._leaves_room(max(waiting.kv_len, waiting.prompt_len), 0)
        return op if fits and not self._model.must_refuse(op) else None

    def _admission(self, left: int) -> Admit | None:
        """The first in the queue, or as much of its prompt as the batch holds; with nothing else
        running perhaps less."""
        arrival, name = self._queue[0], self._model.last_name + 1
        tokens = min(left, self._policy.chunk_tokens, arrival.prompt_tokens)
        if not self._leaves_room(tokens, arrival.tokens - tokens):
            return None
        while True:
            chunk = None if tokens == arrival.prompt_tokens else tokens
            op = Admit(name, arrival.text, arrival.output, chunk)
            if not self._model.must_refuse(op):
                return op
            if self._running or tokens == 1:
                return None
            tokens //= 2

    def _leaves_room(self, tokens: int, later: int) -> bool:
        """Whether the full pool has room for so many tokens now and for some of those that are to
        come. What the cache holds of a prefix counts as room until it is locked."""
        if not self._running:
            return True
        full, _ = self._model.room()
        later += sum(map(self._to_come, self._running))
        return full >= tokens + self._policy.reserve * later

    def _to_come(self, name: int) -> int:
        """Tokens that a running request has yet to compute and to generate."""
        one = self._model.live[name]
        return one.prompt_len + self._jobs[name].output_tokens - one.kv_len

    # Results.

    def _cache_results(self, batch: Sequence[int]) -> Iterator[Op]:
        """Prompts that are computed are cached in one free group, each after its window slid; then
        those in the middle of their prompt, outside of it."""
        news = [name for name in batch if self._has_news(name)]
        ready = [name for name in news if name not in self._unready]
        if ready:
            yield GroupBegin()
            for name in ready:
                yield from self._cache(name)
            yield GroupEnd()
        for name in news:
            if name in self._unready:
                yield from self._cache(name)

    def _has_news(self, name: int) -> bool:
        """Whether it has whole pages that the cache has not."""
        one = self._model.live[name]
        size = self._geometry.page_size
        return one.kv_len // size * size > one.prefix

    def _cache(self, name: int) -> Iterator[Op]:
        if self._window_moved(name):
            yield Slide((name,))
        yield CacheUnfinished(name)

    def _window_moved(self, name: int) -> bool:
        """Whether a page of its own, or the cache's, lies before its last window."""
        one = self._model.live[name]
        size = self._geometry.page_size
        whole = one.kv_len // size * size
        return (whole - self._geometry.window) // size * size > one.cursor

    # Decode.

    def _decode_batch(self) -> Iterator[Op]:
        """One token more for each request whose prompt is computed; those that have all are done,
        freed in one group."""
        yield from self._slide_now_and_then()
        step = yield from self._retract_until_it_fits()
        if step is None:
            return
        yield step
        self.clock += DECODE_MILLISECONDS
        done = [name for name in step.reqs if self._to_come(name) == 0]
        if done:
            yield GroupBegin()
            for name in done:
                yield Finish(name)
                self._running.remove(name)
                self.served.append(self._jobs.pop(name).number)
            yield GroupEnd()
            self._too_small = None

    def _slide_now_and_then(self) -> Iterator[Op]:
        self._until_slide -= 1
        if self._until_slide == 0:
            yield from self._slide()

    def _slide(self) -> Iterator[Op]:
        """All windows that moved on, at once."""
        self._until_slide = self._policy.slide_every
        moved = tuple(name for name in self._running if self._window_moved(name))
        if moved:
            yield Slide(moved)

    def _retract_until_it_fits(self) -> Generator[Op, None, DecodeStep | None]:
        """The decode step of all that are ready, after windows slid and those that came last gave
        way, as far as it takes. None if none is ready: then the last one gives way to those before
        it."""
        slid = False
        while True:
            ready = tuple(name for name in self._running if name not in self._unready)
            step = DecodeStep(ready)
            if ready and not self._model.must_refuse(step):
                return step
            if ready and not slid:
                slid = True
                yield from self._slide()
                continue
            yield from self._give_way(self._running.pop())
            if not (ready and self._running):
                return None

    def _give_way(self, name: int) -> Iterator[Op]:
        """A request that ran is retracted; given up if it ran alone."""
        if name in self._unready:
            self._unready.remove(name)
        if not self._running:
            yield Abort(name)
            self._pass(self._jobs.pop(name))
            return
        yield RetractRequest(name, self._with_backup(name))
        self.retracted.add(self._jobs[name].number)
        # What was admitted earlier resumes earlier.
        self._waiting.appendleft(name)

    def _with_backup(self, name: int) -> bool:
        """Whether its KV is copied to the host: always if it could not be computed again in one
        go."""
        geometry = self._geometry
        again = geometry.pages_for(self._model.live[name].kv_len)
        chosen = self._rng.random() < self._policy.backup_share
        return chosen or again > min(geometry.swa_pages, geometry.full_pages)


def _larger(room: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether either side has more."""
    return room[0] > other[0] or room[1] > other[1]

"""A soak: a workload served through a target, with the laws checked throughout.

Code that may kill the process runs in a child, as everywhere (`kvcore.strategies.isolation`), which
tells each op before it is applied. Leaves out the scheduling (`kvcore.strategies.scheduler`), what
becomes of a failing program (`kvcore.strategies.soak_cut`) and how things look.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import torch
from msgspec.structs import replace

from kvcore.invariants import LawBroken, Run, Skipped
from kvcore.invariants.run import Applying, Event
from kvcore.models import Geometry, ServingModel
from kvcore.models.ops import Op
from kvcore.strategies.campaign import HarnessFailed
from kvcore.strategies.isolation import death
from kvcore.strategies.scheduler import Policy, Scheduler
from kvcore.strategies.soak_report import Ending, Header, SoakCounts, SoakReport, make_report
from kvcore.strategies.workload import Arrival
from kvcore.targets.protocol import UnsupportedGeometry
from kvcore.targets.registry import may_crash, open_target

NEWS_SECONDS = 0.25
"""Between two pieces of news."""

OUTPUT_WEIGHT = 40
"""Prompt tokens that take as long as one token of output, to tell how much is left."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What a soak is to do. ``workload``: its name, for the report. ``every``: steps between
    checks; the periodic laws are checked every ``period`` checks."""

    target: str
    workload: str
    geometry: Geometry
    arrivals: tuple[Arrival, ...]
    policy: Policy
    every: int = 50
    period: int = 10

    @property
    def header(self) -> Header:
        """The same, as the report repeats it."""
        policy = self.policy
        return Header(
            self.target,
            self.workload,
            self.geometry,
            policy.arrivals,
            policy.seed,
            self.every,
            len(self.arrivals),
        )


@dataclass(frozen=True, slots=True)
class News:
    """How far a soak is: the share of the work that is done, requests that run and that wait for
    room to go on, shares of both pools in use, and the report so far, in which no checks are
    counted yet."""

    elapsed: float
    done: float
    running: int
    waiting: int
    full_share: float
    swa_share: float
    report: SoakReport


@dataclass(frozen=True, slots=True)
class Soaked:
    """How a soak ended: its report, its ops, and the seconds that it took."""

    report: SoakReport
    program: tuple[Op, ...]
    seconds: float


Show = Callable[[News], None]
Stop = Callable[[], bool]


def soak(plan: SoakPlan, show: Show, stop: Stop) -> Soaked:
    """Serve the workload to its end, to the first violation, or until ``stop`` says so, which is
    asked between ops."""
    if may_crash(plan.target) and hasattr(os, "fork"):
        return _soak_in_child(plan, show, stop)
    threads = torch.get_num_threads()
    # The tensors are small: several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    try:
        return _Soak(plan, show, stop).run()
    finally:
        torch.set_num_threads(threads)


class _Soak:
    """One soak in this process; ``tell`` hears of each op before it is applied."""

    def __init__(
        self, plan: SoakPlan, show: Show, stop: Stop, tell: Callable[[Op], None] | None = None
    ) -> None:
        self._plan, self._show, self._stop = plan, show, stop
        self._counts = SoakCounts()
        self._scheduler = Scheduler(plan.arrivals, plan.geometry, plan.policy)
        self._started = self._told = time.monotonic()

        def listen(event: Event) -> None:
            if tell is not None and isinstance(event, Applying):
                tell(event.op)
            self._counts(event)

        target = open_target(plan.target)(plan.geometry)
        self._run = Run(target, period=plan.period, every=plan.every, listeners=(listen,))
        assert isinstance(self._run.model, ServingModel)
        self._model: ServingModel = self._run.model
        self._used = (0, 0)
        self._work = 1 + sum(
            arrival.prompt_tokens + OUTPUT_WEIGHT * arrival.output_tokens
            for arrival in plan.arrivals
        )

    def run(self) -> Soaked:
        """Serve, then give everything back, also when stopped: so that a report is always on
        checks down to empty pools."""
        self._show(self._news())
        try:
            served = self._serve()
            self._run.finish()
        except LawBroken:
            return self._ended("broken")
        return self._ended("clean" if served else "interrupted")

    def _serve(self) -> bool:
        """Run the scheduler's ops; whether it came to their end."""
        while (op := self._scheduler.next_op(self._model)) is not None:
            if self._stop():
                return False
            done = self._run.step(op)
            if isinstance(done, Skipped):
                raise AssertionError(f"the scheduler asked for {op}, but {done.why}")
            self._used = self._counts.look(self._model)
            if time.monotonic() - self._told >= NEWS_SECONDS:
                self._told = time.monotonic()
                self._show(self._news())
        return True

    def _news(self) -> News:
        full, swa = self._used
        geometry = self._plan.geometry
        counts = self._counts
        done = counts.prompt_tokens + OUTPUT_WEIGHT * counts.output_tokens
        return News(
            elapsed=time.monotonic() - self._started,
            done=min(1.0, done / self._work),
            running=len(self._model.live),
            waiting=len(self._model.waiting),
            full_share=full / geometry.full_pages,
            swa_share=swa / geometry.swa_pages,
            report=self._report("interrupted"),
        )

    def _report(self, ending: Ending) -> SoakReport:
        return make_report(
            self._plan.header,
            self._run,
            self._scheduler,
            self._counts,
            at_the_end=self._used,
            ending=ending,
        )

    def _ended(self, ending: Ending) -> Soaked:
        seconds = time.monotonic() - self._started
        return Soaked(self._report(ending), tuple(self._run.program), seconds)


@dataclass(frozen=True, slots=True)
class _Failed:
    """The harness broke in the child; the traceback as text."""

    text: str


def _soak_in_child(plan: SoakPlan, show: Show, stop: Stop) -> Soaked:
    """The same in a child; if it dies, that is a violation at its last op."""
    receiving, sending = os.pipe()
    stopped = mmap.mmap(-1, 1)
    child = os.fork()
    if child == 0:
        os.close(receiving)
        status = 1
        try:
            with os.fdopen(sending, "wb") as out:
                _tell_all(out, plan, stopped)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    begun: list[Op] = []
    news: News | None = None
    ended: Soaked | UnsupportedGeometry | _Failed | None = None
    with os.fdopen(receiving, "rb") as told:
        for message in _messages(told):
            if isinstance(message, Op):
                begun.append(message)
            elif isinstance(message, News):
                news = message
                show(news)
            else:
                ended = message
            if stop():
                stopped[0] = 1
    _, status = os.waitpid(child, 0)
    if isinstance(ended, Soaked):
        return ended
    if isinstance(ended, UnsupportedGeometry):
        raise ended
    if news is None or isinstance(ended, _Failed):
        raise HarnessFailed(ended.text if ended else "the process died before the first op")
    violation = death(begun, status)
    report = replace(news.report, ops=len(begun), ending="broken", violation=violation)
    return Soaked(report, tuple(begun), news.elapsed)


def _tell_all(out: BinaryIO, plan: SoakPlan, stopped: mmap.mmap) -> None:
    """The child's part. It is stopped by a byte that the parent sets: a signal from the keyboard
    reaches both, and is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    # The threads that the parent had are not there in a child, which would wait for them.
    torch.set_num_threads(1)

    def tell(message: object) -> None:
        pickle.dump(message, out)
        out.flush()

    try:
        tell(_Soak(plan, tell, lambda: stopped[0] == 1, tell).run())
    except UnsupportedGeometry as error:
        tell(error)
    except Exception:
        tell(_Failed(traceback.format_exc()))


def _messages(told: BinaryIO) -> Iterator[Op | News | Soaked | UnsupportedGeometry | _Failed]:
    """What a child tells, as long as it lives."""
    while True:
        try:
            yield pickle.load(told)
        except (EOFError, pickle.UnpicklingError):
            return

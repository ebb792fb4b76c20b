"""Worker processes for campaigns: each takes jobs; a death is reported with the program it ran.

Where the target may kill the process, a worker writes every op to a journal before applying it, so
that after a death the journal holds the program up to and including the op that did it. Leaves out
what the jobs are for (`kvcore.strategies.campaign`).
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.pool
import os
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

import torch

from kvcore.invariants.run import Applying, Event, Listener
from kvcore.models import Geometry, Violation
from kvcore.models.ops import Op
from kvcore.models.trace import decode_trace, encode_line, new_header
from kvcore.strategies.isolation import death
from kvcore.strategies.sources import Burst, SourceName, run_burst
from kvcore.strategies.walker import WalkPlan
from kvcore.targets.protocol import Target
from kvcore.targets.registry import may_crash, open_target


@dataclass(frozen=True, slots=True)
class Job:
    """One burst: ``programs`` programs of ``source`` on ``target``."""

    target: str
    source: SourceName
    plan: WalkPlan
    seed: int
    programs: int


@dataclass(frozen=True, slots=True)
class Died:
    """The worker died in this job; ``program`` is what it was running, up to the last op."""

    geometry: Geometry | None
    program: tuple[Op, ...]
    violation: Violation


@dataclass(frozen=True, slots=True)
class Crashed:
    """The harness itself raised in this job."""

    text: str


JobResult = Burst | Died | Crashed


Context = multiprocessing.context.ForkContext | multiprocessing.context.SpawnContext


def fork_if_possible() -> Context:
    """Children of a fork share the loaded torch; without fork they load it anew."""
    if "fork" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def worker_processes() -> multiprocessing.pool.Pool:
    """A plain pool with a process for each CPU, for tasks that cannot kill it."""
    return fork_if_possible().Pool(
        available_cpus(), initializer=torch.set_num_threads, initargs=(1,)
    )


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Journal:
    """The program that is running, on disk, one op a line, each written before it is applied."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def begin(self, target: Target) -> None:
        """A new program starts on ``target``."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(encode_line(new_header(target.name, target.geometry)))

    def __call__(self, event: Event) -> None:
        """Listen to a run."""
        if isinstance(event, Applying):
            self._file.write(encode_line(event.op))


def read_journal(path: Path) -> tuple[Geometry | None, tuple[Op, ...]]:
    """What a dead worker was running."""
    data = path.read_bytes()
    if not data.strip():
        return None, ()
    trace = decode_trace(data, path.name)
    return trace.header.geometry, trace.ops


def do_job(job: Job, journal: Journal | None) -> Burst:
    """Run one job in this process."""
    factory = open_target(job.target)
    listeners: tuple[Listener, ...] = ()
    if journal is not None:
        listeners = (journal,)
        opened = factory

        def factory(geometry: Geometry) -> Target:
            target = opened(geometry)
            journal.begin(target)
            return target

    return run_burst(
        job.source,
        factory,
        job.plan,
        seed=job.seed,
        programs=job.programs,
        listeners=listeners,
    )


def _serve(jobs: Connection, journal_path: Path) -> None:
    """A worker's life: jobs in, results out, until None."""
    torch.set_num_threads(1)
    # The parent tells of a death; a dump of this process's stack would only garble the terminal.
    faulthandler.disable()
    journal = Journal(journal_path)
    # What was loaded so far stays; looking through it for garbage would cost Hypothesis a tenth.
    gc.freeze()
    # Nothing here is ever differentiated; without autograd's bookkeeping a call costs half.
    torch.inference_mode().__enter__()
    while True:
        try:
            job = jobs.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if job is None:
            return
        try:
            result: JobResult = do_job(job, journal if may_crash(job.target) else None)
        except KeyboardInterrupt:
            return
        except Exception:
            result = Crashed(traceback.format_exc())
        jobs.send(result)


class _Worker:
    def __init__(self, context: Context, journal: Path) -> None:
        self.journal = journal
        self.job: Job | None = None
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, journal), daemon=True)
        self._process.start()
        other.close()

    def give(self, job: Job) -> None:
        self.job = job
        self.connection.send(job)

    def result(self) -> JobResult:
        try:
            result: JobResult = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._epitaph()
        return result

    def _epitaph(self) -> Died:
        self._process.join()
        code = self._process.exitcode or 0
        geometry, program = read_journal(self.journal)
        status = -code if code < 0 else code << 8
        return Died(geometry, program, death(program, status))

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()


class WorkerPool:
    """``count`` workers; dead ones are replaced."""

    def __init__(self, count: int) -> None:
        self._context = fork_if_possible()
        self._directory = tempfile.TemporaryDirectory(prefix="kvcore-")
        self._serial = 0
        self._workers = [self._hire() for _ in range(count)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.stop()
        self._directory.cleanup()

    def run(self, jobs: Iterator[Job], poll: float) -> Iterator[tuple[Job, JobResult] | None]:
        """Results in the order in which jobs end; None every ``poll`` seconds without one. Jobs are
        drawn when a worker is idle, so that an iterator can end when time is up."""
        for worker in self._workers:
            self._feed(worker, jobs)
        while busy := self._busy():
            ready = wait([worker.connection for worker in busy.values()], timeout=poll)
            if not ready:
                yield None
            for connection in ready:
                worker = busy[connection]
                job, result = worker.job, worker.result()
                worker.job = None
                if isinstance(result, Died):
                    worker.connection.close()
                    self._workers[self._workers.index(worker)] = worker = self._hire()
                self._feed(worker, jobs)
                if job is not None:
                    yield job, result

    def _busy(self) -> dict[object, _Worker]:
        return {worker.connection: worker for worker in self._workers if worker.job is not None}

    def _feed(self, worker: _Worker, jobs: Iterator[Job]) -> None:
        job = next(jobs, None)
        if job is not None:
            worker.give(job)

    def _hire(self) -> _Worker:
        self._serial += 1
        journal = Path(self._directory.name) / f"{os.getpid()}-{self._serial}.jsonl"
        return _Worker(self._context, journal)

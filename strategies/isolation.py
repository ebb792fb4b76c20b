"""Running programs of code that may kill the process: in a child, one child a program.

The child tells each op before it applies it, so that a death is a violation of law `bounds` at a
known op. Where the platform cannot fork, programs run in this process. Leaves out campaigns, whose
workers are children anyway (`kvcore.strategies.workers`).
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from collections.abc import Sequence
from typing import BinaryIO

import torch

from kvcore.invariants import Tally, Verdict
from kvcore.invariants.run import Applying, Event
from kvcore.models import Clause, Geometry, Violation
from kvcore.models.ops import Op
from kvcore.strategies.replay import replay
from kvcore.targets.protocol import TargetFactory, UnsupportedGeometry
from kvcore.targets.registry import may_crash, open_target


def death(program: Sequence[Op], status: int) -> Violation:
    """The violation of a process that died with wait status ``status`` in the last op."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"the process died: signal {number} ({signal.Signals(number).name})"
    else:
        how = f"the process died: exit status {os.waitstatus_to_exitcode(status)}"
    kind = program[-1].label if program else "start"
    clause = Clause("bounds", "the process lives on", how)
    return Violation("bounds", max(0, len(program) - 1), kind, (clause,))


def run_program(
    target: str, geometry: Geometry, program: Sequence[Op], *, period: int = 1
) -> Verdict:
    """Replay by target name: in this process for our own code, in a child for foreign code."""
    if may_crash(target):
        return replay_isolated(target, geometry, program, period=period)
    return replay(open_target(target), geometry, program, period=period)


def replay_isolated(
    target: str, geometry: Geometry, program: Sequence[Op], *, period: int = 1
) -> Verdict:
    """Replay in a child process; if it dies, that is the verdict."""
    if not hasattr(os, "fork"):
        return replay(open_target(target), geometry, program, period=period)
    factory = open_target(target)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        faulthandler.disable()
        # The threads that this process had are not there in the child, which would wait for them.
        torch.set_num_threads(1)
        status = 1
        try:
            with os.fdopen(sending, "wb") as out:
                _tell_verdict(out, factory, geometry, program, period)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as told:
        begun, verdict = _listen(told)
    _, status = os.waitpid(child, 0)
    if isinstance(verdict, UnsupportedGeometry):
        raise verdict
    if verdict is not None:
        return verdict
    tally = Tally(programs=1, steps=len(begun))
    return Verdict(tuple(begun), death(begun, status), tally)


def _tell_verdict(
    out: BinaryIO, factory: TargetFactory, geometry: Geometry, program: Sequence[Op], period: int
) -> None:
    def tell(event: Event) -> None:
        if isinstance(event, Applying):
            pickle.dump(event.op, out)
            out.flush()

    try:
        told: Verdict | UnsupportedGeometry
        told = replay(factory, geometry, program, period=period, listeners=(tell,))
    except UnsupportedGeometry as error:
        told = error
    pickle.dump(told, out)


def _listen(told: BinaryIO) -> tuple[list[Op], Verdict | UnsupportedGeometry | None]:
    begun: list[Op] = []
    while True:
        try:
            message = pickle.load(told)
        except (EOFError, pickle.UnpicklingError):
            return begun, None
        if isinstance(message, Verdict | UnsupportedGeometry):
            return begun, message
        begun.append(message)

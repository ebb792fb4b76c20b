"""A run of the benchmarks: the sections in order, on one thread, and what they ran on.

The control comes first, whatever sections are asked for. Leaves out goals and how things look.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from kvcore.benchmarks import (
    capture,
    control,
    counts,
    groups,
    growth,
    harness,
    operations,
    recorder,
)
from kvcore.benchmarks.goals import Verdict
from kvcore.benchmarks.plan import BenchPlan
from kvcore.benchmarks.results import Contest, Metric, Section
from kvcore.kernels import chosen_kernels
from kvcore.native import NATIVE
from kvcore.strategies.workers import available_cpus

SectionRun = Callable[[BenchPlan], Section]

SECTIONS: dict[str, SectionRun] = {
    "operations": operations.run,
    "groups": groups.run,
    "growth": growth.run,
    "counts": counts.run,
    "capture": capture.run,
    "harness": harness.run,
    "recorder": recorder.run,
}
"""What can be asked for by name."""

PACKAGES = ("torch", "numpy", "hypothesis", "msgspec")


def environment() -> dict[str, str | int]:
    """What numbers may depend on; nothing that tells one machine from another of its kind."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": available_cpus(),
        "threads": torch.get_num_threads(),
        "compiled": "no" if NATIVE is None or chosen_kernels() else "yes",
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Benched(msgspec.Struct, frozen=True):
    """What a run yielded, the control first."""

    environment: dict[str, str | int]
    compared: tuple[str, ...]
    seed: int
    warmups: int
    samples: int
    sections: tuple[Section, ...]

    def metrics(self) -> Iterator[Metric]:
        """Every number that a goal may name."""
        for section in self.sections:
            yield from section.metrics()


def bench(plan: BenchPlan, names: Sequence[str], on_section: Callable[[str], None]) -> Benched:
    """Run the control and these sections, in the order in which they stand in `SECTIONS`;
    ``on_section`` is told each name before. Raises `ReleaseError` for a rival that does not load.
    """
    wanted: dict[str, SectionRun] = {"control": control.run}
    wanted |= {name: run for name, run in SECTIONS.items() if name in names}
    compared = tuple(rival.name for rival in plan.rivals)
    sections = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="kvcore-") as scratch:
        there = replace(plan, scratch=Path(scratch))
        for name, run in wanted.items():
            on_section(name)
            # As engines run it: nothing here is ever differentiated.
            with torch.inference_mode():
                sections.append(run(there))
        facts = environment()
    sampling = plan.sampling
    return Benched(
        facts, compared, sampling.seed, sampling.warmups, sampling.samples, tuple(sections)
    )


class _Told(msgspec.Struct):
    """A section as JSON has it; ``metrics`` are all of its numbers by key."""

    title: str
    notes: list[str]
    contests: list[Contest]
    metrics: dict[str, float]


def encode(benched: Benched, verdicts: Sequence[Verdict]) -> bytes:
    """All of it as JSON. Medians, in microseconds, are for context."""
    sections = {
        section.name: _Told(
            section.title,
            section.notes,
            section.contests,
            {metric.key: metric.value for metric in section.metrics()},
        )
        for section in benched.sections
    }
    told = {
        "kvcore": version("kvcore"),
        "environment": benched.environment,
        "compared": benched.compared,
        "seed": benched.seed,
        "warmups": benched.warmups,
        "samples": benched.samples,
        "sections": sections,
        "goals": [
            {
                "id": verdict.goal.id,
                "says": verdict.goal.says,
                "bound": verdict.goal.bound,
                "standing": verdict.standing,
                "worst": verdict.worst,
                "key": verdict.key,
            }
            for verdict in verdicts
        ],
    }
    return msgspec.json.format(msgspec.json.encode(told)) + b"\n"

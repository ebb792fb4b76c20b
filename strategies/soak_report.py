"""What a soak did, counted as it runs, and as one record at the end.

Every count comes from the ops, their answers and the model, so that it is the same for every target
and in every run with one seed; there are no times in it. Leaves out how it looks
(`kvcore.reports.soak_page`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvcore.invariants import Run
from kvcore.invariants.run import Applied, Event
from kvcore.models import Geometry, ServingModel, Violation
from kvcore.models.outcomes import Served
from kvcore.models.request_ops import Admit, DecodeStep, ResumeRequest, RetractRequest
from kvcore.models.texts import length
from kvcore.strategies.scheduler import Arrivals, Scheduler

FORMAT = "kvcore-soak"
VERSION = 1

Ending = Literal["clean", "broken", "interrupted"]


class Occupancy(msgspec.Struct, frozen=True):
    """Pages in use of one pool: at most, at the end, which after the last request is what the cache
    holds, and after everything was given back."""

    pages: int
    peak: int
    at_the_end: int
    drained: int


class SoakReport(msgspec.Struct, frozen=True):
    """How a soak ended.

    ``requests``: those of the workload that were to be served; ``not_served``: number and reason of
    those that the pools cannot serve. ``prompt_tokens``: of all admissions; ``matched_tokens``: of
    these, those that the cache had. ``evicted_pages``: full pages given up on both sides,
    ``tombstoned_pages``: SWA pages given up whose full page stayed, both to make room.
    ``tombstones_made``: pages of the cache that lost their SWA page or came without one;
    ``recovered_*``: those that got one again, by whether their full page was locked.
    ``retracted_requests``: those that lost their slots at least once."""

    format: str
    version: int
    target: str
    workload: str
    geometry: Geometry
    arrivals: Arrivals
    seed: int
    check_every: int
    requests: int
    served: int
    not_served: tuple[tuple[int, str], ...]
    prompt_tokens: int
    matched_tokens: int
    output_tokens: int
    evicted_pages: int
    tombstoned_pages: int
    tombstones_made: int
    recovered_locked: int
    recovered_unlocked: int
    retractions: int
    retractions_with_backup: int
    retracted_requests: int
    resumes: int
    full: Occupancy
    swa: Occupancy
    ops: int
    checks: dict[str, int]
    ending: Ending
    violation: Violation | None

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the cache had."""
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def retracted_share(self) -> float:
        """Share of the served requests that were retracted at least once."""
        return self.retracted_requests / self.served if self.served else 0.0

    @property
    def recovered(self) -> int:
        """Tombstones that got an SWA page again."""
        return self.recovered_locked + self.recovered_unlocked


@dataclass(slots=True)
class SoakCounts:
    """A listener that counts as a run goes; `report` is what came of it."""

    prompt_tokens: int = 0
    matched_tokens: int = 0
    output_tokens: int = 0
    evicted_pages: int = 0
    tombstoned_pages: int = 0
    retractions: int = 0
    retractions_with_backup: int = 0
    resumes: int = 0
    peaks: list[int] = field(default_factory=lambda: [0, 0])

    def __call__(self, event: Event) -> None:
        """Take one event of a run."""
        if not isinstance(event, Applied) or not isinstance(event.outcome, Served):
            return
        served = event.outcome
        self.evicted_pages += len(served.evicted)
        self.tombstoned_pages += len(served.tombstoned)
        match event.op:
            case Admit(text=text):
                self.prompt_tokens += length(text)
                self.matched_tokens += served.matched
            case DecodeStep(reqs=reqs):
                self.output_tokens += len(reqs)
            case RetractRequest(backup=backup):
                self.retractions += 1
                self.retractions_with_backup += backup
            case ResumeRequest():
                self.resumes += 1

    def look(self, model: ServingModel) -> tuple[int, int]:
        """Pages in use of both pools now; those that wait for the end of a group are."""
        used = in_use(model)
        self.peaks = [max(peak, now) for peak, now in zip(self.peaks, used, strict=True)]
        return used


def in_use(model: ServingModel) -> tuple[int, int]:
    """Pages of the full and of the SWA pool that are not free."""
    full, swa = model.full, model.swa
    return full.total - len(full.free), swa.total - len(swa.free)


@dataclass(frozen=True, slots=True)
class Header:
    """What a soak was asked for, as its report repeats it."""

    target: str
    workload: str
    geometry: Geometry
    arrivals: Arrivals
    seed: int
    check_every: int
    requests: int


def make_report(
    header: Header,
    run: Run,
    scheduler: Scheduler,
    counts: SoakCounts,
    *,
    at_the_end: tuple[int, int],
    ending: Ending,
) -> SoakReport:
    """The report on a run as it is now; ``at_the_end``: pages in use before the drain."""
    model = run.model
    assert isinstance(model, ServingModel)
    pools = (model.full.total, model.swa.total)
    full, swa = (
        Occupancy(*pool)
        for pool in zip(pools, counts.peaks, at_the_end, in_use(model), strict=True)
    )
    return SoakReport(
        format=FORMAT,
        version=VERSION,
        target=short_name(header.target),
        workload=header.workload,
        geometry=header.geometry,
        arrivals=header.arrivals,
        seed=header.seed,
        check_every=header.check_every,
        requests=header.requests,
        served=len(scheduler.served),
        not_served=tuple((passed.number, passed.why) for passed in scheduler.passed),
        prompt_tokens=counts.prompt_tokens,
        matched_tokens=counts.matched_tokens,
        output_tokens=counts.output_tokens,
        evicted_pages=counts.evicted_pages,
        tombstoned_pages=counts.tombstoned_pages,
        tombstones_made=model.tree.tombstones_made,
        recovered_locked=model.tree.recovered_locked,
        recovered_unlocked=model.tree.recovered_unlocked,
        retractions=counts.retractions,
        retractions_with_backup=counts.retractions_with_backup,
        retracted_requests=len(scheduler.retracted),
        resumes=counts.resumes,
        full=full,
        swa=swa,
        ops=len(run.program),
        checks={law: count for law, count in sorted(run.tally.checks.items()) if count},
        ending=ending,
        violation=run.violation,
    )


def short_name(target: str) -> str:
    """A target's name without the path in it, if there is one."""
    family, colon, rest = target.partition(":")
    return f"{family}:{rest.rstrip('/').rpartition('/')[2]}" if colon else target


def encode_report(report: SoakReport) -> bytes:
    """The report as JSON, the same bytes for the same report."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

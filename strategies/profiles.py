"""Profiles: how long and how hard to look, by name.

`ci` is derandomised and the default of the test suite; `dev` is quick and draws anew each time;
`nightly` is long. Leaves out seeds: those are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings


@dataclass(frozen=True, slots=True)
class Profile:
    """``time_budget`` is the seconds of a verification of our own code, ``foreign_budget`` of a
    release's; ``examples`` and ``steps`` are those of one Hypothesis run in the test suite."""

    name: str
    time_budget: float
    foreign_budget: float
    examples: int
    steps: int
    derandomize: bool


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("dev", 15.0, 10.0, 15, 40, derandomize=False),
        Profile("ci", 95.0, 12.0, 60, 50, derandomize=True),
        Profile("nightly", 1800.0, 600.0, 5000, 100, derandomize=False),
    )
}


def hypothesis_settings(profile: Profile) -> settings:
    """The Hypothesis settings of a profile for tests. The explain phase is left out: it costs
    several times the search and says nothing that a shrunk program does not."""
    return settings(
        max_examples=profile.examples,
        stateful_step_count=profile.steps,
        derandomize=profile.derandomize,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=True,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        database=None if profile.derandomize else settings().database,
    )


def search_settings(examples: int, steps: int) -> settings:
    """Settings of a search in a campaign: no database, no shrinking by Hypothesis (delta debugging
    on ops comes after)."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

"""The targets that serve requests, by family of allocator: kvcore's own, a release's, anybody's.

Each is an allocator built by its own family's factory for the pools alone, and put under kvcore's
prefix cache and request life. Leaves out names (`kvcore.targets.registry`).
"""

from __future__ import annotations

import msgspec

from kvcore.models import Geometry
from kvcore.targets.core import CoreParts, core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.protocol import TargetFactory, UnsupportedGeometry
from kvcore.targets.serving import ServingTarget
from kvcore.targets.sglang.release import Release
from kvcore.targets.sglang.target import release_target

OLDEST_SERVING = "0.5.18"
"""The first release whose groups take every free of a prefix cache."""


def pools_of(geometry: Geometry) -> Geometry:
    """The pools of ``geometry``, without requests and a prefix cache."""
    return msgspec.structs.replace(geometry, window=0, context=0, requests=0)


def serving_core_target(
    geometry: Geometry,
    *,
    name: str = "kvcore",
    validate: bool = True,
    parts: CoreParts | None = None,
) -> ServingTarget:
    """Requests over kvcore's own allocator, empty."""
    parts = parts or CoreParts()
    inner = core_target(pools_of(geometry), name=name, validate=validate, parts=parts)
    return ServingTarget(
        inner,
        geometry,
        name=name,
        cache=parts.cache,
        validate=validate,
        requests=parts.requests,
    )


def serving_release_target(
    release: Release, geometry: Geometry, *, name: str, exhaustion: bool
) -> ServingTarget:
    """Requests over a release's hybrid allocator, empty.

    Raises:
        UnsupportedGeometry: the release is too old, or a geometry that no release has.
    """
    if not release.version_at_least(OLDEST_SERVING):
        raise UnsupportedGeometry(
            f"requests are served over releases from {OLDEST_SERVING} on, whose free groups take "
            f"every free of a prefix cache; got sglang {release.version}"
        )
    inner = release_target(release, pools_of(geometry), name=name, exhaustion=exhaustion)
    return ServingTarget(inner, geometry, name=name)


def serving_over(factory: TargetFactory, geometry: Geometry, *, name: str) -> ServingTarget:
    """Requests over the allocator that somebody's factory makes.

    Raises:
        UnsupportedGeometry: the factory makes a target of another kind, or its allocator lacks a
            call that a prefix cache makes.
    """
    inner = factory(pools_of(geometry))
    if isinstance(inner, AllocatorTarget):
        return ServingTarget(inner, geometry, name=name)
    inner.close()
    raise UnsupportedGeometry(
        f"requests are served over the calls of an allocator, as field_target makes a target of "
        f"them; got a {type(inner).__name__} of {name}"
    )

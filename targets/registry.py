"""Targets by name: what the command line, traces and tests call them.

A name is a family, sometimes an argument after a colon, sometimes a mode after a hash sign. Leaves
out the families themselves.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvcore.models import Geometry
from kvcore.targets.core import core_target
from kvcore.targets.faults import FAULTS, fault_target
from kvcore.targets.protocol import Target, TargetFactory
from kvcore.targets.serving_targets import (
    serving_core_target,
    serving_over,
    serving_release_target,
)
from kvcore.targets.sglang.release import ReleaseError, load_release
from kvcore.targets.sglang.target import release_target
from kvcore.targets.twin import forwarding_twin


class Build(NamedTuple):
    """A variant of our own: whether its allocators check values, whether they do without numpy and
    compiled code, and whether its groups own what callers free in them."""

    validate: bool
    by_torch: bool = False
    owned: bool = False


BUILDS = {
    "kvcore": Build(validate=True),
    "kvcore#unchecked": Build(validate=False),
    "kvcore#torch": Build(validate=False, by_torch=True),
    "kvcore#owned": Build(validate=True, owned=True),
    "kvcore#owned-unchecked": Build(validate=False, owned=True),
    "kvcore#owned-torch": Build(validate=False, by_torch=True, owned=True),
}

WRAPPED = "kvcore#wrapped"
WRAPPER = "wrapper beside inner"
KERNELS = "KVCORE_KERNELS"


class UnknownTarget(Exception):
    """A target name that means nothing here; the message is one sentence."""


def list_targets() -> list[tuple[str, str]]:
    """(name pattern, what it is) of every family."""
    return [
        ("kvcore", "kvcore's own allocators, every check on; the default"),
        ("kvcore#unchecked", "the same with validate=False, as engines run them"),
        ("kvcore#torch", "unchecked too, by torch alone: as on a device, where numpy cannot help"),
        (
            "kvcore#owned",
            "the first of them in owned groups, whose callers leave alone the tensors that they "
            "free; kvcore#owned-unchecked and kvcore#owned-torch are the others",
        ),
        (
            WRAPPED,
            "the compressed HiSparse allocator beside the hybrid one that it wraps, on the same "
            "ops: law L9",
        ),
        (
            "sglang:DIR",
            "the released allocator unpacked in DIR (pip install --no-deps --target DIR "
            "sglang==V), 0.5.13 or newer; verify tries both ways of calling it",
        ),
        ("sglang:DIR#exhaustion", "the same, driven by callers that do not check capacity first"),
        (
            "sglang:DIR#triton",
            "the same as #exhaustion on the release's own page kernels (needs triton and "
            "TRITON_INTERPRET=1)",
        ),
        (
            "python:MODULE:FACTORY",
            "your own: a function of a Geometry that returns a Target, importable from here",
        ),
        ("fault:ID", "kvcore with one known fault put in; `kvcore faults` lists them"),
    ]


def open_target(name: str) -> TargetFactory:
    """The factory behind ``name``; raises `UnknownTarget` with one sentence."""
    family, colon, rest = name.partition(":")
    if name == WRAPPED:
        return lambda geometry: forwarding_twin(geometry, name=name)
    if name in BUILDS:
        return partial(_core, name)
    if family == "fault" and colon:
        return _fault(rest)
    if family == "sglang" and colon:
        return _release(name, rest)
    if family == "python" and colon:
        return _imported_or_serving(name, rest)
    known = ", ".join(pattern for pattern, _ in list_targets())
    raise UnknownTarget(f"unknown target {name!r}; known: {known}")


def variants(name: str) -> list[str]:
    """The targets that a verification of ``name`` covers: all ways in which it is called."""
    if name == "kvcore":
        return [*BUILDS, WRAPPED]
    if name.startswith("sglang:") and "#" not in name:
        return [name, f"{name}#exhaustion"]
    return [name]


def ways(name: str, machine: str) -> list[str]:
    """Those of the variants of ``name`` that ``machine`` is for."""
    if machine == WRAPPER:
        return [WRAPPED] if WRAPPED in variants(name) else [name]
    return [variant for variant in variants(name) if machine in machines(variant)]


def may_crash(name: str) -> bool:
    """Whether code that is not ours runs here, so that programs belong in a child process."""
    return name.startswith(("sglang:", "python:"))


MACHINES = (
    "hybrid",
    "single pool",
    "pure SWA",
    "HiSparse",
    "compressed HiSparse",
    "MLA and DSA pools",
    "request pool",
    "memory saver",
    "composed",
    "requests",
    WRAPPER,
)
"""Every machine, see `kvcore.strategies.machines`."""


def machines(name: str) -> tuple[str, ...]:
    """The machines that a target can be put on trial with: ours with all, a known fault with the
    one that shows it, foreign ones as hybrid allocators, or if they are none as single pools."""
    if name == WRAPPED:
        return (WRAPPER,)
    if name in BUILDS and BUILDS[name].owned:
        # Whole requests free through the core's own callers, which promise nothing.
        return tuple(machine for machine in MACHINES if machine not in ("requests", WRAPPER))
    if name.startswith("kvcore"):
        return MACHINES if name == "kvcore" else MACHINES[:-1]
    family, _, rest = name.partition(":")
    if family == "python":
        return (_fitting_machine(_imported(rest), rest),)
    return (FAULTS[rest].machine,) if family == "fault" else ("hybrid",)


def _core(name: str, geometry: Geometry) -> Target:
    build = BUILDS[name]
    make = serving_core_target if geometry.serves else core_target
    if build.owned:
        make = partial(core_target, owned=True)
    if not build.by_torch:
        return make(geometry, name=name, validate=build.validate)
    # What decides is read when an allocator is built.
    before = os.environ.get(KERNELS)
    os.environ[KERNELS] = "torch"
    try:
        return make(geometry, name=name, validate=build.validate)
    finally:
        if before is None:
            del os.environ[KERNELS]
        else:
            os.environ[KERNELS] = before


def _fault(fault: str) -> TargetFactory:
    if fault not in FAULTS:
        known = ", ".join(sorted(FAULTS))
        raise UnknownTarget(f"unknown fault {fault!r}; known: {known}")
    return lambda geometry: fault_target(fault, geometry)


def _imported(rest: str) -> TargetFactory:
    module, colon, attribute = rest.partition(":")
    if not (module and colon and attribute):
        raise UnknownTarget(f"'python:{rest}' is incomplete; expected python:MODULE:FACTORY")
    # A console script does not look where the user stands, as `python -m` does.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        factory: TargetFactory = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UnknownTarget(f"module {module!r} cannot be imported: {error}") from error
    except AttributeError:
        raise UnknownTarget(f"module {module!r} has no {attribute!r}") from None
    _fitting_machine(factory, f"{module}:{attribute}")
    return factory


def _imported_or_serving(name: str, rest: str) -> TargetFactory:
    factory = _imported(rest)
    return lambda geometry: (
        serving_over(factory, geometry, name=name) if geometry.serves else factory(geometry)
    )


SMALLEST: dict[str, Geometry] = {
    "hybrid": Geometry(page_size=1, full_pages=2, swa_pages=2),
    "single pool": Geometry(page_size=1, full_pages=2),
}
"""A geometry of each machine that imported targets are tried on."""


def _fitting_machine(factory: TargetFactory, name: str) -> str:
    """The first machine of which ``factory`` makes a target; raises `UnknownTarget`."""
    errors: list[Exception] = []
    for machine, geometry in SMALLEST.items():
        try:
            factory(geometry).close()
        except Exception as error:
            errors.append(error)
        else:
            return machine
    text = f"{type(errors[0]).__name__}: {errors[0]}"
    raise UnknownTarget(f"{name} makes no target of a Geometry: {text}") from errors[0]


def _release(name: str, rest: str) -> TargetFactory:
    directory, _, mode = rest.partition("#")
    if mode not in ("", "exhaustion", "triton"):
        raise UnknownTarget(f"unknown mode {mode!r} in {name!r}; known: exhaustion, triton")
    if not directory:
        raise UnknownTarget(f"{name!r} names no directory; expected sglang:DIR")
    try:
        release = load_release(
            Path(directory).expanduser(), kernels="triton" if mode == "triton" else "doubles"
        )
    except ReleaseError as error:
        raise UnknownTarget(str(error)) from error
    return lambda geometry: (serving_release_target if geometry.serves else release_target)(
        release, geometry, name=name, exhaustion=mode != ""
    )

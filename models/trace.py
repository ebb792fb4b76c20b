"""The trace format, version 1: a program with its geometry, and what broke, as JSON Lines.

Line 1 is the header; then one op a line, tagged by kind, with logical names only; the last line may
be the violation. Decoding is strict: an unknown field, a wrong type or an unknown version is one
`TraceError` that names file and line. Leaves out where files are kept: that is
`kvcore.reports.trace_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from kvcore.models.geometry import Geometry
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import OP_KINDS, AnyOp, Hostile, Op
from kvcore.models.request_ops import SERVING_OP_KINDS, RequestOp
from kvcore.models.violation import Violation

FORMAT = "kvcore-trace"
VERSION = 1


class TraceError(Exception):
    """A trace that cannot be read; the message names file, line and what was expected."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """First line of a trace. ``target`` is the name as `kvcore replay --target` takes it;
    ``found_by`` names the source and ``seed`` its seed, if it has one."""

    format: Annotated[str, msgspec.Meta(min_length=1)]
    version: int
    target: str
    geometry: Geometry
    seed: int | None = None
    found_by: str | None = None


class Trace(msgspec.Struct, frozen=True):
    """A program and, if it failed, how."""

    header: Header
    ops: tuple[Op, ...]
    violation: Violation | None = None


class _Prelude(msgspec.Struct):
    """What every version's header says."""

    format: str
    version: int


_encoder = msgspec.json.Encoder()
_prelude = msgspec.json.Decoder(_Prelude)
_header = msgspec.json.Decoder(Header)
_line = msgspec.json.Decoder(AnyOp | RequestOp | Violation)


def new_header(
    target: str, geometry: Geometry, *, seed: int | None = None, found_by: str | None = None
) -> Header:
    """A header of the current version."""
    return Header(FORMAT, VERSION, target, geometry, seed, found_by)


def encode_line(part: Header | Op | Violation) -> bytes:
    """One line of a trace, newline included."""
    return _encoder.encode(part) + b"\n"


def encode_trace(trace: Trace) -> bytes:
    """The whole trace as it is written to a file."""
    return b"".join(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    yield encode_line(trace.header)
    for op in trace.ops:
        yield encode_line(op)
    if trace.violation is not None:
        yield encode_line(trace.violation)


def decode_trace(data: bytes, name: str) -> Trace:
    """Read a trace; ``name`` is the file's name, for errors. A last line that was cut off in the
    middle of writing (the process died) is an error like any other."""
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines:
        raise TraceError(f"{name}: the file is empty; expected a {FORMAT} header in line 1")
    header = _decode_header(lines[0][1], f"{name}:{lines[0][0]}")
    ops, violation = _decode_body(lines[1:], name, serves=header.geometry.serves)
    return Trace(header, tuple(ops), violation)


def _decode_header(line: bytes, where: str) -> Header:
    try:
        # The version first: a later one may well have other fields.
        prelude = _prelude.decode(line)
        if prelude.format != FORMAT:
            raise TraceError(f"{where}: format is {prelude.format!r}, expected {FORMAT!r}")
        if prelude.version != VERSION:
            raise TraceError(f"{where}: version is {prelude.version}, this kvcore reads {VERSION}")
        return _header.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TraceError(f"{where}: no {FORMAT} header: {error}") from None


def _decode_body(
    lines: Iterable[tuple[int, bytes]], name: str, *, serves: bool
) -> tuple[list[Op], Violation | None]:
    ops: list[Op] = []
    violation: Violation | None = None
    for number, line in lines:
        where = f"{name}:{number}"
        if violation is not None:
            raise TraceError(f"{where}: a line after the violation, which must be the last one")
        try:
            part = _line.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{where}: not an op: {error}") from None
        if isinstance(part, Violation):
            violation = part
        elif isinstance(part, Hostile) and part.call not in HOSTILE_CALLS:
            raise TraceError(f"{where}: not an op: unknown hostile call {part.call!r}")
        elif part.kind not in (SERVING_OP_KINDS if serves else OP_KINDS):
            expected = "ops of requests, since" if serves else "no ops of requests, since"
            has = "a window" if serves else "no window"
            raise TraceError(f"{where}: {part.kind}, expected {expected} the geometry has {has}")
        else:
            ops.append(part)
    return ops, violation

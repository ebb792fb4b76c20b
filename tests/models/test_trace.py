"""The trace format: what is written is read back, and what is broken is one line of error.

Every kind of broken line has its case; each must give a TraceError that names file and line.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.models import Clause, Geometry, Violation, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import OP_KINDS, Op
from kvcore.models.trace import (
    FORMAT,
    VERSION,
    Header,
    Trace,
    TraceError,
    decode_trace,
    encode_line,
    encode_trace,
    new_header,
)

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=60)

numbers = st.integers(min_value=0, max_value=2**31)
stops = st.none() | numbers
flags = st.booleans()
free_forms = st.sampled_from(["slots", "sparse", "segment", "segments"])
memories = st.sampled_from(["kv_cache", "weights"])
parts = st.lists(st.tuples(numbers, numbers), max_size=4).map(tuple)
names = st.lists(numbers, max_size=4).map(tuple)

OPS: dict[str, st.SearchStrategy[Op]] = {
    "alloc": st.builds(ops.Alloc, numbers, numbers, flags),
    "extend": st.builds(ops.Extend, parts, flags),
    "decode": st.builds(ops.Decode, names, flags),
    "swa_tail": st.builds(ops.SwaTail, numbers, numbers, numbers, numbers),
    "free": st.builds(ops.Free, numbers, numbers, stops, free_forms, flags),
    "free_swa": st.builds(ops.FreeSwa, numbers, numbers, stops, free_forms, flags),
    "free_full": st.builds(ops.FreeFull, numbers, numbers, stops, free_forms, flags),
    "group_begin": st.builds(ops.GroupBegin),
    "group_end": st.builds(ops.GroupEnd),
    "recover": st.builds(ops.Recover, numbers, numbers, flags, numbers, numbers, numbers),
    "load_back": st.builds(ops.LoadBack, numbers, numbers, numbers),
    "load_back_swa": st.builds(ops.LoadBackSwa, numbers, numbers, stops),
    "retract": st.builds(ops.Retract, numbers, numbers),
    "restore": st.builds(ops.Restore, numbers, numbers, stops),
    "relocate": st.builds(ops.Relocate, numbers),
    "extend_logical": st.builds(ops.ExtendLogical, parts),
    "free_device": st.builds(ops.FreeDevice, numbers, numbers, stops, free_forms, flags),
    "device_buffer": st.builds(ops.DeviceBuffer, numbers, numbers, numbers),
    "free_buffer": st.builds(ops.FreeBuffer, numbers),
    "reserve": st.builds(ops.Reserve, numbers, memories, numbers),
    "drop": st.builds(ops.Drop, numbers),
    "pause": st.builds(ops.Pause, memories),
    "resume": st.builds(ops.Resume, memories),
    "clear": st.builds(ops.Clear),
    "hostile": st.builds(ops.Hostile, st.sampled_from(sorted(HOSTILE_CALLS)), numbers, numbers),
}
any_op = st.one_of(*OPS.values())
page_ids = st.lists(numbers, max_size=3).map(tuple)
clauses = st.builds(Clause, st.text(), st.text(), st.text(), page_ids, page_ids)
violations = st.builds(
    Violation, st.text(), numbers, st.text(), st.lists(clauses, max_size=3).map(tuple)
)
geometries = st.builds(
    Geometry,
    st.integers(1, 64),
    st.integers(1, 999),
    st.integers(0, 999),
    flags,
    attention=st.sampled_from(["mha", "mla", "dsa"]),
    requests=st.integers(0, 9),
    saver=flags,
) | st.sampled_from(
    [
        Geometry(4, 8, pure_swa=True),
        Geometry(4, 8, device_pages=4),
        Geometry(16, 8, 6, device_pages=5, compress=4),
    ]
)
headers = st.builds(
    new_header,
    st.text(),
    geometries,
    seed=st.none() | st.integers(0, 2**63),
    found_by=st.none() | st.text(),
)
traces = st.builds(Trace, headers, st.lists(any_op, max_size=12).map(tuple), st.none() | violations)

HEADER = new_header("kvcore", Geometry(4, 8, 8))
FIRST = encode_line(HEADER)
ALLOC = encode_line(ops.Alloc(1, 2))
BROKEN = encode_line(Violation("L1", 0, "alloc", (Clause("L1", "this", "that", (1,), ()),)))


@QUICK
@given(traces)
def test_a_trace_that_was_written_is_read_back(trace: Trace) -> None:
    assert decode_trace(encode_trace(trace), "t.jsonl") == trace


@QUICK
@given(traces)
def test_a_trace_is_one_line_a_part(trace: Trace) -> None:
    data = encode_trace(trace)
    assert data.endswith(b"\n")
    assert len(data.splitlines()) == 1 + len(trace.ops) + (trace.violation is not None)


@pytest.mark.parametrize("kind", OP_KINDS)
def test_an_op_is_tagged_with_its_kind(kind: str) -> None:
    @settings(QUICK, max_examples=5)
    @given(OPS[kind])
    def check(op: Op) -> None:
        line = encode_line(op)
        assert line.startswith(b'{"op":"' + kind.encode() + b'"')
        assert decode_trace(FIRST + line, "t.jsonl").ops == (op,)

    check()


def test_a_header_says_format_version_target_and_geometry() -> None:
    assert Header(FORMAT, VERSION, "kvcore", Geometry(4, 8, 8)) == HEADER
    assert FIRST == (
        b'{"format":"kvcore-trace","version":1,"target":"kvcore",'
        b'"geometry":{"page_size":4,"full_pages":8,"swa_pages":8}}\n'
    )


def test_lines_may_be_blank_and_end_as_on_windows() -> None:
    trace = Trace(HEADER, (ops.Alloc(1, 2),))
    assert decode_trace(b"\n\n" + FIRST + b"\n" + ALLOC + b"\n", "t.jsonl") == trace
    assert decode_trace((FIRST + ALLOC).replace(b"\n", b"\r\n"), "t.jsonl") == trace


def test_a_trace_that_ends_with_a_violation_has_it() -> None:
    trace = decode_trace(FIRST + ALLOC + BROKEN, "t.jsonl")
    assert trace.violation is not None
    assert trace.violation.signature == ("L1", "alloc")


DEEP = b"[" * 100_000
GEOMETRY = b'"geometry":{"page_size":4,"full_pages":8}'


def header(text: bytes) -> bytes:
    return b'{"format":"kvcore-trace","version":1,"target":"kvcore",' + text + b"}\n"


@pytest.mark.parametrize(
    ("data", "line", "say"),
    [
        pytest.param(b"", 0, "the file is empty", id="empty file"),
        pytest.param(b"\n \n", 0, "the file is empty", id="blank lines alone"),
        pytest.param(b"hello\n", 1, "no kvcore-trace header", id="text"),
        pytest.param(b"\x00\xff\xfe\x80" * 9, 1, "no kvcore-trace header", id="binary garbage"),
        pytest.param(ALLOC + FIRST, 1, "no kvcore-trace header", id="an op first"),
        pytest.param(b"\n\n" + ALLOC, 3, "no kvcore-trace header", id="an op first in line 3"),
        pytest.param(FIRST[:-20], 1, "truncated", id="half a header"),
        pytest.param(DEEP, 1, "no kvcore-trace header", id="deep nesting first"),
        pytest.param(
            header(b'"geometry":' + DEEP), 1, "no kvcore-trace header", id="deep nesting in line 1"
        ),
        pytest.param(header(b'"seed":1'), 1, "geometry", id="no geometry"),
        pytest.param(header(GEOMETRY + b',"colour":1'), 1, "colour", id="unknown header field"),
        pytest.param(header(GEOMETRY + b',"seed":"x"'), 1, "seed", id="wrong type in the header"),
        pytest.param(
            header(b'"geometry":{"page_size":4,"full_pages":8,"rows":1}'), 1, "rows",
            id="unknown geometry field",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":-4,"full_pages":8}'), 1, "page_size is -4",
            id="negative page size",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":4,"full_pages":0}'), 1, "full_pages is 0",
            id="no pages",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":4,"full_pages":8,"swa_pages":-1}'), 1,
            "swa_pages is -1", id="negative SWA pages",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":4,"full_pages":8,"device_pages":3}'), 1,
            "a multiple of device_pages 3", id="device pages that do not fit",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":4,"full_pages":8,"attention":"gqa"}'), 1, "attention",
            id="unknown attention",
        ),
        pytest.param(
            header(b'"geometry":{"page_size":true,"full_pages":8}'), 1, "page_size",
            id="a page size that is true",
        ),
        pytest.param(
            FIRST.replace(b"kvcore-trace", b"other-trace"), 1, "format is 'other-trace'",
            id="wrong format",
        ),
        pytest.param(FIRST.replace(b"kvcore-trace", b""), 1, "format", id="empty format"),
        pytest.param(
            FIRST.replace(b'"version":1', b'"version":2'), 1, "version is 2, this kvcore reads 1",
            id="wrong version",
        ),
        pytest.param(
            FIRST.replace(b'"version":1', b'"version":"1"'), 1, "version", id="version as text"
        ),
        pytest.param(
            FIRST + b'{"op":"alloc","seq":1,"pages":1,"page":1}\n', 2, "page", id="unknown field"
        ),
        pytest.param(FIRST + b'{"op":"alloc","seq":1}\n', 2, "pages", id="missing field"),
        pytest.param(FIRST + b'{"op":"alloc","seq":"1","pages":1}\n', 2, "seq", id="wrong type"),
        pytest.param(FIRST + b'{"op":"alloc","seq":1,"pages":1.5}\n', 2, "pages", id="a fraction"),
        pytest.param(FIRST + b'{"op":"alloc","seq":1,"pages":null}\n', 2, "pages", id="null"),
        pytest.param(
            FIRST + b'{"op":"extend","parts":[[1,2,3]]}\n', 2, "parts", id="a part of three"
        ),
        pytest.param(
            FIRST + b'{"op":"free","seq":1,"form":"list"}\n', 2, "form", id="unknown form"
        ),
        pytest.param(
            FIRST + b'{"op":"swa_tail","seq":1,"tokens":4,"tail":8,"beyond":-4}\n', 2, "beyond",
            id="a negative end",
        ),
        pytest.param(FIRST + b'{"op":"pause","memory":"heap"}\n', 2, "memory", id="unknown memory"),
        pytest.param(
            FIRST + b'{"op":"reserve","region":1,"memory":"weights"}\n', 2, "size",
            id="a piece without a size",
        ),
        pytest.param(FIRST + ALLOC + b'{"op":"grow","seq":1}\n', 3, "grow", id="unknown op"),
        pytest.param(FIRST + b'{"seq":1,"pages":1}\n', 2, "op", id="no op"),
        pytest.param(
            FIRST + b'{"op":"hostile","call":"free_all"}\n', 2,
            "unknown hostile call 'free_all'", id="unknown hostile call",
        ),
        pytest.param(FIRST + b"[]\n", 2, "not an op", id="a list"),
        pytest.param(FIRST + ALLOC + b"\x00\xff\n", 3, "not an op", id="binary line"),
        pytest.param(
            FIRST + b'{"op":"hostile","call":"\xff"}\n', 2, "not an op", id="broken UTF-8"
        ),
        pytest.param(FIRST + b'{"seq":' + DEEP, 2, "not an op", id="deep nesting"),
        pytest.param(FIRST + ALLOC + ALLOC[:-9], 3, "truncated", id="truncated last line"),
        pytest.param(
            FIRST + ALLOC + BROKEN + ALLOC, 4, "a line after the violation",
            id="an op after the violation",
        ),
        pytest.param(
            FIRST + BROKEN + BROKEN, 3, "a line after the violation", id="two violations"
        ),
        pytest.param(FIRST + FIRST, 2, "not an op", id="two headers"),
        pytest.param(
            FIRST + BROKEN.replace(b"full_pages", b"pages"), 2, "pages",
            id="unknown field in a clause",
        ),
    ],
)  # fmt: skip
def test_a_broken_trace_is_one_error_that_names_the_line(data: bytes, line: int, say: str) -> None:
    with pytest.raises(TraceError) as caught:
        decode_trace(data, "runs/t.jsonl")
    message = str(caught.value)
    assert message.startswith(f"runs/t.jsonl:{line}: " if line else "runs/t.jsonl: ")
    assert say in message
    assert "\n" not in message
    assert len(message) < 300


def read(data: bytes) -> Trace | str:
    """The trace, or what the error says."""
    try:
        return decode_trace(data, "t.jsonl")
    except TraceError as error:
        return str(error)


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_a_trace_error(data: bytes) -> None:
    for content in (data, FIRST + data):
        found = read(content)
        assert isinstance(found, Trace) or found.startswith("t.jsonl:")


@QUICK
@given(st.lists(any_op, min_size=1, max_size=4).map(tuple), st.data())
def test_a_trace_cut_off_anywhere_is_shorter_or_an_error(
    program: tuple[Op, ...], data: st.DataObject
) -> None:
    whole = encode_trace(Trace(HEADER, program))
    cut = data.draw(st.integers(len(FIRST), len(whole) - 1))
    found = read(whole[:cut])
    if isinstance(found, Trace):
        assert found.ops == program[: len(found.ops)]
    else:
        assert "truncated" in found


@pytest.mark.parametrize(
    ("geometry", "op", "why"),
    [
        (Geometry(1, 4, 4), b'{"op":"flush"}', "the geometry has no window"),
        (
            Geometry(1, 4, 4, requests=2, window=2),
            b'{"op":"alloc","seq":1,"pages":1}',
            "the geometry has a window",
        ),
    ],
    ids=["of requests", "of an allocator"],
)
def test_an_op_of_the_other_level_is_rejected(geometry: Geometry, op: bytes, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        decode_trace(encode_line(new_header("kvcore", geometry)) + op, "it")

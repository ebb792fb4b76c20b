"""Traces on disk: whole or not at all, named after what broke, readable up to a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kvcore.invariants import LawBroken, Run
from kvcore.models import Geometry, ops
from kvcore.models.ops import OP_KINDS, AnyOp, Op
from kvcore.models.request_ops import REQUEST_OP_KINDS, RequestOp
from kvcore.models.trace import Trace, TraceError, encode_trace, new_header
from kvcore.reports.trace_files import (
    TraceFileError,
    TraceWriter,
    check_directory,
    check_file,
    read_trace,
    replay_command,
    save_trace,
    trace_name,
    write_trace,
)
from kvcore.targets.registry import open_target

GEOMETRY = Geometry(page_size=1, full_pages=4, swa_pages=4)


def test_what_is_written_is_read_back(leak: Trace, tmp_path: Path) -> None:
    path = save_trace(leak, tmp_path / "deep" / "down")
    assert path.parent == tmp_path / "deep" / "down"
    assert read_trace(path) == leak


def test_the_name_says_law_op_and_target(leak: Trace) -> None:
    assert trace_name(leak).startswith("L3-group_end-fault-deferred-peer-lookup-")
    assert trace_name(leak).endswith(".jsonl")


def test_the_name_of_a_trace_without_a_violation_says_so() -> None:
    assert trace_name(Trace(new_header("kvcore", GEOMETRY), (ops.GroupBegin(),))).startswith(
        "clean-kvcore-"
    )


def test_traces_that_differ_have_names_that_differ(leak: Trace) -> None:
    shorter = Trace(leak.header, leak.ops[:-1], leak.violation)
    assert trace_name(leak) == trace_name(leak)
    assert trace_name(leak) != trace_name(shorter)


@pytest.mark.parametrize(
    ("target", "slug"),
    [
        ("kvcore#unchecked", "kvcore-unchecked"),
        ("sglang:/some/where/sgl-0.5.18/", "sglang-sgl-0.5.18"),
        ("sglang:rel ease#exhaustion", "sglang-rel-ease-exhaustion"),
        ("sglang:..", "sglang-.."),
    ],
)
def test_a_target_in_a_name_is_no_path(target: str, slug: str) -> None:
    name = trace_name(Trace(new_header(target, GEOMETRY), ()))
    assert name.startswith(f"clean-{slug}-")
    assert "/" not in name


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(leak: Trace, tmp_path: Path) -> None:
    in_the_way = tmp_path / trace_name(leak)
    in_the_way.mkdir()
    with pytest.raises(TraceFileError, match="cannot be written"):
        save_trace(leak, tmp_path)
    assert list(tmp_path.iterdir()) == [in_the_way]


def test_a_file_in_place_of_the_directory_is_told_in_one_sentence(
    leak: Trace, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceFileError, match="cannot be written") as caught:
        save_trace(leak, tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_a_written_trace_can_be_read_by_others(leak: Trace, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = save_trace(leak, tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_existing_trace_is_replaced_whole(leak: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("something longer than a trace\n" * 1000)
    write_trace(leak, path)
    assert path.read_bytes() == encode_trace(leak)


def test_directories_are_checked_before_a_long_run(tmp_path: Path) -> None:
    check_directory(tmp_path / "yet" / "to" / "be" / "made")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TraceFileError, match="is not a directory"):
            check_directory(wrong)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_without_permission_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TraceFileError, match="no permission"):
        check_directory(tmp_path / "traces")


def test_files_are_checked_before_a_long_shrink(tmp_path: Path) -> None:
    check_file(tmp_path / "out.jsonl")
    with pytest.raises(TraceFileError, match="it is a directory"):
        check_file(tmp_path)
    with pytest.raises(TraceFileError, match="there is no directory"):
        check_file(tmp_path / "missing" / "out.jsonl")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "the file is empty"),
        (b"not json\n", ":1: no kvcore-trace header"),
        (b"\xff\xfe\n", ":1: no kvcore-trace header"),
        (b"[" * 100_000, ":1: no kvcore-trace header"),
        (b'{"format":"kvcore-trace","version":2,"target":"x","geometry":{}}', ":1: "),
    ],
)
def test_a_broken_trace_is_one_sentence(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_line_is_named(leak: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = encode_trace(leak).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"op":"alloc","seq":1,"pages":"two"}\n']))
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: not an op"):
        read_trace(path)


def test_what_is_no_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a regular file"):
        read_trace(tmp_path / "pipe")


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    impossible = tmp_path / ("long" * 1000)
    with pytest.raises(TraceError, match="cannot be read: File name too long"):
        read_trace(impossible)
    for check in (check_file, check_directory):
        with pytest.raises(TraceFileError, match="cannot be written: File name too long"):
            check(impossible)


def test_the_replay_command_is_ready_for_a_shell() -> None:
    assert replay_command(Path("a/b.jsonl")) == "kvcore replay a/b.jsonl"
    assert replay_command(Path("a b"), "fault:x y") == "kvcore replay 'a b' --target 'fault:x y'"


def test_a_run_writes_its_trace_as_it_goes(leak: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, leak.header) as writer:
        run = Run(open_target(leak.header.target)(leak.header.geometry), listeners=[writer])
        for at, op in enumerate(leak.ops[:-1], 1):
            run.step(op)
            assert read_trace(path).ops == leak.ops[:at]
        with pytest.raises(LawBroken):
            run.step(leak.ops[-1])
    assert read_trace(path) == leak


def test_an_op_that_is_not_allowed_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, new_header("kvcore", GEOMETRY)) as writer:
        run = Run(open_target("kvcore")(GEOMETRY), listeners=[writer])
        run.step(ops.Free(1))
    assert read_trace(path).ops == ()


CRASH = """
import os, sys
from pathlib import Path
from kvcore.invariants.run import Applying
from kvcore.models import Geometry, ops
from kvcore.models.trace import new_header
from kvcore.reports.trace_files import TraceWriter

writer = TraceWriter(Path(sys.argv[1]), new_header("kvcore", Geometry(1, 4, 4)))
writer(Applying(0, ops.Alloc(1, 1)))
writer(Applying(1, ops.Decode((1,))))
os.kill(os.getpid(), 9)
"""


def test_a_crash_leaves_the_trace_up_to_the_op_that_did_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = subprocess.run([sys.executable, "-c", CRASH, str(path)], cwd=tmp_path, check=False)
    assert done.returncode == -9
    expected: tuple[Op, ...] = (ops.Alloc(1, 1), ops.Decode((1,)))
    assert read_trace(path).ops == expected


def test_a_recording_that_cannot_be_started_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be written"):
        TraceWriter(tmp_path / "missing" / "trace.jsonl", new_header("kvcore", GEOMETRY))


def test_the_page_on_the_format_names_every_op_and_every_field() -> None:
    words = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    kinds = (*get_args(AnyOp), *get_args(RequestOp))
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    for name in {*OP_KINDS, *REQUEST_OP_KINDS, *Geometry.__struct_fields__, *fields}:
        assert f"`{name}`" in words

"""Workloads: what is read from a file, and how a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.models.texts import length, token_ids
from kvcore.strategies.workload import (
    BLOCK_TOKENS,
    FIRST_OUTPUT_STREAM,
    FIRST_PROMPT_STREAM,
    MOST_TOKENS,
    Arrival,
    WorkloadError,
    read_workload,
)


def mooncake(*changes: dict[str, object]) -> str:
    """One line for each of ``changes`` to a good request of two blocks."""
    good = {"timestamp": 7, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}
    return "".join(json.dumps({**good, **change}) + "\n" for change in changes)


def read(tmp_path: Path, text: str, name: str = "w.jsonl") -> list[Arrival]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_workload(path)


def told(tmp_path: Path, text: str, name: str = "w.jsonl") -> str:
    """The sentence on a bad workload, without the directory."""
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, text, name)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.removeprefix(f"{tmp_path}/")


def test_a_request_is_what_its_line_says(tmp_path: Path) -> None:
    [request] = read(tmp_path, mooncake({}))
    assert (request.number, request.at, request.output_tokens) == (0, 7, 5)
    assert request.text == ((3, BLOCK_TOKENS), (4, 600 - BLOCK_TOKENS))
    assert (request.prompt_tokens, request.tokens) == (600, 605)


def test_equal_ids_at_the_front_are_equal_tokens(tmp_path: Path) -> None:
    first, second = read(tmp_path, mooncake({}, {"hash_ids": [3, 5], "input_length": 1024}))
    whole = BLOCK_TOKENS
    assert token_ids(first.text, 0, whole) == token_ids(second.text, 0, whole)
    rest = set(token_ids(first.text, whole, 600))
    assert rest.isdisjoint(token_ids(second.text, whole, 1024))


def test_nobody_generates_what_anybody_else_has(tmp_path: Path) -> None:
    requests = read(tmp_path, mooncake({}, {}, {"hash_ids": [FIRST_PROMPT_STREAM - 1, 0]}))
    outputs = [request.output for request in requests]
    prompts = {stream for request in requests for stream, _ in request.text}
    assert len(set(outputs)) == 3
    assert prompts.isdisjoint(outputs)


def test_blank_lines_are_no_requests_but_count_as_lines(tmp_path: Path) -> None:
    assert len(read(tmp_path, "\n" + mooncake({}) + "\n\n" + mooncake({}))) == 2
    assert told(tmp_path, "\n" + mooncake({}) + "\nx\n").startswith("w.jsonl:4: 'x' is no request")


def test_csv_requests_share_nothing(tmp_path: Path) -> None:
    text = "output_length, input_length\n3,40\n\n2,40\n"
    first, second = read(tmp_path, text, "w.CSV")
    assert (length(first.text), first.output_tokens, first.at) == (40, 3, None)
    assert (length(second.text), second.output_tokens) == (40, 2)
    assert first.text[0][0] != second.text[0][0]
    streams = [*(one.text[0][0] for one in (first, second)), first.output, second.output]
    assert len(set(streams)) == 4
    assert min(streams) == FIRST_PROMPT_STREAM
    assert max(streams) == FIRST_OUTPUT_STREAM + 1


def test_csv_may_say_when_requests_arrive(tmp_path: Path) -> None:
    [request] = read(tmp_path, "input_length,output_length,timestamp\n4,3,1.5\n", "w.csv")
    assert request.at == 1.5


BAD_LINES: dict[str, tuple[dict[str, object], str]] = {
    "negative length": ({"input_length": -1}, "Expected `int` >= 1 - at `$.input_length`"),
    "no input": ({"input_length": 0, "hash_ids": []}, ">= 1 - at `$.input_length`"),
    "no output": ({"output_length": 0}, ">= 1 - at `$.output_length`"),
    "negative time": ({"timestamp": -1}, ">= 0.0 - at `$.timestamp`"),
    "too long": ({"input_length": MOST_TOKENS + 1}, f"<= {MOST_TOKENS} - at `$.input_length`"),
    "length in words": ({"input_length": "600"}, "Expected `int`, got `str`"),
    "part of a token": ({"input_length": 600.5}, "Expected `int`, got `float`"),
    "too few ids": ({"hash_ids": [3]}, "hash_ids has 1 ids, expected 2"),
    "too many ids": ({"hash_ids": [3, 4, 5]}, "hash_ids has 3 ids, expected 2"),
    "negative id": ({"hash_ids": [3, -4]}, ">= 0 - at `$.hash_ids[1]`"),
    "unknown field": ({"model": "m"}, "unknown field `model`"),
}


@pytest.mark.parametrize(("change", "why"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_request_is_told_with_file_and_line(
    change: dict[str, object], why: str, tmp_path: Path
) -> None:
    sentence = told(tmp_path, mooncake({}, change))
    assert sentence.startswith("w.jsonl:2: ")
    assert why in sentence


@pytest.mark.parametrize("line", ["x", "{", "[]", "3", '{"timestamp": 0}', "[" * 10_000])
def test_what_is_no_request_is_told_with_what_was_expected(line: str, tmp_path: Path) -> None:
    sentence = told(tmp_path, line)
    assert sentence.startswith("w.jsonl:1: ")
    assert "no request (timestamp, input_length, output_length, hash_ids)" in sentence
    assert len(sentence) < 250


BAD_TABLES = {
    "unknown column": ("input_length,output_length,model\n", "w.csv:1: unknown column 'model'"),
    "column missing": ("input_length\n4\n", "w.csv:1: no column output_length"),
    "column twice": ("input_length,output_length,input_length\n", "w.csv:1: column input_length"),
    "no header": ("4,3\n", "w.csv:1: unknown column '4', expected input_length, output_length"),
    "cell missing": ("input_length,output_length\n4,3\n4\n", "w.csv:3: 1 cells, expected 2"),
    "negative": ("input_length,output_length\n4,-3\n", "w.csv:2: '4,-3' is no request"),
    "zero": ("input_length,output_length\n0,3\n", "w.csv:2: '0,3' is no request"),
    "words": ("input_length,output_length\n4,many\n", "w.csv:2: '4,many' is no request"),
    "no time": ("input_length,output_length,timestamp\n4,3,\n", "w.csv:2: '4,3,' is no request"),
    "not a time": ("input_length,output_length,timestamp\n4,3,nan\n", "w.csv:2: '4,3,nan'"),
    "open quote": ('input_length,output_length\n"4,3\n', "w.csv:2: not a line of CSV"),
    "header alone": ("input_length,output_length\n", "w.csv: no requests in the file"),
    "nothing": ("", "w.csv: no requests in the file, expected one a line"),
}


@pytest.mark.parametrize(("text", "begins"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_is_told_with_file_and_line(text: str, begins: str, tmp_path: Path) -> None:
    assert told(tmp_path, text, "w.csv").startswith(begins)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    assert told(tmp_path, " \n\n") == "w.jsonl: no requests in the file, expected one a line"
    (tmp_path / "bytes").write_bytes(mooncake({}).encode() + b"\xff")
    for path, why in [
        (tmp_path / "missing", "cannot be read"),
        (tmp_path, "is a directory"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / "bytes", "not UTF-8"),
    ]:
        with pytest.raises(WorkloadError, match=why):
            read_workload(path)

"""Recorded workloads: the requests of a real server, as texts that arrive at given times.

Reads JSON Lines in the format of the public Mooncake traces (kvcache-ai/Mooncake, FAST25-release)
and CSV with a header; strict, so that a typing error is never a workload. Leaves out what becomes
of the requests (`kvcore.strategies.scheduler`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvcore.models.texts import STREAM_BITS, Piece, Text, cut, length

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for; the last block of a prompt may be shorter."""

MOST_TOKENS = 2**STREAM_BITS - 1
"""Longest prompt and longest output: more than any engine serves."""

MOST_MILLISECONDS = 10**12
"""Latest arrival, some thirty years after the start."""

FIRST_PROMPT_STREAM = 10**11
"""Hash ids are streams as they are, below this. Prompts without ids have streams of their own from
here on, one each, and so do outputs from `FIRST_OUTPUT_STREAM` on."""

FIRST_OUTPUT_STREAM = 2 * 10**11

MOST_SHOWN = 60
"""Characters of a bad value that a message repeats."""


class WorkloadError(Exception):
    """A workload that cannot be read; the message is one sentence with file, line and what was
    expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it was recorded. ``number``: its place in the file, from 0. ``at``: milliseconds
    since the start, None if the file does not say. ``output``: the stream of what it generates,
    ``output_tokens`` long."""

    number: int
    at: float | None
    text: Text
    output_tokens: int

    @property
    def output(self) -> int:
        """The stream of its output, which no other request has."""
        return FIRST_OUTPUT_STREAM + self.number

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return length(self.text)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens


Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MILLISECONDS)]
HashId = Annotated[int, msgspec.Meta(ge=0, lt=FIRST_PROMPT_STREAM)]


class _MooncakeLine(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[HashId]


class _CsvLine(msgspec.Struct, forbid_unknown_fields=True):
    input_length: Tokens
    output_length: Tokens
    timestamp: Milliseconds = 0.0


CSV_NEEDED = ("input_length", "output_length")
CSV_COLUMNS = (*CSV_NEEDED, "timestamp")


def read_workload(path: Path) -> list[Arrival]:
    """The requests of the file, in its order. A name that ends in ``.csv`` means CSV, any other
    JSON Lines. Raises `WorkloadError`."""
    text = _text_of(path)
    read = _read_csv if path.suffix.lower() == ".csv" else _read_mooncake
    found = list(read(text, str(path)))
    if not found:
        raise WorkloadError(f"{path}: no requests in the file, expected one a line")
    return found


def _text_of(path: Path) -> str:
    try:
        if path.is_dir():
            raise WorkloadError(f"{path}: is a directory, expected a workload file")
        # Reading from a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise WorkloadError(f"{path}: is not a regular file, expected a workload file")
        data = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise WorkloadError(f"{path}:{line}: not UTF-8 text, expected a workload file") from None


def _read_mooncake(text: str, name: str) -> Iterator[Arrival]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, (place, line) in enumerate(_numbered(text)):
        where = f"{name}:{place}"
        try:
            found = decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _no_request(where, line, _MooncakeLine, error) from None
        blocks = -(-found.input_length // BLOCK_TOKENS)
        if len(found.hash_ids) != blocks:
            raise WorkloadError(
                f"{where}: hash_ids has {len(found.hash_ids)} ids, expected {blocks}: one for each "
                f"{BLOCK_TOKENS} of {found.input_length} input tokens"
            )
        pieces: list[Piece] = [(block, BLOCK_TOKENS) for block in found.hash_ids]
        prompt = cut(tuple(pieces), found.input_length)
        yield Arrival(number, found.timestamp, prompt, found.output_length)


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers from 1."""
    # Only a line feed ends a line; `splitlines` would stop at others, within strings too.
    for place, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield place, line


def _read_csv(text: str, name: str) -> Iterator[Arrival]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    columns: list[str] | None = None
    number = 0
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise WorkloadError(f"{name}:{rows.line_num}: not a line of CSV: {error}") from None
        if row is None:
            return
        cells = [cell.strip() for cell in row]
        where = f"{name}:{rows.line_num}"
        if not any(cells):
            continue
        if columns is None:
            columns = _csv_header(cells, where)
            continue
        yield _csv_arrival(number, columns, cells, where)
        number += 1


def _csv_header(cells: list[str], where: str) -> list[str]:
    expected = f"expected {', '.join(CSV_NEEDED)} and perhaps timestamp"
    for cell in cells:
        if cell not in CSV_COLUMNS:
            raise WorkloadError(f"{where}: unknown column {_short(cell)}, {expected}")
        if cells.count(cell) > 1:
            raise WorkloadError(f"{where}: column {cell} twice, {expected}")
    for needed in CSV_NEEDED:
        if needed not in cells:
            raise WorkloadError(f"{where}: no column {needed}, {expected}")
    return cells


def _csv_arrival(number: int, columns: list[str], cells: list[str], where: str) -> Arrival:
    if len(cells) != len(columns):
        raise WorkloadError(
            f"{where}: {len(cells)} cells, expected {len(columns)}: {', '.join(columns)}"
        )
    row = dict(zip(columns, cells, strict=True))
    try:
        # Cells are text: numbers are recognised in them, and nothing else is.
        found = msgspec.convert(row, _CsvLine, strict=False)
    except msgspec.MsgspecError as error:
        raise _no_request(where, ",".join(cells), _CsvLine, error) from None
    prompt = ((FIRST_PROMPT_STREAM + number, found.input_length),)
    at = found.timestamp if "timestamp" in row else None
    return Arrival(number, at, prompt, found.output_length)


def _no_request(
    where: str, line: str, expected: type[msgspec.Struct], error: Exception
) -> WorkloadError:
    fields = ", ".join(expected.__struct_fields__)
    return WorkloadError(f"{where}: {_short(line)} is no request ({fields}): {error}")


def _short(line: str) -> str:
    """A value for a message, cut if it is long."""
    text = line.strip()
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")

"""Simpler request-level ops for a shrink: shorter texts of fewer pieces, smaller batches, plainer
ends of requests.

Leaves out the calls of allocators (`kvcore.strategies.simpler`) and whether a program still fails
(`kvcore.strategies.shrink`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from kvcore.models import Geometry
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    LoadPrefix,
    Prefill,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
    Speculate,
    Trim,
)
from kvcore.models.texts import Piece, Text, length

Program = tuple[Op, ...]


def fewer_tokens(count: int, size: int) -> list[int]:
    """Smaller counts worth trying, smallest first: few, half, a page less, whole pages."""
    tried = {1, 2, size, size + 1, count // 2, count - size, count - 1, count // size * size}
    return sorted(fewer for fewer in tried if 1 <= fewer < count)


def simpler_request(op: Op, size: int) -> Iterator[Op]:
    """Variants of a request-level op that say less, simplest first; ``size`` is the page size."""
    match op:
        case Admit():
            if op.tokens is not None:
                yield replace(op, tokens=None)
                for fewer in fewer_tokens(op.tokens, size):
                    yield replace(op, tokens=fewer)
            for text in simpler_texts(op.text, size):
                yield replace(op, text=text)
        case SavePrefix():
            for text in simpler_texts(op.text, size):
                yield replace(op, text=text)
        case Prefill() | Speculate():
            for fewer in fewer_tokens(op.tokens, size):
                yield replace(op, tokens=fewer)
        case Trim():
            for fewer in (0, *fewer_tokens(op.accepted, size)):
                if fewer < op.accepted:
                    yield replace(op, accepted=fewer)
        case DecodeStep() | Slide():
            for at in range(len(op.reqs)):
                if len(op.reqs) > 1:
                    yield replace(op, reqs=op.reqs[:at] + op.reqs[at + 1 :])
        case RetractRequest():
            if op.backup:
                yield replace(op, backup=False)
            yield Abort(op.req)
        case Finish():
            yield Abort(op.req)
        case EndLoad() if op.failed:
            yield replace(op, failed=False)
        case Evict():
            yield from _simpler_evict(op, size)


def _simpler_evict(op: Evict, size: int) -> Iterator[Op]:
    """One side alone, and fewer tokens."""
    if op.full_tokens and op.swa_tokens:
        yield replace(op, full_tokens=0)
        yield replace(op, swa_tokens=0)
    for fewer in fewer_tokens(op.full_tokens, size):
        yield replace(op, full_tokens=fewer)
    for fewer in fewer_tokens(op.swa_tokens, size):
        yield replace(op, swa_tokens=fewer)


def simpler_texts(text: Text, size: int) -> Iterator[Text]:
    """A piece less, all in one piece, or a shorter piece."""
    if len(text) > 1:
        for at in range(len(text)):
            yield text[:at] + text[at + 1 :]
        yield ((text[0][0], length(text)),)
    for at, (stream, count) in enumerate(text):
        for fewer in fewer_tokens(count, size):
            yield (*text[:at], (stream, fewer), *text[at + 1 :])


def tokens_taken(op: Op) -> int:
    """Tokens for which an op takes slots, if nothing of its text is cached."""
    match op:
        case Admit():
            return op.tokens or length(op.text)
        case Prefill() | Speculate():
            return op.tokens
        case _:
            return 0


def request_pages(op: Op, geometry: Geometry) -> int:
    """Pages that an op takes on each side, if nothing of its text is cached."""
    return geometry.pages_for(tokens_taken(op))


def shorter_request(op: Op, tokens: int) -> Op | None:
    """``op`` with so many tokens fewer at the end of its text."""
    if isinstance(op, Admit) and op.tokens is None and op.text[-1][1] > tokens:
        stream, count = op.text[-1]
        return replace(op, text=(*op.text[:-1], (stream, count - tokens)))
    return None


# Whole programs.


def merged_requests(program: Program, at: int) -> Iterator[Program]:
    """The program with the request that begins at ``at`` coming with more of its tokens: what is
    prefilled, decoded or accepted later belongs to its text at once."""
    first = program[at]
    if not isinstance(first, Admit):
        return
    later = [number for number in range(at + 1, len(program)) if _adds(program[number], first.req)]
    for numbers in (later, *([number] for number in later)):
        if len(numbers) > 1 or numbers is not later:
            yield _with_more(program, at, numbers)


def _adds(op: Op, req: int) -> bool:
    """Whether the op gives the request tokens."""
    match op:
        case Prefill() | Trim():
            return op.req == req
        case DecodeStep():
            return req in op.reqs
        case _:
            return False


def _with_more(program: Program, at: int, numbers: list[int]) -> Program:
    """The program with the tokens of the ops at ``numbers`` in the text of the admission."""
    first = program[at]
    assert isinstance(first, Admit)
    generated = 0
    out: list[Op] = list(program[: at + 1])
    for number, op in enumerate(program[at + 1 :], at + 1):
        if number not in numbers:
            out.append(op)
            continue
        match op:
            case Trim():
                generated += op.accepted
                drafted = [i for i, one in enumerate(out) if _drafts(one, first.req)]
                if drafted:
                    out.pop(drafted[-1])
            case DecodeStep():
                generated += 1
                if len(op.reqs) > 1:
                    out.append(replace(op, reqs=tuple(r for r in op.reqs if r != first.req)))
    out[at] = replace(first, tokens=None, text=_longer(first.text, first.output, generated))
    return tuple(out)


def _drafts(op: Op, req: int) -> bool:
    return isinstance(op, Speculate) and op.req == req


def _longer(text: Text, stream: int, more: int) -> Text:
    """The text with tokens of a stream at its end."""
    if not more:
        return text
    if text[-1][0] == stream:
        return (*text[:-1], (stream, text[-1][1] + more))
    return (*text, (stream, more))


def retold(program: Program, size: int) -> Iterator[Program]:
    """The program with a piece of text shorter, left out or of another stream wherever it stands:
    texts that begin alike still do."""
    pieces = list(dict.fromkeys(piece for text in _texts(program) for piece in text))
    for piece in pieces:
        stream, count = piece
        yield _with_texts(program, {piece: ()})
        for other in dict.fromkeys(stream for stream, _ in pieces):
            if other < stream:
                yield _with_texts(program, {piece: ((other, count),)})
        for fewer in fewer_tokens(count, size):
            yield _with_texts(program, {piece: ((stream, fewer),)})
    longer = {piece: ((piece[0], piece[1] - size),) for piece in pieces if piece[1] > size}
    yield _with_texts(program, longer)


def _texts(program: Program) -> list[Text]:
    return [op.text for op in program if isinstance(op, Admit | SavePrefix)]


def _with_texts(program: Program, other: Mapping[Piece, Text]) -> Program:
    """Every text with other pieces; one of which nothing would be left stays as it is."""

    def told(op: Op) -> Op:
        if not isinstance(op, Admit | SavePrefix):
            return op
        text = tuple(new for piece in op.text for new in other.get(piece, (piece,)))
        return replace(op, text=text) if text else op

    return tuple(told(op) for op in program)


def renumber_requests(program: Program) -> Program:
    """Requests, copies and loads numbered from 1 in order of appearance, streams from 0."""
    reqs: dict[int, int] = {}
    copies: dict[int, int] = {}
    loads: dict[int, int] = {}
    streams: dict[int, int] = {}

    def req(name: int) -> int:
        return reqs.setdefault(name, len(reqs) + 1)

    def copy(name: int) -> int:
        return copies.setdefault(name, len(copies) + 1)

    def load(name: int) -> int:
        return loads.setdefault(name, len(loads) + 1)

    def stream(name: int) -> int:
        return streams.setdefault(name, len(streams))

    def told(text: Text) -> Text:
        return tuple((stream(name), count) for name, count in text)

    def one(op: Op) -> Op:
        match op:
            case Admit():
                text = told(op.text)
                return replace(op, req=req(op.req), text=text, output=stream(op.output))
            case SavePrefix():
                return replace(op, copy=copy(op.copy), text=told(op.text))
            case LoadPrefix():
                return replace(op, copy=copy(op.copy), load=load(op.load))
            case EndLoad():
                return replace(op, load=load(op.load))
            case DecodeStep() | Slide():
                return replace(op, reqs=tuple(req(name) for name in op.reqs))
            case (
                Prefill()
                | CacheUnfinished()
                | Speculate()
                | Trim()
                | Finish()
                | Abort()
                | RetractRequest()
                | ResumeRequest()
            ):
                return replace(op, req=req(op.req))
            case _:
                return op

    return tuple(one(op) for op in program)

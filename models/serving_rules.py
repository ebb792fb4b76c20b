"""When a request-level op is allowed, what it needs, and whether there is so much.

As `kvcore.models.rules` one level up: each rule answers with the reason why not, or None. An op
that asks for more than there is stays allowed; the answer must then be a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.models import ops, request_ops, texts
from kvcore.models.prefix_tree import TreePage
from kvcore.models.request_state import Running
from kvcore.models.serving_books import ServingBooks

Reason = str | None

MOST_EVICTED = 2**22
"""Tokens that an eviction may ask for: more than a pool has."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an op needs: pages of both sides, and whether a row of the request pool. ``path``: the
    cached pages that it locks before it looks for room. Of a request that starts, ``stop`` is how
    far its row reaches then, and ``cursor`` how far its own SWA slots are missing."""

    full: int = 0
    swa: int = 0
    row: bool = False
    path: Sequence[TreePage] = ()
    stop: int = 0
    cursor: int = 0


NOTHING = Demand()


def demand(model: ServingBooks, op: ops.Op) -> Demand:
    """What ``op`` needs; nothing for an op that lends nothing or is not allowed."""
    match op:
        case request_ops.Admit():
            return _of_newcomer(model, op)
        case request_ops.Prefill() if op.req in model.live:
            return _of_growth(model, ((model.live[op.req], prefilled(model, op)),))
        case request_ops.DecodeStep() if all(name in model.live for name in op.reqs):
            return _of_growth(model, [(model.live[name], 1) for name in op.reqs])
        case request_ops.Speculate() if op.req in model.live:
            return _of_growth(model, ((model.live[op.req], op.tokens),))
        case request_ops.ResumeRequest() if op.req in model.waiting:
            return _of_resumed(model, op)
        case request_ops.LoadPrefix() if op.copy in model.copies:
            return _of_load(model, op)
        case _:
            return NOTHING


def prefilled(model: ServingBooks, op: request_ops.Prefill) -> int:
    """Tokens of a chunk: no more than the prompt has left."""
    running = model.live[op.req]
    return min(op.tokens, running.prompt_len - running.kv_len)


def _of_newcomer(model: ServingBooks, op: request_ops.Admit) -> Demand:
    """At least one token is left to compute."""
    tokens = model.newcomer(op)
    path = model.match(tokens.keys(max(0, tokens.prompt_len - 1)))
    start = len(path) * model.geometry.page_size
    most = tokens.prompt_len if op.tokens is None else start + op.tokens
    stop = min(most, tokens.prompt_len)
    pages = model.geometry.pages_for(stop) - len(path)
    return Demand(pages, pages, True, path, stop)


def _of_growth(model: ServingBooks, parts: Sequence[tuple[Running, int]]) -> Demand:
    pages = model.geometry.pages_for
    need = sum(pages(one.allocated + tokens) - pages(one.allocated) for one, tokens in parts)
    return Demand(need, need)


def _of_resumed(model: ServingBooks, op: request_ops.ResumeRequest) -> Demand:
    """Without a backup at least one token is left to compute, and each one that is has its peer."""
    waiting = model.waiting[op.req]
    stop = waiting.kv_len
    path = model.match(waiting.tokens.keys(stop if waiting.backup else stop - 1))
    cursor = model.frontier(stop) if waiting.backup else 0
    whole = model.geometry.pages_for(stop)
    behind = max(len(path), cursor // model.geometry.page_size)
    return Demand(whole - len(path), whole - behind, True, path, stop, cursor)


def _of_load(model: ServingBooks, op: request_ops.LoadPrefix) -> Demand:
    load = model.missing(op)
    whole, held = len(load.copy.keys), len(load.path)
    behind = max(held, load.copy.swa_from // model.geometry.page_size)
    return Demand(whole - held, len(load.loading) + whole - behind, False, load.path)


def lacks(model: ServingBooks, need: Demand) -> bool:
    """Whether there is less than this, all that can be evicted counted."""
    full, swa = model.room_beside(need.path)
    return need.full > full or need.swa > swa or (need.row and not model.requests.free)


def why_not(model: ServingBooks, op: ops.Op) -> Reason:
    """The reason why ``op`` is not allowed now, or None if it is."""
    if op.kind not in model.contract.ops or type(op) not in _RULES:
        return f"this target's callers do not use {op.kind}"
    reason = _RULES[type(op)](model, op)
    if reason is None and not model.contract.exhaustion and lacks(model, demand(model, op)):
        return "this target's callers check the capacity first"
    return reason


def _admit(model: ServingBooks, op: request_ops.Admit) -> Reason:
    if op.req < 1 or op.req in model.used:
        return f"request {op.req} is no new name"
    if op.tokens is not None and op.tokens < 1:
        return "a chunk has at least one token"
    if reason := _text(op.text):
        return reason
    longest = model.geometry.context_len
    return None if texts.length(op.text) <= longest else f"a row holds {longest} tokens"


def _text(text: texts.Text) -> Reason:
    return None if text and all(count > 0 for _, count in text) else "a text has tokens"


def _settled(model: ServingBooks, name: int) -> Reason:
    """The request runs and has no drafts."""
    running = model.live.get(name)
    if running is None:
        return f"there is no running request {name}"
    return f"request {name} has drafts" if running.drafts else None


def _ready(model: ServingBooks, name: int, tokens: int) -> Reason:
    """The request has computed its prompt, and can generate so many tokens."""
    if reason := _settled(model, name):
        return reason
    running = model.live[name]
    if running.kv_len < running.prompt_len:
        return f"the prompt of request {name} is not computed"
    fits = running.kv_len + tokens <= model.geometry.context_len
    return None if fits else f"the row of request {name} is full"


def _prefill(model: ServingBooks, op: request_ops.Prefill) -> Reason:
    if reason := _settled(model, op.req):
        return reason
    running = model.live[op.req]
    if running.kv_len >= running.prompt_len:
        return f"the prompt of request {op.req} is computed"
    return None if op.tokens >= 1 else "a chunk has at least one token"


def _cache_unfinished(model: ServingBooks, op: request_ops.CacheUnfinished) -> Reason:
    return _settled(model, op.req)


def _batch(names: tuple[int, ...]) -> Reason:
    once = names and len(set(names)) == len(names)
    return None if once else "a batch names each request once"


def _decode_step(model: ServingBooks, op: request_ops.DecodeStep) -> Reason:
    reasons = (_ready(model, name, 1) for name in op.reqs)
    return _batch(op.reqs) or next((reason for reason in reasons if reason), None)


def _slide(model: ServingBooks, op: request_ops.Slide) -> Reason:
    reasons = (_settled(model, name) for name in op.reqs)
    return _batch(op.reqs) or next((reason for reason in reasons if reason), None)


def _speculate(model: ServingBooks, op: request_ops.Speculate) -> Reason:
    if op.tokens < 1:
        return "there is at least one draft"
    return _ready(model, op.req, op.tokens)


def _trim(model: ServingBooks, op: request_ops.Trim) -> Reason:
    running = model.live.get(op.req)
    if running is None or not running.drafts:
        return f"there is no request {op.req} with drafts"
    return None if 0 <= op.accepted <= running.drafts else f"there are {running.drafts} drafts"


def _finish(model: ServingBooks, op: request_ops.Finish) -> Reason:
    running = model.live.get(op.req)
    if running is None:
        return f"there is no running request {op.req}"
    done = running.kv_len >= running.prompt_len
    return None if done else f"the prompt of request {op.req} is not computed"


def _running(model: ServingBooks, op: request_ops.Abort | request_ops.RetractRequest) -> Reason:
    return None if op.req in model.live else f"there is no running request {op.req}"


def _resume(model: ServingBooks, op: request_ops.ResumeRequest) -> Reason:
    return None if op.req in model.waiting else f"there is no retracted request {op.req}"


def _save_prefix(model: ServingBooks, op: request_ops.SavePrefix) -> Reason:
    if op.copy < 1 or op.copy in model.copies:
        return f"copy {op.copy} is no new name"
    if reason := _text(op.text):
        return reason
    return None if model.match(model.keys(op.text)) else "the cache can serve nothing of the text"


def _load_prefix(model: ServingBooks, op: request_ops.LoadPrefix) -> Reason:
    if op.copy not in model.copies:
        return f"there is no copy {op.copy}"
    if op.load < 1 or op.load in model.used_loads:
        return f"load {op.load} is no new name"
    load = model.missing(op)
    if any(node.state == "loading" for node in load.loading):
        return f"a load of the tokens of copy {op.copy} is in flight"
    complete = not load.loading and len(load.path) == len(load.copy.keys)
    return f"all of copy {op.copy} is cached" if complete else None


def _end_load(model: ServingBooks, op: request_ops.EndLoad) -> Reason:
    return None if op.load in model.loads else f"there is no load {op.load} in flight"


def _evict(model: ServingBooks, op: request_ops.Evict) -> Reason:
    asked = op.full_tokens, op.swa_tokens
    if not any(asked) or not all(0 <= tokens <= MOST_EVICTED for tokens in asked):
        return f"an eviction asks for 1 to {MOST_EVICTED} tokens"
    return None


def _flush(model: ServingBooks, op: request_ops.Flush) -> Reason:
    if model.group_open:
        return "a group is open"
    return "a request runs or a load is in flight" if model.live or model.loads else None


def _group_begin(model: ServingBooks, op: ops.GroupBegin) -> Reason:
    return "a group is open" if model.group_open else None


def _group_end(model: ServingBooks, op: ops.GroupEnd) -> Reason:
    return None if model.group_open else "no group is open"


_RULES: dict[type[ops.Op], Callable[[ServingBooks, Any], Reason]] = {
    request_ops.Admit: _admit,
    request_ops.Prefill: _prefill,
    request_ops.CacheUnfinished: _cache_unfinished,
    request_ops.DecodeStep: _decode_step,
    request_ops.Slide: _slide,
    request_ops.Speculate: _speculate,
    request_ops.Trim: _trim,
    request_ops.Finish: _finish,
    request_ops.Abort: _running,
    request_ops.RetractRequest: _running,
    request_ops.ResumeRequest: _resume,
    request_ops.SavePrefix: _save_prefix,
    request_ops.LoadPrefix: _load_prefix,
    request_ops.EndLoad: _end_load,
    request_ops.Evict: _evict,
    request_ops.Flush: _flush,
    ops.GroupBegin: _group_begin,
    ops.GroupEnd: _group_end,
}

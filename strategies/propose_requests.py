"""Turns a kind and a few integers into a request-level op that the model allows.

Several kinds stand for one op where what it meets matters: a request of a text that is known, that
branches off, that is new, or that is as large as all room. Leaves out the texts
(`kvcore.strategies.prompts`) and the calls of allocators (`kvcore.strategies.propose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcore.models import ServingModel, ops
from kvcore.models.ops import Op
from kvcore.models.request_ops import (
    Abort,
    Admit,
    CacheUnfinished,
    DecodeStep,
    EndLoad,
    Evict,
    Finish,
    Flush,
    LoadPrefix,
    Prefill,
    ResumeRequest,
    RetractRequest,
    SavePrefix,
    Slide,
    Speculate,
    Trim,
)
from kvcore.models.texts import Text, length
from kvcore.strategies import prompts
from kvcore.strategies.choices import Choices

RequestProposal = Callable[[ServingModel, Choices], Op | None]


REFUSED = 6
"""One in so many ops that must be refused is proposed: few teach as much as many."""


def propose_request(kind: str, model: ServingModel, choices: Choices) -> Op | None:
    """An op of this kind that is allowed now, or None if the integers name none."""
    op = REQUEST_PROPOSALS[kind](model, choices)
    if op is None or not model.allows(op):
        return None
    return None if model.must_refuse(op) and choices.below(REFUSED) < REFUSED - 1 else op


def _one_of(candidates: Iterable[Op], model: ServingModel, choices: Choices) -> Op | None:
    """One of those that are allowed now."""
    able = [op for op in candidates if model.allows(op)]
    return able[choices.below(len(able))] if able else None


def _few_tokens(model: ServingModel, choices: Choices, most: int) -> int:
    """Up to ``most`` tokens, about pages of them, or any number."""
    page = model.geometry.page_size
    wanted = (page, page + 1, 2 * page, most, 1, 0)[choices.below(6)]
    return min(most, wanted or 1 + choices.below(most))


# Requests that come.


def _admit(
    model: ServingModel, choices: Choices, draw: Callable[[ServingModel, Choices], Text | None]
) -> Op | None:
    """All of a text at once, or its first chunk alone."""
    chunked = choices.below(2) == 1
    text = draw(model, choices)
    if text is None:
        return None
    tokens = None
    if chunked and length(text) > 1:
        tokens = _few_tokens(model, choices, length(text) - 1)
    return Admit(model.last_name + 1, text, prompts.output(choices), tokens)


def _admit_new(model: ServingModel, choices: Choices) -> Op | None:
    return _admit(model, choices, prompts.fresh)


def _admit_same(model: ServingModel, choices: Choices) -> Op | None:
    return _admit(model, choices, prompts.again)


def _admit_front(model: ServingModel, choices: Choices) -> Op | None:
    return _admit(model, choices, prompts.front)


def _admit_branch(model: ServingModel, choices: Choices) -> Op | None:
    return _admit(model, choices, prompts.branch)


def _admit_over(model: ServingModel, choices: Choices) -> Op | None:
    """A request that computes what became a tombstone: once cached, it is recovered."""
    return _admit(model, choices, prompts.over_tombstone)


def _admit_large(model: ServingModel, choices: Choices) -> Op:
    return Admit(model.last_name + 1, prompts.large(model, choices), prompts.output(choices))


# Requests that run.


def _prefill(model: ServingModel, choices: Choices) -> Op | None:
    """The rest of a prompt, or a chunk of it."""
    unready = [
        (name, one.prompt_len - one.kv_len)
        for name, one in model.live.items()
        if one.kv_len < one.prompt_len
    ]
    if not unready:
        return None
    name, left = unready[choices.below(len(unready))]
    return Prefill(name, left if choices.below(2) == 0 else _few_tokens(model, choices, left))


def _cache_unfinished(model: ServingModel, choices: Choices) -> Op | None:
    """A request that has whole pages to hand over, if there is one."""
    page = model.geometry.page_size
    owning = [name for name, one in model.live.items() if one.kv_len // page * page > one.prefix]
    return _one_of(map(CacheUnfinished, owning or model.live), model, choices)


def _decode_one(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of((DecodeStep((name,)) for name in model.live), model, choices)


def _decode_batch(model: ServingModel, choices: Choices) -> Op | None:
    """Every request that can go on, or a few of them."""
    able = [name for name in model.live if model.allows(DecodeStep((name,)))]
    return DecodeStep(_some(able, choices)) if able else None


def _some(names: Sequence[int], choices: Choices) -> tuple[int, ...]:
    """All names from a chosen one on and around, or a few of them."""
    first = choices.below(len(names))
    few = len(names) if choices.below(2) == 0 else 1 + choices.below(len(names))
    return tuple([*names[first:], *names[:first]][:few])


def _slide_one(model: ServingModel, choices: Choices) -> Op | None:
    """A request whose window has moved on, if there is one."""
    able = [name for name in model.live if model.allows(Slide((name,)))]
    moved = [name for name in able if _frontier(model, name) > model.live[name].cursor]
    pool = moved or able
    return Slide((pool[choices.below(len(pool))],)) if pool else None


def _frontier(model: ServingModel, name: int) -> int:
    """Where the last window of a request begins, to the page."""
    page = model.geometry.page_size
    whole = model.live[name].kv_len // page * page
    return max(0, (whole - model.geometry.window) // page * page)


def _slide_batch(model: ServingModel, choices: Choices) -> Op | None:
    able = [name for name in model.live if model.allows(Slide((name,)))]
    return Slide(_some(able, choices)) if able else None


def _speculate(model: ServingModel, choices: Choices) -> Op | None:
    most = model.geometry.window + 2 * model.geometry.page_size
    tokens = _few_tokens(model, choices, most)
    return _one_of((Speculate(name, tokens) for name in model.live), model, choices)


def _trim(model: ServingModel, choices: Choices) -> Op | None:
    """All drafts, none, or some of them."""
    drafted = [
        (name, one.allocated - one.kv_len)
        for name, one in model.live.items()
        if model.allows(Trim(name, 0))
    ]
    if not drafted:
        return None
    name, drafts = drafted[choices.below(len(drafted))]
    accepted = (drafts, 0, choices.below(drafts + 1))
    return Trim(name, accepted[choices.below(len(accepted))])


# Requests that go.


def _finish(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of(map(Finish, model.live), model, choices)


def _abort(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of(map(Abort, model.live), model, choices)


def _retract_backup(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of((RetractRequest(name, True) for name in model.live), model, choices)


def _retract_plain(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of((RetractRequest(name, False) for name in model.live), model, choices)


def _resume(model: ServingModel, choices: Choices) -> Op | None:
    return _one_of(map(ResumeRequest, model.waiting), model, choices)


# Host copies of prefixes.


def _save(model: ServingModel, choices: Choices) -> Op:
    """What is cached of a known text, or of its front."""
    text = prompts.again if choices.below(3) == 2 else prompts.front
    return SavePrefix(model.last_copy + 1, text(model, choices))


def _load(model: ServingModel, choices: Choices) -> Op | None:
    """A copy that is not all cached; most of the time one over tombstones, if there is one."""
    loads = [LoadPrefix(copy, model.last_load + 1) for copy in model.copies]
    able = [load for load in loads if model.allows(load)]
    over = [load for load in able if model.missing(load).loading]
    return _one_of(over if over and choices.below(4) < 3 else able, model, choices)


def _end_load(model: ServingModel, choices: Choices) -> Op | None:
    """It arrived; one time in three it failed."""
    failed = choices.below(3) == 2
    return _one_of((EndLoad(load, failed) for load in model.loads), model, choices)


# The cache itself.


def _pages(model: ServingModel, choices: Choices) -> int:
    """Tokens of one to three pages, or a token more or less."""
    page = model.geometry.page_size
    return max(1, (3 - choices.below(3)) * page - (0, 0, 1, page - 1)[choices.below(4)])


def _evict_swa(model: ServingModel, choices: Choices) -> Op:
    return Evict(0, _pages(model, choices))


def _evict_full(model: ServingModel, choices: Choices) -> Op:
    return Evict(_pages(model, choices), 0)


def _evict_both(model: ServingModel, choices: Choices) -> Op:
    return Evict(_pages(model, choices), _pages(model, choices))


def _evict_all_swa(model: ServingModel, choices: Choices) -> Op:
    """Every peer that can go: inner nodes become tombstones."""
    return Evict(0, model.geometry.swa_size)


def _evict_all(model: ServingModel, choices: Choices) -> Op:
    return Evict(model.geometry.full_size, model.geometry.swa_size)


def _flush(model: ServingModel, choices: Choices) -> Op:
    return Flush()


def _begin(model: ServingModel, choices: Choices) -> Op:
    return ops.GroupBegin()


def _end(model: ServingModel, choices: Choices) -> Op:
    return ops.GroupEnd()


REQUEST_PROPOSALS: dict[str, RequestProposal] = {
    "admit_new": _admit_new,
    "admit_same": _admit_same,
    "admit_front": _admit_front,
    "admit_branch": _admit_branch,
    "admit_over": _admit_over,
    "admit_large": _admit_large,
    "prefill": _prefill,
    "cache_unfinished": _cache_unfinished,
    "decode_step": _decode_one,
    "decode_all": _decode_batch,
    "slide": _slide_one,
    "slide_all": _slide_batch,
    "speculate": _speculate,
    "trim": _trim,
    "finish": _finish,
    "abort": _abort,
    "retract_backup": _retract_backup,
    "retract_plain": _retract_plain,
    "resume_request": _resume,
    "save_prefix": _save,
    "load_prefix": _load,
    "end_load": _end_load,
    "evict_swa": _evict_swa,
    "evict_full": _evict_full,
    "evict_both": _evict_both,
    "evict_all_swa": _evict_all_swa,
    "evict_all": _evict_all,
    "flush": _flush,
    "group_begin": _begin,
    "group_end": _end,
}
"""Every kind that a source can ask for where programs are of whole requests."""

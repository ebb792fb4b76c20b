"""Turns a kind and a few integers into an op that the model allows: shared by every source.

All three sources choose kinds and integers, each in its own way; what the integers mean is decided
here, modulo what is live. Holds no oracle: whether an outcome is right is for the model and the
laws to say. Leaves out the proposals of hostile calls (`kvcore.strategies.propose_hostile`) and of
request-level ops (`kvcore.strategies.propose_requests`), and the weights of the kinds
(`kvcore.strategies.weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kvcore.models import Model, ServingModel, ops
from kvcore.models.ops import Form, Memory, Op
from kvcore.models.state import Page, Row
from kvcore.strategies.choices import Choices
from kvcore.strategies.propose_hostile import propose_hostile
from kvcore.strategies.propose_requests import propose_request

Proposal = Callable[[Model, Choices], Op | None]

PLACES = 64
"""Where in a row a search for a page may start."""


def propose(kind: str, model: Model, choices: Choices) -> Op | None:
    """An op of this kind that is allowed now, or None if the integers name none."""
    if isinstance(model, ServingModel):
        return propose_request(kind, model, choices)
    op = PROPOSALS[kind](model, choices)
    return op if op is not None and model.why_not(op) is None else None


def _pick_row(model: Model, choices: Choices) -> tuple[int, Row] | None:
    if not model.rows:
        return None
    names = list(model.rows)
    name = names[choices.below(len(names))]
    return name, model.rows[name]


def _few_pages(model: Model, choices: Choices) -> int:
    """One to three pages, now and then all that is left or one too many."""
    number = choices.below(16)
    if number < 14:
        return 1 + number % 3
    left = len(model.full.free)
    if model.hybrid:
        left = min(left, len(model.swa.free))
    if model.sparse:
        left = min(left, len(model.device.free))
    if number == 15:
        return left + 1
    return max(1, left)


def _few_tokens(model: Model, choices: Choices) -> int:
    size = model.page_size
    pages = _few_pages(model, choices)
    return max(1, pages * size - choices.below(size))


def _span(row: Row, choices: Choices) -> tuple[int, int]:
    count = len(row.pages)
    start = choices.below(count)
    return start, start + 1 + choices.below(count - start)


def _flag(choices: Choices, wanted: bool) -> bool:
    return wanted and choices.below(4) == 1


def _unused(names: set[int]) -> int:
    """A name that was not used yet: the next one, where names were given one by one."""
    following = len(names) + 1
    return max(names) + 1 if following in names else following


def _alloc(model: Model, choices: Choices) -> Op:
    pages = _few_pages(model, choices)
    overwrite = _flag(choices, model.contract.overwrite_lent)
    return ops.Alloc(model.last_name + 1, pages, overwrite)


def _extend_new(model: Model, choices: Choices) -> Op:
    tokens = _few_tokens(model, choices)
    overwrite = _flag(choices, model.contract.overwrite_lent)
    return ops.Extend(((model.last_name + 1, tokens),), overwrite)


def _extend_more(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    return ops.Extend(((picked[0], _few_tokens(model, choices)),))


def _extend_batch(model: Model, choices: Choices) -> Op:
    parts = [(model.last_name + 1, _few_tokens(model, choices))]
    if (picked := _pick_row(model, choices)) is not None:
        parts.append((picked[0], _few_tokens(model, choices)))
    parts.append((model.last_name + 2, 1 + choices.below(model.page_size)))
    return ops.Extend(tuple(parts))


def _decode(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    return ops.Decode((picked[0],), _flag(choices, model.contract.overwrite_lent))


def _decode_batch(model: Model, choices: Choices) -> Op | None:
    """Live rows that can go on, from a chosen one on."""
    names = list(model.rows)
    if not names:
        return None
    first = choices.below(len(names))
    wanted = (names[first:] + names[:first])[: 1 + choices.below(len(names))]
    whole = ops.Decode(tuple(wanted))
    if model.allows(whole):
        return whole
    able = [name for name in wanted if model.allows(ops.Decode((name,)))]
    return ops.Decode(tuple(able)) if able else None


def _swa_tail(model: Model, choices: Choices) -> Op:
    size = model.page_size
    seq, before = model.last_name + 1, 0
    if choices.below(2) and (picked := _pick_row(model, choices)) is not None:
        seq, before = picked[0], picked[1].tokens
    tokens = _few_tokens(model, choices)
    first_boundary = -before % size
    boundaries = list(range(first_boundary, tokens + 1, size))
    if not boundaries or choices.below(4) == 0:
        return ops.SwaTail(seq, tokens, 0)
    tail = tokens - boundaries[choices.below(len(boundaries))]
    if tail > 1 and model.contract.tail_ends_early and choices.below(3) == 2:
        beyond = 1 + choices.below(tail - 1)
        return ops.SwaTail(seq, tokens, tail - beyond, beyond)
    return ops.SwaTail(seq, tokens, tail)


@cache
def _in_order(allowed: frozenset[Form]) -> tuple[Form, ...]:
    return tuple(sorted(allowed))


def _form(allowed: frozenset[Form], choices: Choices) -> Form:
    forms = _in_order(allowed)
    return forms[choices.below(len(forms))]


def _find(
    model: Model, choices: Choices, wanted: Callable[[Page], bool], *, but: int = 0
) -> tuple[int, int] | None:
    """(sequence, page): from a chosen page of a chosen row on, the first that is ``wanted``; of
    each row after that one too, the pages before the chosen place come last. Looks no further than
    it has to. ``but``: a sequence that is left out."""
    names = list(model.rows)
    if not names:
        return None
    first, place = choices.below(len(names)), choices.below(PLACES)
    for name in names[first:] + names[:first]:
        if name == but:
            continue
        pages = model.rows[name].pages
        start = place % len(pages)
        for index in (*range(start, len(pages)), *range(start)):
            if wanted(pages[index]):
                return name, index
    return None


def _free(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    form = _form(model.contract.free_forms, choices)
    overwrite = _flag(choices, model.contract.overwrite_deferred)
    start = 0
    if model.geometry.pure_swa and choices.below(2):
        start = next((i for i, page in enumerate(picked[1].pages) if not page.gone), 0)
    return ops.Free(picked[0], start, None, form, overwrite)


def _free_part(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    start, stop = _span(picked[1], choices)
    form = _form(model.contract.free_forms, choices)
    overwrite = _flag(choices, model.contract.overwrite_deferred)
    return ops.Free(picked[0], start, stop, form, overwrite)


def _free_swa(model: Model, choices: Choices) -> Op | None:
    """Any part of a row that has a live peer left."""
    pure = model.geometry.pure_swa
    found = _find(model, choices, _present if pure else _has_peer)
    if found is None:
        return None
    name, start = found
    pages = model.rows[name].pages
    form = _form(model.contract.free_swa_forms, choices)
    stop = start + 1 + choices.below(len(pages) - start)
    if pure:
        stop = next((i for i in range(start, stop) if pages[i].gone), stop)
    elif form in model.contract.live_swa_frees:
        stop = next((i for i in range(start, stop) if not pages[i].swa), stop)
    overwrite = _flag(choices, model.contract.overwrite_deferred)
    return ops.FreeSwa(name, start, stop, form, overwrite)


def _free_swa_front(model: Model, choices: Choices) -> Op | None:
    """The pages that slide out of the window: the front of a row."""
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    pages = picked[1].pages
    form = _form(model.contract.free_swa_forms, choices)
    start, stop = 0, 1 + choices.below(len(pages))
    if model.geometry.pure_swa:
        start = next((i for i, page in enumerate(pages) if not page.gone), 0)
        return ops.FreeSwa(picked[0], start, max(stop, start + 1), form)
    if form in model.contract.live_swa_frees:
        start = next((i for i, page in enumerate(pages) if page.swa), 0)
        dead = (i for i in range(start, len(pages)) if not pages[i].swa)
        stop = min(max(stop, start + 1), next(dead, len(pages)))
    return ops.FreeSwa(picked[0], start, stop, form)


def _free_full(model: Model, choices: Choices) -> Op | None:
    """Pages that have no SWA side left, so that their full side can go alone."""
    pure = model.geometry.pure_swa
    if not pure and not _some_lack_a_peer(model):
        return None
    alone = _is_gone if pure else _lacks_peer
    found = _find(model, choices, alone)
    if found is None:
        return None
    name, start = found
    pages = model.rows[name].pages
    stop = start + 1
    while stop < len(pages) and alone(pages[stop]) and choices.below(2):
        stop += 1
    form = _form(model.contract.free_forms - {"sparse"}, choices)
    overwrite = _flag(choices, model.contract.overwrite_deferred)
    return ops.FreeFull(name, start, stop, form, overwrite)


def _begin(model: Model, choices: Choices) -> Op:
    return ops.GroupBegin()


def _end(model: Model, choices: Choices) -> Op:
    return ops.GroupEnd()


def _has_peer(page: Page) -> bool:
    return page.swa != 0


def _lacks_peer(page: Page) -> bool:
    return page.swa == 0


def _is_gone(page: Page) -> bool:
    return page.gone_in is not None


def _present(page: Page) -> bool:
    return page.gone_in is None


def _some_lack_a_peer(model: Model) -> bool:
    """Whether any lent page of a hybrid pool lacks its peer: more full pages are lent than SWA
    pages."""
    full, swa = model.full, model.swa
    lent = full.total - len(full.free) - len(full.pending)
    return lent > swa.total - len(swa.free) - len(swa.pending)


def _tombstone(model: Model, choices: Choices) -> tuple[int, int] | None:
    """(sequence, page) of a whole page without a peer; inside a group most of the time one whose
    peer was given up there, if there is any."""
    if not _some_lack_a_peer(model):
        return None
    size, detached = model.page_size, model.detached

    def dead(page: Page) -> bool:
        return page.swa == 0 and page.tokens == size

    def fresh(page: Page) -> bool:
        return page.full in detached and page.swa == 0 and page.tokens == size

    if detached and choices.below(4) != 3 and (found := _find(model, choices, fresh)):
        return found
    return _find(model, choices, dead)


def _recover(model: Model, choices: Choices, *, locked: bool) -> Op | None:
    kept = _tombstone(model, choices)
    if kept is None:
        return None
    size = model.page_size

    def live(page: Page) -> bool:
        return page.swa != 0 and page.tokens == size and page.fully_mapped

    incoming = _find(model, choices, live, but=kept[0])
    if incoming is None:
        return None
    two = ops.Recover(kept[0], incoming[0], locked, 2, kept[1], incoming[1])
    if choices.below(2) and model.allows(two):
        return two
    return ops.Recover(kept[0], incoming[0], locked, 1, kept[1], incoming[1])


def _recover_locked(model: Model, choices: Choices) -> Op | None:
    return _recover(model, choices, locked=True)


def _recover_unlocked(model: Model, choices: Choices) -> Op | None:
    return _recover(model, choices, locked=False)


def _load_back(model: Model, choices: Choices) -> Op:
    pages = _few_pages(model, choices)
    return ops.LoadBack(model.last_name + 1, pages, choices.below(pages + 1))


def _load_back_swa(model: Model, choices: Choices) -> Op | None:
    dead = _tombstone(model, choices)
    return ops.LoadBackSwa(dead[0], dead[1], dead[1] + 1) if dead is not None else None


def _retract(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    if picked is None:
        return None
    return ops.Retract(picked[0], _unused(model.used_backups))


def _restore(model: Model, choices: Choices) -> Op | None:
    if not model.backups:
        return None
    names = sorted(model.backups)
    name = names[choices.below(len(names))]
    whole = ops.Restore(name, model.last_name + 1)
    if not model.hybrid or model.geometry.requests or choices.below(3):
        return whole
    tokens = len(model.backups[name].full_stamps)
    tails = range(tokens, -1, -model.page_size) if tokens else [0]
    aligned = [tail for tail in tails if (tokens - tail) % model.page_size == 0]
    part = ops.Restore(name, model.last_name + 1, aligned[choices.below(len(aligned))])
    return part if model.allows(part) else whole


def _relocate(model: Model, choices: Choices) -> Op | None:
    picked = _pick_row(model, choices)
    return ops.Relocate(picked[0]) if picked is not None else None


def _extend_logical(model: Model, choices: Choices) -> Op:
    """A new row, or one that goes on: logical slots are many, so now and then many of them."""
    pages = 1 + choices.below(max(1, len(model.full.free)) if choices.below(8) == 7 else 3)
    tokens = max(1, pages * model.page_size - choices.below(model.page_size))
    if choices.below(3) == 2 and (picked := _pick_row(model, choices)) is not None:
        return ops.ExtendLogical(((picked[0], tokens),))
    return ops.ExtendLogical(((model.last_name + 1, tokens),))


def _on_device(page: Page) -> bool:
    return page.device != 0


def _free_device(model: Model, choices: Choices) -> Op | None:
    found = _find(model, choices, _on_device)
    if found is None:
        return None
    name, start = found
    stop = start + 1 + choices.below(len(model.rows[name].pages) - start)
    form: Form = "sparse" if choices.below(3) == 2 else "slots"
    overwrite = _flag(choices, model.contract.overwrite_deferred)
    return ops.FreeDevice(name, start, stop, form, overwrite)


def _device_buffer(model: Model, choices: Choices) -> Op | None:
    """A buffer of about as many pages as the row has on the device, or of any other size."""
    found = _find(model, choices, _on_device)
    if found is None:
        return None
    name = found[0]
    own = sum(page.device != 0 for page in model.rows[name].pages)
    wanted = (own, own + 1, max(1, own - 1), 1, own + len(model.device.free) + 1)
    number = _unused(model.used_buffers)
    return ops.DeviceBuffer(name, number, wanted[choices.below(len(wanted))])


def _free_buffer(model: Model, choices: Choices) -> Op | None:
    if not model.buffers:
        return None
    names = sorted(model.buffers)
    return ops.FreeBuffer(names[choices.below(len(names))])


def _memory(choices: Choices) -> Memory:
    return "weights" if choices.below(2) else "kv_cache"


def _reserve(model: Model, choices: Choices) -> Op:
    number = _unused(model.memory.used)
    return ops.Reserve(number, _memory(choices), 1 + choices.below(4))


def _drop(model: Model, choices: Choices) -> Op | None:
    if not model.memory.pieces:
        return None
    names = sorted(model.memory.pieces)
    return ops.Drop(names[choices.below(len(names))])


def _pause(model: Model, choices: Choices) -> Op:
    return ops.Pause(_memory(choices))


def _resume(model: Model, choices: Choices) -> Op:
    """Most of the time a tag that is paused."""
    paused = sorted(model.memory.paused)
    if paused and choices.below(4):
        return ops.Resume(paused[choices.below(len(paused))])
    return ops.Resume(_memory(choices))


def _clear(model: Model, choices: Choices) -> Op:
    return ops.Clear()


PROPOSALS: dict[str, Proposal] = {
    "alloc": _alloc,
    "extend_new": _extend_new,
    "extend_more": _extend_more,
    "extend_batch": _extend_batch,
    "decode": _decode,
    "decode_batch": _decode_batch,
    "swa_tail": _swa_tail,
    "free": _free,
    "free_part": _free_part,
    "free_swa": _free_swa,
    "free_swa_front": _free_swa_front,
    "free_full": _free_full,
    "group_begin": _begin,
    "group_end": _end,
    "recover_locked": _recover_locked,
    "recover_unlocked": _recover_unlocked,
    "load_back": _load_back,
    "load_back_swa": _load_back_swa,
    "retract": _retract,
    "restore": _restore,
    "relocate": _relocate,
    "extend_logical": _extend_logical,
    "free_device": _free_device,
    "device_buffer": _device_buffer,
    "free_buffer": _free_buffer,
    "reserve": _reserve,
    "drop": _drop,
    "pause": _pause,
    "resume": _resume,
    "clear": _clear,
    "hostile": propose_hostile,
}
"""Every kind that a source can ask for where programs are of allocator calls."""

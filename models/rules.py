"""When an op is allowed: the preconditions of semantics.md, narrowed by the target's contract.

Each rule answers with the reason why not, or None. `demand` says how many pages of each side an op
needs; asking for more than there is stays allowed (the answer must then be a refusal) unless the
contract keeps callers away from exhaustion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcore.models import ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Form
from kvcore.models.state import NO_PEER, Page

if TYPE_CHECKING:
    from kvcore.models.reference import Model

Reason = str | None


def demand(model: Model, op: ops.Op) -> tuple[int, int]:
    """Pages that ``op`` needs on the (full, SWA) side; (0, 0) for an op that lends nothing."""
    pages = model.geometry.pages_for
    match op:
        case ops.Alloc():
            return op.pages, op.pages
        case ops.Extend():
            need = sum(_growth(model, seq, tokens) for seq, tokens in op.parts)
            return need, need
        case ops.Decode():
            need = sum(_growth(model, seq, 1) for seq in op.seqs)
            return need, need
        case ops.SwaTail():
            return _growth(model, op.seq, op.tokens), pages(op.tail)
        case ops.LoadBack():
            return op.pages, op.swa_pages
        case ops.LoadBackSwa():
            row = model.rows.get(op.seq)
            return 0, len(row.span(op.start, op.stop)) if row else 0
        case ops.Restore():
            tokens = len(model.backups[op.backup].full_stamps) if op.backup in model.backups else 0
            return pages(tokens), pages(tokens if op.tail is None else op.tail)
        case _:
            return 0, 0


def lacks_room(model: Model, op: ops.Op) -> bool:
    """Whether a side has fewer free pages than ``op`` needs: the answer must be a refusal."""
    full, swa = demand(model, op)
    return full > len(model.full.free) or (model.geometry.hybrid and swa > len(model.swa.free))


def why_not(model: Model, op: ops.Op) -> Reason:
    """The reason why ``op`` is not allowed now, or None if it is."""
    if op.kind not in model.contract.ops:
        return f"this target's callers do not use {op.kind}"
    reason = _RULES[type(op)](model, op)
    if reason is None and not model.contract.exhaustion and lacks_room(model, op):
        return "this target's callers check the capacity first"
    return reason


def _growth(model: Model, seq: int, tokens: int) -> int:
    row = model.rows.get(seq)
    before = row.tokens if row else 0
    return model.geometry.pages_for(before + tokens) - model.geometry.pages_for(before)


def _fresh(model: Model, seq: int) -> Reason:
    return f"sequence {seq} was used before" if seq in model.used else None


def _overwrite(model: Model, wanted: bool) -> Reason:
    if wanted and not model.contract.overwrite_lent:
        return "this target's callers do not overwrite what they were lent"
    return None


def _continuable(model: Model, seq: int) -> Reason:
    """A row that ends inside a page goes on only if its last token's peer is live."""
    row = model.rows.get(seq)
    if row is None:
        return _fresh(model, seq)
    inside = row.tokens % model.geometry.page_size != 0
    if model.geometry.hybrid and inside and row.pages[-1].swa_stamps[-1] == NO_PEER:
        return f"the last page of sequence {seq} has no live peer"
    return None


def _alloc(model: Model, op: ops.Alloc) -> Reason:
    if op.pages < 1:
        return "an empty row has no pages to watch"
    return _fresh(model, op.seq) or _overwrite(model, op.overwrite)


def _extend(model: Model, op: ops.Extend) -> Reason:
    names = [seq for seq, _ in op.parts]
    if not names or len(set(names)) != len(names):
        return "a batch names each sequence once"
    if any(tokens < 1 for _, tokens in op.parts):
        return "an extend adds at least one token"
    reasons = (_continuable(model, seq) for seq in names)
    return next((r for r in reasons if r), None) or _overwrite(model, op.overwrite)


def _decode(model: Model, op: ops.Decode) -> Reason:
    if not op.seqs or len(set(op.seqs)) != len(op.seqs):
        return "a batch names each sequence once"
    for seq in op.seqs:
        if seq not in model.rows:
            return f"there is no sequence {seq}"
        if reason := _continuable(model, seq):
            return reason
    return _overwrite(model, op.overwrite)


def _swa_tail(model: Model, op: ops.SwaTail) -> Reason:
    if not model.geometry.hybrid:
        return "there is no SWA pool"
    if op.tokens < 1 or not 0 <= op.tail <= op.tokens:
        return "the tail is a part of the extend"
    if op.seq not in model.rows and op.seq in model.used:
        return f"sequence {op.seq} was used before"
    row = model.rows.get(op.seq)
    before = row.tokens if row else 0
    if op.tail and (before + op.tokens - op.tail) % model.geometry.page_size:
        return "the tail starts on a page boundary"
    return None


def _span(model: Model, seq: int, start: int, stop: int | None) -> tuple[list[Page], Reason]:
    row = model.rows.get(seq)
    if row is None:
        return [], f"there is no sequence {seq}"
    pages = row.span(start, stop)
    return pages, None if pages else f"sequence {seq} has no pages [{start}, {stop})"


def _free(model: Model, op: ops.Free) -> Reason:
    contract = model.contract
    return _named(model, op, contract.free_forms, contract.live_frees)


def _free_swa(model: Model, op: ops.FreeSwa) -> Reason:
    if not model.geometry.hybrid:
        return "there is no SWA pool"
    contract = model.contract
    return _named(model, op, contract.free_swa_forms, contract.live_swa_frees)


def _free_full(model: Model, op: ops.FreeFull) -> Reason:
    forms = model.contract.free_forms - {"sparse"}
    reason = _named(model, op, forms, frozenset())
    pages, _ = _span(model, op.seq, op.start, op.stop)
    return "a page still has its peer" if reason is None and any(p.swa for p in pages) else reason


def _named(model: Model, op: ops.PagesOp, forms: frozenset[Form], live: frozenset[Form]) -> Reason:
    """What all frees have in common: the pages are there, and callers name such pages so.
    ``live``: the forms for which every page must still have its peer."""
    pages, reason = _span(model, op.seq, op.start, op.stop)
    if op.form not in forms:
        return f"this target's callers do not {op.kind} by {op.form}"
    if op.form in live and any(page.swa == 0 for page in pages):
        return f"this target's callers {op.kind} pages with a live peer only"
    if op.overwrite and not model.contract.overwrite_deferred:
        return "this target's callers keep the tensors that they free"
    return reason


def _group_begin(model: Model, op: ops.GroupBegin) -> Reason:
    return "a group is open" if model.group_open else None


def _group_end(model: Model, op: ops.GroupEnd) -> Reason:
    return None if model.group_open else "no group is open"


def _recover(model: Model, op: ops.Recover) -> Reason:
    if not model.geometry.hybrid:
        return "there is no SWA pool"
    if op.locked and not model.contract.locked_recovery:
        return "this target's callers do not recover locked values"
    if op.kept == op.incoming or op.pages < 1:
        return "a recovery joins two sequences"
    kept, reason = _span(model, op.kept, op.kept_start, op.kept_start + op.pages)
    incoming, other = _span(model, op.incoming, op.incoming_start, op.incoming_start + op.pages)
    if reason or other:
        return reason or other
    size = model.geometry.page_size
    if any(page.tokens != size for page in kept + incoming):
        return "a recovery takes whole pages"
    if any(page.swa for page in kept):
        return "a kept page is no tombstone"
    if any(not page.swa or not page.fully_mapped for page in incoming):
        return "an incoming page has no live peer"
    return None


def _load_back(model: Model, op: ops.LoadBack) -> Reason:
    if not model.geometry.hybrid:
        return "there is no SWA pool"
    if op.pages < 1 or not 0 <= op.swa_pages <= op.pages:
        return "the SWA part is a part of the row"
    return _fresh(model, op.seq)


def _load_back_swa(model: Model, op: ops.LoadBackSwa) -> Reason:
    if not model.geometry.hybrid:
        return "there is no SWA pool"
    pages, reason = _span(model, op.seq, op.start, op.stop)
    if any(page.tokens != model.geometry.page_size for page in pages):
        return "a load-back takes whole pages"
    if any(page.swa for page in pages):
        return "a page still has its peer"
    return reason


def _retract(model: Model, op: ops.Retract) -> Reason:
    if op.backup in model.used_backups:
        return f"backup {op.backup} was used before"
    return _span(model, op.seq, 0, None)[1]


def _restore(model: Model, op: ops.Restore) -> Reason:
    backup = model.backups.get(op.backup)
    if backup is None:
        return f"there is no backup {op.backup}"
    tokens = len(backup.full_stamps)
    if op.tail is not None:
        if not model.geometry.hybrid or "swa_tail" not in model.contract.ops:
            return "this target's callers restore whole rows"
        if not 0 <= op.tail <= tokens or (
            op.tail and (tokens - op.tail) % model.geometry.page_size
        ):
            return "the tail starts on a page boundary"
    return _fresh(model, op.seq)


def _clear(model: Model, op: ops.Clear) -> Reason:
    return None


def _hostile(model: Model, op: ops.Hostile) -> Reason:
    if op.call not in model.contract.hostile:
        return f"the hostile call {op.call} is not on trial here"
    return None if HOSTILE_CALLS[op.call].possible(model, op) else "the call would be legal now"


_RULES: dict[type[ops.Op], Callable[[Model, Any], Reason]] = {
    ops.Alloc: _alloc,
    ops.Extend: _extend,
    ops.Decode: _decode,
    ops.SwaTail: _swa_tail,
    ops.Free: _free,
    ops.FreeSwa: _free_swa,
    ops.FreeFull: _free_full,
    ops.GroupBegin: _group_begin,
    ops.GroupEnd: _group_end,
    ops.Recover: _recover,
    ops.LoadBack: _load_back,
    ops.LoadBackSwa: _load_back_swa,
    ops.Retract: _retract,
    ops.Restore: _restore,
    ops.Clear: _clear,
    ops.Hostile: _hostile,
}

"""When an op is allowed: the preconditions of semantics.md, narrowed by the target's contract.

Each rule answers with the reason why not, or None. `demand` says how much of each side an op
needs; asking for more than there is stays allowed (the answer must then be a refusal) unless the
contract keeps callers away from exhaustion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.models import ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Form
from kvcore.models.state import NO_PEER, Page

if TYPE_CHECKING:
    from kvcore.models.reference import Model

Reason = str | None

MOST_OS_PAGES = 64
"""A piece of memory in a program is small: what matters is its tag."""


class Need(NamedTuple):
    """What an op needs of each side: pages of the full, the SWA and the device pool, and rows of
    the request pool."""

    full: int = 0
    swa: int = 0
    device: int = 0
    requests: int = 0


NOTHING = Need()


def demand(model: Model, op: ops.Op) -> Need:
    """What ``op`` needs; nothing for an op that lends nothing."""
    needs = _NEEDS.get(type(op))
    return NOTHING if needs is None else needs(model, op)


def restored_tokens(model: Model, op: ops.Restore) -> int:
    """Tokens of a restored row that get slots: where every layer slides, a request does without
    those that its window has left behind."""
    backup = model.backups[op.backup]
    alone = model.geometry.pure_swa and model.geometry.requests > 0
    return backup.tokens - backup.evicted if alone else backup.tokens


def restored_tail(model: Model, op: ops.Restore) -> int:
    """Tokens at the end of a restored row that get SWA slots. With a request pool the request
    itself remembers how far its window had moved on."""
    backup = model.backups[op.backup]
    if model.geometry.requests:
        return backup.tokens - backup.evicted
    return backup.tokens if op.tail is None else op.tail


def _need(
    model: Model,
    parts: tuple[tuple[int, int], ...],
    full: int,
    swa: int,
    *,
    on_device: bool = False,
) -> Need:
    """The need of a call by which these rows grow by so many tokens."""
    if model.usual:
        return Need(full, swa if model.hybrid else 0)
    geometry = model.geometry
    device = requests = 0
    if on_device and geometry.sparse:
        for seq, tokens in parts:
            row = model.rows.get(seq)
            before = row.tokens if row else 0
            device += geometry.device_pages_for(before + tokens)
            device -= geometry.device_pages_for(before)
    if geometry.requests:
        requests = sum(seq not in model.rows for seq, _ in parts)
    return Need(full, swa if geometry.hybrid else 0, device, requests)


def _need_of_alloc(model: Model, op: ops.Alloc) -> Need:
    parts = ((op.seq, op.pages * model.page_size),)
    return _need(model, parts, op.pages, op.pages, on_device=True)


def _need_of_extend(model: Model, op: ops.Extend | ops.ExtendLogical) -> Need:
    full = 0
    for seq, tokens in op.parts:
        full += _growth(model, seq, tokens)
    return _need(model, op.parts, full, full, on_device=isinstance(op, ops.Extend))


def _need_of_decode(model: Model, op: ops.Decode) -> Need:
    full = 0
    for seq in op.seqs:
        full += _growth(model, seq, 1)
    return _need(model, (), full, full)


def _need_of_swa_tail(model: Model, op: ops.SwaTail) -> Need:
    full = _growth(model, op.seq, op.tokens)
    return _need(model, ((op.seq, op.tokens),), full, model.geometry.pages_for(op.tail))


def _need_of_load_back(model: Model, op: ops.LoadBack) -> Need:
    return _need(model, ((op.seq, 0),), op.pages, op.swa_pages)


def _need_of_load_back_swa(model: Model, op: ops.LoadBackSwa) -> Need:
    row = model.rows.get(op.seq)
    return Need(swa=len(row.span(op.start, op.stop)) if row else 0)


def _need_of_restore(model: Model, op: ops.Restore) -> Need:
    if op.backup not in model.backups:
        return NOTHING
    pages, tokens = model.geometry.pages_for, restored_tokens(model, op)
    swa = pages(restored_tail(model, op))
    return _need(model, ((op.seq, tokens),), pages(tokens), swa)


def _need_of_relocate(model: Model, op: ops.Relocate) -> Need:
    row = model.rows.get(op.seq)
    full = model.geometry.pages_for(row.tokens) if row else 0
    return _need(model, (), full, full)


def _need_of_device_buffer(model: Model, op: ops.DeviceBuffer) -> Need:
    row = model.rows.get(op.seq)
    own = sum(page.device != 0 for page in row.pages) if row else 0
    return Need(device=max(0, op.pages - own))


_NEEDS: dict[type[ops.Op], Callable[[Model, Any], Need]] = {
    ops.Alloc: _need_of_alloc,
    ops.Extend: _need_of_extend,
    ops.ExtendLogical: _need_of_extend,
    ops.Decode: _need_of_decode,
    ops.SwaTail: _need_of_swa_tail,
    ops.LoadBack: _need_of_load_back,
    ops.LoadBackSwa: _need_of_load_back_swa,
    ops.Restore: _need_of_restore,
    ops.Relocate: _need_of_relocate,
    ops.DeviceBuffer: _need_of_device_buffer,
}
"""What each op that lends needs."""


def lacks_room(model: Model, op: ops.Op) -> bool:
    """Whether a side has less than ``op`` needs: the answer must be a refusal."""
    need = demand(model, op)
    if model.usual:
        return need.full > len(model.full.free) or need.swa > len(model.swa.free)
    return (
        need.full > len(model.full.free)
        or need.swa > len(model.swa.free)
        or need.device > len(model.device.free)
        or need.requests > len(model.requests.free)
    )


def why_not(model: Model, op: ops.Op) -> Reason:
    """The reason why ``op`` is not allowed now, or None if it is."""
    if op.kind not in model.contract.ops:
        return f"this target's callers do not use {op.kind}"
    reason = _RULES[type(op)](model, op)
    if reason is None and not model.contract.exhaustion and lacks_room(model, op):
        return "this target's callers check the capacity first"
    return reason


def _growth(model: Model, seq: int, tokens: int) -> int:
    size = model.page_size
    row = model.rows.get(seq)
    if row is None:
        return -(-tokens // size)
    before = row.tokens
    return -(-(before + tokens) // size) + -before // size


def _fresh(model: Model, seq: int) -> Reason:
    return f"sequence {seq} was used before" if seq in model.used else None


def _overwrite(model: Model, wanted: bool) -> Reason:
    if wanted and not model.contract.overwrite_lent:
        return "this target's callers do not overwrite what they were lent"
    return None


def _continuable(model: Model, seq: int, tokens: int) -> Reason:
    """A row that ends inside a page goes on only if its last token's peer is live; where every
    layer slides, any row only while it holds its last token."""
    row = model.rows.get(seq)
    if row is None:
        return _fresh(model, seq)
    geometry = model.geometry
    if geometry.requests and row.tokens + tokens > geometry.context_len:
        return f"the request row of sequence {seq} is full"
    last = row.pages[-1]
    inside = len(last.full_stamps) != model.page_size
    if last.gone_in is not None or (inside and model.hybrid and last.swa_stamps[-1] == NO_PEER):
        return f"the last page of sequence {seq} has no live peer"
    return None


def _device_continuable(model: Model, seq: int) -> Reason:
    """A row whose last page has device entries goes on only after a live one."""
    row, each = model.rows.get(seq), model.geometry.compress
    if not model.sparse or row is None or row.tokens % model.page_size == 0:
        return None
    last = row.pages[-1]
    entries = last.tokens // each
    if entries and last.device_stamps[entries * each - 1] == NO_PEER:
        return f"the last device entry of sequence {seq} is not mapped"
    return None


def _alloc(model: Model, op: ops.Alloc) -> Reason:
    if op.pages < 1:
        return "an empty row has no pages to watch"
    return _fresh(model, op.seq) or _overwrite(model, op.overwrite)


def _extend(model: Model, op: ops.Extend) -> Reason:
    reason = _growing(model, op.parts)
    if reason is None and model.sparse:
        on_device = (_device_continuable(model, seq) for seq, _ in op.parts)
        reason = next((r for r in on_device if r), None)
    return reason or _overwrite(model, op.overwrite)


def _growing(model: Model, parts: tuple[tuple[int, int], ...]) -> Reason:
    # A later part of one name would replace the first.
    if not parts or len(dict(parts)) != len(parts):
        return "a batch names each sequence once"
    for _, tokens in parts:
        if tokens < 1:
            return "an extend adds at least one token"
    for seq, tokens in parts:
        if reason := _continuable(model, seq, tokens):
            return reason
    return None


def _decode(model: Model, op: ops.Decode) -> Reason:
    if not op.seqs or len(set(op.seqs)) != len(op.seqs):
        return "a batch names each sequence once"
    for seq in op.seqs:
        if seq not in model.rows:
            return f"there is no sequence {seq}"
        if reason := _continuable(model, seq, 1):
            return reason
    return _overwrite(model, op.overwrite)


def _swa_tail(model: Model, op: ops.SwaTail) -> Reason:
    if not model.hybrid:
        return "there is no SWA pool"
    if op.tokens < 1 or op.beyond < 0 or not 0 <= op.tail <= op.tokens - op.beyond:
        return "the tail is a part of the extend"
    if op.beyond and not (op.tail and model.contract.tail_ends_early):
        return "this target's tails end with the row"
    if op.seq not in model.rows and op.seq in model.used:
        return f"sequence {op.seq} was used before"
    row = model.rows.get(op.seq)
    before = row.tokens if row else 0
    start = before + op.tokens - op.beyond - op.tail
    if op.tail and start % model.page_size:
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
    if not model.usual and model.geometry.pure_swa:
        pages, _ = _span(model, op.seq, op.start, op.stop)
        here = model.groups if model.group_open else None
        if any(page.gone and page.gone_in != here for page in pages):
            return "a page went when the window moved on"
    return _named(model, op, contract.free_forms, contract.live_frees)


def _free_swa(model: Model, op: ops.FreeSwa) -> Reason:
    contract = model.contract
    if not model.hybrid:
        if not model.geometry.pure_swa:
            return "there is no SWA pool"
        pages, _ = _span(model, op.seq, op.start, op.stop)
        if any(page.gone for page in pages):
            return "a page went when the window moved on"
    return _named(model, op, contract.free_swa_forms, contract.live_swa_frees)


def _free_full(model: Model, op: ops.FreeFull) -> Reason:
    forms = model.contract.free_forms - {"sparse"}
    if reason := _named(model, op, forms, frozenset()):
        return reason
    pages, _ = _span(model, op.seq, op.start, op.stop)
    if model.geometry.pure_swa:
        return None if all(page.gone for page in pages) else "the window has not moved on"
    return "a page still has its peer" if any(page.swa for page in pages) else None


def _named(model: Model, op: ops.PagesOp, forms: frozenset[Form], live: frozenset[Form]) -> Reason:
    """What all frees have in common: the pages are there, and callers name such pages so.
    ``live``: the forms for which every page must still have its peer."""
    pages, reason = _span(model, op.seq, op.start, op.stop)
    if op.form not in forms:
        return f"this target's callers do not {op.kind} by {op.form}"
    if op.form in live and 0 in [page.swa for page in pages]:
        return f"this target's callers {op.kind} pages with a live peer only"
    if op.overwrite and not model.contract.overwrite_deferred:
        return "this target's callers keep the tensors that they free"
    return reason


def _group_begin(model: Model, op: ops.GroupBegin) -> Reason:
    return "a group is open" if model.group_open else None


def _group_end(model: Model, op: ops.GroupEnd) -> Reason:
    return None if model.group_open else "no group is open"


def _recover(model: Model, op: ops.Recover) -> Reason:
    if not model.hybrid:
        return "there is no SWA pool"
    if op.locked and not model.contract.locked_recovery:
        return "this target's callers do not recover locked values"
    if op.kept == op.incoming or op.pages < 1:
        return "a recovery joins two sequences"
    kept, reason = _span(model, op.kept, op.kept_start, op.kept_start + op.pages)
    incoming, other = _span(model, op.incoming, op.incoming_start, op.incoming_start + op.pages)
    if reason or other:
        return reason or other
    size = model.page_size
    for page in kept + incoming:
        if len(page.full_stamps) != size:
            return "a recovery takes whole pages"
    for page in kept:
        if page.swa:
            return "a kept page is no tombstone"
    for page in incoming:
        if not page.swa or NO_PEER in page.swa_stamps:
            return "an incoming page has no live peer"
    return None


def _load_back(model: Model, op: ops.LoadBack) -> Reason:
    if not model.hybrid:
        return "there is no SWA pool"
    if op.pages < 1 or not 0 <= op.swa_pages <= op.pages:
        return "the SWA part is a part of the row"
    return _paused(model) or _fresh(model, op.seq)


def _load_back_swa(model: Model, op: ops.LoadBackSwa) -> Reason:
    if not model.hybrid:
        return "there is no SWA pool"
    pages, reason = _span(model, op.seq, op.start, op.stop)
    if any(page.tokens != model.page_size for page in pages):
        return "a load-back takes whole pages"
    if any(page.swa for page in pages):
        return "a page still has its peer"
    return _paused(model) or reason


def _paused(model: Model) -> Reason:
    return "the pool's memory is paused" if "kv_cache" in model.memory.paused else None


def _retract(model: Model, op: ops.Retract) -> Reason:
    if op.backup in model.used_backups:
        return f"backup {op.backup} was used before"
    pages, reason = _span(model, op.seq, 0, None)
    if model.usual:
        return reason
    if model.geometry.requests and any(page.full in model.detached for page in pages):
        # The request says how far its window has moved on: here that is still under way.
        return "the window of the request moves on in the open group"
    if model.geometry.requests and model.geometry.pure_swa and not reason:
        front = model.rows[op.seq].evicted(model.page_size, pure_swa=True)
        if any(page.gone for page in pages[front // model.page_size :]):
            return "a request says how much is gone at its front only"
    return _paused(model) or reason


def _restore(model: Model, op: ops.Restore) -> Reason:
    backup = model.backups.get(op.backup)
    if backup is None:
        return f"there is no backup {op.backup}"
    tokens = backup.tokens
    if op.tail is not None:
        if model.geometry.requests or not model.hybrid or "swa_tail" not in model.contract.ops:
            return "this target's callers restore whole rows"
        if not 0 <= op.tail <= tokens or (op.tail and (tokens - op.tail) % model.page_size):
            return "the tail starts on a page boundary"
    return _paused(model) or _fresh(model, op.seq)


def _relocate(model: Model, op: ops.Relocate) -> Reason:
    pages, reason = _span(model, op.seq, 0, None)
    if any(page.gone for page in pages):
        return "a page went when the window moved on"
    return _paused(model) or reason


def _extend_logical(model: Model, op: ops.ExtendLogical) -> Reason:
    return _growing(model, op.parts) if model.sparse else "there is no device pool"


def _free_device(model: Model, op: ops.FreeDevice) -> Reason:
    if not model.sparse:
        return "there is no device pool"
    return _named(model, op, frozenset(("slots", "sparse")), frozenset())


def _device_buffer(model: Model, op: ops.DeviceBuffer) -> Reason:
    if not model.sparse:
        return "there is no device pool"
    if op.buffer in model.used_buffers:
        return f"buffer {op.buffer} was used before"
    return "an empty buffer" if op.pages < 1 else _span(model, op.seq, 0, None)[1]


def _free_buffer(model: Model, op: ops.FreeBuffer) -> Reason:
    return None if op.buffer in model.buffers else f"there is no buffer {op.buffer}"


def _reserve(model: Model, op: ops.Reserve) -> Reason:
    if not model.geometry.saver:
        return "there is no memory saver"
    if op.memory in model.memory.paused:
        return f"{op.memory} is paused"
    if not 1 <= op.size <= MOST_OS_PAGES:
        return f"a piece has 1 to {MOST_OS_PAGES} operating-system pages"
    return f"region {op.region} was used before" if op.region in model.memory.used else None


def _drop(model: Model, op: ops.Drop) -> Reason:
    return None if op.region in model.memory.pieces else f"there is no region {op.region}"


def _saver(model: Model, op: ops.Pause | ops.Resume) -> Reason:
    return None if model.geometry.saver else "there is no memory saver"


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
    ops.Relocate: _relocate,
    ops.ExtendLogical: _extend_logical,
    ops.FreeDevice: _free_device,
    ops.DeviceBuffer: _device_buffer,
    ops.FreeBuffer: _free_buffer,
    ops.Reserve: _reserve,
    ops.Drop: _drop,
    ops.Pause: _saver,
    ops.Resume: _saver,
    ops.Clear: _clear,
    ops.Hostile: _hostile,
}

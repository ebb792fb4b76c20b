"""Errors of the allocator core: one type per cause under one base.

A caller that wants to treat every fault of this package alike catches `KVCacheError`; each type
also derives from the builtin that fits it, so generic handlers keep working. Messages name the
operation, the offending pages (the first few and the count) and what was expected.

Exhaustion is not an error: allocations return None, as callers in this field expect.
"""


class KVCacheError(Exception):
    """Base of every error that this package raises."""


class GeometryError(KVCacheError, ValueError):
    """A size, length, alignment or batch shape that no pool state could satisfy."""


class IndexTensorError(KVCacheError, TypeError):
    """An index tensor of the wrong rank, dtype or device; rows or scales to write that are no
    tensor, or on another device."""


class FreeGroupError(KVCacheError, RuntimeError):
    """A free group begun inside another one, or ended without having been begun (sglang#36739)."""


class InvalidSlotError(KVCacheError, ValueError):
    """A slot that is never lent (negative, padding, beyond the pool), or a row continued where it
    does not end."""


class DoubleFreeError(KVCacheError, ValueError):
    """A slot that is not lent, or one page named twice where once is the rule (sglang#40305)."""


class PendingFreeError(DoubleFreeError):
    """A page queued in the open free group is freed, mapped, recovered or continued again."""


class LivePeerError(KVCacheError, ValueError):
    """A live SWA peer would be lost: `free_full` of a mapped slot, or a mapping over one."""


class DeadPeerError(KVCacheError, ValueError):
    """An SWA peer is needed and there is none: a row continued, or a recovery from such a slot."""


class MappingError(KVCacheError, ValueError):
    """An SWA slot is mapped that is not lent or already has a full slot (sglang#35501)."""


class PausedPoolError(KVCacheError, RuntimeError):
    """A pool whose memory is paused is read or written, or a paused tag is allocated under."""


class UnknownTagError(KVCacheError, LookupError):
    """A memory saver is asked about a tag that no region was ever opened for."""


class SaverUnavailableError(KVCacheError, RuntimeError):
    """A memory saver that cannot work here: a missing package, or another operating system."""


class SaverMemoryError(KVCacheError, MemoryError):
    """The operating system does not give the memory of a tag, or does not take it back."""


class LockError(KVCacheError, RuntimeError):
    """A lock of the prefix cache is released that nobody holds, or taken on a node that is not in
    the tree, or what is locked would have to go."""


class CacheStateError(KVCacheError, RuntimeError):
    """The prefix cache contradicts itself: what `sanity_check` found."""


class RequestStateError(KVCacheError, RuntimeError):
    """A request is not ready for the call: it runs already, holds nothing, or has drafts; or a load
    that has ended."""

"""The vocabulary of request-level programs: what a scheduler does with requests and a prefix cache.

The same kind of data as `kvcore.models.ops`, one level up: an op names requests, texts, host copies
and loads in flight, never slots or tree nodes. `group_begin` and `group_end` are the same ops on
both levels. What each op means is told in docs/serving.md.
"""

from __future__ import annotations

from typing import ClassVar

from kvcore.models.ops import Count, Name, Op
from kvcore.models.texts import Text


class Admit(Op, frozen=True, tag="admit"):
    """A new request of tokens ``text``: match all but its last token in the cache, lock the match,
    take a row, and compute the next ``tokens`` of it (None: all the rest). What it generates later
    are the tokens of stream ``output``, in order."""

    req: Name
    text: Text
    output: int
    tokens: Count | None = None
    kind: ClassVar[str] = "admit"


class Prefill(Op, frozen=True, tag="prefill"):
    """The next ``tokens`` of a request whose text is not computed to its end."""

    req: Name
    tokens: Count
    kind: ClassVar[str] = "prefill"


class CacheUnfinished(Op, frozen=True, tag="cache_unfinished"):
    """A running request hands the whole pages that it has computed to the cache."""

    req: Name
    kind: ClassVar[str] = "cache_unfinished"


class DecodeStep(Op, frozen=True, tag="decode_step"):
    """One token more for each request of the batch."""

    reqs: tuple[Name, ...]
    kind: ClassVar[str] = "decode_step"


class Slide(Op, frozen=True, tag="slide"):
    """Free the SWA slots that the windows of these requests have left behind."""

    reqs: tuple[Name, ...]
    kind: ClassVar[str] = "slide"


class Speculate(Op, frozen=True, tag="speculate"):
    """Slots for ``tokens`` drafts beyond the end of a request."""

    req: Name
    tokens: Count
    kind: ClassVar[str] = "speculate"


class Trim(Op, frozen=True, tag="trim"):
    """The first ``accepted`` drafts are tokens of the request; the pages of the others go."""

    req: Name
    accepted: Count
    kind: ClassVar[str] = "trim"


class Finish(Op, frozen=True, tag="finish"):
    """The request ended: its whole pages go to the cache, the rest is freed."""

    req: Name
    kind: ClassVar[str] = "finish"


class Abort(Op, frozen=True, tag="abort"):
    """The request was given up: what it owns is freed, and the cache gets nothing."""

    req: Name
    kind: ClassVar[str] = "abort"


class RetractRequest(Op, frozen=True, tag="retract_request"):
    """A running request loses its slots; with ``backup`` its KV is copied to the host before."""

    req: Name
    backup: bool
    kind: ClassVar[str] = "retract_request"


class ResumeRequest(Op, frozen=True, tag="resume_request"):
    """A retracted request runs again: what the cache has is matched and locked, the rest gets new
    slots, and its KV comes from the backup, or without one is computed again, all of it."""

    req: Name
    kind: ClassVar[str] = "resume_request"


class SavePrefix(Op, frozen=True, tag="save_prefix"):
    """Copy the KV of what the cache can serve of ``text`` to the host, under the name ``copy``."""

    copy: Name
    text: Text
    kind: ClassVar[str] = "save_prefix"


class LoadPrefix(Op, frozen=True, tag="load_prefix"):
    """Begin to bring a host copy back into the cache: lock what is there, take slots for the rest,
    and SWA slots for the tombstones in its last window. In flight until `EndLoad`."""

    copy: Name
    load: Name
    kind: ClassVar[str] = "load_prefix"


class EndLoad(Op, frozen=True, tag="end_load"):
    """The load arrived and is cached; or with ``failed`` what it took is freed."""

    load: Name
    failed: bool = False
    kind: ClassVar[str] = "end_load"


class Evict(Op, frozen=True, tag="evict"):
    """Evict at least so many tokens of each side from the cache, or all that is not locked."""

    full_tokens: Count
    swa_tokens: Count
    kind: ClassVar[str] = "evict"


class Flush(Op, frozen=True, tag="flush"):
    """Free everything that the cache holds; only when nothing runs and nothing is in flight."""

    kind: ClassVar[str] = "flush"


RequestOp = (
    Admit
    | Prefill
    | CacheUnfinished
    | DecodeStep
    | Slide
    | Speculate
    | Trim
    | Finish
    | Abort
    | RetractRequest
    | ResumeRequest
    | SavePrefix
    | LoadPrefix
    | EndLoad
    | Evict
    | Flush
)
"""Every request-level op, for decoding."""

REQUEST_OP_KINDS: tuple[str, ...] = (
    "admit",
    "prefill",
    "cache_unfinished",
    "decode_step",
    "slide",
    "speculate",
    "trim",
    "finish",
    "abort",
    "retract_request",
    "resume_request",
    "save_prefix",
    "load_prefix",
    "end_load",
    "evict",
    "flush",
)

SERVING_OP_KINDS: tuple[str, ...] = (*REQUEST_OP_KINDS, "group_begin", "group_end")
"""Every op of a program of whole requests."""

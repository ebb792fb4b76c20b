"""Pool geometry: which pools a run works with, and how many pages of which size they have.

Covers the full pool and, where there are, the sliding-window (SWA) pool, the device slots of sparse
attention (HiSparse), the request pool and the memory saver. Leaves out everything about tensors
(dtype, heads, layers) but the kind of attention: that is the target's business.
"""

from __future__ import annotations

import sys
from typing import Literal, get_args

import msgspec

Attention = Literal["mha", "mla", "dsa"]
"""What the layers of the pool keep: keys and values, one latent row, or that and an index-K row."""

MOST_SLOTS = 2**22
"""More slots than a run on one machine can be meant to have; a typing error in a trace."""

MOST_PLACES = 2**26
"""The same of the table of a request pool, four bytes a place."""


class Geometry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sizes of the pools on trial.

    ``page_size`` is in slots, ``full_pages`` and ``swa_pages`` are in pages and do not count the
    padding page 0. ``swa_pages == 0`` means a single pool without a sliding-window side;
    ``pure_swa`` means that every layer of that single pool slides. ``need_sort`` asks for sorted
    reuse of freed pages.

    ``device_pages`` above 0 means HiSparse: few device slots under many logical ones, one for every
    ``compress`` logical slots, in pages of ``page_size // compress``.

    ``attention`` is the kind of the pool's layers. ``requests`` above 0 means a request pool of
    that many rows, one for each live sequence. ``saver`` puts the pool under a memory saver.

    ``window`` above 0 means whole requests with a prefix cache over a hybrid allocator, in layers
    that see so many tokens; ``context`` is the longest request in tokens, 0 for twice the pool.
    """

    page_size: int
    full_pages: int
    swa_pages: int = 0
    need_sort: bool = False
    pure_swa: bool = False
    device_pages: int = 0
    compress: int = 1
    attention: Attention = "mha"
    requests: int = 0
    saver: bool = False
    window: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        # Defaults are recognised by identity: what was read is written as it was.
        msgspec.structs.force_setattr(self, "attention", sys.intern(self.attention))
        if self.attention not in get_args(Attention):
            known = ", ".join(get_args(Attention))
            raise ValueError(f"attention is {self.attention!r}, expected one of {known}")
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}, expected at least 1")
        if self.full_pages < 1:
            raise ValueError(f"full_pages is {self.full_pages}, expected at least 1")
        counts = {
            "swa_pages": self.swa_pages,
            "device_pages": self.device_pages,
            "requests": self.requests,
            "window": self.window,
            "context": self.context,
        }
        for name, number in counts.items():
            if number < 0:
                raise ValueError(f"{name} is {number}, expected 0 or more")
        if self.compress < 1 or self.page_size % self.compress:
            raise ValueError(
                f"compress is {self.compress}, expected a divisor of page_size {self.page_size}"
            )
        if self.pure_swa and (self.swa_pages or self.device_pages):
            raise ValueError("pure_swa is one pool; expected swa_pages and device_pages 0")
        if self.device_pages and (self.compress > 1) != (self.swa_pages > 0):
            raise ValueError(
                "HiSparse is a single pool with compress 1 or a hybrid one with compress above 1; "
                f"got swa_pages {self.swa_pages}, compress {self.compress}"
            )
        if self.device_pages and self.compress == 1 and self.full_pages % self.device_pages:
            raise ValueError(
                f"full_pages is {self.full_pages}, expected a multiple of device_pages "
                f"{self.device_pages}"
            )
        if self.window and not (self.hybrid and self.requests and not (self.sparse or self.saver)):
            raise ValueError(
                f"window is {self.window}: a prefix cache needs swa_pages and requests, and takes "
                "no device_pages and no saver"
            )
        slots = (self.full_pages + self.swa_pages + self.device_pages) * self.page_size
        table = self.requests * self.context_len
        if slots > MOST_SLOTS or table > MOST_PLACES:
            raise ValueError(
                f"pools of {slots} slots and a request table of {table} places, expected at most "
                f"{MOST_SLOTS} and {MOST_PLACES}"
            )

    @property
    def hybrid(self) -> bool:
        """Whether there is an SWA pool beside the full one."""
        return self.swa_pages > 0

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window: there is an SWA pool, or nothing else."""
        return self.hybrid or self.pure_swa

    @property
    def sparse(self) -> bool:
        """Whether there are device slots under the logical ones."""
        return self.device_pages > 0

    @property
    def serves(self) -> bool:
        """Whether programs are of whole requests, with a prefix cache."""
        return self.window > 0

    @property
    def full_size(self) -> int:
        """Slots of the full pool, the padding page not counted."""
        return self.full_pages * self.page_size

    @property
    def swa_size(self) -> int:
        """Slots of the SWA pool, the padding page not counted."""
        return self.swa_pages * self.page_size

    @property
    def device_page_size(self) -> int:
        """Device slots a page."""
        return self.page_size // self.compress

    @property
    def device_size(self) -> int:
        """Device slots, the padding page not counted."""
        return self.device_pages * self.device_page_size

    @property
    def context_len(self) -> int:
        """Tokens that a request's row can hold: more than the pool, since a window leaves some
        behind."""
        return self.context or 2 * self.full_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` slots."""
        return -(-tokens // self.page_size)

    def device_pages_for(self, tokens: int) -> int:
        """Device pages that hold the entries of a row of ``tokens``."""
        return -(-(tokens // self.compress) // self.device_page_size)

    def describe(self) -> str:
        """One short phrase, for tables and messages."""
        sides = f"{self.full_pages}+{self.swa_pages}" if self.hybrid else f"{self.full_pages}"
        if self.pure_swa:
            sides += " sliding"
        said = f"{sides} pages of {self.page_size}"
        if self.sparse:
            said += f" over {self.device_pages} device pages of {self.device_page_size}"
        if self.attention != "mha":
            said += f", {self.attention.upper()}"
        if self.requests:
            said += f", {self.requests} requests"
        if self.saver:
            said += ", memory saver"
        if self.window:
            said += f", window {self.window}"
        if self.context:
            said += f", context {self.context}"
        return f"{said}{', sorted' if self.need_sort else ''}"

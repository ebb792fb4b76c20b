"""One request as the serving functions see it: its tokens, its row, and how far everything has got.

Left out: what a model or a client needs of a request beside that.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore.prefix_cache import TreeNode
from kvcore.prefix_cache.keys import TokenIds, as_token_ids
from kvcore.retraction import RetractionBackup

SomeTokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class ServingRequest:
    """A request: the tokens that it knows, and what it holds while it runs.

    All lengths are in tokens. The row of a running request, front to back:

        0 ... prefix_len          slots of the prefix cache, under the lock of `last_node`
        prefix_len ... kv_len     slots of its own, with computed KV
        kv_len ... allocated      slots of its own for drafts, between `speculate` and `trim`

    Requests are equal when they are the same object. Serving functions write the attributes; what
    a caller adds is tokens, by `extend_tokens`, before the step that computes them.

    Args:
        token_ids: the tokens known so far, `[n]`; they are copied.
        extra_key: keeps its prefixes apart from those of other keys in the cache, as those of
            another adapter are.

    Raises:
        GeometryError: the tokens are no vector of integers.
    """

    def __init__(self, token_ids: SomeTokens, *, extra_key: str | None = None) -> None:
        self._tokens = as_token_ids(token_ids).copy()
        self._num_tokens = len(self._tokens)
        self.extra_key = extra_key
        self.req_pool_idx: int | None = None
        """Its row, None while it does not run. Written by `ReqToTokenPool`."""
        self.kv_len = 0
        """Tokens whose KV is computed, or is in the backup; stays while it is retracted."""
        self.kv_allocated_len = 0
        """Tokens that have slots in its row."""
        self.prefix_len = 0
        """Tokens at the front whose slots are the cache's; whole pages."""
        self.swa_evicted_seqlen = 0
        """Tokens at the front whose own SWA slots were freed; whole pages, never less than before
        while it runs, never more than `kv_len`."""
        self.last_node: TreeNode | None = None
        """The node of the cache that it has locked; it ends at `prefix_len`."""
        self.retraction: RetractionBackup[Any] | None = None
        """Its KV, while it is retracted with a backup."""

    @property
    def token_ids(self) -> TokenIds:
        """The tokens known so far, int64 `[n]`: a view that `extend_tokens` leaves behind."""
        return self._tokens[: self._num_tokens]

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        return self._num_tokens

    def extend_tokens(self, token_ids: SomeTokens) -> None:
        """Append tokens `[n]`: what the model has sampled, or drafts that were accepted.

        Costs amortised constant time a token.

        Raises:
            GeometryError: as the constructor; nothing was appended.
        """
        tokens = as_token_ids(token_ids)
        length = self._num_tokens + len(tokens)
        if length > len(self._tokens):
            grown = np.empty(max(length, 2 * len(self._tokens)), dtype=np.int64)
            grown[: self._num_tokens] = self.token_ids
            self._tokens = grown
        self._tokens[self._num_tokens : length] = tokens
        self._num_tokens = length

    def __repr__(self) -> str:
        return (
            f"ServingRequest(tokens={self.num_tokens}, row={self.req_pool_idx}, "
            f"kv_len={self.kv_len}, prefix_len={self.prefix_len})"
        )

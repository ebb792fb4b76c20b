"""What a prefix is looked up by: token ids, and what sets equal tokens apart.

Leaves out the tree of prefixes (`kvcore.prefix_cache.tree`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import GeometryError

TokenIds = NDArray[np.int64]

_LARGEST = np.iinfo(np.int64).max


def as_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> TokenIds:
    """Token ids as int64 `[n]`; the same array where it is that already.

    Raises:
        GeometryError: not a vector of integers, or one beyond int64.
    """
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise GeometryError(
            f"token ids of shape {ids.shape} and {ids.dtype}; expected a vector of integers"
        )
    if ids.dtype == np.uint64 and ids.max() > _LARGEST:
        raise GeometryError(f"token id {ids.max()}; expected at most {_LARGEST}")
    return ids.astype(np.int64, copy=False)


class RadixKey:
    """The tokens of a prefix. Keys of another ``extra_key`` (an adapter, a cache salt) share
    nothing, whatever their tokens.

    Attributes:
        token_ids: int64 `[n]`; not copied, and not to be written to.
        extra_key: None, or a name. Equal ones of two types are two keys.

    Raises:
        GeometryError: the ids are no vector of integers, or the extra key has no hash.
    """

    __slots__ = ("extra_key", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        extra_key: str | None = None,
    ) -> None:
        self.token_ids = as_token_ids(token_ids)
        try:
            hash(extra_key)
        except TypeError as error:
            raise GeometryError(f"extra_key {extra_key!r}; expected None or a name") from error
        self.extra_key = extra_key

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, piece: slice) -> RadixKey:
        """Some of its tokens, under the same extra key."""
        return RadixKey(self.token_ids[piece], self.extra_key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self._extra == other._extra and np.array_equal(self.token_ids, other.token_ids)

    def __hash__(self) -> int:
        return hash((self._extra, self.token_ids.tobytes()))

    def __repr__(self) -> str:
        few = ", ".join(str(token) for token in self.token_ids[:4].tolist())
        more = f", … {len(self)} in all" if len(self) > 4 else ""
        extra = "" if self.extra_key is None else f", {self.extra_key!r}"
        return f"RadixKey([{few}{more}]{extra})"

    def owned(self) -> RadixKey:
        """The same key in memory of its own."""
        return RadixKey(self.token_ids.copy(), self.extra_key)

    def first_page(self, at: int, page_size: int) -> Hashable:
        """What names a child: the page of tokens from ``at`` on, and the extra key."""
        return self._extra, self.token_ids[at : at + page_size].tobytes()

    @property
    def _extra(self) -> Hashable:
        """The extra key as it is compared: 1 and True are two."""
        return type(self.extra_key), self.extra_key

    def common_length(self, at: int, other: RadixKey, page_size: int) -> int:
        """How many tokens from ``at`` on are the tokens of ``other`` from its start, in whole
        pages."""
        length = min(len(self) - at, len(other))
        unequal = self.token_ids[at : at + length] != other.token_ids[:length]
        if unequal.any():
            length = int(unequal.argmax())
        return length // page_size * page_size

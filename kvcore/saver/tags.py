"""Which tags a saver knows, and which of them are paused.

Left out: the memory behind them.
"""

from kvcore.errors import GeometryError, PausedPoolError, UnknownTagError


class Tags:
    """The two sets that every real saver keeps, and the errors that follow from them."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._paused: set[str] = set()

    def open(self, tag: str) -> None:
        """Make `tag` known, or raise if it cannot be allocated under now.

        Raises:
            GeometryError: the tag is empty, which some savers read as "every tag".
            PausedPoolError: the tag is paused.
        """
        if not tag:
            raise GeometryError("region: an empty tag; expected a name, for instance 'kv_cache'")
        if tag in self._paused:
            raise PausedPoolError(
                f"region: tag {tag!r} is paused; resume it before allocating under it"
            )
        self._known.add(tag)

    def require(self, operation: str, tag: str) -> None:
        """Raise UnknownTagError unless there was a region of `tag`."""
        if tag not in self._known:
            known = ", ".join(repr(name) for name in sorted(self._known)) or "none yet"
            raise UnknownTagError(f"{operation}: no region of tag {tag!r}; known tags: {known}")

    def is_paused(self, operation: str, tag: str) -> bool:
        """Whether `tag` is paused; raises UnknownTagError as `require` does."""
        self.require(operation, tag)
        return tag in self._paused

    def mark_paused(self, tag: str) -> None:
        """Record that `tag` is paused."""
        self._paused.add(tag)

    def mark_resumed(self, tag: str) -> None:
        """Record that `tag` is not paused."""
        self._paused.discard(tag)

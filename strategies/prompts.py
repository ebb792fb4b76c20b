"""Texts of a small tree of shared prefixes: few streams, and lengths around pages and windows.

Matches, splits and recoveries happen where texts begin alike, which random texts never do. So a
text is one or two short pieces of few streams, or begins as a text does that runs, waits, was
copied or is cached, as far as any token of it. Leaves out which requests have the texts
(`kvcore.strategies.propose_requests`).
"""

from __future__ import annotations

from kvcore.models import Geometry, ServingModel
from kvcore.models.prefix_tree import TreePage
from kvcore.models.texts import PageKey, Piece, Text, cut, joined, length
from kvcore.strategies.choices import Choices

STREAMS = 3
"""Streams that prompts are of: 0 up to this."""
UNCOMMON = STREAMS
"""A stream that few prompts begin with, so that little of it is cached."""
OUTPUTS = 2
"""Streams that requests generate: few, so that two requests with one prompt go on alike."""
FIRST_OUTPUT = UNCOMMON + 1


def lengths(geometry: Geometry) -> list[int]:
    """Lengths worth a piece, in tokens, longest first, since an integer that is used up names the
    first: no more than half of the smaller pool, so that several requests have room."""
    page, window = geometry.page_size, geometry.window
    around = {1, page, page + 1, 2 * page, window, window + 1, window + page, 2 * window + page}
    around |= {page - 1, window - 1}
    most = max(1, min(geometry.full_pages, geometry.swa_pages) // 2) * page
    return sorted((count for count in around if 1 <= count <= most), reverse=True)


def piece(geometry: Geometry, choices: Choices) -> Piece:
    """The front of a stream, of any of those lengths."""
    known = lengths(geometry)
    return choices.below(STREAMS), known[choices.below(len(known))]


def output(choices: Choices) -> int:
    """A stream to generate."""
    return FIRST_OUTPUT + choices.below(OUTPUTS)


def fitting(text: Text, geometry: Geometry) -> Text:
    """The text, cut to what a row of the request pool holds."""
    return cut(text, min(length(text), geometry.context_len))


def fresh(model: ServingModel, choices: Choices) -> Text:
    """One piece, or two."""
    geometry = model.geometry
    pieces = [piece(geometry, choices) for _ in range(1 + choices.below(2))]
    return fitting(tuple(pieces), geometry)


def known(model: ServingModel) -> list[Text]:
    """What runs, waits, was copied or is cached, with what was generated, longest paths alone."""
    found = [request.known_text for request in (*model.live.values(), *model.waiting.values())]
    found += [copy.text for copy in model.copies.values()]
    found += model.tree.texts()
    return list(dict.fromkeys(found))


def again(model: ServingModel, choices: Choices) -> Text:
    """A known text, all of it."""
    texts = known(model)
    return texts[choices.below(len(texts))] if texts else fresh(model, choices)


def front(model: ServingModel, choices: Choices) -> Text:
    """The front of a known text: up to a page boundary, a token beside it, or half a page."""
    text = again(model, choices)
    page = model.geometry.page_size
    boundary = choices.below(length(text) // page + 1) * page
    beside = (boundary + 1, boundary, boundary - 1, boundary + page // 2)
    stop = beside[choices.below(len(beside))]
    return cut(text, min(max(1, stop), length(text)))


def branch(model: ServingModel, choices: Choices) -> Text:
    """The front of a known text, and a piece more."""
    return fitting((*front(model, choices), piece(model.geometry, choices)), model.geometry)


def over_tombstone(model: ServingModel, choices: Choices) -> Text | None:
    """A text that is cached as far as a tombstone: up to its end, or a little way further."""
    bare = [node for node in model.tree.pages.values() if node.state == "tombstone"]
    if not bare:
        return None
    node = bare[choices.below(len(bare))]
    further = choices.below(4)
    while further > 1 and node.children:
        node, further = next(iter(node.children.values())), further - 1
    front = joined(_keys(node))
    more = piece(model.geometry, choices) if further == 0 else (UNCOMMON, 1)
    return fitting((*front, more), model.geometry)


def _keys(node: TreePage) -> list[PageKey]:
    """The keys of the path to a page, from the root down."""
    keys: list[PageKey] = []
    at: TreePage | None = node
    while at is not None and at.depth:
        keys.append(at.key)
        at = at.parent
    return keys[::-1]


def large(model: ServingModel, choices: Choices) -> Text:
    """About as many tokens as there is room for on the smaller side, now and then too many."""
    page = model.geometry.page_size
    room = min(model.room())
    wanted = (room, room - page, room + 1, room - page + 1)[choices.below(4)]
    return fitting(((UNCOMMON, max(1, wanted)),), model.geometry)

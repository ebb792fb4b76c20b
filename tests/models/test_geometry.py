"""Geometry: which pools there can be, how many slots and pages they have, and how it is said."""

import random
import re
from typing import Any

import msgspec
import pytest

from kvcore.models import Geometry
from kvcore.models.geometry import MOST_PLACES, MOST_SLOTS
from kvcore.strategies.machines import MACHINES

PURE = Geometry(4, 8, pure_swa=True)
SPARSE = Geometry(4, 8, device_pages=4)
COMPRESSED = Geometry(16, 8, 6, device_pages=5, compress=4)
SERVING = Geometry(4, 8, 6, requests=3, window=6)
SERVES_NOT = "a prefix cache needs swa_pages and requests, and takes no device_pages and no saver"


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        ({"page_size": 0}, "page_size is 0, expected at least 1"),
        ({"full_pages": 0}, "full_pages is 0, expected at least 1"),
        ({"swa_pages": -1}, "swa_pages is -1, expected 0 or more"),
        ({"attention": "gqa"}, "attention is 'gqa', expected one of mha, mla, dsa"),
        ({"device_pages": -1}, "device_pages is -1, expected 0 or more"),
        ({"requests": -1}, "requests is -1, expected 0 or more"),
        ({"compress": 0}, "compress is 0, expected a divisor of page_size 4"),
        ({"compress": -2}, "compress is -2, expected a divisor of page_size 4"),
        ({"compress": 3}, "compress is 3, expected a divisor of page_size 4"),
        ({"compress": 8}, "compress is 8, expected a divisor of page_size 4"),
        ({"pure_swa": True, "swa_pages": 2}, "pure_swa is one pool; expected swa_pages and"),
        ({"pure_swa": True, "device_pages": 4}, "pure_swa is one pool; expected swa_pages and"),
        ({"device_pages": 4, "compress": 4}, "got swa_pages 0, compress 4"),
        ({"device_pages": 4, "swa_pages": 8}, "got swa_pages 8, compress 1"),
        ({"device_pages": 4, "swa_pages": 1}, "got swa_pages 1, compress 1"),
        ({"device_pages": 4, "compress": 2}, "got swa_pages 0, compress 2"),
        ({"device_pages": 3}, "full_pages is 8, expected a multiple of device_pages 3"),
        ({"window": -1}, "window is -1, expected 0 or more"),
        ({"context": -1}, "context is -1, expected 0 or more"),
        ({"window": 6, "requests": 3}, SERVES_NOT),
        ({"window": 6, "swa_pages": 6}, SERVES_NOT),
        ({"window": 6, "pure_swa": True, "requests": 3}, SERVES_NOT),
        ({"window": 6, "swa_pages": 6, "requests": 3, "saver": True}, SERVES_NOT),
        (
            {"window": 6, "swa_pages": 6, "requests": 3, "device_pages": 4, "compress": 2},
            SERVES_NOT,
        ),
        ({"full_pages": MOST_SLOTS // 4 + 1}, f"expected at most {MOST_SLOTS} and {MOST_PLACES}"),
        ({"swa_pages": MOST_SLOTS // 4}, f"expected at most {MOST_SLOTS} and {MOST_PLACES}"),
        ({"requests": MOST_PLACES}, f"a request table of {64 * MOST_PLACES} places, expected at"),
        ({"requests": 2, "context": MOST_PLACES}, f"{2 * MOST_PLACES} places, expected at most"),
    ],
    ids=str,
)
def test_a_geometry_that_cannot_be_is_rejected(arguments: dict[str, Any], say: str) -> None:
    with pytest.raises(ValueError, match=re.escape(say)):
        Geometry(**{"page_size": 4, "full_pages": 8, **arguments})


def test_device_pages_count_among_the_slots() -> None:
    pages = MOST_SLOTS // 8
    assert Geometry(4, pages, pages).full_pages == pages
    with pytest.raises(ValueError, match="expected at most"):
        Geometry(4, pages, pages, device_pages=1, compress=4)


def test_pools_may_be_as_small_as_can_be() -> None:
    assert Geometry(2, 1, 1, device_pages=1, compress=2).device_page_size == 1
    assert Geometry(1, 1, pure_swa=True, requests=1).context_len == 2
    assert Geometry(1, 1, device_pages=1).device_size == 1


def test_pools_may_be_as_large_as_can_be() -> None:
    assert Geometry(4, MOST_SLOTS // 4).full_size == MOST_SLOTS
    assert Geometry(1, 1, requests=MOST_PLACES // 2).requests == MOST_PLACES // 2
    assert Geometry(1, 1, requests=1, context=MOST_PLACES).context_len == MOST_PLACES


def test_a_geometry_counts_slots_without_the_padding_page() -> None:
    geometry = Geometry(page_size=4, full_pages=8, swa_pages=6)
    assert (geometry.full_size, geometry.swa_size) == (32, 24)
    assert geometry.hybrid
    assert not Geometry(4, 8).hybrid


def test_a_requests_row_is_longer_than_the_pool_unless_it_is_said_how_long() -> None:
    assert Geometry(4, 8).context_len == 64
    assert Geometry(4, 8, context=10).context_len == 10


def test_a_window_means_whole_requests() -> None:
    assert SERVING.serves
    assert not Geometry(4, 8, 6, requests=3).serves


def test_device_slots_are_one_for_so_many_logical_ones() -> None:
    assert (SPARSE.device_page_size, SPARSE.device_size) == (4, 16)
    assert (COMPRESSED.device_page_size, COMPRESSED.device_size) == (4, 20)


@pytest.mark.parametrize(
    ("geometry", "hybrid", "slides", "sparse"),
    [
        (Geometry(4, 8), False, False, False),
        (Geometry(4, 8, 8), True, True, False),
        (PURE, False, True, False),
        (SPARSE, False, False, True),
        (COMPRESSED, True, True, True),
    ],
    ids=["single", "hybrid", "pure", "sparse", "compressed"],
)
def test_a_geometry_knows_which_sides_there_are(
    geometry: Geometry, hybrid: bool, slides: bool, sparse: bool
) -> None:
    assert (geometry.hybrid, geometry.slides, geometry.sparse) == (hybrid, slides, sparse)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert Geometry(4, 8).pages_for(tokens) == pages
    assert SPARSE.device_pages_for(tokens) == pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (3, 0), (4, 1), (16, 1), (19, 1), (20, 2)])
def test_a_row_has_device_pages_for_its_whole_entries(tokens: int, pages: int) -> None:
    assert COMPRESSED.device_pages_for(tokens) == pages


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        (Geometry(4, 8, 6), "8+6 pages of 4"),
        (Geometry(1, 8, need_sort=True), "8 pages of 1, sorted"),
        (PURE, "8 sliding pages of 4"),
        (SPARSE, "8 pages of 4 over 4 device pages of 4"),
        (COMPRESSED, "8+6 pages of 16 over 5 device pages of 4"),
        (Geometry(2, 8, attention="dsa"), "8 pages of 2, DSA"),
        (
            Geometry(2, 8, 4, True, attention="mla", requests=3, saver=True),
            "8+4 pages of 2, MLA, 3 requests, memory saver, sorted",
        ),
        (SERVING, "8+6 pages of 4, 3 requests, window 6"),
        (
            Geometry(4, 8, 6, True, requests=3, window=6, context=20),
            "8+6 pages of 4, 3 requests, window 6, context 20, sorted",
        ),
    ],
)
def test_a_geometry_describes_itself(geometry: Geometry, text: str) -> None:
    assert geometry.describe() == text


@pytest.mark.parametrize("name", MACHINES)
def test_every_machines_geometry_is_written_and_read_back(name: str) -> None:
    rng = random.Random(name)
    for _ in range(20):
        page_size = rng.choice(MACHINES[name].page_sizes((1, 4, 16)))
        geometry = MACHINES[name].draw(rng, page_size, rng.random() < 0.5)
        assert msgspec.json.decode(msgspec.json.encode(geometry), type=Geometry) == geometry


def test_what_a_geometry_leaves_out_is_left_out_when_it_is_written_again() -> None:
    said = b'{"page_size":4,"full_pages":8,"swa_pages":0,"attention":"mha","saver":false}'
    geometry = msgspec.json.decode(said, type=Geometry)
    assert geometry == Geometry(4, 8)
    assert msgspec.json.encode(geometry) == b'{"page_size":4,"full_pages":8}'

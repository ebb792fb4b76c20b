"""Texts: tokens by name, page by page, and what the KV of each is."""

import random
from itertools import pairwise

import pytest

from kvcore.models import texts
from kvcore.models.texts import STREAM_BITS, Text

TWO: Text = ((1, 5), (2, 3))


def drawn(rng: random.Random) -> Text:
    """A short text of few streams."""
    return tuple((rng.randrange(3), rng.randint(1, 6)) for _ in range(rng.randint(1, 4)))


def common(one: list[int], other: list[int]) -> int:
    """How many items two lists begin with in common."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(one), len(other)))


def test_a_text_is_as_long_as_its_pieces() -> None:
    assert texts.length(TWO) == 8
    assert texts.length(()) == 0


def test_runs_name_the_tokens_of_a_range() -> None:
    assert list(texts.runs(TWO, 0, 8)) == [(1, 0, 5), (2, 0, 3)]
    assert list(texts.runs(TWO, 3, 6)) == [(1, 3, 2), (2, 0, 1)]
    assert list(texts.runs(TWO, 5, 5)) == []


@pytest.mark.parametrize(
    ("stop", "wanted"), [(0, ()), (3, ((1, 3),)), (5, ((1, 5),)), (7, ((1, 5), (2, 2)))]
)
def test_a_text_is_cut_anywhere(stop: int, wanted: Text) -> None:
    assert texts.cut(TWO, stop) == wanted


def test_a_token_has_the_id_of_its_stream_and_place() -> None:
    first = 2 << STREAM_BITS
    assert texts.token_ids(TWO, 4, 7) == [(1 << STREAM_BITS) + 4, first, first + 1]


def test_only_whole_pages_have_keys() -> None:
    assert texts.page_keys(TWO, 3, 8) == [((1, 0, 3),), ((1, 3, 2), (2, 0, 1))]
    assert texts.page_keys(TWO, 3, 5) == [((1, 0, 3),)]
    assert texts.page_keys(TWO, 9, 8) == []


def test_pages_have_equal_keys_where_their_tokens_are_equal() -> None:
    rng = random.Random(1)
    for _ in range(300):
        one, other, size = drawn(rng), drawn(rng), rng.randint(1, 4)
        ids = [texts.token_ids(text, 0, texts.length(text)) for text in (one, other)]
        keys = [texts.page_keys(text, size, texts.length(text)) for text in (one, other)]
        for page, (left, right) in enumerate(zip(*keys, strict=False)):
            tokens = [own[page * size : (page + 1) * size] for own in ids]
            assert (left == right) == (tokens[0] == tokens[1])


def test_pages_joined_are_the_text_that_they_were_cut_from() -> None:
    rng = random.Random(2)
    for _ in range(300):
        text, size = drawn(rng), rng.randint(1, 4)
        whole = texts.length(text) // size * size
        assert texts.joined(texts.page_keys(text, size, whole)) == texts.cut(text, whole)


def test_stamps_are_equal_as_far_as_texts_are() -> None:
    rng = random.Random(3)
    for _ in range(300):
        one, other = drawn(rng), drawn(rng)
        ends = texts.length(one), texts.length(other)
        ids = texts.token_ids(one, 0, ends[0]), texts.token_ids(other, 0, ends[1])
        seen = texts.stamps(one, 0, ends[0]), texts.stamps(other, 0, ends[1])
        assert common(*seen) == common(*ids)


def test_the_same_tokens_after_others_have_other_stamps() -> None:
    assert texts.stamps(((1, 2), (3, 2)), 2, 4) != texts.stamps(((2, 2), (3, 2)), 2, 4)
    assert texts.stamps(((1, 2), (3, 2)), 2, 4) != texts.stamps(((1, 3), (3, 2)), 3, 5)


def test_stamps_of_a_part_are_a_part_of_the_stamps() -> None:
    whole = texts.stamps(TWO, 0, 8)
    assert texts.stamps(TWO, 3, 7) == whole[3:7]
    assert [count for _, count in texts.stamp_runs(TWO, 3, 7)] == [2, 2]


def test_stamps_go_up_within_a_piece_and_fit_into_four_bytes() -> None:
    rng = random.Random(4)
    for _ in range(100):
        text = tuple((rng.randrange(2**40), 3) for _ in range(3))
        stamps = texts.stamps(text, 0, 9)
        assert all(0 < stamp < 2**31 for stamp in stamps)
        for piece in (stamps[:3], stamps[3:6], stamps[6:]):
            assert all(b == a + 1 for a, b in pairwise(piece))

"""What a request knows: its tokens, and itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import GeometryError, ServingRequest


def test_tokens_are_appended_one_by_one_or_many() -> None:
    request = ServingRequest([3, 1])
    for token in range(100):
        request.extend_tokens([token])
    request.extend_tokens(np.array([7, 8], dtype=np.int32))
    request.extend_tokens([])

    assert request.token_ids.tolist() == [3, 1, *range(100), 7, 8]
    assert request.token_ids.dtype == np.int64
    assert request.num_tokens == 104


def test_a_request_copies_the_tokens_that_it_is_given() -> None:
    tokens = np.array([1, 2, 3])
    request = ServingRequest(tokens)
    tokens[0] = 9
    assert request.token_ids.tolist() == [1, 2, 3]


def test_appending_costs_few_copies() -> None:
    request = ServingRequest([0])
    buffers = set()
    for token in range(1000):
        request.extend_tokens([token])
        buffers.add(request.token_ids.__array_interface__["data"][0])
    assert len(buffers) < 30


def test_requests_of_equal_tokens_are_two_requests() -> None:
    first, second = ServingRequest([1, 2]), ServingRequest([1, 2])
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5], ["a"], 3], ids=str)
def test_what_is_no_vector_of_whole_numbers_is_refused(tokens: Any) -> None:
    with pytest.raises(GeometryError, match="expected a vector of integers"):
        ServingRequest(tokens)
    request = ServingRequest([1])
    with pytest.raises(GeometryError, match="expected a vector of integers"):
        request.extend_tokens(tokens)
    assert request.token_ids.tolist() == [1]

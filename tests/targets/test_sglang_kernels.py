"""The kernel doubles, held against the rule that they implement and, where KVCORE_SGLANG_DIRS names
releases and Triton can run, against the kernels of those releases.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.targets.sglang.kernels import (
    DOUBLES,
    OverreadError,
    decode_rows,
    extend_rows,
    get_and_clear_swa_pages,
)
from kvcore.targets.sglang.release import Release, load_release
from kvcore.targets.sglang.stand_ins import get_num_new_pages, next_power_of_2

PAGE_SIZES = (1, 2, 4, 16)
REAL_DIRECTORIES = [
    Path(name) for name in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if name
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A page size, and per request: prefix length, new tokens, slot of the last token."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    requests = []
    for row in range(draw(st.integers(1, 6))):
        prefix = draw(st.integers(0, 3 * page_size))
        last = (1000 + row) * page_size + (prefix - 1) % page_size if prefix else -1
        requests.append((prefix, draw(st.integers(0, 3 * page_size + 1)), last))
    return page_size, requests


def rows_by_the_rule(
    page_size: int, requests: list[tuple[int, int, int]], pages: list[int]
) -> list[int]:
    """Token by token: the next free page at a page boundary, else the slot after the last one."""
    free = iter(pages)
    slots = []
    for prefix, new_tokens, last in requests:
        for position in range(prefix, prefix + new_tokens):
            last = next(free) * page_size if position % page_size == 0 else last + 1
            slots.append(last)
    return slots


def pages_by_the_rule(page_size: int, requests: list[tuple[int, int, int]]) -> int:
    return sum(
        position % page_size == 0
        for prefix, new_tokens, _ in requests
        for position in range(prefix, prefix + new_tokens)
    )


def launch_extend(
    kernel: Any, page_size: int, requests: list[tuple[int, int, int]], pages: list[int]
) -> list[int]:
    prefixes, news, lasts = (list(column) for column in zip(*requests, strict=True))
    lengths = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
    out = torch.full((sum(news),), -7, dtype=torch.int64)
    kernel[(len(requests),)](
        torch.tensor(prefixes),
        torch.tensor(lengths),
        torch.tensor(lasts),
        torch.tensor(pages, dtype=torch.int64),
        out,
        next_power_of_2(len(requests)),
        page_size,
    )
    return out.tolist()


def launch_decode(
    kernel: Any, page_size: int, requests: list[tuple[int, int, int]], pages: list[int]
) -> list[int]:
    out = torch.full((len(requests),), -7, dtype=torch.int64)
    kernel[(len(requests),)](
        torch.tensor([prefix + 1 for prefix, _, _ in requests]),
        torch.tensor([last for _, _, last in requests]),
        torch.tensor(pages, dtype=torch.int64),
        out,
        next_power_of_2(len(requests)),
        page_size,
    )
    return out.tolist()


@given(batch=batches(), spare=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_an_extend_continues_each_row_and_then_opens_pages_in_order(
    batch: tuple[int, list[tuple[int, int, int]]], spare: int
) -> None:
    page_size, requests = batch
    pages = list(range(pages_by_the_rule(page_size, requests) + spare, 0, -1))

    slots = launch_extend(DOUBLES["alloc_extend_kernel"], page_size, requests, pages)

    assert slots == rows_by_the_rule(page_size, requests, pages)


@given(batch=batches(), spare=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_a_decode_is_an_extend_by_one_token(
    batch: tuple[int, list[tuple[int, int, int]]], spare: int
) -> None:
    page_size, requests = batch
    requests = [(prefix, 1, last) for prefix, _, last in requests]
    pages = list(range(pages_by_the_rule(page_size, requests) + spare, 0, -1))

    slots = launch_decode(DOUBLES["alloc_decode_kernel"], page_size, requests, pages)

    assert slots == rows_by_the_rule(page_size, requests, pages)


@given(batch=batches())
@settings(max_examples=200, deadline=None)
def test_the_page_count_is_the_number_of_boundaries_that_the_batch_crosses(
    batch: tuple[int, list[tuple[int, int, int]]],
) -> None:
    page_size, requests = batch
    prefixes = torch.tensor([prefix for prefix, _, _ in requests])
    lengths = torch.tensor([prefix + new for prefix, new, _ in requests])
    expected = pages_by_the_rule(page_size, requests)
    assert get_num_new_pages(lengths, page_size, prefix_lens=prefixes) == expected

    if page_size > 1:  # at page size 1 no release asks for the pages of a decode
        decodes = pages_by_the_rule(page_size, [(prefix, 1, last) for prefix, _, last in requests])
        assert get_num_new_pages(prefixes + 1, page_size, decode=True) == decodes
    with pytest.raises(TypeError, match="prefix_lens is missing"):
        get_num_new_pages(lengths, page_size)


@given(batch=batches(), short=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_read_beyond_the_free_list_is_named_and_writes_nothing(
    batch: tuple[int, list[tuple[int, int, int]]], short: int
) -> None:
    page_size, requests = batch
    needed = pages_by_the_rule(page_size, requests)
    if needed < short:
        return
    pages = torch.arange(1, needed - short + 1)
    lengths = torch.tensor([prefix + new for prefix, new, _ in requests])
    out = torch.full((sum(new for _, new, _ in requests),), -7, dtype=torch.int64)

    with pytest.raises(OverreadError) as raised:
        extend_rows(
            torch.tensor([prefix for prefix, _, _ in requests]),
            lengths,
            torch.tensor([last for _, _, last in requests]),
            pages,
            out,
            next_power_of_2(len(requests)),
            page_size,
        )

    error = raised.value
    assert (error.kernel, error.needed, error.length) == (
        "alloc_extend_kernel",
        needed,
        needed - short,
    )
    assert pages_by_the_rule(page_size, requests[: error.request]) <= needed - short
    assert pages_by_the_rule(page_size, requests[: error.request + 1]) > needed - short
    assert f"request {error.request} reads entry {needed - short} of a free list" in str(error)
    assert (out == -7).all()


def test_a_decode_over_a_boundary_with_an_empty_free_list_is_an_overread() -> None:
    out = torch.full((2,), -7, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)

    with pytest.raises(OverreadError, match="request 1 reads entry 0 of a free list of 0 pages"):
        decode_rows(torch.tensor([4, 5]), torch.tensor([10, 23]), none, out, 2, 4)
    assert (out == -7).all()


def test_an_output_of_the_wrong_length_is_refused() -> None:
    out = torch.empty(3, dtype=torch.int64)
    zero = torch.tensor([0])

    with pytest.raises(IndexError, match="2 new tokens, its output 3 entries"):
        extend_rows(zero, torch.tensor([2]), torch.tensor([-1]), torch.tensor([1]), out, 1, 4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_looking_swa_pages_up_unmaps_whole_full_pages_and_only_those(page_size: int) -> None:
    mapping = torch.arange(8 * page_size + 1)
    mapping[-1] = -1
    mapping[2 * page_size : 3 * page_size] = 0
    representatives = torch.tensor([5, 2, 7]) * page_size

    pages, mapped, agrees = get_and_clear_swa_pages(representatives, mapping, page_size, True)

    assert pages.tolist() == [5, 0, 7]
    assert mapped.tolist() == [True, False, True]
    assert agrees is not None
    assert agrees.tolist() == [True, False, True]
    left = [page for page in range(8) if mapping[page * page_size : (page + 1) * page_size].any()]
    assert left == [page for page in (0, 1, 3, 4, 6) if page or page_size > 1]
    assert mapping[-1] == -1


def test_a_full_page_that_straddles_two_swa_pages_does_not_agree() -> None:
    mapping = torch.tensor([0, 0, 0, 0, 8, 9, 14, 15, -1])

    _, mapped, agrees = get_and_clear_swa_pages(torch.tensor([4]), mapping, 4, True)

    assert mapped.tolist() == [True]
    assert agrees is not None
    assert agrees.tolist() == [False]


def assert_kernels_agree(release: Release) -> None:
    """The release's own kernels and the doubles, on the same random batches."""
    alloc_extend = release.paged_allocator.alloc_extend
    kernels = {name: alloc_extend.__globals__[name] for name in list(DOUBLES)[:2]}
    draw = torch.Generator().manual_seed(27779)

    def pick(below: int) -> int:
        return int(torch.randint(below, (1,), generator=draw))

    for _ in range(40):
        page_size = PAGE_SIZES[pick(len(PAGE_SIZES))]
        requests = []
        for row in range(1 + pick(5)):
            prefix = pick(3 * page_size + 1)
            last = (1000 + row) * page_size + (prefix - 1) % page_size if prefix else -1
            requests.append((prefix, pick(3 * page_size + 2), last))
        pages = (1 + torch.randperm(60, generator=draw)).tolist()
        for name, launch in zip(kernels, (launch_extend, launch_decode), strict=True):
            expected = launch(kernels[name], page_size, requests, pages)
            assert launch(DOUBLES[name], page_size, requests, pages) == expected


def test_the_doubles_agree_with_the_kernels_of_a_real_release() -> None:
    if not REAL_DIRECTORIES:
        pytest.skip("KVCORE_SGLANG_DIRS names no directory")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("there is no GPU and TRITON_INTERPRET is not 1")
    for directory in REAL_DIRECTORIES:
        assert_kernels_agree(load_release(directory, kernels="triton"))

"""The counter: what it takes for a kernel, for a wait, and for bytes written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcore.benchmarks.counter import DEVICE, count

LENGTH = 6
WORD = 8

Sequence = Callable[[torch.Tensor], object]


def numbers(length: int = LENGTH) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.int64, device=DEVICE)


def test_views_and_memory_without_a_fill_are_no_kernels() -> None:
    def call() -> None:
        x = numbers_made
        torch.empty(3, device=DEVICE)
        x.view(2, 3).t()[0][:1].unsqueeze(0).detach()

    numbers_made = numbers()
    assert count(call).ops == ()


def test_fills_copies_and_answers_into_given_memory_are_kernels() -> None:
    x, place = numbers(), numbers(2 * LENGTH)

    def call() -> None:
        x.fill_(1)
        place[:LENGTH].copy_(x)
        torch.cat((x, x), out=place)
        torch.arange(3, device=DEVICE)

    assert count(call).ops == ("fill_", "copy_", "cat", "arange")


def test_what_happens_on_the_host_is_not_counted() -> None:
    host = torch.tensor([1, 2, 3])

    counted = count(lambda: (host.sum().item(), host[host > 1].tolist(), torch.unique(host)))

    assert (counted.kernels, counted.synchronisations, counted.complete) == (0, 0, True)


HOST = torch.tensor([1, 0, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "sequence",
    [
        lambda x: x[0].item(),
        lambda x: int(x[0]),
        lambda x: bool(x[0] > 1),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: HOST.clone().copy_(x),
        lambda x: torch.equal(x, x),
        lambda x: range(int(x.sum())),
    ],
)
def test_a_value_brought_to_the_host_is_a_wait_and_ends_the_count(sequence: Sequence) -> None:
    x = numbers()

    counted = count(lambda: sequence(x))

    assert counted.synchronisations == 1
    assert not counted.complete


@pytest.mark.parametrize(
    "sequence",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: torch.unique(x),
        lambda x: torch.unique_consecutive(x),
        lambda x: x.masked_select(x > 0),
        lambda x: x.repeat_interleave(x),
        lambda x: x.__setitem__(x > 0, x[:1]),
    ],
)
def test_a_shape_that_depends_on_values_is_a_wait_and_the_count_goes_on(
    sequence: Sequence,
) -> None:
    x = numbers()

    counted = count(lambda: (sequence(x), x.fill_(0)))

    assert counted.synchronisations == 1
    assert counted.complete
    assert counted.ops[-1] == "fill_"


@pytest.mark.parametrize(
    "sequence",
    [
        lambda x: x.new_tensor([1, 2, 3]),
        lambda x: x[[0, 1, 2]],
        lambda x: torch.tensor([1, 2], device=DEVICE),
        lambda x: torch.as_tensor([1, 2], device=DEVICE),
        lambda x: HOST.to(DEVICE),
        lambda x: x.copy_(HOST),
        lambda x: x[HOST],
        lambda x: x.__setitem__(x, 0),
        lambda x: x.__setitem__(0, 5),
    ],
)
def test_values_that_the_device_waits_for_are_a_wait(sequence: Sequence) -> None:
    x = numbers()

    counted = count(lambda: sequence(x))

    assert counted.synchronisations == 1
    assert counted.complete


@pytest.mark.parametrize(
    "sequence",
    [
        lambda x: HOST.to(DEVICE, non_blocking=True),
        lambda x: x.copy_(HOST, non_blocking=True),
        lambda x: x.index_fill_(0, x, 0),
        lambda x: x.__setitem__(slice(0, 2), 5),
        lambda x: x.masked_fill_(x > 0, 0),
        lambda x: x.repeat_interleave(2),
        lambda x: len(x) + x.numel() + x.shape[0],
    ],
)
def test_nothing_else_is_a_wait(sequence: Sequence) -> None:
    x = numbers()

    assert count(lambda: sequence(x)).synchronisations == 0


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (lambda x: x.clone(), LENGTH),
        (lambda x: x[2:4].fill_(0), 2),
        (lambda x: x.index_fill_(0, x[:3], 0), 3),
        (lambda x: x.index_put_((x[:2],), x[:2]), 2),
        (lambda x: x.put_(x[:2], x[:2]), 2),
        (lambda x: x.scatter_(0, x[:4], x[:4]), 4),
        (lambda x: x.view(3, 2).index_fill_(0, x[:2], 0), 4),
        (lambda x: x.view(3, 2).index_put_((x[:1], x[:1]), x[:1]), 1),
        (lambda x: x.view(3, 2).index_put_((x[:1],), x[:2]), 2),
        (lambda x: torch.add(x, 1, out=x), LENGTH),
        (lambda x: torch.cat((x, x)), 2 * LENGTH),
        (lambda x: torch.sort(x), 2 * LENGTH),
        (lambda x: x[1:], 0),
    ],
)
def test_bytes_are_those_of_the_entries_written(sequence: Sequence, words: int) -> None:
    x = numbers()

    assert count(lambda: sequence(x)).bytes_written == words * WORD


def test_it_counts_under_inference_mode_too() -> None:
    x = numbers()

    with torch.inference_mode():
        counted = count(lambda: x.clone().reshape(2, 3).t().reshape(-1))

    assert counted.ops == ("clone", "clone")


def test_an_error_of_the_call_is_raised() -> None:
    def call() -> None:
        raise LookupError("not of the counter's making")

    with pytest.raises(LookupError):
        count(call)


def test_what_contradicts_a_made_up_shape_ends_the_count_only() -> None:
    x = numbers()

    def call() -> None:
        assert len(torch.unique(x)) == 1, "of six zeros one stays"

    counted = count(call)

    assert counted.synchronisations == 1
    assert not counted.complete

"""Segment frees run no operation whose result only the device knows, so nothing waits for it.

The laws of segments are with their allocators; here it is only what they run, and that what was put
off is there when somebody asks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvcore import DoubleFreeError, GeometryError, PureSWATokenToKVPoolAllocator

WAITS = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations whose shape or host value depends on what a tensor holds."""


READS = frozenset({"__array__", "cpu", "item", "numpy", "tolist"})
"""Tensor methods that bring values to the host without an operation that a mode sees on a CPU."""


class NoReading(TorchFunctionMode):
    """Fails where a tensor's values are read on the host."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        assert func.__name__ not in READS, f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Fails at any operation for which the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ran += 1
        given = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        if name == "repeat_interleave":
            assert given.get("output_size") is not None, f"{name} waits for the device"
        for index in args[1] if name.startswith("index") and isinstance(args[1], list) else ():
            assert index is None or index.dtype not in (torch.bool, torch.uint8), f"{name} by mask"
        return func(*args, **given)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails where the host would wait for the device, and where nothing runs at all."""
    with NoReading(), NoWaiting() as mode:
        yield
    assert mode.ran > 0, "nothing was watched"


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.repeat_interleave(x),
    ],
    ids=["mask", "nonzero", "unique", "int", "bool", "tolist", "select", "repeat"],
)
def test_the_watch_sees_what_waits(wait: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match=r"waits for the device|by mask"), no_waiting():
        wait(torch.tensor([2, 0, 3]))


@pytest.fixture(params=[False, True], ids=["plain", "grouped"])
def grouped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def free_in_segments(allocator: Any, row: torch.Tensor, name: str, *, grouped: bool) -> None:
    """The row's first half by the single form, its second by the form of several pieces."""
    half = row.numel() // 2
    if grouped:
        allocator.free_group_begin()
    quarter = half // 2
    pieces = [(row[half : half + quarter], half), (row[half + quarter :], half + quarter)]
    with no_waiting():
        getattr(allocator, name)(row[:half], start_pos=0)
        getattr(allocator, f"{name}s")(pieces)
    if grouped:
        allocator.free_group_end()


@pytest.mark.parametrize("name", ["free_segment", "free_full_segment"])
def test_one_pool_frees_segments_without_waiting(
    page_size: int,
    need_sort: bool,
    name: str,
    grouped: bool,
    laws: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", "torch")
    allocator = laws.make_single(page_size, need_sort=need_sort, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 8 * page_size)
    free_in_segments(allocator, row, name, grouped=grouped)
    laws.check_single(allocator, [])


@pytest.mark.parametrize("name", ["free_segment", "free_swa_segment", "free_full_segment"])
def test_a_hybrid_frees_segments_without_waiting(
    page_size: int,
    need_sort: bool,
    name: str,
    grouped: bool,
    laws: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a device: on a CPU the host's own memory is read by numpy.
    monkeypatch.setenv("KVCORE_KERNELS", "torch")
    allocator = laws.make_hybrid(page_size, need_sort=need_sort, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 8 * page_size)
    # Pages with and without a peer in one segment.
    allocator.free_swa(row if name == "free_full_segment" else row[: 3 * page_size])
    free_in_segments(allocator, row, name, grouped=grouped)
    laws.check_hybrid(
        allocator, laws.pages_of(row, page_size) if name == "free_swa_segment" else []
    )
    assert allocator.swa_available_size() == allocator.size_swa


@pytest.mark.parametrize(
    "ask",
    [
        lambda allocator, page: allocator.swa_available_size() // page,
        lambda allocator, page: allocator.available_size() // page,
        lambda allocator, page: 8 if allocator.new_pages_available(0, 8) else 0,
        lambda allocator, page: allocator.alloc(8 * page).numel() // page,
        lambda allocator, page: allocator.swa_attn_allocator.alloc(8 * page).numel() // page,
        lambda allocator, page: (
            allocator.swa_attn_allocator.free_pages.numel()
            + allocator.swa_attn_allocator.release_pages.numel()
        ),
        lambda allocator, page: (
            allocator.swa_attn_allocator.release_pages.numel()
            + allocator.swa_attn_allocator.free_pages.numel()
        ),
        lambda allocator, page: (
            allocator.merge_and_sort_free() or allocator.swa_attn_allocator.free_pages.numel()
        ),
    ],
    ids=["swa", "both", "room", "alloc", "side", "free", "released", "merge"],
)
def test_what_was_put_off_is_there_for_whoever_asks_first(
    page_size: int, need_sort: bool, ask: Callable[[Any, int], int], laws: Any
) -> None:
    allocator = laws.make_hybrid(page_size, need_sort=need_sort, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 8 * page_size)
    allocator.free_swa_segment(row[: 4 * page_size], start_pos=0)
    allocator.free_swa_segment(row, start_pos=0)
    allocator.free_full_segment(row, start_pos=0)
    assert ask(allocator, page_size) == 8


def test_what_was_put_off_before_a_group_is_free_within_it(page_size: int, laws: Any) -> None:
    allocator = laws.make_hybrid(page_size, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 8 * page_size)
    allocator.free_swa_segment(row[: 2 * page_size], start_pos=0)
    allocator.free_group_begin()
    allocator.free_swa_segment(row[2 * page_size :], start_pos=2 * page_size)
    assert allocator.swa_available_size() == 2 * page_size
    lent = allocator.alloc(2 * page_size)
    assert lent is not None
    allocator.free_group_end()
    laws.check_hybrid(allocator, laws.pages_of(torch.cat((row, lent)), page_size))


def test_what_was_put_off_waits_for_the_end_of_a_group_of_its_side(
    page_size: int, laws: Any
) -> None:
    allocator = laws.make_hybrid(page_size, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 4 * page_size)
    allocator.swa_attn_allocator.free_group_begin()
    allocator.free_swa_segment(row, start_pos=0)
    assert allocator.swa_available_size() == allocator.size_swa - 4 * page_size
    allocator.swa_attn_allocator.free_group_end()
    laws.check_hybrid(allocator, laws.pages_of(row, page_size))


@pytest.mark.parametrize("take_all_back", ["clear", "resize"])
def test_taking_everything_back_forgets_what_was_put_off(
    page_size: int, take_all_back: str, laws: Any
) -> None:
    allocator = laws.make_hybrid(page_size, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 4 * page_size)
    allocator.free_swa_segment(row, start_pos=0)
    if take_all_back == "clear":
        allocator.clear()
    else:
        allocator.resize(size=6 * page_size, size_swa=3 * page_size)
    laws.check_hybrid(allocator, [])


@pytest.mark.parametrize("name", ["free_segment", "free_full_segment"])
def test_a_segment_that_cannot_fit_is_refused_before_anything_changes(
    page_size: int, name: str, laws: Any, refuses: Any
) -> None:
    allocator = laws.make_hybrid(page_size, validate=False)
    row = laws.extend_row(allocator, laws.no_row, 2 * page_size)
    other = laws.extend_row(allocator, laws.no_row, page_size)
    allocator.free(row)
    foreign = torch.cat((other, row))
    refuses(allocator, DoubleFreeError, getattr(allocator, name), foreign, start_pos=0)
    laws.check_hybrid(allocator, laws.pages_of(other, page_size))


# -- what errors say ---------------------------------------------------------------------------


def make_pure(page_size: int) -> PureSWATokenToKVPoolAllocator:
    return PureSWATokenToKVPoolAllocator(
        8 * page_size, page_size, torch.float16, "cpu", None, False, validate=True
    )


@pytest.mark.parametrize("side", ["", "swa_", "full_"])
def test_errors_name_the_call_whether_of_one_piece_or_of_several(side: str, laws: Any) -> None:
    hybrid, single = laws.make_hybrid(4, validate=True), laws.make_single(4, validate=True)
    pure = make_pure(4)
    askew = torch.tensor([5])
    one, several = f"free_{side}segment", f"free_{side}segments"
    for allocator in (hybrid, pure) if side == "swa_" else (hybrid, pure, single):
        allocator.alloc(4)
        for start in (1, 0.0, 0):
            with pytest.raises(GeometryError, match=f"^{one}: ") as caught:
                getattr(allocator, one)(askew, start_pos=start)
            with pytest.raises(GeometryError, match=f"^{several}: ") as of_several:
                getattr(allocator, several)([(askew, start)])
            assert str(caught.value)[len(one) :] == str(of_several.value)[len(several) :]
        with pytest.raises(GeometryError, match=f"^{several}: expected segments"):
            getattr(allocator, several)([askew])


def test_a_sliding_pool_looks_at_segments_that_it_does_not_free(laws: Any) -> None:
    pure = make_pure(4)
    row = pure.alloc(8)
    assert row is not None
    pure.free_swa(row)
    pure.free_full_segments([(row[:4], 0), (row[4:], 4)])
    with pytest.raises(DoubleFreeError, match=r"^free_full_segments: SWA pages named more than"):
        pure.free_full_segments([(row[:4], 0), (row[:4], 4)])
    with pytest.raises(GeometryError, match=r"^free_full_segment: segment that does not run"):
        pure.free_full_segment(row.flip(0), start_pos=0)
    laws.check_single(pure.swa_attn_allocator, [])

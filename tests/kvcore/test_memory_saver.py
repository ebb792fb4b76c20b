"""The memory savers: what `pause` gives back and `resume` brings, and what they refuse.

Resident memory is read here from /proc/self/smaps, mapping by mapping, not from the savers. Pools
built with a saver are in `test_saved_pools.py`, locked memory and threads in
`test_memory_saver_refusals.py`.
"""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvcore.errors import (
    GeometryError,
    PausedPoolError,
    SaverMemoryError,
    SaverUnavailableError,
    UnknownTagError,
)
from kvcore.pools import MHATokenToKVPool
from kvcore.saver import (
    CudaMemorySaver,
    HostMemorySaver,
    MemorySaver,
    NoMemorySaver,
    default_saver,
)
from kvcore.saver.host import Segment
from kvcore.targets.faults.saver import SegmentReusedUnderAnotherTag

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host saver needs Linux")

PAGE = mmap.PAGESIZE


def mapped_rss(addresses: set[int]) -> int:
    """Resident bytes of the mappings that begin at these addresses, as smaps has them."""
    total, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            wanted = int(first.split("-")[0], 16) in addresses
        elif wanted and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def rss(tensors: list[torch.Tensor]) -> int:
    """Resident bytes of tensors of a host saver, each of which is a mapping of its own."""
    return mapped_rss({tensor.data_ptr() for tensor in tensors})


def whole_pages(tensors: list[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // PAGE) * PAGE for tensor in tensors)


def ones(saver: MemorySaver, tag: str, nbytes: int = 1 << 20) -> torch.Tensor:
    with saver.region(tag) as region:
        tensor = region.zeros((nbytes,), torch.uint8, "cpu")
    return tensor.fill_(1)


# The host saver


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64])
def test_memory_of_a_region_is_zero_writable_and_resident_at_once(dtype: torch.dtype) -> None:
    saver = HostMemorySaver()
    with saver.region("a") as region:
        assert region.tag == "a"
        tensor = region.zeros((1000, 3, 7), dtype, "cpu")
    assert rss([tensor]) == whole_pages([tensor]) == saver.resident_bytes("a")
    assert tensor.shape == (1000, 3, 7)
    assert tensor.dtype == dtype
    assert not tensor.any()
    assert tensor.fill_(3).eq(3).all()


def test_pause_gives_back_its_own_tag_and_nothing_of_another() -> None:
    saver = HostMemorySaver()
    mine, other = ones(saver, "a"), ones(saver, "b")
    more = ones(saver, "a", 3 * PAGE + 5)
    saver.pause("a")
    assert saver.is_paused("a")
    assert rss([mine, more]) == saver.resident_bytes("a") == 0
    assert not saver.is_paused("b")
    assert rss([other]) == saver.resident_bytes("b") == whole_pages([other])
    assert other.eq(1).all()


def test_resume_brings_all_of_it_back_at_the_same_address_as_zeros() -> None:
    saver = HostMemorySaver()
    tensor = ones(saver, "a")
    address = tensor.data_ptr()
    saver.pause("a")
    saver.resume("a")
    # Measured before anything is touched: a shortage would have shown in resume.
    assert rss([tensor]) == whole_pages([tensor]) == saver.resident_bytes("a")
    assert tensor.data_ptr() == address
    assert not tensor.any()
    assert tensor.fill_(2).eq(2).all()


def test_what_is_written_behind_the_savers_back_is_gone_after_resume() -> None:
    saver = HostMemorySaver()
    tensor = ones(saver, "a")
    saver.pause("a")
    tensor[5] = 9
    saver.resume("a")
    assert not tensor.any()


def test_pausing_and_resuming_twice_do_nothing_more() -> None:
    saver = HostMemorySaver()
    tensor = ones(saver, "a")
    saver.resume("a")
    assert tensor.eq(1).all()
    saver.pause("a")
    saver.pause("a")
    assert rss([tensor]) == 0
    saver.resume("a")
    tensor.fill_(2)
    saver.resume("a")
    assert tensor.eq(2).all()


@pytest.mark.parametrize("paused", [False, True])
def test_a_dropped_tensor_is_unmapped_at_once(paused: bool) -> None:
    saver = HostMemorySaver()
    kept, dropped = ones(saver, "a"), ones(saver, "a")
    address = dropped.data_ptr()
    if paused:
        saver.pause("a")
    maps = Path("/proc/self/maps")
    view = dropped[5:]
    del dropped
    assert f"{address:x}-" in maps.read_text(), "a view keeps the memory"
    del view
    assert f"{address:x}-" not in maps.read_text()
    saver.resume("a")
    assert saver.resident_bytes("a") == whole_pages([kept])


def test_freed_memory_never_goes_to_another_tag() -> None:
    saver = HostMemorySaver()
    dropped = ones(saver, "a")
    del dropped
    later = ones(saver, "b")
    saver.pause("a")
    assert later.eq(1).all()
    assert rss([later]) == whole_pages([later])


def test_the_pages_around_a_tensor_cannot_be_touched() -> None:
    tensor = ones(HostMemorySaver(), "a", PAGE)
    address = tensor.data_ptr()
    rights = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, *_ = line.split()
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        for page in (address - PAGE, address, address + PAGE):
            if begin <= page < end:
                rights[page - address] = mode
    assert rights == {-PAGE: "---p", 0: "rw-p", PAGE: "---p"}


def test_an_empty_tensor_needs_no_memory() -> None:
    saver = HostMemorySaver()
    with saver.region("a") as region:
        assert region.zeros((0, 4), torch.int64, "cpu").shape == (0, 4)
    saver.pause("a")
    saver.resume("a")
    assert saver.resident_bytes("a") == 0


@pytest.mark.parametrize("call", ["pause", "resume", "resident_bytes", "is_paused"])
def test_an_unknown_tag_is_an_error_that_names_the_known_ones(call: str) -> None:
    saver = HostMemorySaver()
    ones(saver, "weights")
    with pytest.raises(UnknownTagError, match=rf"{call}: .*'kv_cash'.*'weights'"):
        getattr(saver, call)("kv_cash")


def test_nothing_is_allocated_under_a_paused_tag() -> None:
    saver = HostMemorySaver()
    with saver.region("a") as region:
        saver.pause("a")
        with pytest.raises(PausedPoolError, match="'a'"):
            region.zeros((1,), torch.uint8, "cpu")
    with pytest.raises(PausedPoolError, match="'a'"), saver.region("a"):
        pass
    ones(saver, "b")


@pytest.mark.parametrize(
    ("shape", "device"), [((-1,), "cpu"), ((4,), "meta")], ids=["negative", "other device"]
)
def test_a_tensor_that_host_memory_cannot_hold_is_refused(
    shape: tuple[int, ...], device: str
) -> None:
    with HostMemorySaver().region("a") as region, pytest.raises(GeometryError, match="zeros"):
        region.zeros(shape, torch.uint8, device)


def test_an_empty_tag_is_refused_because_some_savers_read_it_as_all() -> None:
    with pytest.raises(GeometryError, match="empty tag"), HostMemorySaver().region(""):
        pass


def test_more_memory_than_there_is_address_space_is_one_clear_error() -> None:
    saver = HostMemorySaver()
    with saver.region("a") as region, pytest.raises(SaverMemoryError, match="cannot map"):
        region.zeros((1 << 60,), torch.uint8, "cpu")
    assert saver.resident_bytes("a") == 0


class Short(HostMemorySaver):
    """Finds memory for so many tensors only."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def _populate(self, segment: Segment) -> None:
        if self.room == 0:
            raise OSError(12, "Cannot allocate memory")
        self.room -= 1
        super()._populate(segment)


def test_a_shortage_shows_when_memory_is_asked_for_and_leaves_nothing_behind() -> None:
    saver = Short(room=1)
    kept = ones(saver, "a")
    with saver.region("a") as region, pytest.raises(SaverMemoryError, match="zeros: no memory"):
        region.zeros((1 << 20,), torch.uint8, "cpu")
    assert saver.resident_bytes("a") == whole_pages([kept])


def test_a_shortage_on_resume_leaves_the_tag_paused_and_empty() -> None:
    saver = Short(room=3)
    tensors = [ones(saver, "a"), ones(saver, "a")]
    saver.pause("a")
    with pytest.raises(SaverMemoryError, match="resume: tag 'a'"):
        saver.resume("a")
    assert saver.is_paused("a")
    assert rss(tensors) == 0
    saver.room = 2
    saver.resume("a")
    assert rss(tensors) == whole_pages(tensors)


def test_a_pause_that_the_system_refuses_lets_nobody_read_what_may_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(segment: Segment) -> None:
        raise OSError(22, "Invalid argument")

    saver = HostMemorySaver()
    tensor = ones(saver, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "drop", refuse)
        with pytest.raises(SaverMemoryError, match="pause: tag 'a'"):
            saver.pause("a")
    assert saver.is_paused("a")
    saver.resume("a")
    assert not tensor.any()


def test_an_older_kernel_is_served_by_touching_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    # An advice that no kernel knows, as MADV_POPULATE_WRITE is before 5.14.
    monkeypatch.setattr("kvcore.saver.host._POPULATE_WRITE", 9999)
    saver = HostMemorySaver()
    tensor = ones(saver, "a")
    saver.pause("a")
    assert rss([tensor]) == 0
    saver.resume("a")
    assert rss([tensor]) == whole_pages([tensor])
    assert not tensor.any()


def test_other_shortages_of_the_kernel_are_not_mistaken_for_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(segment: Segment, *advice: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Segment, "madvise", short)
    with (
        HostMemorySaver().region("a") as region,
        pytest.raises(SaverMemoryError, match="Cannot allocate"),
    ):
        region.zeros((PAGE,), torch.uint8, "cpu")


def test_the_guard_page_is_not_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    # No page protection has such bits.
    monkeypatch.setattr("kvcore.saver.host._PROT_NONE", 0xFF00)
    with (
        HostMemorySaver().region("a") as region,
        pytest.raises(SaverMemoryError, match="cannot guard"),
    ):
        region.zeros((PAGE,), torch.uint8, "cpu")


def test_other_systems_than_linux_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SaverUnavailableError, match=r"needs Linux.*darwin"):
        HostMemorySaver()


# The saver that saves nothing, and the default ones


def test_no_saver_leaves_memory_and_contents_alone() -> None:
    saver = NoMemorySaver()
    tensor = ones(saver, "a")
    saver.pause("a")
    assert not saver.is_paused("a")
    assert tensor.eq(1).all()
    saver.resume("a")
    saver.pause("a tag that nobody opened")
    assert tensor.eq(1).all()
    assert saver.resident_bytes("a") == 0


def test_one_saver_serves_all_pools_of_a_device_kind() -> None:
    saver = default_saver("cpu")
    assert isinstance(saver, HostMemorySaver)
    assert default_saver(torch.device("cpu")) is saver
    pool = MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "cpu", True)
    assert pool.memory_saver is saver


def test_a_device_without_a_saver_is_an_error_and_not_a_pool_without_one() -> None:
    with pytest.raises(SaverUnavailableError, match="none for device meta"):
        MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "meta", True)


# The CUDA saver, against a double of torch_memory_saver


class Library:
    """What torch_memory_saver does, on host tensors: memory allocated in a region is unmapped by
    `pause` and holds anything after `resume`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tag: str | None = None

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self.calls.append(f"region {tag}")
        previous, self.tag = self.tag, tag
        yield
        self.tag = previous

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


class OnHost(CudaMemorySaver):
    """The CUDA saver on a machine without CUDA."""

    device_type = "cpu"

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.library = library

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        self.library.calls.append(f"on {device}")
        yield

    def _wait(self) -> None:
        self.library.calls.append("wait")


def test_cuda_memory_is_allocated_in_the_packages_region_on_its_device() -> None:
    library = Library()
    tensor = ones(OnHost(library), "a", 100)
    assert library.calls == ["on cpu", "region a"]
    assert library.tag is None
    assert tensor.shape == (100,)


def test_cuda_memory_is_given_back_when_the_kernels_are_done_and_comes_back_as_zeros() -> None:
    library = Library()
    saver = OnHost(library)
    tensor, other = ones(saver, "a", 100), ones(saver, "b", 50)
    library.calls.clear()
    saver.pause("a")
    saver.pause("a")
    assert library.calls == ["wait", "pause a"]
    assert (saver.resident_bytes("a"), saver.resident_bytes("b")) == (0, 50)
    # Fresh physical memory holds whatever it held.
    tensor.fill_(77)
    saver.resume("a")
    saver.resume("a")
    assert library.calls == ["wait", "pause a", "resume a"]
    assert not tensor.any()
    assert other.eq(1).all()
    del tensor
    assert saver.resident_bytes("a") == 0


def test_the_cuda_saver_keeps_the_rules_that_the_package_leaves_open() -> None:
    library = Library()
    saver = OnHost(library)
    with pytest.raises(UnknownTagError):
        saver.pause("a")
    with saver.region("a") as region:
        saver.pause("a")
        with pytest.raises(PausedPoolError):
            region.zeros((1,), torch.uint8, "cpu")
        with pytest.raises(GeometryError, match="on cpu"):
            region.zeros((1,), torch.uint8, "meta")
    with pytest.raises(PausedPoolError), saver.region("a"):
        pass
    assert "region a" not in library.calls


def test_the_package_is_imported_when_the_saver_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    module = ModuleType("torch_memory_saver")
    vars(module)["torch_memory_saver"] = library
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    saver = CudaMemorySaver()
    with saver.region("a"):
        pass
    with pytest.raises(GeometryError, match="on cuda"), saver.region("a") as region:
        region.zeros((1,), torch.uint8, "cpu")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(SaverUnavailableError, match=r"kvcore\[saver\]"):
        CudaMemorySaver()


# A known fault


def test_a_segment_reused_under_another_tag_is_paused_with_the_first() -> None:
    saver = SegmentReusedUnderAnotherTag()
    dropped = ones(saver, "a")
    del dropped
    later = ones(saver, "b")
    saver.pause("a")
    assert rss([later]) == 0
    assert not later.any()

"""The host saver where the system takes no memory back, and where threads meet in it.

Resident memory is read here from /proc/self/smaps, mapping by mapping, not from the saver. What the
savers do otherwise is in `test_memory_saver.py`.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from kvcore.errors import SaverMemoryError
from kvcore.saver import HostMemorySaver
from kvcore.saver.host import Segment

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


def ones(saver: HostMemorySaver, tag: str, nbytes: int) -> torch.Tensor:
    with saver.region(tag) as region:
        tensor = region.zeros((nbytes,), torch.uint8, "cpu")
    return tensor.fill_(1)


@contextmanager
def locked(tensor: torch.Tensor) -> Iterator[None]:
    """Memory that the system does not take back meanwhile."""
    libc, address = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(tensor.data_ptr())
    if libc.mlock(address, ctypes.c_size_t(PAGE)) != 0:
        pytest.skip("this system lets nobody lock a page")
    try:
        yield
    finally:
        libc.munlock(address, ctypes.c_size_t(PAGE))


def test_a_pause_gives_back_all_that_is_not_locked_and_is_finished_later() -> None:
    saver = HostMemorySaver()
    tensors = [ones(saver, "a", PAGE) for _ in range(4)]
    with locked(tensors[1]):
        for _ in range(2):
            with pytest.raises(SaverMemoryError, match="pause: tag 'a': 1 of 4 tensors"):
                saver.pause("a")
            assert saver.is_paused("a")
            assert rss(tensors) == PAGE
    saver.pause("a")
    assert rss(tensors) == 0
    saver.resume("a")
    assert rss(tensors) == 4 * PAGE
    assert not any(tensor.any() for tensor in tensors)


def test_locked_memory_is_not_resumed_but_refused_and_the_tag_stays_paused() -> None:
    saver = HostMemorySaver()
    tensors = [ones(saver, "a", PAGE) for _ in range(3)]
    with locked(tensors[1]):
        with pytest.raises(SaverMemoryError):
            saver.pause("a")
        with pytest.raises(SaverMemoryError, match="resume: tag 'a'"):
            saver.resume("a")
        assert saver.is_paused("a")
        assert rss(tensors) == PAGE
    saver.resume("a")
    assert not any(tensor.any() for tensor in tensors)


class Meeting(HostMemorySaver):
    """Holds an allocation up, between its look at the tag and its record, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = Event(), Event()

    def _populate(self, segment: Segment) -> None:
        self.inside.set()
        assert self.go_on.wait(10)
        super()._populate(segment)


def test_memory_allocated_by_another_thread_is_paused_with_the_rest() -> None:
    saver, tensors = Meeting(), list[torch.Tensor]()
    allocating = Thread(target=lambda: tensors.append(ones(saver, "a", PAGE)))
    allocating.start()
    assert saver.inside.wait(10)
    pausing = Thread(target=saver.pause, args=("a",))
    pausing.start()
    pausing.join(0.1)
    assert pausing.is_alive()
    saver.go_on.set()
    for thread in (allocating, pausing):
        thread.join(10)
    assert saver.is_paused("a")
    # The other thread may write its tensor once more, after the pause: that is its own business.
    saver.pause("a")
    assert rss(tensors) == 0

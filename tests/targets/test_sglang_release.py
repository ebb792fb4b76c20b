"""Loading a release: what is loaded, from where, how it is kept apart, and what each error says.
Releases that are really there are driven where KVCORE_SGLANG_DIRS names their directories.

Leaves out the kernel doubles: test_sglang_kernels.py.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcore.targets.sglang.kernels import DOUBLES
from kvcore.targets.sglang.release import OLDEST, Release, ReleaseError, load_release
from kvcore.targets.sglang.stand_ins import BaseSWAKVPool

# A release in miniature: what its modules import is what real ones import, and the packages
# around them must not be run.
FAKE_RELEASE = {
    "sglang/__init__.py": "raise RuntimeError('the serving stack was imported')",
    "sglang/srt/utils/__init__.py": "raise RuntimeError('the serving stack was imported')",
    "sglang/srt/mem_cache/allocator/__init__.py": "raise RuntimeError('imports the kernels')",
    "sglang/srt/mem_cache/allocator/base.py": "class Base:\n    calls = []\n",
    "sglang/srt/mem_cache/allocator/token.py": (
        "from sglang.srt.mem_cache.allocator.base import Base\n"
        "class TokenToKVPoolAllocator(Base): ...\n"
    ),
    "sglang/srt/mem_cache/allocator/paged.py": (
        "from .base import Base\n"
        "from sglang.kernels.ops.memory.allocator import alloc_decode_kernel, alloc_extend_kernel\n"
        "from sglang.srt.platforms import current_platform\n"
        "from sglang.srt.utils import get_bool_env_var, get_num_new_pages, next_power_of_2\n"
        "class PagedTokenToKVPoolAllocator(Base):\n"
        "    debug_mode = get_bool_env_var('SGLANG_DEBUG_MEMORY_POOL')\n"
        "    extend_kernel = alloc_extend_kernel\n"
        "    launches_kernels = current_platform.capabilities.supports_triton\n"
        "    own_class = current_platform.get_paged_allocator_cls()\n"
        "    def budget(self):\n"
        "        from sglang.srt.mem_cache.prefill_budget import PrefillBudget\n"
        "        return PrefillBudget\n"
    ),
    "sglang/srt/mem_cache/allocator/swa.py": (
        "import logging, torch\n"
        "from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator\n"
        "from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool\n"
        "from sglang.srt.utils.common import async_h2d, is_npu\n"
        "from sglang.srt.utils.invariants import Bucket, Invariant, IsTrue, expect\n"
        "MAPPED = Invariant('mapped', Bucket.GUARD, IsTrue())\n"
        "class SWATokenToKVPoolAllocator(TokenToKVPoolAllocator):\n"
        "    def __init__(self, kvcache):\n"
        "        assert isinstance(kvcache, BaseSWAKVPool) and not is_npu()\n"
        "        self.lengths = async_h2d([3], dtype=torch.int64, device='cpu')\n"
        "        self.seen = expect(MAPPED, self.lengths > 9, msg='not raised: checks are off')\n"
    ),
}


class Pool(BaseSWAKVPool):
    """The least that a hybrid allocator needs of a pool."""

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        assert self.full_to_swa_index_mapping is not None
        return self.full_to_swa_index_mapping[kv_indices]


def write_release(directory: Path, version: str | None = "0.5.18", **changed: str) -> Path:
    """A fake release; `changed` replaces allocator modules by name."""
    files = dict(FAKE_RELEASE)
    for name, text in changed.items():
        files[f"sglang/srt/mem_cache/allocator/{name}.py"] = text
    if version is not None:
        metadata = f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n"
        files[f"sglang-{version}.dist-info/METADATA"] = metadata
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def sglang_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sglang"]


# --- loading -------------------------------------------------------------------------------------


def test_a_release_gives_its_three_allocator_classes_and_its_version(tmp_path: Path) -> None:
    release = load_release(write_release(tmp_path))

    assert release.version == "0.5.18"
    assert release.directory == tmp_path
    assert release.token_allocator.__name__ == "TokenToKVPoolAllocator"
    assert release.paged_allocator.__name__ == "PagedTokenToKVPoolAllocator"
    assert issubclass(release.swa_allocator, release.token_allocator)


def test_the_serving_stack_is_replaced_by_a_plain_machine_without_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    monkeypatch.setenv("SGLANG_INVARIANT_CHECK", "strict")
    release = load_release(write_release(tmp_path))
    paged = vars(release.paged_allocator)

    assert paged["debug_mode"] is False
    assert paged["extend_kernel"] is DOUBLES["alloc_extend_kernel"]
    assert paged["launches_kernels"] is True
    assert paged["own_class"] is None
    hybrid = release.swa_allocator(Pool())
    assert hybrid.lengths.tolist() == [3]
    assert hybrid.seen.tolist() == [False]


def test_the_pool_base_is_the_class_that_the_release_checks_for(tmp_path: Path) -> None:
    release = load_release(write_release(tmp_path))

    assert issubclass(Pool, release.swa_pool_base)
    with pytest.raises(AssertionError):
        release.swa_allocator(object())


def test_loading_leaves_nothing_in_sys_modules_and_uses_nothing_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = ModuleType("sglang")
    monkeypatch.setitem(sys.modules, "sglang", installed)
    before = sglang_modules()

    load_release(write_release(tmp_path))

    assert sglang_modules() == before
    assert sys.modules["sglang"] is installed
    assert set(vars(installed)) == set(vars(ModuleType("sglang")))


def test_two_releases_live_side_by_side_without_sharing_a_class(tmp_path: Path) -> None:
    old = load_release(write_release(tmp_path / "old", "0.5.13"))
    new = load_release(write_release(tmp_path / "new", "0.5.23"))

    assert (old.version, new.version) == ("0.5.13", "0.5.23")
    assert old.token_allocator is not new.token_allocator
    vars(old.token_allocator.__mro__[1])["calls"].append("old")
    assert vars(new.token_allocator.__mro__[1])["calls"] == []
    assert old.swa_pool_base is new.swa_pool_base  # so that one pool class serves all releases


def test_a_release_that_reaches_for_the_serving_stack_later_is_told_what_is_missing(
    tmp_path: Path,
) -> None:
    release = load_release(write_release(tmp_path))

    with pytest.raises(ModuleNotFoundError, match=r"prefill_budget.*only the allocators"):
        release.paged_allocator().budget()
    assert sglang_modules() == []


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["_version.py", "version.py"])
def test_the_version_is_read_from_the_package_where_there_is_no_metadata(
    tmp_path: Path, file: str
) -> None:
    write_release(tmp_path, version=None)
    (tmp_path / "sglang" / file).write_text(
        "raise_if_run = 1 / 0\n__version__ = version = '0.5.20.post2'\n"
    )

    assert load_release(tmp_path).version == "0.5.20.post2"


def test_versions_are_ordered_as_package_versions_are(tmp_path: Path) -> None:
    ascending = [
        "0.5.9",
        "0.5.13.dev4",
        "0.5.13a1",
        "0.5.13b1",
        "0.5.13rc2",
        "0.5.13",
        "0.5.13.post1",
        "0.5.14",
        "0.5.20",
        "0.6",
        "1.0.1",
    ]
    release = load_release(write_release(tmp_path))
    for older, newer in pairwise(ascending):
        assert replace(release, version=newer).version_at_least(older)
        assert not replace(release, version=older).version_at_least(newer)
        assert replace(release, version=older).version_at_least(older)


def test_a_local_version_and_trailing_zeros_do_not_change_the_order(tmp_path: Path) -> None:
    release = replace(load_release(write_release(tmp_path)), version="0.6.0+cu129")

    assert release.version_at_least("0.6")
    with pytest.raises(ValueError, match="'latest' is not a version"):
        release.version_at_least("latest")


# --- errors --------------------------------------------------------------------------------------


def load_error(directory: Path) -> str:
    with pytest.raises(ReleaseError) as raised:
        load_release(directory)
    message = str(raised.value)
    assert "\n" not in message
    assert "expected" in message
    return message


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}: no such directory" in load_error(tmp_path / "none")


def test_a_directory_without_the_package_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}: holds no sglang package" in load_error(tmp_path)


@pytest.mark.parametrize("stated", [None, "unknown", "print(0)"])
def test_a_release_without_a_readable_version_is_refused(
    tmp_path: Path, stated: str | None
) -> None:
    write_release(tmp_path, version=None)
    if stated is not None:
        (tmp_path / "sglang" / "_version.py").write_text(f"__version__ = {stated!r}\n")

    assert "for sglang" in load_error(tmp_path)


def test_a_version_file_that_is_not_python_states_no_version(tmp_path: Path) -> None:
    write_release(tmp_path, version=None)
    (tmp_path / "sglang" / "_version.py").write_text("= '0.5.18'\n")

    assert "states no version" in load_error(tmp_path)


def test_two_releases_in_one_directory_are_refused(tmp_path: Path) -> None:
    write_release(write_release(tmp_path, "0.5.18"), "0.5.20")

    assert "sglang-0.5.18.dist-info, sglang-0.5.20.dist-info" in load_error(tmp_path)


def test_a_release_older_than_the_allocator_package_is_refused(tmp_path: Path) -> None:
    message = load_error(write_release(tmp_path, "0.5.12"))

    assert "sglang 0.5.12 is too old" in message
    assert OLDEST in message


def test_a_missing_allocator_module_is_named(tmp_path: Path) -> None:
    write_release(tmp_path)
    gone = tmp_path / "sglang/srt/mem_cache/allocator/paged.py"
    gone.unlink()

    assert f"{gone}: no such file" in load_error(tmp_path)


@pytest.mark.parametrize(("text", "line"), [("x = 1\nclass (:\n", 2), ("x = '\0'\n", 1)])
def test_a_syntax_error_in_the_release_is_located(tmp_path: Path, text: str, line: int) -> None:
    write_release(tmp_path, swa=text)

    assert f"swa.py:{line}: not valid Python" in load_error(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from sglang.srt.utils import is_npu, is_xpu",
            "sglang.srt.utils has no stand-in for is_x",
        ),
        ("from sglang.srt.environ import envs", "sglang.srt.environ is not there"),
        ("import sglang.srt.utils", "`import sglang.srt.utils` is not provided for"),
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("raise OSError('first\\nsecond')", "OSError: first"),
        ("pass", "has no class SWATokenToKVPoolAllocator"),
    ],
)
def test_a_release_that_does_not_fit_the_layout_is_refused_with_the_reason(
    tmp_path: Path, text: str, said: str
) -> None:
    message = load_error(write_release(tmp_path, "0.5.99", swa=text))

    assert said in message
    assert "sglang 0.5.99" in message


# --- the release's own kernels -------------------------------------------------------------------


def test_real_kernels_without_triton_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # how Python marks a module as absent

    with pytest.raises(ReleaseError, match="the triton package is missing"):
        load_release(write_release(tmp_path), kernels="triton")


def test_real_kernels_come_from_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = ModuleType("triton")
    triton.__spec__ = importlib.util.spec_from_loader("triton", loader=None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    write_release(tmp_path)
    kernels = tmp_path / "sglang/kernels/ops/memory/allocator.py"
    kernels.parent.mkdir(parents=True)
    kernels.write_text("import triton\nalloc_extend_kernel = alloc_decode_kernel = 'its own'\n")

    release = load_release(tmp_path, kernels="triton")

    assert vars(release.paged_allocator)["extend_kernel"] == "its own"


# --- real releases -------------------------------------------------------------------------------

REAL_DIRECTORIES = [
    Path(name) for name in os.environ.get("KVCORE_SGLANG_DIRS", "").split(os.pathsep) if name
]
real_releases = pytest.mark.parametrize(
    "directory",
    REAL_DIRECTORIES
    or [
        pytest.param(
            Path(),
            marks=pytest.mark.skip(
                reason="KVCORE_SGLANG_DIRS names no directory "
                "(pip install --no-deps --target DIR sglang==V)"
            ),
        )
    ],
    ids=[path.name for path in REAL_DIRECTORIES] or ["unset"],
)


def build_hybrid(release: Release, page_size: int, need_sort: bool = False) -> Any:
    return release.swa_allocator(
        16 * page_size, 12 * page_size, page_size, torch.float16, "cpu", Pool(), need_sort
    )


def new_row(hybrid: Any, page_size: int, tokens: int) -> torch.Tensor:
    """A fresh row of slots, by the call that callers use at that page size."""
    if page_size == 1:
        return hybrid.alloc(tokens)
    zero, length = torch.tensor([0]), torch.tensor([tokens])
    return hybrid.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)


def free_rows(hybrid: Any, row: torch.Tensor, window_start: int) -> None:
    """Give a row back whose slots before `window_start` lost their peers, as callers do."""
    hybrid.free(row[window_start:])
    if window_start == 0:
        return
    if "free_full" in dir(hybrid):
        hybrid.free_full(row[:window_start])
    else:
        hybrid.full_attn_allocator.free(row[:window_start])


def assert_drained(hybrid: Any, page_size: int) -> None:
    assert hybrid.full_available_size() == 16 * page_size
    assert hybrid.swa_available_size() == 12 * page_size
    assert not hybrid.full_to_swa_index_mapping[:-1].any()
    assert hybrid.full_to_swa_index_mapping[-1] == -1


@real_releases
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_real_release_lends_frees_and_drains(
    directory: Path, page_size: int, need_sort: bool
) -> None:
    release = load_release(directory)
    hybrid = build_hybrid(release, page_size, need_sort)
    before = sglang_modules()

    row = new_row(hybrid, page_size, 3 * page_size)
    other = new_row(hybrid, page_size, 2 * page_size)
    assert len(set(row.tolist()) | set(other.tolist())) == 5 * page_size
    if page_size > 1:
        length = torch.tensor([len(row) + 1])
        row = torch.cat([row, hybrid.alloc_decode(length, length, row[-1:])])
    hybrid.free_swa(row[:page_size])
    free_rows(hybrid, row, page_size)

    hybrid.free_group_begin()
    swa_before = hybrid.swa_available_size()
    hybrid.free(other)
    assert hybrid.swa_available_size() == swa_before
    hybrid.free_group_end()

    assert_drained(hybrid, page_size)
    assert sglang_modules() == before == []


@real_releases
def test_a_real_release_lends_an_swa_tail(directory: Path) -> None:
    hybrid = build_hybrid(load_release(directory), page_size=4)
    zero, length = torch.tensor([0]), torch.tensor([12])

    row = hybrid.alloc_extend_swa_tail(zero, zero, length, length, torch.tensor([-1]), 12, 4)

    peers = hybrid.translate_loc_from_full_to_swa(row)
    assert (peers[:8] == 0).all()
    assert (peers[8:] > 0).all()
    free_rows(hybrid, row, window_start=8)
    assert_drained(hybrid, page_size=4)


@real_releases
def test_a_real_release_keeps_its_other_two_allocators(directory: Path) -> None:
    release = load_release(directory)
    token = release.token_allocator(16, torch.float16, "cpu", None, False)
    paged = release.paged_allocator(16, 4, torch.float16, "cpu", None, False)

    for allocator in (token, paged):
        slots = allocator.alloc(8)
        assert allocator.available_size() == 8
        allocator.free(slots)
        assert allocator.available_size() == 16

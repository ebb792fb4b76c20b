"""Kernels: which ones an allocator gets; Triton's against torch and plain loops under Triton's
interpreter; what they launch.

Left out: running them on a GPU.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from kvcore import TokenToKVPoolAllocator
from kvcore.kernels import kernels_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORKER = Path(__file__).with_name("triton_worker.py")
COMPILER = Path(__file__).with_name("triton_compiler.py")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCORE_KERNELS", raising=False)


def run_python(*arguments: str, **environment: str) -> str:
    """What a Python process of its own prints; its errors, if it fails, fail the test."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout


# -- which kernels -----------------------------------------------------------------------------


def test_torch_computes_the_slots_on_a_cpu() -> None:
    assert kernels_for(CPU) is None


def test_a_cuda_device_gets_kernels_only_if_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcore.kernels.find_spec", lambda name: None)
    assert kernels_for(CUDA) is None


@needs_triton
def test_a_cuda_device_gets_tritons_kernels() -> None:
    assert type(kernels_for(CUDA)).__name__ == "TritonSlots"
    assert kernels_for(CUDA, "torch") is None


@needs_triton
def test_the_environment_decides_when_an_allocator_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if the interpreter had been asked for; the kernels are not run.
    monkeypatch.setattr("kvcore.kernels.triton_slots.INTERPRETED", True)
    monkeypatch.setenv("KVCORE_KERNELS", "Triton")
    assert type(kernels_for(CPU)).__name__ == "TritonSlots"
    allocator = TokenToKVPoolAllocator(4, torch.float16, "cpu", None, False)
    monkeypatch.setenv("KVCORE_KERNELS", "torch")
    assert kernels_for(CUDA) is None
    assert type(allocator._kernels).__name__ == "TritonSlots"


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_KERNELS", "fast")
    with pytest.raises(
        ValueError, match="KVCORE_KERNELS: expected torch, numpy, triton or nothing"
    ):
        kernels_for(CPU)


def test_numpy_is_for_a_cpu() -> None:
    assert kernels_for(CPU, "numpy") is None
    with pytest.raises(ValueError, match="numpy on cuda; expected torch or triton"):
        kernels_for(CUDA, "numpy")


def test_triton_is_not_chosen_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvcore.kernels.triton_slots", raising=False)
    with pytest.raises(ImportError, match="triton"):
        kernels_for(CPU, "triton")


@needs_triton
def test_triton_is_not_chosen_on_a_cpu_without_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcore.kernels.triton_slots.INTERPRETED", False)
    monkeypatch.setenv("KVCORE_KERNELS", "triton")
    with pytest.raises(ValueError, match="triton on a CPU; expected TRITON_INTERPRET=1"):
        TokenToKVPoolAllocator(4, torch.float16, "cpu", None, False)


def test_the_core_works_without_triton_and_does_not_import_it() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kvcore, kvcore.kernels\n"
        "pool = kvcore.TokenToKVPoolAllocator(4, torch.float16, 'cpu', None, False)\n"
        "one = torch.tensor([1])\n"
        "print(pool.alloc_decode(one, one, -one).tolist())\n"
    )
    assert run_python("-c", program) == "[1]\n"


# -- Triton against torch and plain loops ------------------------------------------------------


@needs_triton
def test_triton_places_lends_and_releases_as_torch_and_plain_loops_do() -> None:
    seen = json.loads(run_python(str(WORKER), TRITON_INTERPRET="1"))
    against_torch = product(("alloc_extend", "alloc_decode"), (1, 3, 16, 64))
    misled = product(("misled",), (1, 16))
    against_loops = product(("release", "twice", "lend", "decode paired"), (1, 2, 3, 16, 64, 256))
    kinds = [
        f"{kind}, page size {page_size}"
        for kind, page_size in (*against_torch, *misled, *against_loops)
    ]
    assert sorted(seen) == sorted([*kinds, "served"])


@needs_triton
def test_every_call_is_one_launch_of_a_kernel_that_is_compiled_once(tmp_path: Path) -> None:
    """The interpreter runs Python that the compiler refuses; compiling needs no GPU.

    Numbers of pages, and where a view of a free list starts, change from call to call: a kernel
    compiled for each would be compiled in the middle of serving.
    """
    told = json.loads(
        run_python(str(COMPILER), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    )
    compiled: dict[str, set[str]] = {}
    for name, count, launches, dispatched in told:
        answers = name in ("extend_slots", "decode_slots", "decode_paired", "lend")
        assert dispatched == ["empty"] * answers, name
        assert len(launches) == (count > 0), (name, count)
        compiled.setdefault(name, set()).update(hashed for _, hashed in launches)
    assert {name: len(hashes) for name, hashes in compiled.items()} == dict.fromkeys(compiled, 1)
    assert len(compiled) == 7

"""Kernels: which ones an allocator gets, and Triton's against torch under Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvcore import TokenToKVPoolAllocator
from kvcore.kernels import kernels_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORKER = Path(__file__).with_name("triton_worker.py")
BATCHES, SHARDS = 2000, 2

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
    with pytest.raises(ValueError, match="KVCORE_KERNELS: expected torch, triton or nothing"):
        kernels_for(CPU)


def test_triton_is_not_chosen_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvcore.kernels.triton_slots", raising=False)
    with pytest.raises(ImportError, match="triton"):
        kernels_for(CPU, "triton")


@needs_triton
def test_triton_is_not_chosen_on_a_cpu_without_its_interpreter() -> None:
    program = (
        "import torch, kvcore\n"
        "try: kvcore.TokenToKVPoolAllocator(4, torch.float16, 'cpu', None, False)\n"
        "except ValueError as error: print(error)\n"
    )
    printed = run_python("-c", program, KVCORE_KERNELS="triton", TRITON_INTERPRET="0")
    assert printed.startswith("KVCORE_KERNELS: triton on a CPU; expected TRITON_INTERPRET=1")
    assert run_python("-c", program, KVCORE_KERNELS="triton", TRITON_INTERPRET="1") == ""


def test_the_core_works_without_triton_and_does_not_import_it() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kvcore, kvcore.kernels\n"
        "pool = kvcore.TokenToKVPoolAllocator(4, torch.float16, 'cpu', None, False)\n"
        "one = torch.tensor([1])\n"
        "print(pool.alloc_decode(one, one, -one).tolist())\n"
    )
    assert run_python("-c", program) == "[1]\n"


# -- Triton against torch ----------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("shard", range(SHARDS))
def test_triton_gives_the_slots_that_torch_gives(shard: int) -> None:
    count = str(BATCHES // SHARDS)
    seen = Counter(json.loads(run_python(str(WORKER), str(shard), count, TRITON_INTERPRET="1")))
    assert seen["extend"] == seen["decode"] == BATCHES // SHARDS // 2
    for page_size in (1, 4, 16, 64):
        assert seen[f"page size {page_size}"] == BATCHES // SHARDS // 4
    kinds = ("empty prefix", "prefix within a page", "prefix of whole pages")
    for kind in (*kinds, "row that does not grow", "misled"):
        assert seen[kind] > 10, kind
    for kind in ("extend in small blocks", "decode in small blocks", "served"):
        assert seen[kind] > 0, kind


@needs_triton
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter runs Python that the compiler refuses; compiling needs no GPU."""
    program = (
        "import triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from kvcore.kernels import triton_slots\n"
        "blocks = {'page_size': 16, 'row_block': 16, 'token_block': 256}\n"
        "for kernel in (triton_slots._extend_kernel, triton_slots._decode_kernel):\n"
        "    types = {}\n"
        "    for name in kernel.arg_names:\n"
        "        number = name.endswith('stride') or name.startswith('num_')\n"
        "        types[name] = 'i32' if number else '*i64'\n"
        "    given = {name: size for name, size in blocks.items() if name in types}\n"
        "    types |= dict.fromkeys(given, 'constexpr')\n"
        "    source = triton.compiler.ASTSource(kernel, types, given)\n"
        "    print(len(triton.compile(source, GPUTarget('cuda', 90, 32)).asm['ptx']) > 0)\n"
    )
    printed = run_python("-c", program, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert printed == "True\nTrue\n"

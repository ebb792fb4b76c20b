"""Every pool kind, page size and window of the retraction table comes back bit for bit, and a pool
that forgets or misplaces something does not."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvcore.pools import DSATokenToKVPool, HostRows, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "retraction.md").read_text()


def load_benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "retraction_table.py"
    spec = importlib.util.spec_from_file_location("retraction_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


retraction_table = load_benchmark()
CASES = retraction_table.cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_retracted_request_comes_back_bit_for_bit(case: object) -> None:
    result = retraction_table.Trial(case, "cpu").run()
    assert not result.broken


def test_the_table_has_every_kind_alone_beside_sliding_layers_and_sliding() -> None:
    seen = {(case.line.kind, case.page_size, case.window) for case in CASES}
    for kind in ("MHA", "MLA", "DSA"):
        for page_size in (1, 16, 64):
            assert (kind, page_size, False) in seen
            for sliding in (f"SWA over {kind}", f"SWA alone over {kind}"):
                assert {(sliding, page_size, False), (sliding, page_size, True)} <= seen


def test_the_guide_shows_the_table_that_the_benchmark_prints() -> None:
    assert retraction_table.table() in GUIDE


def test_the_example_of_the_guide_runs() -> None:
    example = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example is not None
    exec(compile(example[1], "docs/retraction.md", "exec"), {"__name__": "example"})


# A table that is equal whatever happens would prove nothing


def broken(kind: str, *, window: bool) -> set[str]:
    """What breaks of a kind at page size 16, without the numbers of layers."""
    [case] = [
        case
        for case in CASES
        if (case.line.kind, case.line.storage) == (kind, "bf16")
        and (case.page_size, case.window) == (16, window)
    ]
    result = retraction_table.Trial(case, "cpu").run()
    return {re.sub(r" \d+$", "", problem) for problem in result.broken}


def test_values_that_are_not_copied_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MHATokenToKVPool, "copied_rows", lambda pool: pool.k_buffer)
    assert broken("MHA", window=False) == {"V"}
    assert broken("SWA over MHA", window=True) == {"full V", "SWA V"}


def test_index_keys_and_scales_that_are_not_copied_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DSATokenToKVPool, "copied_rows", MLATokenToKVPool.copied_rows)
    assert broken("DSA", window=False) == {"index K", "scales"}
    assert broken("SWA alone over DSA", window=True) == {"SWA index K", "SWA scales"}


def test_sliding_layers_that_are_not_copied_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(pool: SWAKVPool, peers: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(peers, dtype=torch.bool)

    monkeypatch.setattr(SWAKVPool, "_rows_to_copy", none)
    assert broken("SWA over MLA", window=True) == {"SWA latent"}


def test_sliding_layers_restored_by_the_new_mask_alone_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_order(
        pool: SWAKVPool, had_peer: torch.Tensor, has_peer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        saved = int(had_peer.sum())
        tokens = has_peer & (torch.cumsum(has_peer, 0) <= saved)
        return torch.arange(saved) < tokens.sum(), tokens

    monkeypatch.setattr(SWAKVPool, "_rows_to_restore", in_order)
    assert broken("SWA over MHA", window=False) == set()
    assert broken("SWA over MHA", window=True) == {"SWA K", "SWA V"}


def test_rows_written_beside_the_requests_own_show(monkeypatch: pytest.MonkeyPatch) -> None:
    load = MHATokenToKVPool.load_cpu_copy

    def beside(pool: MHATokenToKVPool, copy: HostRows, indices: torch.Tensor) -> None:
        load(pool, copy, indices.flip(0) - 1)

    monkeypatch.setattr(MHATokenToKVPool, "load_cpu_copy", beside)
    assert broken("MHA", window=False) == {"K", "V", "others' K", "others' V"}

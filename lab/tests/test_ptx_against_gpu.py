"""Tensors that a GPU wrote beside those of the executor of PTX."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ptx_against_gpu import ROOT, compare_all, difference, keep_launches, kernel_tests

from sglang.ledger.ptx.driver import executing


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_differences_are_counted_whatever_the_shape(shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape)
    assert difference(ones, ones.clone()) == 0
    assert difference(ones, ones + 2 * torch.finfo(ones.dtype).eps) == 2
    assert difference(ones.int(), ones.int() + 3) == 3


def test_the_files_of_every_kernel_are_recorded() -> None:
    files = kernel_tests()
    assert len(files) > 30 and all((ROOT / file).is_file() for file in files)


def test_what_is_kept_is_executed_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept of an execution in the place of a GPU, whose second launch of three begins where the first one ended."""
    import triton

    from sglang.srt.layers.triton_ops.norm import fused_add_rmsnorm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.compiler.CompiledKernel, "__init__", triton.compiler.CompiledKernel.__init__)
    folder = tmp_path / "launches"
    folder.mkdir()
    x, residual = (torch.randn(3, 64).bfloat16() for _ in range(2))
    with executing("sm_90"):
        keep_launches(folder)
        for _ in range(3):
            fused_add_rmsnorm(x, residual, torch.ones(64).bfloat16(), 1e-6)
    assert len(list(folder.glob("*.pt"))) == 2 and len(list(folder.glob("*.ptx"))) == 1
    assert compare_all(folder) == 0
    kept = next(folder.glob("*.pt"))
    content = torch.load(kept, weights_only=False)
    for tensor in content["after"].values():
        tensor.add_(1)
    torch.save(content, kept)
    assert compare_all(folder) == 1

"""Tensors of GGUF files: every type has the values that the `gguf` package gives it, whole and in slices."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sglang.srt.configs.gguf.types import BY_NAME, TYPES, UNREAD
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.reference import unpack_nibbles
from sglang.srt.model_loader.checkpoint import find_checkpoint
from sglang.srt.model_loader.gguf_blocks import dequantized, mxfp4, q4_0, q8_0

from ..configs.gguf_files import convert, random_blocks
from ..models.harness import save_tiny

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))


def oracle(blocks: np.ndarray, kind: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).copy())


def test_the_table_of_types_is_that_of_the_package() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.size)
    others = {each.value: each.name for each in gguf.GGMLQuantizationType}
    assert {number: others[number] for number in UNREAD} == UNREAD
    assert TYPES.keys() | UNREAD.keys() == others.keys()


QUANTIZED = [kind.name for kind in TYPES.values() if not kind.wide]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_have_the_values_of_the_package(kind: str) -> None:
    blocks = random_blocks(kind, (37, 512))
    got = dequantized(torch.from_numpy(blocks), BY_NAME[kind], torch.float32)
    assert torch.equal(got.view(torch.int32), oracle(blocks, kind).view(torch.int32))
    assert got.isfinite().all()
    assert torch.equal(dequantized(torch.from_numpy(blocks), BY_NAME[kind], torch.bfloat16), got.bfloat16())


def test_every_exponent_of_mxfp4_has_the_value_of_the_package() -> None:
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    assert torch.equal(dequantized(torch.from_numpy(blocks), BY_NAME["MXFP4"], torch.float32), oracle(blocks, "MXFP4"))


def test_codes_and_scales_of_q4_0_are_its_values() -> None:
    blocks = random_blocks("Q4_0", (5, 96))
    codes, scales = q4_0(torch.from_numpy(blocks))
    values = (unpack_nibbles(codes).float() - 8) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(values, oracle(blocks, "Q4_0"))


def test_codes_and_scales_of_q8_0_are_its_values() -> None:
    blocks = random_blocks("Q8_0", (5, 96))
    codes, scales = q8_0(torch.from_numpy(blocks))
    values = (codes.float() - 128) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(values, oracle(blocks, "Q8_0"))


def test_codes_and_exponents_of_mxfp4_are_its_values() -> None:
    blocks = random_blocks("MXFP4", (5, 96))
    codes, exponents = mxfp4(torch.from_numpy(blocks))
    nibbles = unpack_nibbles(codes).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles & 8 > 0, -1.0, 1.0)
    values = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(values, oracle(blocks, "MXFP4"))


def _read(file: Path, **how: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    checkpoint = find_checkpoint(str(resolve_model_path(str(file))), **how)
    return {name: (view, opened.get_tensor(name)) for name, view, opened in checkpoint.tensors()}


def _slices(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    middle = tuple(slice(size // 4, size - size // 4) for size in shape)
    rows = (slice(shape[0] // 2, shape[0]), *(slice(None) for _ in shape[1:]))
    return [middle, rows, (slice(0, 1),)]


@pytest.mark.parametrize("family", ["llama_wide", "qwen3_moe_wide", "gpt_oss_wide", "deepseek_v2_lite"])
@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4", "Q8_0"])
def test_slices_are_those_of_whole_tensors(family: str, kind: str, tmp_path: Path) -> None:
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if "deepseek" in family else {}
    save_tiny(family, tmp_path / "saved", **more)

    def type_of(name: str) -> str:
        return kind if name.endswith(("q.weight", "k.weight", "exps.weight", "down.weight")) else "F32"

    file = convert(tmp_path / "saved", tmp_path / "model.gguf", type_of)
    for wide in (True, False):
        tensors = _read(file, dtype=torch.float32, wanted=lambda name, wide=wide: wide)
        kept = {"Q4_0": True, "MXFP4": family != "llama_wide", "Q8_0": True}[kind]  # MXFP4 is kept in experts
        assert any(name.endswith(("_packed", "_blocks")) for name in tensors) == (kept and not wide)
        for name, (view, whole) in tensors.items():
            assert tuple(view.get_shape()) == tuple(whole.shape), name
            for cut in _slices(tuple(whole.shape)):
                assert torch.equal(view[cut], whole[cut]), (name, cut)


def test_what_16_bits_cost_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("llama_wide", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: "Q5_0")
    with caplog.at_level(logging.INFO):
        _read(file, dtype=torch.bfloat16)
    (line,) = [record.getMessage() for record in caplog.records if "instead of" in record.getMessage()]
    assert "of types Q5_0 are read as bfloat16" in line


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf")
    checkpoint = find_checkpoint(str(resolve_model_path(str(file))))
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        for name, _, opened in checkpoint.tensors():
            opened.get_tensor(name)

"""Compressed block scales: expanded they are those of the same checkpoint without compression, byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError
from sglang.srt.model_loader.checkpoint import find_checkpoint
from sglang.srt.model_loader.compressed_scales import PACKINGS, expand
from sglang.srt.model_loader.loader import load_model
from srt.models.harness import TinyRunner, plan_for, random_tokens
from srt.models.quantized_checkpoints import FORMS, Tensors, save_quantized

TOKENS = random_tokens(9, seed=1)


def compress(scales: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """As the format is described, row by row: `fixed`, and what its bases and offsets do not reach."""
    rows, cols = scales.shape
    fixed, exceptions = bytearray(), []
    for slab in range(0, rows, 16):
        bases, offsets = bytearray(), bytearray()
        for row in range(slab, slab + 16):
            values = scales[row] if row < rows else np.zeros(cols, np.uint8)
            base = min(int(np.median(values)), 256 - 2**bits)
            bits_of_row = []
            for column, value in enumerate(values):
                offset = int(value) - base
                if not 0 <= offset < 2**bits:
                    exceptions.append(int(value) << 24 | row * cols + column)
                    offset = 0
                bits_of_row += [offset >> i & 1 for i in range(bits)]
            bases.append(base)
            offsets += np.packbits(bits_of_row, bitorder="little").tobytes()
        fixed += bases + offsets
    return np.frombuffer(bytes(fixed), np.uint8), np.array(exceptions, np.uint32)


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 8), (48, 20), (40, 6)])
def test_scales_of_any_size_with_and_without_exceptions(kind: str, rows: int, cols: int) -> None:
    generator, packing = np.random.default_rng(rows), PACKINGS[kind]
    for spread in (1, 40):
        scales = generator.integers(100, 100 + spread, (rows, cols), dtype=np.uint8)
        fixed, exceptions = compress(scales, packing.bits)
        assert (len(exceptions) > 0) == (spread > 1)
        found = expand(torch.from_numpy(fixed.copy()), torch.from_numpy(exceptions), rows, cols, packing)
        assert found.dtype == packing.dtype and (found.view(torch.uint8).numpy() == scales).all()


def compressed_tensors(tensors: Tensors, kind: str) -> Tensors:
    """The checkpoint's tensors with compressed scales."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight_scale"):
            made[name] = tensor
            continue
        fixed, exceptions = compress(tensor.view(torch.uint8).numpy(), PACKINGS[kind].bits)
        made |= {f"{name}.{kind}_csf_fixed": torch.from_numpy(fixed.copy())}
        made |= {f"{name}.{kind}_csf_exceptions": torch.from_numpy(exceptions)}
    return made


@pytest.mark.parametrize(
    ("form", "kind", "model"),
    [("modelopt_nvfp4", "nvfp4", "qwen3_moe_wide"), ("compressed_mxfp4", "mxfp4", "qwen3_wide")],
)
def test_a_checkpoint_computes_what_it_does_without_compression(
    form: str, kind: str, model: str, tmp_path: Path
) -> None:
    """In one file, and in two between which the tensors of a matrix may lie."""
    save_quantized(model, FORMS[form], tmp_path)
    plain, packed = tmp_path / "quantized", tmp_path / "packed"
    want = TinyRunner(plan_for(plain)).extend({1: TOKENS})[0]
    shutil.copytree(plain, packed)
    tensors = compressed_tensors(load_file(plain / "model.safetensors"), kind)
    save_file(tensors, packed / "model.safetensors")
    assert torch.equal(TinyRunner(plan_for(packed)).extend({1: TOKENS})[0], want)
    (packed / "model.safetensors").unlink()
    files = {f"{i}.safetensors": dict([*tensors.items()][i::2]) for i in range(2)}
    for file, part in files.items():
        save_file(part, packed / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (packed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(TinyRunner(plan_for(packed)).extend({1: TOKENS})[0], want)


FIXED, EXCEPTIONS = (f"model.layers.1.mlp.down_proj.weight_scale.nvfp4_csf_{part}" for part in ("fixed", "exceptions"))


def _far_away(tensors: Tensors) -> None:
    tensors[EXCEPTIONS] = torch.tensor([1 << 23], dtype=torch.uint32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.__setitem__(FIXED, tensors[FIXED][1:].contiguous()), r"do not hold 256 x 32 scales"),
        (_far_away, r"nvfp4_csf_fixed: .* an exception for scale 8388608 of 8192"),
        (lambda tensors: tensors.__delitem__(EXCEPTIONS), r"nvfp4_csf_fixed has no .*nvfp4_csf_exceptions beside it"),
        (lambda tensors: tensors.__delitem__("model.layers.1.mlp.down_proj.weight"), r"the weight .* is missing"),
        (lambda tensors: tensors.__setitem__("a.int4_csf_fixed", torch.ones(1)), r"compressed scales of int4 are not"),
    ],
)
def test_damaged_scales_are_named(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["modelopt_nvfp4"], tmp_path)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = compressed_tensors(load_file(file), "nvfp4")
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path / "quantized"))


def test_names_and_sizes_are_those_of_the_scales(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["modelopt_nvfp4"], tmp_path)
    folder = tmp_path / "quantized"
    before = {name: list(view.get_shape()) for name, view, _ in find_checkpoint(str(folder)).tensors()}
    tensors = compressed_tensors(load_file(folder / "model.safetensors"), "nvfp4")
    save_file(tensors, folder / "model.safetensors")
    assert before == {name: list(view.get_shape()) for name, view, _ in find_checkpoint(str(folder)).tensors()}

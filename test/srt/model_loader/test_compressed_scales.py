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

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.model_loader.checkpoint import find_checkpoint
from sglang.srt.model_loader.compressed_scales import PACKINGS, ExpandedScales, expand
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.plan import make_plan
from sglang.srt.server_args import ServerArgs
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


def planned_bytes(folder: Path) -> int:
    """Of the weights, on a card."""
    args = ServerArgs(model_path=str(folder), device="cuda", skip_tokenizer_init=True)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch_by_name("rtx-pro-6000"), 1 << 36, packages=frozenset()).memory.weights


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
    assert planned_bytes(packed) == planned_bytes(plain)
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


def _twice(tensors: Tensors) -> None:
    tensors[EXCEPTIONS] = torch.tensor([5, 1 << 24 | 5], dtype=torch.uint32)


def _high(tensors: Tensors) -> None:
    tensors[FIXED][3] = 241


def container(tmp_path: Path, kind: str = "nvfp4") -> tuple[Path, Path]:
    """A checkpoint as it is and as a container, whose tensors are in two files without an index."""
    save_quantized("qwen3_wide", FORMS["modelopt_nvfp4"], tmp_path)
    plain, root = tmp_path / "quantized", tmp_path / "container"
    for part in ("metadata", "tensors"):
        (root / part).mkdir(parents=True)
    tensors = load_file(plain / "model.safetensors")
    packed = compressed_tensors(tensors, kind)
    for number in range(2):
        save_file(dict([*packed.items()][number::2]), root / "tensors" / f"part{number}.safetensors")
    for file in plain.glob("*.json"):
        shutil.copy2(file, root / "metadata" / file.name)
    (root / "metadata" / "model.safetensors.index.json").write_text("of the source")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": f"{kind}_csf", "format_version": 1, "checkpoint_root": ".."}
    (root / "metadata" / "config.json").write_text(json.dumps(config))
    contract = {"schema": f"lil-{kind}-csf-checkpoint/1", "source_names": dict.fromkeys(tensors, "0.safetensors")}
    (root / "build-contract.json").write_text(json.dumps(contract))
    (root / "manifest.json").write_text("{}")
    return plain, root


def test_a_container_computes_what_the_checkpoint_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by itself or by its metadata. Its model directory is made once, and leaves its files as they are."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    plain, root = container(tmp_path)
    want = TinyRunner(plan_for(plain)).extend({1: TOKENS})[0]
    made = resolve_model_path(str(root))
    assert torch.equal(TinyRunner(plan_for(made)).extend({1: TOKENS})[0], want)
    assert planned_bytes(root) == planned_bytes(plain)
    assert resolve_model_path(str(root / "metadata")) == made != root
    assert (root / "metadata" / "model.safetensors.index.json").read_text() == "of the source"


def test_a_container_says_how_its_source_was_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    _, root = container(tmp_path)
    config = root / "metadata" / "config.json"
    content, source = json.loads(config.read_text()), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    content["quantization_config"]["source_quantization_config"] = source
    config.write_text(json.dumps(content))
    made = json.loads((resolve_model_path(str(root)) / "config.json").read_text())
    assert made.pop("quantization_config") == source and "hidden_size" in made


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("build-contract.json", {"schema": "lil-nvfp4-csf-checkpoint/2"}, "schema 'lil-nvfp4-csf-checkpoint/2' is not"),
        ("build-contract.json", {"source_names": []}, "source_names has to be an object"),
        ("build-contract.json", {"source_names": {"a.weight": "f"}}, r"lacks 1 tensors that .* names: a\.weight"),
        ("metadata/config.json", {"quantization_config": {"quant_method": "nvfp4_csf"}}, "format_version None is not"),
    ],
)
def test_containers_of_another_kind_are_refused(
    file: str, change: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    _, root = container(tmp_path)
    content = json.loads((root / file).read_text())
    (root / file).write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=message):
        resolve_model_path(str(root))


def test_a_tensor_in_two_files_of_a_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    _, root = container(tmp_path)
    shutil.copy(root / "tensors" / "part0.safetensors", root / "tensors" / "part2.safetensors")
    with pytest.raises(UserError, match=r"part2.safetensors has the tensor .*, which tensors/part0.safetensors has"):
        resolve_model_path(str(root))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.__setitem__(FIXED, tensors[FIXED][1:].contiguous()), r"do not hold 256 x 32 scales"),
        (_far_away, r"nvfp4_csf_fixed: .* an exception for scale 8388608 of 8192"),
        (_twice, r"nvfp4_csf_fixed: .* exceptions that are not in ascending order"),
        (_high, r"nvfp4_csf_fixed: .* a base of 241, above 240"),
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


def test_ranks_read_their_share_of_the_scales() -> None:
    """Any rows and columns, also of tensors in two files."""
    generator = np.random.default_rng(3)
    scales = generator.integers(90, 130, (32, 24), dtype=np.uint8)
    fixed, exceptions = (torch.from_numpy(part.copy()) for part in compress(scales, 4))
    tensors = {"a.weight": torch.zeros(32, 192, dtype=torch.uint8), "a.s.nvfp4_csf_fixed": fixed}
    tensors["a.s.nvfp4_csf_exceptions"] = exceptions

    class File:
        def get_slice(self, name: str) -> File:
            self.name = name
            return self

        def get_shape(self) -> list[int]:
            return list(tensors[self.name].shape)

        def get_tensor(self, name: str) -> torch.Tensor:
            return tensors[name]

    found = ExpandedScales("a.s.nvfp4_csf_fixed", lambda name: File() if name in tensors else None)
    assert found.get_shape() == [32, 24]
    for share in ((slice(16, 32), slice(None)), (slice(None), slice(12, 24)), (slice(3, 7), slice(5, 6))):
        assert (found[share].view(torch.uint8).numpy() == scales[share]).all()


def test_names_and_sizes_are_those_of_the_scales(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["modelopt_nvfp4"], tmp_path)
    folder = tmp_path / "quantized"
    before = {name: list(view.get_shape()) for name, view, _ in find_checkpoint(str(folder)).tensors()}
    tensors = compressed_tensors(load_file(folder / "model.safetensors"), "nvfp4")
    save_file(tensors, folder / "model.safetensors")
    assert before == {name: list(view.get_shape()) for name, view, _ in find_checkpoint(str(folder)).tensors()}

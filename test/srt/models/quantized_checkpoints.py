"""Writes tiny checkpoints in every published quantized form, and beside each the same model with the weights that its
codes and scales stand for, in fp32."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization import reference

from .harness import save_tiny

Tensors = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight [N, K] fp32 -> its tensors by leaf, and what they stand for."""

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"),
)


def _quantize(weight: torch.Tensor, scheme: str) -> tuple[reference.Quantized, torch.Tensor]:
    made = reference.quantize(weight, SCHEMES[scheme])
    return made, reference.dequantize(made, SCHEMES[scheme])


def plain(scheme: str, scale: str, shape: str = "") -> Write:
    """`shape`: a column [N, 1], one number as [1], or as the scheme has it."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made, stands_for = _quantize(weight, scheme)
        extended = made.scale.unsqueeze(-1) if shape in ("column", "one") else made.scale
        return {"weight": made.data, scale: extended}, stands_for

    return write


def spread(write: Write, scale: str) -> Write:
    """With the scales of blocks [N, 1, K, 1] in bfloat16."""

    def write_spread(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, _ = write(weight)
        scales = tensors[scale].bfloat16()
        made = reference.Quantized(tensors["weight"], scales.float())
        return tensors | {scale: scales[:, None, :, None]}, reference.dequantize(made, SCHEMES["fp8_block"])

    return write_spread


def static(write: Write, leaf: str = "input_scale") -> Write:
    def with_input(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, stands_for = write(weight)
        return tensors | {leaf: weight.abs().max().reshape(())}, stands_for

    return with_input


def packed_int4(group: int) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made, stands_for = _quantize(weight, f"int4_g{group}")
        shape = torch.tensor(weight.shape)
        return {
            "weight_packed": made.data.view(torch.int32),
            "weight_scale": made.scale,
            "weight_shape": shape,
        }, stands_for

    return write


def packed_int8(group: int) -> Write:
    """Four codes plus 128 to a word."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made, stands_for = _quantize(weight, f"int8_g{group}")
        words = _byte_words(made.data.long() + 128)
        return {
            "weight_packed": words,
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(weight.shape),
        }, stands_for

    return write


def gptq_int8(group: int) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = weight.shape
        made, stands_for = _quantize(weight, f"int8_g{group}")
        tensors = {
            "qweight": _byte_words(made.data.long() + 128).T.contiguous(),
            "scales": made.scale.T.contiguous(),
            "qzeros": torch.full((cols // group, rows // 4), 0x7F7F7F7F, dtype=torch.int32),
        }
        return tensors, stands_for

    return write


def _byte_words(codes: torch.Tensor) -> torch.Tensor:
    """[..., 4 n] of 0 to 255 -> int32 [..., n], the first in the low bits."""
    fours = codes.unflatten(-1, (-1, 4))
    words = sum(fours[..., i] << 8 * i for i in range(4))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)


def signed_int4(group: int) -> Write:
    """W4AFP8's experts: two signed codes to an int8, the first in the low bits."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made, stands_for = _quantize(weight, f"int4_g{group}")
        codes = reference.unpack_nibbles(made.data).int() - 8
        both = (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4
        tensors = {"weight": both.to(torch.uint8).view(torch.int8), "weight_scale_inv": made.scale}
        return tensors | {"input_scale": torch.ones(())}, stands_for

    return write


def unpacked_mxfp4(scale: str) -> Write:
    """As `packed_mxfp4`, under other names."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, stands_for = packed_mxfp4(weight)
        return {"weight": tensors["weight_packed"], scale: tensors["weight_scale"]}, stands_for

    return write


def gptq(group: int) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, cols = weight.shape
        made, stands_for = _quantize(weight, f"int4_g{group}")
        tensors = {
            "qweight": made.data.view(torch.int32).T.contiguous(),
            "scales": made.scale.T.contiguous(),
            "qzeros": torch.full((cols // group, rows // 8), 0x77777777, dtype=torch.int32),
            "g_idx": (torch.arange(cols) // group).to(torch.int32),
            "bias": torch.zeros(rows, dtype=torch.float16),  # though the model has none
        }
        return tensors, stands_for

    return write


def _with_zero_points(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] and zero points [N, K / group] of 0 to 15, scales [N, K / group]. Far from all zero points are 8."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    low = low * (1 + torch.arange(weight.shape[0])[:, None] % 3)
    scale = ((high - low) / 15).bfloat16().float()
    zeros = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(-2).long(), zeros.long(), scale


def _stand_for(codes: torch.Tensor, zeros: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    return ((codes.unflatten(-1, (-1, group)) - zeros[..., None]) * scale[..., None]).flatten(-2)


def _words(codes: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    """[..., 8 n] of 0 to 15 -> int32 [..., n]: nibble i, from the low bits on, holds column `columns[i]` of eight."""
    eights = codes.unflatten(-1, (-1, 8))
    words = sum(eights[..., column] << 4 * i for i, column in enumerate(columns))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)


def awq(group: int) -> Write:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scale = _with_zero_points(weight, group)
        tensors = {"qweight": _words(codes.T, order), "qzeros": _words(zeros.T, order), "scales": scale.T.half()}
        return tensors, _stand_for(codes, zeros, scale, group)

    return write


def asymmetric_int4(group: int) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scale = _with_zero_points(weight, group)
        natural = tuple(range(8))
        tensors = {
            "weight_packed": _words(codes, natural),
            "weight_scale": scale.bfloat16(),
            "weight_zero_point": _words(zeros.T, natural).T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, _stand_for(codes, zeros, scale, group)

    return write


def nvfp4_compressed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, stands_for = _quantize(weight, "nvfp4")
    assert made.global_scale is not None
    inverse = (1.0 / made.global_scale).reshape(1)
    as_stored = reference.Quantized(made.data, made.scale, (1.0 / inverse).squeeze(0))
    tensors = {"weight_packed": made.data, "weight_scale": made.scale, "weight_global_scale": inverse}
    tensors["input_global_scale"] = torch.tensor([100.0])
    return tensors, reference.dequantize(as_stored, SCHEMES["nvfp4"])


def nvfp4_modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, stands_for = _quantize(weight, "nvfp4")
    assert made.global_scale is not None
    tensors = {"weight": made.data, "weight_scale": made.scale, "weight_scale_2": made.global_scale.reshape(())}
    return tensors | {"input_scale": torch.tensor(0.01)}, stands_for


def packed_mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, stands_for = _quantize(weight, "mxfp4")
    return {"weight_packed": made.data, "weight_scale": made.scale}, stands_for


def _values(kind: str, bits: int, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": True} | more


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    } | more


@dataclass(frozen=True)
class Form:
    """A published form: quantization_config, hf_quant_config.json, and how a weight is written."""

    write: Write
    config: Mapping[str, Any] = field(default_factory=dict)
    modelopt: Mapping[str, Any] = field(default_factory=dict)


_TOKEN = _values("float", 8, "token", dynamic=True)
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "gate"]}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    excluded = ["lm_head", "*mlp.gate"]
    return {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": excluded} | more,
    }


FORMS: dict[str, Form] = {
    "fp8_block": Form(plain("fp8_block", "weight_scale_inv"), _FP8 | {"weight_block_size": [128, 128]}),
    "fp8_tensor_dynamic": Form(plain("fp8_tensor", "weight_scale", "one"), _FP8),
    "fp8_tensor_static": Form(static(plain("fp8_tensor", "weight_scale")), _FP8 | {"activation_scheme": "static"}),
    "mxfp8": Form(plain("mxfp8", "weight_scale_inv"), _FP8 | {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    "compressed_fp8_channel": Form(
        plain("fp8_channel", "weight_scale", "column"),
        compressed("float-quantized", _values("float", 8, "channel"), _TOKEN),
    ),
    "compressed_fp8_tensor": Form(
        static(plain("fp8_tensor", "weight_scale", "one")),
        compressed("float-quantized", _values("float", 8, "tensor"), _values("float", 8, "tensor", dynamic=False)),
    ),
    "compressed_fp8_block": Form(
        plain("fp8_block", "weight_scale"),
        compressed(
            "float-quantized",
            _values("float", 8, "block", block_structure=[128, 128]),
            _values("float", 8, "group", 128, dynamic=True),
        ),
    ),
    "compressed_int8": Form(
        plain("int8_channel", "weight_scale", "column"),
        compressed("int-quantized", _values("int", 8, "channel"), _values("int", 8, "token", dynamic=True)),
    ),
    "compressed_int4_g32": Form(packed_int4(32), compressed("pack-quantized", _values("int", 4, "group", 32), None)),
    "compressed_int4_g128": Form(packed_int4(128), compressed("pack-quantized", _values("int", 4, "group", 128), None)),
    "compressed_int4_fp8": Form(
        packed_int4(128), compressed("pack-quantized", _values("int", 4, "group", 128), _TOKEN)
    ),
    "compressed_int8_g32": Form(packed_int8(32), compressed("pack-quantized", _values("int", 8, "group", 32), None)),
    "compressed_int8_g128": Form(
        plain("int8_g128", "weight_scale"), compressed("int-quantized", _values("int", 8, "group", 128), None)
    ),
    "compressed_fp8_channel_a16": Form(
        plain("fp8_channel", "weight_scale", "column"),
        compressed("float-quantized", _values("float", 8, "channel"), None),
    ),
    "compressed_fp8_tensor_a16": Form(
        plain("fp8_tensor", "weight_scale", "one"), compressed("float-quantized", _values("float", 8, "tensor"), None)
    ),
    "compressed_fp8_block_a16": Form(
        plain("fp8_block", "weight_scale"),
        compressed("float-quantized", _values("float", 8, "block", block_structure=[128, 128]), None),
    ),
    "compressed_nvfp4": Form(
        nvfp4_compressed,
        compressed(
            "nvfp4-pack-quantized",
            _values("float", 4, "tensor_group", 16),
            _values("float", 4, "tensor_group", 16, dynamic="local"),
        ),
    ),
    "compressed_mxfp4": Form(packed_mxfp4, compressed("mxfp4-pack-quantized", _values("float", 4, "group", 32), None)),
    "modelopt_fp8": Form(static(plain("fp8_tensor", "weight_scale")), modelopt=_modelopt("FP8")),
    "modelopt_nvfp4": Form(nvfp4_modelopt, modelopt=_modelopt("NVFP4", group_size=16)),
    "modelopt_fp8_block": Form(
        spread(plain("fp8_block", "weight_scale"), "weight_scale"),
        modelopt=_modelopt("FP8_BLOCK_SCALES", group_size=128),
    ),
    "modelopt_mxfp8": Form(plain("mxfp8", "weight_scale"), modelopt=_modelopt("MXFP8", group_size=32)),
    "gptq_g64": Form(gptq(64), {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}),
    "gptq_g128": Form(
        gptq(128), {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    ),
    "gptq_int8_g128": Form(gptq_int8(128), {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}),
    "gptq_g32": Form(gptq(32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
}

_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
ZERO_POINT_FORMS: dict[str, Form] = {
    "awq_g32": Form(awq(32), _AWQ | {"group_size": 32}),
    "awq_g64": Form(awq(64), _AWQ | {"group_size": 64}),
    "awq_g128": Form(awq(128), _AWQ | {"group_size": 128}),
    "compressed_int4_g32_asymmetric": Form(
        asymmetric_int4(32), compressed("pack-quantized", _values("int", 4, "group", 32, symmetric=False), None)
    ),
}


def split_experts(tensors: Tensors, columns_first: bool = False) -> None:
    """Experts that are one tensor [E, rows, cols] (or [E, cols, rows]), gate's rows before up's, as one module each."""
    for key in [key for key in tensors if key.endswith("experts.gate_up_proj")]:
        prefix = key.removesuffix("gate_up_proj")
        both = [tensors.pop(name).transpose(1, 2 if columns_first else 1) for name in (key, f"{prefix}down_proj")]
        pairs = (both[0].chunk(2, dim=1), (both[1],))
        for name, experts in zip(("gate", "up", "down"), (*pairs[0], *pairs[1]), strict=True):
            tensors |= {f"{prefix}{e}.{name}_proj.weight": weight.contiguous() for e, weight in enumerate(experts)}


def join_experts(tensors: Tensors, columns_first: bool = False) -> None:
    """What `split_experts` took apart."""
    for key in [key for key in tensors if key.endswith("experts.0.gate_proj.weight")]:
        prefix = key.removesuffix("0.gate_proj.weight")
        count = sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in tensors)

        def stacked(part: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(count)])

        both = {"gate_up_proj": torch.cat((stacked("gate"), stacked("up")), dim=1), "down_proj": stacked("down")}
        for name, joined in both.items():
            tensors[prefix + name] = joined.transpose(1, 2 if columns_first else 1).contiguous()


@functools.lru_cache(maxsize=8)
def _saved_once(name: str, more: str) -> tuple[tempfile.TemporaryDirectory[str], Tensors]:
    """The files of a tiny model, and its tensors: tests of many forms begin with the same one. more: as JSON."""
    folder = tempfile.TemporaryDirectory()
    save_tiny(name, Path(folder.name), **json.loads(more))
    return folder, load_file(Path(folder.name) / "model.safetensors")


def save_quantized(
    name: str,
    form: Form,
    folder: Path,
    keep: tuple[str, ...] = (),
    experts_apart: bool = False,
    quantized: tuple[str, ...] = PROJECTIONS,
    **more: Any,
) -> Path:
    """The tiny model `name` in `form` in `folder`/quantized, and what it stands for in `folder`/reference, which is
    returned. Modules of other last names than `quantized`, or whose names contain one of `keep`, stay as they are.
    `experts_apart`: they are one tensor in the reference, and quantized one by one. `more`: as of `save_tiny`."""
    saved, whole = _saved_once(name, json.dumps(more, sort_keys=True))
    shutil.copytree(saved.name, folder / "reference", ignore=lambda *_: ["model.safetensors"], dirs_exist_ok=True)
    tensors = dict(whole)
    columns_first = name.startswith("llama4")
    if experts_apart:
        split_experts(tensors, columns_first)
    stored: Tensors = {}
    for key, tensor in list(tensors.items()):
        module, _, leaf = key.rpartition(".")
        if leaf != "weight" or module.rpartition(".")[2] not in quantized or any(part in module for part in keep):
            stored[key] = tensor
            continue
        made, stands_for = form.write(tensor)
        stored |= {f"{module}.{leaf}": value.contiguous() for leaf, value in made.items()}
        tensors[key] = stands_for
    if experts_apart:
        join_experts(tensors, columns_first)
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    write_model(folder, stored, form)
    return folder / "reference"


def save_gpt_oss(name: str, folder: Path) -> Path:
    """As OpenAI publishes it: experts as blocks of 32 columns and their exponents, rows of gate and up in turn."""
    save_tiny(name, folder / "reference")
    tensors = load_file(folder / "reference" / "model.safetensors")
    stored: Tensors = {}
    for key, tensor in list(tensors.items()):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = tensor.bfloat16()
            tensors[key] = stored[key].float()
            continue
        quantized, exact = zip(*(_quantize(weight.T.contiguous(), "mxfp4") for weight in tensor), strict=True)
        stored[f"{key}_blocks"] = torch.stack([weight.data for weight in quantized]).unflatten(-1, (-1, 16))
        stored[f"{key}_scales"] = torch.stack([weight.scale for weight in quantized])
        tensors[key] = torch.stack([weight.T for weight in exact]).contiguous()
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write_model(folder, stored, Form(packed_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": kept}))
    config = json.loads((folder / "quantized" / "config.json").read_text())
    config |= {"swiglu_limit": 7.0, "experts_per_token": config["num_experts_per_tok"]}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    return folder / "reference"


def write_model(folder: Path, stored: Tensors, form: Form) -> None:
    quantized = folder / "quantized"
    quantized.mkdir(exist_ok=True)
    save_file(stored, quantized / "model.safetensors")
    config = json.loads((folder / "reference" / "config.json").read_text())
    if form.config:
        config["quantization_config"] = dict(form.config)
    (quantized / "config.json").write_text(json.dumps(config))
    if form.modelopt:
        (quantized / "hf_quant_config.json").write_text(json.dumps(form.modelopt))

"""Writes tiny checkpoints of every form with every choice of quantized modules, in which the config spells the modules
that are left alone in the ways of the exporters, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .harness import save_tiny
from .quantized_checkpoints import FORMS, ZERO_POINT_FORMS, Form, Tensors, Write

_GPTQ = FORMS["gptq_g128"].write


def _auto_round(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As GPTQ, without the order of groups."""
    tensors, stands_for = _GPTQ(weight)
    return {name: tensors[name] for name in ("qweight", "qzeros", "scales")}, stands_for


def _weight_only(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, stands_for = FORMS["compressed_nvfp4"].write(weight)
    del tensors["input_global_scale"]
    return tensors, stands_for


_NVFP4_GROUP = FORMS["compressed_nvfp4"].config["config_groups"]["group_0"]
FORMATS: dict[str, Form] = {
    **{name: form for name, form in FORMS.items() if name not in ("gptq_g32", "gptq_g64")},
    **ZERO_POINT_FORMS,
    "auto_round": Form(
        _auto_round,
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
        | {"packing_format": "auto_round:auto_gptq"},
    ),
    "compressed_nvfp4_a16": Form(
        _weight_only,
        dict(FORMS["compressed_nvfp4"].config)
        | {"config_groups": {"group_0": _NVFP4_GROUP | {"input_activations": None}}},
    ),
}

# --- which modules are quantized --------------------------------------------------------------------------------------

_SMALL = r".*\.(in_proj_(a|b|ba)|shared_expert_gate|g_proj)"
SELECTIONS: Mapping[str, Callable[[str], bool]] = {
    "mlp": lambda name: ".mlp." in name and not re.fullmatch(_SMALL, name),
    "experts": lambda name: bool(re.fullmatch(r".*\.experts\.\d+\..*|.*\.mlp\.(gate|up|down)_proj", name)),
    "all but small": lambda name: not re.fullmatch(_SMALL, name),
    "everything": lambda name: True,
    "some of a product": lambda name: not name.endswith(("k_proj", "in_proj_z", "in_proj_a", "shared_expert.up_proj")),
}


def _may_be_quantized(name: str, tensor: torch.Tensor) -> bool:
    module, _, leaf = name.rpartition(".")
    embeddings = r"embed.*|per_layer_model_projection|\.ple\..*"
    others = rf".*(lm_head|\.gate|router(\.proj)?|conv1d|hyper_connection.*|\.indexer\..*|{embeddings})"
    return leaf == "weight" and tensor.ndim == 2 and not re.fullmatch(others, module)


# --- how the config spells those that are left alone ------------------------------------------------------------------

_FUSED = {r"\.[qkv]_proj$": ".qkv_proj", r"\.(gate|up)_proj$": ".gate_up_proj"} | {
    r"\.in_proj_(qkv|z)$": ".in_proj_qkvz",
    r"\.in_proj_[ab]$": ".in_proj_ba",
}
_SPLIT = {r"\.in_proj_qkvz$": (".in_proj_qkv", ".in_proj_z"), r"\.in_proj_ba$": (".in_proj_a", ".in_proj_b")}


def _fused(names: list[str]) -> list[str]:
    for pattern, usual in _FUSED.items():
        names = [re.sub(pattern, usual, name) for name in names]
    return sorted(set(names))


def _split(names: list[str]) -> list[str]:
    for pattern, parts in _SPLIT.items():
        names = [other for name in names for other in (re.sub(pattern, part, name) for part in parts)]
    return sorted(set(names))


SPELLINGS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "by name": sorted,
    "by names of fused modules": _fused,
    "by names of split modules": _split,
    "without the decoder": lambda names: [name.replace("language_model.", "") for name in names],
    "not at all": lambda names: [],
}


def _exceptions(form: Form, names: list[str]) -> Form:
    """The form with the modules that it leaves alone, where its method has them."""
    config, modelopt = dict(form.config), dict(form.modelopt)
    if modelopt:
        modelopt = {**modelopt, "quantization": {**modelopt["quantization"], "exclude_modules": ["lm_head", *names]}}
    elif config["quant_method"] == "compressed-tensors":
        config["ignore"] = ["lm_head", *names]
    elif config["quant_method"] == "gptq":
        config["dynamic"] = {"lm_head": {}} | {f"-:.*{re.escape(name)}": {} for name in names}
    elif config["quant_method"] == "auto-round":
        config["extra_config"] = {name: {"bits": 16, "data_type": "float"} for name in names}
    else:
        config["modules_to_not_convert"] = ["lm_head", *names]
    return Form(form.write, config, modelopt)


@dataclass(frozen=True)
class Case:
    """One checkpoint. `wrapped`: the text half of a multimodal one, as `architecture`."""

    form: str
    model: str
    selection: str
    spelling: str
    wrapped: bool = False

    def __str__(self) -> str:
        return f"{self.model}{' in a multimodal one' * self.wrapped}, {self.form}: {self.selection}, {self.spelling}"


def write_case(case: Case, folder: Path) -> Path:
    """Writes `folder`/quantized; returns where the same model in fp32 is."""
    save_tiny(case.model, folder / "reference")
    tensors, form = load_file(folder / "reference" / "model.safetensors"), FORMATS[case.form]
    stored: Tensors = {}
    alone: list[str] = []
    for key, tensor in list(tensors.items()):
        name = key.replace("model.", "model.language_model.", 1) if case.wrapped else key
        module = name.removesuffix(".weight")
        if not _may_be_quantized(key, tensor):
            stored[name] = tensor
            continue
        pair = _written(form.write, tensor) if SELECTIONS[case.selection](module) else None
        if pair is None:
            stored[name] = tensor
            alone.append(module)
        else:
            written, tensors[key] = pair
            stored |= {f"{module}.{leaf}": value.contiguous() for leaf, value in written.items()}
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    quantized = folder / "quantized"
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    form = _exceptions(form, SPELLINGS[case.spelling](alone))
    config = json.loads((folder / "reference" / "config.json").read_text())
    config = _inside(config) if case.wrapped else config
    if form.config:
        config["quantization_config"] = dict(form.config)
    (quantized / "config.json").write_text(json.dumps(config))
    if form.modelopt:
        (quantized / "hf_quant_config.json").write_text(json.dumps(form.modelopt))
    return folder / "reference"


def _written(write: Write, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Returns None where the form cannot hold the matrix: int4 is packed in words of eight rows."""
    try:
        return write(tensor)
    except (RuntimeError, ValueError, AssertionError):
        return None


def _inside(config: dict[str, Any]) -> dict[str, Any]:
    architecture = config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    return {
        "architectures": [architecture],
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": config,
        "vision_config": {"hidden_size": 64, "num_heads": 4},
    }

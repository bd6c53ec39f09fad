"""Random LoRA adapters on disk in PEFT's format, and models with such an adapter merged into their weights in fp32."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: PreTrainedModel, names: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Returns the linear layers whose last names are among these."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in names
    }


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    seed: int,
    rank: int = 8,
    names: Sequence[str] = LINEAR,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    rename: Callable[[str], str] = lambda name: f"base_model.model.{name}",
    strength: float = 2.0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PreTrainedModel:
    """Writes an adapter, and returns the model with it merged. ranks, alphas: of modules, by the end of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(names), "bias": "none"}
    values |= {"rank_pattern": ranks or {}, "alpha_pattern": alphas or {}} | config
    merged, tensors = copy.deepcopy(model), {}
    for name, module in modules_of(merged, names).items():
        number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        if values.get("layers_to_transform") and number not in values["layers_to_transform"]:
            continue
        r = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        alpha = next((alpha for end, alpha in (alphas or {}).items() if name.endswith(end)), values["lora_alpha"])
        scaling = alpha / (math.sqrt(r) if values.get("use_rslora") else r)
        outputs, inputs = module.weight.shape
        a = torch.randn(r, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, r, generator=generator) * (strength * 0.1 / math.sqrt(r) / scaling)
        a, b = a.to(dtype), b.to(dtype)
        with torch.no_grad():
            module.weight += scaling * (b.float() @ a.float())
        tensors |= {f"{rename(name)}.lora_A.weight": a, f"{rename(name)}.lora_B.weight": b}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return merged

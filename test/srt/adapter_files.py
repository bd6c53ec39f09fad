"""Random LoRA adapters on disk in PEFT's format, and models with such an adapter merged into their weights in fp32."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from sglang.srt.plan.weight_names import USUAL_NAMES

ENDS = ("embed_tokens", "lm_head")
"""Of these PEFT saves the base model's weights, too."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: PreTrainedModel, names: Sequence[str]) -> dict[str, torch.nn.Linear | torch.nn.Embedding]:
    """Returns the linear layers and embeddings whose last names are among these."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and name.rpartition(".")[2] in names
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
    modules: Collection[str] | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Writes an adapter, and returns the model with it merged. ranks, alphas: of modules, by the end of their names;
    modules: the whole names of those that it changes, None: all with these last names."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(names), "bias": "none"}
    values |= {"rank_pattern": ranks or {}, "alpha_pattern": alphas or {}} | config
    merged, tensors = copy.deepcopy(model), {}
    for name, module in modules_of(merged, names).items():
        if modules is not None and name not in modules:
            continue
        number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        if values.get("layers_to_transform") and number not in values["layers_to_transform"]:
            continue
        r = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        alpha = next((alpha for end, alpha in (alphas or {}).items() if name.endswith(end)), values["lora_alpha"])
        scaling = alpha / (math.sqrt(r) if values.get("use_rslora") else r)
        is_embedding = isinstance(module, torch.nn.Embedding)
        outputs, inputs = module.weight.shape[::-1] if is_embedding else module.weight.shape
        a = torch.randn(r, inputs, generator=generator) * (1.0 if is_embedding else inputs**-0.5)
        b = torch.randn(outputs, r, generator=generator) * (strength * 0.1 / math.sqrt(r) / scaling)
        a, b = a.to(dtype), b.to(dtype)
        delta = scaling * (b.float() @ a.float())
        if name.rpartition(".")[2] in ENDS:
            tensors[f"{rename(name)}.base_layer.weight"] = module.weight.detach().clone()
            # An embedding and an output head that are tied stay apart, as in PEFT.
            module.weight = torch.nn.Parameter(module.weight.detach().clone())
        rows = 0 if is_embedding else 1
        lengths = module.weight.detach().norm(dim=rows)
        with torch.no_grad():
            module.weight += delta.T if is_embedding else delta
            if values.get("use_dora"):
                lengths = lengths * (0.6 + 0.8 * torch.rand(len(lengths), generator=generator))
                module.weight *= (lengths / module.weight.norm(dim=rows)).unsqueeze(rows)
                tensors[f"{rename(name)}.lora_magnitude_vector"] = lengths
        if is_embedding:
            tensors |= {f"{rename(name)}.lora_embedding_A": a, f"{rename(name)}.lora_embedding_B": b}
        else:
            tensors |= {f"{rename(name)}.lora_A.weight": a, f"{rename(name)}.lora_B.weight": b}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return merged


def one_layer(experts: bool | None) -> Any:
    """Returns what adapters read of a model's description, of one layer whose attention has no latents."""
    layer = SimpleNamespace(mixer=SimpleNamespace(latent_heads=None), on_other_stage=False)
    return SimpleNamespace(names=USUAL_NAMES, layers=(layer,), experts=experts, first_stage=True, last_stage=True)


EXPERT_LAYOUTS = ("each", "flat", "exchanged", "stacked", "outer")


def write_expert_adapter(
    folder: Path,
    model: PreTrainedModel,
    seed: int,
    layout: str,
    rank: int = 4,
    columns: bool = False,
    alternating: bool = False,
    strength: float = 2.0,
    names: Sequence[str] = ("gate_up_proj", "down_proj"),
    **config: Any,
) -> PreTrainedModel:
    """Writes an adapter of all experts of a model of transformers, and returns the model with it merged.

    layout: "each" expert has tensors of its own; "flat" as PEFT writes parameters; "exchanged" as older versions of it;
    "stacked" has a dimension of experts; "outer" likewise, with one A of gate and up and one B of down. columns: the
    parameters are [E, in, out]; alternating: gate and up alternate in them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator, merged, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(model), {}
    each = ["gate_proj", "up_proj", "down_proj"] if layout == "each" else []
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": each}
    values["target_parameters"] = [f"experts.{name}" for name in names]
    for module_name, module in merged.named_modules():
        if not module_name.endswith(".experts"):
            continue
        at = f"base_model.model.{module_name}"
        for name in names:
            weight = getattr(module, name)
            experts, outputs, inputs = (weight.transpose(1, 2) if columns else weight).shape
            a = torch.randn(experts, rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(experts, outputs, rank, generator=generator) * (strength * 0.05 / math.sqrt(rank))
            if layout == "outer" and name == "gate_up_proj":
                a = a[:1].expand_as(a)
            elif layout == "outer":
                b = b[:1].expand_as(b)
            delta = 2.0 * (b @ a)
            with torch.no_grad():
                weight += delta.transpose(1, 2) if columns else delta
            gate_up = name == "gate_up_proj"
            if layout == "each":
                halves = (b[:, ::2], b[:, 1::2]) if alternating else b.chunk(2, dim=1)
                parts = zip(("gate_proj", "up_proj"), halves, strict=True) if gate_up else [("down_proj", b)]
                for part, rows in parts:
                    for e in range(experts):
                        tensors[f"{at}.{e}.{part}.lora_A.weight"] = a[e]
                        tensors[f"{at}.{e}.{part}.lora_B.weight"] = rows[e]
            elif layout in ("flat", "exchanged"):
                inner = ".base_layer" if gate_up and len(names) > 1 else ""
                first, second = (a, b) if layout == "flat" else (b.transpose(1, 2), a.transpose(1, 2))
                tensors[f"{at}{inner}.lora_A.weight"] = first.flatten(0, 1)
                tensors[f"{at}{inner}.lora_B.weight"] = second.permute(1, 2, 0).flatten(1)
            else:
                one_a, one_b = layout == "outer" and gate_up, layout == "outer" and not gate_up
                tensors[f"{at}.{name}.lora_A"] = a[:1] if one_a else a
                tensors[f"{at}.{name}.lora_B"] = b[:1] if one_b else b
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(stored, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return merged

"""Layers that draft, for the tiny models that see: copies of layers that these have."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from srt.models.depth_drafts import DEPTHS
from srt.models.harness import POOLED, POOLED_LATENT, SIZES, TINY


def add_mtp(folder: Path, layer: int) -> None:
    """Gives a saved Qwen3.5 a layer that drafts: a copy of its `layer`, behind random projections."""
    file, prefix = folder / "model.safetensors", f"model.language_model.layers.{layer}."
    tensors = safetensors.torch.load_file(file)
    copies = {
        name.replace(prefix, "mtp.layers.0."): t.clone() for name, t in tensors.items() if name.startswith(prefix)
    }
    generator = torch.Generator().manual_seed(6)
    copies["mtp.fc.weight"] = torch.randn(64, 128, generator=generator) * 0.15
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        copies[f"mtp.{name}.weight"] = torch.rand(64, generator=generator) - 0.5
    safetensors.torch.save_file(tensors | copies, file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def add_pooled_mtp(folder: Path) -> None:
    """Gives a saved GLM-5.3-Flash a layer that drafts: a copy of its last one without hyper-connections."""
    file, count = folder / "model.safetensors", POOLED_LATENT["num_hidden_layers"]
    last, behind = (f"model.language_model.layers.{layer}." for layer in (count - 1, count))
    tensors = safetensors.torch.load_file(file)
    copies = {
        name.replace(last, behind): t.clone()
        for name, t in tensors.items()
        if name.startswith(last) and ".hc_" not in name
    }
    generator = torch.Generator().manual_seed(6)
    copies[f"{behind}eh_proj.weight"] = torch.randn(64, 128, generator=generator) * 0.15
    for name in ("enorm", "hnorm", "shared_head.norm"):
        copies[f"{behind}{name}.weight"] = torch.rand(64, generator=generator) + 0.5
    safetensors.torch.save_file(tensors | copies, file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}
    (folder / "config.json").write_text(json.dumps(config))


def add_stream_mtp(folder: Path) -> None:
    """Gives a saved Qwen3.8-Flash-Next a layer that drafts: a copy of its last one, behind random projections."""
    file, text = folder / "model.safetensors", "model.language_model."
    last = f"{text}layers.{POOLED['num_hidden_layers'] - 1}."
    tensors = safetensors.torch.load_file(file)
    copies = {
        name.replace(last, "mtp.layers.0.").replace(text, "mtp."): t.clone()
        for name, t in tensors.items()
        if name.startswith((last, f"{text}hyper_connection_mixer."))
    }
    generator, size = torch.Generator().manual_seed(6), SIZES["hidden_size"]
    for name, width in (("embedding", size), ("hidden", POOLED["hc_count"] * size)):
        copies[f"mtp.fc_{name}.weight"] = torch.randn(size, size, generator=generator) * 0.15
        copies[f"mtp.pre_fc_norm_{name}.weight"] = torch.rand(width, generator=generator) - 0.5
    safetensors.torch.save_file(tensors | copies, file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def add_depth_mtp(folder: Path) -> None:
    """Gives a saved Step-3.7 a layer for each depth: attention of its first layer with a window, and a dense block."""
    file, count = folder / "model.safetensors", TINY["step3p7"][1]["num_hidden_layers"]
    dense, windowed, size = "model.layers.0.mlp.", "model.layers.1.", SIZES["hidden_size"]
    tensors, generator = safetensors.torch.load_file(file), torch.Generator().manual_seed(6)
    copies = {}
    for layer in range(count, count + DEPTHS):
        at = f"model.layers.{layer}."
        for name, tensor in tensors.items():
            if name.startswith(dense):
                copies[name.replace(dense, f"{at}mlp.")] = tensor.clone()
            elif name.startswith(windowed) and ("norm" in name or ".self_attn." in name):
                copies[name.replace(windowed, at)] = tensor.clone()
        copies[f"{at}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.15
        for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
            copies[f"{at}{norm}.weight"] = torch.rand(size, generator=generator) - 0.5
    safetensors.torch.save_file(tensors | copies, file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = DEPTHS
    (folder / "config.json").write_text(json.dumps(config))


def add_normed_mtp(folder: Path) -> None:
    """Gives a saved Inkling a layer for each depth: copies of its first one, which is dense and has a window."""
    file, first, size = folder / "model.safetensors", "model.llm.layers.0.", SIZES["hidden_size"]
    tensors, generator = safetensors.torch.load_file(file), torch.Generator().manual_seed(6)
    copies = {}
    for layer in range(DEPTHS):
        at = f"model.mtp.layers.{layer}."
        for name, tensor in tensors.items():
            if name.startswith(first):
                copies[name.replace(first, f"{at}transformer_block.")] = tensor.clone()
        copies[f"{at}input_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.15
        for norm in ("embed_norm", "hidden_norm"):
            copies[f"{at}{norm}.weight"] = torch.rand(size, generator=generator) + 0.5
    safetensors.torch.save_file(tensors | copies, file)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_config"] = {"num_nextn_predict_layers": DEPTHS, "local_layer_ids": [*range(DEPTHS)]}
    (folder / "config.json").write_text(json.dumps(config))

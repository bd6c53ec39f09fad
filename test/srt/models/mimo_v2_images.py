"""MiMo-V2.6's encoder in plain fp32 torch, and small random checkpoints with the published names.

Written from its published config and from descriptions of SGLang's, which is the publisher's own; transformers has no
class for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.plan.media import describe_media
from sglang.srt.towers.base.patch_places import Grid

from .harness import save_tiny
from .media_harness import BEGIN, END, IMAGE, VIDEO

VISION: dict[str, Any] = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_query_groups": 2,
    "qk_channels": 16,
    "in_chans": 3,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "hidden_act": "silu",
    "use_sink": True,
    "window_size": 128,
    "visual_token_window_size": 5,
    "fullatt_block_indexes": [0, 3],
    "vit_window_attn_types": [-1, 0, 1, -1, 1],
    "tokens_per_second": 2,
}
"""The last layer takes columns, as no published one does."""
KEYS: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "attention_projection_layout": "split",
    "vision_model_type": "mimovl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "vision_config": VISION,
}


def save_mimo_seeing(folder: Path, text: str = "mimo_v2") -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    """Writes a model with an encoder. Returns the text's reference and the encoder's tensors by published names."""
    model = save_tiny(text, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | KEYS
    config["vision_config"] = VISION | {"out_hidden_size": config["hidden_size"]}
    file.write_text(json.dumps(config))
    media, generator = describe_media(config), torch.Generator().manual_seed(5)
    assert media is not None
    tensors = {}
    for name, shape in media.tower.shapes():
        tensor = 0.3 * torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith("ln_q.weight"):
            tensor += 1.0
        if name.endswith("sinks"):
            tensor = 3.0 * torch.randn(shape, generator=generator)
        tensors[name.removeprefix("model.")] = tensor
    patches = tensors["visual.patch_embed.proj.weight"]
    tensors["visual.patch_embed.proj.weight"] = patches.view(-1, 3, 2, 4, 4)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return model, tensors


def seen(w: Mapping[str, Tensor], vision: Mapping[str, Any], pixels: Tensor, grid: Grid, without: str = "") -> Tensor:
    """Returns the features [tokens, out] of one image or video. `without`: a mechanism that is left out."""
    frames, height, width = grid
    each = height * width
    return torch.cat([_frame(w, vision, part, height, width, without) for part in pixels.split([each] * frames)])


def _frame(
    w: Mapping[str, Tensor], vision: Mapping[str, Any], pixels: Tensor, height: int, width: int, without: str
) -> Tensor:
    merge, dim = vision["spatial_merge_size"], vision["qk_channels"]
    x = pixels @ w["visual.patch_embed.proj.weight"].flatten(1).T
    of_square = [(i, j) for i in range(merge) for j in range(merge)]
    by_row = [(a, b) for a in range(height // merge) for b in range(width // merge)]
    places = torch.tensor([(a * merge + i, b * merge + j) for a, b in by_row for i, j in of_square])
    speeds = 10000.0 ** (-torch.arange(0, dim // 2, 2) / (dim // 2))
    angles = (places[:, :, None] * speeds).flatten(1)
    column_wise = sorted(range(len(by_row)), key=lambda n: by_row[n][::-1])
    swapped = torch.tensor([n * merge**2 + i for n in column_wise for i in range(merge**2)])
    for i, kind in enumerate(vision["vit_window_attn_types"]):
        order = swapped if kind == 1 and without != "columns" else torch.arange(len(x))
        made = _block(w, vision, i, x[order], angles[order], without)
        x = torch.empty_like(x).index_copy(0, order, made)
    x = _normed(x, w["visual.merger.ln_q.weight"]).reshape(-1, merge**2 * x.shape[1])
    return F.gelu(x @ w["visual.merger.mlp.0.weight"].T) @ w["visual.merger.mlp.2.weight"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _block(
    w: Mapping[str, Tensor], vision: Mapping[str, Any], i: int, x: Tensor, angles: Tensor, without: str
) -> Tensor:
    dim = vision["qk_channels"]
    at, heads, of_keys = f"visual.blocks.{i}.", vision["num_heads"], vision["num_key_value_heads"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{at}{name}.weight"].T + w[f"{at}{name}.bias"]

    def normed(name: str, x: Tensor) -> Tensor:
        return _normed(x, w[f"{at}{name}.weight"])

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    qkv = linear("attn.qkv", normed("norm1", x)).view(len(x), -1, dim)
    q, k, v = turned(qkv[:, :heads]), turned(qkv[:, heads : heads + of_keys]), qkv[:, heads + of_keys :]
    rows = []
    for token in range(len(x)):
        heard = []
        for head in range(heads):
            shared = head * of_keys // heads
            scores = k[:, shared] @ q[token, head] * dim**-0.5
            if i not in vision["fullatt_block_indexes"]:
                if without != "windows":
                    far = (torch.arange(len(x)) - token).abs() > vision["visual_token_window_size"]
                    scores[far] = -torch.inf
                if without != "sinks":
                    scores = torch.cat((scores, w[f"{at}attn.sinks"][head : head + 1]))
            heard.append(scores.softmax(0)[: len(x)] @ v[:, shared])
        rows.append(torch.cat(heard))
    x = x + linear("attn.proj", torch.stack(rows))
    y = normed("norm2", x)
    return x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))

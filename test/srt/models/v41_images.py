"""DeepSeek-V4.1 with images: its encoder in plain fp32 torch, written from descriptions of the checkpoint's inference
code, small random checkpoints with the published names, and prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem
from srt.managers.fake_runner import request

from .harness import random_tokens
from .v41_drafts import save_v41_draft
from .v41_reference import TEXT, V41, Tensors, random_tensors

IMAGE = 251
VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "rope_theta": 100.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 1024,
    "max_wh_ratio": None,
}
EPS = 1e-6


def tower_shapes(vision: dict[str, Any], out: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    values, square = 3 * vision["patch_size"] ** 2, vision["downsample_ratio"] ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (hidden, values), "vision.patch_embed.proj.bias": (hidden,),
        "vision.norm.weight": (hidden,),
        "aligner.w1.weight": (out, square * hidden), "aligner.w1.bias": (out,),
        "aligner.w2.weight": (out, out), "aligner.w2.bias": (out,),
        "image_start": (out,), "image_newline": (out,), "image_end": (out,),
    }  # fmt: skip
    for i in range(vision["num_hidden_layers"]):
        at = f"vision.blocks.{i}."
        shapes |= {
            f"{at}norm1.weight": (hidden,), f"{at}norm2.weight": (hidden,),
            f"{at}attn.wqkv.weight": (3 * hidden, hidden), f"{at}attn.wqkv.bias": (3 * hidden,),
            f"{at}attn.wo.weight": (hidden, hidden), f"{at}attn.wo.bias": (hidden,),
            f"{at}mlp.w1.weight": (2 * wide, hidden), f"{at}mlp.w2.weight": (hidden, wide),
        }  # fmt: skip
    return shapes


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _turned(x: Tensor, row: int, column: int, theta: float) -> Tensor:
    """x [heads, D] of a patch: dim i turns with dim i + D / 2, the first quarter of the dims by the row."""
    half = x.shape[-1] // 2
    angles = torch.tensor(
        [place * theta ** (-2 * k / half) for place in (row, column) for k in range(half // 2)], dtype=torch.float64
    )
    cos, sin, (a, b) = angles.cos().float(), angles.sin().float(), x.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.inference_mode()
def seen(w: Tensors, vision: dict[str, Any], pixels: Tensor, rows: int, columns: int) -> Tensor:
    """pixels [rows * columns, values] of an image -> [tokens, H]."""
    heads, merge = vision["num_attention_heads"], vision["downsample_ratio"]
    places = [(row, column) for row in range(rows) for column in range(columns)]
    x = F.linear(pixels, w["vision.patch_embed.proj.weight"], w["vision.patch_embed.proj.bias"])
    for i in range(vision["num_hidden_layers"]):
        at = f"vision.blocks.{i}."
        qkv = F.linear(_norm(x, w[f"{at}norm1.weight"]), w[f"{at}attn.wqkv.weight"], w[f"{at}attn.wqkv.bias"])
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv.chunk(3, -1))
        q, k = (
            torch.stack([_turned(part, *place, vision["rope_theta"]) for part, place in zip(of, places, strict=True)])
            for of in (q, k)
        )
        weights = (torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        attended = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
        x = x + F.linear(attended, w[f"{at}attn.wo.weight"], w[f"{at}attn.wo.bias"])
        gate, up = (_norm(x, w[f"{at}norm2.weight"]) @ w[f"{at}mlp.w1.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w[f"{at}mlp.w2.weight"].T
    x = _norm(x, w["vision.norm.weight"])
    tokens = [w["image_start"]]
    for top in range(0, rows, merge):
        for left in range(0, columns, merge):
            square = torch.zeros(x.shape[1], merge, merge)
            for row in range(top, min(top + merge, rows)):
                for column in range(left, min(left + merge, columns)):
                    square[:, row - top, column - left] = x[row * columns + column]
            wide = F.gelu(F.linear(square.flatten(), w["aligner.w1.weight"], w["aligner.w1.bias"]))
            tokens.append(F.linear(wide, w["aligner.w2.weight"], w["aligner.w2.bias"]))
        tokens.append(w["image_newline"])
    return torch.stack([*tokens, w["image_end"]])


@dataclass(frozen=True)
class Picture:
    """Random patches."""

    rows: int
    columns: int
    seed: int = 0

    @property
    def pixels(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rows * self.columns, 3 * VISION["patch_size"] ** 2, generator=generator)

    @property
    def num_tokens(self) -> int:
        down, across = -(-self.rows // 3), -(-self.columns // 3)
        return down * (across + 1) + 2


@dataclass(frozen=True)
class Pictured:
    """A prompt of token ids and pictures."""

    parts: tuple[int | Picture, ...]

    @property
    def ids(self) -> list[int]:
        return [
            token
            for part in self.parts
            for token in ([IMAGE] * part.num_tokens if isinstance(part, Picture) else [part])
        ]

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    def request(self, rid: str, folder: Path, new_tokens: int) -> TokenizedGenerateReq:
        msg = request(rid, self.ids, new_tokens, temperature=0.0, ignore_eos=True)
        msg.media, begin = [], 0
        for part in self.parts:
            if isinstance(part, Picture):
                digest = hashlib.blake2b(repr(part).encode(), digest_size=32).digest()
                spans, grid = [(begin, begin + part.num_tokens)], (1, part.rows, part.columns)
                pixels = shared_array.write(folder, part.pixels.numpy())
                msg.media.append(MediaItem(kind="image", digest=digest, spans=spans, grid=grid, pixels=pixels))
            begin += part.num_tokens if isinstance(part, Picture) else 1
        return msg


def texts(count: int, seed: int) -> list[int]:
    return [1 + token % 190 for token in random_tokens(count, seed=seed)]


def pictured(*parts: Picture | Sequence[int]) -> Pictured:
    return Pictured(tuple(one for part in parts for one in ([part] if isinstance(part, Picture) else part)))


@dataclass
class V41Seeing:
    text: V41
    vision: dict[str, Any]

    def features(self, prompt: Pictured) -> Tensor | None:
        made = [seen(self.text.w, self.vision, one.pixels, one.rows, one.columns) for one in prompt.pictures]
        return torch.cat(made) if made else None

    def logits(self, prompt: Pictured, output: Sequence[int] = ()) -> Tensor:
        return self.text.logits([*prompt.ids, *output], self.features(prompt))

    def greedy(self, prompt: Pictured, output: Sequence[int]) -> list[int]:
        """What the model would have said where `output` stands."""
        said: list[int] = self.logits(prompt, output)[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
        return said


def save_v41_seeing(folder: Path, of_vision: dict[str, Any] | None = None, **changes: Any) -> V41Seeing:
    """A checkpoint with an encoder and a draft. Nobody says a placeholder. of_vision, changes: keys of the configs of
    vision and text."""
    vision = {**VISION, **(of_vision or {})}
    tower = random_tensors(tower_shapes(vision, {**TEXT, **changes}["hidden_size"]), seed=4)
    text = save_v41_draft(folder, tower, **changes).target
    text.image_token = IMAGE
    file = folder / "model.safetensors"
    text.w["head.weight"][IMAGE] = 0.0
    save_file(load_file(file) | {"head.weight": text.w["head.weight"]}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": IMAGE, "vision_config": vision}))
    return V41Seeing(text, vision)

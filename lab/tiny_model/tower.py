"""The eyes of the embedded model for training: the encoder of Qwen3-VL in plain torch, small, and the text model that
reads what it writes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_model.layout import IMAGE_SECTIONS, VISION_CONFIG
from tiny_model.model import TinyModel, _norm

ROTARY_THETA = 10000.0
EPS = 1e-6


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_heads"]
        self.norm1, self.norm2 = nn.LayerNorm(hidden, EPS), nn.LayerNorm(hidden, EPS)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(hidden, wide), "linear_fc2": nn.Linear(wide, hidden)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, P, hidden]; cos, sin [P, head_dim / 2]."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v)
        x = x + self.attn["proj"](out.transpose(1, 2).flatten(2))
        return x + self.mlp["linear_fc2"](F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh"))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Merger(nn.Module):
    """Squares of patches to tokens. `wide`: the norm is over the square."""

    def __init__(self, config: dict[str, Any], wide: bool, scale: float) -> None:
        super().__init__()
        self.merged = config["hidden_size"] * config["spatial_merge_size"] ** 2
        self.wide = wide
        self.norm = nn.LayerNorm(self.merged if wide else config["hidden_size"], EPS)
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, config["out_hidden_size"])
        nn.init.normal_(self.linear_fc2.weight, std=scale / math.sqrt(self.merged))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = self.norm(x.reshape(batch, -1, self.merged) if self.wide else x).reshape(batch, -1, self.merged)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return out


class Tower(nn.Module):
    """Patches of pictures of one size to tokens. Its parameters have the published names, below `model.visual.`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config = VISION_CONFIG
        hidden, patch = config["hidden_size"], config["patch_size"]
        self.values = config["in_channels"] * config["temporal_patch_size"] * patch**2
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(self.values, hidden)})
        self.pos_embed = nn.Embedding(config["num_position_embeddings"], hidden)
        nn.init.normal_(self.pos_embed.weight, std=0.2)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["depth"]))
        self.merger = Merger(config, False, 0.15)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, True, 0.03) for _ in config["deepstack_visual_indexes"]
        )

    def forward(self, patches: Tensor, rows: int, columns: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """patches [B, rows * columns, values], in squares. Returns tokens [B, N, out], the features of each level
        likewise, and what the last block gives [B, P, hidden]."""
        row, column = _places(rows, columns, self.config["spatial_merge_size"], patches.device)
        x = self.patch_embed["proj"](patches) + self._positions(row, column, rows, columns)
        quarter = self.config["hidden_size"] // self.config["num_heads"] // 4
        frequencies = ROTARY_THETA ** (-torch.arange(quarter, device=x.device) / quarter)
        angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        features = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if number in self.config["deepstack_visual_indexes"]:
                features.append(self.deepstack_merger_list[len(features)](x))
        return self.merger(x), features, x

    def _positions(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """[P, hidden]: the table, stretched over the picture corner to corner."""
        side = math.isqrt(self.config["num_position_embeddings"])
        found = torch.zeros((), device=row.device)
        down, across = row * (side - 1) / max(rows - 1, 1), column * (side - 1) / max(columns - 1, 1)
        for y in (0, 1):
            for x in (0, 1):
                at_y, at_x = down.floor() + y, across.floor() + x
                share = (1 - (down - at_y).abs()) * (1 - (across - at_x).abs())
                index = at_y.clamp(max=side - 1) * side + at_x.clamp(max=side - 1)
                found = found + share[:, None] * self.pos_embed.weight[index.long()]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Under the published names; a patch's weight is a convolution's there."""
        patch, shape = self.config["patch_size"], self.config
        named = {f"model.visual.{name}": value.detach() for name, value in self.named_parameters()}
        name = "model.visual.patch_embed.proj.weight"
        named[name] = named[name].view(-1, shape["in_channels"], shape["temporal_patch_size"], patch, patch)
        return named


class Hints(nn.Module):
    """What is in a picture, told from the mean of the last block's outputs: in training a second reason to see it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        hidden = VISION_CONFIG["hidden_size"]
        self.norm = nn.LayerNorm(hidden, EPS)
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, size) for name, size in sizes.items()})

    def loss(self, x: Tensor, told: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, P, hidden]; told: by name the right class [B] and where it is known [B]."""
        seen = self.norm(x.float().mean(1))
        losses = []
        for name, (right, known) in told.items():
            all_losses = F.cross_entropy(self.heads[name](seen), right, reduction="none")
            losses.append((all_losses * known).sum() / known.sum().clamp_min(1))
        return torch.stack(losses).mean()


def _places(rows: int, columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column [P] float32 of each patch; those of a square follow one another."""
    shape = (rows // merge, columns // merge, merge, merge)
    row = torch.arange(rows, device=device).view(rows // merge, 1, merge, 1).expand(shape)
    column = torch.arange(columns, device=device).view(1, columns // merge, 1, merge).expand(shape)
    return row.flatten().float(), column.flatten().float()


def picture_positions(length: int, image: Tensor, rows: int, columns: int) -> Tensor:
    """[3, B, length]: time, row and column of each token, whose image begins at `image` [B]. Behind it text goes on
    from the largest position."""
    count = rows * columns
    at = torch.arange(length, device=image.device).expand(len(image), -1)
    inside = at - image[:, None]
    seen = (inside >= 0) & (inside < count)
    behind = torch.where(inside >= count, at - count + max(rows, columns), at)
    time = torch.where(seen, image[:, None], behind)
    row = torch.where(seen, image[:, None] + inside // columns, behind)
    column = torch.where(seen, image[:, None] + inside % columns, behind)
    return torch.stack((time, row, column))


def hidden_of(
    target: TinyModel, tokens: Tensor, image: Tensor, seen: Tensor, features: list[Tensor], rows: int, columns: int
) -> Tensor:
    """The text model's last hidden states [B, L, H] of tokens [B, L] whose placeholders from `image` on are `seen`
    [B, N, H]; `features` are added to the stream behind the first layers."""
    batch, length = tokens.shape
    positions = picture_positions(length, image, rows, columns)
    cos, sin = (_sectioned(table, positions).unsqueeze(1).to(target.dtype) for table in (target.cos, target.sin))
    mask = torch.full((length, length), -torch.inf, device=tokens.device, dtype=target.dtype).triu(1)
    places = (image[:, None] + torch.arange(rows * columns, device=tokens.device))[..., None]
    places = places.expand(-1, -1, target.config["hidden_size"])
    x = F.embedding(tokens, target.embedding.to(target.dtype)).scatter(1, places, seen.to(target.dtype))
    for number, layer in enumerate(target.layers):
        x, _ = layer(x, cos, sin, mask[None, None])
        if number < len(features):
            x = x.scatter_add(1, places, features[number].to(target.dtype))
    return _norm(x, target.norm, target.config["rms_norm_eps"])


def _sectioned(table: Tensor, positions: Tensor) -> Tensor:
    """table [positions, head_dim], whose halves are equal; positions [3, B, L]. Returns [B, L, head_dim]: frequencies
    take turns, as far as each section goes."""
    half = table.shape[1] // 2
    section = torch.zeros(half, dtype=torch.long, device=table.device)
    for number, size in enumerate(IMAGE_SECTIONS[1:], start=1):
        section[number : 3 * size : 3] = number
    rows = table[:, :half][positions]
    chosen = rows.gather(0, section.expand(rows.shape[1:])[None])[0]
    return torch.cat((chosen, chosen), dim=-1)

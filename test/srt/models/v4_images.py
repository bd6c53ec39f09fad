"""DeepSeek-V4's vision edition: layers of transformers' class, which reads texts alone, with masks, experts and
features of images as the checkpoint's inference code is described; small random checkpoints with the published names;
prompts."""

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

from .harness import SIZES
from .v4_drafts import TARGET, save_v4
from .v41_images import IMAGE, VISION, Picture, seen, tower_shapes
from .v41_reference import random_tensors

FLAT = {
    "vision_n_layers": VISION["num_hidden_layers"],
    "vision_dim": VISION["hidden_size"],
    "vision_n_heads": VISION["num_attention_heads"],
    "vision_inter_dim": VISION["intermediate_size"],
    "vision_patch_size": VISION["patch_size"],
    "vision_rope_theta": VISION["rope_theta"],
    "vision_downsample_ratio": VISION["downsample_ratio"],
    "vision_max_n_token": 64,
    "vision_min_pixels": 1024,
    "vision_max_wh_ratio": 8,
}


def spans_of(prompt: Sequence[int | Picture]) -> list[tuple[Picture, int, int, int]]:
    """Of each picture: its first token, its first mark, and the token behind it. The mark is the last of four."""
    found, place = [], 0
    for part in prompt:
        if isinstance(part, Picture):
            mark = place + 3 - place % 4
            found.append((part, place, mark, mark + len(arranged(part))))
            place = found[-1][3]
        else:
            place += 1
    return found


def arranged(picture: Picture) -> list[str | tuple[int, int]]:
    """From its first mark on: names of learned tokens, and the rows and columns of squares."""
    rows, columns = -(-picture.rows // 3), -(-picture.columns // 3)
    tokens: list[str | tuple[int, int]] = ["image_start"]
    for upper in range(0, rows, 2):
        for column in range(columns + 1):
            for row in (upper, upper + 1):
                if row >= rows:
                    tokens.append("image_pad")
                else:
                    tokens.append("image_newline" if column == columns else (row, column))
    while (len(tokens) - 1) % 4:
        tokens.append("image_pad")
    return [*tokens, "image_end"]


def ids_of(prompt: Sequence[int | Picture]) -> list[int]:
    spans = iter(spans_of(prompt))
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, Picture):
            _, begin, _, end = next(spans)
            ids += [IMAGE] * (end - begin)
        else:
            ids.append(part)
    return ids


class Gate(torch.nn.Module):
    """A router of the class that chooses experts of images' tokens by another bias, whatever it does with texts."""

    def __init__(self, router: Any, bias: Tensor) -> None:
        super().__init__()
        self.router, self.bias = router, bias
        self.ids, self.pictured = torch.empty(0), torch.empty(0)

    def forward(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        table = hasattr(self.router, "tid2eid")
        logits, weights, chosen = self.router(hidden, self.ids) if table else self.router(hidden)
        scores = F.softplus(logits).sqrt()
        of_images = (scores + self.bias).topk(self.router.top_k, -1).indices
        their = scores.gather(1, of_images)
        their = their / their.sum(-1, keepdim=True) * self.router.routed_scaling_factor
        pictured = self.pictured[:, None]
        return logits, torch.where(pictured, their, weights), torch.where(pictured, of_images, chosen)


@dataclass
class V4Seeing:
    model: Any
    w: dict[str, Tensor]

    def features(self, picture: Picture) -> dict[str | tuple[int, int], Tensor]:
        rows, columns = -(-picture.rows // 3), -(-picture.columns // 3)
        made = seen(self.w, VISION, picture.pixels, picture.rows, picture.columns)
        found: dict[str | tuple[int, int], Tensor] = {
            (row, column): made[1 + row * (columns + 1) + column] for row in range(rows) for column in range(columns)
        }
        return found | {name: self.w[name] for name in ("image_start", "image_pad", "image_newline", "image_end")}

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int | Picture], output: Sequence[int] = (), broken: str = "") -> Tensor:
        """broken: what is done as it is with texts."""
        ids = torch.tensor([*ids_of(prompt), *output])
        decoder, window = self.model.get_decoder(), self.model.config.sliding_window
        embedded, place = decoder.embed_tokens(ids), torch.arange(len(ids))
        visible = (place <= place[:, None]) & (place > place[:, None] - window)
        pictured = torch.zeros(len(ids), dtype=torch.bool)
        for picture, begin, mark, end in spans_of(prompt):
            rows, order = self.features(picture), ["image_pad"] * (mark - begin) + arranged(picture)
            embedded[begin:end] = torch.stack([rows[token] for token in order])
            pictured[begin:end] = True
            if broken != "sight":
                visible[mark:end, mark:end] = True
        for layer in decoder.layers:
            hashed = hasattr(layer.mlp.gate.router, "tid2eid")
            layer.mlp.gate.ids = ids[None]
            off = broken == ("table" if hashed else "bias")
            layer.mlp.gate.pictured = torch.zeros_like(pictured) if off else pictured
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
        hidden = decoder(inputs_embeds=embedded[None], attention_mask={"every": mask}).last_hidden_state[0]
        return hidden @ self.model.get_output_embeddings().weight.T

    def greedy(self, prompt: Sequence[int | Picture], output: Sequence[int]) -> list[int]:
        """What the model would have said where `output` stands."""
        said: list[int] = self.logits(prompt, output)[len(ids_of(prompt)) - 1 : -1].argmax(-1).tolist()
        return said


def request_of(rid: str, prompt: Sequence[int | Picture], folder: Path, new_tokens: int) -> TokenizedGenerateReq:
    msg = request(rid, ids_of(prompt), new_tokens, temperature=0.0, ignore_eos=True)
    msg.media = []
    for picture, begin, _, end in spans_of(prompt):
        digest = hashlib.blake2b(repr(picture).encode(), digest_size=32).digest()
        pixels, grid = shared_array.write(folder, picture.pixels.numpy()), (1, picture.rows, picture.columns)
        msg.media.append(MediaItem(kind="image", digest=digest, spans=[(begin, end)], grid=grid, pixels=pixels))
    return msg


def save_v4_seeing(folder: Path, **changes: Any) -> V4Seeing:
    """A checkpoint with an encoder and a draft. Nobody says a placeholder. changes: more keys of the config."""
    hidden = SIZES["hidden_size"]
    draft = save_v4(folder, dspark=True, name=TARGET, image_token_id=IMAGE, **FLAT, **changes)
    model, file = draft.target.model, folder / "model.safetensors"
    shapes = {**tower_shapes(VISION, hidden), "image_pad": (hidden,)}
    experts, layers = model.config.num_local_experts, model.get_decoder().layers
    # Biases for texts are published for layers in which a table chooses, too.
    shapes |= {f"layers.{i}.ffn.gate.bias_vl": (experts,) for i in range(len(layers))}
    shapes |= {f"mtp.{i}.ffn.gate.bias_vl": (experts,) for i in range(3)} | {"layers.0.ffn.gate.bias": (experts,)}
    w = random_tensors(shapes, seed=4)
    w |= {name: 4 * rows for name, rows in w.items() if "bias_vl" in name}
    with torch.no_grad():
        model.get_output_embeddings().weight[IMAGE] = 0.0
    head = {"head.weight": model.get_output_embeddings().weight.detach().clone()}
    save_file({**load_file(file), **head, **w}, file)
    for i, layer in enumerate(layers):
        layer.mlp.gate = Gate(layer.mlp.gate, w[f"layers.{i}.ffn.gate.bias_vl"])
    config = json.loads((folder / "config.json").read_text())
    assert config["image_token_id"] == IMAGE
    return V4Seeing(model, w)

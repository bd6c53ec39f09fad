"""Drafts that DeepSeek-V4's checkpoints bring, written small as they are published, and what they guess in fp32: layers
of transformers over whole sequences, and heads written from the formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .draft_references import Target, chain, confidences, markov_bias, rms
from .harness import SIZES, TINY, as_published_v4, hf_model, share_weights

Tensors = dict[str, Tensor]
TARGET, STAGES, RANK, BLOCK = "deepseek_v4_small", 3, 12, 5
HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]
CAPTURES = (0, 2)
MASK = 201
DSPARK_KEYS: dict[str, Any] = {
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": MASK,
    "dspark_target_layer_ids": list(CAPTURES),
    "dspark_markov_rank": RANK,
    "num_nextn_predict_layers": STAGES,
}


class Behind:
    """Stands in for a cache that has keys [1, 1, n, D] of the tokens before a block."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        joined = torch.cat((self.keys, keys), dim=2)
        return joined, joined


@dataclass
class V4Draft:
    """Layers of a draft, and `w` of its tensors by the names in the checkpoint."""

    target: Target
    layers: Sequence[Any]
    w: Tensors
    last: str

    @property
    def config(self) -> Any:
        return self.target.model.config

    def positions(self, first: int, count: int) -> dict[str, Any]:
        ids = torch.arange(first, first + count)[None]
        rotary, at = self.target.model.get_decoder().rotary_emb, torch.zeros(1, count, self.config.hidden_size)
        both = {kind: rotary(at, position_ids=ids, layer_type=kind) for kind in ("main", "compress")}
        return {"position_ids": ids, "position_embeddings": both}

    def ended(self, streams: Tensor) -> Tensor:
        """streams [n, N, H] -> rows [n, H] for the output head."""
        w, at, eps = self.w, self.last, self.config.rms_norm_eps
        mixed = rms(streams.flatten(1), torch.ones(()), eps) @ w[f"{at}.hc_head_fn"].T
        weights = torch.sigmoid(mixed * w[f"{at}.hc_head_scale"] + w[f"{at}.hc_head_base"]) + self.config.hc_eps
        return rms((weights[..., None] * streams).sum(1), w[f"{at}.norm.weight"], eps)


class V4Mtp(V4Draft):
    def rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        w, eps, count = self.w, self.config.rms_norm_eps, len(ids)
        embedded = rms(self.target.embedded(ids), w["mtp.0.enorm.weight"], eps) @ w["mtp.0.e_proj.weight"].T
        streams = (
            rms(features.view(count, -1, self.config.hidden_size), w["mtp.0.hnorm.weight"], eps)
            @ w["mtp.0.h_proj.weight"].T
        )
        row, col = torch.arange(count)[:, None], torch.arange(count)
        seen = (col <= row) & (col > row - self.config.sliding_window)
        mask = torch.zeros(count, count).masked_fill(~seen, -torch.inf)[None, None]
        (layer,) = self.layers
        where = self.positions(0, count)
        return layer((streams + embedded[:, None])[None], attention_mask=mask, **where)[0].flatten(1)

    def __call__(self, tokens: list[int], count: int) -> Tensor:
        streams, _ = self.target.streams(tokens[:-1])
        head = lambda state: self.target.logits(self.ended(state.view(1, -1, self.config.hidden_size)))[0]  # noqa: E731
        return chain(tokens, streams[-1].flatten(1), self.rows, head, count)


class V4DSpark(V4Draft):
    @torch.inference_mode()
    def drafting_rows(self, tokens: list[int], count: int) -> Tensor:
        """The rows [count, H] that make the draft tokens."""
        w, eps, n = self.w, self.config.rms_norm_eps, len(tokens) - 1
        streams, _ = self.target.streams(tokens[:-1])
        joined = torch.cat([streams[layer].mean(1) for layer in CAPTURES], dim=-1)
        context = rms(joined @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"], eps)
        embedded = self.target.embedded([tokens[-1], *[MASK] * (BLOCK - 1)])
        h = embedded[:, None].repeat(1, self.config.hc_mult, 1)[None]
        for layer in self.layers:
            keys = Behind(self.keys(layer.self_attn, context))
            h = layer(h, attention_mask=None, past_key_values=keys, **self.positions(n, BLOCK))
        return self.ended(h[0])[:count]

    def confidences(self, tokens: list[int], draft_tokens: list[int]) -> Tensor:
        return confidences(
            self.w, self.drafting_rows(tokens, len(draft_tokens)), [tokens[-1], *draft_tokens[:-1]], f"{self.last}."
        )

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        w, rows = self.w, self.drafting_rows(tokens, count)
        named = {f"markov_head.{name}.weight": w[f"{self.last}.markov_head.{name}.weight"] for name in ("markov_w1", "markov_w2")}  # noqa: E501  # fmt: skip
        given, previous = [], tokens[-1]
        for row, base in zip(rows, self.target.logits(rows), strict=True):
            given.append(base + markov_bias(named, "vanilla", row, previous, row)[0])
            previous = int(given[-1].argmax())
        return torch.stack(given)

    def keys(self, attention: Any, context: Tensor) -> Tensor:
        """The keys [1, 1, n, D] of the last tokens before a block."""
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

        cos, sin = self.positions(0, len(context))["position_embeddings"]["main"]
        keys = apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(context))[None, None], cos, sin)
        return keys[:, :, -self.config.sliding_window :]


def save_v4(folder: Path, dspark: bool, name: str = TARGET, **keys: Any) -> V4Draft:
    """A target `name` with the draft that its checkpoint brings, written to `folder`; `keys`: more of the config."""
    stages = STAGES if dspark else 1
    changes = TINY[name][1]
    count = changes["num_hidden_layers"]
    more = {"num_hidden_layers": count + stages, "compress_ratios": [*changes["compress_ratios"], *[0] * stages]}
    whole, target = hf_model(name, **more), hf_model(name)
    share_weights(whole, target)
    for model, where in ((whole, folder / "whole"), (target, folder)):
        model.save_pretrained(where)
        as_published_v4(where, changes)
    stored = {
        key.replace(f"layers.{count + stage}.", f"mtp.{stage}.", 1): tensor
        for stage in range(stages)
        for key, tensor in load_file(folder / "whole" / "model.safetensors").items()
        if key.startswith(f"layers.{count + stage}.")
    }
    stored |= heads(dspark, stages, target.config.hc_mult, target.config.hidden_size)
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"compress_ratios": [*config["compress_ratios"][:count], *[0] * stages], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | (DSPARK_KEYS if dspark else {}) | keys))
    kind = V4DSpark if dspark else V4Mtp
    return kind(Target(target), whole.get_decoder().layers[count:], stored, f"mtp.{stages - 1}")


def heads(dspark: bool, stages: int, streams: int, hidden: int = HIDDEN) -> Tensors:
    """Random tensors beside the layers, by the published names."""
    generator = torch.Generator().manual_seed(8)
    last = f"mtp.{stages - 1}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{last}.norm.weight": (hidden,),
        f"{last}.hc_head_fn": (streams, streams * hidden),
        f"{last}.hc_head_base": (streams,),
        f"{last}.hc_head_scale": (1,),
    }
    if dspark:
        shapes |= {
            "mtp.0.main_proj.weight": (hidden, len(CAPTURES) * hidden),
            "mtp.0.main_norm.weight": (hidden,),
            f"{last}.markov_head.markov_w1.weight": (VOCAB, RANK),
            f"{last}.markov_head.markov_w2.weight": (VOCAB, RANK),
            f"{last}.confidence_head.proj.weight": (1, hidden + RANK),
        }
    else:
        shapes |= {f"mtp.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        shapes |= {f"mtp.0.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in tensors:
        if "norm" in name or name.endswith("scale"):
            tensors[name] = torch.rand(shapes[name], generator=generator) + 0.5
    return tensors

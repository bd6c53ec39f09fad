"""Drafts of the embedded model for training: an EAGLE-3 head (arXiv 2503.01840), a layer for multi-token prediction.

A draft's row p is computed of the token at p + 1 and of features of position p, and drafts the token at p + 2.
The features of the first draft token are the target's; those of draft token j are the draft's own, of its row before.
In training all rows make draft token 1 at once, then all make number 2, and so on. Row p of number j sees what it will
see in a server: rows of number 1 up to p - j + 1, then one row of each later draft token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_model.model import Layer, TinyModel, _norm, _rotary_tables, _rotated

CAPTURES = (1, 3, 5)
"""Layers of the target whose outputs the EAGLE-3 head reads."""
EAGLE3_CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


@dataclass
class Attended:
    """Keys and values [B, heads, L, head_dim] of the draft tokens so far, first to last."""

    keys: list[Tensor]
    values: list[Tensor]


def attend(q: Tensor, before: Attended) -> Tensor:
    """Rows of the newest guess, whose own keys are the last in `before`. Returns [B, L, heads * head_dim]."""
    newest, length = len(before.keys), q.shape[2]
    scale = 1 / math.sqrt(q.shape[-1])
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(2 - newest)
    scores = [(q @ before.keys[0].mT * scale).masked_fill(hidden, -torch.inf)]
    values = [value.roll(newest - number, dims=2) for number, value in enumerate(before.values[1:], start=2)]
    for number, key in enumerate(before.keys[1:], start=2):
        scores.append((q * key.roll(newest - number, dims=2)).sum(-1, keepdim=True) * scale)
    shares = torch.cat(scores, dim=-1).softmax(-1)
    out = shares[..., :length] @ before.values[0]
    for number, value in enumerate(values):
        out = out + shares[..., length + number, None] * value
    return out.transpose(1, 2).flatten(2)


class Attention:
    """What both drafts share: [out, in] matrices in, one row of a draft token for each row of the text out."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.cos, self.sin = _rotary_tables(config)

    def __call__(
        self, x: Tensor, matrices: tuple[Tensor, Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, before: Attended
    ) -> Tensor:
        q, k, v = (F.linear(x, matrix).unflatten(-1, (-1, self.head_dim)) for matrix in matrices)
        if norms is not None:
            q, k = _norm(q, norms[0], self.eps), _norm(k, norms[1], self.eps)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        cos, sin = (table[: x.shape[1]].to(x.device) for table in (self.cos, self.sin))
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        share = self.heads // self.kv_heads
        before.keys.append(k.repeat_interleave(share, dim=1))
        before.values.append(v.repeat_interleave(share, dim=1))
        return attend(q, before)


class Eagle3Head(nn.Module):
    """`kept` [draft vocabulary] int64: the target's tokens that the head knows, ascending."""

    def __init__(self, target: TinyModel, kept: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        config, hidden = EAGLE3_CONFIG, EAGLE3_CONFIG["hidden_size"]
        self.kept, self.eps, self.vocab_size = kept, config["rms_norm_eps"], target.config["vocab_size"]
        self.attention = Attention(config)
        width = config["head_dim"]
        self.fc = _linear(hidden, len(CAPTURES) * target.config["hidden_size"])
        self.embedding_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(4)
        )
        self.q = _linear(config["num_attention_heads"] * width, 2 * hidden)
        self.k = _linear(config["num_key_value_heads"] * width, 2 * hidden)
        self.v = _linear(config["num_key_value_heads"] * width, 2 * hidden)
        self.o = _linear(hidden, config["num_attention_heads"] * width)
        self.gate, self.up = (_linear(config["intermediate_size"], hidden) for _ in range(2))
        self.down = _linear(hidden, config["intermediate_size"])
        self.head = nn.Parameter(target.embedding.detach()[kept].clone())

    def features(self, streams: Tensor, hidden: Tensor) -> Tensor:
        """streams [B, L, captures, H] -> [B, L, H]."""
        return F.linear(streams.flatten(2), self.fc)

    def forward(self, embedded: Tensor, features: Tensor, before: Attended) -> tuple[Tensor, Tensor]:
        """[B, L, H] each. Returns what `logits` reads, and the features of the next draft token, of the same row."""
        pair = torch.cat(
            (_norm(embedded, self.embedding_norm, self.eps), _norm(features, self.hidden_norm, self.eps)), -1
        )
        h = features + F.linear(self.attention(pair, (self.q, self.k, self.v), None, before), self.o)
        x = _norm(h, self.mlp_norm, self.eps)
        h = h + F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)
        return _norm(h, self.norm, self.eps), h

    def logits(self, state: Tensor) -> Tensor:
        """[n, H] -> [n, draft vocabulary]."""
        return F.linear(state, self.head)

    def tensors(self) -> dict[str, Tensor]:
        """Under the published names."""
        at = "midlayer."
        names = {
            "fc": "fc.weight", "norm": "norm.weight", "head": "lm_head.weight",
            "embedding_norm": f"{at}input_layernorm.weight", "hidden_norm": f"{at}hidden_norm.weight",
            "mlp_norm": f"{at}post_attention_layernorm.weight",
            **{name: f"{at}self_attn.{name}_proj.weight" for name in "qkvo"},
            **{name: f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        }  # fmt: skip
        known = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.kept.device)
        known[self.kept] = True
        tables = {"d2t": self.kept - torch.arange(len(self.kept), device=self.kept.device), "t2d": known}
        return {name: getattr(self, ours).detach() for ours, name in names.items()} | tables


class MtpLayer(nn.Module):
    """A layer as the target's last one, which it begins as."""

    def __init__(self, target: TinyModel) -> None:
        super().__init__()
        torch.manual_seed(2)
        config = target.config
        hidden = config["hidden_size"]
        self.eps, self.vocab_size = config["rms_norm_eps"], config["vocab_size"]
        self.head = target.embedding.detach()
        self.kept = torch.arange(config["vocab_size"], device=self.head.device)
        self.attention = Attention(config)
        self.layer = Layer(config, config["num_hidden_layers"] - 1)
        self.layer.load_state_dict(target.layers[-1].state_dict())
        eye = torch.eye(hidden)
        self.fc = nn.Parameter(torch.cat((0.5 * eye, eye), dim=1) + 0.01 * torch.randn(hidden, 2 * hidden))
        self.embedding_norm, self.hidden_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.norm = nn.Parameter(target.norm.detach().clone())

    def features(self, streams: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, embedded: Tensor, features: Tensor, before: Attended) -> tuple[Tensor, Tensor]:
        layer = self.layer
        pair = (_norm(embedded, self.embedding_norm, self.eps), _norm(features, self.hidden_norm, self.eps))
        h = F.linear(torch.cat(pair, dim=-1), self.fc)
        x = _norm(h, layer.attn_norm, self.eps)
        attended = self.attention(x, (layer.q, layer.k, layer.v), (layer.q_norm, layer.k_norm), before)
        h = h + F.linear(attended, layer.o)
        h = h + layer.experts(_norm(h, layer.mlp_norm, self.eps))[0]
        state = _norm(h, self.norm, self.eps)
        return state, state

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.head)

    def tensors(self) -> dict[str, Tensor]:
        from tiny_model.export import layer_weights

        own = {
            "fc": "fc",
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "norm": "norm",
        }
        named = {f"mtp.{name}.weight": getattr(self, ours).detach() for ours, name in own.items()}
        return named | {name: part.detach() for name, part in layer_weights(self.layer, "mtp.layers.0.")}


ChainDraft = Eagle3Head | MtpLayer


def _linear(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (0.5 / math.sqrt(columns)))

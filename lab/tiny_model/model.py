"""The embedded model for training: Qwen3-MoE in plain torch, on packed rows.

Parameters are float32 and are cast to the activations' type where they are used, so training computes what a bfloat16
server computes. All experts run on all tokens, as one wide layer whose parts are weighted by the router (most of them
by zero): four times the arithmetic of the chosen two and, at this size, faster than sorting tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """One decoder layer. `num_experts` 0: a dense MLP of `inner` rows."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.head_dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim,
        )
        self.top_k, self.eps = config["num_experts_per_tok"], config["rms_norm_eps"]
        self.num_experts = 0 if index in config["mlp_only_layers"] else config["num_experts"]
        inner = config["moe_intermediate_size"] if self.num_experts else config["intermediate_size"]
        depth_scale = 1 / math.sqrt(2 * config["num_hidden_layers"])

        self.attn_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.q_norm = nn.Parameter(torch.ones(head_dim))
        self.k_norm = nn.Parameter(torch.ones(head_dim))
        self.q = _matrix(self.heads * head_dim, hidden)
        self.k = _matrix(self.kv_heads * head_dim, hidden)
        self.v = _matrix(self.kv_heads * head_dim, hidden)
        self.o = _matrix(hidden, self.heads * head_dim, scale=depth_scale)
        stack = max(self.num_experts, 1)
        self.router = _matrix(self.num_experts, hidden, scale=0.5) if self.num_experts else None
        self.gate = _matrix(stack, inner, hidden)
        self.up = _matrix(stack, inner, hidden)
        self.down = _matrix(stack, hidden, inner, scale=depth_scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, H]; cos, sin [B, 1, L, head_dim]; mask [B, 1, L, L], added to the scores. Returns x and the router's
        loss (a scalar)."""
        x = x + self.attention(_norm(x, self.attn_norm, self.eps), cos, sin, mask)
        out, loss = self.experts(_norm(x, self.mlp_norm, self.eps))
        return x + out, loss

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(x, weight.to(x.dtype)).view(rows, length, count, self.head_dim)

        q = _norm(heads(self.q, self.heads), self.q_norm, self.eps).transpose(1, 2)
        k = _norm(heads(self.k, self.kv_heads), self.k_norm, self.eps).transpose(1, 2)
        v = heads(self.v, self.kv_heads).transpose(1, 2)
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(out.transpose(1, 2).reshape(rows, length, -1), self.o.to(x.dtype))

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stack, inner, hidden = self.gate.shape
        gate = F.linear(x, self.gate.to(x.dtype).flatten(0, 1))
        up = F.linear(x, self.up.to(x.dtype).flatten(0, 1))
        active = F.silu(gate) * up
        loss = x.new_zeros((), dtype=torch.float32)
        if self.router is not None:
            weights, loss = self.route(x, self.router)
            active = (active.unflatten(-1, (stack, inner)) * weights.unsqueeze(-1)).flatten(-2)
        down = self.down.to(x.dtype).permute(1, 0, 2).reshape(hidden, stack * inner)
        return F.linear(active, down), loss

    def route(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, E] weights, zero for experts that were not chosen, and what keeps the router even and calm: the
        load-balance loss of Switch Transformers, and the square of its logits' log-sum-exp."""
        logits = F.linear(x, router.to(x.dtype)).float()
        probabilities = logits.softmax(-1)
        top, chosen = probabilities.topk(self.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, top)
        used = (weights > 0).float().mean((0, 1)) / self.top_k
        balance = self.num_experts * (used * probabilities.mean((0, 1))).sum()
        return weights.to(x.dtype), 0.01 * balance + 1e-4 * logits.logsumexp(-1).square().mean()


class TinyModel(nn.Module):
    """Tokens to final hidden states. `dtype` is that of the activations."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config, self.dtype = config, dtype
        self.embedding = nn.Parameter(torch.randn(config["vocab_size"], config["hidden_size"]) * 0.02)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"]))
        cos, sin = _rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """All [B, L], integers; a token sees earlier tokens of its own document. Returns [B, L, H] and the routers'
        mean loss."""
        cos, sin = (table[positions].unsqueeze(1).to(self.dtype) for table in (self.cos, self.sin))
        mask = _document_mask(documents, self.dtype)
        x = F.embedding(tokens, self.embedding.to(self.dtype))
        losses = []
        for layer in self.layers:
            x, loss = layer(x, cos, sin, mask)
            losses.append(loss)
        return _norm(x, self.norm, self.config["rms_norm_eps"]), torch.stack(losses).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32; the embedding is the output projection too."""
        return F.linear(hidden, self.embedding.to(hidden.dtype)).float()


def _matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (0.5 * scale / math.sqrt(shape[-1])))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotary_tables(config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim]: the halves are equal."""
    steps = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), config["rope_theta"] ** -steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, L, L]: 0 for what is seen, -inf for the rest. Padding sees padding, so no row is empty."""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~(same & causal), -torch.inf).unsqueeze(1)

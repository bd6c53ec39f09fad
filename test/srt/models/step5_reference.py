"""Step-5's text in plain fp32 torch, written from the published config, the names of its tensors and descriptions of
another server: whole sequences, no cache, no batches. No class of transformers exists for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft_references import rms, rotate
from .harness import SIZES

FULL, WINDOWED = "full_attention", "sliding_attention"
CONFIG: dict[str, Any] = {
    "architectures": ["Step4ForCausalLM"],
    "model_type": "step4",
    "torch_dtype": "float32",
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_attention_groups": 2,
    "head_dim": 24,
    "num_nextn_predict_layers": 1,
    "layer_types": [WINDOWED, FULL, WINDOWED, FULL, WINDOWED],
    "sliding_window": 8,
    "rope_theta": [100.0, 6000.0, 100.0, 6000.0, 100.0],
    "partial_rotary_factors": [1.0, 1 / 3, 1.0, 1 / 3, 1.0],
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
    "fp32_residual_connection": True,
    "norm_dtype": "float32",
    "moe_layers_enum": "1,2",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "swiglu_limits": [7.0] * 5,
    "swiglu_limits_shared": [7.0] * 5,
    "sparse_config": {
        "enabled": True,
        "proxy_dim": 16,
        "topk": 2,
        "region_block_size": 4,
        "num_provider_groups": 2,
        "sparse_indexer_num_heads": 8,
        "sparse_indexer_rope_dim": 8,
        "sparse_indexer_softmax_variant": "ssmax",
        "compression_method": "csa_block_compress",
        "attention_impl": "sparse_gqa",
    },
    "eos_token_id": [1, 2],
    "pad_token_id": 0,
}
"""Requests of more than three regions do not see all of them. The last layer drafts."""
Weights = Mapping[str, Tensor]


def weights(config: Mapping[str, Any] = CONFIG, seed: int = 5) -> dict[str, Tensor]:
    """Random, by the published names; norms are stored minus 1, but for that of index keys."""
    hidden, heads, kv = (config[key] for key in ("hidden_size", "num_attention_heads", "num_attention_groups"))
    dim, sparse, inner = config["head_dim"], config["sparse_config"], config["moe_intermediate_size"]
    index_heads, proxy = sparse["sparse_indexer_num_heads"], sparse["proxy_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    experts = [int(i) for i in config["moe_layers_enum"].split(",")]
    for i, kind in enumerate(config["layer_types"]):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{attn}q_proj.weight": (heads * dim, hidden), f"{attn}o_proj.weight": (hidden, heads * dim)}
        shapes |= {f"{attn}{part}_proj.weight": (kv * dim, hidden) for part in "kv"}
        shapes |= {f"{attn}{part}_norm.weight": (dim,) for part in "qk"}
        shapes[f"{attn}g_proj.weight"] = (heads, hidden)
        if kind == FULL:
            shapes |= {f"{attn}sparse_indexer_q.weight": (index_heads * proxy, hidden)}
            shapes |= {f"{attn}sparse_indexer_{part}.weight": (proxy, hidden) for part in "kz"}
            shapes |= {f"{attn}sparse_indexer_w.weight": (index_heads, hidden), f"{attn}ssmax_s": (heads,)}
            shapes |= {f"{attn}sparse_indexer_q_norm.weight": (proxy,)}
            shapes |= {f"{attn}sparse_indexer_k_norm.{part}": (proxy,) for part in ("weight", "bias")}
        if i in experts:
            count = config["moe_num_experts"]
            shapes |= {f"{at}moe.{part}_proj.weight": (count, inner, hidden) for part in ("gate", "up")}
            shapes |= {f"{at}moe.down_proj.weight": (count, hidden, inner)}
            shapes |= {f"{at}moe.gate.weight": (count, hidden), f"{at}moe.router_bias": (count,)}
        block, size = (
            ("share_expert.", config["share_expert_dim"]) if i in experts else ("mlp.", config["intermediate_size"])
        )
        shapes |= {f"{at}{block}{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
        shapes[f"{at}{block}down_proj.weight"] = (hidden, size)
        if i >= config["num_hidden_layers"]:
            shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "transformer.shared_head.norm")}
            shapes |= {f"{at}eh_proj.weight": (hidden, 2 * hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return {name: t + 1.0 if name.endswith("indexer_k_norm.weight") else t for name, t in tensors.items()}


@dataclass
class Step5:
    """The model. `selects`: False attends to all tokens, for tests of the selection."""

    w: Weights
    config: Mapping[str, Any]
    selects: bool = True

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] of every token."""
        x = self.w["model.embed_tokens.weight"][torch.tensor(list(tokens))]
        experts = self.config["moe_layers_enum"].split(",")
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + self.attention(self.norm(x, f"{at}input_layernorm"), f"{at}self_attn.", i)
            y = self.norm(x, f"{at}post_attention_layernorm")
            x = x + (self.experts(y, at) if str(i) in experts else self.mlp(y, f"{at}mlp."))
        return self.product(self.norm(x, "model.norm"), "lm_head")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[f"{name}.weight"] + 1.0, self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def attention(self, x: Tensor, at: str, layer: int) -> Tensor:
        c, count = self.config, len(x)
        windowed, theta = c["layer_types"][layer] == WINDOWED, c["rope_theta"][layer]
        rotary = int(c["head_dim"] * c["partial_rotary_factors"][layer])
        q, k, v = (self.product(x, f"{at}{part}_proj").unflatten(-1, (-1, c["head_dim"])) for part in "qkv")
        q, k = (rotate(self.norm(y, f"{at}{part}_norm"), theta, rotary) for y, part in ((q, "q"), (k, "k")))
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * c["head_dim"] ** -0.5
        seen = torch.ones(count, count, dtype=torch.bool).tril().expand(len(scores), -1, -1)
        if windowed:
            seen = seen & torch.ones(count, count, dtype=torch.bool).triu(1 - c["sliding_window"])
        elif self.selects:
            seen = seen & self.chosen(x, f"{at}sparse_indexer_", theta).repeat_interleave(groups, 0)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))
        return self.product((out * self.product(x, f"{at}g_proj").sigmoid()[..., None]).flatten(1), f"{at}o_proj")

    def chosen(self, x: Tensor, at: str, theta: float) -> Tensor:
        """Returns which tokens each KV head and token attends to [kv, n, n]: those of the regions with the highest
        scores, of equal ones the first, and those of the region that is open at the token."""
        sparse, count = self.config["sparse_config"], len(x)
        size, rotary = sparse["region_block_size"], sparse["sparse_indexer_rope_dim"]
        kv, whole = sparse["num_provider_groups"], count // size
        q = self.norm(self.product(x, f"{at}q").unflatten(-1, (-1, sparse["proxy_dim"])), f"{at}q_norm")
        q = rotate(q, theta, rotary)
        raw, gates = (self.product(x, f"{at}{part}")[: whole * size].unflatten(0, (whole, size)) for part in "kz")
        pooled = (gates.softmax(1) * raw).sum(1)
        norm = (self.w[f"{at}k_norm.weight"], self.w[f"{at}k_norm.bias"])
        keys = F.layer_norm(pooled, (sparse["proxy_dim"],), *norm, 1e-6)
        # At the position of each region's first token.
        apart = keys.new_zeros(whole * size, keys.shape[1]).index_copy(0, torch.arange(whole) * size, keys)
        keys = rotate(apart[:, None], theta, rotary)[::size, 0]
        factors = self.product(x, f"{at}w")
        scores = (torch.einsum("qhd,rd->qhr", q, keys).relu() * factors[..., None]).unflatten(1, (kv, -1)).sum(2)
        result = torch.zeros(kv, count, count, dtype=torch.bool)
        for t in range(count):
            closed = (t + 1) // size
            result[:, t, closed * size :] = True
            for head in range(kv):
                best = scores[t, head, :closed].sort(stable=True, dim=-1, descending=True).indices[: sparse["topk"]]
                for region in best.tolist():
                    result[head, t, region * size : (region + 1) * size] = True
        return result

    def mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = self.product(x, f"{at}gate_proj"), self.product(x, f"{at}up_proj")
        return self.product(clamped(gate, up), f"{at}down_proj")

    def experts(self, x: Tensor, at: str) -> Tensor:
        c, w = self.config, self.w
        scores = self.product(x, f"{at}moe.gate").sigmoid()
        best = (scores + w[f"{at}moe.router_bias"]).topk(c["moe_top_k"], -1).indices
        factors = scores.gather(1, best)
        factors = factors / factors.sum(-1, keepdim=True) * c["moe_router_scaling_factor"]
        out = self.mlp(x, f"{at}share_expert.")
        for t in range(len(x)):
            for expert, factor in zip(best[t].tolist(), factors[t], strict=True):
                gate, up = (x[t] @ w[f"{at}moe.{part}_proj.weight"][expert].T for part in ("gate", "up"))
                out[t] += factor * (clamped(gate, up) @ w[f"{at}moe.down_proj.weight"][expert].T)
        return out


def clamped(gate: Tensor, up: Tensor, limit: float = 7.0) -> Tensor:
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

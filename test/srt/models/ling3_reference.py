"""Ling 3.0 in plain fp32 torch, written from the published config and descriptions of others' servers: whole sequences,
no cache, no batches. The installed transformers has no class for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .draft_references import attend, chain, rms
from .harness import SIZES

CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "torch_dtype": "float32",
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "layer_group_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_theta": 6000.0,
    "rope_interleave": True,
    "rope_scaling": None,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5,
    "group_norm_size": 1,
    "linear_silu": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "expert_swiglu_limit_list": [0, 0, 0, 0.1, 0.2],
    "share_expert_swiglu_limit_list": [0, 0, 0.3, 0.3, 0.1],
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "mtp_use_kda": False,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Two groups of two layers, and one layer of a third group. Limits are small enough to clamp random weights."""
Weights = Mapping[str, Tensor]


def weights(config: Mapping[str, Any] = CONFIG, seed: int = 5) -> dict[str, Tensor]:
    """Random, by the published names; norms differ from one."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    wide, rank, inner = heads * dim, config["kv_lora_rank"], config["moe_intermediate_size"]
    nope, rope, value = (config[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (config["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        mixer = f"{at}attention."
        if is_recurrent(config, i):
            shapes |= {f"{mixer}{part}_proj.weight": (wide, hidden) for part in "qkvfg"}
            shapes |= {f"{mixer}{part}_conv1d.weight": (wide, 1, config["short_conv_kernel_size"]) for part in "qkv"}
            shapes |= {f"{mixer}A_log": (heads,), f"{mixer}dt_bias": (wide,), f"{mixer}b_proj.weight": (heads, hidden)}
            shapes |= {f"{mixer}o_norm.weight": (dim,), f"{mixer}o_proj.weight": (hidden, wide)}
        else:
            q_rank = config["q_lora_rank"]
            first = "q_b_proj" if q_rank else "q_proj"
            shapes[f"{mixer}{first}.weight"] = (heads * (nope + rope), q_rank or hidden)
            if q_rank:
                shapes |= {f"{mixer}q_a_proj.weight": (q_rank, hidden), f"{mixer}q_a_layernorm.weight": (q_rank,)}
            shapes |= {f"{mixer}kv_a_proj_with_mqa.weight": (rank + rope, hidden)}
            shapes |= {f"{mixer}kv_a_layernorm.weight": (rank,)}
            shapes |= {f"{mixer}kv_b_proj.weight": (heads * (nope + value), rank)}
            shapes |= {f"{mixer}g_proj.weight": (heads, hidden), f"{mixer}dense.weight": (hidden, heads * value)}
        blocks = {f"{at}mlp.": config["intermediate_size"]}
        if i >= config["first_k_dense_replace"]:
            blocks = {f"{at}mlp.experts.{e}.": inner for e in range(config["num_experts"])}
            blocks[f"{at}mlp.shared_experts."] = config["moe_shared_expert_intermediate_size"]
            shapes |= {f"{at}mlp.gate.weight": (config["num_experts"], hidden)}
            shapes |= {f"{at}mlp.gate.expert_bias": (config["num_experts"],)}
        for block, size in blocks.items():
            shapes |= {f"{block}{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
            shapes[f"{block}down_proj.weight"] = (hidden, size)
    if config["num_nextn_predict_layers"]:
        at = f"model.layers.{config['num_hidden_layers']}."
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{at}eh_proj.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = tensor + 1.0
        if name.endswith(("A_log", "dt_bias", "conv1d.weight")):
            tensors[name] = tensor * 4
    return tensors


def is_recurrent(config: Mapping[str, Any], layer: int) -> bool:
    group, count = config["layer_group_size"], config["num_hidden_layers"]
    return (layer + 1) % group != 0 and layer < count // group * group


def save(folder: Path, config: Mapping[str, Any], tensors: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class Ling3:
    """The model, and with `num_nextn_predict_layers` its layer for drafts."""

    w: Weights
    config: Mapping[str, Any]

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The final hidden states [n, H]."""
        x = self.embedded(tokens)
        for i in range(self.config["num_hidden_layers"]):
            x = self.layer(x, i)
        return self.norm(x, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.w["lm_head.weight"].T

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        return self.w["model.word_embeddings.weight"][torch.tensor(list(tokens))]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def layer(self, x: Tensor, i: int) -> Tensor:
        at = f"model.layers.{i}."
        mixer = self.delta if is_recurrent(self.config, i) else self.latent
        x = x + mixer(self.norm(x, f"{at}input_layernorm"), f"{at}attention.")
        y = self.norm(x, f"{at}post_attention_layernorm")
        if i < self.config["first_k_dense_replace"]:
            return x + self.mlp(y, f"{at}mlp.")
        return x + self.experts(y, f"{at}mlp.", i)

    def delta(self, x: Tensor, at: str) -> Tensor:
        """Kimi delta attention, token by token."""
        w, dim = self.w, self.config["head_dim"]
        q, k, v = (
            self.convolved(self.product(x, f"{at}{p}_proj"), f"{at}{p}_conv1d").unflatten(-1, (-1, dim)) for p in "qkv"
        )
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        shifted = (self.product(x, f"{at}f_proj") + w[f"{at}dt_bias"]).unflatten(-1, (-1, dim))
        decays = (self.config["kda_lower_bound"] * (w[f"{at}A_log"].exp()[:, None] * shifted).sigmoid()).exp()
        betas = self.product(x, f"{at}b_proj").sigmoid()
        state, out = q.new_zeros(q.shape[1], dim, dim), []
        for t in range(len(x)):
            state = decays[t][..., None] * state
            wrong = v[t] - (k[t][:, None] @ state)[:, 0]
            state = state + (betas[t][:, None] * k[t])[..., None] * wrong[:, None]
            out.append((q[t][:, None] @ state)[:, 0] * dim**-0.5)
        gate = self.product(x, f"{at}g_proj").sigmoid().unflatten(-1, (-1, dim))
        return self.product((self.norm(torch.stack(out), f"{at}o_norm") * gate).flatten(1), f"{at}o_proj")

    def convolved(self, x: Tensor, at: str) -> Tensor:
        taps = self.w[f"{at}.weight"].shape[-1]
        padded = F.pad(x.T[None], (taps - 1, 0))
        return F.silu(F.conv1d(padded, self.w[f"{at}.weight"], groups=x.shape[1]))[0].T

    def latent(self, x: Tensor, at: str) -> Tensor:
        """Latent attention, with keys and values made of the latents."""
        c = self.config
        nope, rope, rank, heads = (
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["kv_lora_rank"],
            c["num_attention_heads"],
        )
        if c["q_lora_rank"]:
            q = self.product(self.norm(self.product(x, f"{at}q_a_proj"), f"{at}q_a_layernorm"), f"{at}q_b_proj")
        else:
            q = self.product(x, f"{at}q_proj")
        q = q.unflatten(-1, (heads, -1))
        latent, rotary = self.product(x, f"{at}kv_a_proj_with_mqa").split((rank, rope), -1)
        expanded = self.product(self.norm(latent, f"{at}kv_a_layernorm"), f"{at}kv_b_proj").unflatten(-1, (heads, -1))
        rotary = self.turned(rotary[:, None]).expand(-1, heads, -1)
        q = torch.cat((q[..., :nope], self.turned(q[..., nope:])), -1)
        k, v = torch.cat((expanded[..., :nope], rotary), -1), expanded[..., nope:]
        out = attend(q, k, v, (nope + rope) ** -0.5).unflatten(-1, (heads, -1))
        return self.product((out * self.product(x, f"{at}g_proj").sigmoid()[..., None]).flatten(1), f"{at}dense")

    def turned(self, x: Tensor) -> Tensor:
        """x [n, heads, D] at positions 0 .. n - 1; neighbours turn together."""
        dim = x.shape[-1]
        angles = torch.arange(len(x))[:, None] / self.config["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    def mlp(self, x: Tensor, at: str, limit: float = 0.0) -> Tensor:
        gate, up = F.silu(self.product(x, f"{at}gate_proj")), self.product(x, f"{at}up_proj")
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.product(gate * up, f"{at}down_proj")

    def experts(self, x: Tensor, at: str, layer: int) -> Tensor:
        c = self.config
        routed, shared = (
            (*(c[f"{key}_swiglu_limit_list"] or ()), *[0] * c["num_hidden_layers"])[layer]
            for key in ("expert", "share_expert")
        )
        scores = self.product(x, f"{at}gate").sigmoid()
        biased = (scores + self.w[f"{at}gate.expert_bias"]).unflatten(-1, (c["n_group"], -1))
        kept = biased.topk(2, -1).values.sum(-1).topk(c["topk_group"], -1).indices
        hidden = torch.ones(biased.shape[:2], dtype=torch.bool).scatter(1, kept, False)
        chosen = biased.masked_fill(hidden[..., None], -torch.inf).flatten(1).topk(c["num_experts_per_tok"], -1).indices
        factors = scores.gather(1, chosen)
        factors = factors / factors.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        out = self.mlp(x, f"{at}shared_experts.", shared)
        for t in range(len(x)):
            for expert, factor in zip(chosen[t].tolist(), factors[t], strict=True):
                out[t] += factor * self.mlp(x[t : t + 1], f"{at}experts.{expert}.", routed)[0]
        return out

    def draft_rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        last = self.config["num_hidden_layers"]
        at = f"model.layers.{last}."
        pair = (self.norm(self.embedded(ids), f"{at}enorm"), self.norm(features, f"{at}hnorm"))
        x = self.layer(self.product(torch.cat(pair, -1), f"{at}eh_proj"), last)
        return self.norm(x, f"{at}shared_head.norm")

    def draft(self, tokens: list[int], count: int) -> Tensor:
        """Logits [count, V] of greedy draft tokens behind the last token."""
        return chain(tokens, self.hidden(tokens[:-1]), self.draft_rows, self.logits, count)

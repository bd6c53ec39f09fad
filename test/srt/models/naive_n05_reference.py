"""Naive-N0.5 in plain fp32 torch, written from descriptions of its published code and of ports: whole sequences, no
cache, no batches. The installed transformers has no class for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft_references import gated_mlp, rms, rotate
from .harness import SIZES

CONFIG: dict[str, Any] = {
    "architectures": ["NaiveN05FlashForCausalLM"],
    "model_type": "naive_n05_flash",
    "torch_dtype": "float32",
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 0, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "partial_rotary_factor": 0.334,
    "rope_theta": 6000.0,
    "swa_rope_theta": 100.0,
    "sliding_window": 8,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_bias": False,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 6,
    "n_routed_experts": 8,
    "n_shared_experts": None,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Two of three layers without a window come one after the other; requests are longer than the selection."""
Weights = Mapping[str, Tensor]


def weights(config: Mapping[str, Any] = CONFIG, seed: int = 5) -> dict[str, Tensor]:
    """Random, by the published names; norms differ from one."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    dim, value = config["head_dim"], config["v_head_dim"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    for i, windowed in enumerate(config["hybrid_layer_pattern"]):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        kind = "swa_" if windowed else ""
        heads, kv = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{attn}q_proj.weight": (heads * dim, hidden), f"{attn}k_proj.weight": (kv * dim, hidden)}
        shapes |= {f"{attn}v_proj.weight": (kv * value, hidden), f"{attn}o_proj.weight": (hidden, heads * value)}
        if windowed:
            shapes[f"{attn}attention_sink_bias"] = (heads,)
        else:
            shapes |= {f"{attn}indexer.wq.weight": (index_heads * index_dim, hidden)}
            shapes |= {f"{attn}indexer.wk.weight": (index_dim, hidden)}
            shapes |= {f"{attn}indexer.weights_proj.weight": (index_heads, hidden)}
            shapes |= {f"{attn}indexer.k_norm.{part}": (index_dim,) for part in ("weight", "bias")}
        blocks = {f"{at}mlp.": config["intermediate_size"]}
        if config["moe_layer_freq"][i]:
            blocks = {f"{at}mlp.experts.{e}.": inner for e in range(config["n_routed_experts"])}
            shapes |= {f"{at}mlp.gate.weight": (config["n_routed_experts"], hidden)}
            shapes |= {f"{at}mlp.gate.e_score_correction_bias": (config["n_routed_experts"],)}
        for block, size in blocks.items():
            shapes |= {f"{block}{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
            shapes[f"{block}down_proj.weight"] = (hidden, size)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return {name: tensor + 1.0 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


@dataclass
class NaiveN05:
    """The model. `selects`: False attends to all tokens, for tests of the selection."""

    w: Weights
    config: Mapping[str, Any]
    selects: bool = True

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] of every token."""
        x = self.w["model.embed_tokens.weight"][torch.tensor(list(tokens))]
        for i, windowed in enumerate(self.config["hybrid_layer_pattern"]):
            at = f"model.layers.{i}."
            x = x + self.attention(self.norm(x, f"{at}input_layernorm"), f"{at}self_attn.", bool(windowed))
            y = self.norm(x, f"{at}post_attention_layernorm")
            moe = self.config["moe_layer_freq"][i]
            x = x + (self.experts(y, f"{at}mlp.") if moe else gated_mlp(y, self.w, f"{at}mlp."))
        return self.product(self.norm(x, "model.norm"), "lm_head")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[f"{name}.weight"], self.config["layernorm_epsilon"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def attention(self, x: Tensor, at: str, windowed: bool) -> Tensor:
        c, count = self.config, len(x)
        theta = c["swa_rope_theta" if windowed else "rope_theta"]
        rotary = int(c["head_dim"] * c["partial_rotary_factor"])
        q, k, v = (
            self.product(x, f"{at}{part}_proj").unflatten(-1, (-1, size))
            for part, size in (("q", c["head_dim"]), ("k", c["head_dim"]), ("v", c["v_head_dim"]))
        )
        q, k = rotate(q, theta, rotary), rotate(k, theta, rotary)
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v * c["attention_value_scale"]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c["head_dim"] ** -0.5
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if windowed:
            seen &= torch.ones(count, count, dtype=torch.bool).triu(1 - c["sliding_window"])
        elif self.selects:
            seen &= self.chosen(x, f"{at}indexer.", theta, rotary)
        scores = scores.masked_fill(~seen, -torch.inf)
        if windowed:
            sinks = self.w[f"{at}attention_sink_bias"][:, None, None].expand(-1, count, 1)
            scores, v = torch.cat((scores, sinks), -1), F.pad(v, (0, 0, 0, 0, 0, 1))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.product(out.flatten(1), f"{at}o_proj")

    def chosen(self, x: Tensor, at: str, theta: float, rotary: int) -> Tensor:
        """Returns which tokens each token attends to [n, n]: of equal scores the first."""
        c = self.config
        q = rotate(self.product(x, f"{at}wq").unflatten(-1, (c["index_n_heads"], -1)), theta, rotary)
        k = F.layer_norm(
            self.product(x, f"{at}wk"),
            (c["index_head_dim"],),
            self.w[f"{at}k_norm.weight"],
            self.w[f"{at}k_norm.bias"],
            1e-6,
        )
        k = rotate(k[:, None], theta, rotary)[:, 0]
        factors = self.product(x, f"{at}weights_proj") * c["index_n_heads"] ** -0.5
        scores = (torch.einsum("qhd,kd->qhk", q, k).relu() * factors[..., None]).sum(1)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        best = scores.sort(stable=True, dim=-1, descending=True).indices[:, : c["index_topk"]]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)

    def experts(self, x: Tensor, at: str) -> Tensor:
        scores = self.product(x, f"{at}gate").sigmoid()
        best = (scores + self.w[f"{at}gate.e_score_correction_bias"]).topk(self.config["num_experts_per_tok"], -1)
        factors = scores.gather(1, best.indices)
        factors = factors / factors.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for expert, factor in zip(best.indices[t].tolist(), factors[t], strict=True):
                out[t] += factor * gated_mlp(x[t : t + 1], self.w, f"{at}experts.{expert}.")[0]
        return out

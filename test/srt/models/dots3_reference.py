"""dots3-note's text in plain fp32 torch, written from transformers' class and, for the draft layer, which that leaves
out, from descriptions of others' servers: whole sequences, no cache, no batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft_references import chain, gated_mlp, rms
from .harness import SIZES

CONFIG: dict[str, Any] = {
    "architectures": ["Dots3NoteForCausalLM"],
    "model_type": "dots3_note",
    "torch_dtype": "float32",
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 16,
    "sliding_window_size": 7,
    "rope_theta": 6000.0,
    "swa_rope_theta": 100.0,
    "rope_scaling": None,
    "apply_mla_qkv_lora_rescale": True,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
    "use_dsa": True,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Requests are longer than the selection and the window; layers of both kinds have experts."""
Weights = Mapping[str, Tensor]


def sizes_of(config: Mapping[str, Any], windowed: bool) -> dict[str, int]:
    """The sizes of a layer's attention."""
    keys = ("num_attention_heads", "q_lora_rank", "kv_lora_rank")
    keys += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {key: config[f"{'swa_' * windowed}{key}"] for key in keys}


def weights(config: Mapping[str, Any] = CONFIG, seed: int = 5, draft: bool = False) -> dict[str, Tensor]:
    """Random, by the published names; norms differ from one. `draft`: with the layer behind the last one."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    kinds = [*config["layer_types"], *["sliding_attention"] * draft]
    for i, kind in enumerate(kinds):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        heads, q, kv, nope, rope, value = sizes_of(config, kind == "sliding_attention").values()
        shapes |= {f"{attn}q_a_proj.weight": (q, hidden), f"{attn}q_a_layernorm.weight": (q,)}
        shapes |= {f"{attn}q_b_proj.weight": (heads * (nope + rope), q)}
        shapes |= {f"{attn}kv_a_proj_with_mqa.weight": (kv + rope, hidden), f"{attn}kv_a_layernorm.weight": (kv,)}
        shapes |= {f"{attn}k_rope_only_layernorm.weight": (rope,), f"{attn}g_proj.weight": (heads, hidden)}
        shapes |= {f"{attn}kv_b_proj.weight": (heads * (nope + value), kv)}
        shapes |= {f"{attn}o_proj.weight": (hidden, heads * value)}
        if kind != "sliding_attention":
            dim, count = config["index_head_dim"], config["index_n_heads"]
            shapes |= {f"{attn}indexer.wq_b.weight": (count * dim, q), f"{attn}indexer.wk.weight": (dim, hidden)}
            shapes |= {f"{attn}indexer.k_norm.{part}": (dim,) for part in ("weight", "bias")}
            shapes |= {f"{attn}indexer.weights_proj.weight": (count, hidden)}
        blocks = {f"{at}mlp.": config["intermediate_size"]}
        if config["first_k_dense_replace"] <= i < config["num_hidden_layers"]:
            experts = config["n_routed_experts"]
            blocks = {f"{at}mlp.experts.{e}.": config["moe_intermediate_size"] for e in range(experts)}
            blocks |= {f"{at}mlp.shared_experts.": config["moe_shared_expert_intermediate_size"]}
            shapes |= {f"{at}mlp.gate.weight": (experts, hidden), f"{at}mlp.gate.e_score_correction_bias": (experts,)}
        for block, size in blocks.items():
            shapes |= {f"{block}{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
            shapes[f"{block}down_proj.weight"] = (hidden, size)
    if draft:
        at = f"model.layers.{config['num_hidden_layers']}."
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{at}eh_proj.weight": (hidden, 2 * hidden), "model.mtp.embed_tokens.weight": (vocab, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return {name: tensor + 1.0 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


@dataclass
class Dots3:
    """The model, and with the weights of its draft layer what that drafts. `selects`: False attends to all tokens, for
    tests of the selection."""

    w: Weights
    config: Mapping[str, Any]
    selects: bool = True

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] of every token."""
        return self.product(self.hidden(tokens), "lm_head")

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The final hidden states [n, H]."""
        x = self.w["model.embed_tokens.weight"][torch.tensor(list(tokens))]
        for i, kind in enumerate(self.config["layer_types"]):
            x = self.layer(x, i, kind == "sliding_attention")
        return self.norm(x, "model.norm")

    def layer(self, x: Tensor, i: int, windowed: bool) -> Tensor:
        at = f"model.layers.{i}."
        x = x + self.attention(self.norm(x, f"{at}input_layernorm"), f"{at}self_attn.", windowed)
        y = self.norm(x, f"{at}post_attention_layernorm")
        routed = f"{at}mlp.gate.weight" in self.w
        return x + (self.experts(y, f"{at}mlp.") if routed else gated_mlp(y, self.w, f"{at}mlp."))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def attention(self, x: Tensor, at: str, windowed: bool) -> Tensor:
        heads, q_rank, kv_rank, nope, rope, _ = sizes_of(self.config, windowed).values()
        theta, hidden = self.config["swa_rope_theta" if windowed else "rope_theta"], self.config["hidden_size"]
        q_latent = self.norm(self.product(x, f"{at}q_a_proj"), f"{at}q_a_layernorm") * (hidden / q_rank) ** 0.5
        q = self.product(q_latent, f"{at}q_b_proj").unflatten(-1, (heads, -1))
        latent, rotary = self.product(x, f"{at}kv_a_proj_with_mqa").split((kv_rank, rope), -1)
        latent = self.norm(latent, f"{at}kv_a_layernorm") * (hidden / kv_rank) ** 0.5
        rotary = turned(self.norm(rotary, f"{at}k_rope_only_layernorm")[:, None], theta).expand(-1, heads, -1)
        expanded = self.product(latent, f"{at}kv_b_proj").unflatten(-1, (heads, -1))
        q = torch.cat((q[..., :nope], turned(q[..., nope:], theta)), -1)
        k, v = torch.cat((expanded[..., :nope], rotary), -1), expanded[..., nope:]
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if windowed:
            seen &= torch.ones_like(seen).triu(1 - self.config["sliding_window_size"])
        elif self.selects:
            seen &= self.chosen(x, q_latent, f"{at}indexer.", theta, rope)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return self.product((out * self.product(x, f"{at}g_proj").sigmoid()[..., None]).flatten(1), f"{at}o_proj")

    def chosen(self, x: Tensor, q_latent: Tensor, at: str, theta: float, rope: int) -> Tensor:
        """Returns which tokens each token attends to [n, n]: of equal scores the first."""
        c, w = self.config, self.w
        q = self.product(q_latent, f"{at}wq_b").unflatten(-1, (c["index_n_heads"], -1))
        bias = w[f"{at}k_norm.bias"]
        k = F.layer_norm(self.product(x, f"{at}wk"), bias.shape, w[f"{at}k_norm.weight"], bias, 1e-6)[:, None]
        q, k = (torch.cat((turned(t[..., :rope], theta), t[..., rope:]), -1) for t in (q, k))
        factors = self.product(x, f"{at}weights_proj")
        scores = (torch.einsum("qhd,kd->qhk", q, k[:, 0]).relu() * factors[..., None]).sum(1)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        best = scores.sort(stable=True, dim=-1, descending=True).indices[:, : c["index_topk"]]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)

    def experts(self, x: Tensor, at: str) -> Tensor:
        scores = self.product(x, f"{at}gate").sigmoid()
        biased = scores + self.w[f"{at}gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"], -1).indices
        factors = scores.gather(1, chosen)
        factors = factors / factors.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        out = gated_mlp(x, self.w, f"{at}shared_experts.")
        for t in range(len(x)):
            for expert, factor in zip(chosen[t].tolist(), factors[t], strict=True):
                out[t] += factor * gated_mlp(x[t : t + 1], self.w, f"{at}experts.{expert}.")[0]
        return out

    def draft_rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        last = self.config["num_hidden_layers"]
        at, own = f"model.layers.{last}.", self.w.get("model.mtp.embed_tokens.weight")
        table = self.w["model.embed_tokens.weight"] if own is None else own
        pair = (self.norm(table[torch.tensor(list(ids))], f"{at}enorm"), self.norm(features, f"{at}hnorm"))
        x = self.layer(self.product(torch.cat(pair, -1), f"{at}eh_proj"), last, windowed=True)
        return self.norm(x, f"{at}shared_head.norm")

    def draft(self, tokens: list[int], count: int) -> Tensor:
        """Logits [count, V] of greedy draft tokens behind the last token."""
        head = self.w["lm_head.weight"].T
        return chain(tokens, self.hidden(tokens[:-1]), self.draft_rows, lambda state: state @ head, count)


def turned(x: Tensor, theta: float) -> Tensor:
    """x [n, heads, D] at positions 0 .. n - 1; neighbours turn together."""
    dim = x.shape[-1]
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

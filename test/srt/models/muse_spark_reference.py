"""Muse-Spark's text in plain fp32 torch, written from its published config and compared with transformers' class where
the installed one has it: whole sequences, no cache, no batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft_references import gated_mlp, rotate
from .harness import SIZES

TEXT: dict[str, Any] = {
    "model_type": "muse_spark_text",
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "layer_rope_theta": [0, 6000.0, 6000.0, 6000.0, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 6000.0},
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_hidden_size": 48,
    "routed_scaling_factor": 1.5,
    "residual_gate_temperature": 0.3,
    "qk_scale_factor": 2.5,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 20.0,
    "post_norm_eps": 1e-8,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIG: dict[str, Any] = {
    "architectures": ["MuseSparkForConditionalGeneration"],
    "model_type": "muse_spark",
    "dtype": "float32",
    "image_token_id": 250,
    "video_token_id": 251,
    "audio_token_id": 252,
    "text_config": TEXT,
}
AT = "model.language_model."
Weights = Mapping[str, Tensor]


def with_text(**keys: Any) -> dict[str, Any]:
    """CONFIG with other keys of the text."""
    return CONFIG | {"text_config": TEXT | keys}


def weights(config: Mapping[str, Any] = CONFIG, seed: int = 5) -> dict[str, Tensor]:
    """Random, by the names that transformers writes; norms differ from one, and gates from one another."""
    c = config["text_config"]
    hidden, wide, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"]
    width, inner, number = c["moe_hidden_size"], c["moe_intermediate_size"], c["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{AT}embed_tokens.weight": (c["vocab_size"], hidden)}
    shapes |= {f"{AT}norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}
    for i, kind in enumerate(c["mlp_layer_types"]):
        at = f"{AT}layers.{i}."
        norms = ("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        shapes |= {f"{at}post_{block}_residual_gate.gate": (hidden,) for block in ("attention", "feedforward")}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (wide, hidden) for part in ("q", "gate")}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (kv * c["head_dim"], hidden) for part in ("k", "v")}
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, wide)
        mlp = f"{at}mlp."
        if kind == "dense":
            shapes |= {f"{mlp}{part}_proj.weight": (c["intermediate_size"], hidden) for part in ("gate", "up")}
            shapes[f"{mlp}down_proj.weight"] = (hidden, c["intermediate_size"])
            continue
        shapes |= {f"{mlp}gate.weight": (number, hidden), f"{mlp}gate.e_score_correction_bias": (number,)}
        shapes |= {f"{mlp}pre_expert_proj.weight": (width, hidden), f"{mlp}post_expert_proj.weight": (hidden, width)}
        shapes |= {f"{mlp}pre_expert_norm.weight": (width,), f"{mlp}experts.post_expert_norm.weight": (width,)}
        shapes |= {f"{mlp}experts.gate_up_proj": (number, 2 * inner, width)}
        shapes |= {f"{mlp}experts.down_proj": (number, width, inner)}
    generator = torch.Generator().manual_seed(seed)
    spread = 0.15 if hidden < 128 else 0.05
    tensors = {name: torch.randn(shape, generator=generator) * spread for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name == f"{AT}norm.weight":
            tensors[name] = tensor + 1.0
        if name.endswith(("residual_gate.gate", "post_expert_norm.weight", "post_feedforward_layernorm.weight")):
            tensors[name] = tensor * 3
    return tensors


def unit(x: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


@dataclass
class MuseSpark:
    """`left_out`: mechanisms that are not computed, of "norms of experts", "norm of outputs", "gates", "kept"."""

    w: Weights
    config: Mapping[str, Any]
    left_out: Sequence[str] = ()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        c = self.config["text_config"]
        x = unit(self.w[f"{AT}embed_tokens.weight"][torch.tensor(tokens)], c["rms_norm_eps"])
        for i in range(c["num_hidden_layers"]):
            x = self.layer(x, i)
        x = unit(x, c["rms_norm_eps"]) * self.w[f"{AT}norm.weight"]
        cap = c["final_logit_softcapping"]
        return cap * torch.tanh(c["output_multiplier"] * (x @ self.w["lm_head.weight"].T) / cap)

    def layer(self, x: Tensor, i: int) -> Tensor:
        c, w, at = self.config["text_config"], self.w, f"{AT}layers.{i}."
        out = unit(self.attention(self.normed(x, f"{at}input_layernorm"), i), c["post_norm_eps"])
        x = self.added(x, out, f"{at}post_attention_residual_gate.gate")
        rows = self.normed(x, f"{at}pre_feedforward_layernorm")
        sparse = c["mlp_layer_types"][i] == "sparse"
        out = self.experts(rows, f"{at}mlp.") if sparse else gated_mlp(rows, w, f"{at}mlp.")
        out = unit(out * (1 + w[f"{at}post_feedforward_layernorm.weight"]), c["post_norm_eps"])
        return self.added(x, out, f"{at}post_feedforward_residual_gate.gate")

    def normed(self, x: Tensor, name: str) -> Tensor:
        return unit(x, self.config["text_config"]["rms_norm_eps"]) * (1 + self.w[f"{name}.weight"])

    def added(self, x: Tensor, out: Tensor, name: str) -> Tensor:
        logit = self.w[name] / self.config["text_config"]["residual_gate_temperature"]
        b = torch.full_like(logit, 0.5) if "gates" in self.left_out else logit.sigmoid()
        a = ((1 - b) * (1 + b)).clamp(min=1e-3).sqrt()
        return (x if "kept" in self.left_out else a * x) + b * out

    def attention(self, x: Tensor, i: int) -> Tensor:
        c, at = self.config["text_config"], f"{AT}layers.{i}.self_attn."
        q, k, v = (
            (x @ self.w[f"{at}{part}_proj.weight"].T).unflatten(-1, (-1, c["head_dim"])) for part in ("q", "k", "v")
        )
        q, k = unit(q, c["rms_norm_eps"]) * c["qk_scale_factor"], unit(k, c["rms_norm_eps"])
        if theta := c["layer_rope_theta"][i]:
            q, k = rotate(q, theta), rotate(k, theta)
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c["head_dim"] ** -0.5
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        windowed = c["layer_types"][i] == "sliding_attention"
        seen = (distance >= 0) & (distance < (c["sliding_window"] if windowed else len(x)))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        out = out if "norm of outputs" in self.left_out else unit(out, c["rms_norm_eps"])
        return (out.flatten(1) * (x @ self.w[f"{at}gate_proj.weight"].T).sigmoid()) @ self.w[f"{at}o_proj.weight"].T

    def experts(self, x: Tensor, at: str) -> Tensor:
        c, w = self.config["text_config"], self.w
        scores = (c["output_multiplier"] * (x @ w[f"{at}gate.weight"].T)).sigmoid()
        chosen = (scores + w[f"{at}gate.e_score_correction_bias"]).topk(c["num_experts_per_tok"], dim=-1).indices
        shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        shares = c["routed_scaling_factor"] * shares / shares.sum(-1, keepdim=True)
        rows = self.normed(x @ w[f"{at}pre_expert_proj.weight"].T, f"{at}pre_expert_norm")
        total = torch.zeros_like(rows)
        for expert in range(c["num_local_experts"]):
            gate, up = (rows @ w[f"{at}experts.gate_up_proj"][expert].T).chunk(2, -1)
            out = (F.silu(gate) * up) @ w[f"{at}experts.down_proj"][expert].T
            if "norms of experts" not in self.left_out:
                out = unit(out * (1 + w[f"{at}experts.post_expert_norm.weight"]), c["post_norm_eps"])
            total += shares[:, expert, None] * out
        return total @ w[f"{at}post_expert_proj.weight"].T

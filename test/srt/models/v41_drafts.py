"""The DSpark draft that DeepSeek-V4.1's checkpoints bring, written small as it is published, and what it proposes
in plain fp32 torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .v41_reference import TEXT, V41, Tensors, layer_shapes, random_tensors, rms, rotated, save_v41

STAGES, RANK, BLOCK, MASK = 3, 12, 5, 201
TARGETS = (4, 6, 7)
"""Layers before which the draft reads the streams; the last one's are those behind the last but one."""
KEYS: dict[str, Any] = {
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": MASK,
    "dspark_target_layer_ids": list(TARGETS),
    "dspark_markov_rank": RANK,
    "dspark_n_routed_experts": 3,
    "dspark_num_experts_per_tok": 1,
}


@dataclass
class V41DSpark:
    target: V41

    @torch.inference_mode()
    def drafting_rows(self, tokens: Sequence[int], count: int) -> Tensor:
        """The rows [count, H] that make the draft tokens."""
        model, c, w, n = self.target, self.target.c, self.target.w, len(tokens) - 1
        eps = c["rms_norm_eps"]
        before, _ = model.streams(tokens[:-1])
        joined = torch.cat([before[layer].mean(1) for layer in TARGETS], -1)
        context = rms(joined @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"], eps)
        rows = torch.tensor([tokens[-1], *[MASK] * (BLOCK - 1)])
        h = w["embed.weight"][rows][:, None].repeat(1, c["hc_mult"], 1)
        pre = F.one_hot(torch.zeros(BLOCK, dtype=torch.int64), c["hc_mult"]).float()
        for stage in range(STAGES):
            at = f"mtp.{stage}."
            attend = lambda x, at=at: self.attention(f"{at}attn.", x, context, n)  # noqa: E731
            h, pre = model.layer(at, h, pre, attend, c["dspark_num_experts_per_tok"])
        return rms((pre[..., None] * h).sum(1), w[f"mtp.{STAGES - 1}.norm.weight"], eps)[:count]

    def attention(self, at: str, x: Tensor, context: Tensor, n: int) -> Tensor:
        model, c, w = self.target, self.target.c, self.target.w
        eps, before = c["rms_norm_eps"], model.angles(torch.arange(n), False)
        angles = model.angles(torch.arange(n, n + len(x)), False)

        def keys(of: Tensor, turn: Tensor) -> Tensor:
            return rotated(rms(of @ w[f"{at}wkv.weight"].T, w[f"{at}kv_norm.weight"], eps), turn)

        latent = rms(x @ w[f"{at}wq_a.weight"].T, w[f"{at}q_norm.weight"], eps)
        q = rotated((latent @ w[f"{at}wq_b.weight"].T).unflatten(-1, (c["num_attention_heads"], -1)), angles)
        seen = torch.cat((keys(context, before)[-c["sliding_window"] :], keys(x, angles)))
        return model.attended(at, q, seen, torch.ones(len(x), len(seen), dtype=torch.bool), angles)

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        w, at = self.target.w, f"mtp.{STAGES - 1}.markov_head."
        given, previous = [], tokens[-1]
        for row in self.drafting_rows(tokens, count) @ w["head.weight"].T:
            given.append(row + w[f"{at}embed.weight"][previous] @ w[f"{at}head.weight"].T)
            previous = int(given[-1].argmax())
        return torch.stack(given)


def save_v41_draft(folder: Path, more: Tensors | None = None, **changes: Any) -> V41DSpark:
    """A target with the draft that its checkpoint brings; `more`: tensors beside theirs."""
    c = {**TEXT, **KEYS, **changes}
    hidden, last = c["hidden_size"], f"mtp.{STAGES - 1}"
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.0.main_proj.weight": (hidden, len(TARGETS) * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}.norm.weight": (hidden,),
        f"{last}.markov_head.embed.weight": (c["vocab_size"], RANK),
        f"{last}.markov_head.head.weight": (c["vocab_size"], RANK),
        f"{last}.confidence_head.proj.weight": (1, hidden + RANK),
    }
    for stage in range(STAGES):
        shapes |= layer_shapes(c, f"mtp.{stage}.", -1, c["dspark_n_routed_experts"])
    return V41DSpark(save_v41(folder, {**random_tensors(shapes, seed=9), **(more or {})}, **KEYS, **changes))

"""What latents in eight and in four bits cost, layer by layer: attention with random weights, in fp32 on a CPU.

    PYTHONPATH=python:test python lab/kernels/latent_cache_errors.py

Models have the widths of latents, index keys and rotary columns of the published ones, and few narrow layers. Each
layer gets the inputs that it has over a wide cache, so the errors are its own: of what it stores, and of what its
indexer selects otherwise. Prompts are read in three pieces and followed by decoding. Prints the median error of a
token's output behind the first piece, relative to its row, with every entry selected and with as few as the models'
indexers select.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from srt.models.harness import TinyRunner, plan_for, random_tokens, save_tiny

BOTH = ("fp8_e4m3", "fp4_e2m1")
MODELS: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "DeepSeek-V4": ("deepseek_v4_wide", {"index_topk": 256}, BOTH),
    "GLM-5.3-Flash": ("glm5_next_wide", {"index_topk": 256}, BOTH),
    "Qwen3.8-Flash-Next": ("qwen4_exp_wide", {"indexer_budget": 256}, BOTH[:1]),
    "GLM-5": ("glm_moe_dsa_wide", {"index_topk": 256}, BOTH),
    "DeepSeek-V3": ("deepseek_v3_wide", {}, BOTH),
}
"""The model, what makes its indexer select all, and types of its cache."""
TOKENS, FIRST = random_tokens(120, seed=1), 60
ATTENTION = ("CompressedAttention", "PooledLatentAttention", "PooledSparseAttention", "LatentAttention")


class Kept:
    """A block that keeps its inputs and what it returns, or (`given`) gets the inputs that another one has kept."""

    def __init__(self, block: Any, given: list[torch.Tensor] | None = None) -> None:
        self.block, self.given = block, None if given is None else list(given)
        self.inputs, self.outputs = list[torch.Tensor](), list[torch.Tensor]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def __call__(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x if self.given is None else self.given.pop(0)
        self.inputs.append(x.clone())
        out: torch.Tensor = self.block(x, *args)
        self.outputs.append(out.clone())
        return out


def attention_of(folder: Path, kv_dtype: str, given: list[Kept] | None = None) -> list[Kept]:
    """Returns the attention layers after the steps."""
    runner, kept = TinyRunner(plan_for(folder, kv_cache_dtype=kv_dtype)), list[Kept]()
    for layer in runner.model.layers:
        for i, (name, block) in enumerate(layer.blocks):
            if type(block).__name__ in ATTENTION:
                kept.append(Kept(block, None if given is None else given[len(kept)].inputs))
                layer.blocks[i] = (name, kept[-1])
    for piece in (TOKENS[:FIRST], TOKENS[FIRST : FIRST + 3], TOKENS[FIRST + 3 : 100]):
        runner.extend({1: piece})
    for token in TOKENS[100:]:
        runner.decode({1: token})
    return kept


def error(layer: Kept, wide: Kept) -> float:
    got, want = (torch.cat([out.flatten(1) for out in each.outputs]) for each in (layer, wide))
    got, want = got[FIRST:], want[FIRST:]  # tokens of a first piece may attend to each other as they are
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def main() -> None:
    for name, (tiny, all_of, kv_dtypes) in MODELS.items():
        for selection, changes in (("all", all_of), ("some", {})) if all_of else (("all", {}),):
            with tempfile.TemporaryDirectory() as folder:
                save_tiny(tiny, Path(folder), **changes)
                wide = attention_of(Path(folder), "auto")
                for kv_dtype in kv_dtypes:
                    layers = attention_of(Path(folder), kv_dtype, wide)
                    errors = ", ".join(f"{100 * error(*pair):.1f}%" for pair in zip(layers, wide, strict=True))
                    print(f"{name}, {selection} selected, {kv_dtype}: {errors}", flush=True)


if __name__ == "__main__":
    main()

"""The model architectures that we serve, with the facts that their published configs may leave out. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Values that a `config.json` of this architecture means when it does not say."""

    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    num_key_value_heads: int | None = None
    """None: as many as attention heads."""
    tie_word_embeddings: bool = False
    is_moe: bool = False


SUPPORTED: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "Qwen3ForCausalLM": Architecture(head_dim=128, num_key_value_heads=32),
    "Qwen3MoeForCausalLM": Architecture(num_key_value_heads=4, is_moe=True),
}
"""`architectures[0]` of config.json -> its defaults. The model registry has exactly these keys."""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(SUPPORTED))

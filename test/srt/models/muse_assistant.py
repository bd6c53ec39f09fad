"""Muse-Glimmer's assistant, small, with random weights, and what transformers' class makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .draft_references import Target
from .harness import SIZES

if TYPE_CHECKING:
    from transformers import MuseGlimmerAssistantModel

BLOCK, WINDOW = 5, 12
KEYS: dict[str, Any] = {
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "block_size": BLOCK,
    "mask_token_id": 201,
    "target_layer_ids": [1, 3, 6],
}
"""Heads, rotation, eps and MLP are not the target's."""


def save_assistant(folder: Path, **keys: Any) -> MuseGlimmerAssistantModel:
    """Saves one as transformers does, every weight of which is random."""
    # Slow, and ranks of tests with it do not need it.
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(5)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**KEYS | keys)).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return model


@dataclass
class Assistant:
    """The logits of the draft tokens behind the last token. Without `own_masks` no row of a window sees further back
    than the window before the block's end; the class lets each row see the window before itself, and a token more."""

    model: MuseGlimmerAssistantModel
    target: Target
    own_masks: bool = False

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        config, (streams, _) = self.model.config, self.target.streams(tokens[:-1])
        context = torch.cat([streams[layer] for layer in config.target_layer_ids], dim=-1)
        noise = [tokens[-1], *[config.mask_token_id] * (config.block_size - 1)]
        rows = self.model(
            noise_embeds=self.target.embedded(noise)[None],
            context_hidden_states=context[None],
            attention_mask=None if self.own_masks else self.masks(noise, len(context)),
        ).last_hidden_state[0]
        return self.target.logits(rows[1 : 1 + count])

    def masks(self, noise: Sequence[int], before: int) -> dict[str, Tensor]:
        seen = torch.ones((1, 1, len(noise), before + len(noise)), dtype=torch.bool)
        near = torch.arange(seen.shape[-1]) >= seen.shape[-1] - self.model.config.sliding_window
        return {"full_attention": seen, "sliding_attention": seen & near}

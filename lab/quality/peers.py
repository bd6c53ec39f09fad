"""The same text in transformers, from the same checkpoint in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def hidden_states(checkpoint: str, prompts: Sequence[Sequence[int]], device: str) -> list[torch.Tensor]:
    """Returns the final hidden states [n, H] fp32 of each prompt, as transformers computes them in bfloat16."""
    from transformers import AutoModelForCausalLM  # takes seconds, which other cells need not spend

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    rows = (torch.tensor([list(ids)], device=device) for ids in prompts)
    return [model.model(ids).last_hidden_state[0].float() for ids in rows]

"""Prompt attention over expanded latent keys and values with this project's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.triton_ops.latent_prompt import latent_prompt_attention

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


class TritonLatentPrompt:
    """Runs `latent_prompt_attention` with the planned tile, or its fallbacks if a launch fails. Implements
    LatentPromptOp."""

    def __init__(self, plan: Plan) -> None:
        self._ladder = plan.fallbacks("latent_prompt_attention")

    def __call__(self, *args: Any, **options: Any) -> None:
        self._ladder.run(lambda tile: latent_prompt_attention(*args, **options, tile=tile))

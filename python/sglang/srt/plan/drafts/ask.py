"""Turns the flags for speculative decoding into the draft that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative import DSPARK, SpeculativeSettings
from sglang.srt.errors import UserError
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan.drafts.config import DraftConfig, read_draft_config
from sglang.srt.plan.drafts.describe import describe_draft
from sglang.srt.plan.drafts.description import DraftDescription
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.speculation import speculative_settings
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class RequestedDraft:
    """The draft that the flags ask for. `num_tokens`: tokens of a request in a step, the last sampled one included."""

    config: DraftConfig
    description: DraftDescription
    num_tokens: int

    def describe(self, schemes: list[str]) -> dict[str, Any]:
        """Describes the draft for /server_info. `schemes`: the number formats of its weights."""
        return {
            "kind": self.description.kind,
            "model_path": self.config.model_path,
            "architecture": self.description.model.architecture,
            "layers": len(self.description.model.layers),
            "aux_layers": list(self.description.aux_layers),
            "vocabulary": self.description.head_size or self.description.vocab_size,
            "weights": schemes,
        }


def asked_draft(args: ServerArgs, model: ModelConfig, target: ModelDescription, apart: str) -> RequestedDraft | None:
    """Returns the draft that the flags ask for; None: there is none, or none with weights. `apart`: `keep_shared_apart`
    of `describe_model`. Raises UserError for a draft that is missing, malformed, not computed here or made for another
    model."""
    settings = speculative_settings(args, model.architecture)
    config = None if settings is None else read_draft_config(settings, model, args.download_dir)
    if settings is None or config is None:
        return None
    config = replace(config, keep_shared_apart=apart)
    draft = describe_draft(config, target)
    _check_depth(settings)
    return RequestedDraft(config, draft, settings.num_draft_tokens)


def _check_depth(settings: SpeculativeSettings) -> None:
    """Raises UserError if more draft tokens are asked for than the rows of a trained block make."""
    if not settings.block_size or settings.num_steps <= settings.block_draft_tokens:
        return
    if settings.algorithm == DSPARK:
        raise UserError(
            f"the draft was trained for blocks of {settings.block_draft_tokens} draft tokens, of which"
            f" {settings.num_steps} cannot be asked: deeper blocks spoil the draft tokens at every place. Pass"
            f" --speculative-dspark-block-size {settings.block_draft_tokens} or fewer."
        )
    raise UserError(
        f"the draft was trained for blocks of {settings.block_size} tokens, of which {settings.num_draft_tokens}"
        f" cannot be asked; pass --speculative-num-draft-tokens {settings.block_draft_tokens + 1} or fewer."
    )


def check_backends(choices: Mapping[str, Choice], draft: DraftDescription | None) -> None:
    """Raises UserError where the target's and the draft's heads would need two attention backends, or the backend
    supports only one shape of heads, or no blocks."""
    if draft is None:
        return
    for op in ("decode_attention", "extend_attention"):
        chosen = [choice for key, choice in choices.items() if key.partition("/")[0] == op]
        entries = {choice.spec.entry for choice in chosen}
        if draft.rows_a_request > 1 and any(choice.name.startswith("flashinfer") for choice in chosen):
            raise UserError(
                f"{draft.kind} drafts attend as {draft.rows_a_request} times as many heads, which flashinfer has no"
                " kernels for; pass --attention-backend triton."
            )
        if len(entries) > 1 or (len(chosen) > 1 and any("flashinfer_mla" in entry for entry in entries)):
            names = " and ".join(sorted({choice.name for choice in chosen}))
            raise UserError(
                f"the heads of the model and of its draft differ, and {names} cannot attend with both; pass"
                " --attention-backend triton, which can."
            )

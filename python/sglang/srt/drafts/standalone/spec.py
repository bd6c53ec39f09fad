"""A small model of the same vocabulary that drafts for a large one (STANDALONE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.configs.speculative import STANDALONE
from sglang.srt.drafts.config import DraftConfig
from sglang.srt.drafts.form import Form
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.plan.layer_spec import ABSENT
from sglang.srt.plan.model_description import ModelDescription, describe_model

PADDING = 1024
"""Vocabularies whose sizes differ by less count as equal: checkpoints round the number of rows up, so smaller
differences are unused rows."""


@dataclass(frozen=True, slots=True)
class Separate(Form):
    """A draft model of the same vocabulary that reads nothing of the target but its tokens (STANDALONE)."""

    computed_by = "sglang.srt.drafts.standalone.model:StandaloneDraft"
    separate = True
    next_tokens_read = 0

    def passes(self, i: int) -> Sequence[tuple[int, bool]]:
        one = (0, False)
        return (one,) if i else ((0, True), one)  # the first draft token is a row of its own


def describe_standalone(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes a draft model of its own. Raises UserError for models that are not served, have states, or another
    vocabulary."""
    model = describe_model(config.values, config.quantization, config.keep_shared_apart, config.source)
    model.require_served()
    if abs(model.vocab_size - target.vocab_size) >= PADDING:
        raise UserError(
            f"{config.source}: vocab_size is {model.vocab_size}, and the model's {target.vocab_size}: a STANDALONE"
            " draft must have the model's vocabulary. Give a smaller model of the same family."
        )
    others = {type(layer.mixer).__name__ for layer in model.layers if layer.mixer != ABSENT}
    recurrent = sorted(others - {GQA.__name__, MLA.__name__})
    if recurrent:
        raise UserError(
            f"{config.source}: a STANDALONE draft with {', '.join(recurrent)} layers is not supported: their states"
            " cannot be taken back. Give a model of attention layers alone."
        )
    return DraftDescription(
        kind=STANDALONE,
        model=replace(model, first_stage=True, last_stage=True),
        form=Separate(),
        first_layer=len(target.layers),
        vocab_size=target.vocab_size,
        own_embedding=True,
    )

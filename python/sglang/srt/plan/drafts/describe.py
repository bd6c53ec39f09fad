"""Makes the description of the draft that the flags ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.configs.speculative import DFLASH, DSPARK, EAGLE, EAGLE3, STANDALONE
from sglang.srt.errors import UserError
from sglang.srt.plan.drafts.config import MTP, DraftConfig
from sglang.srt.plan.drafts.description import DraftDescription
from sglang.srt.plan.drafts.dflash import describe_dflash
from sglang.srt.plan.drafts.dspark import describe_dspark
from sglang.srt.plan.drafts.eagle import EAGLE_ARCHITECTURES, describe_eagle, describe_eagle3
from sglang.srt.plan.drafts.gemma_assistant import ASSISTANT_ARCHITECTURES, describe_assistant
from sglang.srt.plan.drafts.mtp import describe_mtp
from sglang.srt.plan.drafts.standalone import describe_standalone
from sglang.srt.plan.model_description import ModelDescription, architecture_of

_KINDS: Mapping[str, Callable[[DraftConfig, ModelDescription], DraftDescription]] = {
    EAGLE: describe_eagle,
    EAGLE3: describe_eagle3,
    DFLASH: describe_dflash,
    DSPARK: describe_dspark,
    MTP: describe_mtp,
    STANDALONE: describe_standalone,
}


def describe_draft(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes the draft. Raises UserError that names the key, tensor or architecture that does not match the target,
    or what the target lacks."""
    kind = config.kind
    several = any(layer.residual.streams > 1 for layer in target.layers)
    gated = isinstance(target.layers[-1].residual, GatedStreams)
    head = kind == EAGLE3 or (kind == EAGLE and architecture_of(config.reader()) in EAGLE_ARCHITECTURES)
    if several and (head or (gated and kind not in (MTP, STANDALONE))):
        raise UserError(
            f"{target.architecture} hands several streams from layer to layer, which no {kind} draft takes here. Use"
            " --speculative-algorithm NEXTN or DSPARK with the draft that the checkpoint brings, or NGRAM."
        )
    if kind == EAGLE and architecture_of(config.reader()) in ASSISTANT_ARCHITECTURES:
        return describe_assistant(config, target)
    # EAGLE also asks for checkpoints that hold nothing but MTP layers.
    if kind == EAGLE and architecture_of(config.reader()) not in EAGLE_ARCHITECTURES and _is_of_family(config, target):
        kind = MTP
    return _KINDS[kind](config, target)


def _is_of_family(config: DraftConfig, target: ModelDescription) -> bool:
    return architecture_of(config.reader()).removesuffix("NextN") == target.architecture

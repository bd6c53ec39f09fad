"""The algorithms with which a draft may be asked for, and the reader of each. What the reader returns has a form, which
names the draft's model and its drafter (`drafts.form.Form`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.configs.speculative import DFLASH, DSPARK, EAGLE, EAGLE3, STANDALONE
from sglang.srt.drafts.block.readers.dflash import describe_dflash
from sglang.srt.drafts.block.readers.dspark import describe_dspark
from sglang.srt.drafts.block.readers.speculators import plain_values
from sglang.srt.drafts.config import MTP, DraftConfig
from sglang.srt.drafts.eagle.reader import EAGLE_ARCHITECTURES, describe_eagle, describe_eagle3
from sglang.srt.drafts.kv_sharing.spec import ASSISTANT_ARCHITECTURES, KV_SHARING, describe_assistant
from sglang.srt.drafts.mtp.reader import describe_mtp
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.drafts.standalone.spec import describe_standalone
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import ModelDescription, architecture_of

READERS: Mapping[str, Callable[[DraftConfig, ModelDescription], DraftDescription]] = {
    STANDALONE: describe_standalone,
    EAGLE: describe_eagle,
    EAGLE3: describe_eagle3,
    KV_SHARING: describe_assistant,
    MTP: describe_mtp,
    DFLASH: describe_dflash,
    DSPARK: describe_dspark,
}
"""NGRAM has no draft; `drafts.create` makes its drafter."""


def describe_draft(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes the draft. Raises UserError that names the key, tensor or architecture that does not match the target,
    or what the target lacks."""
    if not config.in_target:
        config = replace(config, values=plain_values(config.values, config.kind, config.source))
    algorithm = _algorithm(config, target)
    several = any(layer.residual.streams > 1 for layer in target.layers)
    gated = isinstance(target.layers[-1].residual, GatedStreams)
    head = algorithm == EAGLE3 or (algorithm == EAGLE and architecture_of(config.reader()) in EAGLE_ARCHITECTURES)
    if several and (head or (gated and config.kind not in (MTP, STANDALONE))):
        raise UserError(
            f"{target.architecture} hands several streams from layer to layer, which no {config.kind} draft takes here."
            " Use --speculative-algorithm NEXTN or DSPARK with the draft that the checkpoint brings, or NGRAM."
        )
    return READERS[algorithm](config, target)


def _algorithm(config: DraftConfig, target: ModelDescription) -> str:
    """Returns the key of the draft in READERS. EAGLE also asks for checkpoints that hold nothing but a model's MTP
    layers, and for assistants."""
    if config.kind != EAGLE:
        return config.kind
    architecture = architecture_of(config.reader())
    if architecture in ASSISTANT_ARCHITECTURES:
        return KV_SHARING
    of_family = architecture.removesuffix("NextN") == target.architecture
    return MTP if of_family and architecture not in EAGLE_ARCHITECTURES else EAGLE

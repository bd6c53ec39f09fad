"""Gemma 4's assistants: makes their descriptions from config.json.

Source: the format in which Google publishes them (`Gemma4AssistantForCausalLM`), as transformers reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.config import DraftConfig, check_sizes
from sglang.srt.drafts.form import Form
from sglang.srt.drafts.spec import DraftDescription, finished
from sglang.srt.errors import UserError
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.families.gemma4 import GEMMA4
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.masks import windowed
from sglang.srt.plan.model_description import ModelDescription, describe_as
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, WeightMap
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

KV_SHARING = "FROZEN_KV_MTP"
ASSISTANT_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_NAMES = WeightMap(
    {
        "embed": "model.embed_tokens",
        "fc": "pre_projection",
        "back": "post_projection",
        "norm": "model.norm",
        "lm_head": "model.embed_tokens",
        "centroids": "masked_embedding.centroids",
        "masked": "masked_embedding",
    },
    {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **NORMS_AROUND, "end": ""},
    unread=("lm_head.",),
)
_FAMILY = replace(GEMMA4, model_types=(), architectures=ASSISTANT_ARCHITECTURES, names=_NAMES)


@dataclass(frozen=True, slots=True)
class Assistant(Form):
    """A draft without keys and values of its own: its layers attend to those of the target's last layers, which do not
    change while it drafts (Gemma 4's assistants; reference: transformers' Gemma4AssistantForCausalLM). A token's
    embedding and features, both of the target's width, are projected side by side to the first layer's input. The
    output is projected back to the features of the next draft token; the first features are the target's final hidden
    states.

    `groups` > 0: tokens are divided into that many groups, each with a centroid, and only tokens of the `kept`
    likeliest groups are drafted. `vocab_size`: tokens of all groups.
    """

    feature_size: int
    groups: int = 0
    kept: int = 0
    vocab_size: int = 0

    computed_by = "sglang.srt.drafts.kv_sharing.model:AssistantDraft"
    proposed_by = "sglang.srt.drafts.kv_sharing.drafter:KVSharingAssistant"
    reads_caches = True

    def passes(self, i: int) -> Sequence[tuple[int, bool]]:
        return ((0, False),)

    def weights(self, hidden_size: int) -> Weights:
        projections = (
            Matrix("fc", ("",), hidden_size, 2 * self.feature_size, quantized=False),
            Matrix("back", ("",), self.feature_size, hidden_size, quantized=False),
        )
        if not self.groups:
            return projections
        centroids = Matrix("centroids", ("",), self.groups, hidden_size, quantized=False)
        return (*projections, centroids, Elements(2 * self.vocab_size, "int32"))  # a table of int64


def describe_assistant(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes an assistant. Raises UserError that names keys which are missing, unknown, or do not match the
    target."""
    keys = config.reader()
    # An assistant's layers share the target's keys and values, but this key would mean those of its own earlier layers.
    alone = ConfigReader({**keys.values, "num_kv_shared_layers": 0}, keys.source)
    model = describe_as(_FAMILY, alone, stored_wide(config.quantization, config.stored(_NAMES)))
    check_sizes(keys, model, target)
    width = keys.positive("backbone_hidden_size")
    if width != target.hidden_size:
        raise UserError(
            f"{keys.source}: backbone_hidden_size is {width}, and the model has a hidden size of {target.hidden_size}."
            " Give the assistant that was trained for this model."
        )
    groups = kept = 0
    if keys.default("use_ordered_embeddings", bool, False):
        groups, kept = keys.positive("num_centroids"), keys.positive("centroid_intermediate_top_k")
        if target.vocab_size % groups or kept > groups:
            raise UserError(
                f"{keys.source}: {groups} centroids, of which {kept} are kept, do not divide {target.vocab_size:,}"
                " tokens."
            )
    draft = DraftDescription(
        kind=KV_SHARING,
        model=replace(model, layers=tuple(_reading(layer, target, keys) for layer in model.layers)),
        form=Assistant(width, groups, kept, target.vocab_size * bool(groups)),
        first_layer=0,  # it has no caches; those that it reads have the target's numbers
        vocab_size=target.vocab_size,
        head_size=target.vocab_size,
    )
    return finished(draft, target)


def check_stage(draft: DraftDescription, first_layer: int) -> None:
    """Raises UserError if a pipeline's last stage, which begins with layer `first_layer`, lacks caches that the draft
    reads."""
    # Only this kind of attention can read another layer's cache.
    mixers = [layer.mixer for layer in draft.model.layers]
    sources = [mixer.cache.source(i) for i, mixer in enumerate(mixers) if isinstance(mixer, GQA)]
    if draft.form.reads_caches and min(sources) < first_layer:
        raise UserError(
            f"{draft.kind} drafts read the cache of layer {min(sources)}, which is not in the pipeline's last stage"
            f" (layers {first_layer} and on). Use a smaller --pp-size, or NGRAM."
        )


def _reading(layer: LayerSpec, target: ModelDescription, keys: ConfigReader) -> LayerSpec:
    """Returns the layer attending to the keys and values of the target's last layer of its kind. Raises UserError where
    there is none."""
    reader = layer.mixer  # heads and windows of two layers are compared, which only this kind has
    assert isinstance(reader, GQA)
    for i, other in reversed(list(enumerate(target.layers))):
        mixer = other.mixer
        if not isinstance(mixer, GQA) or bool(mixer.window) != bool(reader.window) or mixer.head_dim != reader.head_dim:
            continue
        if reader.num_heads % mixer.num_kv_heads:
            raise UserError(
                f"{keys.source}: {reader.num_heads} heads do not divide among the model's {mixer.num_kv_heads} KV"
                " heads. Give the assistant that was trained for this model."
            )
        # The draft token's own position is part of its window, and the target's cache keeps no token more than that.
        window = min(reader.window, mixer.window) - 1 if reader.window else 0
        reading = replace(reader.reading(mixer.cache.source(i)), num_kv_heads=mixer.num_kv_heads, mask=windowed(window))
        return replace(layer, mixer=reading)
    kind = "a window" if reader.window else "full attention"
    raise UserError(
        f"{keys.source}: the draft has a layer with {kind} and heads of {reader.head_dim}, and {target.architecture}"
        " has none, whose keys it could read. Give the assistant that was trained for this model."
    )

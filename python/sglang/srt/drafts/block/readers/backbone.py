"""The common part of all block drafts: a backbone with layers like Qwen3's (or Gemma 4's) over aux hidden states of the
target.

Source: the format in which z-lab publishes DFlash drafts, which DeepSeek's DSpark and SpecForge's drafts share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.model_path import MASK_VECTOR_FILE
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.block.readers.laguna import LAGUNA_ARCHITECTURE, laguna_layers
from sglang.srt.drafts.block.spec import EVERYWHERE, IN_WINDOWS, NOWHERE, Block
from sglang.srt.drafts.config import DraftConfig, check_sizes
from sglang.srt.drafts.spec import DraftDescription, finished
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.families.gemma4 import GEMMA4, gemma4
from sglang.srt.plan.families.laguna import LAGUNA
from sglang.srt.plan.families.qwen3 import QWEN3
from sglang.srt.plan.layer_spec import LayerSpec, Mixer
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import ATTENTION_NAMES, CACHE_SCALE_ALIASES, MLP_NAMES, QK_NORM_NAMES, WeightMap

_MODEL_NAMES: Mapping[str, str] = {
    "embed": "embed_tokens",
    "fc": "fc",
    "hidden_norm": "hidden_norm",
    "norm": "norm",
    "lm_head": "lm_head",
    "": "",
}
GEMMA4_DSPARK = "Gemma4DSparkModel"
"""The architecture with layers like Gemma 4's that attend to all tokens; the others' are like Qwen3's."""
_LAYER_NAMES = {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES}

_OF_VERIFIER = ("verifier_norm.", "verifier_lm_head.")
"""Copies of the target's tensors that the speculators library stored while it trained."""


def names_of(more: Mapping[str, str], in_layers: Mapping[str, str] | None = None) -> WeightMap:
    """Returns the names of the backbone's tensors, with those of `more` (in the model) and `in_layers`, by our
    names."""
    return WeightMap(
        {**_MODEL_NAMES, **more},
        {**_LAYER_NAMES, **(in_layers or {})},
        "layers.{layer}.",
        beginnings=(("model.", ""),),
        aliases=(*CACHE_SCALE_ALIASES, (".self_attn.attention_sink_bias", ".self_attn.sinks")),
        decoder="",
    )


def check_architecture(keys: ConfigReader, kind: str, supported: tuple[str, ...]) -> str:
    """Returns the draft's architecture. Raises UserError if it is not among the `supported`."""
    architecture = architecture_of(keys)
    if architecture not in supported:
        raise UserError(
            f"{keys.source}: the draft architecture {architecture} is not supported for {kind}. Supported:"
            f" {', '.join(supported)}. Without such a draft use NGRAM, which needs no weights."
        )
    return architecture


def describe_block_draft(
    config: DraftConfig,
    target: ModelDescription,
    form: Block,
    names: WeightMap,
    aux_layers: tuple[int, ...],
    head_size: int,
    plain_ends: bool = False,
    fit_attention: Callable[[Mixer], Mixer] = lambda mixer: mixer,
) -> DraftDescription:
    """Describes a draft with this backbone. `form`: without what the target and the layers say. `aux_layers`,
    `head_size`, `plain_ends`: as in DraftDescription. `fit_attention`: makes a layer's attention of the backbone's.
    Raises UserError for a config that does not match the target."""
    keys = config.reader()
    family = _backbone(architecture_of(keys), names)
    names = family.names
    quantization = stored_wide(config.quantization, config.stored(names))
    model = describe_as(family, keys, quantization, config.keep_shared_apart)
    check_sizes(keys, model, target)
    if model.hidden_size != target.hidden_size:
        raise UserError(
            f"{keys.source}: hidden_size {model.hidden_size} is not the target's ({target.hidden_size}), whose"
            " embedding and head the draft takes. Give the draft that was trained for this model."
        )
    if not 0 <= form.mask_token < target.vocab_size:
        raise UserError(f"{keys.source}: mask_token_id {form.mask_token} is no token of the {target.vocab_size:,}.")
    layers = tuple(replace(layer, mixer=fit_attention(layer.mixer)) for layer in model.layers)
    model = in_blocks(replace(model, layers=layers), form.size, form.causal)
    model = replace(model, names=replace(names, unread=(*names.unread, *_OF_VERIFIER)))
    mask_vector = (Path(config.model_path) / MASK_VECTOR_FILE).is_file()
    draft = DraftDescription(
        kind=config.kind,
        model=model,
        form=replace(form, num_layers=len(model.layers), mask_vector=mask_vector),
        first_layer=len(target.layers),
        vocab_size=target.vocab_size,
        aux_layers=aux_layers,
        head_size=head_size,
        reduced=head_size > 0,
        plain_ends=plain_ends,
    )
    return finished(draft, target)


def _backbone(architecture: str, names: WeightMap) -> Family:
    """Returns the family of the draft's layers, with the checkpoint's names."""
    if architecture == GEMMA4_DSPARK:
        layer = {**names.layer, **NORMS_AROUND, "end": ""}
        return replace(GEMMA4, architectures=(architecture,), names=replace(names, layer=layer), read=_untied_gemma4)
    if architecture == LAGUNA_ARCHITECTURE:
        return replace(LAGUNA, architectures=(architecture,), names=names, read=laguna_layers)
    return replace(QWEN3, architectures=(architecture,), names=names)


def _untied_gemma4(c: Config) -> Model:
    return gemma4(c.usual({"tie_word_embeddings": False}))


def check_computed(keys: ConfigReader, computed: Mapping[str, tuple[object, ...]]) -> None:
    """Raises UserError for a key with a value that is not among those that are `computed`."""
    for key, values in computed.items():
        value = keys.values.get(key)
        if value is not None and value not in values:
            supported = ", ".join(map(repr, values)) or "none"
            raise UserError(f"{keys.source}: {key} = {value!r} is not supported; supported: {supported}.")


def reduced_head(keys: ConfigReader, target: ModelDescription) -> int:
    """Returns the tokens of the draft's own output head where they are fewer than the target's; 0: it uses the target's
    head."""
    size = keys.count("draft_vocab_size")
    return 0 if size >= target.vocab_size else size


def check_aux_layers(named: list[Any], num_target_layers: int, source: str) -> tuple[int, ...]:
    """Returns the target layers that a config names. Raises UserError unless all are layers of the target."""
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in named)
    if not whole or not all(0 <= layer < num_target_layers for layer in named):
        raise UserError(
            f"{source}: target_layer_ids {named} are not all layers of the model, which has"
            f" {num_target_layers}. Give the draft that was trained for this model."
        )
    return tuple(named)


def in_blocks(model: ModelDescription, size: int, causal: str = NOWHERE) -> ModelDescription:
    """Returns the model with layers whose rows see the whole block of `size` rows, or up to themselves (`causal`: as in
    Block)."""

    def up_to_itself(layer: LayerSpec) -> bool:
        mixer = layer.mixer
        return causal == EVERYWHERE or (causal == IN_WINDOWS and isinstance(mixer, GQA) and mixer.window > 0)

    layers = (replace(layer, mixer=layer.mixer.in_blocks(size, up_to_itself(layer))) for layer in model.layers)
    return replace(model, layers=tuple(layers))

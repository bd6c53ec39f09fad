"""DFlash block drafts: descriptions made from their config.json.

Source: the format in which z-lab publishes drafts (`DFlashDraftModel`), layers as those of Qwen3.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import DFLASH, USUAL_BLOCK_SIZE
from sglang.srt.errors import UserError
from sglang.srt.plan.drafts.config import DraftConfig, stored_wide
from sglang.srt.plan.drafts.description import Block, DraftDescription
from sglang.srt.plan.drafts.eagle import check_sizes, finished
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, WeightMap

DFLASH_ARCHITECTURES = ("DFlashDraftModel",)
_NAMES = WeightMap(
    {"embed": "embed_tokens", "fc": "fc", "hidden_norm": "hidden_norm", "norm": "norm", "lm_head": "lm_head"},
    {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES},
    layer_prefix="layers.{layer}.",
    beginnings=(("model.", ""),),
    decoder="",
)
_FAMILY = Family(model_types=("qwen3",), architectures=DFLASH_ARCHITECTURES, names=_NAMES, qk_norm="head", head_dim=128)
_READ = frozenset({"mask_token_id", "target_layer_ids"})
"""Keys of `dflash_config` that are read; others make another draft of it."""


def describe_dflash(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes a DFlash draft. Raises UserError naming keys that are missing, of unknown meaning, or do not go with
    the target."""
    keys = config.reader()
    architecture = architecture_of(keys)
    if architecture not in DFLASH_ARCHITECTURES:
        raise UserError(
            f"{keys.source}: the draft architecture {architecture} is not supported for DFLASH. Supported:"
            f" {', '.join(DFLASH_ARCHITECTURES)}. Without such a draft use NGRAM, which needs no weights."
        )
    if any(isinstance(layer.mixer, MLA) and layer.mixer.sparse for layer in target.layers):
        raise UserError(
            f"{target.architecture} attends sparsely, which DFLASH does not go with yet; take NEXTN or NGRAM."
        )
    settings = _settings(keys)
    quantization = stored_wide(config.quantization, config.stored(_NAMES))
    model = describe_as(_FAMILY, keys, quantization, config.keep_shared_apart)
    check_sizes(keys, model, target)
    if model.hidden_size != target.hidden_size:
        raise UserError(
            f"{keys.source}: hidden_size {model.hidden_size} is not the target's ({target.hidden_size}), whose"
            " embedding and head the draft takes. Give the draft that was trained for this model."
        )
    captures = _captures(settings, len(model.layers), len(target.layers))
    mask = settings.require("mask_token_id", int)
    if not 0 <= mask < target.vocab_size:
        raise UserError(f"{keys.source}: mask_token_id {mask} is no token of the {target.vocab_size:,}.")
    size = keys.positive("block_size", USUAL_BLOCK_SIZE)
    return finished(
        DraftDescription(
            kind=DFLASH,
            model=replace(model, layers=tuple(_in_blocks(layer, size) for layer in model.layers)),
            form=Block(len(captures), target.hidden_size, size, mask),
            first_layer=len(target.layers),
            vocab_size=target.vocab_size,
            captures=captures,
        ),
        target,
    )


def _settings(keys: ConfigReader) -> ConfigReader:
    """Returns the keys of `dflash_config`. Raises UserError for drafts that are computed otherwise."""
    settings = keys.default("dflash_config", dict, {})
    unknown = sorted(settings.keys() - _READ)
    if unknown:
        raise UserError(
            f"{keys.source}: dflash_config has {', '.join(unknown)}: only plain DFlash drafts are computed here, none"
            " with a selector or another head. Take EAGLE3 or NGRAM."
        )
    if keys.default("is_causal", bool, False):
        raise UserError(f"{keys.source}: is_causal = True is not supported: the rows of a block see each other.")
    return ConfigReader(settings, f"{keys.source} dflash_config")


def _captures(settings: ConfigReader, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns the target layers whose outputs are read: those named, or as many as the draft has layers, evenly from
    the second one to the third from the end."""
    named = settings.default("target_layer_ids", list, [])
    if not named:
        last = num_target_layers - 3
        if num_layers == 1:
            return (num_target_layers // 2,)
        named = [round(1 + i * (last - 1) / (num_layers - 1)) for i in range(num_layers)]
    if not all(isinstance(layer, int) and 0 <= layer < num_target_layers for layer in named):
        raise UserError(
            f"{settings.source}: target_layer_ids {named} are not all layers of the model, which has"
            f" {num_target_layers}. Give the draft that was trained for this model."
        )
    return tuple(named)


def _in_blocks(layer: LayerSpec, size: int) -> LayerSpec:
    assert isinstance(layer.mixer, GQA)
    return replace(layer, mixer=replace(layer.mixer, block=size))

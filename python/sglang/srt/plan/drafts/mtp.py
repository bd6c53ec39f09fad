"""Drafts by a model's own layers for multi-token prediction (NEXTN): makes their descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.errors import UserError
from sglang.srt.plan.drafts.config import BUNDLED_SIZE, MTP, DraftConfig
from sglang.srt.plan.drafts.description import ByStream, DraftDescription, Form, Projected, Streamed
from sglang.srt.plan.drafts.mtp_by_layer import OTHERS, check_target, describe_by_depth
from sglang.srt.plan.families import family_of
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.latent import SPARSE_LAYER
from sglang.srt.plan.families.mtp import MtpForm
from sglang.srt.plan.families.nemotron_h import block_kinds
from sglang.srt.plan.families.recurrent import KDA_CONFIG
from sglang.srt.plan.layer_spec import SUM, GatedStreams, LayerSpec
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import WeightMap

_ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "mlp_layer_types": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "compress_ratios": [0],
    "num_hash_layers": 0,
    "ple_layer_ids": [],
}
"""Keys that turn a config into that of a single draft layer: it attends to all tokens, and has experts if the model
has."""


SHARED_SELECTION = "index_share_for_mtp_iteration"
"""Key of models whose drafts were trained with one selection for all passes."""


def describe_mtp(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes the model's layers for multi-token prediction. Raises UserError where the family has none here, or the
    checkpoint lacks them."""
    keys = config.reader()
    family = family_of(architecture_of(keys), str(keys.values.get("model_type") or ""))
    if family is None or family.mtp is None:
        raise UserError(
            f"{keys.source}: {architecture_of(keys)} has no layers for multi-token prediction that are served here."
            f" {OTHERS}"
        )
    form = family.mtp
    if form.depths:
        return describe_by_depth(config, target, family, form)
    if keys.values.get(BUNDLED_SIZE) is not None:
        raise UserError(
            f"{keys.source}: {BUNDLED_SIZE} says that the model's draft layers are those of DSpark; take"
            " --speculative-algorithm DSPARK."
        )
    _check(keys, form)
    keys = ConfigReader({**keys.values, **_layers(keys, form), "architectures": [target.architecture]}, keys.source)
    at = form.at or _behind_last(config, target)
    names = _names(form, at, family, target, len(block_kinds(keys)) if form.patterns else 1)
    stored = config.stored(names, at)
    if stored is not None and not stored:
        raise UserError(
            f"{config.model_path} has no tensors at {at}: it has no layers for multi-token prediction, which some"
            f" exports leave out. {OTHERS}"
        )
    model = describe_as(
        replace(family, names=names),
        keys,
        stored_wide(config.quantization, stored),
        config.keep_shared_apart,
        lambda layer: _draft_layer(layer, form, stored),
    )
    check_target(model, target, keys.source)
    return DraftDescription(
        kind=MTP,
        model=replace(model, vocab_size=target.vocab_size, tie_embeddings=False, first_stage=False, last_stage=False),
        form=_form(form, target),
        first_layer=len(target.layers),
        vocab_size=target.vocab_size,
        aux_layers=(len(target.layers) - 1,) if form.by_stream or form.streamed else (),
        shares_selection=_shares_selection(keys, model),
        at=at,
    )


def _form(form: MtpForm, target: ModelDescription) -> Form:
    residual = target.layers[-1].residual
    if form.by_stream:
        return ByStream(residual.streams)
    if form.streamed:
        assert isinstance(residual, GatedStreams), "families with such drafts have such streams"
        return Streamed(residual.streams, residual.rank)
    return Projected(hidden_first=form.hidden_first, zero_first=form.zero_first)


def _shares_selection(keys: ConfigReader, model: ModelDescription) -> bool:
    """Returns whether later draft passes take the first pass's selection. With pooled keys all drafts do: a run that
    draft tokens complete has no key before they are accepted."""
    mixers = [layer.mixer for layer in model.layers]
    if any(mixer.keeps_selection for mixer in mixers):
        return True
    indexed = any(latents.indexer is not None for mixer in mixers if (latents := mixer.latents))
    return indexed and keys.default(SHARED_SELECTION, bool, False)


def _check(keys: ConfigReader, form: MtpForm) -> None:
    stated = next((key for key in form.counts if keys.values.get(key) is not None), None)
    if stated is not None and keys.count(stated) != 1:
        raise UserError(
            f"{keys.source}: {stated} is {keys.count(stated)}, and drafts are made by one layer for multi-token"
            f" prediction here. {OTHERS}"
        )
    for key, value in form.refused.items():
        if keys.values.get(key) == value:
            raise UserError(f"{keys.source}: {key} = {value!r} is not supported. {OTHERS}")


def _layers(keys: ConfigReader, form: MtpForm) -> Mapping[str, Any]:
    """Returns the config's keys as they apply to the draft's layers."""
    if not form.patterns:
        one = dict(_ONE_LAYER)
        if keys.count("index_topk"):  # it has an indexer of its own
            one |= {"layer_types": [SPARSE_LAYER], "indexer_types": None, KDA_CONFIG: None}
        return one | {"hc_mult": None} if form.one_stream else one
    key = next((key for key in form.patterns if keys.values.get(key)), None)
    if key is None:
        raise UserError(f"{keys.source}: none of {', '.join(form.patterns)} says what the draft's layers are. {OTHERS}")
    value = keys.values[key]
    listed = isinstance(value, list)
    return {
        "layers_block_type": value if listed else None,
        "layer_types": None,
        "hybrid_override_pattern": None if listed else value,
    }


def _behind_last(config: DraftConfig, target: ModelDescription) -> str:
    """Returns the beginning of the names of the layer behind the last one; checkpoints with drafts only number it 0."""
    alone = not config.in_target and architecture_of(config.reader()).endswith("NextN")
    return target.names.layer_prefix.format(layer=0 if alone else len(target.layers))


def _names(form: MtpForm, at: str, family: Family, target: ModelDescription, num_layers: int) -> WeightMap:
    model = {ours: (at + name.format(last=num_layers - 1)).removesuffix(".") for ours, name in form.names.items()}
    return replace(
        family.names,
        model={**model, "embed": target.names.model["embed"], "lm_head": target.names.model["lm_head"]},
        layer_prefix=at + form.layer,
        decoder=target.names.decoder,
        unread=tuple(at + name for name in (*form.copies, *form.unread)),
    )


def _draft_layer(layer: LayerSpec, form: MtpForm, stored: Mapping[str, str] | None) -> LayerSpec:
    """Returns the layer of the draft that has the place of this one in the model: without the model's selection of
    tokens and its several streams where the form says so, and with experts in the form in which `stored` has them."""
    mixer, ffn, residual = layer.mixer, layer.ffn, layer.residual
    if form.dense:
        mixer = mixer.unselected()
    if form.one_stream:
        residual = SUM
    if (experts := ffn.experts) and stored is not None and experts.form in ("", "stacked"):
        stacked = any(name.endswith("experts.gate_up_proj") for name in stored)
        ffn = replace(experts, form="stacked" if stacked else "")
    return replace(layer, mixer=mixer, ffn=ffn, residual=residual)

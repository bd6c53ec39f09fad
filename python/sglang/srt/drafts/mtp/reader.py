"""Drafts by a model's own layers for multi-token prediction (NEXTN): makes their descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.config import BUNDLED_SIZE, MTP, DraftConfig
from sglang.srt.drafts.mtp_by_layer.reader import check_target, describe_by_depth
from sglang.srt.drafts.spec import DraftDescription, without_ends
from sglang.srt.errors import UserError
from sglang.srt.plan.families import family_of
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import OTHER_DRAFTS, MTPLayerPerToken, MTPPass, MTPTensors
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import WeightMap

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
            f" {OTHER_DRAFTS}"
        )
    mtp = family.mtp
    if isinstance(mtp, MTPLayerPerToken):
        return describe_by_depth(config, target, family, mtp)
    if keys.values.get(BUNDLED_SIZE) is not None:
        raise UserError(
            f"{keys.source}: {BUNDLED_SIZE} says that the model's draft layers are those of DSpark; take"
            " --speculative-algorithm DSPARK."
        )
    _check(keys, mtp)
    keys = ConfigReader({**keys.values, **mtp.keys(keys), "architectures": [target.architecture]}, keys.source)
    at = mtp.tensors.at or _behind_last(config, target)
    form = mtp.form(target.layers[-1].residual)
    names = _names(mtp.tensors, at, family, target, keys.count("num_hidden_layers"))
    embedding = mtp.tensors.embedding
    places = (at, f"{embedding}.") if embedding else at
    stored = config.stored(names, places)
    own_embedding = bool(embedding) and (stored is None or f"{embedding}.weight" in stored)
    if own_embedding:
        names = replace(names, model={**names.model, "embed": embedding})
    if stored is not None and not stored:
        raise UserError(
            f"{config.model_path} has no tensors at {at}: it has no layers for multi-token prediction, which some"
            f" exports leave out. {OTHER_DRAFTS}"
        )
    model = describe_as(
        replace(family, names=names),
        keys,
        stored_wide(config.quantization, stored),
        config.keep_shared_apart,
        lambda layer: _with_stored_form(mtp.layer(layer), stored),
    )
    check_target(model, target, keys.source)
    return DraftDescription(
        kind=MTP,
        model=without_ends(model, target.vocab_size),
        form=form,
        first_layer=len(target.layers),
        vocab_size=target.vocab_size,
        aux_layers=(len(target.layers) - 1,) * form.reads_streams,
        shares_selection=_shares_selection(keys, model),
        own_embedding=own_embedding,
        at=places,
    )


def _shares_selection(keys: ConfigReader, model: ModelDescription) -> bool:
    """Returns whether later draft passes take the first pass's selection. With pooled keys all drafts do: a run that
    draft tokens complete has no key before they are accepted."""
    mixers = [layer.mixer for layer in model.layers]
    if any(mixer.keeps_selection for mixer in mixers):
        return True
    indexed = any(latents.indexer is not None for mixer in mixers if (latents := mixer.latents))
    return indexed and keys.default(SHARED_SELECTION, bool, False)


def _check(keys: ConfigReader, mtp: MTPPass) -> None:
    stated = next((key for key in mtp.counts if keys.values.get(key) is not None), None)
    if stated is not None and keys.count(stated) != 1:
        raise UserError(
            f"{keys.source}: {stated} is {keys.count(stated)}, and drafts are made by one layer for multi-token"
            f" prediction here. {OTHER_DRAFTS}"
        )
    for key, value in mtp.refused.items():
        if keys.values.get(key) == value:
            raise UserError(f"{keys.source}: {key} = {value!r} is not supported. {OTHER_DRAFTS}")


def _behind_last(config: DraftConfig, target: ModelDescription) -> str:
    """Returns the beginning of the names of the layer behind the last one; checkpoints with drafts only number it 0."""
    alone = not config.in_target and architecture_of(config.reader()).endswith("NextN")
    return target.names.layer_prefix.format(layer=0 if alone else len(target.layers))


def _names(tensors: MTPTensors, at: str, family: Family, target: ModelDescription, num_layers: int) -> WeightMap:
    model = {ours: (at + name.format(last=num_layers - 1)).removesuffix(".") for ours, name in tensors.names.items()}
    return replace(
        family.names,
        model={**model, "embed": target.names.model["embed"], "lm_head": target.names.model["lm_head"]},
        layer={**family.names.layer, **tensors.layer_names},
        layer_prefix=at + tensors.layer,
        decoder=target.names.decoder,
        unread=tuple(at + name for name in tensors.unread),
    )


def _with_stored_form(layer: LayerSpec, stored: Mapping[str, str] | None) -> LayerSpec:
    """Returns the layer with experts in the form in which `stored` has them."""
    experts = layer.ffn.experts
    if experts is None or stored is None or experts.form not in ("", "stacked"):
        return layer
    stacked = any(name.endswith("experts.gate_up_proj") for name in stored)
    return replace(layer, ffn=replace(experts, form="stacked" if stacked else ""))

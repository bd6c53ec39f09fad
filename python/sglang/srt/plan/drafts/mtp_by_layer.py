"""Drafts by several layers for multi-token prediction, each with a depth of its own (MiMo-V2, Step, Inkling)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.errors import UserError
from sglang.srt.plan.drafts.config import MTP, DraftConfig
from sglang.srt.plan.drafts.description import DraftDescription, MTPByLayer
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import MtpForm
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import ModelDescription, describe_as
from sglang.srt.plan.weight_names import WeightMap

OTHERS = "Give an EAGLE3 head with --speculative-draft-model-path, or draft with NGRAM."
_BY_LAYER = ("swiglu_limits", "swiglu_limits_shared")
"""Keys with an entry for each layer; the draft layers' entries come last."""


def describe_by_depth(config: DraftConfig, target: ModelDescription, family: Family, form: MtpForm) -> DraftDescription:
    """Describes as many of the layers as there are draft tokens in a step. Raises UserError that names the flag where
    the checkpoint has fewer."""
    keys = config.reader()
    keys = _own_keys(keys, form)
    for key, refused in form.refused.items():
        if keys.values.get(key) == refused:
            raise UserError(f"{keys.source}: {key} = {refused!r} is not computed for drafts. {OTHERS}")
    depths = _depths(config, keys, target, form)
    if config.num_speculative_tokens > depths:
        raise UserError(
            f"{keys.source}: the model drafts with {depths} layer{'s' * (depths > 1)}, one for each draft token of a"
            f" step, and {config.num_speculative_tokens} are asked for. Pass --speculative-num-steps {depths}"
            " or fewer."
        )
    first, used = len(target.layers), config.num_speculative_tokens
    names = _names(form, family, target, depths, used)
    stored = config.stored(names, _beginnings(form, target, depths))
    keys = ConfigReader(
        {**keys.values, **_layers(keys, form, first, used), "architectures": [target.architecture]}, keys.source
    )
    quantization = stored_wide(config.quantization, stored)
    model = describe_as(replace(family, names=names), keys, quantization, config.keep_shared_apart)
    check_target(model, target, keys.source)
    layers = tuple(_lagging(layer, used) for layer in model.layers)
    keeps_states = any(layer.convolution is not None for layer in layers)
    if keeps_states:
        layers = (layers[0], *(replace(layer, tail=model.hidden_size) for layer in layers[1:]))
    return DraftDescription(
        kind=MTP,
        model=replace(
            model,
            layers=layers,
            vocab_size=target.vocab_size,
            tie_embeddings=False,
            first_stage=False,
            last_stage=False,
        ),
        form=MTPByLayer(
            used,
            chained=form.chained,
            final_features=form.final_features,
            hidden_first=form.hidden_first,
            depth_norms="norm" in form.names,
            wide_norms=model.zero_centred_norms,
            keeps_states=keeps_states,
        ),
        first_layer=first,
        vocab_size=target.vocab_size,
        aux_layers=() if form.final_features else (first - 1,),
        at=_beginnings(form, target, used),
    )


def check_target(model: ModelDescription, target: ModelDescription, source: str) -> None:
    """Raises UserError where draft layers do not match the target."""
    if model.unsupported:
        raise UserError("\n".join(model.unsupported))
    for what, theirs, ours in (
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("vocab_size", model.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise UserError(f"{source}: {what} is {theirs}, and the model's {ours}. {OTHERS}")


def _own_keys(keys: ConfigReader, form: MtpForm) -> ConfigReader:
    """Returns the keys of the draft's layers: the config's, overridden by those of its object for draft layers."""
    if not form.section:
        return keys
    beside = {usual: keys.values[key] for key, usual in form.spellings.items() if keys.values.get(key) is not None}
    unsaid = dict.fromkeys(form.spellings.values())  # these keys of the config are about the model's own layers
    return ConfigReader({**keys.values, **unsaid, **beside, **keys.default(form.section, dict, {})}, keys.source)


def _depths(config: DraftConfig, keys: ConfigReader, target: ModelDescription, form: MtpForm) -> int:
    """Returns the number of draft layers in the checkpoint; without weights that of its config, or of published models.
    Raises UserError for a checkpoint with none, or with a gap among them."""
    stated = next((keys.count(key) for key in form.counts if keys.values.get(key) is not None), form.depths)
    most = _beginnings(form, target, max(stated, form.depths))
    at = form.at or most
    stored = config.stored(target.names, at)
    if stored is None:
        if not stated:
            raise UserError(f"{keys.source}: {form.counts[0]} is 0: no layer drafts. {OTHERS}")
        return stated
    numbers = sorted(_numbers(stored, form.at or target.names.layer_prefix.partition("{layer}")[0]))
    first = 0 if form.at else len(target.layers)
    if not numbers:
        where = form.at or f"{most[0]} and behind"
        raise UserError(
            f"{config.model_path} has no tensors at {where}: it has no layers for multi-token prediction, which some"
            f" exports leave out. {OTHERS}"
        )
    if numbers != list(range(first, first + len(numbers))):
        listed = ", ".join(map(str, numbers))
        raise UserError(f"{config.model_path} has the draft layers {listed}, but not all from {first} on. {OTHERS}")
    return len(numbers)


def _numbers(stored: Collection[str], at: str) -> set[int]:
    matches = (re.match(rf"{re.escape(at)}(\d+)\.", name) for name in stored)
    return {int(match[1]) for match in matches if match is not None}


def _beginnings(form: MtpForm, target: ModelDescription, depths: int) -> tuple[str, ...]:
    """Returns the beginnings of the names of each depth's tensors."""
    if form.at:
        return tuple(f"{form.at}{i}." for i in range(depths))
    return tuple(target.names.layer_prefix.format(layer=len(target.layers) + i) for i in range(depths))


def _names(form: MtpForm, family: Family, target: ModelDescription, depths: int, used: int) -> WeightMap:
    places = _beginnings(form, target, depths)
    model = {f"{ours}.{i}": places[i] + name for i in range(used) for ours, name in form.names.items()}
    return replace(
        target.names,
        model={**model, "embed": target.names.model["embed"], "lm_head": target.names.model["lm_head"]},
        layer={**family.names.layer, **form.layer_names},
        layer_prefix=form.at + (form.layer or "{layer}.") if form.at else target.names.layer_prefix,
        first_layer=0 if form.at else len(target.layers),
        behind=(),
        unread=(*(place + copy for place in places for copy in form.copies), *places[used:]),
    )


def _layers(keys: ConfigReader, form: MtpForm, first: int, used: int) -> Mapping[str, Any]:
    """Returns the config's keys as they apply to the draft's layers: windows, and no experts."""
    windowed, whole = form.kinds
    local = keys.default("local_layer_ids", list, []) if whole else range(used)
    listed = {key: keys.default(key, list, []) for key in _BY_LAYER}
    limits = {key: (values[first : first + used] + [0.0] * used)[:used] for key, values in listed.items() if values}
    return {
        **limits,
        "num_hidden_layers": used,
        "layer_types": [windowed if depth in local else whole for depth in range(used)],
        "mlp_layer_types": ["dense"] * used,
        "moe_layer_freq": None,
        "moe_layers_enum": None,
        "hybrid_layer_pattern": None,
        "per_layer_config": None,
    }


def _lagging(layer: LayerSpec, draft_tokens: int) -> LayerSpec:
    """Returns the layer with a cache that keeps draft tokens - 1 tokens more than its window: rows of the last depth
    lag that far behind the request, whose own windows no longer need these tokens. Convolutions keep `draft_tokens`
    tokens more than they read: a step may write that many rows that are rejected or computed again."""
    convolution = layer.convolution
    mixer = layer.mixer.lagging(draft_tokens, convolution is not None)
    if convolution is None:
        return replace(layer, mixer=mixer)
    return replace(layer, mixer=mixer, convolution=replace(convolution, window_slack=draft_tokens))

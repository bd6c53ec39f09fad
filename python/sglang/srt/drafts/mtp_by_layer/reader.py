"""Drafts by several layers for multi-token prediction, each with a depth of its own (MiMo-V2, Step, Inkling)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.config import MTP, DraftConfig
from sglang.srt.drafts.spec import DraftDescription, without_ends
from sglang.srt.errors import UserError
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import COUNT, OTHER_DRAFTS, MTPLayerPerToken
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import ModelDescription, describe_as
from sglang.srt.plan.weight_names import WeightMap


def describe_by_depth(
    config: DraftConfig, target: ModelDescription, family: Family, mtp: MTPLayerPerToken
) -> DraftDescription:
    """Describes as many of the layers as there are draft tokens in a step. Raises UserError that names the flag where
    the checkpoint has fewer."""
    keys = mtp.section(config.reader())
    for key, refused in mtp.refused.items():
        if keys.values.get(key) == refused:
            raise UserError(f"{keys.source}: {key} = {refused!r} is not computed for drafts. {OTHER_DRAFTS}")
    depths = _depths(config, keys, target, mtp)
    if config.num_speculative_tokens > depths:
        raise UserError(
            f"{keys.source}: the model drafts with {depths} layer{'s' * (depths > 1)}, one for each draft token of a"
            f" step, and {config.num_speculative_tokens} are asked for. Pass --speculative-num-steps {depths}"
            " or fewer."
        )
    first, used = len(target.layers), config.num_speculative_tokens
    names = _names(mtp, family, target, depths, used)
    stored = config.stored(names, _beginnings(mtp, target, depths))
    keys = ConfigReader(
        {**keys.values, **mtp.keys(keys, first, used), "architectures": [target.architecture]}, keys.source
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
        model=without_ends(replace(model, layers=layers), target.vocab_size),
        form=replace(mtp.form, depths=used, wide_norms=model.zero_centred_norms, keeps_states=keeps_states),
        first_layer=first,
        vocab_size=target.vocab_size,
        aux_layers=(first - 1,) * (not mtp.form.final_features),
        at=_beginnings(mtp, target, used),
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
            raise UserError(f"{source}: {what} is {theirs}, and the model's {ours}. {OTHER_DRAFTS}")


def _depths(config: DraftConfig, keys: ConfigReader, target: ModelDescription, mtp: MTPLayerPerToken) -> int:
    """Returns the number of draft layers in the checkpoint; without weights that of its config, or of published models.
    Raises UserError for a checkpoint with none, or with a gap among them."""
    stated = mtp.form.depths if keys.values.get(COUNT) is None else keys.count(COUNT)
    most = _beginnings(mtp, target, max(stated, mtp.form.depths))
    at = mtp.tensors.at or most
    stored = config.stored(target.names, at)
    if stored is None:
        if not stated:
            raise UserError(f"{keys.source}: {COUNT} is 0: no layer drafts. {OTHER_DRAFTS}")
        return stated
    numbers = sorted(_numbers(stored, mtp.tensors.at or target.names.layer_prefix.partition("{layer}")[0]))
    first = 0 if mtp.tensors.at else len(target.layers)
    if not numbers:
        where = mtp.tensors.at or f"{most[0]} and behind"
        raise UserError(
            f"{config.model_path} has no tensors at {where}: it has no layers for multi-token prediction, which some"
            f" exports leave out. {OTHER_DRAFTS}"
        )
    if numbers != list(range(first, first + len(numbers))):
        listed = ", ".join(map(str, numbers))
        raise UserError(
            f"{config.model_path} has the draft layers {listed}, but not all from {first} on. {OTHER_DRAFTS}"
        )
    return len(numbers)


def _numbers(stored: Collection[str], at: str) -> set[int]:
    matches = (re.match(rf"{re.escape(at)}(\d+)\.", name) for name in stored)
    return {int(match[1]) for match in matches if match is not None}


def _beginnings(mtp: MTPLayerPerToken, target: ModelDescription, depths: int) -> tuple[str, ...]:
    """Returns the beginnings of the names of each depth's tensors."""
    if mtp.tensors.at:
        return tuple(f"{mtp.tensors.at}{i}." for i in range(depths))
    return tuple(target.names.layer_prefix.format(layer=len(target.layers) + i) for i in range(depths))


def _names(mtp: MTPLayerPerToken, family: Family, target: ModelDescription, depths: int, used: int) -> WeightMap:
    places, tensors = _beginnings(mtp, target, depths), mtp.tensors
    model = {f"{ours}.{i}": places[i] + name for i in range(used) for ours, name in tensors.names.items()}
    return replace(
        target.names,
        model={**model, "embed": target.names.model["embed"], "lm_head": target.names.model["lm_head"]},
        layer={**family.names.layer, **tensors.layer_names},
        layer_prefix=tensors.at + (tensors.layer or "{layer}.") if tensors.at else target.names.layer_prefix,
        first_layer=0 if tensors.at else len(target.layers),
        behind=(),
        unread=(*(place + copy for place in places for copy in tensors.unread), *places[used:]),
    )


def _lagging(layer: LayerSpec, draft_tokens: int) -> LayerSpec:
    """Returns the layer with a cache that keeps draft tokens - 1 tokens more than its window: rows of the last depth
    lag that far behind the request, whose own windows no longer need these tokens. Convolutions keep `draft_tokens`
    tokens more than they read: a step may write that many rows that are rejected or computed again."""
    convolution = layer.convolution
    mixer = layer.mixer.lagging(draft_tokens, convolution is not None)
    if convolution is None:
        return replace(layer, mixer=mixer)
    return replace(layer, mixer=mixer, convolution=replace(convolution, window_slack=draft_tokens))

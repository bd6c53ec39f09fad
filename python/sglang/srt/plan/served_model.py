"""Chooses what computes a model, a family of ours or a class of transformers, and describes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader, select_text_config
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.families import SERVED_ARCHITECTURES
from sglang.srt.plan.model_description import (
    ModelDescription,
    architecture_of,
    describe_model,
    dtype_of,
    not_supported,
    with_scale_groups,
    without_drafts,
)
from sglang.srt.plan.transformers_backend.asking import facts_of, request_of
from sglang.srt.plan.transformers_backend.causal_classes import causal_classes
from sglang.srt.plan.transformers_backend.description import layers_of_class, names_of_class
from sglang.srt.plan.transformers_backend.facts import TransformersClass
from sglang.srt.server_args import ServerArgs

AUTO, OURS, TRANSFORMERS = "auto", "sglang", "transformers"
"""Values of --model-impl."""


def describe_served(
    args: ServerArgs,
    config: Mapping[str, Any],
    quantization: QuantConfig | None,
    keep_shared_apart: str,
    directory: str,
    text_keys: Collection[str] | None = None,
    written: Mapping[str, Any] | None = None,
) -> ModelDescription:
    """Describes the model of a config.json as `describe_model` does, by what --model-impl asks for. auto: a family of
    ours if there is one, else a class of transformers, which takes the config as it is `written` (None: as `config`
    is). Raises UserError as `describe_model` does, and for a class that was asked for and cannot serve the model."""
    source = f"{directory}/config.json"
    architecture = architecture_of(ConfigReader(select_text_config(config), source))
    values = written or config
    if args.model_impl == OURS or (args.model_impl == AUTO and architecture in SERVED_ARCHITECTURES):
        return describe_model(config, quantization, keep_shared_apart, source, text_keys)
    problems = _missing_class(values, architecture)
    if not problems:
        described = describe_class(values, quantization, directory, args.trust_remote_code)
        if isinstance(described, ModelDescription):
            return described
        problems = described
    if args.model_impl == TRANSFORMERS:
        raise UserError("\n".join(problems))
    model = describe_model(config, quantization, keep_shared_apart, source, text_keys)
    others = (problem for problem in model.unsupported if problem != not_supported(architecture))
    return replace(model, unsupported=(*problems, *others))


def _missing_class(config: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    """Returns why no class needs to be tried; empty if there may be one."""
    classes = config.get("auto_map")
    if architecture in causal_classes() or (isinstance(classes, Mapping) and "AutoModelForCausalLM" in classes):
        return ()
    return (
        f"the architecture {architecture} is not supported: there is no family of it here, and in transformers it is no"
        " class of causal language models.",
    )


def describe_class(
    config: Mapping[str, Any], quantization: QuantConfig | None, directory: str, trust_remote_code: bool
) -> ModelDescription | tuple[str, ...]:
    """Describes a model that a class of transformers computes; returns why it cannot be served instead."""
    request = request_of(config, directory, trust_remote_code)
    facts = facts_of(request)
    return facts.problems or class_description(TransformersClass(request, facts), quantization)


def class_description(code: TransformersClass, quantization: QuantConfig | None) -> ModelDescription:
    """Returns the description that follows from a class's facts. Raises UserError for a config that contradicts
    them."""
    facts, values = code.facts, code.request.values
    keys = ConfigReader(values, "config.json")
    if facts.vocab_size != keys.positive("vocab_size"):
        raise UserError(
            f"{keys.source}: vocab_size is {values['vocab_size']}, but the class has {facts.vocab_size} embeddings."
        )
    assert facts.head is not None
    layers = layers_of_class(facts)
    model = ModelDescription(
        architecture=facts.architecture,
        model_type=str(values.get("model_type") or ""),
        known=True,
        unsupported=(),
        dtype=dtype_of(values),
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        tie_embeddings=facts.head.tied,
        norm_eps=0.0,
        zero_centred_norms=False,
        layers=tuple(layers),
        vision_head_dim=0,
        names=without_drafts(names_of_class(facts), keys, len(layers)),
        quantization=quantization,
        transformers_class=code,
    )
    scaled = with_scale_groups(model)
    return replace(scaled, layers=interned(scaled.layers))

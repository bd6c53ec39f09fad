"""Chooses what computes a model, a family of ours or a class of transformers, and describes it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader, select_text_config
from sglang.srt.configs.labels import classifies
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.configs.sentence_modules import LAST, MEAN, NO_MODULES, SentenceModules, read_sentence_modules
from sglang.srt.configs.text_positions import first_position
from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.families import SERVED_ARCHITECTURES
from sglang.srt.plan.media import MediaDescription, check_placeholders, describe_media
from sglang.srt.plan.model_description import (
    ModelDescription,
    architecture_of,
    describe_model,
    dtype_of,
    not_supported,
    with_scale_groups,
    without_drafts,
)
from sglang.srt.plan.pooling import Pooling
from sglang.srt.plan.transformers_backend.asking import facts_of, request_of
from sglang.srt.plan.transformers_backend.class_tables import causal_classes, has_base_class, image_text_classes
from sglang.srt.plan.transformers_backend.description import layers_of_class, names_of_class
from sglang.srt.plan.transformers_backend.facts import (
    CLASSIFY,
    EMBED,
    GENERATE,
    ClassFacts,
    ClassRequest,
    TransformersClass,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.registry import reads_images
from sglang.srt.towers.transformers_class.spec import MODEL_TYPES, ClassTower

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
    task = _task(args, architecture)
    modules = NO_MODULES if task != EMBED else read_sentence_modules(Path(directory))
    of_family = architecture in SERVED_ARCHITECTURES and task != CLASSIFY and _takes_last(modules)
    if args.model_impl == OURS or (args.model_impl == AUTO and of_family):
        if not _takes_last(modules):
            raise UserError(f"{directory}/modules.json: a family of this server embeds by the last token only.")
        return describe_model(config, quantization, keep_shared_apart, source, text_keys)
    problems = _missing_class(values, architecture, task)
    if not problems:
        request = request_of(values, directory, args.trust_remote_code, task)
        described = describe_class(request, quantization, modules)
        if isinstance(described, ModelDescription):
            return described
        problems = (*described[:-1], f"{described[-1]} {ADVICE}")
    if args.model_impl == TRANSFORMERS or task != GENERATE:
        raise UserError("\n".join(problems))
    try:
        model = describe_model(config, quantization, keep_shared_apart, source, text_keys)
    except UserError:  # it has not even the usual keys
        raise UserError("\n".join(problems)) from None
    others = (problem for problem in model.unsupported if problem != not_supported(architecture))
    return replace(model, unsupported=(*problems, *others))


def _task(args: ServerArgs, architecture: str) -> str:
    """Returns what a class of transformers would be asked to do. Raises UserError for a model that does not generate
    where --is-embedding is missing."""
    if args.is_embedding:
        return CLASSIFY if classifies(architecture) else EMBED
    if classifies(architecture):
        raise UserError(f"{architecture} scores texts and generates none: serve it with --is-embedding.")
    return GENERATE


CAUSAL_KEY, BASE_KEY = "AutoModelForCausalLM", "AutoModel"
"""Keys of `auto_map` in config.json."""


def _own_classes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    classes = values.get("auto_map")
    return classes if isinstance(classes, Mapping) else {}


def _takes_last(modules: SentenceModules) -> bool:
    """Returns whether embeddings are hidden states of the last token, as families of ours return them."""
    return modules.method in ("", LAST) and not modules.dense


OLDEST = 5
"""The oldest major version of transformers whose classes are served."""
ADVICE = "docs/transformers_models.md has the classes that are served, and why others are not."


def _missing_class(config: Mapping[str, Any], architecture: str, task: str) -> tuple[str, ...]:
    """Returns why no class needs to be tried; empty if there may be one."""
    installed = importlib.metadata.version("transformers")
    if int(installed.partition(".")[0]) < OLDEST:
        return (
            f"the architecture {architecture} is not supported: there is no family of it here, and transformers"
            f" {installed} is installed, whose classes are not served. pip install -U 'transformers>={OLDEST}'",
        )
    brought, kind = _own_classes(config), str(config.get("model_type") or "")
    if task == CLASSIFY or (task == EMBED and (has_base_class(kind) or BASE_KEY in brought)):
        return ()
    if task == GENERATE and (architecture in causal_classes() or CAUSAL_KEY in brought):
        return ()
    if architecture in image_text_classes():
        if reads_images(config):
            return ()
        return (
            f"the architecture {architecture} is not supported: there is no family of it here, and what its class in"
            f" transformers does with images is not served. That of these model types is: {', '.join(MODEL_TYPES)}.",
        )
    unsupported = (
        f"the architecture {architecture} is not supported: there is no family of it here, and in transformers"
    )
    if task == EMBED:
        return (f"{unsupported} there is no model type {kind!r}.",)
    advice = " For embeddings, serve it with --is-embedding." if has_base_class(kind) else ""
    return (f"{unsupported} it is no class of causal language models.{advice}",)


def describe_class(
    request: ClassRequest, quantization: QuantConfig | None, modules: SentenceModules = NO_MODULES
) -> ModelDescription | tuple[str, ...]:
    """Describes a model that a class of transformers computes; returns why it cannot be served instead."""
    facts = facts_of(request)
    return facts.problems or class_description(TransformersClass(request, facts), quantization, modules)


def class_description(
    code: TransformersClass, quantization: QuantConfig | None, modules: SentenceModules = NO_MODULES
) -> ModelDescription:
    """Returns the description that follows from a class's facts. modules: what becomes of hidden states where they are
    embeddings. Raises UserError for a config that contradicts the facts."""
    facts, values = code.facts, code.request.values
    keys = ConfigReader(select_text_config(values), "config.json")
    if facts.vocab_size != keys.positive("vocab_size"):
        stated = keys.values["vocab_size"]
        raise UserError(f"{keys.source}: vocab_size is {stated}, but the class has {facts.vocab_size} embeddings.")
    pooling = None if facts.text is None else _pooling(facts, modules, values)
    layers = layers_of_class(facts, () if pooling is None else pooling.dense)
    model = ModelDescription(
        architecture=facts.architecture,
        model_type=str(values.get("model_type") or ""),
        known=True,
        unsupported=(),
        dtype=dtype_of(values),
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        tie_embeddings=facts.head is None or facts.head.tied,
        norm_eps=0.0,
        zero_centred_norms=False,
        layers=tuple(layers),
        vision_head_dim=0,
        names=without_drafts(names_of_class(facts), keys, len(layers)),
        quantization=quantization,
        media=_media(facts, values, keys.source),
        transformers_class=code,
        pooling=pooling,
    )
    scaled = with_scale_groups(model)
    return replace(scaled, layers=interned(scaled.layers))


def _media(facts: ClassFacts, config: Mapping[str, Any], source: str) -> MediaDescription | None:
    """Returns how a class takes images; None: it takes none."""
    media = describe_media(config, by_class=True) if facts.images else None
    if media is None:
        return None
    assert isinstance(media.tower, ClassTower)
    check_placeholders(media, facts.vocab_size, source)
    tensors = tuple((tensor.name, tensor.shape) for tensor in facts.images)
    return replace(media, tower=replace(media.tower, tensors=tensors, out_size=facts.hidden_size))


def _pooling(facts: ClassFacts, modules: SentenceModules, config: Mapping[str, Any]) -> Pooling:
    """Returns what becomes of the hidden states of a class that generates no text. Where no file says it, embeddings of
    decoders are states of the last token, and others the mean of all, as sentence-transformers takes them. Raises
    UserError for linear layers that do not take what is there, and for a class that counts positions in another way
    than the limit of a text's length supposes."""
    assert facts.text is not None
    if facts.text.first_position != (expected := first_position(config)):
        raise UserError(f"{facts.architecture} counts positions from {facts.text.first_position}, not from {expected}.")
    causal = all(layer.attention.causal for layer in facts.layers)
    if facts.text.num_labels:
        return Pooling(facts.text.method, num_labels=facts.text.num_labels)
    size = facts.hidden_size
    for layer in modules.dense:
        if layer.cols != size:
            raise UserError(f"modules.json: {layer.folder} takes {layer.cols} values, but gets {size}.")
        size = layer.rows
    return Pooling(modules.method or (LAST if causal else MEAN), modules.dense)

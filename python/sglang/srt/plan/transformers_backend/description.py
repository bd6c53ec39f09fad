"""Describes layers and names of a model whose code is a class of transformers, from its facts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.blocks.transformers_layer.spec import (
    TextLayer,
    TransformersExperts,
    TransformersLayer,
    TransformersStream,
    elements_of,
    softmax_of,
    values_of,
)
from sglang.srt.configs.activation import FUNCTIONS, Activation
from sglang.srt.configs.rope import unrotated
from sglang.srt.configs.sentence_modules import DenseModule
from sglang.srt.plan.layer_spec import ABSENT, FeedForward, LayerSpec
from sglang.srt.plan.masks import windowed
from sglang.srt.plan.transformers_backend.facts import ClassFacts, ExpertsFact, LayerFact
from sglang.srt.plan.weight_names import WeightMap
from sglang.srt.plan.weight_spec import Elements

NO_HEAD = "lm_head"
"""Name of an output head that a class does not have."""


def layers_of_class(facts: ClassFacts, dense: Sequence[DenseModule] = ()) -> list[LayerSpec]:
    """Returns the layers of a class as blocks. dense: linear layers behind the pooling of an embedding."""
    stream = TransformersStream(
        (
            *_outside(facts),
            *(Elements(layer.rows * layer.cols) for layer in dense),
            *(Elements(layer.rows) for layer in dense if layer.bias),
        )
    )
    kind = TransformersLayer if facts.text is None else TextLayer
    return [_layer(layer, stream, kind) for layer in facts.layers]


def _outside(facts: ClassFacts) -> tuple[Elements, ...]:
    bias = (Elements(facts.head.rows),) if facts.head is not None and facts.head.bias else ()
    return (*(elements_of(tensor) for tensor in facts.tensors), *bias)


def _layer(layer: LayerFact, stream: TransformersStream, kind: type[TransformersLayer]) -> LayerSpec:
    attention, experts = layer.attention, layer.experts
    mixer = kind(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        # The angles are the class's: it makes tables of a step's tokens, or rotates by itself.
        rope=unrotated(attention.rotary_dim or attention.head_dim),
        values=values_of(attention),
        mask=windowed(attention.window),
        softmax=softmax_of(attention),
        attention=attention,
        linears=layer.linears,
        tensors=layer.tensors,
    )
    block: FeedForward = ABSENT if experts is None else _experts(experts)
    return LayerSpec(mixer, block, stream)


def _experts(fact: ExpertsFact) -> TransformersExperts:
    return TransformersExperts(
        fact.num_experts,
        fact.intermediate_size,
        Router(fact.top_k),
        Activation(function=FUNCTIONS[fact.function]),
        bias=fact.bias,
        form=fact.form,
        fact=fact,
    )


def names_of_class(facts: ClassFacts) -> WeightMap:
    """Returns the names of a class's parameters in checkpoints: those of its modules. A parameter of a layer itself is
    in our module "own", and one outside of layers in "outside"."""
    head = NO_HEAD if facts.head is None else facts.head.name
    model = {"embed": facts.embedding, "lm_head": head, "norm": head}
    for tensor in facts.tensors:
        module = tensor.name.rpartition(".")[0]
        model[f"outside.{module}".removesuffix(".")] = module
    layer: dict[str, str] = {"own": ""}
    for fact in facts.layers:
        modules = [linear.name for linear in fact.linears]
        modules += [tensor.name.rpartition(".")[0] for tensor in fact.tensors if "." in tensor.name]
        layer |= {module: module for module in (*modules, fact.attention.module)}
        if fact.experts is not None:
            layer["moe.experts"] = fact.experts.module
            if fact.experts.apart:
                layer |= {"moe.w13": fact.experts.apart, "moe.w2": fact.experts.apart}
    beginnings = ((facts.beginning, ""),) if facts.beginning else ()
    behind = () if facts.stages is None else (f"{facts.stages.norm}.",)
    names = WeightMap(
        model,
        layer,
        facts.layers_at,
        beginnings=beginnings,
        renamings=facts.renamings,
        behind=behind,
        unread=tuple(tensor.name for tensor in facts.images),  # the encoder reads them
    )
    named = next((fact.experts.parts for fact in facts.layers if fact.experts and fact.experts.parts), ())
    return replace(names, parts=dict(zip(("gate", "up", "down"), named, strict=False)))

"""Describes a model whose code is a class of transformers. No torch: the facts come from a process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from sglang.srt.blocks.class_layer.spec import (
    ClassExperts,
    ClassLayer,
    ClassStream,
    elements_of,
    softmax_of,
    values_of,
)
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.configs.activation import FUNCTIONS, Activation
from sglang.srt.configs.rope import unrotated
from sglang.srt.errors import UserError
from sglang.srt.plan.class_code.facts import ClassFacts, ClassRequest, ExpertsFact, LayerFact
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec
from sglang.srt.plan.masks import windowed
from sglang.srt.plan.weight_names import WeightMap
from sglang.srt.plan.weight_spec import Elements

SECONDS = 180
"""Processor time of a trial; most take a few seconds, nearly all of it to import torch."""
WORKING_BYTES = 16 << 30
"""Address space of a trial beyond what its libraries take. A run without weights takes little."""


def request_of(values: Mapping[str, Any], directory: str, trust_remote_code: bool) -> ClassRequest:
    """Returns the request for the class of a config.json, without what is about its checkpoint."""
    kept = {key: value for key, value in values.items() if key not in ("quantization_config", "compression_config")}
    return ClassRequest(kept, directory, trust_remote_code)


def facts_of(request: ClassRequest) -> ClassFacts:
    """Returns the facts of a class, found in a process of its own. Asked once for each config."""
    return _facts_of(msgspec.json.encode(request))


@lru_cache(maxsize=64)
def _facts_of(request: bytes) -> ClassFacts:
    command = [sys.executable, "-m", "sglang.srt.models.class_code.trial", str(SECONDS), str(WORKING_BYTES)]
    try:
        ended = subprocess.run(command, input=request, capture_output=True, timeout=2 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the model's class in transformers did not run without weights within {2 * SECONDS} s."
        ) from None
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            "the model's class in transformers cannot be run without weights"
            f" ({lines[-1][:300] if lines else f'its process ended with {ended.returncode}'})."
        )
    return msgspec.json.decode(ended.stdout, type=ClassFacts)


def layers_of_class(facts: ClassFacts) -> list[LayerSpec]:
    """Returns the layers of a class as blocks."""
    stream = ClassStream(_outside(facts))
    return [_layer(layer, stream) for layer in facts.layers]


def _outside(facts: ClassFacts) -> tuple[Elements, ...]:
    assert facts.head is not None
    bias = (Elements(facts.head.rows),) if facts.head.bias else ()
    return (*(elements_of(tensor) for tensor in facts.tensors), *bias)


def _layer(layer: LayerFact, stream: ClassStream) -> LayerSpec:
    attention, experts = layer.attention, layer.experts
    mixer = ClassLayer(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rope=unrotated(attention.head_dim),
        values=values_of(attention),
        mask=windowed(attention.window),
        softmax=softmax_of(attention),
        attention=attention,
        linears=layer.linears,
        tensors=layer.tensors,
    )
    return LayerSpec(mixer, ABSENT if experts is None else _experts(experts), stream)


def _experts(fact: ExpertsFact) -> ClassExperts:
    return ClassExperts(
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
    assert facts.head is not None
    model = {"embed": facts.embedding, "lm_head": facts.head.name, "norm": facts.head.name}
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
    names = WeightMap(model, layer, facts.layers_at, renamings=facts.renamings)
    named = next((fact.experts.parts for fact in facts.layers if fact.experts and fact.experts.parts), ())
    return replace(names, parts=dict(zip(("gate", "up", "down"), named, strict=False)))

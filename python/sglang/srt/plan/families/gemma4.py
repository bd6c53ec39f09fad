"""Gemma 4, text: heads of two sizes, keys that are also values, a dense MLP beside the experts; in the small models
caches that layers share and embeddings that are added in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.configs.activation import GELU, Activation
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import OwnCache, PerHead, Softmax, Values
from sglang.srt.plan.families.attention import (
    WINDOWED,
    full_and_windowed,
    grouped_attention,
    kinds_by_pattern,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import EXPERT_COUNTS, activation, experts, mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Embedding, Family, Logits, Model
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.layer_spec import ABSENT, FeedForward, LayerSpec, Mixer, Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

_EXPERTS = {
    "moe.router": "router.proj",
    "moe.router_scales": "router",
    "moe.dense_norm": "pre_feedforward_layernorm",
    "moe.dense_norm_after": "post_feedforward_layernorm_1",
    "moe.experts_norm": "pre_feedforward_layernorm_2",
    "moe.experts_norm_after": "post_feedforward_layernorm_2",
    "moe.shared.gate_up": "mlp.{part}_proj",
    "moe.shared.down": "mlp.down_proj",
    "moe.experts": "experts",
    "moe.w13": "experts.{expert}.{part}_proj",
    "moe.w2": "experts.{expert}.{part}_proj",
}
_INPUTS = {
    "inputs.gate": "per_layer_input_gate",
    "inputs.projection": "per_layer_projection",
    "inputs_after": "post_per_layer_input_norm",
}
_MODEL_INPUTS = {
    "per_layer.table": "model.embed_tokens_per_layer",
    "per_layer.projection": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}
_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **NORMS_AROUND, **_EXPERTS, **_INPUTS, "end": ""}


def gemma4(c: Config) -> Model:
    c = c.usual({"tie_word_embeddings": True})
    # "vision" makes image tokens see each other in both directions; text stays causal.
    c.only("use_bidirectional_attention", "vision")
    c.only("hidden_activation", "gelu_pytorch_tanh")
    function = activation(c, GELU)
    kinds = kinds_by_pattern(c, "sliding_window_pattern", 6, WINDOWED)
    mixers = with_shared_caches(c, mixers_by_kind(c, kinds, full_and_windowed(_attention)), kinds)
    residual = Sum(norms_after=True, layer_scale=True)
    if c.default("enable_moe_block", bool, True) and c.count(*EXPERT_COUNTS):
        shared = Shared(c.positive("intermediate_size"))
        router = Router(0, exact_logits=True)
        block: Dense | MoE = experts(c, router, function, shared=shared, form="stacked", branches=True)
        residual = replace(residual, ffn_norms=False)
    else:
        block = mlp(c, function)
    inputs = _per_layer_inputs(c, function)
    layers = [LayerSpec(mixer, block, residual, inputs) for mixer in mixers]
    if c.default("use_double_wide_mlp", bool, False):
        layers = [_double_wide(layer) if not layer.mixer.caches_tokens else layer for layer in layers]
    return Model(
        c,
        layers,
        embedding=Embedding(c.positive("hidden_size") ** 0.5),
        logits=Logits(cap=c.default("final_logit_softcapping", float, 0.0)),
    )


def _attention(c: Config, window: int) -> GQA:
    """Layers without a window may have larger heads (`global_head_dim`), and keys that are values, too."""
    keys_are_values = not window and c.default("attention_k_eq_v", bool, False)
    if not window and c.count("global_head_dim"):
        kv_heads = c.count("num_global_key_value_heads") if keys_are_values else 0
        stated = {"num_key_value_heads": kv_heads} if kv_heads else {}
        c = c.with_values({"head_dim": c.positive("global_head_dim"), **stated})
    return grouped_attention(
        c,
        window,
        head_dim=256,
        softmax=Softmax(1.0),
        qk_norm=PerHead(),
        values=Values(norm=True, from_keys=keys_are_values),
    )


def with_shared_caches(c: Config, mixers: Sequence[Mixer], kinds: Sequence[str]) -> list[Mixer]:
    """Returns the mixers, of which the last `num_kv_shared_layers` attend to the cache of the last earlier layer of
    their kind. Raises UserError where there is none."""
    result, number = list(mixers), c.count("num_kv_shared_layers")
    first = max(0, len(mixers) - number)
    for i in range(first, len(mixers)):
        source = next((j for j in reversed(range(first)) if kinds[j] == kinds[i]), None)
        if source is None:
            raise UserError(
                f"{c.source}: 'num_kv_shared_layers' is {number}, but before these layers none is of the kind"
                f" {kinds[i]}, whose cache layer {i} could share."
            )
        shared, sharing = result[source], result[i]
        assert isinstance(shared, GQA) and isinstance(sharing, GQA)
        result[source] = replace(shared, cache=OwnCache(shared=True))
        result[i] = sharing.reading(source)
    return result


def _double_wide(layer: LayerSpec) -> LayerSpec:
    """Returns the layer with an MLP (or shared expert) twice as wide."""
    experts, mlp = layer.ffn.experts, layer.ffn.mlp
    if experts is None:
        assert mlp is not None
        return replace(layer, ffn=replace(mlp, intermediate_size=2 * mlp.intermediate_size))
    assert experts.shared is not None
    shared = replace(experts.shared, intermediate_size=2 * experts.shared.intermediate_size)
    return replace(layer, ffn=replace(experts, shared=shared))


def _per_layer_inputs(c: Config, function: Activation) -> FeedForward:
    """Returns the embeddings that tokens add in every layer, or ABSENT."""
    size = c.count("hidden_size_per_layer_input")
    if not size:
        return ABSENT
    return PerLayerEmbedding(size, c.num_layers, c.positive("vocab_size_per_layer_input"), function)


GEMMA4 = Family(
    title="Gemma 4",
    model_types=("gemma4",),
    architectures=("Gemma4ForCausalLM",),
    read=gemma4,
    names=WeightMap({**MODEL_NAMES, **_MODEL_INPUTS}, _LAYER),
)
GEMMA4_TEXT = replace(
    GEMMA4,
    model_types=(),
    architectures=("Gemma4ForConditionalGeneration",),
    names=replace(
        GEMMA4.names.below("model.language_model."),
        unread=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
)
"""The text half of a checkpoint with encoders of images and sound."""

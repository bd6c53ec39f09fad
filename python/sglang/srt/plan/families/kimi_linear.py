"""Kimi Linear: three of four layers are Kimi delta attention, every fourth latent attention without positions."""

from __future__ import annotations

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import FULL, RECURRENT
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import latent_attention
from sglang.srt.plan.families.recurrent import KDA_CONFIG, kimi_delta
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    MODEL_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

_OWN_NAMES = {
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
_OF_K3 = {
    "attn_res_block_size": "attention over the residual streams of earlier layers",
    "mla_use_output_gate": "a gate of latent attention's output",
    "routed_expert_hidden_size": "experts of a smaller hidden size",
}
"""Keys of Kimi K3 (whose language model is called kimi_linear, too) that are not described here, and their meaning."""


def kimi_linear(c: Config) -> Model:
    c.only("attention_bias", False)
    c.only("hidden_act", "silu")
    c.only("mla_use_nope", True)
    c.only("moe_layer_freq", 1)
    c = c.renamed(_OWN_NAMES)
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    latent, recurrent = latent_attention(c, rotates=False), _recurrent_layers(c)
    delta = kimi_delta(c) if any(recurrent) else latent
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of([delta if flag else latent for flag in recurrent], blocks))


_LISTS = ("full_attn_layers", "kda_layers")


def _recurrent_layers(c: Config) -> list[bool]:
    """Returns whether each layer is Kimi delta attention, by the lists of `linear_attn_config` (which count layers from
    1) or by `layer_types`. Raises UserError where they do not name each layer once."""
    inner = c.default(KDA_CONFIG, dict, {})
    for key, what in _OF_K3.items():
        if c.values.get(key):
            raise UserError(f"{c.source}: {key!r} ({what}) is not described here yet.")
    if any(name in inner for name in _LISTS):
        lists = ConfigReader(inner, f"{c.source} {KDA_CONFIG}")
        full, recurrent = (lists.default(name, list, []) for name in _LISTS)
        listed = [*full, *recurrent]
        if any(type(layer) is not int for layer in listed) or sorted(listed) != list(range(1, c.num_layers + 1)):
            raise UserError(
                f"{c.source}: {' and '.join(_LISTS)} of {KDA_CONFIG!r} must name each layer from 1 to {c.num_layers}"
                " once."
            )
        return [layer + 1 in set(recurrent) for layer in range(c.num_layers)]
    kinds = c.default("layer_types", list, [])
    unknown = sorted({str(kind) for kind in kinds} - {FULL, RECURRENT})
    if unknown or len(kinds) < c.num_layers:
        what = f"the kinds {', '.join(unknown)}" if unknown else f"{len(kinds)} entries for {c.num_layers} layers"
        raise UserError(f"{c.source}: {KDA_CONFIG!r} says nothing of the layers, and 'layer_types' has {what}.")
    return [kind == RECURRENT for kind in kinds[: c.num_layers]]


KIMI_LINEAR = Family(
    title="Kimi Linear",
    model_types=("kimi_linear",),
    architectures=("KimiLinearForCausalLM",),
    read=kimi_linear,
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            **LATENT_NAMES,
            **KIMI_DELTA_NAMES,
            **W123_NAMES,
            "moe.correction": "block_sparse_moe.gate",
            "mlp.gate_up": "mlp.{own}_proj",
            "mlp.down": "mlp.down_proj",
            "moe.shared.gate_up": "block_sparse_moe.shared_experts.{own}_proj",
            "moe.shared.down": "block_sparse_moe.shared_experts.down_proj",
        },
        parts=W123_PARTS,
        modules=(("self_attn.forget_gate.", "self_attn."), ("mlp.shared_experts.", "block_sparse_moe.shared_experts.")),
    ),
)

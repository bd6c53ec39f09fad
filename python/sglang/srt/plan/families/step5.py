"""Step-5: layers of Step-3.5, of which each KV head of those without a window attends to regions of tokens that it
selects by pooled keys."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import FULL
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model
from sglang.srt.plan.families.step3 import STEP3P5, step3
from sglang.srt.plan.layer_spec import LayerSpec

_SPARSE = "sparse_config"
_ONLY = {
    "compression_method": "csa_block_compress",
    "attention_impl": "sparse_gqa",
    "sparse_indexer_csa_z_norm_type": "none",
    "sparse_indexer_use_rope": True,
    "sparse_indexer_num_k_heads": 1,
}
"""Keys of `sparse_config` with the one value that is computed."""
_UNUSED = ("sparse_indexer_softmax_variant", "sparse_indexer_ssmax_s_granularity")
"""Keys of `sparse_config` about the factors of a scaled softmax (STEP5 says why they are not read)."""


def step5(c: Config) -> Model:
    # The residual stream has the model's dtype here.
    c.ignore("fp32_residual_connection", "norm_dtype")
    model = step3(c)
    inner = Config(c.default(_SPARSE, dict, {}), f"{c.source} {_SPARSE}", problems=c.problems)
    if not inner.values or not inner.default("enabled", bool, True):
        return model
    for key, value in _ONLY.items():
        if inner.values.get(key) not in (None, value):
            c.problem(f"{_SPARSE} {key} = {inner.values[key]!r} is not supported; supported: {value!r}.")
    if inner.default("apply_to_layer_types", list, [FULL]) != [FULL]:
        c.problem(f"{_SPARSE} apply_to_layer_types = {inner.values['apply_to_layer_types']!r} is not supported.")
    layers = [_with_regions(layer, inner) for layer in model.layers]
    if any(isinstance(layer.mixer, RegionSparse) for layer in layers):
        _check_unread(inner)
    return replace(model, layers=layers)


def _check_unread(inner: Config) -> None:
    """Notes a problem for each key of `sparse_config` that nothing has read and that switches something on."""
    inner.ignore(*_UNUSED)
    for key in sorted(set(inner.recorded) - inner.recorded.read):
        if value := inner.recorded.peek(key):
            inner.problem(f"{key} = {value!r:.200} is not supported: no layer here reads it.")


def _with_regions(layer: LayerSpec, inner: Config) -> LayerSpec:
    """Returns the layer with an indexer for each KV head, unless it has a window. Raises UserError."""
    heads = layer.mixer
    assert isinstance(heads, GQA), "the family's layers are of one kind"
    if heads.window:
        return layer
    groups, index_heads = inner.positive("num_provider_groups", 4), inner.positive("sparse_indexer_num_heads", 16)
    rotary, dim = inner.positive("sparse_indexer_rope_dim", 32), inner.positive("proxy_dim", 256)
    if groups != heads.num_kv_heads or index_heads % groups:
        raise UserError(
            f"{inner.source}: {index_heads} index heads in num_provider_groups {groups} for {heads.num_kv_heads} KV"
            " heads, of which each takes a group."
        )
    if rotary > dim:
        raise UserError(f"{inner.source}: proxy_dim {dim} is less than the {rotary} rotary dims.")
    indexer = Indexer(index_heads // groups, dim, inner.positive("topk", 512))
    block = inner.positive("region_block_size", 8)
    return replace(layer, mixer=RegionSparse(heads, indexer, block, replace(heads.rope, rot_dim=rotary)))


_LAYER_NAMES = {
    **STEP3P5.names.layer,
    "attn.index": "self_attn.sparse_indexer_{part}",
    "attn.index_weights": "self_attn.sparse_indexer_w",
    "attn.index_q_norm": "self_attn.sparse_indexer_q_norm",
    "attn.index_k_norm": "self_attn.sparse_indexer_k_norm",
}
STEP5 = replace(
    STEP3P5,
    title="Step-5",
    model_types=("step4", "step5"),
    architectures=("Step4ForCausalLM", "Step5ForCausalLM"),
    read=step5,
    # Factors of a scaled softmax, which the one server that publishes the model's code loads and does not use.
    names=replace(STEP3P5.names, layer=_LAYER_NAMES, ignore=(*STEP3P5.names.ignore, ".ssmax_s")),
)
STEP5_VL: Family = replace(
    STEP5,
    model_types=("step3p5v", "step5_vl"),
    architectures=("MMGPTStepRoboticsForCausalLM", "Step5ForConditionalGeneration"),
    names=replace(STEP5.names, unread=("vision_model.", "vit_large_projector.")),
)
"""The text half of a checkpoint with an image encoder."""

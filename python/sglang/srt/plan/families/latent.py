"""Latent attention of DeepSeek's form, read from its keys, and which layers have an indexer of their own."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.mla.spec import MLA, Indexer
from sglang.srt.configs.rope import unrotated
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import temperature_scaling
from sglang.srt.plan.families.config import Config

_INDEXER_KINDS = {"F": "full", "S": "shared"}
SPARSE_LAYER = "deepseek_sparse_attention"
"""Name in `layer_types` of layers with an indexer."""
SPARSE_NAMES = frozenset({SPARSE_LAYER, "indexed_attention"})
"""The second one is that of later releases of transformers."""


def latent_attention(
    c: Config,
    *,
    has_indexer: bool = True,
    indexer_is_neox_style: bool = True,
    rotates: bool = True,
    temperature: bool = False,
) -> MLA:
    """Returns latent attention; over selected tokens if the config has an indexer.

    has_indexer: the layer has the indexer; otherwise it takes the selection of an earlier layer
    indexer_is_neox_style: as Indexer.is_neox_style, unless `indexer_rope_interleave` says it
    rotates: heads rotate
    temperature: `llama_4_scaling_beta` scales the attention temperature
    """
    is_neox_style = not c.default("indexer_rope_interleave", bool, not indexer_is_neox_style)
    indexer = indexer_of(c, is_neox_style) if c.count("index_topk") else None
    others = {str(kind) for kind in c.default("layer_types", list, [])} - SPARSE_NAMES
    if indexer is not None and others:
        raise UserError(f"{c.source}: layer_types {', '.join(sorted(others))} are not described here yet.")
    rope_dim = c.positive("qk_rope_head_dim")
    scaling, rotary = temperature_scaling(c) if temperature else (None, {})
    # This factor is the rotary key's share of a head, and all of the rotary key rotates.
    rotary.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    rope = c.rope(rope_dim, **rotary) if rotates else unrotated(rope_dim)
    return MLA(
        num_heads=c.positive("num_attention_heads"),
        q_lora_rank=c.count("q_lora_rank"),
        kv_lora_rank=c.positive("kv_lora_rank"),
        nope_dim=c.positive("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=c.positive("v_head_dim"),
        rope=replace(rope, is_neox_style=not c.default("rope_interleave", bool, True)),
        top_k=indexer.top_k if indexer is not None else 0,
        indexer=indexer if has_indexer else None,
        attn_temperature=scaling,
    )


def indexer_of(c: Config, is_neox_style: bool = True) -> Indexer:
    """Returns the indexer that selects `index_topk` entries."""
    heads, dim = c.positive("index_n_heads"), c.positive("index_head_dim")
    return Indexer(heads, dim, c.positive("index_topk"), is_neox_style)


def indexed_layers(c: Config) -> list[bool]:
    """Returns whether each layer has an indexer of its own; the others take the selection of the last layer before that
    has one. Read from `indexer_types`, or `index_topk_pattern` ("FSSS..."), or else every `index_topk_freq`-th layer
    from layer `index_skip_topk_offset` - 1 on. Raises UserError."""
    pattern, count = c.values.get("index_topk_pattern"), c.num_layers
    if c.values.get("indexer_types") is not None:
        kinds = c.by_layer("indexer_types", "full")
    elif pattern is not None:
        kinds = [_INDEXER_KINDS.get(str(kind), str(kind)) for kind in pattern][:count]
    else:
        every, offset = c.count("index_topk_freq") or 1, c.default("index_skip_topk_offset", int, 2)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]
    unknown = sorted({str(kind) for kind in kinds} - set(_INDEXER_KINDS.values()))
    if unknown or len(kinds) != count or kinds[0] != "full":
        problem = f"kinds {', '.join(unknown)}" if unknown else f"{len(kinds)} kinds for {count} layers"
        if not unknown and len(kinds) == count:
            problem = "a first layer that takes a selection, and no layer before it makes one"
        raise UserError(f"{c.source}: 'indexer_types' (or 'index_topk_pattern') has {problem}.")
    return [kind == "full" for kind in kinds]

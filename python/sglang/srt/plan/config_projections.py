"""Reads whether a checkpoint has q, k and v as one tensor, and in how many TP blocks. No torch."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.fused_projections import FUSED, LAYOUT, TP_BLOCKS
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.weight_names import WeightMap


def fuses_projections(keys: ConfigReader, family: Family) -> bool:
    """Returns whether the checkpoint has q, k and v as one tensor."""
    return keys.values.get(LAYOUT) == FUSED and FUSED in family.allowed.get(LAYOUT, ())


def with_fused_names(names: WeightMap) -> WeightMap:
    """Returns the names for a checkpoint with q, k and v as one tensor."""
    return replace(names, layer={**names.layer, "attn.qkv": "self_attn.qkv_proj"})


def projection_tp_blocks(keys: ConfigReader, family: Family, heads: int, kv_heads: int) -> int:
    """Returns the number of TP blocks (`GQA.tp_blocks`) of a layer with these heads; 0: q, k and v are apart. `keys`:
    those of layers without a window. Where neither config nor weights tell, assumes the form of the first published FP8
    checkpoints, one block for each KV head. Raises UserError for a stated number that does not divide the heads."""
    if not fuses_projections(keys, family):
        return 0
    if keys.values.get(TP_BLOCKS) is None:
        tp_blocks = keys.positive("num_key_value_heads", heads)
        return tp_blocks if kv_heads % tp_blocks == 0 else 1
    tp_blocks = keys.positive(TP_BLOCKS)
    if kv_heads % tp_blocks:
        raise UserError(f"{keys.source}: {TP_BLOCKS} {tp_blocks} does not divide the {kv_heads} KV heads of a layer.")
    return tp_blocks

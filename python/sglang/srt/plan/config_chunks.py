"""Reads attention by chunks from the keys of a config.json: which layers see their chunk only, which do not rotate
heads (Llama 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import unrotated
from sglang.srt.errors import UserError
from sglang.srt.plan.mixers import GQA

CHUNKED, WHOLE = "chunked_attention", "full_attention"


def chunked_mixers(keys: ConfigReader, whole: GQA, num_layers: int) -> list[GQA]:
    """Returns the attention of each layer. `whole`: that of a layer which rotates heads and sees all tokens.

    `no_rope_layers` has a 1 for each layer that rotates; without it every `no_rope_layer_interval`-th layer does not.
    Rotating layers see chunks unless `layer_types` say otherwise. The others have no norms of heads, and attention
    temperature scaling if `attn_temperature_tuning` is set. Raises UserError.
    """
    rotates = _rotating(keys, num_layers)
    kinds = keys.default("layer_types", list, [CHUNKED if here else WHOLE for here in rotates])[:num_layers]
    unknown = sorted({str(kind) for kind in kinds} - {CHUNKED, WHOLE})
    if unknown or len(kinds) < num_layers:
        what = f"{', '.join(unknown)}" if unknown else f"of {len(kinds)} layers for {num_layers}"
        raise UserError(f"{keys.source}: layer_types {what} are not described here yet.")
    size = keys.positive("attention_chunk_size") if CHUNKED in kinds else 0
    unrotating = replace(whole, rope=unrotated(whole.head_dim), qk_norm="", **_growth(keys))
    return [
        replace(whole if here else unrotating, window=size if kind == CHUNKED else 0, chunked=kind == CHUNKED)
        for here, kind in zip(rotates, kinds, strict=True)
    ]


def _rotating(keys: ConfigReader, num_layers: int) -> list[bool]:
    listed = keys.default("no_rope_layers", list, [])
    if not listed:
        interval = keys.positive("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(listed) < num_layers or any(value not in (0, 1) for value in listed):
        raise UserError(f"{keys.source}: 'no_rope_layers' must be a list of 0 and 1 for {num_layers} layers.")
    return [value == 1 for value in listed[:num_layers]]


def _growth(keys: ConfigReader) -> dict[str, Any]:
    """Returns the fields of GQA for attention temperature scaling. Configs of the first releases have a number where
    later ones have a flag."""
    if not keys.values["attn_temperature_tuning"]:
        return {}
    scale, length = keys.default("attn_scale", float, 0.0), keys.positive("floor_scale")
    return {"attn_temperature": scale, "attn_temperature_length": length, "attn_temperature_offset": 1} if scale else {}

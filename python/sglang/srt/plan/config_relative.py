"""Reads attention with relative biases, and short convolutions, from a config.json (Inkling)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.layer_spec import ShortConvolution
from sglang.srt.plan.mixers import GQA

WINDOWED, WHOLE = "hybrid_sliding", "hybrid"
_USUAL_PERIOD = 6


def short_convolution(keys: ConfigReader, channels: int) -> ShortConvolution:
    """Returns the convolution over `channels` channels. Raises UserError for one that sees no earlier token."""
    taps = keys.count("sconv_kernel_size", "conv_kernel_size") or 4
    if taps < 2:
        raise UserError(f"{keys.source}: 'sconv_kernel_size' must be at least 2; got {taps}.")
    return ShortConvolution(taps, channels)


def relative_mixers(keys: ConfigReader, grouped: Callable[[int], GQA], num_layers: int) -> list[GQA]:
    """Returns the attention of each layer. `grouped(window)` makes it for a window, 0 for all tokens.

    A layer with a window has biases for all distances in it; the others have `rel_extent` of them, and attention
    temperature scaling from `log_scaling_n_floor` on. Heads are normed, so products are divided by the head dim. Raises
    UserError.
    """
    kinds = _kinds(keys, num_layers)
    dims, taps = keys.positive("d_rel"), short_convolution(keys, 1).taps
    by_kind: dict[str, GQA] = {}
    for kind in dict.fromkeys(kinds):
        windowed = kind == WINDOWED
        window = keys.positive("sliding_window") if windowed else 0
        mixer = grouped(window)
        by_kind[kind] = replace(
            mixer,
            scale=1.0 / mixer.head_dim,
            conv_taps=taps,
            bias_dims=dims,
            bias_extent=window or keys.positive("rel_extent"),
            **({} if windowed else _growth(keys)),
        )
    return [by_kind[kind] for kind in kinds]


def _kinds(keys: ConfigReader, num_layers: int) -> list[str]:
    local = keys.values.get("local_layer_ids")
    if keys.values.get("layer_types") is not None:
        kinds = [str(kind) for kind in keys.require("layer_types", list)][:num_layers]
    elif local is not None:
        kinds = [WINDOWED if i in keys.require("local_layer_ids", list) else WHOLE for i in range(num_layers)]
    else:
        kinds = [WINDOWED if (i + 1) % _USUAL_PERIOD else WHOLE for i in range(num_layers)]
    unknown = sorted(set(kinds) - {WINDOWED, WHOLE})
    if unknown or len(kinds) < num_layers:
        what = ", ".join(unknown) if unknown else f"of {len(kinds)} layers for {num_layers}"
        raise UserError(f"{keys.source}: layer_types {what} are not described here yet.")
    return kinds


def _growth(keys: ConfigReader) -> dict[str, Any]:
    """Returns the fields of GQA for attention temperature scaling."""
    length, growth = keys.count("log_scaling_n_floor"), keys.default("log_scaling_alpha", float, 0.1)
    if not length or not growth:
        return {}
    return {
        "attn_temperature": growth,
        "attn_temperature_length": length,
        "attn_temperature_offset": 1,
        "attn_temperature_smooth": True,
    }

"""Attention that many families share, read from the usual keys: grouped heads, with windows in some layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.rope import RopeSpec, by_layer_type, rope_parameters, unrotated
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import PLAIN_VALUES, AttentionTemperature, Biases, Values
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.masks import windowed

FULL, WINDOWED, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers, as `layer_types` names them."""


def grouped_attention(
    c: Config,
    window: int = 0,
    *,
    head_dim: int = 0,
    kv_heads: int = 0,
    rotates: bool = True,
    rotary: Mapping[str, Any] | None = None,
    is_neox_style: bool = True,
    values: Values = PLAIN_VALUES,
    **facts: Any,
) -> GQA:
    """Returns grouped-query attention of the usual keys. Raises UserError.

    window: tokens that a token attends to; 0: all
    head_dim, kv_heads: values where the config states none; 0: hidden_size / heads, and as many as heads
    rotates: heads rotate; rotary: rotary keys with other values than the config's; is_neox_style: as in RopeSpec
    values: without their dim, which the config says
    facts: further fields of GQA; `biases` are what `attention_bias` says unless they are among them
    """
    heads = c.positive("num_attention_heads")
    head_dim = c.positive("head_dim", head_dim or max(1, c.positive("hidden_size") // heads))
    kv_heads = c.positive("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise UserError(f"{c.source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    bias = c.default("attention_bias", bool, False)
    rope = _rope(c, head_dim, window, rotary or {}) if rotates else unrotated(head_dim)
    return GQA(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mask=windowed(window),
        rope=replace(rope, is_neox_style=is_neox_style),
        values=replace(values, dim=c.positive("v_head_dim", head_dim)),
        **{"biases": Biases(bias, bias), **facts},
    )


def _rope(c: Config, head_dim: int, window: int, rotary: Mapping[str, Any]) -> RopeSpec:
    """Layers with a window have a rotary embedding of their own where the config says so, by layer type or with a base
    for these layers."""
    layer_type = (WINDOWED if window else FULL) if by_layer_type(c.values) else ""
    theta = next((c.values[key] for key in WINDOW_THETAS if c.values.get(key) is not None), None)
    changed = _with_base(c, theta) if window and theta is not None else {}
    return c.rope(head_dim, layer_type, **{**changed, **rotary})


def _with_base(c: Config, theta: float) -> dict[str, Any]:
    """Returns the rotary keys of layers with the base `theta`, which are not scaled. `rope_parameters` that do not
    differ by layer type are those of the other layers, but for the share of a head that rotates."""
    written = c.values.get("rope_parameters")
    share = written.get("partial_rotary_factor") if isinstance(written, Mapping) else None
    rotation = {} if share is None else {"rope_parameters": {"partial_rotary_factor": share, "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": None, **rotation}


def full_and_windowed(attention: Callable[..., Mixer]) -> dict[str, Callable[[Config], Mixer]]:
    """Returns makers of layers that attend to all tokens and of layers with a window (`sliding_window`).
    `attention`: takes the config and the window."""
    return {FULL: lambda c: attention(c, 0), WINDOWED: lambda c: attention(c, c.positive("sliding_window"))}


def attention_by_layer(c: Config, attention: Callable[..., Mixer], usual: str = FULL) -> list[Mixer]:
    """Returns the attention of each layer, with a window where `layer_types` say so. `attention`: takes the config and
    the window (0: none); `usual`: the kind of all layers where the config has no such list."""
    return mixers_by_kind(c, layer_kinds(c, usual), full_and_windowed(attention))


def rotating_layers(c: Config) -> list[bool]:
    """Returns whether each layer rotates heads: `no_rope_layers` has a 1 for each that does; without it every
    `no_rope_layer_interval`-th layer does not. Raises UserError."""
    if c.values.get("no_rope_layers"):
        return c.flags("no_rope_layers")
    interval = c.positive("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(c.num_layers)]


def check_windows(c: Config) -> None:
    """Notes as a problem a window of which the config does not say which layers have it."""
    if c.values.get("use_sliding_window") and c.values.get("layer_types") is None:
        c.problem("use_sliding_window = True is not supported without layer_types, which say of which layers.")


WINDOW_THETAS = ("rope_local_base_freq", "swa_rope_theta")
"""Keys with the rotary base of layers with a window, in configs that do not say it by layer type."""


def kinds_by_pattern(c: Config, key: str, usual: int, others: str) -> list[str]:
    """Returns the kind of each layer by `layer_types`, or else attention to all tokens in every n-th layer and `others`
    in those between. n is the value of `key`, or `usual`."""
    if c.values.get("layer_types") is not None:
        return layer_kinds(c)
    every = c.positive(key, usual)
    return [FULL if (i + 1) % every == 0 else others for i in range(c.num_layers)]


def layer_kinds(c: Config, usual: str = FULL) -> list[str]:
    """Returns the kind of each layer by `layer_types`; `usual`: of all layers where the config has no such list."""
    return [str(kind) for kind in c.by_layer("layer_types", usual)]


LayerValues = tuple[tuple[str, Any], ...]
"""Keys and values of one layer that differ from those of the config."""
BY_LAYER = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads"})
"""Keys that grouped attention reads, and of which layers may have values of their own."""


def mixers_by_kind(
    c: Config,
    kinds: Sequence[str],
    makers: Mapping[str, Callable[[Config], Mixer]],
    by_layer: Collection[str] = BY_LAYER,
) -> list[Mixer]:
    """Returns the mixer of each layer, made by the maker of its kind from the config with the layer's own values of the
    keys `by_layer` (`layer_values`). Raises UserError for a kind that has no maker."""
    unknown = sorted(set(kinds) - makers.keys())
    if unknown:
        raise UserError(f"{c.source}: layer_types {', '.join(unknown)} are not described here yet.")
    written = list(zip(kinds, layer_values(c, by_layer), strict=True))
    mixers = {(kind, values): makers[kind](c.with_values(dict(values))) for kind, values in dict.fromkeys(written)}
    return [mixers[key] for key in written]


def layer_values(c: Config, known: Collection[str]) -> list[LayerValues]:
    """Returns the values of each layer from `num_attention_heads_per_layer` and `per_layer_config`, as newer
    transformers write it: {"5": {"head_dim": 512}}. Raises UserError, also for keys that are not among `known`."""
    count, written = c.num_layers, c.default("per_layer_config", dict, {})
    values: list[LayerValues] = [()] * count
    heads = c.default("num_attention_heads_per_layer", list, [])
    if heads and (len(heads) < count or any(type(number) is not int or number < 1 for number in heads)):
        raise UserError(f"{c.source}: 'num_attention_heads_per_layer' must be {count} numbers; got {heads!r}.")
    for layer, number in enumerate(heads[:count]):
        values[layer] = (("num_attention_heads", number),)
    for layer, stated in written.items():
        if not str(layer).isdigit() or int(layer) >= count or not isinstance(stated, Mapping):
            raise UserError(f"{c.source}: 'per_layer_config' has {layer!r}: {stated!r} for {count} layers.")
        unknown = sorted(stated.keys() - set(known))
        if unknown:
            raise UserError(f"{c.source}: 'per_layer_config' with {', '.join(unknown)} is not described here yet.")
        values[int(layer)] = tuple(sorted(stated.items()))
    return values


_WINDOW_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""Keys for which layers with a window may have a value of their own, under "swa_" and the name."""


def with_window_heads(c: Config) -> Config:
    """Returns the config with the heads of layers with a window: the values of the `swa_*` keys, and twice the KV heads
    where the config does not say how many."""
    stated = {key: c.values.get(f"swa_{key}") for key in _WINDOW_KEYS}
    if stated["num_key_value_heads"] is None:
        stated["num_key_value_heads"] = 2 * c.positive("num_key_value_heads")
    return c.with_values({key: value for key, value in stated.items() if value is not None})


def temperature_scaling(c: Config) -> tuple[AttentionTemperature | None, dict[str, Any]]:
    """Returns (attention temperature scaling by `llama_4_scaling_beta` of the rotary parameters, rotary keys without
    it). Raises UserError for values that cannot be read."""
    written = rope_parameters(c.values)
    beta, length = written.get(_BETA) or 0.0, written.get("original_max_position_embeddings")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or beta < 0:
        raise UserError(f"{c.source}: the rotary {_BETA!r} must be a number; got {beta!r}.")
    others = {key: value for key, value in written.items() if key not in (_BETA, "max_position_embeddings")}
    keys = {"rope_parameters": others, "rope_scaling": None}
    if not beta:
        return None, keys
    if type(length) is not int or length < 1:
        raise UserError(f"{c.source}: {_BETA!r} needs 'original_max_position_embeddings'; got {length!r}.")
    return AttentionTemperature(float(beta), length), keys


_BETA = "llama_4_scaling_beta"

"""Reads layers with a recurrent state from a config.json: gated delta nets, Kimi delta attention, Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.kimi_delta import KimiDelta
from sglang.srt.plan.recurrent import GatedDelta, Mamba2

STATE_DTYPES = ("float32", "bfloat16", "float16")


def _state_dtype(keys: ConfigReader, key: str) -> str:
    dtype = keys.values.get(key) or STATE_DTYPES[0]
    if dtype not in STATE_DTYPES:
        raise UserError(f"{keys.source}: {key!r} must be one of {', '.join(STATE_DTYPES)}; got {dtype!r}.")
    return str(dtype)


def gated_delta(keys: ConfigReader, family: Family) -> GatedDelta:
    """Reads a gated delta net. Raises UserError for missing keys."""
    return GatedDelta(
        key_heads=keys.positive("linear_num_key_heads"),
        value_heads=keys.positive("linear_num_value_heads"),
        key_dim=keys.positive("linear_key_head_dim"),
        value_dim=keys.positive("linear_value_head_dim"),
        conv_kernel=keys.positive("linear_conv_kernel_dim"),
        state_dtype=_state_dtype(keys, "mamba_ssm_dtype"),
        by_key_head=family.projected_by_key_head,
        sigmoid_gate=family.sigmoid_output_gates and _output_gate(keys) == "sigmoid",
    )


def _output_gate(keys: ConfigReader) -> str:
    return str(keys.values.get("output_gate_type") or keys.values.get("hidden_act"))


def _time_step_limit(keys: ConfigReader) -> tuple[float, float]:
    """Reads the limits of time steps. JSON has no number for infinity, which is written as a string in an object."""
    limits = keys.default("time_step_limit", list, [0.0, float("inf")])
    plain: list[Any] = [limit.get("__float__") if isinstance(limit, Mapping) else limit for limit in limits]
    try:
        low, high = (float(str(limit)) for limit in plain)
    except (TypeError, ValueError):
        raise UserError(f"{keys.source}: 'time_step_limit' must be two numbers; got {limits!r}.") from None
    return low, high


def mamba2(keys: ConfigReader) -> Mamba2:
    """Reads a Mamba-2 layer. Raises UserError for missing keys."""
    low, high = _time_step_limit(keys)
    return Mamba2(
        num_heads=keys.positive("mamba_num_heads"),
        head_dim=keys.positive("mamba_head_dim"),
        num_groups=keys.positive("n_groups"),
        state_dim=keys.positive("ssm_state_size"),
        conv_kernel=keys.positive("conv_kernel"),
        conv_bias=keys.default("use_conv_bias", bool, True),
        proj_bias=keys.default("use_bias", bool, False),
        dt_min=low,
        dt_max=high,
        state_dtype=_state_dtype(keys, "mamba_ssm_cache_dtype"),
    )


KDA_CONFIG = "linear_attn_config"
_FLAT: Mapping[str, str] = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys inside `linear_attn_config`, and those that transformers writes instead, next to the other keys."""
_LAYERS = ("full_attn_layers", "kda_layers")
_OF_K3: Mapping[str, str] = {
    "attn_res_block_size": "attention over the residual streams of earlier layers",
    "mla_use_output_gate": "a gate of latent attention's output",
    "routed_expert_hidden_size": "experts of a smaller hidden size",
}
"""Keys of Kimi K3 (whose language model is called kimi_linear, too) that are not described here, and their meaning."""


def kimi_delta_layers(keys: ConfigReader, num_layers: int) -> list[bool]:
    """Returns whether each layer is Kimi delta attention, by the lists of `linear_attn_config` (which count layers from
    1) or by `layer_types`. Raises UserError where they do not name each layer once."""
    for key, what in _OF_K3.items():
        if keys.values.get(key):
            raise UserError(f"{keys.source}: {key!r} ({what}) is not described here yet.")
    inner = keys.default(KDA_CONFIG, dict, {})
    if any(name in inner for name in _LAYERS):
        lists = ConfigReader(inner, f"{keys.source} {KDA_CONFIG}")
        full, recurrent = (lists.default(name, list, []) for name in _LAYERS)
        listed = [*full, *recurrent]
        if any(type(layer) is not int for layer in listed) or sorted(listed) != list(range(1, num_layers + 1)):
            raise UserError(
                f"{keys.source}: {' and '.join(_LAYERS)} of {KDA_CONFIG!r} must name each layer from 1 to {num_layers}"
                " once."
            )
        return [layer + 1 in set(recurrent) for layer in range(num_layers)]
    kinds = keys.default("layer_types", list, [])
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    if unknown or len(kinds) < num_layers:
        what = f"the kinds {', '.join(unknown)}" if unknown else f"{len(kinds)} entries for {num_layers} layers"
        raise UserError(f"{keys.source}: {KDA_CONFIG!r} says nothing of the layers, and 'layer_types' has {what}.")
    return [kind == "linear_attention" for kind in kinds[:num_layers]]


def _lower_bound(keys: ConfigReader, inner: Mapping[str, Any], usual: float) -> float:
    """Returns the lower bound of the logs of decays; 0: none. `usual`: the bound where the config states none."""
    stated = inner.get("gate_lower_bound", keys.values.get("linear_lower_bound"))
    unbounded = inner.get("safe_gate") is False or ("linear_lower_bound" in keys.values and not inner)
    if stated is None:
        return 0.0 if unbounded else usual
    bound = ConfigReader({"gate_lower_bound": stated}, f"{keys.source} {KDA_CONFIG}").require("gate_lower_bound", float)
    if bound > 0:
        raise UserError(f"{keys.source}: gate_lower_bound of {KDA_CONFIG!r} must be below 0; got {bound!r}.")
    return bound


def kimi_delta(keys: ConfigReader, unsupported: list[str], usual_bound: float = 0.0) -> KimiDelta:
    """Reads the heads of Kimi delta attention. Adds to `unsupported` what is described but not computed. Raises
    UserError."""
    inner = keys.default(KDA_CONFIG, dict, {})
    known = {*_FLAT, *_LAYERS, "gate_lower_bound", "safe_gate", "use_full_rank_gate"}
    unknown = sorted(inner.keys() - known)
    if unknown:
        raise UserError(f"{keys.source}: keys {', '.join(unknown)} of {KDA_CONFIG!r} are not described here yet.")
    if inner.get("use_full_rank_gate"):
        unsupported.append(f"{keys.source}: {KDA_CONFIG!r} with use_full_rank_gate is not supported.")
    stated = {flat: inner[key] for key, flat in _FLAT.items() if key in inner}
    reader = ConfigReader({**keys.values, **stated}, keys.source)
    return KimiDelta(
        num_heads=reader.positive("linear_num_heads"),
        head_dim=reader.positive("linear_head_dim"),
        conv_kernel=reader.positive("linear_conv_kernel_dim"),
        lower_bound=_lower_bound(keys, inner, usual_bound),
        state_dtype=_state_dtype(keys, "mamba_ssm_dtype"),
    )

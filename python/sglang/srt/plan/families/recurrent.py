"""Layers with a recurrent state that several families share: gated delta nets and Kimi delta attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config

STATE_DTYPES = ("float32", "bfloat16", "float16")


def state_dtype(c: Config, key: str) -> str:
    """Returns the dtype of the states under `key`. Raises UserError for another than STATE_DTYPES."""
    dtype = c.values.get(key) or STATE_DTYPES[0]
    if dtype not in STATE_DTYPES:
        raise UserError(f"{c.source}: {key!r} must be one of {', '.join(STATE_DTYPES)}; got {dtype!r}.")
    return str(dtype)


def gated_delta(c: Config, *, by_key_head: bool = False, sigmoid_gate: bool = False) -> GatedDelta:
    """Returns a gated delta net. `by_key_head`, `sigmoid_gate`: as in GatedDelta."""
    return GatedDelta(
        key_heads=c.positive("linear_num_key_heads"),
        value_heads=c.positive("linear_num_value_heads"),
        key_dim=c.positive("linear_key_head_dim"),
        value_dim=c.positive("linear_value_head_dim"),
        conv_kernel=c.positive("linear_conv_kernel_dim"),
        state_dtype=state_dtype(c, "mamba_ssm_dtype"),
        by_key_head=by_key_head,
        sigmoid_gate=sigmoid_gate,
    )


KDA_CONFIG = "linear_attn_config"
_FLAT: Mapping[str, str] = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys inside `linear_attn_config`, and those that transformers writes instead, next to the other keys."""
_OTHERS = ("full_attn_layers", "kda_layers", "gate_lower_bound", "safe_gate", "use_full_rank_gate")


def kimi_delta(c: Config, usual_bound: float = 0.0) -> KimiDelta:
    """Returns Kimi delta attention. `usual_bound`: lower bound of the logs of decays where the config states none.
    Raises UserError."""
    inner = c.default(KDA_CONFIG, dict, {})
    unknown = sorted(inner.keys() - {*_FLAT, *_OTHERS})
    if unknown:
        raise UserError(f"{c.source}: keys {', '.join(unknown)} of {KDA_CONFIG!r} are not described here yet.")
    if inner.get("use_full_rank_gate"):
        c.problem(f"{KDA_CONFIG!r} with use_full_rank_gate is not supported.")
    flat = c.with_values({name: inner[key] for key, name in _FLAT.items() if key in inner})
    return KimiDelta(
        num_heads=flat.positive("linear_num_heads"),
        head_dim=flat.positive("linear_head_dim"),
        conv_kernel=flat.positive("linear_conv_kernel_dim"),
        lower_bound=_lower_bound(c, inner, usual_bound),
        state_dtype=state_dtype(c, "mamba_ssm_dtype"),
    )


def _lower_bound(c: Config, inner: Mapping[str, Any], usual: float) -> float:
    stated = inner.get("gate_lower_bound", c.values.get("linear_lower_bound"))
    unbounded = inner.get("safe_gate") is False or ("linear_lower_bound" in c.values and not inner)
    if stated is None:
        return 0.0 if unbounded else usual
    bound = ConfigReader({"gate_lower_bound": stated}, f"{c.source} {KDA_CONFIG}").require("gate_lower_bound", float)
    if bound > 0:
        raise UserError(f"{c.source}: gate_lower_bound of {KDA_CONFIG!r} must be below 0; got {bound!r}.")
    return bound

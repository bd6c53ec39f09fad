"""Rewrites rotary keys that hold a value for each layer (Step, Muse-Glimmer) into the form by layer type that other
configs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.errors import UserError

_LISTS = {
    "rope_theta": "rope_theta",
    "layer_rope_theta": "rope_theta",
    "partial_rotary_factors": "partial_rotary_factor",
}
"""The lists, and the key of one of their values in `rope_parameters`."""
_FULL = "full_attention"
UNROTATED = "none"
"""`rope_type` of heads that do not rotate, and so do not depend on positions."""


def rotary_by_type(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with `rope_parameters` by layer type instead of the lists `rope_theta` or `layer_rope_theta`
    (0: heads that do not rotate) and `partial_rotary_factors`; unchanged without such lists. `rope_scaling` (or a flat
    `rope_parameters`) applies to the types that `yarn_only_types` names, or to full attention. Raises UserError where
    layers of a type differ, and for scaling that would apply to none, as those heads do not rotate."""
    lists = {key: config[key] for key in _LISTS if isinstance(config.get(key), list)}
    if not lists:
        return config
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers")
    if not isinstance(kinds, list) or not isinstance(num_layers, int) or len(kinds) < num_layers:
        raise UserError(f"config.json: {', '.join(lists)} by layer need 'layer_types' of every layer.")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = config.get("yarn_only_types") or [_FULL]
    types: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(map(str, kinds[:num_layers])):
        types[kind] = {"rope_type": "default"}
        for key, name in _LISTS.items():
            value = _value_for_type(key, lists[key], kinds[:num_layers], kind) if key in lists else config.get(key)
            types[kind] |= {} if value is None else {name: value}
        if types[kind].get("rope_theta") == 0:
            types[kind] = {"rope_type": UNROTATED}
        elif isinstance(scaling, Mapping) and kind in scaled:
            types[kind] |= {key: value for key, value in scaling.items() if key != "rope_theta"}
    scaling_type = (scaling.get("rope_type") or scaling.get("type")) if isinstance(scaling, Mapping) else None
    rotating = [kind for kind, stated in types.items() if kind in scaled and stated["rope_type"] != UNROTATED]
    if scaling_type not in (None, "default") and not rotating:
        raise UserError(
            f"config.json: rotary scaling {scaling_type!r} is for {', '.join(scaled)}, of which no heads rotate; name"
            " other types of layers in 'yarn_only_types'."
        )
    rest = {key: value for key, value in config.items() if key not in (*_LISTS, "rope_scaling")}
    return {**rest, "rope_parameters": types}


def _value_for_type(key: str, values: list[Any], kinds: list[Any], kind: str) -> Any:
    """Returns the value that all layers of the kind share. Raises UserError where they differ."""
    if len(values) < len(kinds):
        raise UserError(f"config.json: {key!r} has {len(values)} entries for {len(kinds)} layers.")
    mine = [value for value, other in zip(values, kinds, strict=False) if other == kind]
    if any(value != mine[0] for value in mine):
        raise UserError(f"config.json: {key!r} differs between layers of the type {kind}, which is not supported.")
    return mine[0]

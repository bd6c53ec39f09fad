"""One form for both ways of writing rotary embeddings: `rope_scaling` with `rope_theta`, and `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.errors import UserError

DEFAULT_THETA = 10000.0
_LENGTH_PRESERVING = frozenset({"default", "llama3", "longrope", "su", "mrope"})
"""Types whose `max_position_embeddings` is the length after scaling."""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of `config` as a flat dict that always has `rope_type` and `rope_theta` (float).

    Raises UserError if they are not an object, or if they differ by layer type.
    """
    written = config.get("rope_parameters")
    written = config.get("rope_scaling") if written is None else written
    written = {} if written is None else written
    if not isinstance(written, Mapping):
        raise UserError(f"config.json: 'rope_parameters' must be an object; got {written!r}.")
    if written and all(isinstance(value, Mapping) for value in written.values()):
        raise UserError(f"config.json: 'rope_parameters' by layer type is not supported ({', '.join(written)}).")
    result = dict(written)
    result["rope_type"] = result.pop("type", None) if "rope_type" not in result else result["rope_type"]
    result["rope_type"] = result["rope_type"] or "default"
    result.pop("type", None)
    theta = result.get("rope_theta", config.get("rope_theta"))
    result["rope_theta"] = DEFAULT_THETA if theta is None else float(theta)
    if "partial_rotary_factor" not in result and config.get("partial_rotary_factor") is not None:
        result["partial_rotary_factor"] = config["partial_rotary_factor"]
    return result


def by_layer_type(config: Mapping[str, Any]) -> bool:
    """Whether the rotary parameters differ by layer type, so that `rope_parameters` refuses them."""
    written = config.get("rope_parameters")
    return isinstance(written, Mapping) and bool(written) and all(isinstance(v, Mapping) for v in written.values())


def rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """How many leading dims of a head rotate: `rotary_dim`, or a share of the head, or all."""
    if config.get("rotary_dim"):
        return min(int(config["rotary_dim"]), head_dim)
    parameters = config if by_layer_type(config) else rope_parameters(config)
    share = parameters.get("partial_rotary_factor")
    if share is None:
        return head_dim
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise UserError(f"config.json: 'partial_rotary_factor' must be a number up to 1; got {share!r}.")
    return int(head_dim * share)


def scaled_context_length(max_position_embeddings: int, rope: Mapping[str, Any]) -> int:
    """Longest sequence that a model with these rotary parameters supports."""
    if rope["rope_type"] in _LENGTH_PRESERVING:
        return max_position_embeddings
    factor = rope.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
        raise UserError(f"config.json: the rotary 'factor' must be a positive number; got {factor!r}.")
    original = rope.get("original_max_position_embeddings")
    if original is None:
        return int(max_position_embeddings * factor)
    return max(max_position_embeddings, int(original * factor))

"""Reads the rotary embeddings of a config.json, from both forms: `rope_scaling` with `rope_theta`, and
`rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.layer_lists import UNROTATED
from sglang.srt.errors import UserError

DEFAULT_THETA = 10000.0
_LENGTH_PRESERVING = frozenset({"default", "llama3", "longrope", "su", "mrope"})
"""Types whose `max_position_embeddings` is the length after scaling."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding. The first `rot_dim` dims of a head rotate. `params`: the variant's own settings, (key, value)
    sorted by key. `max_position`: max_position_embeddings of the config.

    With `sections` (M-RoPE) a token has one position for each section (time, height, width), and position i has
    `sections[i]` of the frequencies: one section after the other, or with `interleaved_sections` alternating while a
    section has some left.

    is_neox_style: dims i and i + rot_dim / 2 of a head rotate together; otherwise neighbours, 2i and 2i + 1
    """

    rot_dim: int
    theta: float
    max_position: int
    kind: str = "default"
    params: tuple[tuple[str, Any], ...] = ()
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False
    is_neox_style: bool = True

    def table_rows(self, num_positions: int, context_len: int) -> int:
        """Returns the number of rows of the table of cosines and sines. `num_positions`: the most that a request can
        reach. M-RoPE positions may be ahead of the tokens, anywhere in the context."""
        if self.kind == UNROTATED:
            return 1
        return context_len if self.sections else num_positions


PROPORTIONAL = "proportional"
"""`RopeSpec.kind` of rotations with the frequencies of the whole head, of which only the first part rotates."""


def unrotated(head_dim: int) -> RopeSpec:
    """Returns the spec of heads that do not rotate."""
    return RopeSpec(head_dim, 0.0, 1, UNROTATED)


_YARN_OPTIONS = (
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ROPE_SETTINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "yarn": (frozenset({"factor"}), frozenset(_YARN_OPTIONS)),
    PROPORTIONAL: (frozenset(), frozenset({"factor", "partial_rotary_factor"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
}
"""(required settings, optional settings) of each variant. `layers.rotary_embedding` computes them."""


def rope_spec(config: Mapping[str, Any], head_dim: int, layer_type: str = "") -> RopeSpec:
    """Returns the rotary embedding of a config.json, for layers of `layer_type` where layers differ. Raises UserError
    for an unknown variant or setting."""
    settings = {key: value for key, value in rope_parameters(config, layer_type).items() if value is not None}
    if settings["rope_type"] == UNROTATED:
        return unrotated(head_dim)
    kind, theta = settings.pop("rope_type"), settings.pop("rope_theta")
    if kind != PROPORTIONAL:
        settings.pop("partial_rotary_factor", None)
    sections = _sections(settings.pop("mrope_section", ()), settings.pop("mrope_interleaved", False))
    if kind == "mrope":  # older multimodal configs call the default with sections so
        kind = "default"
    if kind not in ROPE_SETTINGS:
        known = ", ".join(sorted(ROPE_SETTINGS))
        raise UserError(f"config.json: rope_type {kind!r} is not supported; supported: {known}.")
    required, optional = ROPE_SETTINGS[kind]
    unknown, missing = settings.keys() - required - optional, required - settings.keys()
    if unknown:
        raise UserError(f"config.json: rope_type {kind!r} with {', '.join(sorted(unknown))} is not supported.")
    if missing:
        raise UserError(f"config.json: rope_type {kind!r} needs {', '.join(sorted(missing))}.")
    for name, value in settings.items():
        if not isinstance(value, (bool, int, float)):
            raise UserError(f"config.json: the rotary {name!r} must be a number; got {value!r}.")
    max_position = ConfigReader(config, "config.json").positive("max_position_embeddings")
    rot_dim = rotary_dim(config, head_dim, layer_type)
    if sections[0] and 2 * sum(sections[0]) != rot_dim:
        shares = list(sections[0])
        raise UserError(f"config.json: 'mrope_section' {shares} does not add up to {rot_dim // 2} frequencies.")
    return RopeSpec(rot_dim, theta, max_position, kind, tuple(sorted(settings.items())), *sections)


def _sections(sections: Any, interleaved: Any) -> tuple[tuple[int, ...], bool]:
    if not isinstance(sections, (list, tuple)) or not all(type(size) is int and size > 0 for size in sections):
        raise UserError(f"config.json: 'mrope_section' must be a list of whole numbers; got {sections!r}.")
    return tuple(sections), bool(interleaved)


_NOT_OF_SCALING = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})


def rope_parameters(config: Mapping[str, Any], layer_type: str = "") -> dict[str, Any]:
    """Returns the rotary parameters of `config` as a flat dict that always has `rope_type` and `rope_theta` (float).

    Where they differ by layer type, returns those of `layer_type`. Raises UserError if they are not an object, or have
    no entry for `layer_type`.
    """
    written, scaling = ({} if config.get(key) is None else config[key] for key in ("rope_parameters", "rope_scaling"))
    for key, value in (("rope_parameters", written), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {key!r} must be an object; got {value!r}.")
    if by_layer_type(config):
        if scaling:
            raise UserError("config.json: 'rope_scaling' beside 'rope_parameters' by layer type; change the latter.")
        if layer_type not in written:
            raise UserError(
                f"config.json: 'rope_parameters' by layer type ({', '.join(written)}) say nothing of {layer_type!r}."
            )
        written = written[layer_type]
    elif scaling:  # beside `rope_parameters` it is an override in the older form, which does not state the base
        written = {key: written[key] for key in _NOT_OF_SCALING & written.keys()} | dict(scaling)
    result = dict(written)
    result["rope_type"] = result.pop("type", None) if "rope_type" not in result else result["rope_type"]
    result["rope_type"] = str(result["rope_type"] or "default")
    result.pop("type", None)
    theta = result.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        _check_positive("'rope_theta'", theta)
    result["rope_theta"] = DEFAULT_THETA if theta is None else float(theta)
    if "partial_rotary_factor" not in result and config.get("partial_rotary_factor") is not None:
        result["partial_rotary_factor"] = config["partial_rotary_factor"]
    return result


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"config.json: {name} must be a positive number; got {value!r}.")


def by_layer_type(config: Mapping[str, Any]) -> bool:
    """Returns whether the rotary parameters differ by layer type."""
    written = config.get("rope_parameters")
    return isinstance(written, Mapping) and bool(written) and all(isinstance(v, Mapping) for v in written.values())


def rotary_dim(config: Mapping[str, Any], head_dim: int, layer_type: str = "") -> int:
    """Returns how many of a head's first dims rotate: `rotary_dim`, `partial_rotary_factor` of the head, or all."""
    if dim := config.get("rotary_dim"):
        _check_positive("'rotary_dim'", dim)
        return min(int(dim), head_dim)
    parameters = rope_parameters(config, layer_type)
    share = parameters.get("partial_rotary_factor")
    if share is None:
        return head_dim
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise UserError(f"config.json: 'partial_rotary_factor' must be a number up to 1; got {share!r}.")
    return head_dim if parameters["rope_type"] == PROPORTIONAL else int(head_dim * share)


def scaled_context_length(max_position_embeddings: int, rope: Mapping[str, Any]) -> int:
    """Returns the longest sequence, in tokens, that a model with these rotary parameters supports. Raises UserError for
    a factor or length that is not positive."""
    if rope["rope_type"] in _LENGTH_PRESERVING:
        return max_position_embeddings
    factor = rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings")
    _check_positive("the rotary 'factor'", factor)
    if original is None:
        return int(max_position_embeddings * factor)
    _check_positive("'original_max_position_embeddings'", original)
    return max(max_position_embeddings, int(original * factor))

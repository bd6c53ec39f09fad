"""Rotary position embeddings: frequencies of the published variants, and the table that kernels read.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (2306.15595); NTK-aware scaling; YaRN (2309.00071); the
frequency bands of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import rope_parameters
from sglang.srt.errors import UserError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """`rot_dim` leading dims of a head rotate. `params`: the variant's own settings, (key, value) sorted by key.

    `max_position` is the length that the checkpoint states (max_position_embeddings).
    """

    rot_dim: int
    theta: float
    max_position: int
    kind: str = "default"
    params: tuple[tuple[str, Any], ...] = ()


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The spec of a config.json. Raises UserError for a variant or setting that we do not know."""
    settings = {key: value for key, value in rope_parameters(config).items() if value is not None}
    kind, theta = settings.pop("rope_type"), settings.pop("rope_theta")
    rot_dim = int(head_dim * settings.pop("partial_rotary_factor", 1.0))
    if kind not in _VARIANTS:
        raise UserError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(sorted(_VARIANTS))}.")
    required, optional, _ = _VARIANTS[kind]
    unknown, missing = settings.keys() - required - optional, required - settings.keys()
    if unknown:
        raise UserError(f"config.json: rope_type {kind!r} with {', '.join(sorted(unknown))} is not supported.")
    if missing:
        raise UserError(f"config.json: rope_type {kind!r} needs {', '.join(sorted(missing))}.")
    max_position = ConfigReader(config, "config.json").positive("max_position_embeddings")
    return RopeSpec(rot_dim, theta, max_position, kind, tuple(sorted(settings.items())))


def rope_table(spec: RopeSpec, num_positions: int, device: torch.device | str) -> torch.Tensor:
    """[num_positions, rot_dim] fp32: cosines of the rot_dim / 2 frequencies, then sines, times the variant's scale."""
    inv_freq, scale = _VARIANTS[spec.kind][2](spec, num_positions)
    # Angles reach thousands of radians, so the product is taken in fp32 on every device, as checkpoints were trained.
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq.float()
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device)


def _plain(rot_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim)


def _default(spec: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    return _plain(spec.rot_dim, spec.theta), 1.0


def _linear(spec: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    return _plain(spec.rot_dim, spec.theta) / dict(spec.params)["factor"], 1.0


def _dynamic(spec: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """The base grows with the length in use. Cached keys must keep one base, so the served context length sets it."""
    params = dict(spec.params)
    trained = params.get("original_max_position_embeddings", spec.max_position)
    factor, length = params["factor"], max(num_positions, trained)
    stretch = factor * length / trained - (factor - 1)
    return _plain(spec.rot_dim, spec.theta * stretch ** (spec.rot_dim / (spec.rot_dim - 2))), 1.0


def _llama3(spec: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """Short wavelengths stay, long ones are interpolated, those between are blended."""
    params = dict(spec.params)
    low, high, factor = params["low_freq_factor"], params["high_freq_factor"], params["factor"]
    inv_freq = _plain(spec.rot_dim, spec.theta)
    turns = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor), 1.0


def _yarn(spec: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """Dims that turn more than beta_fast times over the trained length stay, less than beta_slow times interpolate."""
    params = dict(spec.params)
    factor = params["factor"]
    trained = params.get("original_max_position_embeddings", spec.max_position)
    inv_freq = _plain(spec.rot_dim, spec.theta)

    def dim_of(turns: float) -> float:
        return spec.rot_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = dim_of(params.get("beta_fast", 32)), dim_of(params.get("beta_slow", 1))
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rot_dim - 1)
    dims = torch.arange(spec.rot_dim // 2, dtype=torch.float32)
    interpolate = ((dims - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return inv_freq * (1 - interpolate + interpolate / factor), _yarn_scale(params, factor)


def _yarn_scale(params: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in params:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


_Frequencies = Callable[[RopeSpec, int], tuple[torch.Tensor, float]]
_YARN_OPTIONS = frozenset(
    {
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)
# kind -> required settings, optional settings, (spec, num_positions) -> (inverse frequencies, scale of the table)
_VARIANTS: dict[str, tuple[frozenset[str], frozenset[str], _Frequencies]] = {
    "default": (frozenset(), frozenset(), _default),
    "linear": (frozenset({"factor"}), frozenset(), _linear),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"}), _dynamic),
    "yarn": (frozenset({"factor"}), _YARN_OPTIONS, _yarn),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
        _llama3,
    ),
}

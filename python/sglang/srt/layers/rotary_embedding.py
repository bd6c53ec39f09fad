"""Rotary position embeddings (RoPE): frequencies of the published variants, and the table that kernels read.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (2306.15595); NTK-aware scaling; YaRN (2309.00071); the
frequency tile configs of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang.srt.configs.layer_lists import UNROTATED
from sglang.srt.configs.rope import ROPE_SETTINGS, RopeSpec


def rope_table(
    spec: RopeSpec, num_positions: int, device: torch.device | str, context_len: int | None = None
) -> torch.Tensor:
    """Returns [num_positions, rot_dim] fp32: cosines of the rot_dim / 2 frequencies, then sines, times the variant's
    scale; a single row for UNROTATED. context_len: served context, on which some frequencies depend; None:
    num_positions."""
    if spec.kind == UNROTATED:
        half = torch.ones(1, spec.rot_dim // 2)
        return torch.cat((half, torch.zeros_like(half)), dim=-1).to(device)
    inv_freq, scale = _FREQUENCIES[spec.kind](spec, num_positions if context_len is None else context_len)
    # Angles reach thousands of radians, so the product is taken in fp32 on every device, as checkpoints were trained.
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq.float()
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device)


def _plain(rot_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim)


def _default(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    return _plain(spec.rot_dim, spec.theta), 1.0


def _linear(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    return _plain(spec.rot_dim, spec.theta) / dict(spec.params)["factor"], 1.0


def _dynamic(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Returns frequencies whose base grows with the length in use. Cached keys need one fixed base, so the served
    context length determines it."""
    params = dict(spec.params)
    trained = params.get("original_max_position_embeddings", spec.max_position)
    factor, length = params["factor"], max(context_len, trained)
    stretch = factor * length / trained - (factor - 1)
    return _plain(spec.rot_dim, spec.theta * stretch ** (spec.rot_dim / (spec.rot_dim - 2))), 1.0


def _llama3(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Returns Llama 3.1's frequencies: short wavelengths stay, long ones are interpolated, those between are
    blended."""
    params = dict(spec.params)
    low, high, factor = params["low_freq_factor"], params["high_freq_factor"], params["factor"]
    inv_freq = _plain(spec.rot_dim, spec.theta)
    rotations = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor), 1.0


def _yarn(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Returns YaRN's frequencies: those with more than beta_fast rotations over the trained length stay, those with
    less than beta_slow are interpolated."""
    params = dict(spec.params)
    factor = params["factor"]
    trained = params.get("original_max_position_embeddings", spec.max_position)
    inv_freq = _plain(spec.rot_dim, spec.theta)

    def dim_of(rotations: float) -> float:
        return spec.rot_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

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


def _proportional(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Returns frequencies for the whole head, zero for those that do not rotate: pairs stay half a head apart."""
    params = dict(spec.params)
    num_rotating = int(params.get("partial_rotary_factor", 1.0) * spec.rot_dim // 2)
    inv_freq = _plain(spec.rot_dim, spec.theta) / params.get("factor", 1.0)
    inv_freq[num_rotating:] = 0.0
    return inv_freq, 1.0


_FREQUENCIES: Mapping[str, Callable[[RopeSpec, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""(spec, context_len) -> (inverse frequencies, scale of the table)."""
assert _FREQUENCIES.keys() == ROPE_SETTINGS.keys()


class RotaryTables:
    """The RoPE tables of a model's layers; layers with equal settings share one."""

    def __init__(self, num_positions: int, context_len: int, device: torch.device | str) -> None:
        """num_positions: the most that a request can reach."""
        self.num_positions, self.context_len, self.device = num_positions, context_len, device
        self._tables: dict[RopeSpec, torch.Tensor] = {}

    def of(self, spec: RopeSpec) -> RotaryTable:
        """Returns the table of a rotation, created on first use."""
        if spec not in self._tables:
            rows = spec.table_rows(self.num_positions, self.context_len)
            self._tables[spec] = rope_table(spec, rows, self.device, self.context_len)
        return RotaryTable(self._tables[spec], spec)


class SectionPositions:
    """M-RoPE positions `values` [sections, T] int64 of a step's tokens. Caches the angles for all layers of one
    rotation, because gathering them takes five launches."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}

    def angles(self, table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each token's row [T], and the rows [T, rot_dim] fp32 with each frequency at its section's
        position."""
        if table.spec not in self._angles:
            assert table.section is not None
            at_all = table.cos_sin[self.values].unflatten(-1, (2, -1))  # [sections, T, 2, rot_dim / 2]
            index = table.section.expand(at_all.shape[1:])[None]
            rows = at_all.gather(0, index)[0].flatten(-2)
            self._angles[table.spec] = torch.arange(len(rows), device=rows.device), rows
        return self._angles[table.spec]


class RotaryTable:
    """A RoPE table `cos_sin` [num_positions, rot_dim] fp32, as kernels read it."""

    def __init__(self, cos_sin: torch.Tensor, spec: RopeSpec) -> None:
        self.cos_sin, self.spec = cos_sin, spec
        self.one_row = spec.kind == UNROTATED
        self.section = _section_of_frequency(spec).to(cos_sin.device) if spec.sections else None

    def at(self, positions: torch.Tensor | SectionPositions) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (each token's row [T], the table of these rows) for positions [T], or M-RoPE positions."""
        if isinstance(positions, SectionPositions):
            if self.section is not None:
                return positions.angles(self)
            positions = positions.values[0]  # a draft of a model whose frequencies have sections
        return torch.zeros_like(positions) if self.one_row else positions, self.cos_sin


def _section_of_frequency(spec: RopeSpec) -> torch.Tensor:
    """Returns [rot_dim / 2] int64: the section whose position rotates each frequency."""
    if not spec.interleaved_sections:
        return torch.repeat_interleave(torch.tensor(spec.sections))
    section = torch.zeros(spec.rot_dim // 2, dtype=torch.int64)
    step = len(spec.sections)
    for i, size in enumerate(spec.sections[1:], start=1):
        section[i : step * size : step] = i
    return section

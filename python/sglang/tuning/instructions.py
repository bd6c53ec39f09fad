"""Instructions of kernels besides matrix products, counted in their machine code: `tables/instructions.json`, written
by lab/kernels/card/count_instructions.py. Counts are per lane, for each weight or pair."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.configs.quant_scheme import SCHEMES

COUNTS = Path(__file__).parent / "tables" / "instructions.json"
TileSizes = tuple[int, int, int, int]
"""Rows of weights for a column (2: gate and up), BLOCK_M, BLOCK_N, num_warps."""
FIRST: TileSizes = (2, 16, 64, 4)
"""Whose warps share out the weights, so that each is widened once."""
OTHER = 4.4
"""The instructions of a weight that is widened in a way which nobody counted: eight bits to sixteen."""


@dataclass(frozen=True, slots=True)
class DequantizeCost:
    """Instructions to dequantize a weight. `each`: in one warp. `counted`: over all warps that do it, for some
    tiles."""

    each: float
    counted: Mapping[TileSizes, float]


@dataclass(frozen=True, slots=True)
class Streamed:
    """Instructions for a weight that is multiplied without matrix instructions: in both products of few pairs, or with
    few rows."""

    gate_up: float
    down: float
    few_rows: float


def tile_form(scheme: str, features: Collection[str]) -> str:
    """Returns the kind of product with which GPUs with these features multiply a scheme."""
    to_e4m3 = SCHEMES[scheme].activation == "mxfp8" and "block_scaled_mma" in features
    return _form(scheme, "e4m3" if to_e4m3 else "wgmma" if "wgmma" in features else "mma")


def _form(scheme: str, unit: str) -> str:
    """Returns the name of a weight format and the matrix instruction that it is dequantized for: "int4/wgmma"."""
    form = SCHEMES[scheme]
    return f"{form.element}{f' in {form.group[1]}s' if form.element == 'e2m1' else ''}/{unit}"


@functools.cache
def dequantize_cost(scheme: str, unit: str, to_half: bool = True) -> DequantizeCost:
    """Returns the instructions of dequantizing. `unit`: "wgmma" or "mma". `to_half`: to 16 bits; otherwise to e4m3."""
    counts = _counts()["tiles"].get(_form(scheme, unit if to_half else "e4m3"))
    if counts is None:
        return DequantizeCost(OTHER, {})
    by_tile = {_sizes(key): count for key, count in counts.items()}
    return DequantizeCost(by_tile[FIRST], by_tile)


def mixed(block_m: int) -> float:
    """Returns the instructions for a weight in the loop of sgl-kernel's products with blocks of `block_m` pairs."""
    return _counts()["mixed"]["sm_120"][str(block_m)]


@functools.cache
def streamed(scheme: str | None, arch_name: str) -> Streamed:
    """Returns the instructions; schemes and GPUs that were not counted use those of the most similar ones."""
    counts = _counts()["streams"][f"{_stream_form(scheme)}/{'sm_90' if arch_name == 'sm_90' else 'sm_120'}"]
    return Streamed(counts["gate_up_pairs"], counts["down_sum"], counts.get("few", counts["gate_up_pairs"]))


def pair_instructions(dims: tuple[int, int], arch_name: str) -> float:
    """Returns the instructions for a query and a key in a prompt; head dims that were not counted use those of the next
    larger one."""
    counts = _counts()["prompts"]["sm_90" if arch_name == "sm_90" else "sm_120"]
    by_width = sorted((sum(map(int, key.split("x"))), count) for key, count in counts.items())
    widest, maximum = by_width[-1]
    return next((count for width, count in by_width if width >= sum(dims)), maximum * sum(dims) / widest)


def _stream_form(scheme: str | None) -> str:
    if scheme is None:
        return "bf16"
    form = SCHEMES[scheme]
    if form.bits == 8:
        return "fp8_block" if form.group[1] else "fp8_channel"
    if form.element == "int4":
        return "int4_g32"
    return "nvfp4" if form.group[1] == 16 else "mxfp4"


def _sizes(key: str) -> TileSizes:
    width, m, n, warps = map(int, key.split("x"))
    return width, m, n, warps


@functools.cache
def _counts() -> dict[str, dict[str, dict[str, float]]]:
    content: dict[str, dict[str, dict[str, float]]] = json.loads(COUNTS.read_text())
    return content

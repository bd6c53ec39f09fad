"""Lower bound of an op's time when a graph replays it with the same operands, as benchmarks do: data smaller than the
L2 comes from there, except weights of products. Times between measured sizes are interpolated as multiples of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sglang.tuning.attention_model import from_memory_share, largest

READ, FROM_L2 = 1.5e12, 5e12
"""Bytes a second that kernels reach on the card, about."""
LAUNCH = 2.5e-6
MATRIX: Mapping[str, float] = {"bf16": 440e12, "fp8": 800e12, "fp8_block": 600e12, "nvfp4": 1300e12}
"""Operations a second of large products there, about; by form of the weights."""
FORM_BYTES: Mapping[str, float] = {
    "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "int4": 0.5625, "mxfp4": 0.53125,
    "mxfp4_mxfp8": 0.53125,
}  # fmt: skip


def replayed(num_bytes: float, operations: float = 0.0, rate: float = MATRIX["bf16"]) -> float:
    """Returns the lower bound in seconds."""
    missed = from_memory_share(num_bytes)
    return LAUNCH + largest(1e-9 + operations / rate, num_bytes / FROM_L2, missed * num_bytes / READ)


def product(form: str, m: float, n: float, k: float) -> float:
    """Returns the bound for x [m, k] times weights [n, k], which come from memory: products were timed over weights
    that exceed the L2. Blocks of the result are computed whole, with at least 16 rows."""
    num_bytes = FORM_BYTES[form] * n * k + 2.0 * m * (n + k)
    return LAUNCH + largest(2.0 * max(16.0, m) * n * k / MATRIX[form], num_bytes / READ)


EXPERT_LAUNCHES: Mapping[str, tuple[float, float]] = {
    "nvfp4": (40e-6, 0.075e-6),
    "int4": (18e-6, 0.0),
    "mxfp4": (40e-6, 0.025e-6),
}
"""The time of everything but the products, and for each expert more; 10 us where nothing is said."""
NARROW: Mapping[str, float] = {"nvfp4": 190.0}
"""Rows of weights that an expert costs, however few it has; by form."""


def expert_layer(
    form: str, tokens: float, experts: float, top_k: float, hidden: float, inter: float, matrices: int = 3
) -> float:
    """Returns the bound for experts with evenly distributed tokens. `matrices`: of an expert, 2 without a gate."""
    pairs = tokens * top_k
    fixed, each = EXPERT_LAUNCHES.get(form, (4 * LAUNCH, 0.0))
    weights = min(experts, pairs) * matrices * math.hypot(inter, NARROW.get(form, 0.0)) * hidden * FORM_BYTES[form]
    activations = pairs * (inter * 6 + hidden * 4)
    rate = MATRIX.get(form, MATRIX["bf16"]) * 0.8
    return fixed + each * experts + replayed(weights + activations, 2.0 * matrices * pairs * hidden * inter, rate)


def decode(streams: float, context: float, group: float, row: float) -> float:
    """Returns the bound of decode attention. `streams`: requests times KV heads; `row`: bytes of a token and KV head;
    `group`: query heads that share it."""
    return replayed(streams * context * row, 2.0 * streams * max(16.0, group) * context * row, MATRIX["bf16"])


def prompt(streams: float, new: float, dims: float) -> float:
    """Returns the bound of prompt attention. `streams`: requests times query heads; `dims`: of a key and a value
    together."""
    pairs = streams * new * (new + 1) / 2
    return 2 * LAUNCH + replayed(streams * new * dims * 2.5, 2.0 * pairs * dims, 0.75 * MATRIX["bf16"])


def states(heads: float, requests: float, tokens: float) -> float:
    """Returns the bound of the gated delta rule: states of 128 x 128 in fp32, read and written; `tokens` of each
    request."""
    moved = heads * requests * (128 * 128 * 8 + tokens * 128 * 12)
    return replayed(moved, 16.0 * heads * requests * tokens * 128 * 128)

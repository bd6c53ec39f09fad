"""Reads the texts of records back: which op a question is about, and what a candidate launches. No torch."""

from __future__ import annotations

import re

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.kernels.measured.records import Question
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.tuning.ops import Experts, Linear

_LINEAR = re.compile(r"(\d+)x(\d+)")
_EXPERTS = re.compile(r"(\d+) experts, (\d+) of a token, 1 groups, (\d+)x(\d+) and (\d+)x(\d+)(, bias)?")


def product_of(question: Question) -> Linear | Experts | None:
    """Returns the product that a question is about; None: it is about something else."""
    scheme = question.scheme if question.scheme in SCHEMES else None
    if question.op == "linear" and scheme is not None and (sizes := _LINEAR.fullmatch(question.sizes)):
        return Linear(question.tokens, int(sizes[1]), int(sizes[2]), scheme)
    if question.op == "fused_moe" and (sizes := _EXPERTS.fullmatch(question.sizes)):
        experts, top_k, _, hidden, _, inter = (int(number) for number in sizes.groups()[:6])
        return Experts(question.tokens, experts, top_k, hidden, inter, scheme, sizes[7] is not None)
    return None


def config_of(candidate: str) -> TileConfig | None:
    """Returns the tile config with a candidate's name; None: it has no tiles."""
    variant, colon, tiles = candidate.partition(": ")
    if not colon:
        return None
    read = tuple(
        {name: int(number) for name, _, number in (each.rpartition(" ") for each in tile.split(", "))}
        for tile in tiles.split(" / ")
    )
    return TileConfig(float("inf"), variant, (read,))

"""Times of weights streamed without matrix instructions: for few pairs of experts or few rows. No torch.

The time is the maximum of reading them and of the counted instructions that multiply them (`instructions.py`). The
lanes issue 0.9 of their rate, as if 16 more warps ran on each SM: programs come in waves, and the last ones run alone.
Both numbers are fitted to 19 times of an H200 with seven schemes (lab/kernels/card/fit_h200.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_TILES, PairTile
from sglang.srt.layers.triton_ops.linear_tiles import FEW_TILES
from sglang.tuning.attention_model import largest
from sglang.tuning.cost_model import LANES_PER_SM
from sglang.tuning.instructions import streamed
from sglang.tuning.ops import Experts, Linear, weight_bytes
from sglang.tuning.rates import ceilings_of, rates_of

STREAMED = 0.92
"""The share of the best read that kernels reach which only stream weights, by the H200's: 4.1 of 4.48 TB/s."""
LAUNCH = 2.0e-6
"""The time of a small kernel in a CUDA graph."""
ISSUED, LAST_WARPS = 0.9, 16.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One launch: `weights` with a number of instructions each, and the warps that compute it."""

    num_bytes: float
    weights: float
    instructions: float
    warps: float


def streamed_seconds(streams: Collection[Stream], arch: ArchTraits) -> float:
    """Returns the seconds of products that read all weights once."""
    return sum(_seconds(stream, arch) for stream in streams)


def reading_seconds(num_bytes: float, arch: ArchTraits) -> float:
    """Returns the seconds to read bytes from the GPU's memory."""
    return num_bytes / (ceilings_of(arch).read * STREAMED)


def _seconds(stream: Stream, arch: ArchTraits) -> float:
    lanes = arch.num_sms * LANES_PER_SM * rates_of(arch).clock * ISSUED
    tail = 1.0 + LAST_WARPS * arch.num_sms / stream.warps
    issuing = stream.weights * stream.instructions / lanes * tail
    return LAUNCH + largest(reading_seconds(stream.num_bytes, arch), issuing)


def stream_pairs(op: Experts, arch: ArchTraits) -> tuple[Stream, Stream]:
    """Returns the streams of both products of experts whose pairs are computed one by one."""
    up_tile, down_tile = PAIR_TILES[pair_kind(op.scheme, arch.features)]
    counts, item = streamed(op.scheme, arch.name), weight_bytes(op.scheme)
    of_pair = float(op.hidden * op.intermediate)
    up_rows, up_warps = _cut(up_tile, op.scheme, op.hidden)
    down_rows, down_warps = _cut(down_tile, op.scheme, op.intermediate)
    gate_up, down = (op.matrices - 1.0) * op.pairs * of_pair, op.pairs * of_pair
    return (
        Stream(gate_up * item, gate_up, counts.gate_up, op.pairs * -(-op.intermediate // up_rows) * up_warps),
        Stream(down * item, down, counts.down, op.tokens * -(-op.hidden // down_rows) * down_warps),
    )


def stream_rows(op: Linear, arch: ArchTraits) -> tuple[Stream]:
    """Returns the streams of a product of few rows with quantized weights; each row has its own program, and weights
    come from the L2."""
    kind = pair_kind(op.scheme, arch.features)
    assert op.scheme is not None
    form = SCHEMES[op.scheme]
    packed = {"packed": "mx", "mxfp8": "mx"}.get(kind, kind)
    name = packed if packed in ("mx", "pairs", "planes") else "group128" if form.group[1] == 128 else "scaled"
    rows, warps = _cut(FEW_TILES[name, form.bits], op.scheme, op.cols)
    weights, count = float(op.tokens * op.rows * op.cols), streamed(op.scheme, arch.name).few_rows
    return (Stream(op.num_bytes, weights, count, op.tokens * -(-op.rows // rows) * warps),)


def pair_kind(scheme: str | None, features: Collection[str]) -> str:
    """Returns the kind that `ScaledProduct.pair_kind` returns, without importing it."""
    if scheme is None:
        return "16-bit"
    form, packed = SCHEMES[scheme], "block_scaled_mma" in features
    if form.bits == 4:
        if form.activation is not None and packed:
            return "packed"
        return "pairs" if form.element == "e2m1" and form.group[1] == 32 else "planes"
    return "mxfp8" if form.group[0] == 1 and form.group[1] else form.element


def _cut(tile: PairTile, scheme: str | None, cols: int) -> tuple[int, int]:
    """Returns the rows of weights and the warps of a program."""
    form = SCHEMES[scheme] if scheme else None
    multiple = 128 if form is not None and (form.bits == 4 or form.group == (128, 128)) else 16
    choice = tile.cut(cols, multiple)
    return choice["BLOCK_N"], choice["num_warps"]

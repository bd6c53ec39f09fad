"""Predicted time of SGLang's Triton kernels for a layer of experts on SM120, with the tiles it uses there.

The records of its tiles come from compiling releases 0.5.10 and 0.5.15 (which agree) for sm_120 with Triton 3.9.0, by
the recorder of `scripts/upstream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.attention_model import SHARED, from_memory_share, largest
from sglang.tuning.cost_model import SM120, Constants, GroupedProduct, estimate_blocks, even_blocks

_BF16, _FP8 = ("m16n8k16 bf16",), ("m16n8k32 e4m3",)
SMALL, LARGE, BLOCKS = tile(16, 32, 64, 1, 4, 3), tile(64, 64, 32, 8, 4, 3), tile(64, 128, 128, 32, 4, 3)
COSTS = {
    ("small", "gate_up"): (SMALL, TileRecord(12288, 36, 0, 0, _BF16)),
    ("small", "down"): (SMALL, TileRecord(12288, 38, 0, 0, _BF16)),
    ("large", "gate_up"): (LARGE, TileRecord(16384, 86, 0, 0, _BF16)),
    ("large", "down"): (LARGE, TileRecord(16384, 93, 0, 0, _BF16)),
    ("fp8_block", "gate_up"): (BLOCKS, TileRecord(49152, 255, 60, 24, _FP8)),
    ("fp8_block", "down"): (BLOCKS, TileRecord(49152, 254, 0, 0, _FP8)),
}


class ExpertLayer(Protocol):
    """Experts of one rank with evenly distributed tokens. `scheme`: "bf16" or "fp8_block"."""

    @property
    def scheme(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def pairs(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SideKernels:
    """All kernels except the two products: seconds of the launches, and the rate in bytes a second of their memory
    traffic."""

    launches_bf16: float = 4e-6
    launches_fp8: float = 18e-6
    rate: float = 1.9e12

    def seconds(self, layer: ExpertLayer) -> float:
        pairs, hidden, inter = layer.pairs, layer.hidden, layer.intermediate
        moved = pairs * 2 * inter * 2 + pairs * inter * 2 + pairs * hidden * 2 + layer.num_tokens * hidden * 2
        if layer.scheme == "bf16":
            return self.launches_bf16 + moved / self.rate
        return self.launches_fp8 + (moved + 3 * (layer.num_tokens * hidden + pairs * inter)) / self.rate


WARM: Mapping[str, tuple[SideKernels, Constants]] = {
    "bf16": (
        SideKernels(launches_bf16=6.3e-6),
        replace(SM120, latency=0.28e-6, prologue=0.68e-6, launch=2.6e-6, step_overhead=47e-9),
    ),
    "fp8_block": (
        SideKernels(launches_fp8=1.7e-6),
        replace(SM120, prologue=2.27e-6, launch=0.58e-6, step_overhead=4e-9),
    ),
}
"""Constants of layers whose weights stay in the L2 when a graph is replayed: fitted on 551 of them, 0.13 and 0.15 rms.
Each alone is not told by the data."""


SUM = 4e-6
"""The launch of the last sum, with what waits for it: where a token has one expert, the second product writes the
result itself. Told by layers with top 1: they take 3.5 to 5 us less in bf16, and 6 to 11 less in FP8 blocks."""
WEIGHTS = replace(SHARED, warm_mb=120.0, warm_width=0.25)
"""Weights of experts up to 120 MB are in the L2 (128 MiB) when a graph is replayed: keys of attention up to 102."""


def predict(layer: ExpertLayer, arch: ArchTraits, constants: Constants, side: SideKernels) -> float:
    """Returns the seconds with weights from memory."""
    products = sum(_product(layer, kind, arch, constants, 1.0) for kind in ("gate_up", "down"))
    return side.seconds(layer) + products - (SUM if layer.top_k == 1 else 0.0)


def predict_replayed(layer: ExpertLayer, arch: ArchTraits, constants: Constants, side: SideKernels) -> float:
    """Returns the seconds of replays with the same weights and routing, so that small weights are in the L2."""
    missed = from_memory_share(weight_bytes(layer), WEIGHTS)
    cold = predict(layer, arch, constants, side) if missed else 0.0
    if missed == 1.0:
        return cold
    warm_side, warm = WARM[layer.scheme]
    products = sum(_product(layer, kind, arch, warm, 0.0) for kind in ("gate_up", "down"))
    alone = SUM if layer.top_k == 1 else 0.0
    return missed * cold + (1.0 - missed) * (warm_side.seconds(layer) + products - alone)


def weight_bytes(layer: ExpertLayer) -> int:
    """Returns the bytes of the chosen experts."""
    item = 2 if layer.scheme == "bf16" else 1
    return min(layer.num_experts, layer.pairs) * 3 * layer.intermediate * layer.hidden * item


def _product(layer: ExpertLayer, kind: str, arch: ArchTraits, constants: Constants, cold: float) -> float:
    name = layer.scheme if layer.scheme != "bf16" else "small" if layer.num_tokens <= layer.num_experts else "large"
    choice, record = COSTS[name, kind]
    item = 2.0 if layer.scheme == "bf16" else 1.0
    gate_up = kind == "gate_up"
    product = GroupedProduct(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        columns=2 * layer.intermediate if gate_up else layer.hidden,
        depth=layer.hidden if gate_up else layer.intermediate,
        width=1,
        x_bytes=item,
        w_bytes=item,
        out_bytes=2.0,
        scaled_every=128 if layer.scheme == "fp8_block" else 0,
        gathers_tokens=gate_up,
    )
    experts, blocks = even_blocks(layer.pairs, layer.num_experts, choice["BLOCK_M"])
    estimate = estimate_blocks(product, layer.num_tokens, choice, record, arch, experts, blocks, constants)
    assert estimate is not None, "this tile ran on the card"
    if cold == 1.0:
        return estimate.total
    return constants.launch + largest(estimate.chain, estimate.memory * cold, estimate.l2)

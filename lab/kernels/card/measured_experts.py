"""Timings of SGLang's Triton experts on a real RTX PRO 6000 Server, as the published tables hold them.

The tables are those of ai-dynamo/aiconfigurator (Apache-2.0), `systems/data/rtx_pro_6000_server`, in a directory
`moe/sglang/VERSION/moe_perf.parquet`; they are not part of this project. A row is a layer without the router's product:
top-k, grouping, quantization, gate_up, gate, quantization, down, sum, in a CUDA graph that is replayed on the same
weights and the same routing.

What is taken: routing that is exactly even, whole experts or tensor shards of them, the tiles that those releases take
on this card without a tuning file, and layers whose touched weights do not stay in the L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WARM_BYTES = 192 << 20
"""Weights of fewer bytes than this may come from the L2 when a graph is replayed."""
VERSIONS = ("0.5.10", "0.5.14")


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Experts of one rank, and the seconds that `num_tokens` take."""

    scheme: str  # "bf16" or "fp8_block"
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    seconds: float

    @property
    def pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def touched_bytes(self) -> int:
        """Of the weights of all experts that were chosen."""
        item = 2 if self.scheme == "bf16" else 1
        return min(self.num_experts, self.pairs) * 3 * self.intermediate * self.hidden * item

    @property
    def group(self) -> tuple[int, int, int]:
        """Layers of one model, whatever its shards: left out together when a fit is judged."""
        return self.hidden, self.num_experts, self.top_k


def read(tables: Path) -> list[MeasuredLayer]:
    """In a fixed order; later versions replace rows of earlier ones. FileNotFoundError names a missing table."""
    import pandas  # a tool's dependency

    rows: dict[MeasuredLayer, MeasuredLayer] = {}
    for version in VERSIONS:
        path = tables / "moe" / "sglang" / version / "moe_perf.parquet"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: --tables names the directory that holds moe/, attention/, ...")
        for layer in _layers(pandas.read_parquet(path), version):
            rows[dataclasses.replace(layer, seconds=0.0)] = layer
    return sorted(rows.values(), key=dataclasses.astuple)


def _layers(table, version: str) -> Iterator[MeasuredLayer]:  # type: ignore[no-untyped-def]
    schemes = {"bfloat16": "bf16", "fp8_block": "fp8_block"}
    table = table[
        (table.kernel_source == "sglang_fused_moe_triton")
        & (table.distribution == "balanced")
        & (table.moe_ep_size == 1)
        & table.moe_dtype.isin(schemes)
    ]
    for row in table.itertuples():
        layer = MeasuredLayer(
            schemes[row.moe_dtype],
            int(row.num_tokens),
            int(row.hidden_size),
            int(row.inter_size) // int(row.moe_tp_size),
            int(row.num_experts),
            int(row.topk),
            float(row.latency) * 1e-3,
        )
        if layer.touched_bytes > WARM_BYTES and not _other_kernel(layer, version):
            yield layer


def _other_kernel(layer: MeasuredLayer, version: str) -> bool:
    """Rows of something else than the kernel with its default tile and even routing."""
    if version == "0.5.14" and (layer.num_experts, layer.hidden) == (256, 7168):
        return True  # grouped top-k: not even
    if layer.scheme == "bf16":
        return (layer.num_experts, layer.intermediate) == (256, 512)  # has a tuning file
    return layer.intermediate % 64 != 0  # scales do not line up; some of these rows did not compute

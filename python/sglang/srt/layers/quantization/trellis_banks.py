"""The experts of EXL3 in plain torch: the reference of the kernels, and the CPU's path."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from sglang.srt.configs.activation import Activation
from sglang.srt.configs.trellis import BLOCK, Trellis
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.moe.expert_weights import Waves
from sglang.srt.layers.moe.output_norm import OutputNorm, normed_outputs
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.native_ops import gated
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.trellis import TrellisModule, multiply


@dataclass(frozen=True, slots=True)
class TrellisBank:
    """One projection of a rank's experts. `tiles` int16 [E, in / 16, out / 16, words]; `suh` [E, in] and `svh` [E, out]
    float16, zero behind `rows` outputs and `cols` inputs; both sizes are padded to whole blocks. `places` as of
    `places_of`."""

    form: Trellis
    tiles: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    rows: int
    cols: int
    places: torch.Tensor

    def expert(self, number: int) -> TrellisModule:
        """Returns one expert's matrix."""
        return TrellisModule(self.form, self.tiles[number], self.suh[number], self.svh[number], 0, self.rows)


def places_of(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Returns, int32 [blocks, 3], where the first of a block's columns goes, and which outputs there are."""
    return torch.tensor([(begin, 0, rows) for begin in range(0, columns, BLOCK)], dtype=torch.int32, device=device)


Banks = tuple[TrellisBank, ...]
"""The projections of one product: gate and up, or down."""


def fused_moe(
    x: Activations,
    w13: Banks,
    w2: Banks,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    configs: TileConfigs,
    features: Collection[str] = (),
    waves: Waves | None = None,
    adapters: PairAdapters | None = None,
    norm: OutputNorm | None = None,
) -> torch.Tensor:
    """Returns the experts' weighted outputs [T, H] for x [T, H], weights and ids [T, k]; an id of -1 adds nothing."""
    assert waves is None and adapters is None
    rows, (down,) = values_of(x), w2
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        token, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        up = torch.cat([multiply(rows[token], bank.expert(expert)) for bank in w13], -1)
        y = normed_outputs(multiply(gated(up, activation), down.expert(expert)), norm)
        out.index_add_(0, token, y * topk_weights[token, place, None].float())
    return out.to(rows.dtype)

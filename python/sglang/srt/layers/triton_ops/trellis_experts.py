"""Experts in EXL3 by routing: one launch a projection. Reference: `layers.quantization.trellis_banks.fused_moe`.

A pair of a token and an expert has scales of its own, so that inputs are transformed for each pair. Products take
blocks of pairs with one expert, and decode its tiles in registers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sglang.srt.configs.activation import Activation
from sglang.srt.configs.trellis import CHUNK_TOKENS, TILE
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.moe.expert_weights import Waves
from sglang.srt.layers.moe.fused_moe_triton.align import ExpertBlocks, align
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import combine
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.trellis_banks import Banks, TrellisBank
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.activation import activate
from sglang.srt.layers.triton_ops.trellis import BLOCK_N, product_kernel
from sglang.srt.layers.triton_ops.trellis_products import (
    MAX_ROWS,
    PRODUCT_TILE,
    kind_of,
    numbers_of,
    transform_inputs,
    transform_outputs,
)

MANY_ROWS = 64
"""Pairs of a block where an expert has at least half as many on average."""


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
    out = torch.empty((len(rows), down.rows), dtype=rows.dtype, device=rows.device)
    for begin in range(0, len(rows), CHUNK_TOKENS):
        chunk = slice(begin, begin + CHUNK_TOKENS)
        _add_chunk(rows[chunk], w13, down, topk_weights[chunk], topk_ids[chunk], activation, out[chunk], norm)
    return out


def _add_chunk(
    x: torch.Tensor,
    w13: Banks,
    down: TrellisBank,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    out: torch.Tensor,
    norm: OutputNorm | None,
) -> None:
    top_k, num_experts = topk_ids.shape[1], len(down.suh)
    block_m = MANY_ROWS if 2 * topk_ids.numel() >= MANY_ROWS * num_experts else MAX_ROWS
    blocks, experts = align(topk_ids, num_experts, block_m), topk_ids.reshape(-1)
    up = torch.empty((len(experts), sum(bank.rows for bank in w13)), dtype=x.dtype, device=x.device)
    begin = 0
    for bank in w13:
        _multiply(x, bank, experts, top_k, blocks, block_m, up[:, begin : begin + bank.rows])
        begin += bank.rows
    pair_out = torch.empty((len(experts), down.rows), dtype=x.dtype, device=x.device)
    _multiply(activate(up, activation), down, experts, 1, blocks, block_m, pair_out)
    combine(pair_out, topk_weights, topk_ids, out, norm)


def _multiply(
    x: torch.Tensor,
    bank: TrellisBank,
    experts: torch.Tensor,
    per_row: int,
    blocks: ExpertBlocks,
    block_m: int,
    out: torch.Tensor,
) -> None:
    """Fills out [pairs, rows] with x [pairs / per_row, cols] times each pair's expert."""
    num_pairs, (size, columns) = len(experts), (bank.suh.shape[1], bank.svh.shape[1])
    inner = torch.empty((1, num_pairs, size), dtype=torch.float16, device=x.device)
    transform_inputs(x, bank.suh, inner, experts, per_row)
    dtype = torch.float32 if block_m == MAX_ROWS else torch.float16
    parts, tiles = torch.empty((1, num_pairs, columns), dtype=dtype, device=x.device), bank.tiles.view(torch.int32)
    product_kernel[(columns // BLOCK_N.value, blocks.max_blocks)](
        inner, tiles, parts, blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks, num_pairs, size,
        columns // TILE, columns, 0, size, tiles[0].numel(), *numbers_of(bank.form),
        BLOCK_M=block_m, ROUTED=True, **kind_of(bank.form), **PRODUCT_TILE,
        **pdl.options(),
    )  # fmt: skip
    transform_outputs(parts, bank.svh, bank.places, out, None, experts)

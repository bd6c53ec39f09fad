"""Routed experts with e2m1 weights and e4m3 activations, multiplied without conversion by sgl-kernel's products.

These serve steps with many pairs, which are bound by tensor cores. Decode steps, bound by reading weights, and all work
around the two products use the kernels of `fused_moe_triton`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.activation import SILU, Activation, gate_constants
from sglang.srt.kernels.tile_configs import TileConfigs, config_for
from sglang.srt.layers.moe.expert_weights import ExpertWeights, Waves
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as streamed
from sglang.srt.layers.moe.fused_moe_triton.align import ExpertBlocks
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import matrix_of
from sglang.srt.layers.moe.fused_moe_triton.tiles import MIXED
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.triton_ops.quantize import quantize_activation

if TYPE_CHECKING:
    from sm120_sgl_kernel import Library

GROUP_M = 8
"""Row blocks that use a block of weight columns while it is in the L2 cache."""


def fused_moe(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    configs: TileConfigs,
    features: Collection[str] = (),
    waves: Waves | None = None,
    adapters: PairAdapters | None = None,
    norm: OutputNorm | None = None,
) -> torch.Tensor:
    """Computes the experts like `fused_moe_triton.fused_moe`, for weights of the scheme mxfp4_mxfp8 as published. Steps
    for which the tile configs do not choose sgl-kernel use Triton, and so do steps with LoRA adapters."""
    config = config_for(configs, len(topk_ids))
    if config.variant != MIXED or adapters is not None:
        return streamed.fused_moe(
            x, w13, w2, topk_weights, topk_ids, activation, configs, features, waves, adapters, norm
        )
    block_m = config.tiles[0]["BLOCK_M"]
    (num_tokens, top_k), intermediate = topk_ids.shape, w13.rows // 2
    inter = torch.empty((num_tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    pair_out = torch.empty((num_tokens * top_k, w2.rows), dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for up, down, ids in ((w13, w2, topk_ids),) if waves is None else waves:
        blocks = streamed.grouped_pairs(ids, up, block_m)
        _multiply(x, up, inter, top_k, blocks, block_m, activation)
        _multiply(inter, down, pair_out, 1, blocks, block_m, None)
    streamed.combine(pair_out, topk_weights, topk_ids, out, norm)
    return out


def _multiply(
    x: torch.Tensor,
    w: ExpertWeights,
    out: torch.Tensor,
    pairs_per_row: int,
    blocks: ExpertBlocks,
    block_m: int,
    activation: Activation | None,
) -> None:
    """Fills out [pairs, columns] = x[pair // pairs_per_row] @ w[its expert]^T, with the gate applied if there is an
    activation. Rows of pairs without an expert are not written."""
    assert w.scheme is not None and w.scheme.name == "mxfp4_mxfp8" and w.plane_cols is None, "weights as published"
    data, scale = quantize_activation(x, w.scheme)
    matrix, gate, library = matrix_of(w), gate_constants(activation or SILU), _library()
    assert w.bias is None or w.bias.dtype == out.dtype, f"biases must be {out.dtype}, not {w.bias.dtype}"
    row, scale_row, expert, scale_expert = matrix.strides
    args = library.MixedArguments(
        x=data.data_ptr(), x_scale=scale.data_ptr(), w=matrix.data.data_ptr(), w_scale=matrix.scale.data_ptr(),
        bias=0 if w.bias is None else w.bias.data_ptr(), out=out.data_ptr(),
        sorted_pairs=blocks.sorted_pairs.data_ptr(), block_expert=blocks.block_expert.data_ptr(),
        num_blocks=blocks.num_blocks.data_ptr(),
        x_stride=data.stride(0), xs_stride=scale.stride(0),
        w_stride=row, ws_stride=scale_row, w_expert_stride=expert, ws_expert_stride=scale_expert,
        num_pairs=out.shape[0], pairs_per_row=pairs_per_row, columns=out.shape[1], depth=w.cols, group_m=GROUP_M,
        is_half=out.dtype == torch.float16, alpha=gate["ALPHA"], offset=gate["OFFSET"], limit=gate["LIMIT"],
    )  # fmt: skip
    launch = library.mixed_moe_down if activation is None else library.mixed_moe_gate_up
    launch(args, block_m, blocks.max_blocks, _stream(x))


def _library() -> Library:
    from sm120_sgl_kernel import installed

    return installed()


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
